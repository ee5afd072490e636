/* Both sides of a round in C, so that only the hand-off is timed; bench/hostflag.py compiles this with the helper. */
#include "../src/farspark/native/hostflag.c"

#define FOR_EVER INT64_MAX

/* In place of a stream. `ns_p` gets, for each round, the time from before gathered is written until released is seen. */
HOSTFLAG_API int bench_stream(hostflag_page *page, uint32_t first, uint32_t rounds, int64_t pause_ns, int64_t *ns_p) {
    for (uint32_t at = 0; at < rounds; at++) {
        int64_t began, next = now_ns() + pause_ns;

        while (now_ns() < next)
            cpu_relax();
        began = now_ns();
        hostflag_gather(page, first + at);
        if (hostflag_wait_released(page, first + at, 0, 0, FOR_EVER) != HOSTFLAG_OK)
            return 1;
        ns_p[at] = now_ns() - began;
        hostflag_consume(page, first + at);
    }
    return 0;
}

HOSTFLAG_API int bench_proxy(hostflag_page *page, uint32_t first, uint32_t rounds, const void *reply, uint32_t bytes) {
    for (uint32_t at = 0; at < rounds; at++)
        if (hostflag_wait_gathered(page, first + at, 0, 0, FOR_EVER) != HOSTFLAG_OK ||
            hostflag_publish(page, first + at, reply, bytes) != HOSTFLAG_OK)
            return 1;
    return 0;
}

/* Gather, publish, consume in one thread, `rounds` times: what publish costs where nobody waits, memory in the cache. */
HOSTFLAG_API int64_t bench_alone(hostflag_page *page, uint32_t first, uint32_t rounds, const void *reply, uint32_t bytes) {
    int64_t began = now_ns();

    for (uint32_t at = 0; at < rounds; at++) {
        hostflag_gather(page, first + at);
        hostflag_publish(page, first + at, reply, bytes);
        hostflag_consume(page, first + at);
    }
    return now_ns() - began;
}
