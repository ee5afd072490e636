"""The one loop that serves rounds: wait for gathered data, run the round, publish the result. A thread's and a process's alike.

It makes no torch and no CUDA call, and it reads the staging without ever writing it: a round that the watchdog ended lets the
stream refill the staging while this side still reads, so what was read for a lost round counts for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from farspark.engine.handoff.ordinary import Ready, Served, open_ordinary_rounds
from farspark.engine.handoff.region import KEPT, Region, distance, next_round
from farspark.engine.result import PackedResult, RoundOutcome
from farspark.engine.round import MetaColumn, Phase, RoundInput, RoundRequest, WindowPending
from farspark.engine.talker import Talker
from farspark.native import HostPage, Status
from farspark.stats import Stats

# How long one wait takes at most: how often an idle proxy shows that it lives.
_SLICE_NS: Final = 50_000_000
# How often it looks for what the engine thread says of the next round, as long as that is not there.
_LOOK_NS: Final = 1_000_000
# The same where it has its core to itself: before the stream comes to the round there is time then to lay it ready.
_LOOK_OFTEN_NS: Final = 20_000
_DETAILS_EVERY_NS: Final = 500_000_000
# For how many slices of a wait the round's connection is kept from everybody else: after a second it is time for a PING.
_KEPT_SLICES: Final = 20
# The stream writes the metadata of round t + KEPT into the place of t's once it has passed round t + KEPT - 1.
_READABLE: Final = KEPT - 1


class StagedRing:
    """The windows that the stream staged with a round, for a `RemoteRound`; asks for what is missing. The proxy's."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self._staged: frozenset[int] = frozenset()
        self._asked: set[int] = set()

    def begin(self, windows: Sequence[int]) -> None:
        """A round is at hand with which those slots' windows were staged."""
        self._staged = frozenset(windows)
        self._asked -= self._staged

    def forget(self) -> None:
        """Rounds went by unseen, with windows perhaps."""
        self._staged = frozenset()
        self._asked.clear()

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        """Raises WindowPending if it was not staged with the round at hand; it will be with a later one."""
        if slot not in self._staged:
            if slot not in self._asked:
                self._asked.add(slot)
                self._region.ask(slot)
            raise WindowPending
        return self._region.window(slot, first_pos, n_rows)


class _Known(NamedTuple):
    """What the host knows of a round."""

    record: bytes
    requests: list[RoundRequest]
    phase: Phase
    windows: list[int]


class Proxy:
    """Owned by the thread that calls `run`. The page may be another process's."""

    def __init__(
        self,
        page: HostPage,
        region: Region,
        ring: StagedRing,
        talker: Talker,
        stats: Stats,
        *,
        spin_ns: int,
        nap_ns: int,
        tells: bool,  # whether the statistics are written into the region, for another process
    ) -> None:
        self._page = page
        self._region = region
        self._ring = ring
        self._talker = talker
        self._stats = stats
        self._spin_ns = spin_ns
        self._nap_ns = nap_ns
        self._tells = tells
        self._told_ns = 0
        self._reply = page.make_reply()
        self._result = PackedResult(region.shape.result, np.frombuffer(self._reply.memory, dtype=np.int32))
        self._row_bytes = region.shape.model.row_bytes
        self._context = region.shape.model.context
        self._num_slots = region.shape.model.slots
        self._round = 0
        self._known: _Known | None = None  # of the round at hand, once the engine thread has said it
        self._ordinary = open_ordinary_rounds(page, region, talker, self._reply, spin_ns=spin_ns, nap_ns=nap_ns)
        self._ready: Ready | None = None  # for the round at hand
        self._slices = 0  # for which it was awaited with its connection

    def run(self, first: int) -> Status:
        """Serve rounds from number `first` on; returns when everything was failed ahead (ENDED) or the page is gone (CLOSED)."""
        self._round, self._slices = first, 0
        self._known = self._ready = None
        while True:
            self._region.beat()
            is_known = self._look_ahead()
            self._lay_ready()
            status, served = self._await(time.monotonic_ns() + self._slice_ns(is_known=is_known))
            if status is Status.OK:
                self._serve(served)
            elif status is Status.FINISHED:
                self._skip()
            elif status is not Status.TIMED_OUT:
                return status
            else:
                self._tell(has_news=False)
                continue
            self._region.note(self._round)
            self._tell(has_news=True)
            self._round, self._slices = next_round(self._round), 0
            self._known = self._ready = None

    def _await(self, until_ns: int) -> tuple[Status, Served | None]:
        """How the wait for the round at hand ended, and what came of it where it was served in the same call."""
        if self._slices < _KEPT_SLICES:
            served = self._serve_in_one_call(until_ns)
            if isinstance(served, Served):
                return Status.OK, served
            if served is not None:
                self._slices += 1
                return served, None
        status = self._page.wait_gathered(self._round, spin_ns=self._spin_ns, nap_ns=self._nap_ns, deadline_ns=until_ns)
        return status, None

    def _serve_in_one_call(self, until_ns: int) -> Served | Status | None:
        """As `OrdinaryRounds.serve`; None, too, where nothing was laid ready."""
        if self._ordinary is None or self._ready is None:
            return None
        return self._ordinary.serve(self._ready, until_ns)

    def _slice_ns(self, *, is_known: bool) -> int:
        if is_known:
            return _SLICE_NS
        has_time = self._tells and not self._nap_ns  # a thread would take the GIL from the engine's
        return _LOOK_OFTEN_NS if has_time else _LOOK_NS

    def _look_ahead(self) -> bool:
        """Read what the engine thread has said of the round at hand, most often long before the stream comes to it."""
        if self._known is None:
            record = self._region.record(self._round)
            if record is not None:
                self._known = self._decode(record)
        return self._known is not None

    def _lay_ready(self) -> None:
        """What a round needs that can be had before its data is there."""
        known, ready = self._known, self._ready
        if self._ordinary is None or known is None or known.windows:
            self._ready = None
        elif ready is None or ready.record is not known.record:
            self._ready = self._ordinary.lay_ready(self._round, known.record, known.requests)

    def _look_again(self) -> bool:
        """The same once the round is gathered: from here on what is read is certain."""
        record = self._region.record(self._round)
        if record is None:
            self._known = None
        elif self._known is None or self._known.record != record:
            self._known = self._decode(record)
        return self._known is not None

    def _decode(self, record: bytes) -> _Known | None:
        try:
            said = self._region.decode(record)
            is_possible = min(said.slots) >= 0 and max(said.slots) < self._num_slots and min(said.k_windows) >= 0
        except (IndexError, ValueError):
            is_possible = False
        if not is_possible:
            return None  # read while it was written
        requests = [
            RoundRequest(slot, owner, k_window)
            for slot, owner, k_window in zip(said.slots, said.owners, said.k_windows, strict=True)
        ]
        return _Known(record, requests, said.phase, said.windows)

    def _serve(self, served: Served | None) -> None:
        """The round at hand is gathered."""
        began_ns = time.monotonic_ns() if served is None else served.gathered_ns
        is_late = self._known is None and self._look_ahead()
        if is_late:
            self._lay_ready()  # still quicker than without
        if is_late or self._slices == _KEPT_SLICES:
            came = self._serve_in_one_call(until_ns=0)
            served = came if isinstance(came, Served) else None
        if served is None and not self._look_again():
            # The engine is so far ahead that it has replaced what it said of this round.
            self._page.fail(self._round)
            self._forget(1)
            return
        step = self._step(with_rows=True, meta=None if served is None else served.meta)
        if self._talker.capture is not None:
            # The stream refills the staging once it is released.
            step = RoundInput(step.requests, step.meta, memoryview(bytes(step.rows)), step.phase)
        ended_ns = 0
        is_delivered = False

        def deliver() -> bool:
            nonlocal ended_ns, is_delivered
            if served is not None and served.is_published is not None:
                ended_ns, is_delivered = served.ended_ns, served.is_published
            else:
                is_delivered = self._page.publish(self._round, self._reply) is Status.OK
                ended_ns = time.monotonic_ns()
            return is_delivered

        try:
            if served is None:
                outcome = self._talker.round.run(step, self._result, deliver)
            else:
                outcome = self._talker.round.finish(step, self._result, deliver, served.answered)
        finally:
            if self._ordinary is not None and served is not None:
                self._ordinary.settle(served)
        if not is_delivered and not self._is_readable():
            # The metadata may have been another round's: what was noted from it is worth nothing.
            self._forget(0)
        parked_us = (ended_ns - began_ns) / 1000
        self._stats.record_us(f"proxy_parked_us_{step.phase.value}", parked_us)
        if (asked := self._talker.round.asked_and_answered_s) is not None:
            # With the client's round trip between the two they are what the stream was parked for.
            self._stats.record_us("proxy_before_us", asked[0] * 1e6 - began_ns / 1000)
            self._stats.record_us("proxy_after_us", ended_ns / 1000 - asked[1] * 1e6)
        if is_delivered:
            if served is not None and served.is_published:
                self._stats.add("rounds_in_one_call")
            if outcome is not RoundOutcome.FAILED:
                self._stats.record_us("rank0_round_us", parked_us)
            if self._talker.capture is not None:
                self._talker.record(self._round, step, self._result)

    def _skip(self) -> None:
        """Somebody else ended the round before this side came to it."""
        behind = distance(self._page.words().gathered, self._round)
        if self._look_again():
            step = self._step(with_rows=False)
            if self._is_readable():
                self._stats.add("watchdog_skipped_rounds")
                self._talker.round.skip(step)
                return
        # All that are as far behind are gone in one go.
        gone = max(1, behind - _READABLE + 1)
        self._stats.add("watchdog_skipped_rounds", gone)
        self._forget(gone)
        self._round = (self._round + gone - 1) % (1 << 32)

    def _forget(self, rounds: int) -> None:
        self._stats.add("watchdog_skipped_unknown_ring", rounds)
        self._ring.forget()
        self._talker.round.forget(rounds)

    def _is_readable(self) -> bool:
        """Whether the metadata that was read last was that of the round at hand."""
        return distance(self._page.words().gathered, self._round) < _READABLE

    def _step(self, *, with_rows: bool, meta: npt.NDArray[np.int32] | None = None) -> RoundInput:
        """The round at hand in private memory, but for its rows; `meta` where it was read already."""
        known = self._known
        assert known is not None
        if meta is None:
            meta = self._region.meta(self._round, len(known.requests))
        self._ring.begin(known.windows)
        rows = 0
        if with_rows:
            context = self._context
            rows = sum([valid if valid < context else context for valid in meta[:, MetaColumn.VALID_ROWS].tolist()])
        return RoundInput(known.requests, meta, self._region.rows[: rows * self._row_bytes], known.phase)

    def _tell(self, *, has_news: bool) -> None:
        if not self._tells:
            return
        if has_news:
            self._region.counters.write({"noted": self._round, "counters": self._stats.counters()})
        now = time.monotonic_ns()
        if now - self._told_ns >= _DETAILS_EVERY_NS:
            self.tell_details()

    def tell_details(self) -> None:
        """What takes longer to write than the counters."""
        self._told_ns = time.monotonic_ns()
        self._region.details.write(self._talker.details() | {"latency": self._stats.snapshot()["latency"]})

    def __repr__(self) -> str:
        return f"<Proxy at round {self._round}>"
