"""The engine's side of asynchronous rounds: everything is enqueued, nothing is waited for."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import numpy as np

from farspark.engine.config import AsyncProxy, AsyncSettings
from farspark.engine.cuda_driver import DriverError
from farspark.engine.handoff.gate import Gate
from farspark.engine.handoff.process import ProxyError, ProxyProcess
from farspark.engine.handoff.region import KEPT, Region, RegionShape, Submission
from farspark.engine.handoff.stream import SelfTestError, Stream, self_test
from farspark.engine.handoff.thread import ProxyThread
from farspark.engine.result import ResultLayout
from farspark.engine.round import Phase
from farspark.engine.talker import TalkerSpec
from farspark.errors import FarsparkError
from farspark.native import HostPage, NativeUnavailable, load
from farspark.native.round_calls import load_round_calls
from farspark.stats import Stats

logger = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
_ASKS_EVERY: Final = 64  # rounds
# So many rounds are known by their shape to whoever reads of them in the statistics.
_SHAPES_KEPT: Final = 4096

MakeStream = Callable[[Region, HostPage], Stream]


class HandoffRefusedError(FarsparkError):
    """Asynchronous rounds cannot be had here; the message says why. Rounds are synchronous then."""


@dataclass(frozen=True, slots=True)
class DeviceBuffers:
    """Addresses on the device, fixed for the engine's life."""

    rows: int  # packed by the gather
    meta: int  # int32 [slots, columns]
    ring: int  # [slots * ring, row]
    result: int  # int32 [result size]


class ProxySide(Protocol):
    kind: str

    def start(self) -> None: ...
    def stop(self, timeout_s: float) -> bool: ...
    def counters(self) -> dict[str, int]: ...
    def latency(self) -> dict[str, Any]: ...
    def details(self) -> dict[str, Any]: ...
    def facts(self) -> dict[str, Any]: ...


class Handoff:
    """Owned by the engine thread. `begin`, then `submit`, once per step, on one stream."""

    def __init__(
        self,
        settings: AsyncSettings,
        region: Region,
        page: HostPage,
        stream: Stream,
        buffers: DeviceBuffers,
        gate: Gate,
        side: ProxySide,
        stats: Stats,
    ) -> None:
        self._settings = settings
        self._region = region
        self._page = page
        self.stream: Final = stream
        self._buffers = buffers
        self._gate = gate
        self.side: Final = side
        self._stats = stats
        model = region.shape.model
        self._row_bytes = model.row_bytes
        self._staged = region.wanted.copy()  # of the asks: what was answered
        self._asks = region.asks
        self._has_more = False  # asks are left for slots that were in no round since
        self._round: int | None = None  # that was begun and is not submitted yet
        self._launch = 0  # of the gather, where the round's own call is to make it
        # Where the gather writes, as the device has it.
        self._host_rows = region.rows_address + stream.device_offset
        self._host_metas = [region.meta_address(round_) + stream.device_offset for round_ in range(KEPT)]
        self._spent_ns = 0
        self._is_death_said = False
        self._is_closing = False  # ended by `close`, not by a death
        self._last: dict[str, Any] | None = None  # the statistics of the end
        self._shapes: list[tuple[int, Phase, int] | None] = [None] * _SHAPES_KEPT  # round, phase, requests

    # A step.

    @property
    def is_open(self) -> bool:
        """Whether somebody serves rounds now."""
        return self._gate.is_open

    @property
    def pinned_nbytes(self) -> int:
        """Host memory that is registered with the driver."""
        return self._region.size

    def begin(self, pack: Callable[..., object], *step: Any, prepare: Callable[..., int] | None = None) -> None:
        """`pack` enqueues the gather of `step` into the device's buffers. Where `prepare` gives the address of a `Launch` that
        writes rows and metadata to the two addresses that it is given behind `step`, `submit` makes it, and nothing may be
        enqueued between the two. Neither is called while nobody serves rounds: the rows would be nobody's.
        """
        started = time.perf_counter_ns()
        self._round = round_ = self._gate.take()
        if round_ is not None:
            self._launch = 0
            if prepare is not None:
                self._launch = prepare(*step, self._host_rows, self._host_metas[round_ % KEPT])
            if not self._launch:
                self.stream.run(functools.partial(pack, *step))
        self._spent_ns = time.perf_counter_ns() - started

    def submit(self, submission: Submission) -> bool:
        """Enqueue the rest of the round. False: nobody serves it, and the device's result is as it was."""
        started = time.perf_counter_ns()
        round_, self._round = self._round, None
        if round_ is None:
            self._stats.add("rounds_failed")
            self._stats.add("fallback_proxy_dead")
            self._say_death()
            return False
        asks = self._region.asks
        windows: list[int] = []
        # Now and then without a sign: a count may be seen before what it counts, and asks for slots that were in no round since
        # are still to be answered.
        if asks != self._asks or self._has_more or round_ % _ASKS_EVERY == 0:
            self._asks = asks
            windows = self._windows(submission.slots)
        self._region.describe(round_, submission, windows)
        self._shapes[round_ % _SHAPES_KEPT] = (round_, submission.phase, len(submission.slots))
        region, buffers = self._region, self._buffers
        copies: list[int] = []
        if not self._launch:
            copies += (region.meta_address(round_), buffers.meta, region.meta_row_bytes * len(submission.slots))
            if submission.row_bound:
                copies += (region.rows_address, buffers.rows, submission.row_bound * self._row_bytes)
        for slot in windows:
            size = region.window_bytes
            copies += (region.window_address(slot), buffers.ring + slot * size, size)
        self.stream.submit(round_, copies, buffers.result, self._launch)
        self._stats.record_us("rank0_submit_us", (self._spent_ns + time.perf_counter_ns() - started) / 1000)
        return True

    def _windows(self, in_round: list[int]) -> list[int]:
        """Those of the slots `in_round` whose windows the proxy has asked for since they were staged last. A window is of use
        only with a round of its own slot."""
        slots = np.array(in_round)
        wanted = self._region.wanted[slots]
        differs = wanted != self._staged[slots]
        if not differs.any():
            self._has_more = bool((self._region.wanted != self._staged).any())
            return []
        asked: list[int] = slots[differs].tolist()
        self._staged[asked] = wanted[differs]
        self._has_more = bool((self._region.wanted != self._staged).any())
        self._stats.add("resync_windows_staged", len(asked))
        return asked

    def _say_death(self) -> None:
        if self._is_death_said or not self._gate.is_final:
            return
        self._is_death_said = True
        logger.error(
            "farspark: nobody serves asynchronous rounds any more (%s); the target decodes without drafts",
            self._gate.why_shut,
        )

    def abandon(self, why: str) -> None:
        """The engine thread itself failed in the middle of a round: release whatever it may have enqueued."""
        self._page.fail_all(self._gate.shut(why, for_good=True))
        self._is_death_said = True

    # Statistics.

    def counters(self) -> dict[str, int]:
        """The proxy's. The engine thread's own are in the `Stats` that it was made with."""
        return self.side.counters()

    def snapshot(self) -> dict[str, Any]:
        """`async`, `async_watchdog`, `watchdog_events` and `async_dead` of the stats file."""
        if self._last is not None:
            return self._last
        watchdog = self._page.watchdog_stats()
        library = self._page.library
        facts = {name: value for name, value in asdict(watchdog).items() if name != "events"}
        return {
            "async": {
                "is_on": True,
                "proxy": self.side.kind,
                "mechanism": self.stream.mechanism,
                "library": f"{library.path} ({library.origin})",
                "spin_us": self._settings.spin_us,
                "nap_us": self._settings.nap_us,
                "region_bytes": self._region.size,
                "newest_round": self._gate.newest,
                "fallback_reason": None,
                **self.side.facts(),
            },
            "async_watchdog": facts,
            "watchdog_events": [self._event(event) for event in watchdog.events],
            "async_dead": self._gate.why_shut if self._gate.is_final and not self._is_closing else None,
        }

    def _event(self, event: Any) -> dict[str, Any]:
        shape = self._shapes[event.round % _SHAPES_KEPT]
        known = shape is not None and shape[0] == event.round
        return {
            "round": event.round,
            "wall_s": round(event.wall_ns / 1e9, 3),
            "how": event.how.name.lower(),
            "wait_ms": round(event.wait_ns / 1e6, 3),
            "phase": shape[1].value if shape and known else None,
            "requests": shape[2] if shape and known else None,
        }

    # The end.

    def close(self) -> bool:
        """Fail what is pending, end the proxy, see the stream come to its end, give everything back; within some seconds, from
        any state, idempotent. False, and said in the log, if something is still in use: then its memory stays."""
        if self._last is not None:
            return True
        self._is_closing = not self._gate.is_final
        newest = self._gate.shut("closed", for_good=True)
        self._page.follow(None)
        self._page.fail_all(newest)
        has_ended = self.side.stop(CLOSE_S)
        if not has_ended:
            logger.error("farspark: the proxy %s did not stop within %g s; its memory stays", self.side.kind, CLOSE_S)
        try:
            is_idle = self.stream.wait_idle(CLOSE_S)
            why = f"not idle after {CLOSE_S:g} s"
        except DriverError as error:
            is_idle, why = False, str(error)
        if not is_idle:
            logger.error("farspark: the stream of asynchronous rounds is %s; its memory stays", why)
        self._page.stop_watchdog()
        self._last = self.snapshot()
        if not (has_ended and is_idle):
            return False
        self.stream.close()
        self._page.close()
        self._region.close()
        return True

    def __repr__(self) -> str:
        return f"<Handoff {self._gate!r} {self.side!r} over {self.stream!r}>"


def open_handoff(
    settings: AsyncSettings,
    spec: TalkerSpec,
    *,
    max_rows: int,
    buffers: DeviceBuffers,
    make_stream: MakeStream,
    stats: Stats,
    start: int = 0,
) -> Handoff:
    """Make everything, test the stream, start the watchdog and the proxy. Rounds are numbered behind `start`.

    Raises HandoffRefusedError with the reason, everything given back; StreamStuckError if the stream is parked for good.
    """
    try:
        library = load(settings.library)
    except NativeUnavailable as error:
        raise HandoffRefusedError(str(error)) from error
    layout = ResultLayout(spec.shape.slots, spec.shape.num_drafts, spec.shape.support)
    page_bytes = HostPage.bytes_needed(library, 4 * layout.size)
    try:
        quick = load_round_calls()
        region = Region(
            RegionShape(spec.shape, max_rows, page_bytes),
            describe_round=None if quick is None else quick.describe_round,
        )
        page = HostPage.format(library, region.memory, region.page_offset, 4 * layout.size, start=start)
    except OSError as error:
        raise HandoffRefusedError(f"no shared memory for the rounds: {error}") from error
    stream: Stream | None = None
    side: ProxySide | None = None
    try:
        stream = make_stream(region, page)
        newest = self_test(stream, region, page, buffers.result, start)
        gate = Gate(newest)
        page.start_watchdog(round(settings.watchdog_s * 1e9))
        kind = ProxyProcess if settings.proxy is AsyncProxy.PROCESS else ProxyThread
        side = kind(settings, spec, region, page, gate)
        side.start()
    except (DriverError, SelfTestError, ProxyError, OSError) as error:
        page.stop_watchdog()
        page.fail_all(page.words().gathered)
        if stream is not None:
            stream.close()
        page.close()
        region.close()
        raise HandoffRefusedError(str(error)) from error
    return Handoff(settings, region, page, stream, buffers, gate, side, stats)
