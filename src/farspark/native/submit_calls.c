/* What the engine's thread does of a round: its gather's launch is filled, it is described for the proxy, and handed to the driver.
 * Little is computed here; but a busy engine finds all bytecode of a step's out of its caches, and this is less to find. */
#include "round_calls.h"

#include "hostflag.h"

#include <stdatomic.h>
#include <stdbool.h>

/* The fields of a step, in the order of engine/gather/torch_gather.py. */
enum {
    HIDDEN,
    POSITIONS, /* the first of five that may be others in every step */
    SLOTS = 3,
    LAST_SAMPLED = 6, /* the first of two that the runner keeps for its life */
    ROW_BOUND = 8,
    WANTS_DRAFTS = 9,
    TEMPERATURE = 10, /* the first of two that are read where drafts are sampled, and not looked at elsewhere */
    STEP_FIELDS = 12,
};
/* The parameters of the kernel that change from step to step, in the order of engine/gather/triton_gather.py. */
enum { TAPS_AT = 0, OTHERS_AT = 9, SAMPLING_AT = 17, ROWS_AT = 19, META_AT = 21, REQUESTS_AT = 22, WANTS_DRAFTS_AT = 25 };
enum { MAX_TAPS = 8, OTHERS = 5, KEPT_COUNT = 2, SAMPLING = 2, ALIGNED = 16 };
enum { TAPS_DTYPE = OTHERS, SAMPLING_DTYPE, DTYPES_COUNT = SAMPLING_DTYPE + SAMPLING };
/* What is known of the kind; see RoundCalls.refill_gather. */
enum { VALUES, GRID, MAX_ROWS, MAX_REQUESTS, KEPT, DTYPES, STRIDE, TAPS, WIDTH, KNOWN_FIELDS };

static struct {
    PyObject *data_ptr, *dtype, *stride, *shape;
} text;

int roundcalls_prepare_submits(void)
{
    if (text.data_ptr != NULL)
        return 0;
    text.dtype = PyUnicode_InternFromString("dtype");
    text.stride = PyUnicode_InternFromString("stride");
    text.shape = PyUnicode_InternFromString("shape");
    text.data_ptr = PyUnicode_InternFromString("data_ptr");
    return text.dtype == NULL || text.stride == NULL || text.shape == NULL || text.data_ptr == NULL ? -1 : 0;
}

/* Along a dimension, as its shape says: what len() asks of a tensor of torch's is bytecode. -1, perhaps with an exception. */
static Py_ssize_t find_length(PyObject *tensor, Py_ssize_t dimension)
{
    PyObject *shape = PyObject_GetAttr(tensor, text.shape);
    bool has_it = shape != NULL && PyTuple_Check(shape) && PyTuple_Size(shape) > dimension;
    Py_ssize_t length = has_it ? PyLong_AsSsize_t(PyTuple_GetItem(shape, dimension)) : -1;
    Py_XDECREF(shape);
    return length;
}

/* Of a tensor. False, perhaps with an exception, where it is of another dtype; so are the two below for what they look at. */
static bool find_address(PyObject *tensor, PyObject *dtype, uint64_t *address_p)
{
    PyObject *found = PyObject_GetAttr(tensor, text.dtype), *address;
    bool is_same = found == dtype;
    Py_XDECREF(found);
    if (!is_same)
        return false;
    if ((address = PyObject_CallMethodObjArgs(tensor, text.data_ptr, NULL)) == NULL)
        return false;
    *address_p = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    return PyErr_Occurred() == NULL;
}

static bool has_stride(PyObject *tensor, PyObject *wanted)
{
    PyObject *stride = PyObject_CallMethodObjArgs(tensor, text.stride, NULL);
    bool is_same = stride != NULL && PyObject_RichCompareBool(stride, wanted, Py_EQ) == 1;
    Py_XDECREF(stride);
    return is_same;
}

static bool find_taps(PyObject *hidden, PyObject *known, PyObject *dtype, uint64_t *taps)
{
    PyObject *stride = PyTuple_GetItem(known, STRIDE);
    Py_ssize_t count = PySequence_Size(hidden), width = PyLong_AsSsize_t(PyTuple_GetItem(known, WIDTH));
    if (count < 1 || count > MAX_TAPS || count != PyLong_AsSsize_t(PyTuple_GetItem(known, TAPS)))
        return false;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *tap = PySequence_GetItem(hidden, index);
        bool is_found = tap != NULL && has_stride(tap, stride) && find_length(tap, 1) == width &&
                        find_address(tap, dtype, &taps[index]);
        Py_XDECREF(tap);
        if (!is_found)
            return false;
    }
    for (Py_ssize_t index = count; index < MAX_TAPS; index++)
        taps[index] = taps[0];
    return true;
}

static bool is_tuple_of(PyObject *value, Py_ssize_t count) { return PyTuple_Check(value) && PyTuple_Size(value) == count; }

/* The number of requests; 0 with nothing changed, and perhaps an exception, where the step may be of another kind. */
static Py_ssize_t refill(PyObject *known, PyObject *step, uint64_t rows, uint64_t meta)
{
    uint64_t taps[MAX_TAPS], others[OTHERS], sampling[SAMPLING], bits = rows;
    PyObject *kept, *dtypes;
    if (!is_tuple_of(known, KNOWN_FIELDS) || !is_tuple_of(step, STEP_FIELDS) ||
        !is_tuple_of(kept = PyTuple_GetItem(known, KEPT), KEPT_COUNT) ||
        !is_tuple_of(dtypes = PyTuple_GetItem(known, DTYPES), DTYPES_COUNT))
        return 0;
    bool is_sampled = PyTuple_GetItem(dtypes, SAMPLING_DTYPE) != Py_None;
    for (Py_ssize_t index = 0; index < KEPT_COUNT; index++) {
        if (PyTuple_GetItem(step, LAST_SAMPLED + index) != PyTuple_GetItem(kept, index))
            return 0;
    }
    Py_ssize_t requests = find_length(PyTuple_GetItem(step, SLOTS), 0);
    long row_bound = PyLong_AsLong(PyTuple_GetItem(step, ROW_BOUND));
    int wants_drafts = PyObject_IsTrue(PyTuple_GetItem(step, WANTS_DRAFTS));
    if (wants_drafts < 0 || requests < 1 || requests > PyLong_AsSsize_t(PyTuple_GetItem(known, MAX_REQUESTS)) ||
        row_bound < 1 || row_bound > PyLong_AsLong(PyTuple_GetItem(known, MAX_ROWS)) ||
        !find_taps(PyTuple_GetItem(step, HIDDEN), known, PyTuple_GetItem(dtypes, TAPS_DTYPE), taps))
        return 0;
    for (int index = 0; index < OTHERS; index++) {
        if (!find_address(PyTuple_GetItem(step, POSITIONS + index), PyTuple_GetItem(dtypes, index), &others[index]))
            return 0;
    }
    for (int index = 0; is_sampled && index < SAMPLING; index++) {
        PyObject *dtype = PyTuple_GetItem(dtypes, SAMPLING_DTYPE + index);
        if (!find_address(PyTuple_GetItem(step, TEMPERATURE + index), dtype, &sampling[index]))
            return 0;
    }
    for (int index = 0; index < MAX_TAPS; index++)
        bits |= taps[index];
    uint64_t *values = (uint64_t *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(known, VALUES));
    uint32_t *grid = (uint32_t *)(uintptr_t)PyLong_AsUnsignedLongLong(PyTuple_GetItem(known, GRID));
    if (bits % ALIGNED != 0 || PyErr_Occurred() != NULL || values == NULL || grid == NULL)
        return 0;
    for (int index = 0; index < MAX_TAPS; index++)
        values[TAPS_AT + index] = taps[index];
    for (int index = 0; index < OTHERS; index++)
        values[OTHERS_AT + index] = others[index];
    for (int index = 0; is_sampled && index < SAMPLING; index++)
        values[SAMPLING_AT + index] = sampling[index];
    values[ROWS_AT] = rows;
    values[META_AT] = meta;
    values[REQUESTS_AT] = (uint64_t)requests;
    values[WANTS_DRAFTS_AT] = (uint64_t)wants_drafts;
    grid[0] = (uint32_t)row_bound;
    return requests;
}

/* refill_gather(known, step, rows, meta) */
static PyObject *refill_gather(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 4", count);
    uint64_t rows = PyLong_AsUnsignedLongLong(arguments[2]), meta = PyLong_AsUnsignedLongLong(arguments[3]);
    Py_ssize_t requests = PyErr_Occurred() == NULL ? refill(arguments[0], arguments[1], rows, meta) : 0;
    PyErr_Clear(); /* Python's own form says what is wrong with the step */
    return PyLong_FromSsize_t(requests);
}

/* Beyond these no round is described here. */
enum { MAX_REQUESTS_HERE = 64, HEAD_WORDS = 4 };

/* Both: false, perhaps with an exception, where anything but an integer from 0 to `limit` is found. */
static bool read_number(PyObject *from, uint64_t limit, uint64_t *number_p)
{
    *number_p = PyLong_AsUnsignedLongLong(from);
    return *number_p <= limit && PyErr_Occurred() == NULL;
}

static bool read_list(PyObject *from, Py_ssize_t count, uint64_t limit, uint64_t *numbers)
{
    if (!PyList_Check(from) || PyList_Size(from) != count)
        return false;
    for (Py_ssize_t index = 0; index < count; index++) {
        if (!read_number(PyList_GetItem(from, index), limit, &numbers[index]))
            return false;
    }
    return true;
}

/* A list, or one integer that stands for all. */
static bool read_windows(PyObject *from, Py_ssize_t count, uint64_t *windows)
{
    if (PyList_Check(from))
        return read_list(from, count, INT32_MAX, windows);
    if (!read_number(from, INT32_MAX, &windows[0]))
        return false;
    for (Py_ssize_t index = 1; index < count; index++)
        windows[index] = windows[0];
    return true;
}

static uint32_t *put_numbers(uint32_t *to, const uint64_t *numbers, Py_ssize_t count, bool is_wide)
{
    for (Py_ssize_t index = 0; index < count; index++) {
        *to++ = (uint32_t)numbers[index];
        if (is_wide)
            *to++ = (uint32_t)(numbers[index] >> 32);
    }
    return to;
}

static bool describe(uint32_t *record, uint32_t round, PyObject *slots, PyObject *owners, PyObject *k_windows, bool is_prefill)
{
    uint64_t of_slots[MAX_REQUESTS_HERE], of_owners[MAX_REQUESTS_HERE], of_windows[MAX_REQUESTS_HERE];
    Py_ssize_t count = PyList_Check(slots) ? PyList_Size(slots) : 0;
    if (count < 1 || count > MAX_REQUESTS_HERE || !read_list(slots, count, INT32_MAX, of_slots) ||
        !read_list(owners, count, UINT64_MAX, of_owners) || !read_windows(k_windows, count, of_windows))
        return false;
    /* Never found in this place, until all the rest is there. */
    atomic_store_explicit((_Atomic uint32_t *)record, round + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    record[1] = (uint32_t)count;
    record[2] = is_prefill;
    record[3] = 0;
    uint32_t *to = put_numbers(record + HEAD_WORDS, of_owners, count, true);
    to = put_numbers(to, of_slots, count, false);
    put_numbers(to, of_windows, count, false);
    atomic_store_explicit((_Atomic uint32_t *)record, round, memory_order_release);
    return true;
}

/* describe_round(record, round, slots, owners, k_windows, is_prefill) */
static PyObject *describe_round(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 6", count);
    uint32_t *record = (uint32_t *)(uintptr_t)PyLong_AsUnsignedLongLong(arguments[0]);
    uint64_t round = PyLong_AsUnsignedLongLong(arguments[1]);
    int is_prefill = PyObject_IsTrue(arguments[5]);
    if (PyErr_Occurred() != NULL)
        return NULL;
    bool is_done = describe(record, (uint32_t)round, arguments[2], arguments[3], arguments[4], is_prefill == 1);
    PyErr_Clear();
    return PyBool_FromLong(is_done);
}

typedef hostflag_status submit_call(hostflag_page *page, const hostflag_device *device, hostflag_round *round);

/* submit_round(at_submit, page, device, round, stream, launch, reply_to, number) */
static PyObject *submit_round(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    uint64_t values[8];
    (void)self;
    if (count != 8)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 8", count);
    for (Py_ssize_t index = 0; index < count; index++)
        values[index] = PyLong_AsUnsignedLongLong(arguments[index]);
    if (PyErr_Occurred() != NULL)
        return NULL;
    submit_call *submit = (submit_call *)(uintptr_t)values[0];
    hostflag_round *round = (hostflag_round *)(uintptr_t)values[3];
    hostflag_status status;
    *round = (hostflag_round){.stream = (void *)(uintptr_t)values[4],
                              .launch = (const hostflag_launch *)(uintptr_t)values[5],
                              .reply_to = values[6],
                              .round = (uint32_t)values[7]};
    Py_BEGIN_ALLOW_THREADS;
    status = submit((hostflag_page *)(uintptr_t)values[1], (const hostflag_device *)(uintptr_t)values[2], round);
    Py_END_ALLOW_THREADS;
    return PyLong_FromLong(status);
}

PyMethodDef roundcalls_of_submits[] = {
    {"refill_gather", (PyCFunction)(void (*)(void))refill_gather, METH_FASTCALL, NULL},
    {"describe_round", (PyCFunction)(void (*)(void))describe_round, METH_FASTCALL, NULL},
    {"submit_round", (PyCFunction)(void (*)(void))submit_round, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
