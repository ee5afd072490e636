/* The UCX shim against itself, over UCX's TCP on the loopback: a listener's thread, clients' threads, and every way to end.
 *
 *   ucx_channel_test [--rounds N] [--clients N]
 */
#include "ucx_channel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SECOND INT64_C(1000000000)
#define MILLI INT64_C(1000000)
#define MAX_CLIENTS 16
/* Three of them do not fit into one read. */
#define WORD_BYTES 300000

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, ucxchannel_error());          \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static const char *const settings[] = {
    "TLS", "tcp", "?TCP_TX_SEG_SIZE", "128k", "?TX_SEG_SIZE", "128k", "?TCP_RX_SEG_SIZE", "128k", "?RX_SEG_SIZE", "128k", NULL};

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

static int64_t in(int64_t ns)
{
    return now() + ns;
}

/* A listener, whose thread serves every channel on a thread of its own. */

typedef struct server {
    ucxchannel_context *context;
    ucxchannel_listener *listener;
    ucxchannel_address address;
    void *(*serve)(void *channel);
    pthread_t accepting;
    pthread_t serving[64];
    unsigned count;
} server;

static void *accept_all(void *argument)
{
    server *server = argument;
    for (;;) {
        ucxchannel *channel = NULL;
        int status = ucxchannel_accept(server->listener, 5 * SECOND, UCXCHANNEL_NEVER, &channel);
        if (status == UCXCHANNEL_CLOSED)
            return NULL;
        CHECK(status == UCXCHANNEL_OK);
        CHECK(server->count < 64);
        CHECK(pthread_create(&server->serving[server->count++], NULL, server->serve, channel) == 0);
    }
}

static void server_start(server *server, void *(*serve)(void *channel))
{
    ucxchannel_address any = {"127.0.0.1", 0, 0};
    memset(server, 0, sizeof *server);
    server->serve = serve;
    CHECK(ucxchannel_context_create(settings, &server->context) == UCXCHANNEL_OK);
    CHECK(ucxchannel_listen(server->context, &any, &server->listener) == UCXCHANNEL_OK);
    CHECK(ucxchannel_listener_address(server->listener, &server->address) == UCXCHANNEL_OK);
    CHECK(server->address.port != 0);
    CHECK(pthread_create(&server->accepting, NULL, accept_all, server) == 0);
}

static void server_stop(server *server)
{
    ucxchannel_listener_wake(server->listener);
    pthread_join(server->accepting, NULL);
    for (unsigned i = 0; i < server->count; i++)
        pthread_join(server->serving[i], NULL);
    ucxchannel_listener_destroy(server->listener);
    ucxchannel_context_release(server->context);
}

static ucxchannel *client(const server *server)
{
    ucxchannel_context *context;
    ucxchannel *channel;
    CHECK(ucxchannel_context_create(settings, &context) == UCXCHANNEL_OK);
    CHECK(ucxchannel_connect(context, &server->address, NULL, in(30 * SECOND), &channel) == UCXCHANNEL_OK);
    /* It goes with its last channel. */
    ucxchannel_context_release(context);
    return channel;
}

static void finish(ucxchannel *channel)
{
    ucxchannel_close(channel, in(20 * SECOND));
    ucxchannel_destroy(channel);
}

static int receive(ucxchannel *channel, void *into, size_t capacity, int64_t deadline_ns, size_t *bytes_p)
{
    int status = ucxchannel_receive(channel, 0, deadline_ns, bytes_p);
    if (status == UCXCHANNEL_OK) {
        CHECK(*bytes_p <= capacity);
        ucxchannel_take(channel, into);
    }
    return status;
}

/* Answers each frame with its first 8 bytes and its length, until the peer ends. */
static void *echo(void *argument)
{
    ucxchannel *channel = argument;
    size_t capacity = 1 << 20, bytes;
    unsigned char *frame = malloc(capacity);
    for (;;) {
        uint64_t length;
        int status = receive(channel, frame, capacity, UCXCHANNEL_NEVER, &bytes);
        ucxchannel_piece reply[2] = {{frame, bytes < 8 ? bytes : 8}, {&length, sizeof length}};
        if (status != UCXCHANNEL_OK)
            break;
        length = bytes;
        if (ucxchannel_send(channel, reply, 2, in(10 * SECOND)) != UCXCHANNEL_OK)
            break;
    }
    free(frame);
    finish(channel);
    return NULL;
}

typedef struct work {
    const server *server;
    int rounds;
} work;

static void *ask(void *argument)
{
    const work *work = argument;
    ucxchannel *channel = client(work->server);
    unsigned char *rows = malloc(600000);
    unsigned char reply[64];
    memset(rows, 7, 600000);
    for (int round = 0; round < work->rounds; round++) {
        uint64_t head = (uint64_t)round, length;
        size_t size = (size_t[]){0, 64, 75000, 200000, 600000}[round % 5], bytes = 0;
        ucxchannel_piece pieces[3] = {{&head, sizeof head}, {rows, size / 2}, {rows + size / 2, size - size / 2}};
        int is_sent = 0;
        CHECK(ucxchannel_exchange(channel, pieces, 3, 50000, in(20 * SECOND), &is_sent, &bytes) == UCXCHANNEL_OK);
        CHECK(is_sent && bytes == 16);
        ucxchannel_take(channel, reply);
        CHECK(memcmp(reply, &head, 8) == 0);
        memcpy(&length, reply + 8, 8);
        CHECK(length == 8 + size);
    }
    free(rows);
    finish(channel);
    return NULL;
}

static void test_many_clients_exchange_frames_of_every_size(int clients, int rounds)
{
    server server;
    pthread_t threads[MAX_CLIENTS];
    work work = {&server, rounds};
    server_start(&server, echo);
    for (int i = 0; i < clients; i++)
        CHECK(pthread_create(&threads[i], NULL, ask, &work) == 0);
    for (int i = 0; i < clients; i++)
        pthread_join(threads[i], NULL);
    server_stop(&server);
}

/* Accepts and never looks. */
static atomic_int stop_ignoring;
static void *ignore(void *argument)
{
    while (!atomic_load(&stop_ignoring))
        nanosleep(&(struct timespec){0, 5 * MILLI}, NULL);
    ucxchannel_destroy(argument);
    return NULL;
}

static void test_a_late_send_is_given_up_and_its_pieces_are_free(void)
{
    server server;
    const size_t size = 8 << 20;
    unsigned char *frame = calloc(1, size);
    ucxchannel_piece pieces[2] = {{frame, 100}, {frame + 100, size - 100}};
    ucxchannel *channel;
    int64_t began;
    int status = UCXCHANNEL_OK;

    atomic_store(&stop_ignoring, 0);
    server_start(&server, ignore);
    channel = client(&server);
    began = now();
    for (int i = 0; i < 100 && status == UCXCHANNEL_OK; i++)
        status = ucxchannel_send(channel, pieces, 2, began + 100 * MILLI);
    CHECK(status == UCXCHANNEL_ABANDONED);
    CHECK(now() - began < 2 * SECOND);
    /* Under the address sanitizer any later look of UCX's would be seen. */
    free(frame);
    status = ucxchannel_send(channel, pieces, 0, in(SECOND));
    CHECK(status == UCXCHANNEL_GONE);
    finish(channel);
    atomic_store(&stop_ignoring, 1);
    server_stop(&server);
}

static void test_a_wait_ends_at_its_deadline_and_at_a_wake(void)
{
    server server;
    ucxchannel *channel;
    size_t bytes;
    int64_t began = now();

    server_start(&server, echo);
    channel = client(&server);
    began = now();
    CHECK(ucxchannel_receive(channel, 0, began + 50 * MILLI, &bytes) == UCXCHANNEL_TIMED_OUT);
    CHECK(now() - began >= 50 * MILLI && now() - began < 2 * SECOND);
    CHECK(ucxchannel_receive(channel, SECOND, in(0), &bytes) == UCXCHANNEL_TIMED_OUT);
    ucxchannel_wake(channel);
    CHECK(ucxchannel_receive(channel, 0, UCXCHANNEL_NEVER, &bytes) == UCXCHANNEL_CLOSED);
    CHECK(ucxchannel_send(channel, NULL, 0, in(SECOND)) == UCXCHANNEL_CLOSED);
    finish(channel);
    server_stop(&server);
}

typedef struct waiter {
    ucxchannel *channel;
    int status;
} waiter;

static void *wait_for_ever(void *argument)
{
    waiter *waiter = argument;
    size_t bytes;
    waiter->status = ucxchannel_receive(waiter->channel, 0, UCXCHANNEL_NEVER, &bytes);
    return NULL;
}

static void test_a_wake_from_another_thread_ends_a_wait(void)
{
    server server;
    pthread_t thread;
    waiter waiter = {NULL, 0};
    server_start(&server, echo);
    waiter.channel = client(&server);
    CHECK(pthread_create(&thread, NULL, wait_for_ever, &waiter) == 0);
    nanosleep(&(struct timespec){0, 50 * MILLI}, NULL);
    ucxchannel_wake(waiter.channel);
    pthread_join(thread, NULL);
    CHECK(waiter.status == UCXCHANNEL_CLOSED);
    finish(waiter.channel);
    server_stop(&server);
}

static void test_a_frame_stays_until_it_is_taken(void)
{
    server server;
    ucxchannel *channel;
    unsigned char into[16];
    ucxchannel_piece piece = {"12345678", 8};

    server_start(&server, echo);
    channel = client(&server);
    CHECK(ucxchannel_send(channel, &piece, 1, in(10 * SECOND)) == UCXCHANNEL_OK);
    for (int look = 0; look < 2; look++) {
        size_t bytes = 0;
        CHECK(ucxchannel_receive(channel, 0, in(20 * SECOND), &bytes) == UCXCHANNEL_OK);
        CHECK(bytes == 16);
    }
    ucxchannel_take(channel, into);
    CHECK(memcmp(into, "12345678", 8) == 0);
    CHECK(ucxchannel_receive(channel, 0, in(0), &(size_t){0}) == UCXCHANNEL_TIMED_OUT);
    finish(channel);
    server_stop(&server);
}

/* Sends three frames and ends. */
static void *say_three(void *argument)
{
    static const unsigned char word[WORD_BYTES];
    ucxchannel_piece piece = {word, sizeof word};
    for (int i = 0; i < 3; i++)
        CHECK(ucxchannel_send(argument, &piece, 1, in(20 * SECOND)) == UCXCHANNEL_OK);
    finish(argument);
    return NULL;
}

static void test_what_was_sent_before_the_end_arrives(void)
{
    server server;
    server_start(&server, say_three);
    for (int i = 0; i < 10; i++) {
        static unsigned char into[WORD_BYTES];
        ucxchannel *channel = client(&server);
        size_t bytes;
        /* The peer has ended long before this side looks. */
        nanosleep(&(struct timespec){0, 5 * MILLI}, NULL);
        for (int word = 0; word < 3; word++)
            CHECK(receive(channel, into, sizeof into, in(20 * SECOND), &bytes) == UCXCHANNEL_OK && bytes == WORD_BYTES);
        CHECK(receive(channel, into, sizeof into, in(20 * SECOND), &bytes) == UCXCHANNEL_GONE);
        CHECK(strcmp(ucxchannel_error(), "closed by the peer") == 0);
        finish(channel);
    }
    server_stop(&server);
}

/* Reads nothing of what comes while it sends; the peer, which sends, too, may take some of it. */
static void *send_to_a_flood(void *argument)
{
    const size_t size = 32 << 20;
    unsigned char *frame = calloc(1, size);
    ucxchannel_piece piece = {frame, size};
    int status;
    ucxchannel_set_max_unread(argument, 1 << 20);
    do
        status = ucxchannel_send(argument, &piece, 1, in(10 * SECOND));
    while (status == UCXCHANNEL_OK);
    CHECK(status == UCXCHANNEL_GONE);
    CHECK(strstr(ucxchannel_error(), "the peer sends without waiting") != NULL);
    free(frame);
    finish(argument);
    return NULL;
}

static void test_a_peer_that_sends_without_waiting_is_cut_off(void)
{
    server server;
    unsigned char *frame = calloc(1, 100000);
    ucxchannel_piece piece = {frame, 100000};
    ucxchannel *channel;
    int status = UCXCHANNEL_OK;
    server_start(&server, send_to_a_flood);
    channel = client(&server);
    ucxchannel_set_max_unread(channel, SIZE_MAX / 2);
    for (int i = 0; i < 100000 && status == UCXCHANNEL_OK; i++)
        status = ucxchannel_send(channel, &piece, 1, in(10 * SECOND));
    CHECK(status == UCXCHANNEL_GONE);
    free(frame);
    finish(channel);
    server_stop(&server);
}

static void test_what_makes_no_sense_is_refused(void)
{
    ucxchannel_context *context = NULL;
    ucxchannel *channel = NULL;
    ucxchannel_listener *listener = NULL;
    ucxchannel_address nowhere = {"127.0.0.1", 0, 1}, text = {"not an address", 0, 1};
    const char *const unknown[] = {"TLS", "no_such_transport", NULL};
    char description[4096];

    CHECK(ucxchannel_context_create(unknown, &context) < 0);
    CHECK(context == NULL);
    CHECK(ucxchannel_context_create(settings, NULL) == UCXCHANNEL_INVALID);
    CHECK(ucxchannel_context_create(settings, &context) == UCXCHANNEL_OK);
    CHECK(ucxchannel_context_describe(context, description, sizeof description) == UCXCHANNEL_OK);
    CHECK(strstr(description, "tcp/") != NULL);
    CHECK(ucxchannel_context_describe(context, description, 10) == UCXCHANNEL_OK && strlen(description) <= 9);
    CHECK(ucxchannel_connect(context, &text, NULL, in(SECOND), &channel) == UCXCHANNEL_INVALID);
    CHECK(ucxchannel_listen(context, &text, &listener) == UCXCHANNEL_INVALID);
    CHECK(ucxchannel_connect(context, &nowhere, NULL, in(5 * SECOND), &channel) == UCXCHANNEL_REFUSED);
    CHECK(channel == NULL);
    ucxchannel_destroy(NULL);
    ucxchannel_listener_destroy(NULL);
    ucxchannel_context_release(context);
}

static void test_an_address_in_use_is_told(void)
{
    server server;
    ucxchannel_context *context;
    ucxchannel_listener *listener;
    server_start(&server, echo);
    CHECK(ucxchannel_context_create(settings, &context) == UCXCHANNEL_OK);
    CHECK(ucxchannel_listen(context, &server.address, &listener) == UCXCHANNEL_IN_USE);
    ucxchannel_context_release(context);
    server_stop(&server);
}

int main(int count, char **arguments)
{
    int rounds = 200, clients = 4;
    for (int i = 1; i + 1 < count; i += 2) {
        if (strcmp(arguments[i], "--rounds") == 0)
            rounds = atoi(arguments[i + 1]);
        else if (strcmp(arguments[i], "--clients") == 0)
            clients = atoi(arguments[i + 1]);
    }
    if (clients > MAX_CLIENTS)
        clients = MAX_CLIENTS;
    CHECK(ucxchannel_version() == UCXCHANNEL_VERSION);
    test_what_makes_no_sense_is_refused();
    test_an_address_in_use_is_told();
    test_a_wait_ends_at_its_deadline_and_at_a_wake();
    test_a_wake_from_another_thread_ends_a_wait();
    test_a_frame_stays_until_it_is_taken();
    test_what_was_sent_before_the_end_arrives();
    test_a_late_send_is_given_up_and_its_pieces_are_free();
    test_a_peer_that_sends_without_waiting_is_cut_off();
    test_many_clients_exchange_frames_of_every_size(clients, rounds);
    printf("%d clients, %d rounds each, UCX %s\n", clients, rounds, ucxchannel_ucx_version());
    return 0;
}
