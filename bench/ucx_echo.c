/* ucx_channel without Python: exchanges between two processes over UCX's TCP, and the median of what one takes.
 *
 *     ucx_echo OUT_BYTES BACK_BYTES ROUNDS
 */
#include "ucx_channel.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS INT64_C(500000)
#define WARM_UP 20

/* As transport/ucx.py has them. */
static const char *const settings[] = {
    "TLS", "tcp", "SOCKADDR_TLS_PRIORITY", "tcp", "?CM_USE_ALL_DEVICES", "n", "?TCP_TX_SEG_SIZE", "128k", "?TX_SEG_SIZE", "128k",
    "?TCP_RX_SEG_SIZE", "128k", "?RX_SEG_SIZE", "128k", NULL,
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void check(int status)
{
    if (status == UCXCHANNEL_OK)
        return;
    fprintf(stderr, "%d: %s\n", status, ucxchannel_error());
    exit(1);
}

static void serve(int say, char *memory, size_t out, size_t back)
{
    ucxchannel_address address = {.host = "127.0.0.1"};
    ucxchannel_piece reply = {memory, back};
    ucxchannel_context *context;
    ucxchannel_listener *listener;
    ucxchannel *channel;
    size_t bytes;
    check(ucxchannel_context_create(settings, &context));
    check(ucxchannel_listen(context, &address, &listener));
    check(ucxchannel_listener_address(listener, &address));
    if (write(say, &address, sizeof address) != sizeof address)
        exit(1);
    check(ucxchannel_accept(listener, UCXCHANNEL_NEVER, UCXCHANNEL_NEVER, &channel));
    while (ucxchannel_receive(channel, SPIN_NS, UCXCHANNEL_NEVER, &bytes) == UCXCHANNEL_OK) {
        ucxchannel_take(channel, memory);
        check(ucxchannel_send(channel, &reply, 1, UCXCHANNEL_NEVER));
    }
}

static int by_size(const void *one, const void *other)
{
    int64_t a = *(const int64_t *)one, b = *(const int64_t *)other;
    return (a > b) - (a < b);
}

static double ask(int listen, char *memory, size_t out, size_t back, size_t rounds)
{
    /* As a round's: what stands in front of the rows, and the rows. */
    size_t head = out < 224 ? out : 224;
    ucxchannel_piece pieces[] = {{memory, head}, {memory + head, out - head}};
    int64_t *took_ns = calloc(rounds, sizeof *took_ns);
    ucxchannel_address address;
    ucxchannel_context *context;
    ucxchannel *channel;
    size_t bytes;
    int is_sent;
    if (took_ns == NULL || read(listen, &address, sizeof address) != sizeof address)
        exit(1);
    check(ucxchannel_context_create(settings, &context));
    check(ucxchannel_connect(context, &address, NULL, UCXCHANNEL_NEVER, &channel));
    for (size_t round = 0; round < rounds + WARM_UP; round++) {
        int64_t began_ns = now_ns();
        check(ucxchannel_exchange(channel, pieces, 2, SPIN_NS, UCXCHANNEL_NEVER, &is_sent, &bytes));
        ucxchannel_take(channel, memory);
        if (round >= WARM_UP)
            took_ns[round - WARM_UP] = now_ns() - began_ns;
    }
    qsort(took_ns, rounds, sizeof *took_ns, by_size);
    return (double)took_ns[rounds / 2] / 1000;
}

int main(int count, char **arguments)
{
    size_t out, back, rounds;
    char *memory;
    int port[2];
    pid_t server;
    if (count != 4)
        return 2;
    out = strtoul(arguments[1], NULL, 10);
    back = strtoul(arguments[2], NULL, 10);
    rounds = strtoul(arguments[3], NULL, 10);
    memory = calloc(1, out + back);
    if (memory == NULL || rounds == 0 || pipe(port) < 0 || (server = fork()) < 0)
        return 1;
    if (server == 0) {
        serve(port[1], memory, out, back);
        return 0;
    }
    close(port[1]); /* a server that ends without a word ends the read of its port */
    printf("%.2f\n", ask(port[0], memory, out, back, rounds));
    kill(server, SIGKILL);
    waitpid(server, NULL, 0);
    return 0;
}
