/* Tests of the native helper that need its inside, exact timing or a sanitizer. `make native-check` runs them.
 *
 *   hostflag_test [--seed N] [--race ROUNDS] [--fuzz STEPS] [--storm ROUNDS] [--claims ROUNDS] [NAME...]
 *
 * Without names: all. A failed check prints its line and the seed, and the exit code is 1.
 */
#include "hostflag.c"

#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define REPLY_WORDS 64
#define REPLY_BYTES (REPLY_WORDS * 4)
#define MS INT64_C(1000000)
#define US INT64_C(1000)

static uint64_t seed;
static int64_t race_rounds = 20000, fuzz_steps = 300000, storm_rounds = 6000, claim_rounds = 20000;

#define CHECK(condition)                                                                                                   \
    do {                                                                                                                   \
        if (!(condition)) {                                                                                                \
            fprintf(stderr, "%s:%d: not so: %s (seed %llu)\n", __FILE__, __LINE__, #condition, (unsigned long long)seed);  \
            exit(1);                                                                                                       \
        }                                                                                                                  \
    } while (0)

#define CHECK_IS(got, expected)                                                                                            \
    do {                                                                                                                   \
        long long got_ = (long long)(got), expected_ = (long long)(expected);                                              \
        if (got_ != expected_) {                                                                                           \
            fprintf(stderr, "%s:%d: %s is %lld, expected %lld (seed %llu)\n", __FILE__, __LINE__, #got, got_, expected_,   \
                    (unsigned long long)seed);                                                                             \
            exit(1);                                                                                                       \
        }                                                                                                                  \
    } while (0)

/* ---- random numbers, replies, pages ---- */

static uint64_t next_random(uint64_t *state) {
    uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);

    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static int64_t random_below(uint64_t *state, int64_t limit) { return (int64_t)(next_random(state) % (uint64_t)limit); }

/* Never 0, so that no reply looks like a failed one. */
static uint32_t mark_of(uint32_t round) { return (round * 2654435761u) | 1u; }

static void fill(uint32_t *reply, uint32_t mark) {
    for (int at = 0; at < REPLY_WORDS; at++)
        reply[at] = mark;
}

static bool is_all(const uint32_t *reply, uint32_t mark) {
    for (int at = 0; at < REPLY_WORDS; at++)
        if (reply[at] != mark)
            return false;
    return true;
}

static hostflag_page *new_page(uint32_t start) {
    hostflag_page *page = NULL;

    CHECK_IS(hostflag_page_create(REPLY_BYTES, start, &page), HOSTFLAG_OK);
    return page;
}

static hostflag_words words_of(hostflag_page *page) {
    hostflag_words words;

    CHECK_IS(hostflag_page_words(page, &words), HOSTFLAG_OK);
    return words;
}

static void end_page(hostflag_page *page) {
    CHECK(hostflag_fail_all(page, words_of(page).gathered, 0, NULL) >= 0);
    CHECK_IS(hostflag_page_destroy(page, 1000 * MS), HOSTFLAG_OK);
}

static hostflag_status publish_mark(hostflag_page *page, uint32_t round) {
    uint32_t reply[REPLY_WORDS];

    fill(reply, mark_of(round));
    return hostflag_publish(page, round, reply, sizeof reply);
}

static uint32_t read_mark(hostflag_page *page) {
    uint32_t reply[REPLY_WORDS];

    CHECK_IS(hostflag_read_reply(page, reply, sizeof reply), HOSTFLAG_OK);
    CHECK(is_all(reply, reply[0]));
    return reply[0];
}

static hostflag_watchdog_stats stats_of(hostflag_page *page) {
    hostflag_watchdog_stats stats;

    CHECK_IS(hostflag_watchdog_get_stats(page, &stats), HOSTFLAG_OK);
    return stats;
}

static hostflag_status wait_gathered_now(hostflag_page *page, uint32_t round) {
    return hostflag_wait_gathered(page, round, 0, 0, 0);
}

/* ---- wrap: rounds go on through 2^32 and through 2^31 ---- */

static void rounds_pass(uint32_t start, int rounds) {
    hostflag_page *page = new_page(start);

    for (uint32_t round = start + 1; round != start + 1 + (uint32_t)rounds; round++) {
        CHECK_IS(wait_gathered_now(page, round), HOSTFLAG_TIMED_OUT);
        CHECK_IS(hostflag_wait_released(page, round, 0, 0, 0), HOSTFLAG_TIMED_OUT);
        CHECK_IS(publish_mark(page, round), HOSTFLAG_NOT_GATHERED);
        CHECK_IS(hostflag_gather(page, round), HOSTFLAG_OK);
        CHECK_IS(wait_gathered_now(page, round), HOSTFLAG_OK);
        CHECK_IS(publish_mark(page, round - 1), HOSTFLAG_LOST);
        CHECK_IS(publish_mark(page, round), HOSTFLAG_OK);
        CHECK_IS(publish_mark(page, round), HOSTFLAG_LOST);
        CHECK_IS(wait_gathered_now(page, round), HOSTFLAG_FINISHED);
        CHECK_IS(hostflag_release(page, round - 1), HOSTFLAG_LATE);
        CHECK_IS(hostflag_wait_released(page, round, 0, 0, 0), HOSTFLAG_OK);
        CHECK_IS(read_mark(page), mark_of(round));
        CHECK_IS(hostflag_consume(page, round), HOSTFLAG_OK);
    }
    end_page(page);
}

static void test_wrap(void) {
    rounds_pass(0, 300);
    rounds_pass(UINT32_MAX - 100, 300);
    rounds_pass((UINT32_C(1) << 31) - 100, 300);

    /* Far ahead again and again: more than once around. */
    hostflag_page *page = new_page(UINT32_MAX - 5);
    uint32_t round = UINT32_MAX - 4, far;
    for (int turn = 0; turn < 70; turn++) {
        CHECK_IS(hostflag_gather(page, round), HOSTFLAG_OK);
        CHECK_IS(hostflag_fail_all(page, round, 0, &far), HOSTFLAG_OK);
        CHECK_IS(far, round + HOSTFLAG_FAR);
        CHECK_IS(hostflag_fail_all(page, round, 0, &far), HOSTFLAG_OK);
        CHECK_IS(far, round + HOSTFLAG_FAR);
        CHECK_IS(far % 64, round % 64);
        CHECK_IS(hostflag_wait_released(page, round + 3, 0, 0, 0), HOSTFLAG_OK);
        CHECK_IS(wait_gathered_now(page, round), HOSTFLAG_FINISHED);
        CHECK_IS(wait_gathered_now(page, round + 1), HOSTFLAG_ENDED);
        CHECK_IS(publish_mark(page, round), HOSTFLAG_LOST);
        CHECK_IS(hostflag_release(page, round), HOSTFLAG_LATE);
        CHECK_IS(read_mark(page), 0);
        CHECK_IS(hostflag_consume(page, round), HOSTFLAG_OK);

        round = far + 1;
        CHECK_IS(wait_gathered_now(page, round), HOSTFLAG_TIMED_OUT);
        CHECK_IS(hostflag_gather(page, round), HOSTFLAG_OK);
        CHECK_IS(publish_mark(page, round), HOSTFLAG_OK);
        CHECK_IS(read_mark(page), mark_of(round));
        CHECK_IS(hostflag_consume(page, round), HOSTFLAG_OK);
        round++;
    }
    end_page(page);
}

/* ---- judge: the watchdog's decision, with time passed in ---- */

static void test_judge(void) {
    const int64_t deadline = 1000;
    hostflag_words words = {.gathered = 5, .claimed = 5, .released = 5, .consumed = 5};
    watch watch = {0};

    CHECK_IS(judge(&watch, &words, 0, deadline), WAIT);
    words.gathered = 6;
    CHECK_IS(judge(&watch, &words, 100, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 1099, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 1100, deadline), PREEMPT);
    /* A shorter deadline holds for the round that is being watched. */
    CHECK_IS(judge(&watch, &words, 1099, 999), PREEMPT);

    /* The next round is pending at the wake that was meant for the one before. */
    words = (hostflag_words){.gathered = 7, .claimed = 6, .released = 6, .consumed = 6};
    CHECK_IS(judge(&watch, &words, 1100, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 2099, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 2100, deadline), PREEMPT);

    /* Claimed here: a thread of this process finishes it. */
    words.claimed = 7;
    CHECK_IS(judge(&watch, &words, 9000, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 99000, deadline), WAIT);
    /* Claimed by another process: it gets a whole deadline from when that was seen. */
    words.claimant = 77;
    CHECK_IS(judge(&watch, &words, 100000, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 100999, deadline), WAIT);
    CHECK_IS(judge(&watch, &words, 101000, deadline), KILL);
    /* A fail_all is about to release it. */
    words = (hostflag_words){.gathered = 7, .claimed = 7 + HOSTFLAG_FAR, .released = 6, .consumed = 6};
    CHECK_IS(judge(&watch, &words, 200000, deadline), WAIT);
    words.released = words.claimed;
    CHECK_IS(judge(&watch, &words, 300000, deadline), WAIT);
    CHECK(!watch.is_pending);

    CHECK_IS(look_interval(200 * MS), 5 * MS);
    CHECK_IS(look_interval(16 * MS), 1 * MS);
    CHECK_IS(look_interval(1), MIN_LOOK_NS);
}

/* ---- life: what may be called when, and by whom ---- */

static void *wait_long(void *argument) {
    hostflag_status status = hostflag_wait_gathered(argument, 1, 0, 100 * US, add_ns(now_ns(), 60000 * MS));

    return (void *)(intptr_t)status;
}

static void wait_for_calls(hostflag_page *page, uint32_t calls) {
    for (int naps = 0; atomic_load(&page->calls) != calls; naps++) {
        CHECK(naps < 50000);
        rest(100 * US);
    }
}

static void destroy_ends_a_wait(void) {
    hostflag_page *page = new_page(0);
    pthread_t waiter;
    void *status;

    CHECK_IS(pthread_create(&waiter, NULL, wait_long, page), 0);
    wait_for_calls(page, 1);
    CHECK_IS(hostflag_page_destroy(page, 30000 * MS), HOSTFLAG_OK);
    CHECK_IS(pthread_join(waiter, &status), 0);
    CHECK_IS((intptr_t)status, HOSTFLAG_CLOSED);
    CHECK_IS(hostflag_page_destroy(page, 0), HOSTFLAG_OK);
    CHECK_IS(publish_mark(page, 1), HOSTFLAG_CLOSED);
    CHECK_IS(hostflag_watchdog_start(page, MS), HOSTFLAG_CLOSED);
}

static void fail_all_ends_a_wait(void) {
    hostflag_page *page = new_page(0);
    pthread_t waiter;
    void *status;

    CHECK_IS(pthread_create(&waiter, NULL, wait_long, page), 0);
    wait_for_calls(page, 1);
    CHECK_IS(hostflag_fail_all(page, 0, 0, NULL), HOSTFLAG_OK);
    CHECK_IS(pthread_join(waiter, &status), 0);
    CHECK_IS((intptr_t)status, HOSTFLAG_ENDED);
    end_page(page);
}

static void destroy_refuses_while_in_use(void) {
    hostflag_page *page = new_page(0);
    hostflag_info info;

    CHECK_IS(hostflag_gather(page, 1), HOSTFLAG_OK);
    CHECK_IS(hostflag_page_destroy(page, 0), HOSTFLAG_PENDING);
    CHECK_IS(hostflag_fail(page, 1), HOSTFLAG_OK);
    CHECK(enter(page)); /* a call that does not come back */
    CHECK_IS(hostflag_page_destroy(page, 0), HOSTFLAG_BUSY);
    CHECK_IS(hostflag_page_info(page, &info), HOSTFLAG_CLOSED);
    CHECK_IS(page->memory->reply_bytes, REPLY_BYTES);
    CHECK_IS(leave(page, HOSTFLAG_OK), HOSTFLAG_OK);
    CHECK_IS(hostflag_page_destroy(page, 0), HOSTFLAG_OK);
    CHECK_IS(hostflag_page_destroy(NULL, 0), HOSTFLAG_OK);
}

static int status_of_child(pid_t child) {
    int status;

    CHECK_IS(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/* A forked child has no watchdog to join and no page to touch. */
static void a_forked_child_finds_the_page_closed(void) {
    hostflag_page *page = new_page(0);
    hostflag_info info;
    pid_t child;

    CHECK_IS(hostflag_page_info(page, &info), HOSTFLAG_OK);
    CHECK_IS(info.dontfork_errno, 0);
    CHECK_IS(hostflag_watchdog_start(page, 1000 * MS), HOSTFLAG_OK);
    child = fork();
    if (child == 0) {
        unsigned char there;
        bool is_closed = hostflag_publish(page, 1, &there, 1) == HOSTFLAG_CLOSED &&
                         hostflag_watchdog_stop(page) == HOSTFLAG_CLOSED && hostflag_page_destroy(page, 0) == HOSTFLAG_OK;
        bool is_absent = mincore((void *)(uintptr_t)info.address, 1, &there) != 0 && errno == ENOMEM;
        _exit(is_closed && is_absent ? 0 : 1);
    }
    CHECK_IS(status_of_child(child), 0);
    CHECK_IS(hostflag_page_info(page, &info), HOSTFLAG_OK);
    end_page(page);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* they make mlock do nothing */
static void a_page_that_may_not_be_locked_says_so_and_works(void) {
    pid_t child = fork();

    if (child == 0) {
        struct rlimit none = {0, 0};
        hostflag_page *page;
        hostflag_info info;

        CHECK_IS(setrlimit(RLIMIT_MEMLOCK, &none), 0);
        if (geteuid() == 0)
            CHECK_IS(setuid(65534), 0);
        page = new_page(0);
        CHECK_IS(hostflag_page_info(page, &info), HOSTFLAG_OK);
        CHECK(info.lock_errno == EPERM || info.lock_errno == ENOMEM);
        CHECK_IS(hostflag_gather(page, 1), HOSTFLAG_OK);
        CHECK_IS(publish_mark(page, 1), HOSTFLAG_OK);
        CHECK_IS(hostflag_page_destroy(page, 0), HOSTFLAG_OK);
        _exit(0);
    }
    CHECK_IS(status_of_child(child), 0);
}
#else
static void a_page_that_may_not_be_locked_says_so_and_works(void) {}
#endif

static void test_life(void) {
    hostflag_page *page = NULL;

    CHECK_IS(hostflag_page_create(0, 0, &page), HOSTFLAG_INVALID);
    CHECK_IS(hostflag_page_create(HOSTFLAG_MAX_REPLY_BYTES + 1, 0, &page), HOSTFLAG_INVALID);
    CHECK(page == NULL);
    CHECK_IS(wait_gathered_now(NULL, 0), HOSTFLAG_CLOSED);

    page = new_page(0);
    CHECK_IS(hostflag_watchdog_start(page, 0), HOSTFLAG_INVALID);
    CHECK_IS(hostflag_watchdog_start(page, MS), HOSTFLAG_OK);
    CHECK_IS(hostflag_watchdog_start(page, MS), HOSTFLAG_RUNNING);
    CHECK_IS(hostflag_watchdog_stop(page), HOSTFLAG_OK);
    CHECK_IS(hostflag_watchdog_stop(page), HOSTFLAG_OK);
    CHECK_IS(hostflag_watchdog_start(page, MS), HOSTFLAG_OK);
    CHECK_IS(hostflag_follow(page, 1000), HOSTFLAG_SYSTEM);
    end_page(page); /* stops the watchdog too */

    destroy_ends_a_wait();
    fail_all_ends_a_wait();
    destroy_refuses_while_in_use();
    a_forked_child_finds_the_page_closed();
    a_page_that_may_not_be_locked_says_so_and_works();
}

/* ---- claims: one winner a round, whoever starts first ---- */

#define CLAIMERS 3

typedef struct contest {
    hostflag_page *page;
    _Atomic uint32_t round;
    _Atomic uint32_t finished;
    _Atomic uint32_t winners;
} contest;

static void *claim_each_round(void *argument) {
    contest *contest = argument;

    for (uint32_t round = 1; round <= (uint32_t)claim_rounds; round++) {
        while (!reached(atomic_load(&contest->round), round))
            sched_yield();
        if (hostflag_claim(contest->page, round) == HOSTFLAG_OK)
            atomic_fetch_add(&contest->winners, 1);
        atomic_fetch_add(&contest->finished, 1);
    }
    return NULL;
}

static void test_claims(void) {
    contest contest = {.page = new_page(0)};
    pthread_t threads[CLAIMERS];

    for (int at = 0; at < CLAIMERS; at++)
        CHECK_IS(pthread_create(&threads[at], NULL, claim_each_round, &contest), 0);
    for (uint32_t round = 1; round <= (uint32_t)claim_rounds; round++) {
        CHECK_IS(hostflag_gather(contest.page, round), HOSTFLAG_OK);
        atomic_store(&contest.round, round);
        while (atomic_load(&contest.finished) != round * CLAIMERS)
            sched_yield();
        CHECK_IS(atomic_load(&contest.winners), round);
        CHECK_IS(hostflag_release(contest.page, round), HOSTFLAG_OK);
    }
    for (int at = 0; at < CLAIMERS; at++)
        CHECK_IS(pthread_join(threads[at], NULL), 0);
    end_page(contest.page);
}

/* ---- race: replies that come just as the watchdog's timed wait ends, each time with the next round gathered at once ---- */

static void test_race(void) {
    const int64_t deadline = 200 * US;
    hostflag_page *page = new_page(UINT32_MAX - 1000);
    uint32_t round = UINT32_MAX - 1000;
    int64_t early = 0, preempted = 0, answered = 0;
    uint64_t random = seed;

    CHECK_IS(hostflag_watchdog_start(page, deadline), HOSTFLAG_OK);
    for (int64_t count = 0; count < race_rounds; count++) {
        /* The watchdog sees the round within one look and wakes within the kernel's timer slack of the deadline. */
        int64_t hold = deadline - 20 * US + random_below(&random, 140 * US);
        int64_t gathered_at = now_ns();
        hostflag_status waited, published;

        CHECK_IS(hostflag_gather(page, ++round), HOSTFLAG_OK);
        waited = hostflag_wait_released(page, round, 0, 0, gathered_at + hold);
        /* Read after the release was seen: never shorter than the wait was. */
        early += waited == HOSTFLAG_OK && now_ns() - gathered_at < deadline;
        published = publish_mark(page, round);
        CHECK(published == HOSTFLAG_OK || published == HOSTFLAG_LOST);
        preempted += published == HOSTFLAG_LOST;
        answered += published == HOSTFLAG_OK;
        CHECK_IS(hostflag_wait_released(page, round, 0, 100 * US, add_ns(now_ns(), 10000 * MS)), HOSTFLAG_OK);
        CHECK_IS(read_mark(page), published == HOSTFLAG_OK ? mark_of(round) : 0);
        CHECK_IS(hostflag_consume(page, round), HOSTFLAG_OK);
    }
    CHECK_IS(hostflag_watchdog_stop(page), HOSTFLAG_OK);
    printf("  race: %lld rounds, %lld answered, %lld preempted, %lld of them early\n", (long long)race_rounds,
           (long long)answered, (long long)preempted, (long long)early);
    CHECK_IS(stats_of(page).preempted, preempted);
    CHECK_IS(stats_of(page).rounds_watched, race_rounds);
    CHECK_IS(early, 0);
    /* Both ends of the race were met, or nothing was shown. */
    CHECK(race_rounds < 1000 || (answered > race_rounds / 100 && preempted > race_rounds / 100));
    end_page(page);
}

/* ---- fuzz: one thread, any order of calls, against a model with numbers that never wrap ---- */

typedef struct model {
    int64_t gathered, claimed, released, consumed;
    int64_t newest; /* numbered by the engine, enqueued, not gathered yet */
    uint32_t claimant;
    uint32_t mark;         /* of the reply */
    int64_t held;          /* a claim of our own between its halves, 0: none */
    bool is_held_elsewhere; /* ... made as another process */
    int64_t watched, watched_since, held_since;
    bool is_watched_held;
    int64_t now;
} model;

static void compare(hostflag_page *page, const model *model) {
    hostflag_words words = words_of(page);

    CHECK_IS(words.gathered, (uint32_t)model->gathered);
    CHECK_IS(words.claimed, (uint32_t)model->claimed);
    CHECK_IS(words.claimant, model->claimant);
    CHECK_IS(words.released, (uint32_t)model->released);
    CHECK_IS(words.consumed, (uint32_t)model->consumed);
}

static hostflag_status model_claim(model *model, int64_t round, uint32_t self) {
    if (model->claimed >= round || model->gathered > round)
        return HOSTFLAG_LOST;
    if (model->gathered < round)
        return HOSTFLAG_NOT_GATHERED;
    model->claimed = round;
    model->claimant = self;
    return HOSTFLAG_OK;
}

static hostflag_status model_release(model *model, int64_t round) {
    if (model->released >= round)
        return HOSTFLAG_LATE;
    model->released = round;
    return HOSTFLAG_OK;
}

static hostflag_status model_settle(model *model, int64_t round, uint32_t self, uint32_t mark) {
    hostflag_status status = model_claim(model, round, self);

    if (status != HOSTFLAG_OK)
        return status;
    model->mark = mark;
    return model_release(model, round);
}

static hostflag_status model_fail_all(model *model, int64_t newest) {
    bool is_written = model->released < model->claimed;
    bool is_unread = model->gathered == model->claimed && model->consumed < model->claimed;
    bool is_free = !is_written && !is_unread;

    if (model->claimed > model->gathered && model->claimed >= newest)
        return HOSTFLAG_OK;
    model->claimed = (newest > model->gathered ? newest : model->gathered) + HOSTFLAG_FAR;
    model->claimant = OWNER;
    model->released = model->claimed;
    model->mark = 0;
    return is_free ? HOSTFLAG_OK : HOSTFLAG_FORCED;
}

static hostflag_status model_wait(const model *model, int64_t round) {
    if (model->gathered >= round)
        return model->claimed >= round ? HOSTFLAG_FINISHED : HOSTFLAG_OK;
    return model->claimed >= round ? HOSTFLAG_ENDED : HOSTFLAG_TIMED_OUT;
}

static verdict model_judge(model *model, int64_t deadline) {
    if (model->gathered <= model->released) {
        model->watched = -1;
        return WAIT;
    }
    if (model->watched != model->gathered) {
        model->watched = model->gathered;
        model->watched_since = model->now;
        model->is_watched_held = false;
    }
    if (model->now < model->watched_since + deadline)
        return WAIT;
    if (model->claimed < model->gathered)
        return PREEMPT;
    if (model->claimed > model->gathered || model->claimant == OWNER)
        return WAIT;
    if (!model->is_watched_held)
        model->held_since = model->now;
    model->is_watched_held = true;
    return model->now >= model->held_since + deadline ? KILL : WAIT;
}

/* The stream's next step, if it has one: it never gathers before it read the reply of the round before. */
static void stream_steps(hostflag_page *page, model *model, uint64_t *random) {
    bool is_parked = model->gathered > model->released;

    if (is_parked)
        return;
    if (model->consumed < model->gathered) {
        CHECK_IS(read_mark(page), model->mark);
        model->consumed = model->gathered;
        CHECK_IS(hostflag_consume(page, (uint32_t)model->consumed), HOSTFLAG_OK);
        return;
    }
    /* After a fail_all the rounds that were enqueued pass, then the numbers go on from there. */
    if (model->newest < model->claimed && random_below(random, 3) == 0)
        model->newest = model->claimed + 1;
    else if (model->newest > model->gathered + 1 && random_below(random, 2) == 0)
        model->gathered = model->newest;
    else
        model->gathered++;
    if (model->newest < model->gathered)
        model->newest = model->gathered;
    CHECK_IS(hostflag_gather(page, (uint32_t)model->gathered), HOSTFLAG_OK);
}

static void fuzz_once(hostflag_page *page, model *model, watch *watch, uint64_t *random) {
    const int64_t deadline = 100;
    int64_t round = model->gathered - 2 + random_below(random, 5);
    uint32_t other = random_below(random, 4) == 0 ? 77 : OWNER, mark = (uint32_t)next_random(random) | 1u;
    uint32_t reply[REPLY_WORDS] = {0}, far;
    hostflag_words words;
    verdict verdict;

    page->self = other;
    model->now += random_below(random, 60);
    switch (random_below(random, 13)) {
    default:
        stream_steps(page, model, random);
        break;
    case 0:
        fill(reply, mark);
        /* Nobody publishes with a claim of its own open. */
        CHECK_IS(hostflag_publish(page, (uint32_t)round, reply, sizeof reply), model_settle(model, round, other, mark));
        break;
    case 1:
        CHECK_IS(hostflag_fail(page, (uint32_t)round), model_settle(model, round, other, 0));
        break;
    case 2:
        if (model->held == 0) {
            hostflag_status status = hostflag_claim(page, (uint32_t)round);
            CHECK_IS(status, model_claim(model, round, other));
            if (status == HOSTFLAG_OK)
                model->held = round;
        }
        break;
    case 3:
        if (model->held != 0) {
            CHECK_IS(hostflag_release(page, (uint32_t)model->held), model_release(model, model->held));
            model->held = 0;
        }
        break;
    case 4: /* somebody very late */
        round = model->released - random_below(random, 1000);
        CHECK_IS(hostflag_release(page, (uint32_t)round), model_release(model, round));
        break;
    case 5:
        if (random_below(random, 8) == 0) {
            page->self = OWNER;
            round = random_below(random, 2) == 0 ? model->gathered : model->newest;
            CHECK_IS(hostflag_fail_all(page, (uint32_t)round, 0, &far), model_fail_all(model, round));
            CHECK_IS(far, (uint32_t)model->claimed);
        }
        break;
    case 6:
    case 7:
        words = words_of(page);
        verdict = judge(watch, &words, model->now, deadline);
        CHECK_IS(verdict, model_judge(model, deadline));
        page->self = OWNER;
        if (verdict == PREEMPT)
            CHECK_IS(settle(page, watch->round, NULL), model_settle(model, model->watched, OWNER, 0));
        break;
    case 9: /* somebody from ages ago, who may compare as late or as early */
        round = model->gathered - random_below(random, UINT32_MAX - 10) - 3;
        CHECK(hostflag_publish(page, (uint32_t)round, reply, sizeof reply) == HOSTFLAG_LOST ||
              hostflag_fail(page, (uint32_t)round) == HOSTFLAG_NOT_GATHERED);
        break;
    case 8:
        CHECK_IS(wait_gathered_now(page, (uint32_t)round), model_wait(model, round));
        break;
    }
    page->self = OWNER;
}

static void test_fuzz(void) {
    static const uint32_t STARTS[] = {1000, UINT32_MAX - 50, (UINT32_C(1) << 31) - 50, UINT32_MAX - HOSTFLAG_FAR - 50};
    uint64_t random = seed;

    for (int run = 0; run < 40; run++) {
        /* A cycle up, so that the model's numbers stay positive and only the real ones wrap. */
        uint32_t start = STARTS[run % 4];
        int64_t at = (INT64_C(1) << 32) + start;
        model model = {.gathered = at, .claimed = at, .released = at, .consumed = at, .newest = at, .watched = -1};
        hostflag_page *page = new_page(start);
        watch watch = {0};

        for (int64_t step = 0; step < fuzz_steps / 40; step++) {
            fuzz_once(page, &model, &watch, &random);
            compare(page, &model);
        }
        end_page(page);
    }
    printf("  fuzz: %lld steps\n", (long long)fuzz_steps);
}

/* ---- storm: stream, proxy, watchdog and fail_all at once; every reply is a whole one or zeros ---- */

#define STORM_ROUNDS 65536

typedef struct storm {
    hostflag_page *page;
    _Atomic uint32_t newest; /* given to the stream */
    _Atomic uint32_t next;   /* where the numbers go on after the last fail_all */
    _Atomic bool is_over;
    _Atomic uint64_t failures;
    uint32_t told_rounds[STORM_ROUNDS]; /* the proxy's, in its order, and what it was told */
    int told[STORM_ROUNDS];
    int64_t told_count;
    uint32_t rounds[STORM_ROUNDS]; /* the stream's, and what it read */
    uint32_t marks[STORM_ROUNDS];
} storm;

static void rest_some(uint64_t *random, int64_t limit_ns) { rest(random_below(random, limit_ns)); }

static void *storm_proxy(void *argument) {
    storm *storm = argument;
    uint64_t random = seed + 1;
    uint32_t round = atomic_load(&storm->next);
    int told;

    while (!atomic_load(&storm->is_over)) {
        switch (hostflag_wait_gathered(storm->page, round, 2 * US, 20 * US, add_ns(now_ns(), 20 * MS))) {
        case HOSTFLAG_ENDED:
            while (!is_after(atomic_load(&storm->next), round) && !atomic_load(&storm->is_over))
                rest(20 * US);
            round = atomic_load(&storm->next);
            continue;
        case HOSTFLAG_TIMED_OUT:
            continue;
        case HOSTFLAG_OK:
            if (random_below(&random, 40) == 0)
                rest_some(&random, 3 * MS); /* the watchdog may be first */
            if (random_below(&random, 50) == 0)
                break; /* the watchdog has to be */
            told = random_below(&random, 20) == 0 ? (int)hostflag_fail(storm->page, round) + 100
                                                  : (int)publish_mark(storm->page, round);
            CHECK(told != HOSTFLAG_LATE && told != 100 + HOSTFLAG_LATE);
            storm->told_rounds[storm->told_count] = round;
            storm->told[storm->told_count++] = told;
            break;
        case HOSTFLAG_FINISHED:
            if (is_after(atomic_load(&storm->next), round)) { /* none of those in between is the proxy's */
                round = atomic_load(&storm->next);
                continue;
            }
            break;
        default:
            CHECK(false);
        }
        round++;
    }
    return NULL;
}

static void *storm_failures(void *argument) {
    storm *storm = argument;
    uint64_t random = seed + 2;
    uint32_t far;

    while (!atomic_load(&storm->is_over)) {
        rest_some(&random, 4 * MS);
        CHECK_IS(hostflag_fail_all(storm->page, atomic_load(&storm->newest), 20000 * MS, &far), HOSTFLAG_OK);
        atomic_store(&storm->next, far + 1);
        atomic_fetch_add(&storm->failures, 1);
    }
    return NULL;
}

static void storm_stream(storm *storm, uint32_t round) {
    uint64_t random = seed + 3;
    uint32_t reply[REPLY_WORDS];

    for (int64_t count = 0; count < storm_rounds; count++) {
        if (count % 50 == 49)
            rest_some(&random, 1 * MS); /* enqueued, and not gathered for a while */
        CHECK_IS(hostflag_gather(storm->page, round), HOSTFLAG_OK);
        CHECK_IS(hostflag_wait_released(storm->page, round, 2 * US, 20 * US, add_ns(now_ns(), 30000 * MS)), HOSTFLAG_OK);
        if (random_below(&random, 30) == 0)
            rest_some(&random, 200 * US); /* a slow copy: fail_all must not touch the reply meanwhile */
        CHECK_IS(hostflag_read_reply(storm->page, reply, sizeof reply), HOSTFLAG_OK);
        CHECK(is_all(reply, 0) || is_all(reply, mark_of(round)));
        storm->rounds[count] = round;
        storm->marks[count] = reply[0];
        CHECK_IS(hostflag_consume(storm->page, round), HOSTFLAG_OK);
        round++;
        /* Some rounds more were enqueued before anybody knew. */
        if (is_after(atomic_load(&storm->next), round) && random_below(&random, 3) == 0)
            round = atomic_load(&storm->next);
        atomic_store(&storm->newest, round);
    }
}

static void test_storm(void) {
    static storm storm;
    const uint32_t start = UINT32_MAX - 700;
    pthread_t proxy, failures;
    int64_t good = 0, zero = 0;

    CHECK(storm_rounds <= STORM_ROUNDS);
    storm.page = new_page(start);
    atomic_store(&storm.next, start + 1);
    atomic_store(&storm.newest, start + 1);
    CHECK_IS(hostflag_watchdog_start(storm.page, 1 * MS), HOSTFLAG_OK);
    CHECK_IS(pthread_create(&proxy, NULL, storm_proxy, &storm), 0);
    CHECK_IS(pthread_create(&failures, NULL, storm_failures, &storm), 0);
    storm_stream(&storm, start + 1);
    atomic_store(&storm.is_over, true);
    CHECK_IS(pthread_join(proxy, NULL), 0);
    CHECK_IS(pthread_join(failures, NULL), 0);
    CHECK_IS(hostflag_watchdog_stop(storm.page), HOSTFLAG_OK);

    /* Both went through the rounds in the same order; some only the stream met. */
    for (int64_t count = 0, at = 0; count < storm_rounds; count++) {
        bool is_told = at < storm.told_count && storm.told_rounds[at] == storm.rounds[count];
        bool is_good = is_told && storm.told[at] == HOSTFLAG_OK;

        CHECK_IS(storm.marks[count], is_good ? mark_of(storm.rounds[count]) : 0);
        good += is_good;
        zero += !is_good;
        at += is_told;
    }
    printf("  storm: %lld rounds, %lld with drafts, %lld without, %llu times all failed, %llu preempted\n",
           (long long)storm_rounds, (long long)good, (long long)zero, (unsigned long long)atomic_load(&storm.failures),
           (unsigned long long)stats_of(storm.page).preempted);
    end_page(storm.page);
}

/* ---- which ---- */

/* ---- submit: a driver that plays what it is given, and refuses one call of a round ---- */

enum { MAX_COPIES = 6, MAX_CALLS = MAX_COPIES + 5 };

typedef struct played {
    hostflag_call call;
    uint64_t to, from, bytes; /* of a copy; of a value: address, value */
} played;

static struct {
    hostflag_page *page;
    uint32_t calls, refused_at; /* counted from 1; 0: none */
    played played[MAX_CALLS];
    bool is_parked;
    uint32_t waits_for;
} fake;

static void *const FAKE_STREAM = &fake;
static void *const TAKE_REPLY = &fake.calls; /* a kernel's handle */

static int play(hostflag_call call, uint64_t to, uint64_t from, uint64_t bytes, const void *stream) {
    CHECK(stream == FAKE_STREAM);
    CHECK(fake.calls < MAX_CALLS);
    fake.played[fake.calls++] = (played){call, to, from, bytes};
    return fake.calls == fake.refused_at ? 700 + (int)call : 0;
}

static int play_launch(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                       unsigned block_z, unsigned shared_bytes, void *stream, void **parameters, void **extra) {
    CHECK(extra == NULL);
    if (function == TAKE_REPLY) {
        page_memory *memory = fake.page->memory;
        uint32_t round = *(uint32_t *)parameters[4];
        int result = play(HOSTFLAG_CALL_TAKE_REPLY, *(uint64_t *)parameters[1], *(uint64_t *)parameters[0],
                          *(uint32_t *)parameters[2], stream);

        CHECK(grid_x == 1 && grid_y == 1 && grid_z == 1 && block_y == 1 && block_z == 1 && shared_bytes == 0);
        CHECK_IS(block_x, HOSTFLAG_TAKE_REPLY_THREADS);
        CHECK_IS(*(uint64_t *)parameters[3], (uintptr_t)&memory->consumed);
        CHECK_IS(round, fake.waits_for);
        if (result == 0)
            CHECK_IS(hostflag_consume(fake.page, round), HOSTFLAG_OK);
        return result;
    }
    CHECK_IS(grid_x * 1000000 + grid_y * 10000 + grid_z * 1000 + block_y * 10 + block_z, 24 * 1000000 + 3 * 10000 + 1011);
    return play(HOSTFLAG_CALL_LAUNCH, (uint64_t)(uintptr_t)function, (uint64_t)(uintptr_t)parameters[1],
                (uint64_t)block_x << 32 | shared_bytes, stream);
}

static int play_to_host(void *to, uint64_t from, size_t bytes, void *stream) {
    return play(HOSTFLAG_CALL_COPY, (uint64_t)(uintptr_t)to, from, bytes, stream);
}

static int play_to_device(uint64_t to, const void *from, size_t bytes, void *stream) {
    return play(HOSTFLAG_CALL_COPY_REPLY, to, (uint64_t)(uintptr_t)from, bytes, stream);
}

/* The device has the page where the host has it. */
static int play_write(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    bool is_gathered = address == (uintptr_t)&fake.page->memory->gathered;
    int result = play(is_gathered ? HOSTFLAG_CALL_WRITE_GATHERED : HOSTFLAG_CALL_WRITE_CONSUMED, address, value, flags, stream);

    CHECK(is_gathered || address == (uintptr_t)&fake.page->memory->consumed);
    CHECK(!is_gathered || !fake.is_parked);
    if (result == 0)
        CHECK_IS(is_gathered ? hostflag_gather(fake.page, value) : hostflag_consume(fake.page, value), HOSTFLAG_OK);
    return result;
}

static int play_wait(void *stream, uint64_t address, uint32_t value, unsigned flags) {
    int result = play(HOSTFLAG_CALL_WAIT_RELEASED, address, value, flags, stream);

    CHECK_IS(address, (uintptr_t)&fake.page->memory->released);
    fake.is_parked = result == 0;
    fake.waits_for = value;
    return result;
}

/* Every operation is played as if it had been called for; what the driver does not know it refuses. */
static int play_batch(void *stream, unsigned count, hostflag_operation *operations, unsigned flags) {
    int result = play(HOSTFLAG_CALL_GATHERED_AND_WAIT, count, flags, sizeof *operations, stream);

    for (unsigned at = 0; at < count && result == 0; at++) {
        const hostflag_operation *operation = &operations[at];

        fake.calls--; /* it was one call */
        if (operation->kind == HOSTFLAG_WRITE_VALUE)
            result = play_write(stream, operation->address, (uint32_t)operation->value, operation->flags);
        else if (operation->kind == HOSTFLAG_WAIT_VALUE)
            result = play_wait(stream, operation->address, (uint32_t)operation->value, operation->flags);
        else
            result = 801;
        CHECK_IS(operation->value >> 32 | operation->reserved0 | operation->reserved1, 0);
    }
    if (result == 0)
        fake.played[fake.calls - 1] = (played){HOSTFLAG_CALL_GATHERED_AND_WAIT, count, flags, sizeof *operations};
    return result;
}

static void check_calls(const hostflag_device *device, const hostflag_round *round) {
    uint32_t at = 0;

#define NEXT_IS(call_, to_, from_, bytes_)                                                                                 \
    do {                                                                                                                   \
        if (at == fake.calls)                                                                                              \
            return;                                                                                                        \
        CHECK_IS(fake.played[at].call, call_);                                                                             \
        CHECK_IS(fake.played[at].to, to_);                                                                                 \
        CHECK_IS(fake.played[at].from, from_);                                                                             \
        CHECK_IS(fake.played[at].bytes, bytes_);                                                                           \
        at++;                                                                                                              \
    } while (0)

    if (round->launch != NULL)
        NEXT_IS(HOSTFLAG_CALL_LAUNCH, (uintptr_t)round->launch->function, (uintptr_t)round->launch->parameters[1],
                UINT64_C(128) << 32 | round->launch->shared_bytes);
    for (uint32_t copy = 0; copy < round->num_copies; copy++)
        NEXT_IS(HOSTFLAG_CALL_COPY, round->copies[copy].to, round->copies[copy].from, round->copies[copy].bytes);
    if (device->batch != NULL) {
        NEXT_IS(HOSTFLAG_CALL_GATHERED_AND_WAIT, 2, 0, 48);
    } else {
        NEXT_IS(HOSTFLAG_CALL_WRITE_GATHERED, (uintptr_t)&fake.page->memory->gathered, round->round, 0);
        NEXT_IS(HOSTFLAG_CALL_WAIT_RELEASED, (uintptr_t)&fake.page->memory->released, round->round, 0);
    }
    if (device->take_reply != NULL) {
        NEXT_IS(HOSTFLAG_CALL_TAKE_REPLY, round->reply_to, (uintptr_t)fake.page->memory->reply, REPLY_BYTES / 4);
    } else {
        NEXT_IS(HOSTFLAG_CALL_COPY_REPLY, round->reply_to, (uintptr_t)fake.page->memory->reply, REPLY_BYTES);
        NEXT_IS(HOSTFLAG_CALL_WRITE_CONSUMED, (uintptr_t)&fake.page->memory->consumed, round->round, 0);
    }
    CHECK_IS(at, fake.calls);
#undef NEXT_IS
}

/* Whatever was refused: no data is said to be there that is not, and nothing stays parked after fail_all. */
static void submit_once(uint64_t *random, uint32_t start) {
    hostflag_device device = {play_launch, play_to_host, play_to_device, play_write, play_wait, NULL, NULL, 0};
    void *parameters[2] = {&device, &fake};
    hostflag_launch launch = {parameters, parameters, {24, 3, 1}, {128, 1, 1}, 64};
    hostflag_round *round = calloc(1, sizeof *round + MAX_COPIES * sizeof(hostflag_copy));
    hostflag_words words;
    uint32_t enqueued, far, newest = start + 1;
    hostflag_status status;

    CHECK(round != NULL);
    memset(&fake, 0, sizeof fake);
    fake.page = new_page(start);
    device.page = (uintptr_t)fake.page->memory;
    device.batch = random_below(random, 2) == 0 ? play_batch : NULL;
    device.take_reply = random_below(random, 2) == 0 ? TAKE_REPLY : NULL;
    *round = (hostflag_round){.stream = FAKE_STREAM, .round = newest, .num_copies = (uint32_t)random_below(random, MAX_COPIES + 1)};
    round->launch = random_below(random, 2) == 0 ? &launch : NULL;
    round->reply_to = next_random(random);
    for (uint32_t at = 0; at < round->num_copies; at++)
        round->copies[at] = (hostflag_copy){next_random(random), next_random(random), next_random(random)};
    enqueued = round->num_copies + 4 + (round->launch != NULL) - (device.batch != NULL) - (device.take_reply != NULL);
    fake.refused_at = (uint32_t)random_below(random, enqueued + 1);

    status = hostflag_submit(fake.page, &device, round);
    CHECK_IS(status, fake.refused_at == 0 ? HOSTFLAG_OK : HOSTFLAG_REFUSED);
    CHECK_IS(fake.calls, fake.refused_at == 0 ? enqueued : fake.refused_at);
    check_calls(&device, round);
    if (fake.refused_at == 0) {
        CHECK_IS(round->failed_p, HOSTFLAG_CALL_NONE);
    } else {
        CHECK_IS(round->failed_p, fake.played[fake.calls - 1].call);
        CHECK_IS(round->result_p, 700 + (int)round->failed_p);
    }
    words = words_of(fake.page);
    CHECK(round->failed_p == HOSTFLAG_CALL_NONE || round->failed_p > HOSTFLAG_CALL_WRITE_GATHERED || words.gathered == start);
    CHECK(!fake.is_parked || words.gathered == newest);

    CHECK(hostflag_fail_all(fake.page, newest, 0, &far) >= 0);
    words = words_of(fake.page);
    CHECK(!fake.is_parked || reached(words.released, fake.waits_for));
    CHECK_IS(words.released, far);
    CHECK_IS(hostflag_page_destroy(fake.page, 1000 * MS), HOSTFLAG_OK);
    CHECK_IS(hostflag_submit(fake.page, &device, round), HOSTFLAG_CLOSED);
    free(round);
}

static void what_makes_no_sense_is_not_submitted(void) {
    hostflag_device device = {NULL, play_to_host, play_to_device, play_write, play_wait, NULL, NULL, 0};
    hostflag_launch launch = {0};
    hostflag_round round = {.stream = FAKE_STREAM, .launch = &launch, .round = 1};
    hostflag_page *attached;

    memset(&fake, 0, sizeof fake);
    fake.page = new_page(0);
    CHECK_IS(hostflag_submit(fake.page, NULL, &round), HOSTFLAG_INVALID);
    CHECK_IS(hostflag_submit(fake.page, &device, NULL), HOSTFLAG_INVALID);
    CHECK_IS(hostflag_submit(fake.page, &device, &round), HOSTFLAG_INVALID);
    CHECK_IS(hostflag_submit(NULL, &device, &round), HOSTFLAG_CLOSED);
    CHECK_IS(hostflag_page_attach(fake.page->memory, fake.page->bytes, &attached), HOSTFLAG_OK);
    round.launch = NULL;
    device.take_reply = TAKE_REPLY; /* and nothing to launch it with */
    CHECK_IS(hostflag_submit(fake.page, &device, &round), HOSTFLAG_INVALID);
    device.take_reply = NULL;
    CHECK_IS(hostflag_submit(attached, &device, &round), HOSTFLAG_NOT_OWNER);
    CHECK_IS(fake.calls, 0);
    CHECK_IS(hostflag_page_destroy(attached, MS), HOSTFLAG_OK);
    end_page(fake.page);
}

static void test_submit(void) {
    uint64_t random = seed;

    what_makes_no_sense_is_not_submitted();
    for (int turn = 0; turn < 500; turn++)
        submit_once(&random, turn % 2 == 0 ? UINT32_MAX : (uint32_t)next_random(&random));
}

static const struct {
    const char *name;
    void (*run)(void);
} TESTS[] = {
    {"wrap", test_wrap}, {"judge", test_judge}, {"life", test_life},   {"claims", test_claims},
    {"fuzz", test_fuzz}, {"storm", test_storm}, {"race", test_race},     {"submit", test_submit},
};

static bool take_option(const char *name, const char *value, const char *option, int64_t *number_p) {
    if (strcmp(name, option) != 0 || value == NULL)
        return false;
    *number_p = strtoll(value, NULL, 10);
    return true;
}

int main(int count, char **arguments) {
    int64_t given = -1;
    uint64_t ran = 0, asked = 0;
    const char *names[16];

    for (int at = 1; at < count; at++) {
        const char *name = arguments[at], *value = at + 1 < count ? arguments[at + 1] : NULL;

        if (take_option(name, value, "--seed", &given) || take_option(name, value, "--race", &race_rounds) ||
            take_option(name, value, "--fuzz", &fuzz_steps) || take_option(name, value, "--storm", &storm_rounds) ||
            take_option(name, value, "--claims", &claim_rounds))
            at++;
        else if (asked < 16)
            names[asked++] = name;
    }
    seed = given >= 0 ? (uint64_t)given : (uint64_t)clock_ns(CLOCK_REALTIME) % 1000000;
    printf("seed %llu\n", (unsigned long long)seed);
    for (size_t test = 0; test < sizeof TESTS / sizeof *TESTS; test++) {
        bool is_asked = asked == 0;
        int64_t began = now_ns();

        for (uint64_t at = 0; at < asked; at++)
            is_asked |= strcmp(names[at], TESTS[test].name) == 0;
        if (!is_asked)
            continue;
        fflush(stdout);
        TESTS[test].run();
        printf("%s: %.1f s\n", TESTS[test].name, (double)(now_ns() - began) / 1e9);
        ran++;
    }
    if (ran < (asked == 0 ? sizeof TESTS / sizeof *TESTS : asked)) {
        fprintf(stderr, "a test of this name does not exist\n");
        return 2;
    }
    return 0;
}
