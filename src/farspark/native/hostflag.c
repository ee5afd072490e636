/* The contract is hostflag.h; here is only how it is kept. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "hostflag.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "hostflag knows the memory order of devices on x86-64 and aarch64 only"
#endif

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "a lock inside an atomic is no use across processes");

#ifndef HOSTFLAG_BUILD
#define HOSTFLAG_BUILD ""
#endif

#define WORD_BYTES 128
#define MAGIC UINT32_C(0x46535048)
#define ALIVE UINT32_C(0x11FE11FE)
#define OWNER 0u

#define MIN_LOOK_NS (INT64_C(50) * 1000)
#define MAX_LOOK_NS (INT64_C(5) * 1000 * 1000)
#define LOOKS_PER_DEADLINE 16
/* For how long a dead process keeps the watchdog, and whoever calls fail_all meanwhile, from a reply that is being read. */
#define BURIAL_PATIENCE_NS (INT64_C(100) * 1000 * 1000)
/* What a rare wait sleeps between two checks. */
#define REST_NS (INT64_C(20) * 1000)
/* A look at the clock costs about as much as sixteen at a cached word. */
#define SPINS_PER_CLOCK 16

typedef struct page_memory {
    alignas(WORD_BYTES) uint32_t magic; /* these four are written before anybody else knows the page, and never again */
    uint32_t version;
    uint32_t reply_bytes;
    uint32_t start;
    alignas(WORD_BYTES) _Atomic uint32_t gathered;
    alignas(WORD_BYTES) _Atomic uint64_t claimed; /* claimant << 32 | round */
    alignas(WORD_BYTES) _Atomic uint32_t released;
    alignas(WORD_BYTES) _Atomic uint32_t consumed;
    alignas(WORD_BYTES) unsigned char reply[];
} page_memory;

_Static_assert(offsetof(page_memory, reply) == 5 * WORD_BYTES, "the layout is part of the version");

struct hostflag_page {
    _Atomic uint32_t alive; /* ALIVE, or 0: destroyed, or wiped in a forked child */
    _Atomic uint32_t calls; /* in progress; destroy waits for 0 */
    page_memory *memory;    /* NULL once given back */
    size_t bytes;
    size_t mapped_bytes; /* 0: the memory is the caller's */
    uint32_t self;       /* OWNER, or this process */
    int lock_errno;
    int dontfork_errno;

    pthread_mutex_t lifetime; /* one start, stop or destroy at a time; taken before the others */
    pthread_mutex_t failing;  /* one fail_all at a time; taken before `watching` */
    pthread_mutex_t watching; /* guards all that follows */
    pthread_cond_t changed;   /* of `watching`, on CLOCK_MONOTONIC */
    pthread_t watchdog;
    bool is_running;
    bool is_stopping;
    int pidfd; /* the followed process, -1: none */
    bool is_proxy_dead;
    int64_t deadline_ns;
    uint32_t counted; /* the newest round in stats.rounds_watched */
    hostflag_watchdog_stats stats; /* `events` used as a ring here */
};

/* ---- small things ---- */

static bool reached(uint32_t word, uint32_t round) { return (int32_t)(word - round) >= 0; }

static bool is_after(uint32_t a, uint32_t b) { return (int32_t)(a - b) > 0; }

static uint32_t round_of(uint64_t claim) { return (uint32_t)claim; }

static uint32_t claimant_of(uint64_t claim) { return (uint32_t)(claim >> 32); }

static uint64_t claim_of(uint32_t claimant, uint32_t round) { return (uint64_t)claimant << 32 | round; }

static int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t clock_ns(clockid_t clock) {
    struct timespec time;

    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }

static struct timespec to_timespec(int64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
}

/* CLOCK_MONOTONIC never overflows, a caller's "for ever" may. */
static int64_t add_ns(int64_t time, int64_t more) { return more > INT64_MAX - time ? INT64_MAX : time + more; }

static void rest(int64_t ns) {
    struct timespec time = to_timespec(ns);

    nanosleep(&time, NULL);
}

static void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    /* Most cores take `yield` as a no-op; `isb` really holds the pipeline back for some tens of cycles. */
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* Acquire and release order threads; on aarch64 a device is outside the shareability domain that they are bound to reach.
 * x86 orders loads with loads and stores with stores for devices too. */
static void fence_after_device_wrote(void) {
#if defined(__aarch64__)
    __asm__ volatile("dmb oshld" ::: "memory");
#endif
}

static void fence_before_device_reads(void) {
#if defined(__aarch64__)
    __asm__ volatile("dmb oshst" ::: "memory");
#endif
}

/* Sequentially consistent on both sides: either destroy sees this call, or this call sees that the page is gone. */
static bool enter(hostflag_page *page) {
    if (page == NULL)
        return false;
    atomic_fetch_add(&page->calls, 1);
    if (atomic_load(&page->alive) == ALIVE)
        return true;
    atomic_fetch_sub(&page->calls, 1);
    return false;
}

static hostflag_status leave(hostflag_page *page, hostflag_status status) {
    atomic_fetch_sub(&page->calls, 1);
    return status;
}

uint32_t hostflag_version(void) { return HOSTFLAG_VERSION; }

const char *hostflag_build(void) { return HOSTFLAG_BUILD; }

const char *hostflag_status_text(int status) {
    switch (status) {
    case HOSTFLAG_OK: return "done";
    case HOSTFLAG_LOST: return "somebody else settled this round";
    case HOSTFLAG_LATE: return "this round was released before";
    case HOSTFLAG_FINISHED: return "this round was gathered, and settled by somebody else";
    case HOSTFLAG_ENDED: return "every round was failed ahead; this one was not gathered";
    case HOSTFLAG_TIMED_OUT: return "the deadline passed";
    case HOSTFLAG_FORCED: return "done without waiting any longer for those who may use the reply buffer";
    case HOSTFLAG_CLOSED: return "the page was destroyed, or it belongs to another process";
    case HOSTFLAG_BUSY: return "calls on this page have not returned yet";
    case HOSTFLAG_INVALID: return "an argument makes no sense";
    case HOSTFLAG_NOT_GATHERED: return "this round was not gathered yet";
    case HOSTFLAG_NOT_OWNER: return "only the process that made the page may do this";
    case HOSTFLAG_RUNNING: return "the watchdog runs already";
    case HOSTFLAG_PENDING: return "a stream waits on this page; fail the round first";
    case HOSTFLAG_OTHER_VERSION: return "the memory holds no page of this version";
    case HOSTFLAG_SYSTEM: return "the system refused";
    case HOSTFLAG_REFUSED: return "the device's driver refused a call";
    default: return "a status of another version";
    }
}

/* ---- claim, reply, release ---- */

static hostflag_status claim_round(hostflag_page *page, uint32_t round) {
    page_memory *memory = page->memory;
    uint64_t claim = atomic_load_explicit(&memory->claimed, memory_order_acquire);
    uint32_t gathered;

    do {
        if (reached(round_of(claim), round))
            return HOSTFLAG_LOST;
        /* Only the newest gathered round can be open: the stream gathers none before the one before it was released. Equality
         * also keeps out a round so old that, half a cycle later, it compares as a later one. */
        gathered = atomic_load_explicit(&memory->gathered, memory_order_acquire);
        if (gathered != round)
            return reached(gathered, round) ? HOSTFLAG_LOST : HOSTFLAG_NOT_GATHERED;
    } while (!atomic_compare_exchange_weak_explicit(&memory->claimed, &claim, claim_of(page->self, round),
                                                    memory_order_acq_rel, memory_order_acquire));
    return HOSTFLAG_OK;
}

/* A compare-and-swap and not a store: whoever comes late finds a later round there and leaves it. */
static hostflag_status release_round(page_memory *memory, uint32_t round) {
    uint32_t released = atomic_load_explicit(&memory->released, memory_order_relaxed);

    fence_before_device_reads();
    do {
        if (reached(released, round))
            return HOSTFLAG_LATE;
    } while (!atomic_compare_exchange_weak_explicit(&memory->released, &released, round, memory_order_release,
                                                    memory_order_relaxed));
    return HOSTFLAG_OK;
}

static hostflag_status settle(hostflag_page *page, uint32_t round, const void *reply) {
    page_memory *memory = page->memory;
    hostflag_status status = claim_round(page, round);

    if (status != HOSTFLAG_OK)
        return status;
    if (reply != NULL)
        memcpy(memory->reply, reply, memory->reply_bytes);
    else
        memset(memory->reply, 0, memory->reply_bytes);
    return release_round(memory, round);
}

hostflag_status hostflag_publish(hostflag_page *page, uint32_t round, const void *reply, uint32_t bytes) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (reply == NULL || bytes != page->memory->reply_bytes)
        return leave(page, HOSTFLAG_INVALID);
    return leave(page, settle(page, round, reply));
}

hostflag_status hostflag_fail(hostflag_page *page, uint32_t round) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    return leave(page, settle(page, round, NULL));
}

hostflag_status hostflag_claim(hostflag_page *page, uint32_t round) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    return leave(page, claim_round(page, round));
}

hostflag_status hostflag_release(hostflag_page *page, uint32_t round) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    return leave(page, release_round(page->memory, round));
}

/* ---- waiting ---- */

/* TIMED_OUT stands for "not yet" here. */
typedef hostflag_status condition(const page_memory *memory, uint32_t round);

static hostflag_status check_gathered(const page_memory *memory, uint32_t round) {
    uint32_t claimed;

    if (!reached(atomic_load_explicit(&memory->gathered, memory_order_acquire), round)) {
        /* A claim follows what was gathered: read in this order, a claim that is ahead was put there by fail_all. */
        claimed = round_of(atomic_load_explicit(&memory->claimed, memory_order_acquire));
        if (!reached(claimed, round))
            return HOSTFLAG_TIMED_OUT;
        if (!reached(atomic_load_explicit(&memory->gathered, memory_order_acquire), round))
            return HOSTFLAG_ENDED;
    }
    fence_after_device_wrote();
    claimed = round_of(atomic_load_explicit(&memory->claimed, memory_order_acquire));
    return reached(claimed, round) ? HOSTFLAG_FINISHED : HOSTFLAG_OK;
}

static hostflag_status check_released(const page_memory *memory, uint32_t round) {
    bool is_released = reached(atomic_load_explicit(&memory->released, memory_order_acquire), round);

    return is_released ? HOSTFLAG_OK : HOSTFLAG_TIMED_OUT;
}

static hostflag_status wait_until(hostflag_page *page, condition *check, uint32_t round, int64_t spin_ns, int64_t nap_ns,
                                  int64_t deadline_ns) {
    int64_t naps_from = add_ns(now_ns(), spin_ns);
    hostflag_status status;
    bool naps = false;

    for (unsigned look = 1;; look++) {
        status = check(page->memory, round);
        if (status != HOSTFLAG_TIMED_OUT)
            return status;
        if (atomic_load_explicit(&page->alive, memory_order_relaxed) != ALIVE)
            return HOSTFLAG_CLOSED;
        if (naps || look % SPINS_PER_CLOCK == 0) {
            int64_t now = now_ns();

            if (now >= deadline_ns)
                return HOSTFLAG_TIMED_OUT;
            naps = nap_ns > 0 && now >= naps_from;
            if (naps) {
                rest(min64(nap_ns, deadline_ns - now));
                continue;
            }
        }
        cpu_relax();
    }
}

static hostflag_status wait_checked(hostflag_page *page, condition *check, uint32_t round, int64_t spin_ns, int64_t nap_ns,
                                    int64_t deadline_ns) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (spin_ns < 0 || nap_ns < 0 || deadline_ns < 0)
        return leave(page, HOSTFLAG_INVALID);
    return leave(page, wait_until(page, check, round, spin_ns, nap_ns, deadline_ns));
}

hostflag_status hostflag_wait_gathered(hostflag_page *page, uint32_t round, int64_t spin_ns, int64_t nap_ns,
                                       int64_t deadline_ns) {
    return wait_checked(page, check_gathered, round, spin_ns, nap_ns, deadline_ns);
}

hostflag_status hostflag_wait_released(hostflag_page *page, uint32_t round, int64_t spin_ns, int64_t nap_ns,
                                       int64_t deadline_ns) {
    return wait_checked(page, check_released, round, spin_ns, nap_ns, deadline_ns);
}

/* ---- in place of a stream ---- */

hostflag_status hostflag_gather(hostflag_page *page, uint32_t round) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    atomic_store_explicit(&page->memory->gathered, round, memory_order_release);
    return leave(page, HOSTFLAG_OK);
}

hostflag_status hostflag_consume(hostflag_page *page, uint32_t round) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    atomic_store_explicit(&page->memory->consumed, round, memory_order_release);
    return leave(page, HOSTFLAG_OK);
}

hostflag_status hostflag_read_reply(hostflag_page *page, void *reply_p, uint32_t bytes) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (reply_p == NULL || bytes != page->memory->reply_bytes)
        return leave(page, HOSTFLAG_INVALID);
    memcpy(reply_p, page->memory->reply, bytes);
    return leave(page, HOSTFLAG_OK);
}

/* ---- what the owner sees ---- */

static hostflag_words read_words(const page_memory *memory) {
    uint64_t claim = atomic_load_explicit(&memory->claimed, memory_order_acquire);
    hostflag_words words = {.claimed = round_of(claim), .claimant = claimant_of(claim)};

    words.consumed = atomic_load_explicit(&memory->consumed, memory_order_acquire);
    words.released = atomic_load_explicit(&memory->released, memory_order_acquire);
    /* Last: what was claimed, released or consumed above had been gathered before. */
    words.gathered = atomic_load_explicit(&memory->gathered, memory_order_acquire);
    return words;
}

hostflag_status hostflag_page_words(hostflag_page *page, hostflag_words *words_p) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    *words_p = read_words(page->memory);
    return leave(page, HOSTFLAG_OK);
}

hostflag_status hostflag_page_info(hostflag_page *page, hostflag_info *info_p) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    *info_p = (hostflag_info){
        .address = (uint64_t)(uintptr_t)page->memory,
        .bytes = page->bytes,
        .gathered_offset = offsetof(page_memory, gathered),
        .claimed_offset = offsetof(page_memory, claimed),
        .released_offset = offsetof(page_memory, released),
        .consumed_offset = offsetof(page_memory, consumed),
        .reply_offset = offsetof(page_memory, reply),
        .reply_bytes = page->memory->reply_bytes,
        .lock_errno = page->lock_errno,
        .dontfork_errno = page->dontfork_errno,
        .is_owner = page->self == OWNER,
    };
    return leave(page, HOSTFLAG_OK);
}

/* Called with `watching` held. */
static void record(hostflag_page *page, uint32_t round, hostflag_how how, int64_t wait_ns) {
    page->stats.events[page->stats.events_total++ % HOSTFLAG_EVENTS] =
        (hostflag_event){.round = round, .how = how, .wall_ns = clock_ns(CLOCK_REALTIME), .wait_ns = wait_ns};
}

hostflag_status hostflag_watchdog_get_stats(hostflag_page *page, hostflag_watchdog_stats *stats_p) {
    hostflag_watchdog_stats *stats;
    uint64_t oldest;

    if (!enter(page))
        return HOSTFLAG_CLOSED;
    stats = &page->stats;
    pthread_mutex_lock(&page->watching);
    *stats_p = *stats;
    stats_p->events_kept = stats->events_total < HOSTFLAG_EVENTS ? (uint32_t)stats->events_total : HOSTFLAG_EVENTS;
    oldest = stats->events_total - stats_p->events_kept;
    for (uint32_t at = 0; at < stats_p->events_kept; at++)
        stats_p->events[at] = stats->events[(oldest + at) % HOSTFLAG_EVENTS];
    stats_p->deadline_ns = page->deadline_ns;
    stats_p->is_running = page->is_running;
    pthread_mutex_unlock(&page->watching);
    return leave(page, HOSTFLAG_OK);
}

/* ---- the followed process ---- */

/* A pidfd is readable once no thread of the process is left, so nothing of it can still store into the page.
 * Called with `watching` held. */
static bool look_at_proxy(hostflag_page *page) {
    struct pollfd proxy = {.fd = page->pidfd, .events = POLLIN};

    if (!page->is_proxy_dead && page->pidfd >= 0)
        page->is_proxy_dead = poll(&proxy, 1, 0) > 0 && (proxy.revents & POLLIN) != 0;
    return page->is_proxy_dead;
}

static bool is_proxy_dead(hostflag_page *page) {
    bool is_dead;

    pthread_mutex_lock(&page->watching);
    is_dead = look_at_proxy(page);
    pthread_mutex_unlock(&page->watching);
    return is_dead;
}

static bool kill_proxy(int pidfd) {
#ifdef SYS_pidfd_send_signal
    return syscall(SYS_pidfd_send_signal, pidfd, SIGKILL, NULL, 0) == 0;
#else
    return syscall(424, pidfd, SIGKILL, NULL, 0) == 0;
#endif
}

hostflag_status hostflag_follow(hostflag_page *page, int pidfd) {
    int ours = -1, before;

    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (page->self != OWNER)
        return leave(page, HOSTFLAG_NOT_OWNER);
    if (pidfd >= 0) {
        ours = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
        if (ours < 0)
            return leave(page, HOSTFLAG_SYSTEM);
    }
    pthread_mutex_lock(&page->watching);
    before = page->pidfd;
    page->pidfd = ours;
    page->is_proxy_dead = false;
    pthread_mutex_unlock(&page->watching);
    if (before >= 0)
        close(before);
    return leave(page, HOSTFLAG_OK);
}

/* ---- failing everything ---- */

/* May the reply be overwritten, `claim` being the newest one before ours? */
static bool is_reply_free(hostflag_page *page, uint64_t claim) {
    page_memory *memory = page->memory;
    uint32_t last = round_of(claim);

    if (!reached(atomic_load_explicit(&memory->released, memory_order_acquire), last))
        return claimant_of(claim) != OWNER && is_proxy_dead(page); /* else it is being written */
    /* A later round was gathered: the stream read this reply before it. An earlier one: `last` is a far one, and the reply is
     * zeros. */
    return reached(atomic_load_explicit(&memory->consumed, memory_order_acquire), last) ||
           atomic_load_explicit(&memory->gathered, memory_order_acquire) != last;
}

/* Claims far ahead. Returns whether this was not done before; `claim_p` gets the claim before it. */
static bool claim_ahead(page_memory *memory, uint32_t newest, uint64_t *claim_p, uint32_t *far_p) {
    uint64_t claim = atomic_load_explicit(&memory->claimed, memory_order_acquire);
    uint32_t gathered;

    do {
        /* After the claim, see check_gathered. */
        gathered = atomic_load_explicit(&memory->gathered, memory_order_acquire);
        *far_p = round_of(claim);
        if (is_after(*far_p, gathered) && reached(*far_p, newest))
            return false;
        *far_p = (is_after(newest, gathered) ? newest : gathered) + HOSTFLAG_FAR;
    } while (!atomic_compare_exchange_weak_explicit(&memory->claimed, &claim, claim_of(OWNER, *far_p), memory_order_acq_rel,
                                                    memory_order_acquire));
    *claim_p = claim;
    return true;
}

static hostflag_status fail_ahead(hostflag_page *page, uint32_t newest, int64_t patience_ns, hostflag_how how,
                                  int64_t wait_ns, uint32_t *far_p) {
    page_memory *memory = page->memory;
    int64_t deadline = add_ns(now_ns(), patience_ns);
    hostflag_status status = HOSTFLAG_OK;
    uint32_t far, gathered;
    uint64_t claim;

    pthread_mutex_lock(&page->failing);
    if (claim_ahead(memory, newest, &claim, &far)) {
        while (!is_reply_free(page, claim)) {
            if (now_ns() >= deadline) {
                status = HOSTFLAG_FORCED;
                break;
            }
            rest(REST_NS);
        }
        memset(memory->reply, 0, memory->reply_bytes);
        release_round(memory, far);

        gathered = atomic_load_explicit(&memory->gathered, memory_order_acquire);
        pthread_mutex_lock(&page->watching);
        record(page, gathered, how, wait_ns);
        page->stats.failed_all++;
        pthread_mutex_unlock(&page->watching);
    }
    pthread_mutex_unlock(&page->failing);
    if (far_p != NULL)
        *far_p = far;
    return status;
}

hostflag_status hostflag_fail_all(hostflag_page *page, uint32_t newest, int64_t patience_ns, uint32_t *far_p) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (page->self != OWNER)
        return leave(page, HOSTFLAG_NOT_OWNER);
    if (patience_ns < 0)
        return leave(page, HOSTFLAG_INVALID);
    return leave(page, fail_ahead(page, newest, patience_ns, HOSTFLAG_FAILED_ALL, 0, far_p));
}

/* ---- the engine's side of a round ---- */

static int launch_gather(const hostflag_device *device, const hostflag_round *round) {
    const hostflag_launch *launch = round->launch;

    return device->launch(launch->function, launch->grid[0], launch->grid[1], launch->grid[2], launch->block[0],
                          launch->block[1], launch->block[2], launch->shared_bytes, round->stream, launch->parameters, NULL);
}

/* As enqueue. */
static hostflag_call gather_and_wait(const hostflag_device *device, hostflag_round *round) {
    uint64_t gathered = device->page + offsetof(page_memory, gathered), released = device->page + offsetof(page_memory, released);
    int *result = &round->result_p;

    if (device->batch != NULL) {
        hostflag_operation operations[] = {
            {.kind = HOSTFLAG_WRITE_VALUE, .address = gathered, .value = round->round},
            {.kind = HOSTFLAG_WAIT_VALUE, .address = released, .value = round->round},
        };

        *result = device->batch(round->stream, 2, operations, 0);
        return *result == 0 ? HOSTFLAG_CALL_NONE : HOSTFLAG_CALL_GATHERED_AND_WAIT;
    }
    *result = device->write_value(round->stream, gathered, round->round, 0);
    if (*result != 0)
        return HOSTFLAG_CALL_WRITE_GATHERED;
    *result = device->wait_value(round->stream, released, round->round, 0);
    return *result == 0 ? HOSTFLAG_CALL_NONE : HOSTFLAG_CALL_WAIT_RELEASED;
}

/* As enqueue. */
static hostflag_call take_reply(const page_memory *memory, const hostflag_device *device, hostflag_round *round) {
    uint64_t consumed = device->page + offsetof(page_memory, consumed);
    int *result = &round->result_p;

    if (device->take_reply != NULL) {
        uint64_t reply = device->page + offsetof(page_memory, reply);
        uint32_t words = memory->reply_bytes / 4;
        void *parameters[] = {&reply, &round->reply_to, &words, &consumed, &round->round};

        *result = device->launch(device->take_reply, 1, 1, 1, HOSTFLAG_TAKE_REPLY_THREADS, 1, 1, 0, round->stream, parameters,
                                 NULL);
        return *result == 0 ? HOSTFLAG_CALL_NONE : HOSTFLAG_CALL_TAKE_REPLY;
    }
    *result = device->to_device(round->reply_to, memory->reply, memory->reply_bytes, round->stream);
    if (*result != 0)
        return HOSTFLAG_CALL_COPY_REPLY;
    *result = device->write_value(round->stream, consumed, round->round, 0);
    return *result == 0 ? HOSTFLAG_CALL_NONE : HOSTFLAG_CALL_WRITE_CONSUMED;
}

/* HOSTFLAG_CALL_NONE, or the call that was refused. */
static hostflag_call enqueue(const page_memory *memory, const hostflag_device *device, hostflag_round *round) {
    int *result = &round->result_p;
    hostflag_call refused;

    if (round->launch != NULL && (*result = launch_gather(device, round)) != 0)
        return HOSTFLAG_CALL_LAUNCH;
    for (uint32_t at = 0; at < round->num_copies; at++) {
        const hostflag_copy *copy = &round->copies[at];

        *result = device->to_host((void *)(uintptr_t)copy->to, copy->from, copy->bytes, round->stream);
        if (*result != 0)
            return HOSTFLAG_CALL_COPY;
    }
    refused = gather_and_wait(device, round);
    return refused == HOSTFLAG_CALL_NONE ? take_reply(memory, device, round) : refused;
}

static bool can_launch(const page_memory *memory, const hostflag_device *device, const hostflag_round *round) {
    if (device->launch == NULL)
        return round->launch == NULL && device->take_reply == NULL;
    return device->take_reply == NULL || memory->reply_bytes % 4 == 0;
}

hostflag_status hostflag_submit(hostflag_page *page, const hostflag_device *device, hostflag_round *round) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (page->self != OWNER)
        return leave(page, HOSTFLAG_NOT_OWNER);
    if (device == NULL || round == NULL || !can_launch(page->memory, device, round))
        return leave(page, HOSTFLAG_INVALID);
    round->failed_p = enqueue(page->memory, device, round);
    return leave(page, round->failed_p == HOSTFLAG_CALL_NONE ? HOSTFLAG_OK : HOSTFLAG_REFUSED);
}

/* ---- the watchdog ---- */

typedef struct watch {
    bool is_pending;
    uint32_t round;
    int64_t since_ns; /* first seen pending */
    bool is_held;     /* by another process, past the deadline */
    int64_t held_since_ns;
} watch;

typedef enum verdict { WAIT, PREEMPT, KILL } verdict;

/* What the state asks for. `now_ns` was read after `words`: a round is never taken for older than it is. */
static verdict judge(watch *watch, const hostflag_words *words, int64_t now_ns, int64_t deadline_ns) {
    if (!is_after(words->gathered, words->released)) {
        watch->is_pending = false;
        return WAIT;
    }
    if (!watch->is_pending || watch->round != words->gathered) {
        watch->is_pending = true;
        watch->round = words->gathered;
        watch->since_ns = now_ns;
        watch->is_held = false;
    }
    if (now_ns - watch->since_ns < deadline_ns)
        return WAIT;
    if (!reached(words->claimed, words->gathered))
        return PREEMPT;
    /* A thread of this process gets its copy done, and a claim far ahead is about to be released. */
    if (words->claimed != words->gathered || words->claimant == OWNER)
        return WAIT;
    if (!watch->is_held) {
        watch->is_held = true;
        watch->held_since_ns = now_ns;
    }
    return now_ns - watch->held_since_ns < deadline_ns ? WAIT : KILL;
}

static int64_t look_interval(int64_t deadline_ns) {
    int64_t interval = min64(deadline_ns / LOOKS_PER_DEADLINE, MAX_LOOK_NS);

    return interval > MIN_LOOK_NS ? interval : MIN_LOOK_NS;
}

/* When to look again: nothing tells this thread that a device wrote a word. */
static int64_t next_look(const watch *watch, int64_t now_ns, int64_t deadline_ns) {
    int64_t next = add_ns(now_ns, look_interval(deadline_ns));
    int64_t expiry = add_ns(watch->since_ns, deadline_ns);

    return watch->is_pending && expiry > now_ns ? min64(next, expiry) : next;
}

/* Called with `watching` held, like the two below, which let go of it while they act. */
static void count(hostflag_page *page, const watch *watch, uint32_t gathered, int64_t now_ns) {
    uint32_t more = gathered - page->counted;

    if (is_after(gathered, page->counted))
        page->stats.rounds_watched += more < HOSTFLAG_FAR / 2 ? more : 1; /* the number jumps after fail_all */
    page->counted = gathered;
    if (watch->is_pending && now_ns - watch->since_ns > page->stats.longest_wait_ns)
        page->stats.longest_wait_ns = now_ns - watch->since_ns;
}

static void preempt(hostflag_page *page, uint32_t round, int64_t wait_ns) {
    hostflag_status status;

    pthread_mutex_unlock(&page->watching);
    status = settle(page, round, NULL);
    pthread_mutex_lock(&page->watching);
    if (status == HOSTFLAG_OK) {
        page->stats.preempted++;
        record(page, round, HOSTFLAG_PREEMPTED, wait_ns);
    }
}

static void bury_proxy(hostflag_page *page, uint32_t gathered, int64_t wait_ns) {
    if (page->pidfd >= 0) {
        close(page->pidfd);
        page->pidfd = -1;
        page->stats.proxies_dead++;
    }
    pthread_mutex_unlock(&page->watching);
    fail_ahead(page, gathered, BURIAL_PATIENCE_NS, HOSTFLAG_PROXY_DEAD, wait_ns, NULL);
    pthread_mutex_lock(&page->watching);
}

static void *watch_rounds(void *argument) {
    hostflag_page *page = argument;
    watch watch = {0};

    pthread_mutex_lock(&page->watching);
    for (;;) {
        hostflag_words words = read_words(page->memory);
        int64_t now = now_ns();
        verdict verdict = judge(&watch, &words, now, page->deadline_ns);
        int64_t wait_ns = watch.is_pending ? now - watch.since_ns : 0;

        count(page, &watch, words.gathered, now);
        if (page->is_stopping)
            break;
        /* Again for a round that was enqueued behind the one at which the words stood: nobody will answer it either. */
        if (look_at_proxy(page) && (page->pidfd >= 0 || watch.is_pending)) {
            bury_proxy(page, words.gathered, wait_ns);
            continue;
        }
        if (verdict == PREEMPT) {
            preempt(page, watch.round, wait_ns);
            continue;
        }
        if (verdict == KILL && page->pidfd >= 0 && kill_proxy(page->pidfd)) {
            page->stats.proxies_killed++;
            record(page, watch.round, HOSTFLAG_PROXY_KILLED, wait_ns);
            watch.is_held = false;
        }

        struct timespec until = to_timespec(next_look(&watch, now, page->deadline_ns));
        pthread_cond_timedwait(&page->changed, &page->watching, &until);
    }
    pthread_mutex_unlock(&page->watching);
    return NULL;
}

/* Signals are for the threads of whoever installed the handlers. */
static int start_thread(hostflag_page *page) {
    sigset_t all, before;
    int error;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    error = pthread_create(&page->watchdog, NULL, watch_rounds, page);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error == 0)
        pthread_setname_np(page->watchdog, "farspark-watch");
    return error;
}

static hostflag_status start_watchdog(hostflag_page *page, int64_t deadline_ns) {
    int error;

    pthread_mutex_lock(&page->watching);
    if (page->is_running) {
        pthread_mutex_unlock(&page->watching);
        return HOSTFLAG_RUNNING;
    }
    page->is_stopping = false;
    page->deadline_ns = deadline_ns;
    page->counted = atomic_load_explicit(&page->memory->gathered, memory_order_acquire);
    error = start_thread(page);
    page->is_running = error == 0;
    pthread_mutex_unlock(&page->watching);
    errno = error;
    return error == 0 ? HOSTFLAG_OK : HOSTFLAG_SYSTEM;
}

hostflag_status hostflag_watchdog_start(hostflag_page *page, int64_t deadline_ns) {
    hostflag_status status;

    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (page->self != OWNER)
        return leave(page, HOSTFLAG_NOT_OWNER);
    if (deadline_ns <= 0)
        return leave(page, HOSTFLAG_INVALID);
    pthread_mutex_lock(&page->lifetime);
    status = start_watchdog(page, deadline_ns);
    pthread_mutex_unlock(&page->lifetime);
    return leave(page, status);
}

/* Called with `lifetime` held, so that one caller joins. */
static void stop_watchdog(hostflag_page *page) {
    bool was_running;

    pthread_mutex_lock(&page->watching);
    was_running = page->is_running;
    page->is_stopping = true;
    pthread_cond_signal(&page->changed);
    pthread_mutex_unlock(&page->watching);
    if (!was_running)
        return;
    pthread_join(page->watchdog, NULL);
    pthread_mutex_lock(&page->watching);
    page->is_running = false;
    pthread_mutex_unlock(&page->watching);
}

hostflag_status hostflag_watchdog_stop(hostflag_page *page) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (page->self != OWNER)
        return leave(page, HOSTFLAG_NOT_OWNER);
    pthread_mutex_lock(&page->lifetime);
    stop_watchdog(page);
    pthread_mutex_unlock(&page->lifetime);
    return leave(page, HOSTFLAG_OK);
}

hostflag_status hostflag_watchdog_set_deadline(hostflag_page *page, int64_t deadline_ns) {
    if (!enter(page))
        return HOSTFLAG_CLOSED;
    if (page->self != OWNER)
        return leave(page, HOSTFLAG_NOT_OWNER);
    if (deadline_ns <= 0)
        return leave(page, HOSTFLAG_INVALID);
    pthread_mutex_lock(&page->watching);
    page->deadline_ns = deadline_ns; /* seen at the next look */
    pthread_mutex_unlock(&page->watching);
    return leave(page, HOSTFLAG_OK);
}

/* ---- making and destroying ---- */

static size_t whole_pages(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (bytes + page - 1) / page * page;
}

static void *map_private(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static void init_locks(hostflag_page *page) {
    pthread_condattr_t monotonic;

    pthread_mutex_init(&page->lifetime, NULL);
    pthread_mutex_init(&page->failing, NULL);
    pthread_mutex_init(&page->watching, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&page->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

/* The handle lives in a mapping of its own, which is never unmapped: one small page for each hostflag_page, so that a late
 * call finds "closed" there and no freed memory. A forked child finds it wiped, that is closed too: its watchdog does not
 * exist there, and joining it would never end. */
static hostflag_page *new_handle(page_memory *memory, size_t bytes, uint32_t self) {
    hostflag_page *page = map_private(whole_pages(sizeof(hostflag_page)));

    if (page == NULL)
        return NULL;
    madvise(page, whole_pages(sizeof(hostflag_page)), MADV_WIPEONFORK);
    page->memory = memory;
    page->bytes = bytes;
    page->self = self;
    page->pidfd = -1;
    page->dontfork_errno = ENOTSUP;
    page->lock_errno = mlock(memory, bytes) == 0 ? 0 : errno;
    init_locks(page);
    atomic_store(&page->alive, ALIVE);
    return page;
}

static void format(page_memory *memory, uint32_t reply_bytes, uint32_t start) {
    memset(memory, 0, hostflag_page_bytes(reply_bytes));
    memory->reply_bytes = reply_bytes;
    memory->start = start;
    atomic_init(&memory->gathered, start);
    atomic_init(&memory->claimed, claim_of(OWNER, start));
    atomic_init(&memory->released, start);
    atomic_init(&memory->consumed, start);
    memory->version = HOSTFLAG_VERSION;
    memory->magic = MAGIC;
}

static bool is_usable(const void *memory, size_t bytes) {
    return memory != NULL && (uintptr_t)memory % WORD_BYTES == 0 && bytes >= sizeof(page_memory);
}

size_t hostflag_page_bytes(uint32_t reply_bytes) {
    if (reply_bytes == 0 || reply_bytes > HOSTFLAG_MAX_REPLY_BYTES)
        return 0;
    return (sizeof(page_memory) + reply_bytes + WORD_BYTES - 1) / WORD_BYTES * WORD_BYTES;
}

hostflag_status hostflag_page_create(uint32_t reply_bytes, uint32_t start, hostflag_page **page_p) {
    size_t bytes = hostflag_page_bytes(reply_bytes);
    hostflag_page *page;
    page_memory *memory;

    if (bytes == 0 || page_p == NULL)
        return HOSTFLAG_INVALID;
    bytes = whole_pages(bytes);
    memory = map_private(bytes);
    if (memory == NULL)
        return HOSTFLAG_SYSTEM;
    format(memory, reply_bytes, start);
    page = new_handle(memory, bytes, OWNER);
    if (page == NULL)
        goto unmap;
    page->mapped_bytes = bytes;
    page->dontfork_errno = madvise(memory, bytes, MADV_DONTFORK) == 0 ? 0 : errno;
    *page_p = page;
    return HOSTFLAG_OK;

unmap:
    munmap(memory, bytes);
    return HOSTFLAG_SYSTEM;
}

hostflag_status hostflag_page_format(void *memory, size_t bytes, uint32_t reply_bytes, uint32_t start,
                                     hostflag_page **page_p) {
    size_t needed = hostflag_page_bytes(reply_bytes);
    hostflag_page *page;

    if (needed == 0 || bytes < needed || page_p == NULL || !is_usable(memory, bytes))
        return HOSTFLAG_INVALID;
    format(memory, reply_bytes, start);
    page = new_handle(memory, needed, OWNER);
    if (page == NULL)
        return HOSTFLAG_SYSTEM;
    *page_p = page;
    return HOSTFLAG_OK;
}

hostflag_status hostflag_page_attach(void *memory, size_t bytes, hostflag_page **page_p) {
    const page_memory *there = memory;
    hostflag_page *page;
    size_t needed;

    if (page_p == NULL || !is_usable(memory, bytes))
        return HOSTFLAG_INVALID;
    if (there->magic != MAGIC || there->version != HOSTFLAG_VERSION)
        return HOSTFLAG_OTHER_VERSION;
    needed = hostflag_page_bytes(there->reply_bytes);
    if (needed == 0 || bytes < needed)
        return HOSTFLAG_INVALID;
    page = new_handle(memory, needed, (uint32_t)getpid());
    if (page == NULL)
        return HOSTFLAG_SYSTEM;
    *page_p = page;
    return HOSTFLAG_OK;
}

static bool calls_end(hostflag_page *page, int64_t patience_ns) {
    int64_t deadline = add_ns(now_ns(), patience_ns);

    while (atomic_load(&page->calls) != 0) {
        if (now_ns() >= deadline)
            return false;
        rest(REST_NS);
    }
    return true;
}

/* Called with `lifetime` held. */
static hostflag_status destroy(hostflag_page *page, int64_t patience_ns) {
    bool is_first = atomic_load(&page->alive) == ALIVE;
    hostflag_words words;

    if (page->memory == NULL)
        return HOSTFLAG_OK;
    words = read_words(page->memory);
    if (is_first && page->self == OWNER && is_after(words.gathered, words.released))
        return HOSTFLAG_PENDING;
    atomic_store(&page->alive, 0);
    /* Before its memory goes; and after `alive`, so that nobody starts another. */
    stop_watchdog(page);
    if (!calls_end(page, patience_ns))
        return HOSTFLAG_BUSY;
    if (page->pidfd >= 0)
        close(page->pidfd);
    page->pidfd = -1;
    if (page->mapped_bytes != 0)
        munmap(page->memory, page->mapped_bytes);
    page->memory = NULL;
    return HOSTFLAG_OK;
}

hostflag_status hostflag_page_destroy(hostflag_page *page, int64_t patience_ns) {
    hostflag_status status;

    if (page == NULL)
        return HOSTFLAG_OK;
    pthread_mutex_lock(&page->lifetime);
    status = destroy(page, patience_ns);
    pthread_mutex_unlock(&page->lifetime);
    return status;
}
