/* round_calls: what a round does in a channel, as calls of Python that cost little. Nothing here decides anything: each call is the
 * quick form of something that Python has, too, and whatever is out of the ordinary it leaves as it found it, for Python to judge.
 *
 * The functions are Python's, so they are not listed here; roundcalls_functions returns them by name, and native/round_calls.py says what
 * each takes. Written for Python's limited API of 3.11: one build serves every later Python.
 */
#ifndef FARSPARK_ROUND_CALLS_H
#define FARSPARK_ROUND_CALLS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>
#include <stdint.h>

#define ROUNDCALLS_API __attribute__((visibility("default")))

/* Of the functions together: any change of them is another version. */
#define ROUNDCALLS_VERSION 6u
#define ROUNDCALLS_NEVER INT64_MAX

ROUNDCALLS_API uint32_t roundcalls_version(void);
/* SHA-256 of the sources in hex, "" for a build that does not say. */
ROUNDCALLS_API const char *roundcalls_build(void);
/* A new dict of functions by name; with the GIL held. */
ROUNDCALLS_API PyObject *roundcalls_functions(void);

/* A round of an engine's in which nothing is out of the ordinary, as far as that is known before its data is there: every request
 * wants drafts, goes on where the worker's rows of it end, and has one run of packed rows. native/round_calls.py packs it. */
typedef struct roundcalls_request {
    uint32_t slot, generation, first_pos, k_window;
} roundcalls_request;

/* hostflag_publish and hostflag_wait_gathered. */
typedef int roundcalls_publish(void *page, uint32_t round, const void *reply, uint32_t bytes);
typedef int roundcalls_wait(void *page, uint32_t round, int64_t spin_ns, int64_t nap_ns, int64_t deadline_ns);

typedef struct roundcalls_round {
    uint64_t session, step_id;
    roundcalls_publish *publish;
    roundcalls_wait *wait;
    void *page;
    const unsigned char *record; /* what the host has said of the round, as it must still be */
    const int32_t *meta;         /* what the device says of it: first position, rows, anchor token, whether drafts are wanted */
    const unsigned char *rows;   /* packed, in the order of the requests */
    int32_t *reply;              /* the result, as engine/result.py has it */
    uint64_t rows_room;          /* bytes that may lie at `rows` */
    int64_t timeout_ns;          /* from the sending on */
    int64_t spin_ns, nap_ns;     /* of the wait */
    uint32_t round, requests, row_bytes, context;
    uint32_t max_rows; /* of a STEP */
    uint32_t slots, num_drafts, n_out, vocab_size, depth;
    uint32_t reply_bytes, reserved;
    roundcalls_request of[];
} roundcalls_round;

/* The head of its STEP in `head`, of `room` bytes, for a private copy of the metadata; the bytes of the head and of the rows behind
 * it. 0: something is out of the ordinary. */
size_t roundcalls_write_step(const roundcalls_round *round, uint64_t sequence, const int32_t *meta, unsigned char *head, size_t room,
                             size_t *rows_bytes_p);
/* Whether the frame is its faultless answer with drafts for everybody; then `round->reply` is the whole result. */
int roundcalls_read_drafts(const roundcalls_round *round, uint64_t sequence, const unsigned char *frame, size_t bytes);

/* Of step_calls.c and submit_calls.c; each ends with NULL. */
extern PyMethodDef roundcalls_of_steps[], roundcalls_of_submits[];
int roundcalls_prepare_steps(void);
int roundcalls_prepare_submits(void);

#endif
