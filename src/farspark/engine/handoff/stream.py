"""What a device's stream does for a round, in order, and the check at start that it does it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from farspark.engine.cuda_driver import DriverError
from farspark.engine.handoff.region import Region, distance, next_round
from farspark.errors import FarsparkError
from farspark.native import HostPage, Launch, Status

_TEST_BYTES: Final = 1024
_TEST_S: Final = 5.0
# Long enough for a stream that does not wait to be seen past the wait.
_PARKED_S: Final = 0.01


class SelfTestError(FarsparkError):
    """The stream does not do what rounds need; it is not parked."""


class StreamStuckError(FarsparkError):
    """The stream waits for good, although everything that it could wait for was released. The engine must not go on with it."""


class Stream(Protocol):
    """Owned by the engine thread. Everything is done in the order of the calls; all but `wait_idle` return at once."""

    @property
    def mechanism(self) -> str:
        """For the statistics."""
        ...

    @property
    def device_offset(self) -> int:
        """What an address in the region is more on the device, where kernels write to it, than it is here."""
        ...

    def run(self, work: Callable[[], object]) -> None:
        """`work` enqueues operations of its own."""
        ...

    def to_host(self, to: int, source: int, size: int) -> None:
        """Copy from the device's address `source`."""
        ...

    def to_device(self, to: int, source: int, size: int) -> None: ...

    def stores(self, to: int, source: int, size: int) -> Launch | None:
        """A launch that has a kernel do what `to_host` does, for the check at start; None where there is no kernel."""
        ...

    def submit(self, round_: int, copies: Sequence[int], result: int, launch: int = 0) -> None:
        """A whole round in one go: the launch, the copies to the host (to, source, size, one after the other), `gathered`, the
        wait, the reply into `result` on the device, `consumed`. `launch` is the address of a `Launch`, 0 for none; what it
        writes into the region by itself is not copied.

        Raises DriverError; what was enqueued before the refusal stays, and may park the stream until everything is failed.
        """
        ...

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything is done by then."""
        ...

    def close(self) -> None:
        """The stream is idle. Idempotent."""
        ...


def self_test(stream: Stream, region: Region, page: HostPage, scratch: int, newest: int) -> int:
    """Two rounds numbered behind `newest`; returns the newest number then. `scratch`: a device buffer of a reply's size.

    Raises SelfTestError with the reason once the stream is idle again, StreamStuckError if it stays parked.
    """
    round_ = newest
    try:
        for turn in range(2):
            round_ = next_round(round_)
            _test_round(stream, region, page, scratch, round_, turn)
    except (SelfTestError, DriverError) as error:
        _rescue(stream, page, round_, str(error))
        raise SelfTestError(str(error)) from error
    return round_


def _rescue(stream: Stream, page: HostPage, newest: int, why: str) -> None:
    """Release everything with a plain store, and see the stream come to its end. Raises StreamStuckError."""
    page.fail_all(newest)
    try:
        is_idle = stream.wait_idle(_TEST_S)
    except DriverError as error:
        raise StreamStuckError(f"{why}; and then: {error}") from error
    if not is_idle:
        raise StreamStuckError(
            f"{why}; and the stream is parked for good: it does not see a released word. The engine cannot go on with it; "
            "start without VLLM_DSPARK_REMOTE_ASYNC"
        )


def _test_round(stream: Stream, region: Region, page: HostPage, scratch: int, round_: int, turn: int) -> None:
    size = min(page.info.reply_bytes, _TEST_BYTES)
    sent, back = region.rows_address, region.rows_address + _TEST_BYTES
    out = bytes((7 * i + 3 + turn) % 251 for i in range(size))
    answer = bytes((11 * i + 5 + turn) % 241 for i in range(page.info.reply_bytes))
    ctypes.memmove(sent, out, size)
    ctypes.memset(back, 0, size)
    stream.to_device(scratch, sent, size)
    # Of the two rounds one has its data copied, and the other, where it can, written by a kernel.
    launch = stream.stores(back, scratch, size) if turn else None
    if launch is None:
        stream.submit(round_, (back, scratch, size), scratch)
    else:
        stream.submit(round_, (), scratch, launch.address)
    stream.to_host(sent, scratch, size)

    deadline = time.monotonic_ns() + int(_TEST_S * 1e9)
    status = page.wait_gathered(round_, spin_ns=0, nap_ns=50_000, deadline_ns=deadline)
    if status is not Status.OK:
        raise SelfTestError(f"the CPU did not see `gathered` within {_TEST_S:g} s ({status.name})")
    if ctypes.string_at(back, size) != out:
        how = "copied" if launch is None else "written by a kernel"
        raise SelfTestError(f"`gathered` was seen before the data that was {how} in front of it")
    time.sleep(_PARKED_S)
    if distance(page.words().consumed, round_) >= 0:
        raise SelfTestError("the stream passed the wait before anything was published")
    reply = page.make_reply()
    reply.memory[:] = answer
    if page.publish(round_, reply) is not Status.OK:
        raise SelfTestError("the round could not be published")
    while distance(page.words().consumed, round_) < 0:
        if time.monotonic_ns() >= deadline:
            raise SelfTestError(f"the stream did not pass the wait within {_TEST_S:g} s of the release")
        time.sleep(0.0001)
    if not stream.wait_idle(_TEST_S):
        raise SelfTestError(f"the stream did not come to its end within {_TEST_S:g} s")
    if ctypes.string_at(sent, size) != answer[:size]:
        raise SelfTestError("the copy behind the wait did not read what was published")
