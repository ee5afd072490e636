/* The contract is round_calls.h and native/round_calls.py; here is only how it is kept. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "round_calls.h"

#include "ucx_channel.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#ifndef ROUNDCALLS_BUILD
#define ROUNDCALLS_BUILD ""
#endif

/* A frame of more pieces is left to Python. */
#define MAX_PIECES 32
#define LENGTH_BYTES 4
#define WHOLE UINT32_MAX
/* The rest of a large frame is on its way: whoever sleeps meanwhile makes the sender wake it, segment after segment. */
#define LARGE_BYTES 65536
#define REST_SPIN_NS INT64_C(100000)

/* How a read ended, in the two lowest bits of its result. */
enum { CAME = 0, LATE = 1, ENDED = 2 };

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* The memory of a frame's pieces, held where it is: nobody can free or resize it. Behind them is room for a ucxchannel_piece of each. */

typedef struct holding {
    Py_ssize_t count;
    Py_buffer pieces[];
} holding;

static void release(holding *held)
{
    if (held == NULL)
        return;
    while (held->count > 0)
        PyBuffer_Release(&held->pieces[--held->count]);
    PyMem_Free(held);
}

static holding *hold(PyObject *pieces)
{
    Py_ssize_t count = PySequence_Size(pieces);
    holding *held;
    if (count < 0)
        return NULL;
    held = PyMem_Malloc(sizeof *held + (size_t)count * (sizeof held->pieces[0] + sizeof(ucxchannel_piece)));
    if (held == NULL)
        return (holding *)PyErr_NoMemory();
    for (held->count = 0; held->count < count; held->count++) {
        PyObject *piece = PySequence_GetItem(pieces, held->count);
        int failed = piece == NULL || PyObject_GetBuffer(piece, &held->pieces[held->count], PyBUF_SIMPLE) < 0;
        Py_XDECREF(piece);
        if (failed) {
            release(held);
            return NULL;
        }
    }
    return held;
}

/* Frames over a socket. */

typedef struct outgoing {
    struct iovec pieces[MAX_PIECES + 1];
    size_t count;
    size_t bytes; /* with the length in front */
    unsigned char length[LENGTH_BYTES];
} outgoing;

/* Put the length in front of `bytes` in the pieces from the second on. */
static void begin_frame(outgoing *frame, size_t bytes)
{
    for (int byte = 0; byte < LENGTH_BYTES; byte++)
        frame->length[byte] = (unsigned char)(bytes >> (8 * byte));
    frame->pieces[0] = (struct iovec){frame->length, LENGTH_BYTES};
    frame->bytes = LENGTH_BYTES + bytes;
}

/* False where the frame is left to Python. */
static bool prepare(outgoing *frame, const holding *held)
{
    size_t bytes = 0;
    if (held->count > MAX_PIECES)
        return false;
    for (Py_ssize_t index = 0; index < held->count; index++) {
        frame->pieces[index + 1] = (struct iovec){held->pieces[index].buf, (size_t)held->pieces[index].len};
        bytes += (size_t)held->pieces[index].len;
    }
    if (bytes > UINT32_MAX)
        return false;
    frame->count = (size_t)held->count + 1;
    begin_frame(frame, bytes);
    return true;
}

/* What fits without waiting; -1 with errno. */
static ssize_t send_some(int fd, outgoing *frame)
{
    struct msghdr message = {.msg_iov = frame->pieces, .msg_iovlen = frame->count};
    ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : sent;
}

typedef struct reading {
    int fd;
    unsigned char *memory;
    size_t capacity;
    size_t to;     /* bytes that are there */
    size_t wanted; /* of the frame */
    size_t limit;
    int64_t spin_ns;
    int64_t until_ns;
} reading;

static size_t length_of(const unsigned char *memory)
{
    return (size_t)memory[0] | (size_t)memory[1] << 8 | (size_t)memory[2] << 16 | (size_t)memory[3] << 24;
}

/* Where the next read ends, 0 where there is nothing to read for: what was wanted is there, or Python must look. */
static size_t read_up_to(const reading *in)
{
    size_t length;
    if (in->to < LENGTH_BYTES)
        return in->capacity;
    length = length_of(in->memory);
    if (length > in->limit || length > in->capacity - LENGTH_BYTES)
        return 0;
    if (in->to - LENGTH_BYTES >= length || in->to - LENGTH_BYTES >= in->wanted)
        return 0;
    return LENGTH_BYTES + length;
}

static bool is_large(const reading *in)
{
    return in->to >= LENGTH_BYTES && length_of(in->memory) > LARGE_BYTES;
}

/* Read until enough is there. As one of the results, or -1 with errno: EINTR where Python's signal handlers must run first. */
static int read_frame(reading *in)
{
    int64_t spin_until = 0;
    for (;;) {
        const size_t end = read_up_to(in);
        const int64_t spin_ns = is_large(in) && in->spin_ns < REST_SPIN_NS ? REST_SPIN_NS : in->spin_ns;
        const int flags = in->until_ns == ROUNDCALLS_NEVER && spin_ns == 0 ? 0 : MSG_DONTWAIT;
        ssize_t count;
        if (end == 0)
            return CAME;
        count = recv(in->fd, in->memory + in->to, end - in->to, flags);
        if (count == 0)
            return ENDED;
        if (count > 0) {
            in->to += (size_t)count;
            spin_until = 0;
            /* A peer that sends a byte now and then does not hold us for ever. */
            if (in->until_ns != ROUNDCALLS_NEVER && read_up_to(in) != 0 && now_ns() >= in->until_ns)
                return LATE;
            continue;
        }
        if (errno != EAGAIN)
            return -1;
        if (spin_ns > 0) {
            int64_t now = now_ns();
            if (spin_until == 0)
                spin_until = spin_ns > in->until_ns - now ? in->until_ns : now + spin_ns;
            if (now < spin_until)
                continue;
        }
        {
            int64_t left = in->until_ns == ROUNDCALLS_NEVER ? -1 : in->until_ns - now_ns();
            struct pollfd ready = {in->fd, POLLIN, 0};
            int64_t left_ms = (left + 999999) / 1000000;
            if (in->until_ns != ROUNDCALLS_NEVER && left <= 0)
                return LATE;
            if (poll(&ready, 1, left < 0 ? -1 : left_ms > INT_MAX ? INT_MAX : (int)left_ms) < 0)
                return -1;
        }
    }
}

/* The frame in `memory`, if it was wanted whole and is all that is there; else 4 * bytes that are there, and how the read ended. */
static PyObject *outcome_of(PyObject *memory, const reading *in, int outcome)
{
    size_t length = in->to < LENGTH_BYTES ? 0 : length_of(in->memory);
    if (outcome == CAME && in->wanted == WHOLE && length <= in->limit && in->to == LENGTH_BYTES + length) {
        PyObject *frame = NULL, *view = PyMemoryView_FromObject(memory);
        PyObject *from = PyLong_FromLong(LENGTH_BYTES), *to = PyLong_FromSize_t(in->to);
        PyObject *range = from == NULL || to == NULL ? NULL : PySlice_New(from, to, NULL);
        if (view != NULL && range != NULL)
            frame = PyObject_GetItem(view, range);
        Py_XDECREF(range);
        Py_XDECREF(to);
        Py_XDECREF(from);
        Py_XDECREF(view);
        return frame;
    }
    return PyLong_FromSize_t(4 * in->to + (size_t)outcome);
}

static bool has_arguments(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted)
        PyErr_Format(PyExc_TypeError, "%zd arguments, expected %zd", given, wanted);
    return given == wanted;
}

/* send(descriptor, pieces) */
static PyObject *send_frame(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    outgoing frame;
    holding *held;
    ssize_t sent = 0;
    bool is_ours;
    int fd;
    if (!has_arguments(count, 2))
        return NULL;
    fd = (int)PyLong_AsLong(given[0]);
    if (PyErr_Occurred() || (held = hold(given[1])) == NULL)
        return NULL;
    is_ours = prepare(&frame, held);
    if (is_ours) {
        Py_BEGIN_ALLOW_THREADS
        sent = send_some(fd, &frame);
        Py_END_ALLOW_THREADS
    }
    release(held);
    if (sent < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromSsize_t(is_ours && (size_t)sent == frame.bytes ? -1 : sent);
}

/* receive(descriptor, memory, to, wanted, limit, spin_ns, until_ns) and what exchange has of it */
static PyObject *read_into(PyObject *memory, reading *in, outgoing *frame)
{
    Py_buffer into;
    const size_t began_at = in->to;
    ssize_t sent = 0;
    int outcome = CAME, error = 0;
    bool is_out = true;
    PyObject *result;
    if (PyObject_GetBuffer(memory, &into, PyBUF_WRITABLE) < 0)
        return NULL;
    in->memory = into.buf;
    in->capacity = (size_t)into.len;
    if (in->to > in->capacity || in->capacity < LENGTH_BYTES) {
        PyBuffer_Release(&into);
        PyErr_SetString(PyExc_ValueError, "more is there than the memory holds");
        return NULL;
    }
    for (;;) {
        Py_BEGIN_ALLOW_THREADS
        if (frame != NULL) {
            sent = send_some(in->fd, frame);
            is_out = sent >= 0 && (size_t)sent == frame->bytes;
        }
        if (is_out)
            outcome = read_frame(in);
        error = errno;
        Py_END_ALLOW_THREADS
        if (!is_out || outcome >= 0 || error != EINTR)
            break;
        frame = NULL;
        if (PyErr_CheckSignals() < 0) {
            /* What was read of a frame is lost with the exception, and nobody may take the rest for the begin of one. */
            if (in->to != began_at)
                shutdown(in->fd, SHUT_RDWR);
            PyBuffer_Release(&into);
            return NULL;
        }
    }
    if (sent < 0 || outcome < 0) {
        errno = error;
        result = PyErr_SetFromErrno(PyExc_OSError);
    } else {
        result = is_out ? outcome_of(memory, in, outcome) : PyLong_FromSsize_t(-1 - sent);
    }
    PyBuffer_Release(&into);
    return result;
}

static PyObject *receive_frame(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    reading in = {0};
    if (!has_arguments(count, 7))
        return NULL;
    in.fd = (int)PyLong_AsLong(given[0]);
    in.to = PyLong_AsSize_t(given[2]);
    in.wanted = PyLong_AsSize_t(given[3]);
    in.limit = PyLong_AsSize_t(given[4]);
    in.spin_ns = PyLong_AsLongLong(given[5]);
    in.until_ns = PyLong_AsLongLong(given[6]);
    if (PyErr_Occurred())
        return NULL;
    return read_into(given[1], &in, NULL);
}

/* exchange(descriptor, pieces, memory, limit, spin_ns, until_ns) */
static PyObject *exchange_frames(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    reading in = {.wanted = WHOLE};
    outgoing frame;
    holding *held;
    PyObject *result;
    if (!has_arguments(count, 6))
        return NULL;
    in.fd = (int)PyLong_AsLong(given[0]);
    in.limit = PyLong_AsSize_t(given[3]);
    in.spin_ns = PyLong_AsLongLong(given[4]);
    in.until_ns = PyLong_AsLongLong(given[5]);
    if (PyErr_Occurred() || (held = hold(given[1])) == NULL)
        return NULL;
    result = prepare(&frame, held) ? read_into(given[2], &in, &frame) : PyLong_FromLong(-1);
    release(held);
    return result;
}

/* A round of an engine's, from what the device said of it to the release of the stream. */

typedef struct serving {
    Py_buffer round, record, meta, head, memory; /* in the order of the arguments */
} serving;

enum { SERVING_BUFFERS = 5, UNPUBLISHED = -1 };

static void let_go(serving *held, int count)
{
    Py_buffer *all = &held->round;
    while (count > 0)
        PyBuffer_Release(&all[--count]);
}

/* The first five arguments. False with an exception, and nothing held. */
static bool hold_serving(serving *held, PyObject *const *given)
{
    Py_buffer *all = &held->round;
    for (int index = 0; index < SERVING_BUFFERS; index++) {
        if (PyObject_GetBuffer(given[index], &all[index], index < 2 ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) {
            let_go(held, index);
            return false;
        }
    }
    const roundcalls_round *round = held->round.buf;
    if ((size_t)held->round.len < sizeof *round ||
        (size_t)held->round.len != sizeof *round + round->requests * sizeof round->of[0] || round->row_bytes == 0 ||
        (size_t)held->meta.len < round->requests * 4 * sizeof(int32_t) || held->memory.len < LENGTH_BYTES) {
        let_go(held, SERVING_BUFFERS);
        PyErr_SetString(PyExc_ValueError, "not a round");
        return false;
    }
    return true;
}

typedef struct served {
    int awaited;       /* how the wait for the round's data ended; 0: it is there */
    size_t head_bytes; /* 0: it was not begun */
    ssize_t sent;      /* of the frame and its length; -1 with `error` */
    bool is_out;
    int outcome; /* of the reading; -1 with `error` */
    int error;
    int status; /* hostflag_publish's, or UNPUBLISHED */
    int64_t gathered_ns, sent_ns, answered_ns, ended_ns;
} served;

/* Everything up to the wait for the answer. */
static void begin_serving(const serving *held, uint64_t sequence, int64_t wait_until_ns, reading *in, served *how)
{
    const roundcalls_round *round = held->round.buf;
    unsigned char *head = held->head.buf;
    size_t rows_bytes = 0;
    outgoing frame;
    how->awaited = round->wait(round->page, round->round, round->spin_ns, round->nap_ns, wait_until_ns);
    if (how->awaited != 0)
        return;
    how->gathered_ns = now_ns();
    if (memcmp(round->record, held->record.buf, (size_t)held->record.len) != 0)
        return;
    memcpy(held->meta.buf, round->meta, round->requests * 4 * sizeof(int32_t));
    how->head_bytes = roundcalls_write_step(round, sequence, held->meta.buf, head, (size_t)held->head.len, &rows_bytes);
    if (how->head_bytes == 0)
        return;
    frame.pieces[1] = (struct iovec){head, how->head_bytes};
    frame.pieces[2] = (struct iovec){(void *)(uintptr_t)round->rows, rows_bytes};
    frame.count = 3;
    begin_frame(&frame, how->head_bytes + rows_bytes);
    how->sent_ns = now_ns();
    in->until_ns = how->sent_ns + round->timeout_ns;
    how->sent = send_some(in->fd, &frame);
    how->error = errno;
    how->is_out = how->sent >= 0 && (size_t)how->sent == frame.bytes;
}

/* Publish what came, if that is all that is wanted. */
static void end_serving(const roundcalls_round *round, uint64_t sequence, const reading *in, served *how)
{
    const size_t length = in->to < LENGTH_BYTES ? 0 : length_of(in->memory);
    how->answered_ns = now_ns();
    if (how->outcome == CAME && length <= in->limit && in->to == LENGTH_BYTES + length &&
        roundcalls_read_drafts(round, sequence, in->memory + LENGTH_BYTES, length)) {
        how->status = round->publish(round->page, round->round, round->reply, round->reply_bytes);
        how->ended_ns = now_ns();
    }
}

/* serve(round, record, meta, head, memory, sequence, descriptor, limit, spin_ns, wait_until_ns) */
static PyObject *serve_round(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    served how = {.outcome = CAME, .status = UNPUBLISHED};
    reading in = {.wanted = WHOLE};
    PyObject *got;
    serving held;
    uint64_t sequence;
    int64_t wait_until_ns;
    if (!has_arguments(count, 10))
        return NULL;
    sequence = PyLong_AsUnsignedLongLong(given[5]);
    in.fd = (int)PyLong_AsLong(given[6]);
    in.limit = PyLong_AsSize_t(given[7]);
    in.spin_ns = PyLong_AsLongLong(given[8]);
    wait_until_ns = PyLong_AsLongLong(given[9]);
    if (PyErr_Occurred() || !hold_serving(&held, given))
        return NULL;
    in.memory = held.memory.buf;
    in.capacity = (size_t)held.memory.len;
    for (bool is_first = true;; is_first = false) {
        Py_BEGIN_ALLOW_THREADS
        if (is_first)
            begin_serving(&held, sequence, wait_until_ns, &in, &how);
        if (how.is_out) {
            how.outcome = read_frame(&in);
            how.error = errno;
            if (how.outcome >= 0)
                end_serving(held.round.buf, sequence, &in, &how);
        }
        Py_END_ALLOW_THREADS
        if (how.outcome >= 0 || how.error != EINTR)
            break;
        if (PyErr_CheckSignals() < 0) {
            if (in.to != 0) /* as in read_into */
                shutdown(in.fd, SHUT_RDWR);
            let_go(&held, SERVING_BUFFERS);
            return NULL;
        }
    }
    let_go(&held, SERVING_BUFFERS);
    if (how.head_bytes == 0)
        return PyLong_FromLong(how.awaited);
    if (how.sent < 0 || how.outcome < 0) {
        errno = how.error;
        got = PyObject_CallFunction(PyExc_OSError, "is", how.error, strerror(how.error));
    } else {
        got = how.is_out ? outcome_of(given[4], &in, how.outcome) : PyLong_FromSsize_t(-1 - how.sent);
    }
    return got == NULL ? NULL
                       : Py_BuildValue("nLLLLiN", (Py_ssize_t)how.head_bytes, (long long)how.gathered_ns, (long long)how.sent_ns,
                                       (long long)how.answered_ns, (long long)how.ended_ns, how.status, got);
}

static int add_all(PyObject *to, PyMethodDef *functions, PyObject *self)
{
    for (PyMethodDef *each = functions; each->ml_name != NULL; each++) {
        PyObject *function = PyCFunction_NewEx(each, self, NULL);
        int failed = function == NULL || PyDict_SetItemString(to, each->ml_name, function) < 0;
        Py_XDECREF(function);
        if (failed)
            return -1;
    }
    return 0;
}

/* Frames over UCX: the calls of ucx_channel, which another library has. */

typedef int send_call(ucxchannel *, const ucxchannel_piece *, size_t, int64_t);
typedef int receive_call(ucxchannel *, int64_t, int64_t, size_t *);
typedef int exchange_call(ucxchannel *, const ucxchannel_piece *, size_t, int64_t, int64_t, int *, size_t *);
typedef void take_call(ucxchannel *, void *);

/* Of one channel; its three functions have a capsule of it as `self`. */
typedef struct ucx_end {
    send_call *send;
    receive_call *receive;
    exchange_call *exchange;
    take_call *take;
    ucxchannel *channel;
    int64_t spin_ns;
} ucx_end;

/* Of a time in seconds. False with an exception. */
static bool read_until(PyObject *at_s, int64_t *until_ns_p)
{
    const double until_ns = PyFloat_AsDouble(at_s) * 1e9;
    *until_ns_p = until_ns < 0 ? 0 : until_ns < (double)ROUNDCALLS_NEVER ? (int64_t)until_ns : ROUNDCALLS_NEVER;
    return PyErr_Occurred() == NULL;
}

static void free_end(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, NULL));
}

static void release_held(PyObject *capsule)
{
    release(PyCapsule_GetPointer(capsule, NULL));
}

/* (status, whether the frame is out, bytes received, what keeps the pieces where they are: None unless UCX has not let go of them) */
static PyObject *ucx_outcome(int status, int is_sent, size_t bytes, holding *held)
{
    PyObject *late;
    if (status == UCXCHANNEL_HELD) {
        /* Without a capsule the pieces stay where they are for good: UCX still reads them. */
        late = PyCapsule_New(held, NULL, release_held);
    } else {
        release(held);
        late = Py_NewRef(Py_None);
    }
    return late == NULL ? NULL : Py_BuildValue("iOnN", status, is_sent ? Py_True : Py_False, (Py_ssize_t)bytes, late);
}

/* The frame that is there, in memory of its own. If there is no memory, it stays. */
static PyObject *take_from(const ucx_end *end, size_t bytes)
{
    PyObject *memory = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    PyObject *frame = memory == NULL ? NULL : PyMemoryView_FromObject(memory);
    if (frame != NULL)
        end->take(end->channel, PyByteArray_AsString(memory));
    Py_XDECREF(memory);
    return frame;
}

/* Where the pieces are, as the calls want it; it goes with them. */
static const ucxchannel_piece *ucx_pieces(holding *held)
{
    ucxchannel_piece *places = (ucxchannel_piece *)&held->pieces[held->count];
    for (Py_ssize_t index = 0; index < held->count; index++)
        places[index] = (ucxchannel_piece){held->pieces[index].buf, (size_t)held->pieces[index].len};
    return places;
}

/* send(pieces, until_s) */
static PyObject *ucx_send(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    const ucx_end *end = PyCapsule_GetPointer(self, NULL);
    const ucxchannel_piece *pieces;
    holding *held;
    int64_t until_ns;
    int status;
    if (!has_arguments(count, 2) || !read_until(given[1], &until_ns) || (held = hold(given[0])) == NULL)
        return NULL;
    pieces = ucx_pieces(held);
    Py_BEGIN_ALLOW_THREADS
    status = end->send(end->channel, pieces, (size_t)held->count, until_ns);
    Py_END_ALLOW_THREADS
    if (status != UCXCHANNEL_OK)
        return ucx_outcome(status, false, 0, held);
    release(held);
    Py_RETURN_NONE;
}

/* receive(limit, until_s) */
static PyObject *ucx_receive(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    const ucx_end *end = PyCapsule_GetPointer(self, NULL);
    size_t limit, bytes = 0;
    int64_t until_ns;
    int status;
    if (!has_arguments(count, 2) || !read_until(given[1], &until_ns))
        return NULL;
    limit = PyLong_AsSize_t(given[0]);
    if (PyErr_Occurred())
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = end->receive(end->channel, end->spin_ns, until_ns, &bytes);
    Py_END_ALLOW_THREADS
    if (status == UCXCHANNEL_OK && bytes <= limit)
        return take_from(end, bytes);
    return ucx_outcome(status, false, bytes, NULL);
}

/* exchange(pieces, limit, until_s) */
static PyObject *ucx_exchange(PyObject *self, PyObject *const *given, Py_ssize_t count)
{
    const ucx_end *end = PyCapsule_GetPointer(self, NULL);
    const ucxchannel_piece *pieces;
    holding *held;
    size_t limit, bytes = 0;
    int64_t until_ns;
    int is_sent = 0, status;
    if (!has_arguments(count, 3) || !read_until(given[2], &until_ns))
        return NULL;
    limit = PyLong_AsSize_t(given[1]);
    if (PyErr_Occurred() || (held = hold(given[0])) == NULL)
        return NULL;
    pieces = ucx_pieces(held);
    Py_BEGIN_ALLOW_THREADS
    status = end->exchange(end->channel, pieces, (size_t)held->count, end->spin_ns, until_ns, &is_sent, &bytes);
    Py_END_ALLOW_THREADS
    if (status != UCXCHANNEL_OK || bytes > limit)
        return ucx_outcome(status, is_sent, bytes, held);
    release(held);
    return take_from(end, bytes);
}

static PyMethodDef of_ucx[] = {
    {"send", (PyCFunction)(void (*)(void))ucx_send, METH_FASTCALL, NULL},
    {"receive", (PyCFunction)(void (*)(void))ucx_receive, METH_FASTCALL, NULL},
    {"exchange", (PyCFunction)(void (*)(void))ucx_exchange, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

/* ucx_calls(send, receive, exchange, take, channel, spin_ns) */
static PyObject *ucx_calls(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    PyObject *self, *all;
    uintptr_t values[6];
    ucx_end *end;
    if (!has_arguments(count, 6))
        return NULL;
    for (int index = 0; index < 6; index++)
        values[index] = PyLong_AsSize_t(given[index]);
    if (PyErr_Occurred())
        return NULL;
    if ((end = PyMem_Malloc(sizeof *end)) == NULL)
        return PyErr_NoMemory();
    *end = (ucx_end){(send_call *)values[0], (receive_call *)values[1], (exchange_call *)values[2],
                     (take_call *)values[3], (ucxchannel *)values[4],   (int64_t)values[5]};
    self = PyCapsule_New(end, NULL, free_end);
    if (self == NULL) {
        PyMem_Free(end);
        return NULL;
    }
    all = PyDict_New();
    if (all != NULL && add_all(all, of_ucx, self) < 0)
        Py_CLEAR(all);
    Py_DECREF(self);
    return all;
}

static PyMethodDef of_frames[] = {
    {"send", (PyCFunction)(void (*)(void))send_frame, METH_FASTCALL, NULL},
    {"receive", (PyCFunction)(void (*)(void))receive_frame, METH_FASTCALL, NULL},
    {"exchange", (PyCFunction)(void (*)(void))exchange_frames, METH_FASTCALL, NULL},
    {"serve", (PyCFunction)(void (*)(void))serve_round, METH_FASTCALL, NULL},
    {"ucx_calls", (PyCFunction)(void (*)(void))ucx_calls, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

uint32_t roundcalls_version(void)
{
    return ROUNDCALLS_VERSION;
}

const char *roundcalls_build(void)
{
    return ROUNDCALLS_BUILD;
}

PyObject *roundcalls_functions(void)
{
    PyObject *all = PyDict_New();
    if (all != NULL && (roundcalls_prepare_steps() < 0 || roundcalls_prepare_submits() < 0 || add_all(all, of_frames, NULL) < 0 ||
                        add_all(all, roundcalls_of_steps, NULL) < 0 || add_all(all, roundcalls_of_submits, NULL) < 0))
        Py_CLEAR(all);
    return all;
}
