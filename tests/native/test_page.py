"""Every call of the native helper, through ctypes."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time

import pytest

from farspark.native import HostflagError, HostflagLibrary, HostPage, How, Reply, Status
from farspark.native.page import EVENTS, FAR

MS = 1_000_000
REPLY_BYTES = 256
WRAP_STARTS = [0, (1 << 32) - 3, (1 << 31) - 3]


def reply_of(page: HostPage, round_: int) -> Reply:
    reply = page.make_reply()
    reply.memory[:] = bytes([round_ % 255 + 1]) * reply.size
    return reply


def read(page: HostPage) -> bytes:
    reply = page.make_reply()
    assert page.read_reply(reply) is Status.OK
    return bytes(reply.memory)


def within(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def wait_gathered(page: HostPage, round_: int, seconds: float = 0.0) -> Status:
    return page.wait_gathered(round_, spin_ns=10_000, nap_ns=50_000, deadline_ns=within(seconds))


def wait_released(page: HostPage, round_: int, seconds: float = 0.0) -> Status:
    return page.wait_released(round_, spin_ns=10_000, nap_ns=50_000, deadline_ns=within(seconds))


def low(round_: int) -> int:
    return round_ & 0xFFFFFFFF


def test_an_untouched_page_waits_for_its_first_round(page: HostPage) -> None:
    assert wait_gathered(page, 1) is Status.TIMED_OUT
    assert wait_released(page, 1) is Status.TIMED_OUT
    assert wait_released(page, 0) is Status.OK
    assert read(page) == bytes(REPLY_BYTES)


def test_a_deadline_ends_a_wait_in_time(page: HostPage) -> None:
    began = time.monotonic()
    assert wait_gathered(page, 1, 0.05) is Status.TIMED_OUT
    assert 0.05 <= time.monotonic() - began < 5
    began = time.monotonic()
    assert page.wait_gathered(1, spin_ns=0, nap_ns=0, deadline_ns=within(0.02)) is Status.TIMED_OUT
    assert 0.02 <= time.monotonic() - began < 5


@pytest.mark.parametrize("start", WRAP_STARTS)
def test_rounds_pass_one_after_the_other_through_the_wrap(library: HostflagLibrary, start: int) -> None:
    with HostPage.create(library, REPLY_BYTES, start=low(start)) as page:
        for round_ in range(start + 1, start + 8):
            assert page.gather(round_) is Status.OK
            assert wait_gathered(page, round_) is Status.OK
            assert page.publish(round_, reply_of(page, round_)) is Status.OK
            assert page.publish(round_, reply_of(page, round_)) is Status.LOST
            assert wait_released(page, round_) is Status.OK
            assert wait_released(page, round_ + 1) is Status.TIMED_OUT
            assert read(page) == bytes(reply_of(page, round_).memory)
            assert page.consume(round_) is Status.OK
            assert page.words().consumed == low(round_)


def test_a_failed_round_reads_zeros(page: HostPage) -> None:
    page.gather(1)
    page.publish(1, reply_of(page, 1))
    page.consume(1)
    page.gather(2)
    assert page.fail(2) is Status.OK
    assert read(page) == bytes(REPLY_BYTES)
    assert page.fail(2) is Status.LOST


def test_a_claim_shuts_out_everybody_else_until_it_is_released(page: HostPage) -> None:
    page.gather(1)
    assert page.claim(1) is Status.OK
    assert page.claim(1) is Status.LOST
    assert page.publish(1, reply_of(page, 1)) is Status.LOST
    assert page.fail(1) is Status.LOST
    assert wait_released(page, 1) is Status.TIMED_OUT
    assert page.release(1) is Status.OK
    assert wait_released(page, 1) is Status.OK


@pytest.mark.parametrize("start", WRAP_STARTS)
def test_a_late_release_goes_nowhere(library: HostflagLibrary, start: int) -> None:
    with HostPage.create(library, REPLY_BYTES, start=low(start)) as page:
        for round_ in range(start + 1, start + 5):
            page.gather(round_)
            assert page.fail(round_) is Status.OK
            assert page.release(round_) is Status.LATE
            assert page.release(round_ - 1) is Status.LATE
            assert page.release(start) is Status.LATE
            assert page.words().released == low(round_)
            page.consume(round_)


def test_a_round_cannot_be_settled_before_it_was_gathered(page: HostPage) -> None:
    for call in (page.claim, page.fail, lambda round_: page.publish(round_, reply_of(page, 1))):
        with pytest.raises(HostflagError, match="not gathered yet") as caught:
            call(1)
        assert caught.value.status is Status.NOT_GATHERED


def test_a_reply_of_another_size_is_refused(library: HostflagLibrary, page: HostPage) -> None:
    page.gather(1)
    with pytest.raises(HostflagError, match="argument"):
        page.publish(1, Reply(REPLY_BYTES - 4))
    assert page.words().claimed == 0
    for size in (0, -1, (1 << 26) + 1, 1 << 32):
        with pytest.raises(ValueError, match="bytes"):
            HostPage.create(library, size)


def test_one_of_many_threads_wins_a_round(page: HostPage) -> None:
    rounds = 300
    won: list[tuple[int, int]] = []
    start = threading.Barrier(4)

    def proxy(index: int) -> None:
        reply = page.make_reply()
        reply.memory[:] = bytes([index + 1]) * REPLY_BYTES
        for round_ in range(1, rounds + 1):
            start.wait(30)
            if page.publish(round_, reply) is Status.OK:
                won.append((round_, index))
            start.wait(30)

    threads = [threading.Thread(target=proxy, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    read_back = []
    for round_ in range(1, rounds + 1):
        page.gather(round_)
        start.wait(30)
        start.wait(30)
        read_back.append((round_, read(page)))
        page.consume(round_)
    for thread in threads:
        thread.join(30)
    assert [round_ for round_, _ in won] == list(range(1, rounds + 1))
    assert read_back == [(round_, bytes([index + 1]) * REPLY_BYTES) for round_, index in won]


# ---- far ahead


@pytest.mark.parametrize("start", WRAP_STARTS)
def test_failing_all_ends_what_is_pending_and_what_comes(library: HostflagLibrary, start: int) -> None:
    with HostPage.create(library, REPLY_BYTES, start=low(start)) as page:
        page.gather(start + 1)
        assert wait_released(page, start + 1) is Status.TIMED_OUT
        assert page.fail_all(start + 3) == (Status.OK, low(start + 3 + FAR))
        for round_ in (start + 1, start + 2, start + 3):  # the three that were enqueued
            page.gather(round_)
            assert wait_released(page, round_) is Status.OK
            assert read(page) == bytes(REPLY_BYTES)
            assert wait_gathered(page, round_) is Status.FINISHED
            assert page.publish(round_, reply_of(page, round_)) is Status.LOST
            page.consume(round_)
        assert wait_gathered(page, start + 4) is Status.ENDED
        assert page.fail_all(start + 3) == (Status.OK, low(start + 3 + FAR))


def test_rounds_go_on_after_the_far_one(page: HostPage) -> None:
    _, far = page.fail_all(0)
    assert far % 64 == 0
    page.gather(far + 1)
    assert wait_gathered(page, far + 1) is Status.OK
    assert page.publish(1, reply_of(page, 1)) is Status.LOST  # somebody from before
    assert page.publish(far + 1, reply_of(page, far + 1)) is Status.OK
    assert wait_released(page, far + 2) is Status.TIMED_OUT


def test_failing_all_reaches_a_round_that_was_numbered_but_not_gathered(page: HostPage) -> None:
    _, far = page.fail_all(0)
    status, further = page.fail_all(far + 1)
    assert (status, further) == (Status.OK, far + 1 + FAR)
    page.gather(far + 1)
    assert wait_released(page, far + 1) is Status.OK


def test_failing_all_waits_until_the_reply_was_read(page: HostPage) -> None:
    page.gather(1)
    page.publish(1, reply_of(page, 1))
    done: list[tuple[Status, int]] = []
    failing = threading.Thread(target=lambda: done.append(page.fail_all(1, patience_ns=60_000 * MS)))
    failing.start()
    time.sleep(0.05)
    assert read(page) == bytes(reply_of(page, 1).memory)
    assert not done
    page.consume(1)
    failing.join(30)
    assert done == [(Status.OK, 1 + FAR)]
    assert read(page) == bytes(REPLY_BYTES)


def test_failing_all_waits_for_a_copy_in_progress(page: HostPage) -> None:
    page.gather(1)
    page.claim(1)
    done: list[tuple[Status, int]] = []
    failing = threading.Thread(target=lambda: done.append(page.fail_all(1, patience_ns=60_000 * MS)))
    failing.start()
    time.sleep(0.05)
    assert not done
    assert wait_released(page, 1) is Status.TIMED_OUT
    assert page.release(1) is Status.OK
    page.consume(1)
    failing.join(30)
    assert done == [(Status.OK, 1 + FAR)]


def test_failing_all_is_forced_at_the_end_of_its_patience_and_a_late_proxy_undoes_nothing(page: HostPage) -> None:
    page.gather(1)
    page.claim(1)
    assert page.fail_all(1, patience_ns=10 * MS) == (Status.FORCED, 1 + FAR)
    assert wait_released(page, 1) is Status.OK
    assert page.release(1) is Status.LATE
    assert page.words().released == 1 + FAR


def test_failing_all_ends_a_wait(page: HostPage) -> None:
    ended: list[Status] = []
    waiting = threading.Thread(target=lambda: ended.append(wait_gathered(page, 1, 60)))
    waiting.start()
    page.fail_all(0)
    waiting.join(30)
    assert ended == [Status.ENDED]


# ---- the watchdog


def test_the_watchdog_preempts_a_round_that_nobody_answers(page: HostPage) -> None:
    page.start_watchdog(20 * MS)
    began, wall = time.monotonic_ns(), time.time_ns()
    page.gather(1)
    assert wait_released(page, 1, 30) is Status.OK
    assert time.monotonic_ns() - began >= 20 * MS
    assert page.publish(1, reply_of(page, 1)) is Status.LOST
    assert read(page) == bytes(REPLY_BYTES)
    stats = page.watchdog_stats()
    assert (stats.rounds_watched, stats.preempted, stats.events_total) == (1, 1, 1)
    (event,) = stats.events
    assert (event.round, event.how) == (1, How.PREEMPTED)
    assert event.wait_ns >= 20 * MS
    assert wall <= event.wall_ns <= time.time_ns()
    assert stats.longest_wait_ns >= 20 * MS


def test_the_watchdog_leaves_answered_rounds_alone(page: HostPage) -> None:
    page.start_watchdog(60_000 * MS)
    for round_ in range(1, 101):
        page.gather(round_)
        assert page.publish(round_, reply_of(page, round_)) is Status.OK
        page.consume(round_)
    page.stop_watchdog()
    stats = page.watchdog_stats()
    assert (stats.rounds_watched, stats.preempted, stats.events) == (100, 0, ())
    assert not stats.is_running


def test_the_watchdog_works_through_the_wrap_and_keeps_the_newest_events(library: HostflagLibrary) -> None:
    start = (1 << 32) - 40
    with HostPage.create(library, REPLY_BYTES, start=start) as page:
        page.start_watchdog(1)  # every round at once
        for round_ in range(start + 1, start + 101):
            page.gather(round_)
            assert wait_released(page, round_, 30) is Status.OK
            page.consume(round_)
        page.stop_watchdog()
        stats = page.watchdog_stats()
        assert stats.preempted == stats.events_total == 100
        assert [event.round for event in stats.events] == [low(start + 100 - EVENTS + 1 + at) for at in range(EVENTS)]


def test_the_deadline_can_be_changed_for_the_round_that_is_pending(page: HostPage) -> None:
    page.start_watchdog(3_600_000 * MS)
    page.gather(1)
    assert wait_released(page, 1, 0.05) is Status.TIMED_OUT
    page.set_watchdog_deadline(1 * MS)
    assert wait_released(page, 1, 30) is Status.OK
    assert page.watchdog_stats().deadline_ns == 1 * MS


def test_the_watchdog_starts_once_stops_and_starts_again(page: HostPage) -> None:
    with pytest.raises(HostflagError, match="argument"):
        page.start_watchdog(0)
    page.start_watchdog(1 * MS)
    assert page.watchdog_stats().is_running
    with pytest.raises(HostflagError, match="runs already"):
        page.start_watchdog(1 * MS)
    assert page.stop_watchdog() is Status.OK
    assert page.stop_watchdog() is Status.OK
    page.gather(1)
    assert wait_released(page, 1, 0.05) is Status.TIMED_OUT
    page.start_watchdog(1 * MS)
    assert wait_released(page, 1, 30) is Status.OK


def test_the_watchdog_does_its_work_while_python_cannot_run(page: HostPage) -> None:
    """A call that keeps the GIL, as an extension's launch may."""
    import ctypes

    page.start_watchdog(5 * MS)
    page.gather(1)
    held = ctypes.PyDLL(str(page.library.path)).hostflag_wait_released
    held.argtypes = page.library.calls.hostflag_wait_released.argtypes
    assert held(page._handle, 1, 0, 100_000, within(30)) == Status.OK


def test_failing_all_is_an_event_too(page: HostPage) -> None:
    page.gather(1)
    page.fail_all(1)
    page.fail_all(1)
    stats = page.watchdog_stats()
    assert stats.failed_all == 1
    assert [(event.round, event.how) for event in stats.events] == [(1, How.FAILED_ALL)]


# ---- its life


def test_a_private_page_is_aligned_and_locked_or_says_why_not(page: HostPage) -> None:
    info = page.info
    assert info.address % mmap.PAGESIZE == info.bytes % mmap.PAGESIZE == 0
    offsets = [
        info.gathered_offset,
        info.claimed_offset,
        info.released_offset,
        info.consumed_offset,
        info.reply_offset,
    ]
    assert all(offset % 128 == 0 for offset in offsets)
    assert len(set(offsets)) == len(offsets)
    assert info.reply_offset + info.reply_bytes <= info.bytes
    assert (info.why_not_locked is None) == (info.lock_errno == 0)


def test_close_is_refused_while_a_stream_is_parked(page: HostPage) -> None:
    page.gather(1)
    with pytest.raises(HostflagError, match="fail the round first") as caught:
        page.close()
    assert caught.value.status is Status.PENDING
    page.fail(1)
    assert page.close() is Status.OK


def test_close_ends_a_wait_stops_the_watchdog_and_may_come_twice(library: HostflagLibrary) -> None:
    page = HostPage.create(library, REPLY_BYTES)
    page.start_watchdog(1000 * MS)
    ended: list[Status] = []
    waiting = threading.Thread(target=lambda: ended.append(wait_gathered(page, 1, 60)))
    waiting.start()
    time.sleep(0.02)
    assert page.close(patience_ns=30_000 * MS) is Status.OK
    waiting.join(30)
    assert ended == [Status.CLOSED]
    assert page.close() is Status.OK
    assert page.gather(1) is Status.CLOSED
    assert page.start_watchdog(1) is Status.CLOSED
    with pytest.raises(HostflagError, match="destroyed"):
        page.words()
    assert "farspark-watch" not in _thread_names()


def _thread_names() -> list[str]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read().strip())
    return names


def test_the_watchdog_is_a_named_thread_of_its_own(page: HostPage) -> None:
    page.start_watchdog(1000 * MS)
    deadline = time.monotonic() + 30
    while "farspark-watch" not in _thread_names():
        assert time.monotonic() < deadline
    page.stop_watchdog()
    assert "farspark-watch" not in _thread_names()


def test_a_page_in_memory_of_the_caller_keeps_that_mapped(library: HostflagLibrary) -> None:
    needed = HostPage.bytes_needed(library, REPLY_BYTES)
    with mmap.mmap(-1, 2 * mmap.PAGESIZE) as memory:
        memory[:] = b"\xff" * len(memory)
        with pytest.raises(HostflagError, match="argument"):
            HostPage.format(library, memory, len(memory) - needed + 128, REPLY_BYTES)
        with pytest.raises(HostflagError, match="argument"):
            HostPage.format(library, memory, 64, REPLY_BYTES)
        with pytest.raises(ValueError, match="offset"):
            HostPage.format(library, memory, len(memory), REPLY_BYTES)
        with HostPage.format(library, memory, mmap.PAGESIZE, REPLY_BYTES) as page:
            with pytest.raises(BufferError):
                memory.close()
            page.gather(1)
            page.fail(1)
        gc.collect()
        assert memory[: mmap.PAGESIZE] == b"\xff" * mmap.PAGESIZE
        assert memory[mmap.PAGESIZE + needed :] == b"\xff" * (mmap.PAGESIZE - needed)


def test_memory_without_a_page_of_this_version_cannot_be_attached(library: HostflagLibrary) -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        with pytest.raises(HostflagError, match="no page of this version"):
            HostPage.attach(library, memory, 0)
        with HostPage.format(library, memory, 0, REPLY_BYTES):
            memory[4] ^= 0x80  # the version
            with pytest.raises(HostflagError, match="no page of this version"):
                HostPage.attach(library, memory, 0)
        gc.collect()


def test_a_page_that_is_dropped_without_close_warns(library: HostflagLibrary) -> None:
    pages = [HostPage.create(library, REPLY_BYTES)]
    with pytest.warns(ResourceWarning, match="HostPage owner gathered 0"):
        pages.clear()


def test_the_representation_has_the_words(page: HostPage) -> None:
    page.gather(1)
    assert repr(page) == "<HostPage owner gathered 1 claimed 0 claimant 0 released 0 consumed 0>"
    page.fail(1)
    page.close()
    assert repr(page) == "<HostPage closed>"
