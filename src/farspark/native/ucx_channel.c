/* The contract is ucx_channel.h; here is only how it is kept. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "ucx_channel.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#ifndef UCXCHANNEL_BUILD
#define UCXCHANNEL_BUILD ""
#endif

#define MESSAGE_ID 1u
/* A HELLO of another version is told from one of ours. */
#define GREETING "farspark-ucx-1"
#define TEXT_BYTES 256
#define SECOND_NS INT64_C(1000000000)
/* A sleeper looks this often all the same: UCX's keepalive runs inside progress. */
#define MAX_SLEEP_NS SECOND_NS
/* Once the deadline has passed, what is there is still taken, but a peer that never pauses does not hold us. */
#define PROGRESS_PAST_DEADLINE 64
/* A frame of several pieces up to this size is sent as one: UCX takes longer to look at pieces than it takes to copy them. */
#define JOINED_BYTES 4096

typedef enum kind { HELLO = 0x46535001, WELCOME, FRAME, FIN } kind;

typedef struct header {
    uint32_t kind;
    uint32_t number;
} header;

/* A message on its way out. UCX reads the header and the pieces until it has completed. */
typedef struct sending {
    struct sending *next;
    ucxchannel *channel;
    header header;
    bool is_done;
    ucs_status_t status;
    ucp_dt_iov_t pieces[];
} sending;

/* A frame that nobody has taken yet: memory of UCX's, or ours where UCX lends it for the call only. */
typedef struct received {
    struct received *next;
    void *data;
    size_t bytes;
    bool is_ours;
} received;

struct ucxchannel_context {
    atomic_uint users;
    ucp_context_h ucp;
};

struct ucxchannel {
    ucxchannel_context *context;
    ucp_worker_h worker;
    ucp_ep_h endpoint; /* NULL once it is closed */
    int events;        /* UCX's descriptor; wake is ours */
    int wake;
    atomic_bool is_woken;

    uint32_t sent; /* messages, in each direction */
    uint32_t came;
    sending *sendings; /* those that UCX has, and those that are done and not freed yet */
    received *first, *last;
    size_t unread_bytes, max_unread_bytes;

    bool is_greeted;  /* HELLO or WELCOME of the peer came */
    bool is_ended;    /* FIN of the peer came */
    bool said_fin;
    ucs_status_t fault;      /* of the endpoint; UCS_OK as long as it works */
    int fault_as;            /* the status that calls return for it */
    char why[TEXT_BYTES];

    /* Of a channel that is being established for a listener. */
    ucxchannel *next;
    sending *welcome;
    int64_t until_ns;
};

struct ucxchannel_listener {
    ucxchannel_context *context;
    ucp_worker_h worker;
    ucp_listener_h ucp;
    int events;
    int wake;
    atomic_bool is_woken;
    ucp_conn_request_h asking[UCXCHANNEL_MAX_EMBRYOS]; /* not looked at yet */
    unsigned n_asking;
    ucxchannel *embryos;
    unsigned n_embryos;
};

static _Thread_local char error_text[TEXT_BYTES];

__attribute__((format(printf, 2, 3))) static int fail(int status, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(error_text, sizeof error_text, format, values);
    va_end(values);
    return status;
}

static int fail_ucx(ucs_status_t status, const char *what)
{
    int as = UCXCHANNEL_UCX;
    if (status == UCS_ERR_NO_MEMORY)
        as = UCXCHANNEL_NO_MEMORY;
    else if (status == UCS_ERR_BUSY || status == UCS_ERR_ALREADY_EXISTS)
        as = UCXCHANNEL_IN_USE;
    else if (status == UCS_ERR_UNREACHABLE || status == UCS_ERR_NO_DEVICE)
        as = UCXCHANNEL_UNREACHABLE;
    return fail(as, "%s: %s", what, ucs_status_string(status));
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * SECOND_NS + now.tv_nsec;
}

static int64_t add_ns(int64_t start, int64_t more)
{
    return more > INT64_MAX - start ? INT64_MAX : start + more;
}

uint32_t ucxchannel_version(void)
{
    return UCXCHANNEL_VERSION;
}

const char *ucxchannel_build(void)
{
    return UCXCHANNEL_BUILD;
}

const char *ucxchannel_error(void)
{
    return error_text;
}

const char *ucxchannel_ucx_version(void)
{
    return ucp_get_version_string();
}

/* Addresses. */

static int to_sockaddr(const ucxchannel_address *address, struct sockaddr_storage *sock, socklen_t *bytes_p)
{
    struct sockaddr_in *four = (struct sockaddr_in *)sock;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)sock;
    memset(sock, 0, sizeof *sock);
    if (address == NULL || memchr(address->host, 0, sizeof address->host) == NULL || address->port > UINT16_MAX)
        return fail(UCXCHANNEL_INVALID, "no address");
    if (inet_pton(AF_INET, address->host, &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons((uint16_t)address->port);
        *bytes_p = sizeof *four;
        return UCXCHANNEL_OK;
    }
    if (inet_pton(AF_INET6, address->host, &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons((uint16_t)address->port);
        six->sin6_scope_id = address->scope;
        *bytes_p = sizeof *six;
        return UCXCHANNEL_OK;
    }
    return fail(UCXCHANNEL_INVALID, "%s is not a numeric address", address->host);
}

static void from_sockaddr(const struct sockaddr_storage *sock, ucxchannel_address *address)
{
    memset(address, 0, sizeof *address);
    if (sock->ss_family == AF_INET6) {
        const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)sock;
        inet_ntop(AF_INET6, &six->sin6_addr, address->host, sizeof address->host);
        address->port = ntohs(six->sin6_port);
        address->scope = six->sin6_scope_id;
    } else {
        const struct sockaddr_in *four = (const struct sockaddr_in *)sock;
        inet_ntop(AF_INET, &four->sin_addr, address->host, sizeof address->host);
        address->port = ntohs(four->sin_port);
    }
}

/* The context. */

int ucxchannel_context_create(const char *const *settings, ucxchannel_context **context_p)
{
    ucxchannel_context *context;
    ucp_config_t *config;
    ucs_status_t status;
    ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
        /* A listener's channels are used by a thread each. */
        .mt_workers_shared = 1,
    };

    if (context_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no place for the context");
    context = calloc(1, sizeof *context);
    if (context == NULL)
        return fail(UCXCHANNEL_NO_MEMORY, "no memory for a context");
    atomic_init(&context->users, 1);
    status = ucp_config_read(NULL, NULL, &config);
    if (status != UCS_OK) {
        fail_ucx(status, "reading UCX's configuration");
        goto free_context;
    }
    for (; settings != NULL && settings[0] != NULL; settings += 2) {
        bool may_be_unknown = settings[0][0] == '?';
        status = ucp_config_modify(config, settings[0] + may_be_unknown, settings[1]);
        if (status != UCS_OK && !may_be_unknown) {
            fail(UCXCHANNEL_UCX, "UCX_%s=%s: %s", settings[0], settings[1], ucs_status_string(status));
            goto release_config;
        }
    }
    status = ucp_init(&params, config, &context->ucp);
    if (status != UCS_OK) {
        fail_ucx(status, "initialising UCX");
        goto release_config;
    }
    ucp_config_release(config);
    *context_p = context;
    return UCXCHANNEL_OK;

release_config:
    ucp_config_release(config);
free_context:
    free(context);
    return status == UCS_ERR_NO_DEVICE ? UCXCHANNEL_UNREACHABLE : UCXCHANNEL_UCX;
}

static int print_to(char *text, size_t size, void (*print)(const void *what, FILE *stream), const void *what)
{
    FILE *stream;
    if (text == NULL || size == 0)
        return fail(UCXCHANNEL_INVALID, "no place for the text");
    text[0] = 0;
    stream = fmemopen(text, size, "w");
    if (stream == NULL)
        return fail(UCXCHANNEL_SYSTEM, "no stream: %s", strerror(errno));
    print(what, stream);
    fclose(stream);
    text[size - 1] = 0;
    return UCXCHANNEL_OK;
}

static void print_context(const void *what, FILE *stream)
{
    ucp_context_print_info(((const ucxchannel_context *)what)->ucp, stream);
}

int ucxchannel_context_describe(ucxchannel_context *context, char *text, size_t size)
{
    if (context == NULL)
        return fail(UCXCHANNEL_INVALID, "no context");
    return print_to(text, size, print_context, context);
}

static ucxchannel_context *context_use(ucxchannel_context *context)
{
    atomic_fetch_add(&context->users, 1);
    return context;
}

void ucxchannel_context_release(ucxchannel_context *context)
{
    if (context == NULL || atomic_fetch_sub(&context->users, 1) != 1)
        return;
    ucp_cleanup(context->ucp);
    free(context);
}

/* A UCX worker, and the two descriptors that its user sleeps on. */

static int worker_create(ucxchannel_context *context, ucp_worker_h *worker_p, int *events_p, int *wake_p)
{
    ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        /* Made by one thread and used by another, never by two at a time. */
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    ucp_worker_h worker;
    ucs_status_t status;
    int result;

    status = ucp_worker_create(context->ucp, &params, &worker);
    if (status != UCS_OK)
        return fail_ucx(status, "creating a UCX worker");
    status = ucp_worker_get_efd(worker, events_p);
    if (status != UCS_OK) {
        result = fail_ucx(status, "the worker's event descriptor");
        goto destroy_worker;
    }
    *wake_p = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (*wake_p < 0) {
        result = fail(UCXCHANNEL_SYSTEM, "eventfd: %s", strerror(errno));
        goto destroy_worker;
    }
    *worker_p = worker;
    return UCXCHANNEL_OK;

destroy_worker:
    ucp_worker_destroy(worker);
    return result;
}

static void raise_event(int descriptor)
{
    const uint64_t one = 1;
    /* Full only if it is raised already. */
    if (write(descriptor, &one, sizeof one) < 0)
        return;
}

/* Sleep until one of the descriptors has something, at most `for_ns`. False if a signal came. */
static bool sleep_on(struct pollfd *descriptors, nfds_t count, int64_t for_ns)
{
    struct timespec most;
    if (for_ns > MAX_SLEEP_NS)
        for_ns = MAX_SLEEP_NS;
    most.tv_sec = for_ns / SECOND_NS;
    most.tv_nsec = for_ns % SECOND_NS;
    return ppoll(descriptors, count, &most, NULL) >= 0 || errno != EINTR;
}

/* A channel, and what UCX tells it. All of this runs on the thread that uses the channel, inside ucp_worker_progress. */

__attribute__((format(printf, 4, 5))) static void break_off(ucxchannel *channel, int as, ucs_status_t status,
                                                            const char *format, ...)
{
    va_list values;
    if (channel->fault != UCS_OK)
        return;
    channel->fault = status;
    channel->fault_as = as;
    va_start(values, format);
    vsnprintf(channel->why, sizeof channel->why, format, values);
    va_end(values);
}

static void on_fault(void *argument, ucp_ep_h endpoint, ucs_status_t status)
{
    (void)endpoint;
    break_off(argument, UCXCHANNEL_GONE, status, "%s", ucs_status_string(status));
}

static void on_sent(void *request, ucs_status_t status, void *argument)
{
    sending *message = argument;
    message->status = status;
    message->is_done = true;
    ucp_request_free(request);
}

static ucs_status_t keep_frame(ucxchannel *channel, void *data, size_t bytes, bool is_lasting)
{
    received *frame;
    if (bytes > channel->max_unread_bytes) {
        break_off(channel, UCXCHANNEL_FOREIGN, UCS_ERR_EXCEEDS_LIMIT, "frame of %zu bytes announced, at most %zu", bytes,
                  channel->max_unread_bytes);
        return UCS_OK;
    }
    if (bytes > channel->max_unread_bytes - channel->unread_bytes) {
        break_off(channel, UCXCHANNEL_GONE, UCS_ERR_EXCEEDS_LIMIT, "the peer sends without waiting: %zu bytes unread, at most %zu",
                  channel->unread_bytes + bytes, channel->max_unread_bytes);
        return UCS_OK;
    }
    frame = malloc(sizeof *frame + (is_lasting ? 0 : bytes));
    if (frame == NULL) {
        break_off(channel, UCXCHANNEL_GONE, UCS_ERR_NO_MEMORY, "no memory for a frame of %zu bytes", bytes);
        return UCS_OK;
    }
    frame->next = NULL;
    frame->bytes = bytes;
    frame->is_ours = !is_lasting;
    frame->data = is_lasting ? data : frame + 1;
    if (!is_lasting && bytes > 0)
        memcpy(frame->data, data, bytes);
    if (channel->last == NULL)
        channel->first = frame;
    else
        channel->last->next = frame;
    channel->last = frame;
    channel->unread_bytes += bytes;
    return is_lasting ? UCS_INPROGRESS : UCS_OK;
}

static ucs_status_t on_message(void *argument, const void *header_data, size_t header_bytes, void *data, size_t bytes,
                               const ucp_am_recv_param_t *params)
{
    ucxchannel *channel = argument;
    header header;

    if (channel->fault != UCS_OK)
        return UCS_OK;
    if (header_bytes != sizeof header || (params->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        break_off(channel, UCXCHANNEL_FOREIGN, UCS_ERR_INVALID_PARAM, "the peer speaks another language");
        return UCS_OK;
    }
    memcpy(&header, header_data, sizeof header);
    if (header.number != channel->came) {
        break_off(channel, UCXCHANNEL_GONE, UCS_ERR_IO_ERROR, "message %u came where %u was due", header.number, channel->came);
        return UCS_OK;
    }
    channel->came++;
    if (!channel->is_greeted) {
        if ((header.kind == HELLO || header.kind == WELCOME) && bytes == sizeof GREETING && memcmp(data, GREETING, bytes) == 0)
            channel->is_greeted = true;
        else
            break_off(channel, UCXCHANNEL_FOREIGN, UCS_ERR_INVALID_PARAM, "the peer speaks another language");
        return UCS_OK;
    }
    if (header.kind == FRAME && !channel->is_ended)
        return keep_frame(channel, data, bytes, (params->recv_attr & UCP_AM_RECV_ATTR_FLAG_DATA) != 0);
    if (header.kind == FIN && bytes == 0) {
        channel->is_ended = true;
        return UCS_OK;
    }
    break_off(channel, UCXCHANNEL_GONE, UCS_ERR_INVALID_PARAM, "the peer sent a message out of turn");
    return UCS_OK;
}

/* params->conn_request is NULL afterwards, unless it was not UCX's yet. */
static int channel_create(ucxchannel_context *context, ucp_ep_params_t *params, ucxchannel **channel_p)
{
    ucp_am_handler_param_t handler = {
        .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG,
        .id = MESSAGE_ID,
        .flags = UCP_AM_FLAG_WHOLE_MSG,
        .cb = on_message,
    };
    ucxchannel *channel = calloc(1, sizeof *channel);
    ucs_status_t status;
    int result;

    if (channel == NULL)
        return fail(UCXCHANNEL_NO_MEMORY, "no memory for a channel");
    atomic_init(&channel->is_woken, false);
    channel->max_unread_bytes = SIZE_MAX;
    result = worker_create(context, &channel->worker, &channel->events, &channel->wake);
    if (result != UCXCHANNEL_OK)
        goto free_channel;
    handler.arg = channel;
    status = ucp_worker_set_am_recv_handler(channel->worker, &handler);
    if (status != UCS_OK) {
        result = fail_ucx(status, "setting the handler of messages");
        goto destroy_worker;
    }
    params->field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params->err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params->err_handler.cb = on_fault;
    params->err_handler.arg = channel;
    status = ucp_ep_create(channel->worker, params, &channel->endpoint);
    params->conn_request = NULL;
    if (status != UCS_OK) {
        result = fail_ucx(status, "creating an endpoint");
        goto destroy_worker;
    }
    channel->context = context_use(context);
    *channel_p = channel;
    return UCXCHANNEL_OK;

destroy_worker:
    close(channel->wake);
    ucp_worker_destroy(channel->worker);
free_channel:
    free(channel);
    return result;
}

/* Sending. */

static void join(const ucxchannel_piece *pieces, size_t count, void *into)
{
    unsigned char *at = into;
    for (size_t i = 0; i < count; i++) {
        if (pieces[i].bytes > 0)
            memcpy(at, pieces[i].data, pieces[i].bytes);
        at += pieces[i].bytes;
    }
}

/* Hand a message to UCX. NULL without memory; else it is in channel->sendings until it is done and reaped. */
static sending *post(ucxchannel *channel, kind kind, const ucxchannel_piece *pieces, size_t count)
{
    ucp_request_param_t params = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_DATATYPE |
                        UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        .flags = UCP_AM_SEND_FLAG_EAGER,
        .cb.send = on_sent,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    ucxchannel_piece whole = {NULL, 0};
    sending *message;
    ucs_status_ptr_t request;
    bool is_joined;

    for (size_t i = 0; i < count; i++)
        whole.bytes += pieces[i].bytes;
    is_joined = count > 1 && whole.bytes <= JOINED_BYTES;
    message = malloc(sizeof *message + (is_joined ? whole.bytes : count * sizeof message->pieces[0]));

    if (message == NULL) {
        break_off(channel, UCXCHANNEL_GONE, UCS_ERR_NO_MEMORY, "no memory for a message of %zu pieces", count);
        return NULL;
    }
    *message = (sending){.channel = channel, .header = {kind, channel->sent}};
    params.user_data = message;
    params.datatype = ucp_dt_make_contig(1);
    if (count == 1) {
        whole = pieces[0];
    } else if (is_joined) {
        join(pieces, count, message->pieces);
        whole.data = message->pieces;
    } else if (count > 1) {
        for (size_t i = 0; i < count; i++)
            message->pieces[i] = (ucp_dt_iov_t){(void *)(uintptr_t)pieces[i].data, pieces[i].bytes};
        params.datatype = ucp_dt_make_iov();
        whole = (ucxchannel_piece){message->pieces, count};
    }
    request = ucp_am_send_nbx(channel->endpoint, MESSAGE_ID, &message->header, sizeof message->header, whole.data, whole.bytes,
                              &params);
    if (UCS_PTR_IS_PTR(request)) {
        message->status = UCS_INPROGRESS;
    } else {
        message->is_done = true;
        message->status = UCS_PTR_STATUS(request);
    }
    message->next = channel->sendings;
    channel->sendings = message;
    if (!message->is_done || message->status == UCS_OK)
        channel->sent++;
    else
        break_off(channel, UCXCHANNEL_GONE, message->status, "%s", ucs_status_string(message->status));
    return message;
}

/* Free what is done; true if UCX still has something. */
static bool reap(ucxchannel *channel)
{
    sending **at = &channel->sendings;
    while (*at != NULL) {
        sending *message = *at;
        if (!message->is_done) {
            at = &message->next;
            continue;
        }
        *at = message->next;
        free(message);
    }
    return channel->sendings != NULL;
}

/* Close the endpoint by force and wait until UCX has let go of everything that was being sent, or `until_ns`. */
static bool abandon(ucxchannel *channel, int64_t until_ns)
{
    ucp_request_param_t params = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
    ucs_status_ptr_t request = NULL;
    bool is_closed;

    break_off(channel, UCXCHANNEL_GONE, UCS_ERR_CANCELED, "given up in the middle of a frame");
    if (channel->endpoint != NULL)
        request = ucp_ep_close_nbx(channel->endpoint, &params);
    channel->endpoint = NULL;
    is_closed = !UCS_PTR_IS_PTR(request);
    while (reap(channel) || !is_closed) {
        ucp_worker_progress(channel->worker);
        is_closed = is_closed || ucp_request_check_status(request) != UCS_INPROGRESS;
        if (now_ns() >= until_ns)
            break;
    }
    if (UCS_PTR_IS_PTR(request))
        ucp_request_free(request);
    return !reap(channel);
}

/* Waiting. */

static void answer_fin(ucxchannel *channel)
{
    if (!channel->is_ended || channel->said_fin || channel->fault != UCS_OK || channel->endpoint == NULL)
        return;
    channel->said_fin = true;
    post(channel, FIN, NULL, 0);
}

/* Why nothing more can come of this channel, or OK. */
static int state_of(ucxchannel *channel)
{
    if (atomic_load(&channel->is_woken))
        return fail(UCXCHANNEL_CLOSED, "closed");
    /* Before the fault: a peer that has said FIN is expected to vanish. */
    if (channel->is_ended)
        return fail(UCXCHANNEL_GONE, "closed by the peer");
    if (channel->fault != UCS_OK)
        return fail(channel->fault_as, "%s", channel->why);
    return UCXCHANNEL_OK;
}

static bool is_sent(ucxchannel *channel, const sending *message)
{
    (void)channel;
    return message->is_done;
}

static bool has_frame(ucxchannel *channel, const sending *message)
{
    (void)message;
    return channel->first != NULL;
}

static bool is_greeted(ucxchannel *channel, const sending *message)
{
    (void)message;
    return channel->is_greeted;
}

static bool is_over(ucxchannel *channel, const sending *message)
{
    (void)message;
    return channel->is_ended || channel->fault != UCS_OK;
}

/* Progress until `comes_true`. OK, TIMED_OUT, INTERRUPTED, or what state_of says. */
static int wait_until(ucxchannel *channel, bool (*comes_true)(ucxchannel *, const sending *), const sending *message,
                      int64_t spin_ns, int64_t deadline_ns)
{
    struct pollfd descriptors[] = {{channel->events, POLLIN, 0}, {channel->wake, POLLIN, 0}};
    int64_t idle_since_ns = 0;
    unsigned past_deadline = 0;

    for (;;) {
        bool is_busy = ucp_worker_progress(channel->worker) != 0;
        int64_t now;
        int state;
        answer_fin(channel);
        if (comes_true(channel, message))
            return UCXCHANNEL_OK;
        state = state_of(channel);
        if (state != UCXCHANNEL_OK)
            return state;
        now = now_ns();
        if (now >= deadline_ns) {
            if (!is_busy || ++past_deadline > PROGRESS_PAST_DEADLINE)
                return UCXCHANNEL_TIMED_OUT;
            continue;
        }
        if (is_busy) {
            idle_since_ns = 0;
            continue;
        }
        if (idle_since_ns == 0)
            idle_since_ns = now;
        if (now - idle_since_ns < spin_ns || ucp_worker_arm(channel->worker) != UCS_OK)
            continue;
        if (!sleep_on(descriptors, 2, deadline_ns - now))
            return UCXCHANNEL_INTERRUPTED;
        idle_since_ns = 0;
    }
}

/* The client's side of establishing. */

int ucxchannel_connect(ucxchannel_context *context, const ucxchannel_address *to, const ucxchannel_address *from,
                       int64_t deadline_ns, ucxchannel **channel_p)
{
    static const ucxchannel_piece greeting = {GREETING, sizeof GREETING};
    struct sockaddr_storage theirs, ours;
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr.addr = (struct sockaddr *)&theirs,
    };
    ucxchannel *channel;
    ucs_status_t fault;
    int result;

    if (context == NULL || channel_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no context, or no place for the channel");
    result = to_sockaddr(to, &theirs, &params.sockaddr.addrlen);
    if (result == UCXCHANNEL_OK && from != NULL) {
        params.field_mask |= UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR;
        params.local_sockaddr.addr = (struct sockaddr *)&ours;
        result = to_sockaddr(from, &ours, &params.local_sockaddr.addrlen);
    }
    if (result == UCXCHANNEL_OK)
        result = channel_create(context, &params, &channel);
    if (result != UCXCHANNEL_OK)
        return result;
    post(channel, HELLO, &greeting, 1);
    do {
        result = wait_until(channel, is_greeted, NULL, 0, deadline_ns);
    } while (result == UCXCHANNEL_INTERRUPTED);
    if (result == UCXCHANNEL_OK) {
        *channel_p = channel;
        return UCXCHANNEL_OK;
    }
    fault = channel->fault;
    ucxchannel_destroy(channel);
    if (result != UCXCHANNEL_GONE)
        return result;
    switch (fault) {
    case UCS_ERR_REJECTED:
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_NOT_CONNECTED:
        return UCXCHANNEL_REFUSED;
    case UCS_ERR_UNREACHABLE:
    case UCS_ERR_NO_DEVICE:
        return UCXCHANNEL_UNREACHABLE;
    default:
        return UCXCHANNEL_GONE;
    }
}

/* The listener. */

/* A client of the other family on a listener for both: UCX's TCP takes all addresses of a worker for one family's. */
static bool is_of_other_family(ucp_conn_request_h request)
{
    ucp_conn_request_attr_t attributes = {.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ADDR};
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)&attributes.client_address;
    if (ucp_conn_request_query(request, &attributes) != UCS_OK)
        return true;
    return attributes.client_address.ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&six->sin6_addr);
}

static void on_asked(ucp_conn_request_h request, void *argument)
{
    ucxchannel_listener *listener = argument;
    /* The endpoint is made outside of UCX's callback. */
    if (!is_of_other_family(request) && listener->n_asking + listener->n_embryos < UCXCHANNEL_MAX_EMBRYOS)
        listener->asking[listener->n_asking++] = request;
    else
        ucp_listener_reject(listener->ucp, request);
}

int ucxchannel_listen(ucxchannel_context *context, const ucxchannel_address *address, ucxchannel_listener **listener_p)
{
    struct sockaddr_storage sock;
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr.addr = (struct sockaddr *)&sock,
        .conn_handler.cb = on_asked,
    };
    ucxchannel_listener *listener;
    ucs_status_t status;
    int result;

    if (context == NULL || listener_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no context, or no place for the listener");
    result = to_sockaddr(address, &sock, &params.sockaddr.addrlen);
    if (result != UCXCHANNEL_OK)
        return result;
    listener = calloc(1, sizeof *listener);
    if (listener == NULL)
        return fail(UCXCHANNEL_NO_MEMORY, "no memory for a listener");
    atomic_init(&listener->is_woken, false);
    result = worker_create(context, &listener->worker, &listener->events, &listener->wake);
    if (result != UCXCHANNEL_OK)
        goto free_listener;
    params.conn_handler.arg = listener;
    status = ucp_listener_create(listener->worker, &params, &listener->ucp);
    if (status != UCS_OK) {
        result = fail_ucx(status, "listening");
        goto destroy_worker;
    }
    listener->context = context_use(context);
    *listener_p = listener;
    return UCXCHANNEL_OK;

destroy_worker:
    close(listener->wake);
    ucp_worker_destroy(listener->worker);
free_listener:
    free(listener);
    return result;
}

int ucxchannel_listener_address(ucxchannel_listener *listener, ucxchannel_address *address_p)
{
    ucp_listener_attr_t attributes = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucs_status_t status;
    if (listener == NULL || address_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no listener, or no place for the address");
    status = ucp_listener_query(listener->ucp, &attributes);
    if (status != UCS_OK)
        return fail_ucx(status, "the listener's address");
    from_sockaddr(&attributes.sockaddr, address_p);
    return UCXCHANNEL_OK;
}

/* Make an endpoint for each connection that was asked for. What UCX cannot make of one it tells the client itself. */
static void conceive(ucxchannel_listener *listener, int64_t until_ns)
{
    while (listener->n_asking > 0) {
        ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST};
        ucxchannel *channel;
        params.conn_request = listener->asking[--listener->n_asking];
        if (channel_create(listener->context, &params, &channel) != UCXCHANNEL_OK) {
            if (params.conn_request != NULL)
                ucp_listener_reject(listener->ucp, params.conn_request);
            continue;
        }
        channel->until_ns = until_ns;
        channel->next = listener->embryos;
        listener->embryos = channel;
        listener->n_embryos++;
    }
}

/* One step of establishing. OK once done, TIMED_OUT while it is under way, anything else: it will not be. */
static int grow(ucxchannel *channel)
{
    static const ucxchannel_piece greeting = {GREETING, sizeof GREETING};
    int state = state_of(channel);
    if (state != UCXCHANNEL_OK)
        return state;
    if (channel->is_greeted && channel->welcome == NULL) {
        channel->welcome = post(channel, WELCOME, &greeting, 1);
        return UCXCHANNEL_TIMED_OUT;
    }
    if (channel->welcome != NULL && channel->welcome->is_done && channel->welcome->status == UCS_OK)
        return UCXCHANNEL_OK;
    return UCXCHANNEL_TIMED_OUT;
}

/* Bring all that are being established a step further; the first that is done leaves the list. */
static ucxchannel *grow_all(ucxchannel_listener *listener, bool *is_busy_p)
{
    ucxchannel **at = &listener->embryos;
    while (*at != NULL) {
        ucxchannel *channel = *at;
        int state;
        if (ucp_worker_progress(channel->worker) != 0)
            *is_busy_p = true;
        state = grow(channel);
        if (state == UCXCHANNEL_TIMED_OUT && now_ns() < channel->until_ns) {
            at = &channel->next;
            continue;
        }
        *at = channel->next;
        channel->next = NULL;
        channel->welcome = NULL;
        listener->n_embryos--;
        if (state == UCXCHANNEL_OK)
            return channel;
        ucxchannel_destroy(channel);
    }
    return NULL;
}

/* Sleep until something happens to the listener or to a channel that is being established. */
static void sleep_for_all(ucxchannel_listener *listener, int64_t for_ns)
{
    struct pollfd descriptors[2 + UCXCHANNEL_MAX_EMBRYOS] = {{listener->events, POLLIN, 0}, {listener->wake, POLLIN, 0}};
    nfds_t count = 2;
    if (ucp_worker_arm(listener->worker) != UCS_OK)
        return;
    for (ucxchannel *channel = listener->embryos; channel != NULL; channel = channel->next) {
        if (ucp_worker_arm(channel->worker) != UCS_OK)
            return;
        descriptors[count++] = (struct pollfd){channel->events, POLLIN, 0};
    }
    sleep_on(descriptors, count, for_ns);
}

int ucxchannel_accept(ucxchannel_listener *listener, int64_t establish_ns, int64_t deadline_ns, ucxchannel **channel_p)
{
    if (listener == NULL || channel_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no listener, or no place for the channel");
    for (;;) {
        bool is_busy = ucp_worker_progress(listener->worker) != 0;
        int64_t now = now_ns();
        ucxchannel *channel;
        conceive(listener, add_ns(now, establish_ns));
        channel = grow_all(listener, &is_busy);
        if (channel != NULL) {
            *channel_p = channel;
            return UCXCHANNEL_OK;
        }
        if (atomic_load(&listener->is_woken))
            return fail(UCXCHANNEL_CLOSED, "closed");
        if (now >= deadline_ns)
            return UCXCHANNEL_TIMED_OUT;
        if (!is_busy)
            sleep_for_all(listener, deadline_ns - now);
    }
}

void ucxchannel_listener_wake(ucxchannel_listener *listener)
{
    atomic_store(&listener->is_woken, true);
    raise_event(listener->wake);
}

void ucxchannel_listener_destroy(ucxchannel_listener *listener)
{
    if (listener == NULL)
        return;
    while (listener->n_asking > 0)
        ucp_listener_reject(listener->ucp, listener->asking[--listener->n_asking]);
    while (listener->embryos != NULL) {
        ucxchannel *channel = listener->embryos;
        listener->embryos = channel->next;
        ucxchannel_destroy(channel);
    }
    ucp_listener_destroy(listener->ucp);
    ucp_worker_destroy(listener->worker);
    close(listener->wake);
    ucxchannel_context_release(listener->context);
    free(listener);
}

/* What the owner of a channel asks for. */

static void print_endpoint(const void *what, FILE *stream)
{
    ucp_ep_print_info(((const ucxchannel *)what)->endpoint, stream);
}

int ucxchannel_describe(ucxchannel *channel, char *text, size_t size)
{
    if (channel == NULL || channel->endpoint == NULL)
        return fail(UCXCHANNEL_INVALID, "no endpoint");
    return print_to(text, size, print_endpoint, channel);
}

int ucxchannel_addresses(ucxchannel *channel, ucxchannel_address *ours_p, ucxchannel_address *theirs_p)
{
    ucp_ep_attr_t attributes = {.field_mask = UCP_EP_ATTR_FIELD_LOCAL_SOCKADDR | UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR};
    ucs_status_t status;
    if (channel == NULL || channel->endpoint == NULL || ours_p == NULL || theirs_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no endpoint, or no place for the addresses");
    status = ucp_ep_query(channel->endpoint, &attributes);
    if (status != UCS_OK)
        return fail_ucx(status, "the endpoint's addresses");
    from_sockaddr(&attributes.local_sockaddr, ours_p);
    from_sockaddr(&attributes.remote_sockaddr, theirs_p);
    return UCXCHANNEL_OK;
}

void ucxchannel_set_max_unread(ucxchannel *channel, size_t bytes)
{
    /* What lies there already may be more; then nothing is added to it. */
    channel->max_unread_bytes = bytes > channel->unread_bytes ? bytes : channel->unread_bytes;
}

static int send_frame(ucxchannel *channel, const ucxchannel_piece *pieces, size_t count, int64_t deadline_ns)
{
    sending *message;
    int result = state_of(channel);

    if (result != UCXCHANNEL_OK)
        return result;
    message = post(channel, FRAME, pieces, count);
    if (message == NULL)
        return state_of(channel);
    /* What fits into the peer's buffers is out at once, and looking for more would cost a system call. */
    while (!is_sent(channel, message)) {
        result = wait_until(channel, is_sent, message, 0, deadline_ns);
        if (result != UCXCHANNEL_INTERRUPTED)
            break;
    }
    if (result == UCXCHANNEL_OK) {
        ucs_status_t status = message->status;
        reap(channel);
        if (status == UCS_OK)
            return UCXCHANNEL_OK;
        break_off(channel, UCXCHANNEL_GONE, status, "%s", ucs_status_string(status));
        return state_of(channel);
    }
    /* UCX has the pieces, and the frame may be out in part. */
    if (!abandon(channel, add_ns(now_ns(), UCXCHANNEL_RELEASE_NS)))
        return fail(UCXCHANNEL_HELD, "UCX did not let go of a frame in time");
    if (result == UCXCHANNEL_TIMED_OUT)
        return fail(UCXCHANNEL_ABANDONED, "given up in the middle of a frame");
    return state_of(channel);
}

static int receive_frame(ucxchannel *channel, int64_t spin_ns, int64_t deadline_ns, size_t *bytes_p)
{
    if (channel->first == NULL) {
        int result = wait_until(channel, has_frame, NULL, spin_ns, deadline_ns);
        if (result != UCXCHANNEL_OK)
            return result;
    } else if (atomic_load(&channel->is_woken)) {
        return fail(UCXCHANNEL_CLOSED, "closed");
    }
    *bytes_p = channel->first->bytes;
    return UCXCHANNEL_OK;
}

int ucxchannel_send(ucxchannel *channel, const ucxchannel_piece *pieces, size_t count, int64_t deadline_ns)
{
    if (channel == NULL || (pieces == NULL && count > 0))
        return fail(UCXCHANNEL_INVALID, "no channel, or no pieces");
    return send_frame(channel, pieces, count, deadline_ns);
}

int ucxchannel_receive(ucxchannel *channel, int64_t spin_ns, int64_t deadline_ns, size_t *bytes_p)
{
    if (channel == NULL || bytes_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no channel, or no place for the length");
    return receive_frame(channel, spin_ns, deadline_ns, bytes_p);
}

int ucxchannel_exchange(ucxchannel *channel, const ucxchannel_piece *pieces, size_t count, int64_t spin_ns, int64_t deadline_ns,
                        int *is_sent_p, size_t *bytes_p)
{
    int result;
    if (channel == NULL || (pieces == NULL && count > 0) || is_sent_p == NULL || bytes_p == NULL)
        return fail(UCXCHANNEL_INVALID, "no channel, no pieces, or no place for the length");
    *is_sent_p = 0;
    result = send_frame(channel, pieces, count, deadline_ns);
    if (result != UCXCHANNEL_OK)
        return result;
    *is_sent_p = 1;
    return receive_frame(channel, spin_ns, deadline_ns, bytes_p);
}

void ucxchannel_take(ucxchannel *channel, void *into)
{
    received *frame = channel->first;
    if (frame->bytes > 0)
        memcpy(into, frame->data, frame->bytes);
    channel->first = frame->next;
    if (channel->first == NULL)
        channel->last = NULL;
    channel->unread_bytes -= frame->bytes;
    if (!frame->is_ours)
        ucp_am_data_release(channel->worker, frame->data);
    free(frame);
}

void ucxchannel_wake(ucxchannel *channel)
{
    atomic_store(&channel->is_woken, true);
    raise_event(channel->wake);
}

/* Not wait_until: it must also work on a channel that was woken, and a signal is no reason to stop. */
static void wait_for_end(ucxchannel *channel, int64_t deadline_ns)
{
    struct pollfd events = {channel->events, POLLIN, 0};
    while (!is_over(channel, NULL) || (channel->fault == UCS_OK && reap(channel))) {
        int64_t now = now_ns();
        if (now >= deadline_ns)
            return;
        if (ucp_worker_progress(channel->worker) == 0 && ucp_worker_arm(channel->worker) == UCS_OK)
            sleep_on(&events, 1, deadline_ns - now);
    }
}

static void drop_unread(ucxchannel *channel)
{
    while (channel->first != NULL) {
        received *frame = channel->first;
        channel->first = frame->next;
        if (!frame->is_ours)
            ucp_am_data_release(channel->worker, frame->data);
        free(frame);
    }
    channel->last = NULL;
    channel->unread_bytes = 0;
}

void ucxchannel_close(ucxchannel *channel, int64_t deadline_ns)
{
    if (channel == NULL || channel->endpoint == NULL)
        return;
    drop_unread(channel);
    if (channel->fault == UCS_OK && !channel->said_fin) {
        channel->said_fin = true;
        post(channel, FIN, NULL, 0);
    }
    wait_for_end(channel, deadline_ns);
    abandon(channel, add_ns(now_ns(), UCXCHANNEL_RELEASE_NS));
}

void ucxchannel_destroy(ucxchannel *channel)
{
    if (channel == NULL)
        return;
    if (channel->endpoint != NULL)
        abandon(channel, add_ns(now_ns(), UCXCHANNEL_RELEASE_NS));
    drop_unread(channel);
    ucp_worker_destroy(channel->worker);
    while (channel->sendings != NULL) {
        sending *message = channel->sendings;
        channel->sendings = message->next;
        free(message);
    }
    close(channel->wake);
    ucxchannel_context_release(channel->context);
    free(channel);
}
