"""A page that two processes map: the engine's owns it, the proxy's may die or stop at any moment."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from farspark.native import HostflagError, HostflagLibrary, HostPage, How, Status
from farspark.native.page import FAR

MS = 1_000_000
REPLY_BYTES = 256
CHILD = Path(__file__).parent / "proxy_child.py"
SIZE, OFFSET = 4 * mmap.PAGESIZE, mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Shared:
    fd: int
    page: HostPage


@pytest.fixture
def shared(library: HostflagLibrary) -> Iterator[Shared]:
    fd = os.memfd_create("farspark-test")
    try:
        os.ftruncate(fd, SIZE)
        with (
            mmap.mmap(fd, SIZE) as memory,
            HostPage.format(library, memory, OFFSET, REPLY_BYTES, start=(1 << 32) - 2) as page,
        ):
            yield Shared(fd, page)
    finally:
        os.close(fd)


FIRST = (1 << 32) - 1


@contextmanager
def proxy(shared: Shared, mode: str) -> Iterator[subprocess.Popen[str]]:
    """A running child, followed by the page; killed at the end."""
    path = str(shared.page.library.path)
    command = [sys.executable, str(CHILD), path, str(shared.fd), str(SIZE), str(OFFSET), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[shared.fd]) as child:
        try:
            assert _line(child) == f"ready {child.pid}"
            pidfd = os.pidfd_open(child.pid)
            try:
                shared.page.follow(pidfd)
            finally:
                os.close(pidfd)
            yield child
        finally:
            child.kill()


def _line(child: subprocess.Popen[str]) -> str:
    stdout: IO[str] | None = child.stdout
    assert stdout is not None
    return stdout.readline().strip()


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _released(page: HostPage, round_: int) -> Status:
    return page.wait_released(round_, spin_ns=0, nap_ns=50_000, deadline_ns=time.monotonic_ns() + 30_000 * MS)


def _mark(round_: int) -> bytes:
    return bytes([(round_ & 0x7F) + 1]) * REPLY_BYTES  # as proxy_child.py writes it


def _read(page: HostPage) -> bytes:
    reply = page.make_reply()
    page.read_reply(reply)
    return bytes(reply.memory)


def test_another_process_answers_through_the_wrap_and_ends_when_all_is_failed(shared: Shared) -> None:
    page = shared.page
    with proxy(shared, "answer") as child:
        for round_ in range(FIRST, FIRST + 200):
            page.gather(round_)
            assert _released(page, round_) is Status.OK
            assert _read(page) == _mark(round_)
            assert page.words().claimant == child.pid
            page.consume(round_)
        page.follow(None)
        page.fail_all(FIRST + 199)
        assert _line(child) == "over ENDED"
        assert child.wait(30) == 0


def test_an_attached_page_is_not_the_owners(shared: Shared) -> None:
    library = shared.page.library
    with mmap.mmap(shared.fd, SIZE) as memory:
        attached = HostPage.attach(library, memory, OFFSET)
        assert not attached.info.is_owner
        for call in (
            lambda: attached.fail_all(0),
            lambda: attached.start_watchdog(MS),
            attached.stop_watchdog,
            lambda: attached.follow(None),
        ):
            with pytest.raises(HostflagError, match="only the process that made the page"):
                call()
        shared.page.gather(FIRST)
        assert attached.fail(FIRST) is Status.OK
        assert attached.close() is Status.OK
        del call
    assert shared.page.words().released == FIRST


@pytest.mark.parametrize("mode", ["sleep", "claim"])
def test_half_open_a_killed_proxy_fails_what_is_pending_and_all_that_comes(shared: Shared, mode: str) -> None:
    """Killed while it works on a round, and while it holds the claim of one."""
    page = shared.page
    page.start_watchdog(3_600_000 * MS)
    with proxy(shared, mode) as child:
        page.gather(FIRST)
        assert _line(child) in ("sleeps", "claimed OK")
        os.kill(child.pid, signal.SIGKILL)
        assert _released(page, FIRST) is Status.OK
        assert page.words().released == (FIRST + FAR) % (1 << 32)
        for round_ in (FIRST + 1, FIRST + 2):
            page.gather(round_)
            assert _released(page, round_) is Status.OK
            assert _read(page) == bytes(REPLY_BYTES)
        stats = page.watchdog_stats()
        assert (stats.proxies_dead, stats.failed_all, stats.preempted) == (1, 1, 0)
        assert [(event.round, event.how) for event in stats.events] == [(FIRST, How.PROXY_DEAD)]

        # One that was numbered behind the far one, before anybody knew.
        _, far = page.fail_all(FIRST + 2)
        page.gather(far + 1)
        assert _released(page, far + 1) is Status.OK
        page.consume(far + 1)
    _, far = page.fail_all(far + 1)
    with proxy(shared, "answer"):
        page.gather(far + 1)
        assert _released(page, far + 1) is Status.OK
        assert _read(page) == _mark(far + 1)
        page.consume(far + 1)
    page.follow(None)


def test_half_open_a_stopped_proxy_costs_its_rounds_and_goes_on_when_it_is_continued(shared: Shared) -> None:
    page = shared.page
    page.start_watchdog(30 * MS)
    with proxy(shared, "answer") as child:
        os.kill(child.pid, signal.SIGSTOP)
        for round_ in (FIRST, FIRST + 1):
            page.gather(round_)
            assert _released(page, round_) is Status.OK
            assert _read(page) == bytes(REPLY_BYTES)
            page.consume(round_)
        page.set_watchdog_deadline(3_600_000 * MS)
        os.kill(child.pid, signal.SIGCONT)
        round_ = FIRST + 2
        page.gather(round_)
        assert _released(page, round_) is Status.OK
        assert _read(page) == _mark(round_)
        page.consume(round_)
        page.follow(None)
    stats = page.watchdog_stats()
    assert (stats.preempted, stats.proxies_killed, stats.proxies_dead) == (2, 0, 0)


def test_half_open_a_proxy_that_is_stopped_with_a_claim_is_killed_and_its_round_finished(shared: Shared) -> None:
    page = shared.page
    page.start_watchdog(30 * MS)
    with proxy(shared, "claim") as child:
        page.gather(FIRST)
        assert _line(child) == "claimed OK"
        os.kill(child.pid, signal.SIGSTOP)
        assert _released(page, FIRST) is Status.OK
        assert child.wait(30) == -signal.SIGKILL
        _until(lambda: page.watchdog_stats().failed_all == 1)
        stats = page.watchdog_stats()
        assert (stats.proxies_killed, stats.proxies_dead, stats.preempted) == (1, 1, 0)
        assert [event.how for event in stats.events] == [How.PROXY_KILLED, How.PROXY_DEAD]
        assert stats.events[0].wait_ns >= 60 * MS


def test_without_a_followed_process_a_dead_claim_is_ended_by_failing_all_after_its_patience(shared: Shared) -> None:
    page = shared.page
    page.start_watchdog(5 * MS)
    with proxy(shared, "claim") as child:
        page.follow(None)
        page.gather(FIRST)
        assert _line(child) == "claimed OK"
        child.kill()
        child.wait(30)
        time.sleep(0.05)
        assert page.words().released == FIRST - 1  # the watchdog must not: it cannot know that nobody writes
        status, far = page.fail_all(FIRST, patience_ns=10 * MS)
        assert (status, far) == (Status.FORCED, (FIRST + FAR) % (1 << 32))
        assert _released(page, FIRST) is Status.OK


def test_following_what_is_no_descriptor_is_an_error(shared: Shared) -> None:
    with pytest.raises(OSError, match="follow"):
        shared.page.follow(100_000)
