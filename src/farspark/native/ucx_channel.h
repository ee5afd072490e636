/* ucx_channel: whole frames between two processes over UCX active messages, and a bound on every wait.
 *
 * A channel is one endpoint on a UCX worker of its own. One thread at a time uses it; ucxchannel_wake may come from any. There is
 * no policy in here: settings, limits and deadlines are the caller's. There is no Python in it either, so every call can be made
 * without its interpreter lock; a whole round is one call, ucxchannel_exchange.
 *
 * Not linked against UCX: whoever loads this library has loaded libucp first, with its symbols global. It is compiled against the
 * headers of UCX 1.13 or later and asks for nothing later than 1.13, so one build serves every UCX since.
 *
 * ON THE WIRE, all as active messages of one identifier, sent eagerly, in this order and numbered from 0 in each direction
 *
 *   HELLO      client to server, first: whom it talks to
 *   WELCOME    server to client, first: the endpoint works in both directions
 *   FRAME      the caller's bytes
 *   FIN        nothing follows; the other side answers with its own FIN as soon as it looks
 *
 * WAITING
 *
 * Every call that waits has a deadline, in nanoseconds of CLOCK_MONOTONIC; UCXCHANNEL_NEVER is no deadline. The deadline is the
 * guarantee; an error that UCX reports is only a faster way to know. A wait spins for `spin_ns` after the last thing that
 * happened, then sleeps. A call whose deadline has passed still takes what is there.
 *
 * WHO OWNS WHAT
 *
 * The pieces of a frame belong to UCX from the call until it returns. If a send is late, its endpoint is closed by force, which
 * makes UCX let go of them; the call returns UCXCHANNEL_ABANDONED once it has, or UCXCHANNEL_HELD if UCX still has not after
 * UCXCHANNEL_RELEASE_NS: then the pieces must live until ucxchannel_destroy has returned. What was received is copied to the caller.
 * A context may be released while channels and listeners of it live; it goes with the last of them.
 *
 * Initialise after a fork, never before one.
 */
#ifndef FARSPARK_UCX_CHANNEL_H
#define FARSPARK_UCX_CHANNEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCXCHANNEL_API __attribute__((visibility("default")))

/* Of the functions, the structures and the messages together: any change of them is another version. */
#define UCXCHANNEL_VERSION 2u
#define UCXCHANNEL_NEVER INT64_MAX
/* How long a late send waits for UCX to let go of the pieces: it takes microseconds unless a device is stuck. */
#define UCXCHANNEL_RELEASE_NS INT64_C(100000000)
/* Connections that are not established yet; more are rejected. */
#define UCXCHANNEL_MAX_EMBRYOS 64u
#define UCXCHANNEL_HOST_BYTES 64u

typedef struct ucxchannel_context ucxchannel_context;
typedef struct ucxchannel_listener ucxchannel_listener;
typedef struct ucxchannel ucxchannel;

/* What happened (0 and above), or what is wrong (below 0). For all but OK, TIMED_OUT and INTERRUPTED ucxchannel_error has a text. */
typedef enum ucxchannel_status {
    UCXCHANNEL_OK = 0,
    UCXCHANNEL_TIMED_OUT = 1,   /* nothing is lost, the channel is as it was */
    UCXCHANNEL_INTERRUPTED = 2, /* a signal came while nothing had been received; call again */
    UCXCHANNEL_CLOSED = 3,      /* by ucxchannel_wake */
    UCXCHANNEL_GONE = 4,        /* by the peer or by a fault, after everything that was received was taken */
    UCXCHANNEL_ABANDONED = 5,   /* a send was late; the channel is of no more use, the pieces are free */
    UCXCHANNEL_HELD = 6,        /* as ABANDONED, and UCX still has the pieces */

    UCXCHANNEL_INVALID = -1,
    UCXCHANNEL_NO_MEMORY = -2,
    UCXCHANNEL_SYSTEM = -3,     /* errno says what */
    UCXCHANNEL_UCX = -4,        /* UCX refused */
    UCXCHANNEL_REFUSED = -5,    /* nothing listens there, or it does not want us */
    UCXCHANNEL_UNREACHABLE = -6, /* no transport, no route, or no device in common */
    UCXCHANNEL_IN_USE = -7,     /* the address has a listener */
    UCXCHANNEL_FOREIGN = -8     /* the peer speaks another language */
} ucxchannel_status;

/* A numeric address; `scope` is the interface index of a link-local IPv6 address, else 0. */
typedef struct ucxchannel_address {
    char host[UCXCHANNEL_HOST_BYTES];
    uint32_t scope;
    uint32_t port;
} ucxchannel_address;

typedef struct ucxchannel_piece {
    const void *data;
    size_t bytes;
} ucxchannel_piece;

UCXCHANNEL_API uint32_t ucxchannel_version(void);
/* SHA-256 of the sources in hex, "" for a build that does not say. */
UCXCHANNEL_API const char *ucxchannel_build(void);
/* What went wrong in this thread's last call that went wrong; valid until its next. */
UCXCHANNEL_API const char *ucxchannel_error(void);
/* The UCX that is loaded, as "1.13.1". */
UCXCHANNEL_API const char *ucxchannel_ucx_version(void);

/* `settings`: names (without UCX_) and values in turn, ended by NULL; they win over the environment. A name that begins with '?'
 * may be one that this UCX, or a transport that it has, does not know. */
UCXCHANNEL_API int ucxchannel_context_create(const char *const *settings, ucxchannel_context **context_p);
/* UCX's own list of what this context can use, as text, cut off at `size`. */
UCXCHANNEL_API int ucxchannel_context_describe(ucxchannel_context *context, char *text, size_t size);
UCXCHANNEL_API void ucxchannel_context_release(ucxchannel_context *context);

/* Returns once the peer has answered. `from` may be NULL: the system chooses. */
UCXCHANNEL_API int ucxchannel_connect(ucxchannel_context *context, const ucxchannel_address *to, const ucxchannel_address *from,
                                      int64_t deadline_ns, ucxchannel **channel_p);

/* Port 0 takes any free one. A listener on an IPv6 address, :: included, takes IPv6 clients only. */
UCXCHANNEL_API int ucxchannel_listen(ucxchannel_context *context, const ucxchannel_address *address,
                                     ucxchannel_listener **listener_p);
UCXCHANNEL_API int ucxchannel_listener_address(ucxchannel_listener *listener, ucxchannel_address *address_p);
/* The next connection that is established. Connections are established in here, all at once, each within `establish_ns`: somebody
 * must be in here for a client to get through. */
UCXCHANNEL_API int ucxchannel_accept(ucxchannel_listener *listener, int64_t establish_ns, int64_t deadline_ns,
                                     ucxchannel **channel_p);
/* From any thread: ucxchannel_accept returns UCXCHANNEL_CLOSED, from now on. */
UCXCHANNEL_API void ucxchannel_listener_wake(ucxchannel_listener *listener);
UCXCHANNEL_API void ucxchannel_listener_destroy(ucxchannel_listener *listener);

/* UCX's own description of the endpoint, with its lanes, as text, cut off at `size`. */
UCXCHANNEL_API int ucxchannel_describe(ucxchannel *channel, char *text, size_t size);
UCXCHANNEL_API int ucxchannel_addresses(ucxchannel *channel, ucxchannel_address *ours_p, ucxchannel_address *theirs_p);

/* How much may lie received and not taken; a peer that sends more ends the channel (FOREIGN for
 * a single frame above it, else GONE). That is reached only while this side sends and the
 * peer sends too: nothing is received while something is there to be taken. */
UCXCHANNEL_API void ucxchannel_set_max_unread(ucxchannel *channel, size_t bytes);

/* Send one frame made of `pieces`: OK, ABANDONED (it was late), HELD, CLOSED or GONE. */
UCXCHANNEL_API int ucxchannel_send(ucxchannel *channel, const ucxchannel_piece *pieces, size_t count, int64_t deadline_ns);
/* Wait for a frame. On OK `*bytes_p` is its length; it is there until it is taken, and this returns it again. */
UCXCHANNEL_API int ucxchannel_receive(ucxchannel *channel, int64_t spin_ns, int64_t deadline_ns, size_t *bytes_p);
/* Both, in one call. `*is_sent_p` says whether the frame is out; if it is, an outcome is as of ucxchannel_receive. */
UCXCHANNEL_API int ucxchannel_exchange(ucxchannel *channel, const ucxchannel_piece *pieces, size_t count, int64_t spin_ns,
                                       int64_t deadline_ns, int *is_sent_p, size_t *bytes_p);
/* After an OK of one of the two, once: copy the frame to `into`, which has room for it. Waits for nothing. */
UCXCHANNEL_API void ucxchannel_take(ucxchannel *channel, void *into);

/* From any thread: whoever waits on the channel returns UCXCHANNEL_CLOSED, from now on. */
UCXCHANNEL_API void ucxchannel_wake(ucxchannel *channel);
/* Say FIN and wait, until the deadline, that the peer has taken all that was sent; then close. Also after ucxchannel_wake. */
UCXCHANNEL_API void ucxchannel_close(ucxchannel *channel, int64_t deadline_ns);
/* Close by force if need be, and free. UCX touches no memory of the caller's after that. NULL is fine. */
UCXCHANNEL_API void ucxchannel_destroy(ucxchannel *channel);

#ifdef __cplusplus
}
#endif

#endif
