"""The check at start: a stream that does its work passes, and each that does not is found, rescued, or stops the start."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.fakes.async_world import HostDevice, make_info, talker_spec
from tests.fakes.host_stream import HostStream

from farspark.engine.cuda_driver import DriverError
from farspark.engine.handoff import stream as module
from farspark.engine.handoff.region import Region, RegionShape
from farspark.engine.handoff.stream import SelfTestError, StreamStuckError, self_test
from farspark.native import HostPage, Launch, load

START = (1 << 32) - 1  # the two rounds of the check wrap around


@pytest.fixture
def region() -> Iterator[tuple[Region, HostPage]]:
    info = make_info()
    library = load()
    spec = talker_spec(info, "tcp://127.0.0.1:1")
    shape = RegionShape(spec.shape, 40, 0)
    size = 4 * shape.result.size
    with Region(RegionShape(spec.shape, 40, HostPage.bytes_needed(library, size))) as region:
        page = HostPage.format(library, region.memory, region.page_offset, size, start=START)
        yield region, page
        page.fail_all(page.words().gathered)
        page.close()


class Late(HostStream):
    """`gathered` overtakes the data."""

    def to_host(self, to: int, source: int, size: int) -> None:
        self.held = to, source, size

    def write_gathered(self, round_: int) -> None:
        super().write_gathered(round_)
        self.run(lambda: time.sleep(0.02))
        super().to_host(*self.held)


class LateKernel(HostStream):
    """The same with what a kernel writes."""

    def launch(self, function: int) -> None:
        self.held = self.kernels.pop(function)

    def write_gathered(self, round_: int) -> None:
        super().write_gathered(round_)
        self.run(lambda: time.sleep(0.02))
        if (held := vars(self).pop("held", None)) is not None:
            self.run(held)


class Hasty(HostStream):
    def wait_released(self, round_: int) -> None:
        pass


class Mute(HostStream):
    def write_gathered(self, round_: int) -> None:
        pass


class Stale(HostStream):
    """What is behind the wait reads what was there in front of it."""

    def to_device(self, to: int, source: int, size: int) -> None:
        info = self._page.info
        if source == info.address + info.reply_offset:
            old = bytes(size)
            self.run(lambda: ctypes.memmove(to, old, size))
        else:
            super().to_device(to, source, size)


class Forgetful(HostStream):
    """Nobody ever sees that a reply was read."""

    def take_reply(self, reply: int, result: int, words: int, round_: int) -> None:
        self.to_device(result, reply, 4 * words)


class Deaf(HostStream):
    """Never sees a release."""

    def wait_released(self, round_: int) -> None:
        self.parked = threading.Event()
        self.run(lambda: self.parked.wait(30))


class Reluctant(HostStream):
    """Sees only a release that is far ahead, as the rescue's is."""

    def wait_released(self, round_: int) -> None:
        super().wait_released((round_ + (1 << 20)) % (1 << 32))


@pytest.mark.parametrize("is_plain", [False, True], ids=["kernels", "copies"])
def test_a_stream_that_does_its_work_passes_and_two_rounds_are_spent(
    region: tuple[Region, HostPage], is_plain: bool
) -> None:
    memory, page = region
    device = HostDevice(make_info())
    stream = HostStream(page, is_plain=is_plain)
    assert self_test(stream, memory, page, device.buffers.result, START) == 1
    words = page.words()
    assert (words.gathered, words.released, words.consumed) == (1, 1, 1)
    stream.close()
    assert stream.failure is None


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Late, "seen before the data that was copied"),
        (LateKernel, "seen before the data that was written by a kernel"),
        (Hasty, "passed the wait before anything was published"),
        (Mute, "did not see `gathered`"),
        (Stale, "did not read what was published"),
        (Forgetful, "did not pass the wait"),
        (Reluctant, "did not pass the wait"),
    ],
)
def test_capture_wait_a_stream_that_does_not_is_refused_with_the_reason_and_is_idle(
    region: tuple[Region, HostPage], kind: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TEST_S", 0.3)
    memory, page = region
    device = HostDevice(make_info())
    stream = kind(page)
    with pytest.raises(SelfTestError, match=reason):
        self_test(stream, memory, page, device.buffers.result, START)
    assert stream.wait_idle(1.0)
    stream.close()


def test_a_stream_that_is_parked_for_good_stops_the_start(
    region: tuple[Region, HostPage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TEST_S", 0.2)
    memory, page = region
    device = HostDevice(make_info())
    stream = Deaf(page)
    with pytest.raises(StreamStuckError, match="parked for good"):
        self_test(stream, memory, page, device.buffers.result, START)
    stream.parked.set()
    stream.close()


@pytest.mark.parametrize(
    ("call", "is_gathered"),
    [
        ("launch", False),
        ("to_host", False),
        ("write_gathered", False),
        ("wait_released", True),
        ("to_device", True),
        ("write_consumed", True),
    ],
)
@pytest.mark.parametrize("is_plain", [False, True], ids=["kernels", "copies"])
def test_a_refused_call_ends_the_submission_and_parks_nothing_for_good(
    region: tuple[Region, HostPage], call: str, is_gathered: bool, is_plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, page = region
    device = HostDevice(make_info())
    stream = HostStream(page, is_plain=is_plain)
    done: list[str] = []
    for name in ("launch", "to_host", "write_gathered", "wait_released", "to_device", "write_consumed"):
        before = getattr(stream, name)

        def play(*arguments: int, name: str = name, before: Any = before) -> None:
            if name == call:
                raise DriverError("planted")
            done.append(name)
            if name != "launch":
                before(*arguments)

        monkeypatch.setattr(stream, name, play)
    launch = Launch(0xF00D, 128, 0, 2)
    copies = (memory.meta_address(0), device.buffers.meta, 16, memory.rows_address, device.buffers.rows, 16)
    with pytest.raises(DriverError, match="planted"):
        stream.submit(0, copies, device.buffers.result, launch.address)
    every = ["launch", "to_host", "to_host", "write_gathered", "wait_released", "to_device", "write_consumed"]
    assert done == every[: every.index(call)]
    page.fail_all(0)
    assert stream.wait_idle(2.0)
    assert (page.words().gathered == 0) == is_gathered
    stream.close()
    assert stream.failure is None
