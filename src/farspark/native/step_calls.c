/* STEPs in which nothing is out of the ordinary: read, judged and answered in one call each. Every function returns None (or False)
 * where anything is, with nothing changed; then Python's own form is asked. The numbers are those of wire/layout.py. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "round_calls.h"

#include <stdbool.h>
#include <string.h>

enum { HEADER_BYTES = 32, STEP_BYTES = 16, ENTRY_BYTES = 32, STEP_REPLY_BYTES = 24, ENTRY_REPLY_BYTES = 16 };
enum { VERSION = 1, STEP = 2, REPLY = 1, MARGINS = 1, NEED_DRAFT = 1, NOT_NEEDED = 2, N_STATUSES = 9 };
/* Beyond these nothing is ordinary. */
enum { MAX_REQUESTS = 64, MAX_DRAFTS = 64 };
#define MAGIC "FSPK"
#define ONE 0x3F800000u      /* the bits of 1.0 in float32; of those that are not negative, the order is that of integers */
#define INFINITE 0x7F800000u

static uint64_t get(const unsigned char *from, int bytes)
{
    uint64_t value = 0;
    for (int index = bytes - 1; index >= 0; index--)
        value = value << 8 | from[index];
    return value;
}

static unsigned char *put(unsigned char *to, uint64_t value, int bytes)
{
    for (int index = 0; index < bytes; index++)
        to[index] = (unsigned char)(value >> (8 * index));
    return to + bytes;
}

static unsigned char *put_header(unsigned char *to, int flags, uint64_t session, uint64_t sequence, uint64_t payload_bytes)
{
    memcpy(to, MAGIC, 4);
    to = put(to + 4, VERSION, 2);
    to = put(to, STEP, 1);
    to = put(to, (uint64_t)flags, 1);
    to = put(to, session, 8);
    to = put(to, sequence, 8);
    to = put(to, 0, 4); /* OK, reserved */
    return put(to, payload_bytes, 4);
}

/* A STEP's header, or that of its answer, whatever its sequence. */
static bool is_ours(const unsigned char *frame, size_t bytes, int flags, uint64_t session)
{
    return memcmp(frame, MAGIC, 4) == 0 && get(frame + 4, 2) == VERSION && frame[6] == STEP && frame[7] == flags &&
           get(frame + 8, 8) == session && get(frame + 28, 4) == bytes - HEADER_BYTES;
}

/* `count` integers of a tuple, each of `bits` bits at most, without a sign; one may be an int32. False, and no exception, where one
 * is not. */
static bool read_tuple(PyObject *tuple, Py_ssize_t count, int signed_at, uint64_t limit, int64_t *values)
{
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != count)
        return false;
    for (Py_ssize_t index = 0; index < count; index++) {
        int64_t value = PyLong_AsLongLong(PyTuple_GetItem(tuple, index));
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            return false;
        }
        if (index == signed_at ? value < INT32_MIN || value > INT32_MAX : value < 0 || (uint64_t)value > limit)
            return false;
        values[index] = value;
    }
    return true;
}

typedef struct entry {
    int64_t slot, generation, first_pos, n_rows, anchor_token, anchor_pos, flags, k_window, n_out;
} entry;

enum { ENTRY_FIELDS = 9, ANCHOR_TOKEN_AT = 4 };

static bool read_entry(PyObject *from, entry *of)
{
    int64_t values[ENTRY_FIELDS];
    if (!read_tuple(from, ENTRY_FIELDS, ANCHOR_TOKEN_AT, UINT32_MAX, values))
        return false;
    *of = (entry){values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7], values[8]};
    return of->flags <= UINT16_MAX && of->k_window <= UINT16_MAX && of->n_out <= UINT16_MAX;
}

/* Text that is needed again and again, made once: a name that is interned is found several times as fast. */
static struct {
    PyObject *is_void, *drafter_slot, *generation, *start, *end, *cast, *int32, *float32;
} text;

int roundcalls_prepare_steps(void)
{
    struct {
        PyObject **place;
        const char *value;
    } all[] = {{&text.is_void, "is_void"}, {&text.drafter_slot, "drafter_slot"}, {&text.generation, "generation"},
               {&text.start, "start"},     {&text.end, "end"},                   {&text.cast, "cast"},
               {&text.int32, "i"},         {&text.float32, "f"}};
    for (size_t index = 0; index < sizeof all / sizeof all[0]; index++) {
        if (*all[index].place == NULL && (*all[index].place = PyUnicode_InternFromString(all[index].value)) == NULL)
            return -1;
    }
    return 0;
}

/* A tuple of these, which are given away, of a type that is derived from tuple and has nothing of its own. */
static PyObject *made(PyObject *type, Py_ssize_t count, PyObject *const *fields)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot((PyTypeObject *)type, Py_tp_alloc);
    PyObject *tuple = allocate((PyTypeObject *)type, count);
    bool is_whole = tuple != NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        is_whole = is_whole && fields[index] != NULL;
        if (tuple != NULL && fields[index] != NULL)
            PyTuple_SetItem(tuple, index, fields[index]);
        else
            Py_XDECREF(fields[index]);
    }
    if (!is_whole)
        Py_CLEAR(tuple);
    return tuple;
}

/* Whether `made` may make these: types of tuples, with no more than a tuple has. */
static bool are_tuple_types(PyObject *const *types, size_t count)
{
    for (size_t index = 0; index < count; index++) {
        if (!PyType_Check(types[index]) || !PyType_IsSubtype((PyTypeObject *)types[index], &PyTuple_Type)) {
            PyErr_SetString(PyExc_TypeError, "expected types of tuples");
            return false;
        }
    }
    return true;
}

static PyObject *number(int64_t value)
{
    return PyLong_FromLongLong(value);
}

static unsigned char *put_entry(unsigned char *to, const entry *one)
{
    to = put(to, (uint64_t)one->slot, 4);
    to = put(to, (uint64_t)one->generation, 4);
    to = put(to, (uint64_t)one->first_pos, 4);
    to = put(to, (uint64_t)one->n_rows, 4);
    to = put(to, (uint64_t)one->anchor_token, 4);
    to = put(to, (uint64_t)one->anchor_pos, 4);
    to = put(to, (uint64_t)one->flags, 2);
    to = put(to, (uint64_t)one->k_window, 2);
    to = put(to, (uint64_t)one->n_out, 2);
    return put(to, 0, 2);
}

static void put_step(unsigned char *to, uint64_t step_id, uint64_t n_entries, uint64_t flags, uint64_t n_rows)
{
    to = put(to, step_id, 8);
    to = put(to, n_entries, 2);
    to = put(to, flags, 2);
    put(to, n_rows, 4);
}

/* step_head(session, sequence, step_id, entries, rows_bytes, flags): what codec.encode_step_head returns */
static PyObject *step_head(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    unsigned char head[HEADER_BYTES + STEP_BYTES + MAX_REQUESTS * ENTRY_BYTES], *to = head + HEADER_BYTES + STEP_BYTES;
    uint64_t session, sequence, step_id, rows_bytes, flags, n_rows = 0;
    Py_ssize_t n_entries;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 6", count);
    session = PyLong_AsUnsignedLongLong(given[0]);
    sequence = PyLong_AsUnsignedLongLong(given[1]);
    step_id = PyLong_AsUnsignedLongLong(given[2]);
    rows_bytes = PyLong_AsUnsignedLongLong(given[4]);
    flags = PyLong_AsUnsignedLongLong(given[5]);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    if (!PyList_Check(given[3]) || (n_entries = PyList_Size(given[3])) > MAX_REQUESTS || flags > MARGINS)
        Py_RETURN_NONE;
    for (Py_ssize_t index = 0; index < n_entries; index++) {
        entry one;
        if (!read_entry(PyList_GetItem(given[3], index), &one))
            Py_RETURN_NONE;
        to = put_entry(to, &one);
        n_rows += (uint64_t)one.n_rows;
    }
    if (n_rows > UINT32_MAX || rows_bytes > UINT32_MAX - sizeof head)
        Py_RETURN_NONE;
    put_step(put_header(head, 0, session, sequence, (uint64_t)(to - head) - HEADER_BYTES + rows_bytes), step_id,
             (uint64_t)n_entries, flags, n_rows);
    return PyBytes_FromStringAndSize((const char *)head, to - head);
}

/* A part of `view`, as an array of `format`. */
static PyObject *part(PyObject *view, Py_ssize_t from, Py_ssize_t to, PyObject *format)
{
    PyObject *bytes = PySequence_GetSlice(view, from, to);
    PyObject *array = bytes == NULL ? NULL : PyObject_CallMethodObjArgs(bytes, text.cast, format, NULL);
    Py_XDECREF(bytes);
    return array;
}

/* read_answer(frame, session, sequence, StepReply, EntryReply, statuses): what codec.decode_answer returns, `statuses` being the statuses of
 * a request by their numbers */
static PyObject *read_answer(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    Py_buffer frame;
    PyObject *entries = NULL, *result = NULL;
    uint64_t session, sequence;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 6", count);
    session = PyLong_AsUnsignedLongLong(given[1]);
    sequence = PyLong_AsUnsignedLongLong(given[2]);
    if (PyErr_Occurred() || !are_tuple_types(given + 3, 2) || PyObject_GetBuffer(given[0], &frame, PyBUF_SIMPLE) < 0)
        return NULL;
    const unsigned char *bytes = frame.buf, *reply = bytes + HEADER_BYTES;
    const size_t all = (size_t)frame.len, head = HEADER_BYTES + STEP_REPLY_BYTES;
    if (all < head || !is_ours(bytes, all, REPLY, session) || get(bytes + 16, 8) != sequence || get(bytes + 24, 2) != 0)
        goto not_ordinary;
    const size_t n_entries = get(reply + 8, 2), num_drafts = get(reply + 10, 2), flags = get(reply + 12, 2);
    const size_t array = 4 * n_entries * num_drafts, arrays_at = head + ENTRY_REPLY_BYTES * n_entries;
    if (n_entries > MAX_REQUESTS || num_drafts > MAX_DRAFTS || flags > MARGINS || all != arrays_at + (flags ? 3 : 2) * array)
        goto not_ordinary;
    for (size_t index = 0; index < n_entries; index++) {
        if (get(bytes + head + ENTRY_REPLY_BYTES * index + 12, 2) >= N_STATUSES)
            goto not_ordinary;
    }
    entries = PyList_New((Py_ssize_t)n_entries);
    for (size_t index = 0; entries != NULL && index < n_entries; index++) {
        const unsigned char *one = bytes + head + ENTRY_REPLY_BYTES * index;
        PyObject *fields[] = {number((int64_t)get(one, 4)), number((int64_t)get(one + 4, 4)), number((int64_t)get(one + 8, 4)),
                              PySequence_GetItem(given[5], (Py_ssize_t)get(one + 12, 2))};
        PyObject *answer = made(given[4], 4, fields);
        if (answer == NULL)
            Py_CLEAR(entries);
        else
            PyList_SetItem(entries, (Py_ssize_t)index, answer);
    }
    if (entries != NULL) {
        const Py_ssize_t at = (Py_ssize_t)arrays_at, size = (Py_ssize_t)array;
        PyObject *fields[] = {
            PyLong_FromUnsignedLongLong(get(reply, 8)),
            number((int64_t)num_drafts),
            number((int64_t)get(reply + 16, 4)),
            entries,
            part(given[0], at, at + size, text.int32),
            part(given[0], at + size, at + 2 * size, text.float32),
            flags ? part(given[0], at + 2 * size, at + 3 * size, text.float32) : Py_NewRef(Py_None),
            number((int64_t)flags),
            Py_NewRef(Py_None),
        };
        result = made(given[3], 9, fields);
    }
    PyBuffer_Release(&frame);
    return result;

not_ordinary:
    PyBuffer_Release(&frame);
    Py_RETURN_NONE;
}

/* Whether no bits of an array of 32-bit values are above `limit`; false also where it is no array of `count`. */
static bool is_within(PyObject *array, size_t count, uint32_t limit, uint32_t *values)
{
    Py_buffer of;
    bool is_right;
    if (PyObject_GetBuffer(array, &of, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return false;
    }
    is_right = (size_t)of.len == 4 * count;
    if (is_right)
        memcpy(values, of.buf, 4 * count);
    for (size_t index = 0; is_right && index < count; index++)
        is_right = values[index] <= limit;
    PyBuffer_Release(&of);
    return is_right;
}

static bool are_zeros(const uint32_t *values, size_t from, size_t to)
{
    while (from < to && values[from] == 0)
        from++;
    return from == to;
}

/* is_faultless(reply, entries, step_id, num_drafts, vocab_size, context, want_margins): True where replies.find_fault finds none; False says
 * nothing */
static PyObject *is_faultless(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    uint32_t tokens[MAX_REQUESTS * MAX_DRAFTS], confidences[MAX_REQUESTS * MAX_DRAFTS], margins[MAX_REQUESTS * MAX_DRAFTS];
    int64_t asked_for[4], answered[4];
    PyObject *reply, *answers;
    Py_ssize_t n_entries;
    size_t n_values;
    int want_margins;
    if (count != 7)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 7", count);
    reply = given[0];
    for (int index = 0; index < 4; index++)
        asked_for[index] = PyLong_AsLongLong(given[2 + index]);
    want_margins = PyObject_IsTrue(given[6]);
    if (PyErr_Occurred())
        return NULL;
    const int64_t num_drafts = asked_for[1], vocab_size = asked_for[2], context = asked_for[3];
    if (!PyTuple_Check(reply) || PyTuple_Size(reply) != 9 || !PyList_Check(given[1]) || num_drafts < 1 || num_drafts > MAX_DRAFTS ||
        vocab_size < 1 || vocab_size > INT32_MAX)
        Py_RETURN_FALSE;
    answers = PyTuple_GetItem(reply, 3);
    n_entries = PyList_Size(given[1]);
    if (PyLong_AsLongLong(PyTuple_GetItem(reply, 0)) != asked_for[0] || PyLong_AsLongLong(PyTuple_GetItem(reply, 1)) != num_drafts ||
        PyErr_Occurred()) {
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    if (!PyList_Check(answers) || PyList_Size(answers) != n_entries || n_entries > MAX_REQUESTS ||
        (PyTuple_GetItem(reply, 6) != Py_None) != want_margins || PyTuple_GetItem(reply, 8) != Py_None)
        Py_RETURN_FALSE;
    n_values = (size_t)(n_entries * num_drafts);
    if (!is_within(PyTuple_GetItem(reply, 4), n_values, (uint32_t)vocab_size - 1, tokens) ||
        !is_within(PyTuple_GetItem(reply, 5), n_values, ONE, confidences) ||
        (want_margins && !is_within(PyTuple_GetItem(reply, 6), n_values, INFINITE, margins)))
        Py_RETURN_FALSE;
    for (Py_ssize_t index = 0; index < n_entries; index++) {
        size_t at = (size_t)(index * num_drafts), end = at + (size_t)num_drafts, wanted = at;
        entry asked;
        if (!read_entry(PyList_GetItem(given[1], index), &asked) ||
            !read_tuple(PyList_GetItem(answers, index), 4, -1, UINT32_MAX, answered))
            Py_RETURN_FALSE;
        if (answered[0] != asked.slot || answered[1] != asked.generation || answered[2] > context)
            Py_RETURN_FALSE;
        /* Statuses below NOT_NEEDED have drafts. */
        if (answered[3] <= NOT_NEEDED && (answered[3] < NOT_NEEDED) != ((asked.flags & NEED_DRAFT) != 0))
            Py_RETURN_FALSE;
        if (answered[3] < NOT_NEEDED)
            wanted = at + (size_t)(asked.n_out ? asked.n_out : num_drafts);
        if (wanted < end && !(are_zeros(tokens, wanted, end) && are_zeros(confidences, wanted, end)))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

size_t roundcalls_write_step(const roundcalls_round *round, uint64_t sequence, const int32_t *meta, unsigned char *head, size_t room,
                             size_t *rows_bytes_p)
{
    enum { START_POS, VALID_ROWS, ANCHOR_TOKEN, SAMPLED, COLUMNS };
    const size_t bytes = HEADER_BYTES + STEP_BYTES + (size_t)round->requests * ENTRY_BYTES;
    unsigned char *to = head + HEADER_BYTES + STEP_BYTES;
    uint64_t n_rows = 0;
    if (round->requests < 1 || round->requests > MAX_REQUESTS || bytes > room)
        return 0;
    for (uint32_t index = 0; index < round->requests; index++, meta += COLUMNS) {
        const roundcalls_request *of = &round->of[index];
        const entry one = {of->slot,     of->generation,       of->first_pos, meta[VALID_ROWS], meta[ANCHOR_TOKEN],
                           (int64_t)of->first_pos + meta[VALID_ROWS], NEED_DRAFT,    of->k_window,     round->n_out};
        if (meta[START_POS] < 0 || (uint32_t)meta[START_POS] != of->first_pos || meta[VALID_ROWS] < 1 ||
            (uint32_t)meta[VALID_ROWS] > round->context || meta[SAMPLED] == 0)
            return 0;
        to = put_entry(to, &one);
        n_rows += (uint64_t)one.n_rows;
    }
    if (n_rows > round->max_rows || n_rows > round->rows_room / round->row_bytes)
        return 0;
    *rows_bytes_p = n_rows * round->row_bytes;
    put_step(put_header(head, 0, round->session, sequence, bytes - HEADER_BYTES + *rows_bytes_p), round->step_id, round->requests, 0,
             n_rows);
    return bytes;
}

int roundcalls_read_drafts(const roundcalls_round *round, uint64_t sequence, const unsigned char *frame, size_t bytes)
{
    enum { OUTCOME, REQUESTS, OK, ALL_HAVE_DRAFTS = 2 };
    const size_t head = HEADER_BYTES + STEP_REPLY_BYTES, n = round->requests, n_values = n * round->num_drafts;
    const size_t tokens_at = head + ENTRY_REPLY_BYTES * n, confidences_at = tokens_at + 4 * n_values;
    const unsigned char *reply = frame + HEADER_BYTES;
    int32_t *ok = round->reply + OK, *depths = ok + round->slots, *tokens = depths + round->slots;
    int32_t *confidences = tokens + (size_t)round->slots * round->num_drafts;
    if (n > round->slots || round->num_drafts > MAX_DRAFTS || bytes != confidences_at + 4 * n_values ||
        round->reply_bytes < (size_t)(confidences - round->reply + (tokens - depths) * round->num_drafts) * 4)
        return false;
    if (!is_ours(frame, bytes, REPLY, round->session) || get(frame + 16, 8) != sequence || get(frame + 24, 2) != 0 ||
        get(reply, 8) != round->step_id || get(reply + 8, 2) != n || get(reply + 10, 2) != round->num_drafts || get(reply + 12, 2) != 0)
        return false;
    memset(round->reply, 0, round->reply_bytes);
    for (size_t index = 0; index < n; index++) {
        const unsigned char *answer = frame + head + ENTRY_REPLY_BYTES * index;
        const uint32_t wanted = round->n_out ? round->n_out : round->num_drafts;
        if (get(answer, 4) != round->of[index].slot || get(answer + 4, 4) != round->of[index].generation ||
            get(answer + 8, 4) > round->context || get(answer + 12, 2) >= NOT_NEEDED)
            return false;
        for (uint32_t at = 0; at < round->num_drafts; at++) {
            const size_t place = index * round->num_drafts + at;
            const uint32_t token = (uint32_t)get(frame + tokens_at + 4 * place, 4);
            const uint32_t confidence = (uint32_t)get(frame + confidences_at + 4 * place, 4);
            if (token >= round->vocab_size || confidence > ONE || (at >= wanted && (token | confidence) != 0))
                return false;
            tokens[place] = (int32_t)token;
            confidences[place] = (int32_t)confidence;
        }
        ok[index] = 1;
        depths[index] = (int32_t)round->depth;
    }
    round->reply[OUTCOME] = ALL_HAVE_DRAFTS;
    round->reply[REQUESTS] = (int32_t)n;
    return true;
}

/* What a session holds for a slot. */
typedef struct holding {
    PyObject *held; /* borrowed from the dict, NULL: nothing */
    int64_t drafter_slot, generation, start, end;
} holding;

static bool read_attribute(PyObject *of, PyObject *name, int64_t *value_p)
{
    PyObject *value = PyObject_GetAttr(of, name);
    *value_p = value == NULL ? -1 : PyLong_AsLongLong(value);
    Py_XDECREF(value);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return false;
    }
    return true;
}

static bool write_attribute(PyObject *of, PyObject *name, int64_t value)
{
    PyObject *object = number(value);
    int result = object == NULL ? -1 : PyObject_SetAttr(of, name, object);
    Py_XDECREF(object);
    return result == 0;
}

/* Of a slot that holds something of its newest generation. */
static bool read_holding(PyObject *all, int64_t slot, holding *of)
{
    int64_t is_void;
    PyObject *key = number(slot);
    of->held = key == NULL ? NULL : PyDict_GetItemWithError(all, key);
    Py_XDECREF(key);
    PyErr_Clear();
    return of->held != NULL && read_attribute(of->held, text.is_void, &is_void) && !is_void &&
           read_attribute(of->held, text.drafter_slot, &of->drafter_slot) && read_attribute(of->held, text.generation, &of->generation) &&
           read_attribute(of->held, text.start, &of->start) && read_attribute(of->held, text.end, &of->end);
}

typedef struct rules {
    int64_t slots, context, row_bytes, max_rows, num_drafts, vocab_size, max_position;
} rules;

/* What Session._judge finds OK or PARTIAL_WINDOW in an entry that goes on where the last one ended, and needs no row dropped. */
static bool is_ordinary(const entry *one, const holding *of, const rules *by)
{
    const int64_t start = of->start > one->anchor_pos - by->context ? of->start : one->anchor_pos - by->context;
    return one->flags == NEED_DRAFT && one->generation == of->generation && one->first_pos == of->end && one->n_rows > 0 &&
           one->anchor_pos == one->first_pos + one->n_rows && one->anchor_pos <= by->max_position && one->anchor_token >= 0 &&
           one->anchor_token < by->vocab_size && one->n_out <= by->num_drafts && start <= one->first_pos;
}

typedef struct judged {
    PyObject *entries, *replies, *drafts, *held, *places;
    int64_t verified, accepted;
} judged;

static void forget(judged *step)
{
    Py_CLEAR(step->entries);
    Py_CLEAR(step->replies);
    Py_CLEAR(step->drafts);
    Py_CLEAR(step->held);
    Py_CLEAR(step->places);
}

/* Put what stands for one entry at `index` into the lists. `makes`: Entry, EntryReply, DraftEntry, OK, PARTIAL_WINDOW. */
static bool note(judged *step, Py_ssize_t index, const entry *one, const holding *of, const rules *by, PyObject *makes)
{
    const int64_t start = of->start > one->anchor_pos - by->context ? of->start : one->anchor_pos - by->context;
    const int64_t window = one->anchor_pos - start;
    PyObject *status = PyTuple_GetItem(makes, start > 0 && window < by->context ? 4 : 3);
    PyObject *entry_fields[] = {number(one->slot), number(one->generation), number(one->first_pos), number(one->n_rows),
                                number(one->anchor_token), number(one->anchor_pos), number(one->flags), number(one->k_window),
                                number(one->n_out)};
    PyObject *reply_fields[] = {number(one->slot), number(one->generation), number(window), Py_NewRef(status)};
    PyObject *draft_fields[] = {number(of->drafter_slot), Py_NewRef(Py_False), number(one->first_pos), number(one->n_rows),
                                number(start), number(one->anchor_token), Py_NewRef(Py_True),
                                number(one->n_out ? one->n_out : by->num_drafts), number(0), PyFloat_FromDouble(0.0)};
    PyObject *entry_made = made(PyTuple_GetItem(makes, 0), 9, entry_fields);
    PyObject *reply_made = made(PyTuple_GetItem(makes, 1), 4, reply_fields);
    PyObject *draft_made = made(PyTuple_GetItem(makes, 2), 10, draft_fields);
    PyObject *place = number(index);
    bool is_whole = entry_made != NULL && reply_made != NULL && draft_made != NULL && place != NULL;
    /* Each takes what it is given, NULL too, which the lists' end clears. */
    PyList_SetItem(step->entries, index, entry_made);
    PyList_SetItem(step->replies, index, reply_made);
    PyList_SetItem(step->drafts, index, draft_made);
    PyList_SetItem(step->held, index, Py_NewRef(of->held));
    PyList_SetItem(step->places, index, place);
    if (one->k_window) {
        step->verified += one->k_window;
        step->accepted += one->n_rows - 1 < one->k_window ? one->n_rows - 1 : one->k_window;
    }
    return is_whole;
}

static PyObject *reply_head(uint64_t session, uint64_t sequence, uint64_t step_id, uint64_t flags, const entry *entries, size_t count,
                            const holding *of, const rules *by)
{
    unsigned char head[HEADER_BYTES + STEP_REPLY_BYTES + MAX_REQUESTS * ENTRY_REPLY_BYTES], *to;
    const uint64_t arrays = 4 * count * (uint64_t)by->num_drafts * (flags ? 3 : 2);
    to = put_header(head, REPLY, session, sequence, STEP_REPLY_BYTES + ENTRY_REPLY_BYTES * count + arrays);
    to = put(to, step_id, 8);
    to = put(to, count, 2);
    to = put(to, (uint64_t)by->num_drafts, 2);
    to = put(to, flags, 2);
    to = put(to, 0, 2);
    to = put(to, 0, 8); /* the worker's time, which is not known yet; reserved */
    for (size_t index = 0; index < count; index++) {
        const entry *one = &entries[index];
        const int64_t start = of[index].start > one->anchor_pos - by->context ? of[index].start : one->anchor_pos - by->context;
        to = put(to, (uint64_t)one->slot, 4);
        to = put(to, (uint64_t)one->generation, 4);
        to = put(to, (uint64_t)(one->anchor_pos - start), 4);
        to = put(to, start > 0 && one->anchor_pos - start < by->context, 2);
        to = put(to, 0, 2);
    }
    return PyByteArray_FromStringAndSize((const char *)head, to - head);
}

/* begin_step(frame, arrived, session, rules, held, makes): (sequence, step_id, flags, entries, replies, drafts, held, places, verified,
 * accepted, reply's head) of a STEP of which `arrived` bytes are there, and `held` is moved on */
static PyObject *begin_step(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    entry entries[MAX_REQUESTS];
    holding of[MAX_REQUESTS];
    int64_t numbers[7];
    judged step = {0};
    rules by;
    Py_buffer frame;
    size_t arrived;
    uint64_t session;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 6", count);
    arrived = PyLong_AsSize_t(given[1]);
    session = PyLong_AsUnsignedLongLong(given[2]);
    if (PyErr_Occurred())
        return NULL;
    if (!read_tuple(given[3], 7, -1, UINT32_MAX, numbers) || !PyDict_Check(given[4]) || !PyTuple_Check(given[5]) ||
        PyTuple_Size(given[5]) != 5)
        return PyErr_Format(PyExc_TypeError, "expected rules, a dict, three types and two statuses");
    if (numbers[4] > MAX_DRAFTS)
        Py_RETURN_NONE;
    for (Py_ssize_t index = 0; index < 3; index++) {
        PyObject *type = PyTuple_GetItem(given[5], index);
        if (!are_tuple_types(&type, 1))
            return NULL;
    }
    by = (rules){numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6]};
    if (PyObject_GetBuffer(given[0], &frame, PyBUF_SIMPLE) < 0)
        return NULL;

    const unsigned char *bytes = frame.buf, *at = bytes + HEADER_BYTES + STEP_BYTES;
    const size_t all = (size_t)frame.len;
    if (arrived > all || arrived < HEADER_BYTES + STEP_BYTES || !is_ours(bytes, all, 0, session) || get(bytes + 24, 2) != 0)
        goto not_ordinary;
    const uint64_t sequence = get(bytes + 16, 8), step_id = get(bytes + HEADER_BYTES, 8);
    const size_t n_entries = get(bytes + HEADER_BYTES + 8, 2), flags = get(bytes + HEADER_BYTES + 10, 2);
    const size_t n_rows = get(bytes + HEADER_BYTES + 12, 4), head = HEADER_BYTES + STEP_BYTES + ENTRY_BYTES * n_entries;
    if (n_entries == 0 || n_entries > MAX_REQUESTS || flags > MARGINS || arrived < head || n_rows > (size_t)by.max_rows ||
        all != head + n_rows * (size_t)by.row_bytes)
        goto not_ordinary;
    size_t counted = 0;
    for (size_t index = 0; index < n_entries; index++, at += ENTRY_BYTES) {
        entry *one = &entries[index];
        *one = (entry){(int64_t)get(at, 4), (int64_t)get(at + 4, 4), (int64_t)get(at + 8, 4), (int64_t)get(at + 12, 4),
                       (int32_t)get(at + 16, 4), (int64_t)get(at + 20, 4), (int64_t)get(at + 24, 2), (int64_t)get(at + 26, 2),
                       (int64_t)get(at + 28, 2)};
        for (size_t other = 0; other < index; other++) {
            if (entries[other].slot == one->slot)
                goto not_ordinary;
        }
        if (one->slot >= by.slots || !read_holding(given[4], one->slot, &of[index]) || !is_ordinary(one, &of[index], &by))
            goto not_ordinary;
        counted += (size_t)one->n_rows;
    }
    PyBuffer_Release(&frame);
    if (counted != n_rows)
        Py_RETURN_NONE;

    PyObject *result = NULL, *reply;
    bool is_whole = true;
    step.entries = PyList_New((Py_ssize_t)n_entries);
    step.replies = PyList_New((Py_ssize_t)n_entries);
    step.drafts = PyList_New((Py_ssize_t)n_entries);
    step.held = PyList_New((Py_ssize_t)n_entries);
    step.places = PyList_New((Py_ssize_t)n_entries);
    if (step.entries == NULL || step.replies == NULL || step.drafts == NULL || step.held == NULL || step.places == NULL)
        goto forget_step;
    for (size_t index = 0; is_whole && index < n_entries; index++)
        is_whole = note(&step, (Py_ssize_t)index, &entries[index], &of[index], &by, given[5]);
    if (!is_whole || (reply = reply_head(session, sequence, step_id, flags, entries, n_entries, of, &by)) == NULL)
        goto forget_step;
    for (size_t index = 0; index < n_entries; index++) {
        const int64_t end = entries[index].anchor_pos, start = end - by.context;
        is_whole = is_whole && write_attribute(of[index].held, text.end, end) &&
                   write_attribute(of[index].held, text.start, of[index].start > start ? of[index].start : start);
    }
    if (is_whole)
        result = Py_BuildValue("KKnOOOOOLLO", (unsigned long long)sequence, (unsigned long long)step_id, (Py_ssize_t)flags, step.entries,
                               step.replies, step.drafts, step.held, step.places, (long long)step.verified, (long long)step.accepted,
                               reply);
    Py_DECREF(reply);
forget_step:
    forget(&step);
    return result;

not_ordinary:
    PyBuffer_Release(&frame);
    Py_RETURN_NONE;
}

/* Whether it is an array of `count` values of 4 bytes, `format` each. */
static bool is_array(PyObject *array, const char *format, size_t count)
{
    Py_buffer of;
    bool is_right;
    if (PyObject_GetBuffer(array, &of, PyBUF_FORMAT | PyBUF_ND) < 0) {
        PyErr_Clear();
        return false;
    }
    is_right = of.format != NULL && strcmp(of.format, format) == 0 && (size_t)of.len == 4 * count;
    PyBuffer_Release(&of);
    return is_right;
}

/* finish_reply(head, reply): what codec.finish_step_reply returns, the head completed */
static PyObject *finish_reply(PyObject *Py_UNUSED(self), PyObject *const *given, Py_ssize_t count)
{
    enum { WORKER_US_AT = HEADER_BYTES + 16 };
    Py_buffer head;
    PyObject *reply, *margins, *frame;
    int64_t num_drafts, worker_us, flags;
    Py_ssize_t n_entries;
    size_t n_values;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "%zd arguments, expected 2", count);
    reply = given[1];
    if (!PyTuple_Check(reply) || PyTuple_Size(reply) != 9 || !PyList_Check(PyTuple_GetItem(reply, 3)))
        Py_RETURN_NONE;
    num_drafts = PyLong_AsLongLong(PyTuple_GetItem(reply, 1));
    worker_us = PyLong_AsLongLong(PyTuple_GetItem(reply, 2));
    flags = PyLong_AsLongLong(PyTuple_GetItem(reply, 7));
    if (PyErr_Occurred()) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    n_entries = PyList_Size(PyTuple_GetItem(reply, 3));
    margins = flags ? PyTuple_GetItem(reply, 6) : NULL;
    if (num_drafts < 0 || num_drafts > MAX_DRAFTS || n_entries > MAX_REQUESTS || flags < 0 || flags > MARGINS || worker_us < 0)
        Py_RETURN_NONE;
    n_values = (size_t)(n_entries * num_drafts);
    if (!is_array(PyTuple_GetItem(reply, 4), "i", n_values) || !is_array(PyTuple_GetItem(reply, 5), "f", n_values) ||
        (margins != NULL && !is_array(margins, "f", n_values)))
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(given[0], &head, PyBUF_WRITABLE) < 0)
        return NULL;
    if ((size_t)head.len != (size_t)(HEADER_BYTES + STEP_REPLY_BYTES + ENTRY_REPLY_BYTES * n_entries)) {
        PyBuffer_Release(&head);
        Py_RETURN_NONE;
    }
    put((unsigned char *)head.buf + WORKER_US_AT, worker_us > UINT32_MAX ? UINT32_MAX : (uint64_t)worker_us, 4);
    PyBuffer_Release(&head);
    frame = PyList_New(margins == NULL ? 3 : 4);
    if (frame != NULL) {
        PyList_SetItem(frame, 0, Py_NewRef(given[0]));
        PyList_SetItem(frame, 1, Py_NewRef(PyTuple_GetItem(reply, 4)));
        PyList_SetItem(frame, 2, Py_NewRef(PyTuple_GetItem(reply, 5)));
        if (margins != NULL)
            PyList_SetItem(frame, 3, Py_NewRef(margins));
    }
    return frame;
}

PyMethodDef roundcalls_of_steps[] = {
    {"step_head", (PyCFunction)(void (*)(void))step_head, METH_FASTCALL, NULL},
    {"read_answer", (PyCFunction)(void (*)(void))read_answer, METH_FASTCALL, NULL},
    {"is_faultless", (PyCFunction)(void (*)(void))is_faultless, METH_FASTCALL, NULL},
    {"finish_reply", (PyCFunction)(void (*)(void))finish_reply, METH_FASTCALL, NULL},
    {"begin_step", (PyCFunction)(void (*)(void))begin_step, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
