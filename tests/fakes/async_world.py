"""A small engine around the real hand-off: random steps, three rounds in flight, every draft compared with a reference.

The device is a protocol: `HostDevice` is numpy arrays and a thread in place of a stream; a GPU's is in `tests/gpu`. The ring is
as long as the context, so that a good draft depends on nothing but which position the slot's rows begin at; they begin anew
only where a proxy lost its books.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tests.fakes.drafters import expected, info
from tests.fakes.host_stream import HostStream

import farspark
from farspark.engine.capture import CaptureHeader
from farspark.engine.config import AsyncProxy, AsyncSettings
from farspark.engine.depth import OFF, NOut
from farspark.engine.handoff.handoff import DeviceBuffers, Handoff, open_handoff
from farspark.engine.handoff.region import Region, Submission
from farspark.engine.handoff.stream import Stream
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import Phase
from farspark.engine.shape import ModelShape
from farspark.engine.talker import TalkerSpec
from farspark.native import HostPage, Launch
from farspark.stats import Stats
from farspark.transport import parse_endpoints
from farspark.worker.batch import DrafterInfo

DEPTH: Final = 3  # rounds in flight
WAIT_S: Final = 30.0


def make_info(**changes: object) -> DrafterInfo:
    return info(context=10, slots=4, **changes)


def settings(proxy: AsyncProxy, **changes: Any) -> AsyncSettings:
    values: dict[str, Any] = {
        "proxy": proxy,
        "nap_us": 20.0,
        "spin_us": 100.0,
        "watchdog_s": 0.4,
        "respawns": 3,
        "respawn_reset_s": 0.0,
        "switch_interval_us": 500.0,
        "library": None,
        "loads_modules_eagerly": True,
    }
    return AsyncSettings(**(values | changes))


def talker_spec(info: DrafterInfo, endpoint: str, *, capture: Path | None = None, **changes: Any) -> TalkerSpec:
    shape = ModelShape(
        num_drafts=info.num_drafts,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        taps=info.taps,
        slots=info.slots,
        context=info.context,
        ring=info.context,
        max_position=info.max_position,
    )
    header = CaptureHeader(
        shape=shape,
        identity=info.identity,
        markov_identity=bytes(32),
        policy="capacity",
        engine="world",
        farspark=farspark.__version__,
    )
    values: dict[str, Any] = {
        "shape": shape,
        "hello": shape.hello(engine="world", identity=info.identity, markov_identity=bytes(32), want_margin=False),
        "endpoints": parse_endpoints(endpoint),
        "timeout_s": 0.1,
        "connect_timeout_s": 5.0,
        "backoff_s": 0.005,
        "backoff_max_s": 0.02,
        "trip": 0,
        "cooldown": 4,
        "want_margin": False,
        "token": None,
        "depth_policy": OFF,
        "depth_costs": None,
        "depth_file": None,
        "n_out": NOut(None, "always all"),
        "capture": capture,
        "capture_header": header,
        "capture_bytes": 1 << 24,
    }
    return TalkerSpec(**(values | changes))


@dataclass(slots=True)
class Request:
    number: int
    slot: int
    owner: int
    first: int  # position that the rows of its slot begin at
    end: int  # the anchor's position
    starts: deque[int] = field(default_factory=lambda: deque(maxlen=300))  # of the newest rounds


@dataclass(frozen=True, slots=True)
class Row:
    """One batch row of a submitted step."""

    request: Request
    start: int
    valid: int
    rejected: int
    sampled: bool
    token: int

    @property
    def end(self) -> int:
        return self.start + self.valid


class Copy(Protocol):
    """A copy of a round's result, on its way to the host."""

    def wait(self, timeout_s: float) -> npt.NDArray[np.int32] | None:
        """None if it is not there by then."""
        ...


class Device(Protocol):
    @property
    def buffers(self) -> DeviceBuffers: ...
    @property
    def max_rows(self) -> int: ...
    def make_stream(self, region: Region, page: HostPage) -> Stream: ...
    def pack(self, rows: Sequence[Row]) -> Callable[[], None]:
        """What enqueues the gather of `rows`."""
        ...

    def clear_result(self) -> None:
        """Enqueues it."""
        ...

    def copy_result(self, stream: Stream) -> Copy: ...


def row_of(request: int, position: int, size: int) -> bytes:
    return (struct.pack("<II", request, position) * (size // 8 + 1))[:size]


class HostCopy:
    def __init__(self, size: int) -> None:
        self.array = np.zeros(size, dtype=np.int32)
        self.is_there = False

    def wait(self, timeout_s: float) -> npt.NDArray[np.int32] | None:
        until = time.monotonic() + timeout_s
        while not self.is_there:
            if time.monotonic() >= until:
                return None
            time.sleep(0.00005)
        return self.array


class _Pack:
    """A step's gather: into the device's buffers, or by a launch that writes into the region itself."""

    def __init__(self, device: HostDevice, rows: Sequence[Row]) -> None:
        self._device = device
        self._rows = rows

    def __call__(self) -> None:
        self._device.gather(self._rows, *self._device.staging)

    def prepare(self, rows: int, meta: int) -> int:
        return self._device.prepare(functools.partial(self._device.gather, self._rows, rows, meta))


class HostDevice:
    """Memory of the host's in place of a device's; everything happens on the stream's thread."""

    def __init__(self, info: DrafterInfo, *, is_plain: bool = False) -> None:
        """`is_plain`: nothing is launched, and the stream has neither batches nor kernels. Else every fourth gather is copied all
        the same, as a step of another kind is."""
        self._is_plain = is_plain
        self._stream: HostStream | None = None
        self._launch = Launch(0, 1, 0, 1)
        self._launches = 0
        self._info = info
        self._context, size = info.context, info.row_bytes
        self.max_rows = info.slots * info.context
        self._rows = np.zeros((self.max_rows, size), dtype=np.uint8)
        self._meta = np.zeros((info.slots, 4), dtype=np.int32)
        self._ring = np.zeros((info.slots * info.context, size), dtype=np.uint8)
        self._result = np.zeros(ResultLayout(info.slots, info.num_drafts).size, dtype=np.int32)
        self.buffers = DeviceBuffers(
            *(int(array.ctypes.data) for array in (self._rows, self._meta, self._ring, self._result))
        )

    def make_stream(self, region: Region, page: HostPage) -> Stream:
        self._stream = HostStream(page, is_plain=self._is_plain)
        return self._stream

    @property
    def staging(self) -> tuple[int, int]:
        return self.buffers.rows, self.buffers.meta

    def pack(self, rows: Sequence[Row]) -> Callable[[], None]:
        return _Pack(self, rows)

    def prepare(self, work: Callable[[], object]) -> int:
        self._launches += 1
        if self._is_plain or self._launches % 4 == 0:
            return 0
        assert self._stream is not None
        self._launch = Launch(self._launches + 0xF00D, 1, 0, 1)
        self._stream.kernels[self._launch.function] = work
        return self._launch.address

    def gather(self, rows: Sequence[Row], rows_to: int, meta_to: int) -> None:
        """What a device does."""
        size = self._info.row_bytes
        meta = np.array([(row.start, row.valid, row.token, row.sampled) for row in rows], dtype=np.int32)
        packed: list[tuple[int, bytes]] = []  # place in the ring, bytes
        for row in rows:
            for position in range(max(row.start, row.end - self._context), row.end):
                place = row.request.slot * self._context + position % self._context
                packed.append((place, row_of(row.request.number, position, size)))
        ctypes.memmove(meta_to, meta.ctypes.data, meta.nbytes)
        for at, (place, data) in enumerate(packed):
            self._ring[place] = np.frombuffer(data, dtype=np.uint8)
            ctypes.memmove(rows_to + at * size, data, size)

    def clear_result(self) -> None:
        self._result[:] = 0

    def copy_result(self, stream: Stream) -> HostCopy:
        copy = HostCopy(len(self._result))

        def run() -> None:
            copy.array[:] = self._result
            copy.is_there = True

        stream.run(run)
        return copy


@dataclass(slots=True)
class InFlight:
    rows: list[Row]
    copy: Copy
    is_handed_over: bool


class Mismatch(AssertionError):
    pass


@dataclass(slots=True)
class Tally:
    rounds: int = 0
    good: int = 0  # rounds in which somebody got a draft
    failed: int = 0
    not_handed_over: int = 0
    drafts: int = 0  # rows that were compared
    afresh: int = 0  # slots whose rows began anew
    outcomes: Counter[str] = field(default_factory=Counter)


class World:
    """`with World(device, info, settings, spec) as world`, then `step()`; `drain()` at the end, before anything is asserted."""

    def __init__(
        self,
        device: Device,
        info: DrafterInfo,
        settings: AsyncSettings,
        spec: TalkerSpec,
        *,
        seed: int,
        start: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.device = device
        self.info = info
        self.stats = Stats()
        self.tally = Tally()
        self.handoff: Handoff = open_handoff(
            settings,
            spec,
            max_rows=device.max_rows,
            buffers=device.buffers,
            make_stream=device.make_stream,
            stats=self.stats,
            start=start,
        )
        self._layout = ResultLayout(info.slots, info.num_drafts)
        self._requests: dict[int, Request] = {}
        self._numbers = 0
        self._in_flight: deque[InFlight] = deque()
        self.outcomes: list[RoundOutcome] = []
        self.was_good: list[bool] = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.handoff.close()

    def wait_ready(self, timeout_s: float = WAIT_S) -> None:
        """Until the proxy has a worker."""
        until = time.monotonic() + timeout_s
        while self.handoff.side.details().get("worker", {}).get("state") != "ready":
            assert time.monotonic() < until, self.handoff.side.details()
            time.sleep(0.002)

    def counters(self) -> Counter[str]:
        return Counter(self.stats.counters()) + Counter(self.handoff.counters())

    # Programs.

    def _request(self, slot: int) -> Request:
        request = self._requests.get(slot)
        kind = self.rng.random()
        if request is None or kind < 0.02 or request.end > 100_000:
            self._numbers += 1
            first = self.rng.choice((0, 0, 1, 7, 64))
            request = self._requests[slot] = Request(self._numbers, slot, self._numbers, first, first)
        elif kind < 0.03:
            # Preempted, and back in its slot.
            self._numbers += 1
            end = max(0, request.end - self.rng.randrange(8))
            request = self._requests[slot] = Request(request.number, slot, self._numbers, end, end)
        return request

    def random_rows(self, sizes: Sequence[int] = (1, 1, 1, 2, 3, 6)) -> list[Row]:
        slots = self.rng.sample(range(self.info.slots), self.rng.randint(1, self.info.slots))
        return [self.row(slot, self.rng.choice(sizes), sampled=self.rng.random() < 0.9) for slot in slots]

    def row(self, slot: int, valid: int, *, sampled: bool = True) -> Row:
        request = self._request(slot)
        valid = min(valid, self.info.context)
        row = Row(request, request.end, valid, self.rng.randrange(3), sampled, self.rng.randrange(self.info.vocab_size))
        request.starts.append(request.end)
        request.end += valid
        return row

    def step(self, rows: Sequence[Row] | None = None) -> None:
        """Submit one round, then take the result of the one DEPTH before."""
        rows = self.random_rows() if rows is None else list(rows)
        handoff = self.handoff
        work = self.device.pack(rows)
        handoff.begin(work, prepare=getattr(work, "prepare", None))
        bound = min(sum(min(row.valid + row.rejected, self.info.context) for row in rows), self.device.max_rows)
        submission = Submission(
            [row.request.slot for row in rows],
            [row.request.owner for row in rows],
            0,
            self.rng.choice((Phase.DECODE, Phase.PREFILL)),
            bound,
        )
        is_handed_over = handoff.submit(submission)
        if not is_handed_over:
            handoff.stream.run(self.device.clear_result)
        self._in_flight.append(InFlight(list(rows), self.device.copy_result(handoff.stream), is_handed_over))
        self.tally.rounds += 1
        if len(self._in_flight) > DEPTH:
            self._take()

    def drain(self) -> None:
        while self._in_flight:
            self._take()

    def _take(self) -> None:
        flying = self._in_flight.popleft()
        array = flying.copy.wait(WAIT_S)
        if array is None:
            raise Mismatch(f"a round did not come back within {WAIT_S:g} s: {self.handoff!r}")
        result = PackedResult(self._layout, array)
        outcome = result.outcome
        self.tally.outcomes[outcome.name] += 1
        self.outcomes.append(outcome)
        self.was_good.append(bool(result.ok.any()))
        if not flying.is_handed_over:
            self.tally.not_handed_over += 1
            if array.any():
                raise Mismatch(f"a round that nobody served has a result: {result!r}")
        if result.ok.any():
            self.tally.good += 1
        if outcome is RoundOutcome.FAILED:
            self.tally.failed += 1
            if result.ok.any():
                raise Mismatch(f"a failed round with drafts: {result!r}")
        for index in range(self.info.slots):
            if result.ok[index]:
                if index >= len(flying.rows) or not flying.rows[index].sampled:
                    raise Mismatch(f"row {index} has drafts and wanted none: {result!r}")
                self._check(flying.rows[index], result, index)
            elif result.tokens[index].any() or result.confidences[index].any():
                raise Mismatch(f"a failed row with drafts: {result.tokens[index]} {result.confidences[index]}")

    def _check(self, row: Row, result: PackedResult, index: int) -> None:
        drafted = (result.tokens[index].tolist(), result.confidences[index].tolist())
        request = row.request
        for first in (request.first, *(start for start in request.starts if start > request.first)):
            if first >= row.end:
                break
            if self._reference(row, first) == drafted:
                self.tally.afresh += first != request.first and row.end - first < self.info.context
                request.first = first
                self.tally.drafts += 1
                return
        raise Mismatch(
            f"request {request.number} in slot {request.slot}, positions {request.first} to {row.end}, token {row.token}: "
            f"drafts {drafted[0]}, expected {self._reference(row, request.first)[0]}"
        )

    def _reference(self, row: Row, first: int) -> tuple[list[int], list[float]]:
        visible = range(max(first, row.end - self.info.context), row.end)
        tokens, confidences, _ = expected(
            {position: row_of(row.request.number, position, self.info.row_bytes) for position in visible},
            row.token,
            row.end,
            num_drafts=self.info.num_drafts,
            vocab_size=self.info.vocab_size,
            n_out=self.info.num_drafts,
        )
        return tokens, confidences
