/* hostflag: one round at a time handed from a device stream to a CPU thread and back, through words in host memory.
 *
 * A stream that waits for a reply is parked until somebody stores `released`. Who may store it, and who decides that, is all
 * that this helper is about. There is no CUDA in it and no Python: it can end a wait while an interpreter or a driver lock is
 * stuck.
 *
 * THE PAGE
 *
 *   word       written by                     means
 *   gathered   the stream, in order           the data of this round lies in host memory
 *   claimed    whoever settles the round      one compare-and-swap: exactly one side settles a round
 *   released   the holder of the claim        the stream may go on past this round; never goes backwards
 *   consumed   the stream, in order           the reply of this round was read by the device
 *   reply      the holder of the claim        read by the stream between released and consumed
 *
 * Every word has 128 bytes of its own: neighbours never share a cache line, nor the pair of lines that x86 fetches together.
 * Round numbers are 32 bits and cyclic: `a` has reached `b` if a - b, as a signed number, is not negative; that is how
 * cuStreamWaitValue32 compares too (CU_STREAM_WAIT_VALUE_GEQ). `claimed` is 64 bits wide, round in the low half, the claiming
 * process in the high half (0: the page's owner), so that one compare-and-swap says both.
 *
 * THE STREAM, for round t and in this order
 *
 *   1. writes its data into host memory           3. waits until released has reached t
 *   2. writes gathered = t                        4. reads the reply, then writes consumed = t
 *
 * hostflag_submit hands all of it to the device's driver, in three calls where the device's kernels do the first and the last
 * step themselves, and in more where they are copies. What makes each order hold is said at hostflag_device.
 *
 * The order is what makes one reply buffer enough: gathered = t says that the replies of all rounds before t were read.
 * The CPU never changes gathered and consumed with a read-modify-write, since the device writes them; hostflag_gather and
 * hostflag_consume stand in for a stream where there is none, and nothing else may write these two.
 *
 * WHO MAY END A WAIT
 *
 *   a proxy        hostflag_publish, hostflag_fail: the round that it took, if nobody else settled it
 *   the watchdog   a round that was gathered but not claimed within the deadline; everything, if the followed process is dead
 *   the owner      hostflag_fail for one round, hostflag_fail_all for everything that is pending or may still come
 *
 * A claim is held for as long as it takes to copy the reply. A thread of the owner's process always gets that done. Another
 * process may die or be stopped in between; then only its death, seen through its pidfd, makes the reply buffer safe to touch:
 * the watchdog kills a followed process that holds a claim past the deadline, and finishes its round once it is gone.
 *
 * AFTER hostflag_fail_all the words stand far ahead (HOSTFLAG_FAR rounds): rounds that were already enqueued pass and read a
 * reply of zeros. To go on, number the next round `far + 1`, once there is somebody to serve it; that is later than everything
 * before it, so nothing is reset and nobody who comes late can undo anything. HOSTFLAG_FAR is a multiple of 64: a table kept
 * by round modulo 64 goes on in order.
 *
 * OWNERSHIP
 *
 * A handle belongs to the process that made it. In a forked child every call on it returns HOSTFLAG_CLOSED, and a private
 * page is not there at all. A handle stays valid for ever: a call after hostflag_page_destroy returns HOSTFLAG_CLOSED. All
 * functions may be called from any thread unless they say otherwise; those that may block say for how long.
 */
#ifndef FARSPARK_HOSTFLAG_H
#define FARSPARK_HOSTFLAG_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HOSTFLAG_API __attribute__((visibility("default")))

/* Of the functions, the structures and the page's layout together: any change of them is another version. */
#define HOSTFLAG_VERSION 3u
/* How far hostflag_fail_all goes: 18 hours of rounds of a millisecond, and a thirty-second of half the cycle, so that somebody
 * who comes late is still earlier after thirty of them. */
#define HOSTFLAG_FAR (UINT32_C(1) << 26)
#define HOSTFLAG_EVENTS 64u
#define HOSTFLAG_MAX_REPLY_BYTES (UINT32_C(1) << 26)

typedef struct hostflag_page hostflag_page;

/* What happened (0 and above), or what is wrong (below 0: outputs are untouched and the page is as it was). */
typedef enum hostflag_status {
    HOSTFLAG_OK = 0,
    HOSTFLAG_LOST = 1,      /* somebody else settled this round; nothing was written */
    HOSTFLAG_LATE = 2,      /* released had already reached this round; it was left where it is */
    HOSTFLAG_FINISHED = 3,  /* gathered, and settled by somebody else: keep the books, send nothing */
    HOSTFLAG_ENDED = 4,     /* everything was failed ahead and this round was not gathered: there is nothing to wait for */
    HOSTFLAG_TIMED_OUT = 5, /* the state that was waited for has not come */
    HOSTFLAG_FORCED = 6,    /* done, but without waiting for those who may still use the reply buffer */
    HOSTFLAG_CLOSED = 7,    /* the page was destroyed, or the handle is another process's */
    HOSTFLAG_BUSY = 8,      /* calls on this page have not returned yet; try again */

    HOSTFLAG_INVALID = -1,       /* an argument that makes no sense */
    HOSTFLAG_NOT_GATHERED = -2,  /* a round cannot be settled before its data is there */
    HOSTFLAG_NOT_OWNER = -3,     /* only the process that made the page may do this */
    HOSTFLAG_RUNNING = -4,       /* the watchdog runs already */
    HOSTFLAG_PENDING = -5,       /* a stream is parked on this page: fail the round first */
    HOSTFLAG_OTHER_VERSION = -6, /* the memory holds no page of this version */
    HOSTFLAG_SYSTEM = -7,        /* the system refused; errno says why */
    HOSTFLAG_REFUSED = -8,       /* the device's driver refused a call of hostflag_submit; the round says which, and why */
} hostflag_status;

/* HOSTFLAG_VERSION of the library; a loader compares it before anything else is called. */
HOSTFLAG_API uint32_t hostflag_version(void);
/* SHA-256 of the sources in hex, as given at compile time; "" if none was. Static. */
HOSTFLAG_API const char *hostflag_build(void);
/* A sentence for a status. Static; never NULL. */
HOSTFLAG_API const char *hostflag_status_text(int status);

/* ---- the page ---- */

/* Bytes that a page with a reply of `reply_bytes` takes in memory which the caller provides. 0 if reply_bytes is 0 or above
 * HOSTFLAG_MAX_REPLY_BYTES. */
HOSTFLAG_API size_t hostflag_page_bytes(uint32_t reply_bytes);

/* A page in private memory of its own: whole pages, locked where that is allowed (see hostflag_info), kept out of forked
 * children. All words stand at `start`, so the first round is start + 1. The caller owns the page.
 * OK, INVALID, SYSTEM. */
HOSTFLAG_API hostflag_status hostflag_page_create(uint32_t reply_bytes, uint32_t start, hostflag_page **page_p);

/* The same in memory of the caller's, e.g. a part of a memfd that another process maps too. `memory` is a multiple of 128 and
 * has room for hostflag_page_bytes(reply_bytes); it stays the caller's and must stay mapped until hostflag_page_destroy.
 * Whoever formats it owns the page. Nobody may have it attached yet.
 * OK, INVALID, SYSTEM. */
HOSTFLAG_API hostflag_status hostflag_page_format(void *memory, size_t bytes, uint32_t reply_bytes, uint32_t start,
                                                  hostflag_page **page_p);

/* A page that another process formatted, for its proxy. The handle may wait, claim, publish and fail rounds; fail_all and the
 * watchdog are the owner's. `memory` as above.
 * OK, INVALID, OTHER_VERSION, SYSTEM. */
HOSTFLAG_API hostflag_status hostflag_page_attach(void *memory, size_t bytes, hostflag_page **page_p);

/* Stops the watchdog and gives the memory back. Waits that are still in a call return CLOSED; they are given `patience_ns`,
 * after which BUSY is returned, the memory stays, and destroy may be called again. NULL and a second call are fine.
 * The caller has seen to it that no stream uses the page any more, and has unregistered it from the driver.
 * OK, BUSY, PENDING (the owner's page with a round gathered but not released: the stream would be parked for good). */
HOSTFLAG_API hostflag_status hostflag_page_destroy(hostflag_page *page, int64_t patience_ns);

/* Where things are, for whoever registers the memory with a driver and enqueues stream operations on the words. */
typedef struct hostflag_info {
    uint64_t address;         /* of the page; registering [address, address + bytes) covers everything */
    uint64_t bytes;           /* a multiple of the system's page size for a page made by hostflag_page_create */
    uint32_t gathered_offset; /* from address, of the 32-bit word; likewise below */
    uint32_t claimed_offset;  /* its low 32 bits are the round */
    uint32_t released_offset;
    uint32_t consumed_offset;
    uint32_t reply_offset;
    uint32_t reply_bytes;
    int32_t lock_errno;     /* 0: locked in memory; else why not (ENOMEM or EPERM: RLIMIT_MEMLOCK) */
    int32_t dontfork_errno; /* 0: not in forked children; ENOTSUP for memory of the caller's */
    uint32_t is_owner;
} hostflag_info;

/* OK, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_page_info(hostflag_page *page, hostflag_info *info_p);

typedef struct hostflag_words {
    uint32_t gathered;
    uint32_t claimed;
    uint32_t claimant; /* 0: the owner's process; else the process id that the other one has in its own namespace */
    uint32_t released;
    uint32_t consumed;
} hostflag_words;

/* The words one after the other (claimed first, gathered last), each with acquire order: not one instant, but a claim that
 * is in it is not ahead of `gathered` unless everything was failed. OK, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_page_words(hostflag_page *page, hostflag_words *words_p);

/* ---- the proxy ---- */

/* Waits until `gathered` has reached `round` (acquire: what was copied before it can be read).
 * The first `spin_ns` are spent spinning, after that with sleeps of `nap_ns`; nap_ns 0 spins to the end. `deadline_ns` is on
 * CLOCK_MONOTONIC; a state that is there already is returned even if it has passed.
 * After a fail_all the owner says where the numbers go on: counting there would take HOSTFLAG_FAR rounds that are FINISHED.
 * Ends nothing. OK, FINISHED, ENDED, TIMED_OUT, CLOSED, INVALID. */
HOSTFLAG_API hostflag_status hostflag_wait_gathered(hostflag_page *page, uint32_t round, int64_t spin_ns, int64_t nap_ns,
                                                    int64_t deadline_ns);

/* Claims `round`, copies the reply into the page and releases the round, in one call that takes no lock and never blocks.
 * `bytes` is the page's reply_bytes. Order: acquire-release on claimed, then the copy, then release on released.
 * Ends the stream's wait for this round.
 * OK, LOST, LATE (a forced fail_all overtook the copy), NOT_GATHERED, CLOSED, INVALID. */
HOSTFLAG_API hostflag_status hostflag_publish(hostflag_page *page, uint32_t round, const void *reply, uint32_t bytes);

/* The same with a reply of zeros. OK, LOST, LATE, NOT_GATHERED, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_fail(hostflag_page *page, uint32_t round);

/* The two halves, for tests and self-tests: whoever got OK from claim may write the reply, must call release, and must not
 * stay in between. Claim: acquire-release; OK, LOST, NOT_GATHERED, CLOSED. Release: release; OK, LATE, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_claim(hostflag_page *page, uint32_t round);
HOSTFLAG_API hostflag_status hostflag_release(hostflag_page *page, uint32_t round);

/* ---- the owner ---- */

/* Fails every round that is pending or may still come, at least to `newest`, the newest round that was given to a stream (one
 * that the device has passed will do, if no round was numbered since the last fail_all): claims far ahead at once, waits for a
 * copy in progress and for the stream to have read a reply that was released, then fills the reply with zeros and releases far
 * ahead.
 * It waits at most `patience_ns`, and not at all while a stream is parked on an unclaimed round or the claim is a dead
 * process's. After that it goes on all the same, since a mixed reply costs drafts and a parked stream costs everything: FORCED.
 * A second caller first waits for the one before it; the watchdog has a patience of 100 ms when a process died.
 * `far_p` (may be NULL) gets the round at which the words then stand; the next round is far + 1. A second call with the same
 * `newest` changes nothing.
 * OK, FORCED, NOT_OWNER, CLOSED, INVALID. */
HOSTFLAG_API hostflag_status hostflag_fail_all(hostflag_page *page, uint32_t newest, int64_t patience_ns, uint32_t *far_p);

/* Says which process serves the page: `pidfd` is duplicated and stays the caller's; -1 for none. Its death ends everything as
 * fail_all does; the watchdog sees to it within 5 ms, and again if a round was numbered after. Without this a claim of a process
 * that died is only ended by fail_all, after its patience. Before another process is followed the one before has ended and
 * fail_all was called, since a claim of the old one would be laid to the new one. OK, NOT_OWNER, CLOSED, SYSTEM. */
HOSTFLAG_API hostflag_status hostflag_follow(hostflag_page *page, int pidfd);

/* ---- the engine's side of a round, in one call ----
 *
 * Still no CUDA in here: the caller names the driver's functions, as the CUDA driver declares them (a handle is an address, 0 is
 * success). What they are given is not looked at. */

typedef int hostflag_launch_call(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                                 void **extra);
typedef int hostflag_to_host_call(void *to, uint64_t from, size_t bytes, void *stream);
typedef int hostflag_to_device_call(uint64_t to, const void *from, size_t bytes, void *stream);
typedef int hostflag_value_call(void *stream, uint64_t address, uint32_t value, unsigned flags);

/* One operation on a word, laid out as CUstreamBatchMemOpParams. */
typedef struct hostflag_operation {
    uint32_t kind; /* CU_STREAM_MEM_OP_WAIT_VALUE_32 or CU_STREAM_MEM_OP_WRITE_VALUE_32 */
    uint32_t reserved0;
    uint64_t address;
    uint64_t value;
    uint32_t flags;
    uint32_t reserved1;
    uint64_t reserved2[2];
} hostflag_operation;

#define HOSTFLAG_WAIT_VALUE 1u
#define HOSTFLAG_WRITE_VALUE 2u

typedef int hostflag_batch_call(void *stream, unsigned count, hostflag_operation *operations, unsigned flags);

/* The kernel that takes the reply is launched with one block of so many threads, and has these parameters in this order: the
 * reply's address and reply_to, 64 bits each; the number of 32-bit words to copy, 32 bits; the address of `consumed`, 64 bits;
 * the round, 32 bits. */
#define HOSTFLAG_TAKE_REPLY_THREADS 512u

/* Fixed for as long as the page is used with one device.
 *
 * Order 1-2: a stream's write of a value is preceded by a fence of the whole system over everything that was before it in the
 * stream, kernels that write host memory included (flags 0), so whoever sees `gathered` (acquire) sees the data.
 * Order 2-3: of one batch the operations are enqueued in the order of the array, and a stream does one after the other.
 * Order 3-4: what is behind a wait in a stream begins once it is over. A kernel that takes the reply reads it with loads of the
 * whole system's scope, which no older copy in a cache answers; it writes `consumed` with a release of that scope behind a
 * barrier of all its threads, so whoever sees `consumed` may write the reply anew. */
typedef struct hostflag_device {
    hostflag_launch_call *launch;       /* cuLaunchKernel; NULL if nothing is ever launched */
    hostflag_to_host_call *to_host;     /* cuMemcpyDtoHAsync */
    hostflag_to_device_call *to_device; /* cuMemcpyHtoDAsync */
    hostflag_value_call *write_value;   /* cuStreamWriteValue32 */
    hostflag_value_call *wait_value;    /* cuStreamWaitValue32: until the word has reached the value, cyclic (flags 0) */
    hostflag_batch_call *batch;         /* cuStreamBatchMemOp; NULL: the two above are called one after the other */
    void *take_reply;                   /* the kernel's handle; NULL: a copy and a write. reply_bytes is a multiple of 4 */
    uint64_t page;                      /* the page's address as the device has it */
} hostflag_device;

typedef struct hostflag_launch {
    void *function;
    void **parameters; /* addresses of its parameters; read during the call */
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t shared_bytes;
} hostflag_launch;

typedef struct hostflag_copy {
    uint64_t to;   /* host memory */
    uint64_t from; /* device memory */
    uint64_t bytes;
} hostflag_copy;

typedef enum hostflag_call {
    HOSTFLAG_CALL_NONE = 0,
    HOSTFLAG_CALL_LAUNCH = 1,
    HOSTFLAG_CALL_COPY = 2,
    HOSTFLAG_CALL_WRITE_GATHERED = 3,
    HOSTFLAG_CALL_WAIT_RELEASED = 4,
    HOSTFLAG_CALL_COPY_REPLY = 5,
    HOSTFLAG_CALL_WRITE_CONSUMED = 6,
    HOSTFLAG_CALL_GATHERED_AND_WAIT = 7, /* in one batch */
    HOSTFLAG_CALL_TAKE_REPLY = 8,
} hostflag_call;

typedef struct hostflag_round {
    void *stream;
    const hostflag_launch *launch; /* ahead of everything else; NULL: nothing is launched */
    uint64_t reply_to;             /* device memory of reply_bytes */
    uint32_t round;
    uint32_t num_copies;
    uint32_t failed_p; /* out: a hostflag_call */
    int32_t result_p;  /* out: what that call returned */
    hostflag_copy copies[];
} hostflag_round;

/* Enqueues round `round->round`, in this order: the launch, the copies, gathered, the wait, the reply, consumed.
 * The first refusal ends it. What was enqueued before stays enqueued: nothing waits for the round if the refusal came from
 * anything up to HOSTFLAG_CALL_WRITE_GATHERED, and gathered is never written with a copy missing; from HOSTFLAG_CALL_WAIT_RELEASED
 * on the stream may be parked, or nobody may take note of `consumed`, so the caller must end the rounds with hostflag_fail_all.
 * The launch may write into host memory itself; what it does not write is copied.
 * Blocks no longer than the driver does. One thread, the one that enqueues on this stream.
 * OK, REFUSED, NOT_OWNER, CLOSED, INVALID. */
HOSTFLAG_API hostflag_status hostflag_submit(hostflag_page *page, const hostflag_device *device, hostflag_round *round);

/* ---- the watchdog: a thread that looks at the state each time it wakes, never at what woke it ---- */

/* Starts it. A round that it sees gathered but unclaimed for `deadline_ns` is failed and released, at most 1/16 of the
 * deadline or 5 ms later, whichever is less (but 50 us where that is more), and never earlier. It blocks all signals.
 * OK, INVALID, NOT_OWNER, RUNNING, CLOSED, SYSTEM. */
HOSTFLAG_API hostflag_status hostflag_watchdog_start(hostflag_page *page, int64_t deadline_ns);
/* Ends it. When this returns no thread of the library touches the page. Blocks for as long as a look takes, or the fail_all of
 * a dead process (at most 100 ms). Fine if it does not run. OK, CLOSED, NOT_OWNER. */
HOSTFLAG_API hostflag_status hostflag_watchdog_stop(hostflag_page *page);
/* Counts from when the pending round was first seen, the round that is being watched included.
 * OK, INVALID, NOT_OWNER, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_watchdog_set_deadline(hostflag_page *page, int64_t deadline_ns);

typedef enum hostflag_how {
    HOSTFLAG_PREEMPTED = 1,    /* the deadline passed */
    HOSTFLAG_FAILED_ALL = 2,   /* hostflag_fail_all */
    HOSTFLAG_PROXY_DEAD = 3,   /* the followed process is gone; everything was failed ahead */
    HOSTFLAG_PROXY_KILLED = 4, /* the followed process held its claim past the deadline */
} hostflag_how;

typedef struct hostflag_event {
    uint32_t round; /* the newest gathered */
    uint32_t how;   /* a hostflag_how */
    int64_t wall_ns; /* CLOCK_REALTIME */
    int64_t wait_ns; /* for how long the round had been seen pending; 0 if it was not */
} hostflag_event;

typedef struct hostflag_watchdog_stats {
    uint64_t rounds_watched;  /* rounds gathered while it ran */
    uint64_t preempted;
    uint64_t failed_all; /* by whomever; calls that found it done already do not count */
    uint64_t proxies_dead;
    uint64_t proxies_killed;
    uint64_t events_total;    /* the newest HOSTFLAG_EVENTS of them are below */
    int64_t longest_wait_ns;  /* the longest for which a round was seen pending: up to one look less than it was */
    int64_t deadline_ns;      /* 0 before the first start */
    uint32_t is_running;
    uint32_t events_kept;
    hostflag_event events[HOSTFLAG_EVENTS]; /* oldest first */
} hostflag_watchdog_stats;

/* OK, CLOSED. They outlive a stop and go on after the next start. */
HOSTFLAG_API hostflag_status hostflag_watchdog_get_stats(hostflag_page *page, hostflag_watchdog_stats *stats_p);

/* ---- in place of a stream: self-tests, tests, an engine without a device. One thread, in the order given above ---- */

/* gathered = round (release). OK, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_gather(hostflag_page *page, uint32_t round);
/* Waits until released has reached `round` (acquire). As hostflag_wait_gathered. OK, TIMED_OUT, CLOSED, INVALID. */
HOSTFLAG_API hostflag_status hostflag_wait_released(hostflag_page *page, uint32_t round, int64_t spin_ns, int64_t nap_ns,
                                                    int64_t deadline_ns);
/* Copies the reply out; `bytes` is the page's reply_bytes. OK, CLOSED, INVALID. */
HOSTFLAG_API hostflag_status hostflag_read_reply(hostflag_page *page, void *reply_p, uint32_t bytes);
/* consumed = round (release). OK, CLOSED. */
HOSTFLAG_API hostflag_status hostflag_consume(hostflag_page *page, uint32_t round);

#ifdef __cplusplus
}
#endif

#endif
