"""One remote round: take note of the step's rows, build the entries, exchange, check the reply, pack the result.

No torch, no CUDA, no vLLM: the same piece serves the engine thread, a proxy thread and a proxy process. Whatever the worker
or the network does, `run` returns a whole result.
"""

from __future__ import annotations

import enum
import logging
import operator
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from farspark.clock import Clock, Deadline
from farspark.engine.breaker import Breaker, State
from farspark.engine.client import Answered, Client, ClientState, Connection
from farspark.engine.depth import NOut
from farspark.engine.depth_control import DepthControl
from farspark.engine.draws import find_faults_of_draws, how_to_sample
from farspark.engine.replies import find_fault, find_fault_of_judgement
from farspark.engine.result import PackedResult, RoundOutcome
from farspark.engine.route import Loss
from farspark.engine.shadow import JudgedChains
from farspark.engine.shape import ModelShape
from farspark.engine.slots import Increment, Send, Slots
from farspark.errors import ProtocolError, Refused, TransportError
from farspark.stats import Stats
from farspark.wire.layout import EntryFlag, FrameStatus, RequestStatus, StepFlag
from farspark.wire.messages import Entry, Judge, Sampling, StepReply

logger = logging.getLogger(__name__)


class MetaColumn(enum.IntEnum):
    """Columns of the gather's metadata, int32 `[n, 4]`, or more: see `SamplingColumn`. Positions and counts are those of the
    step, untrimmed."""

    START_POS = 0  # of the first valid row
    VALID_ROWS = 1  # rows that are not rejected
    ANCHOR_TOKEN = 2
    SAMPLED = 3  # 1: the step sampled a token, so a draft is wanted; 0: an unfinished prefill chunk


class SamplingColumn(enum.IntEnum):
    """Three more columns of it where drafts are sampled."""

    TEMPERATURE = 4  # the bits of a float32
    SEED_LOW = 5
    SEED_HIGH = 6


def meta_columns(*, is_sampled: bool) -> int:
    """How many columns the metadata has."""
    return len(MetaColumn) + (len(SamplingColumn) if is_sampled else 0)


class Phase(enum.Enum):
    DECODE = "decode"  # every query is a verify span, N + 1 tokens at most
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """What the host knows of one batch row before the device is read."""

    slot: int  # request-state index
    owner: Hashable  # differs for every admission of a request into a slot
    k_window: int  # drafts that the target verified in this step


@dataclass(frozen=True, slots=True)
class RoundInput:
    """One step, in batch order."""

    requests: Sequence[RoundRequest]
    meta: npt.NDArray[np.int32]  # [n, 4], see MetaColumn; [n, 7] where drafts are sampled, see SamplingColumn
    rows: memoryview  # packed: request after request, the newest min(valid rows, context) rows each
    phase: Phase


@dataclass(slots=True)
class LastDrafts:
    """What the newest successful round brought, for the shadow comparison: views that the next round replaces."""

    margins: npt.NDArray[np.float32] | None = None  # [M, N]
    entry_status: dict[int, RequestStatus] = field(default_factory=dict)  # by batch row
    places: dict[int, int] = field(default_factory=dict)  # by batch row: its entry of the STEP
    connection: Connection | None = None  # that the STEP went over

    @property
    def has_router(self) -> bool | None:
        """Whether the drafter has a router; None where its worker is too old to say."""
        return None if self.connection is None else self.connection.welcome.has_router


_NEED_DRAFT: Final = int(
    EntryFlag.NEED_DRAFT
)  # a plain integer: operators of enums are slow, and a round asks for every entry
# So many STEPs in a row without a reply, and the connection is given up.
SILENT_STEPS: Final = 3
# How much of a round's time a STEP may be expected to take, by what the last large one took.
_SHARE_OF_TIMEOUT: Final = 0.8

_STATUS_COUNTER: Final = {status: f"req_status_{status.name.lower()}" for status in RequestStatus}
_ROUND_COUNTER: Final = {
    RoundOutcome.FAILED: "rounds_failed",
    RoundOutcome.SOME_FAILED: "rounds_some_failed",
    RoundOutcome.OK: "rounds_ok",
    RoundOutcome.NOTHING: "rounds_ok",
}

# A request that wanted drafts and has none: the reply was late, none came, or (any other reason) what came was dropped.
_UNDRAFTED: Final = {
    "timeout": "undrafted_late",
    "not_ready": "undrafted_none",
    "disabled": "undrafted_none",
    "cooldown": "undrafted_none",
    "no_rows": "undrafted_none",
    "reconnected": "undrafted_none",
    "transport_error": "undrafted_none",
    "resync_pending": "undrafted_none",
}

Deliver = Callable[[], bool]
"""Hands the packed result over; False if somebody else has ended the round, and the result is nobody's."""


def _keep() -> bool:
    return True


class RingReader(Protocol):
    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        """Rows `first_pos .. first_pos + n_rows - 1` of `slot` from rank 0's ring, in order, on the host.

        Raises WindowPending where a later round will have them.
        """
        ...


class WindowPending(Exception):
    """The rows are still on the device; they were asked for."""


class _Row(NamedTuple):
    """A row of the metadata, as plain numbers."""

    start_pos: int
    valid_rows: int
    anchor_token: int
    sampled: int


_make_row: Final[Callable[[Iterable[int]], _Row]] = _Row._make


def _rows(meta: npt.NDArray[np.int32]) -> list[_Row]:
    rows = meta.tolist()
    if meta.shape[1] == len(MetaColumn):
        return [_make_row(row) for row in rows]
    return [_make_row(row[: len(MetaColumn)]) for row in rows]


class _Exchange(NamedTuple):
    """A STEP that went out: what is counted of it once the result is delivered."""

    rows: int
    resyncs: list[int]  # rows of each
    rtt_us: float | None  # None: no reply
    worker_us: int


class _Planned(NamedTuple):
    row: int  # in the batch
    entry: Entry
    send: Send
    packed_at: int  # byte offset of the increment in the packed rows
    window: memoryview | None  # the rows, where they come from the ring


class Foreseen(NamedTuple):
    """What the next round sends if nothing in it is out of the ordinary: every request wants drafts, and its rows go on where
    those end that the worker has."""

    connection: Connection
    step_id: int
    n_out: int  # as an entry has it, 0 for all
    depth: int  # drafts to verify of every request
    max_rows: int
    timeout_s: float
    requests: list[int]  # of each: slot, generation, first position, k_window


class _RoundFailed(Exception):
    """Internal: the round ends here, for `reason`, a name in the counters.

    `is_attempt`: the worker was asked, so the breaker counts it.
    """

    def __init__(self, reason: str, *, is_attempt: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.is_attempt = is_attempt


class RemoteRound:
    """Owned by the thread that runs rounds."""

    def __init__(
        self,
        *,
        client: Client,
        shape: ModelShape,
        ring: RingReader,
        breaker: Breaker,
        stats: Stats,
        timeout_s: float,
        want_margin: bool,
        depth: DepthControl | None = None,  # None: every draft is verified
        n_out: NOut | None = None,  # None: every position is asked for
        clock: Clock = time.monotonic,
        ring_lags: bool = False,  # a window comes with a later round than the one that asks for it
    ) -> None:
        self.slots = Slots(shape.slots, ring=shape.ring, context=shape.context)
        self.last_bad_reply: str | None = None
        self.last_drafts = LastDrafts()
        self.breaker = breaker
        self.depth = depth or DepthControl(num_drafts=shape.num_drafts)
        self._n_out = n_out
        self._client = client
        self._shape = shape
        self._ring = ring
        self._ring_lags = ring_lags
        self._stats = stats
        self._timeout_s = timeout_s
        self._flags = StepFlag.MARGINS if want_margin else StepFlag(0)
        self._clock = clock
        self._epoch = 0
        self._silent_steps = 0  # STEPs of this connection without a reply, in a row
        self._decode_rows = shape.slots * (shape.num_drafts + 1)  # what a step of verify spans has at most
        self._rows_in_time = sys.maxsize  # what a STEP may have and be answered before its deadline, as far as is known
        self._step_id = 0
        self.asked_and_answered_s: tuple[float, float] | None = None  # of the newest round; None if no reply came
        self._exchange: _Exchange | None = None  # of the round at hand
        self._answered: Answered | None = None  # of the round at hand, where its STEP was sent already
        self._has_all = False  # every row of the round at hand has drafts
        self._sampling: Sequence[Sampling] = ()  # of the entries of the round at hand; empty: none is sampled
        self._dropped: dict[int, str] = {}  # of the round at hand, by place: why drafts cannot be verified by their q
        self._has_warned = False  # of such drafts

    def foresee(self, requests: Sequence[RoundRequest]) -> Foreseen | None:
        """How a round of these will go, for somebody who sends it himself and then has `run` do the rest; None where that depends
        on more than its metadata. Nothing is changed, and only the next round is foreseen."""
        connection = self._client.connection()
        if (
            connection is None
            or connection.epoch != self._epoch
            or self.breaker.state is not State.CLOSED
            or self._flags
            or self._shape.support
            or self._clock is not time.monotonic
        ):
            return None
        n_out = self._shape.num_drafts if self._n_out is None else self._n_out.of(len(requests), self._shape.num_drafts)
        depth = self.depth.foresee_for_all(n_out) if n_out > 0 else None
        if depth is None:
            return None
        values: list[int] = []
        for request in requests:
            slot = self.slots[request.slot]
            if slot.owner != request.owner or not slot.announced or slot.dirty:
                return None
            values += request.slot, slot.generation, slot.end, request.k_window
        if len({*values[::4]}) < len(requests):
            return None
        asked = n_out if n_out < self._shape.num_drafts else 0
        max_rows = self._rows_per_step(connection)
        return Foreseen(connection, self._step_id + 1, asked, depth, max_rows, self._timeout_s, values)

    def finish(self, step: RoundInput, result: PackedResult, deliver: Deliver, answered: Answered) -> RoundOutcome:
        """`run`, where the STEP was sent already, as `foresee` had it: `answered` is what came of that."""
        self._answered = answered
        try:
            return self.run(step, result, deliver)
        finally:
            self._answered = None

    def run(self, step: RoundInput, result: PackedResult, deliver: Deliver = _keep) -> RoundOutcome:
        """Fill `result` for the batch of `step` and say how it went. Raises nothing that a worker or a network can cause.

        `deliver` is called once, as soon as the result is whole; the bookkeeping comes after it.
        """
        # What can wait is counted after `deliver`: a device may be parked.
        requests, meta = step.requests, _rows(step.meta)
        n = len(requests)
        self.last_drafts = LastDrafts()
        self._exchange = None
        self.asked_and_answered_s = None
        advance = self.slots.advance
        increments = [
            advance(request.slot, request.owner, row.start_pos, row.valid_rows)
            for request, row in zip(requests, meta, strict=True)
        ]
        self.depth.look()
        n_out = self._shape.num_drafts if self._n_out is None else self._n_out.of(n, self._shape.num_drafts)
        wanted = [row.sampled != 0 and n_out > 0 for row in meta]
        needed = sum(wanted)
        result.clear(RoundOutcome.FAILED if needed else RoundOutcome.NOTHING, n)
        try:
            connection = self._connected(step) if self._answered is None else self._answered.connection
            planned = self._plan(step, meta, increments, wanted, n_out, connection)
            reply = self._send(connection, planned, step)
        except _RoundFailed as failed:
            if not deliver():
                self._lose(step)
            self._account(step, meta)
            self._fail(failed, needed)
            return result.outcome
        outcome = self._pack(reply, planned, needed, result)
        cut = 0
        if outcome is not RoundOutcome.NOTHING:
            cut = self._choose_depths(result, n, n_out)
        is_delivered = deliver()
        self._account(step, meta)
        if n_out < self._shape.num_drafts and needed:
            self._stats.add("rounds_n_out_cut")
        self._settle(reply, planned, connection, needed if is_delivered else 0)
        if not is_delivered:
            self._lose(step)
            self._fail(_RoundFailed("preempted"), needed)
            result.clear(RoundOutcome.FAILED if needed else RoundOutcome.NOTHING, n)
            return result.outcome
        self._count("drafts_cut", cut)
        if outcome is not RoundOutcome.NOTHING:
            self._count_for_breaker(success=outcome is not RoundOutcome.FAILED)
        self._stats.add(_ROUND_COUNTER[outcome])
        return outcome

    def skip(self, step: RoundInput) -> None:
        """Take note of a round that somebody else ended before it was run: its rows are gone, nothing is sent."""
        self.last_drafts = LastDrafts()
        self._exchange = None
        meta = _rows(step.meta)
        for request, row in zip(step.requests, meta, strict=True):
            self.slots.advance(request.slot, request.owner, row.start_pos, row.valid_rows)
        self._account(step, meta)
        self._lose(step)
        self._fail(_RoundFailed("preempted"), sum(row.sampled != 0 for row in meta))

    def forget(self, rounds: int) -> None:
        """That many rounds are over of which nothing is known: what the ring holds of any slot cannot be told."""
        self.last_drafts = LastDrafts()
        self.slots.forget_all()
        self._stats.add("fallback_preempted", rounds)
        self._stats.add("rounds_failed", rounds)

    def _lose(self, step: RoundInput) -> None:
        """The rows may have been replaced while they were read, so nobody knows what the worker holds."""
        self._stats.add("watchdog_preempted")
        self._stats.add(f"watchdog_preempted_{step.phase.value}")
        for request in step.requests:
            self.slots.mark_dirty(request.slot)

    def _fail(self, failed: _RoundFailed, wanted: int) -> None:
        self._stats.add(f"fallback_{failed.reason}")
        self._stats.add("rounds_failed")
        self._count(_UNDRAFTED.get(failed.reason, "undrafted_dropped"), wanted)
        if failed.is_attempt:
            self._count_for_breaker(success=False)

    def judge(self, rows: Sequence[int], chains: npt.NDArray[np.integer[Any]]) -> JudgedChains | None:
        """What the worker's drafter thinks of `chains` [C, N], other drafts for these batch rows of the newest round.

        None where the worker cannot say; never raises for what a worker or a network does. Not for the hot path.
        """
        last = self.last_drafts
        connection = self._client.connection()
        if connection is None or connection is not last.connection or not all(row in last.places for row in rows):
            return None
        tokens = np.ascontiguousarray(chains, dtype=np.int32).reshape(-1).data
        judge = Judge(self._step_id, self._shape.num_drafts, [last.places[row] for row in rows], tokens)
        why: str | None
        try:
            judgement = self._client.judge(connection, judge, Deadline.after(self._timeout_s, self._clock))
        except Refused as refused:
            why = str(refused)
        except TimeoutError:
            why = "no answer before the deadline"
        except (TransportError, ProtocolError) as error:
            why = str(error)
            self._client.drop(connection, why)
        else:
            has_router = bool(connection.welcome.has_router)
            why = find_fault_of_judgement(judgement, judge, self._shape.vocab_size, has_router=has_router)
            if why is None:
                return JudgedChains.of(judgement)
            self.last_bad_reply = why
        self._stats.add("judge_failures")
        logger.debug("farspark: JUDGE failed: %s", why)
        return None

    def _account(self, step: RoundInput, meta: Sequence[_Row]) -> None:
        """Count the round and what went out of it.

        Drafted is what was sent to verify; of that the valid rows less the anchor's were accepted.
        """
        stats, phase = self._stats, step.phase.value
        stats.add(f"rounds_{phase}")
        drafted = accepted = 0
        for row, request in zip(meta, step.requests, strict=True):
            if request.k_window:
                drafted += request.k_window
                accepted += max(row.valid_rows - 1, 0)
        self._count("drafted_tokens", drafted)
        self._count("accepted_drafts", accepted)
        sent, self._exchange = self._exchange, None
        if sent is None:
            return
        stats.add("rows_sent", sent.rows)
        stats.add(f"rows_sent_{phase}", sent.rows)
        if sent.resyncs:
            stats.add("resync_rounds")
            stats.add("resync_rows", sum(sent.resyncs))
        if sent.rtt_us is not None:
            stats.record_us("rtt_us", sent.rtt_us)
            stats.record_us(f"rtt_us_{phase}", sent.rtt_us)
            stats.record_us("worker_us", sent.worker_us)

    def _choose_depths(self, result: PackedResult, n: int, n_out: int) -> int:
        """How many drafts will not be verified."""
        if result.outcome is RoundOutcome.OK and self._has_all:
            depth = self.depth.choose_for_all(n, n_out)
            if depth is not None:
                result.depths[:n] = depth
                return n * (n_out - depth)
        is_ok = result.ok[:n] != 0
        depths = self.depth.choose(result.confidences[:n], is_ok, n_out)
        result.depths[:n] = depths
        return int(np.count_nonzero(is_ok)) * n_out - sum(depths)

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self._stats.add(name, amount)

    def _count_for_breaker(self, *, success: bool) -> None:
        before = self.breaker.state
        if success:
            self.breaker.succeeded()
        else:
            self.breaker.failed()
        after = self.breaker.state
        if after is before:
            return
        if after is State.OPEN:
            self._stats.add("breaker_trips")
            logger.warning("farspark: breaker open: %r", self.breaker)
        elif after is State.CLOSED:
            self._stats.add("breaker_recoveries")
            logger.info("farspark: breaker closed, the worker answers again")

    def _connected(self, step: RoundInput) -> Connection:
        connection = self._client.connection()
        if connection is None:
            # Nothing of this round reaches a worker, so whatever one holds has a gap from here on.
            self.slots.mark_all_dirty()
            self.breaker.stayed_home()
            raise _RoundFailed("disabled" if self._client.state is ClientState.DISABLED else "not_ready")
        if connection.epoch != self._epoch:
            leaving = self._client.leaving
            if leaving is not None and leaving.epoch == self._epoch and self._lacks_windows(step):
                connection = leaving  # its worker holds everything; what the next one needs comes with a later round
            else:
                self._begin(connection)
        if not self.breaker.allows():
            for request in step.requests:
                self.slots.mark_dirty(request.slot)
            raise _RoundFailed("cooldown")
        return connection

    def _lacks_windows(self, step: RoundInput) -> bool:
        """Whether a worker that holds nothing would have to wait for rows; they were asked for then."""
        is_pending = False
        if self._ring_lags:
            for request, valid_rows in zip(step.requests, step.meta[:, MetaColumn.VALID_ROWS].tolist(), strict=True):
                first_pos, n_rows = self.slots.in_ring(request.slot)
                try:
                    if n_rows > valid_rows:
                        self._ring.window(request.slot, first_pos, n_rows)
                except WindowPending:
                    is_pending = True
        return is_pending

    def _begin(self, connection: Connection) -> None:
        """The first round over `connection`."""
        if self._client.begin(connection):
            self.breaker.moved()
        self.slots.mark_all_dirty()
        self._epoch = connection.epoch
        self._silent_steps = 0

    def _plan(
        self,
        step: RoundInput,
        meta: Sequence[_Row],
        increments: Sequence[Increment],
        wanted: Sequence[bool],
        n_out: int,
        connection: Connection,
    ) -> list[_Planned]:
        """The entries to send, at least one. Requests whose windows only a later round will have are left out."""
        planned: list[_Planned] = []
        windows: list[tuple[int, Send]] = []
        packed_at = 0
        row_bytes = self._shape.row_bytes
        rows_left = self._rows_per_step(connection)
        # Beside a window there is always room for a step's increments, so that no slot waits for ever.
        most = max(1, rows_left - self._decode_rows)
        for row, (request, increment) in enumerate(zip(step.requests, increments, strict=True)):
            here, packed_at = packed_at, packed_at + increment.n_rows * row_bytes
            send = self.slots.plan(request.slot, increment, most)
            if send.from_ring:
                windows.append((row, send))
            elif self._has_room(request.slot, send, rows_left):
                rows_left -= send.n_rows
                planned.append(
                    _Planned(row, self._entry(request, send, meta[row], wanted[row], n_out), send, here, None)
                )
        is_pending = False
        # Last: a slot whose increment finds no room needs its whole window, too.
        for row, send in windows:
            request = step.requests[row]
            if not self._has_room(request.slot, send, rows_left):
                continue
            try:
                window = self._ring.window(request.slot, send.first_pos, send.n_rows)
            except WindowPending:
                self._stats.add("entries_resync_pending")
                self.slots.mark_dirty(request.slot)
                is_pending = True
                continue
            rows_left -= send.n_rows
            planned.append(_Planned(row, self._entry(request, send, meta[row], wanted[row], n_out), send, 0, window))
        if not planned:
            raise _RoundFailed("resync_pending" if is_pending else "no_rows")
        if windows:
            planned.sort(key=operator.attrgetter("row"))
        return planned

    def _has_room(self, slot: int, send: Send, rows_left: int) -> bool:
        """Without a row there is no anchor position to speak of; beyond the limit the slot waits for another round, which sends
        it whole."""
        if 0 < send.n_rows <= rows_left:
            return True
        self._stats.add("fallback_no_rows" if send.n_rows == 0 else "entries_over_row_limit")
        self.slots.mark_dirty(slot)
        return False

    def _entry(self, request: RoundRequest, send: Send, row: _Row, is_wanted: bool, n_out: int) -> Entry:
        return Entry(
            request.slot,
            self.slots[request.slot].generation,
            send.first_pos,
            send.n_rows,
            row.anchor_token,
            send.first_pos + send.n_rows,
            send.flags | _NEED_DRAFT if is_wanted else send.flags,
            request.k_window,
            n_out if is_wanted and n_out < self._shape.num_drafts else 0,
        )

    def _rows_per_step(self, connection: Connection) -> int:
        return min(connection.welcome.max_rows, self._rows_in_time)

    def _note_late(self, n_rows: int) -> None:
        """A STEP had no reply in time. Behind one that had, a large one may have been too large: the next ones are smaller."""
        if self._silent_steps > 1 or n_rows <= 2 * self._decode_rows:
            return
        self._rows_in_time = max(2 * self._decode_rows, n_rows // 2)
        logger.info(
            "farspark: a STEP of %d rows was not answered in time; at most %d at once, until they prove to be quicker",
            n_rows,
            self._rows_in_time,
        )

    def _note_in_time(self, n_rows: int, took_s: float) -> None:
        if n_rows > self._decode_rows:
            share = _SHARE_OF_TIMEOUT * self._timeout_s / max(took_s, 1e-6)
            self._rows_in_time = max(self._rows_in_time, int(share * n_rows))

    def _pieces(self, planned: Sequence[_Planned], rows: memoryview) -> list[memoryview]:
        """The rows in entry order, runs of packed ones in one piece."""
        pieces: list[memoryview] = []
        run_start = run_end = 0
        for one in planned:
            size = one.send.n_rows * self._shape.row_bytes
            if one.window is None and run_end == one.packed_at:
                run_end += size
                continue
            if run_end > run_start:
                pieces.append(rows[run_start:run_end])
            if one.window is not None:
                pieces.append(one.window)
                run_start = run_end = 0
            else:
                run_start, run_end = one.packed_at, one.packed_at + size
        if run_end > run_start:
            pieces.append(rows[run_start:run_end])
        return pieces

    def _send(self, connection: Connection, planned: Sequence[_Planned], step: RoundInput) -> StepReply:
        """The reply, checked. Whatever else comes of it, nobody knows then what the worker holds for these slots."""
        try:
            reply = self._ask(connection, planned, step)
            self._check(reply, planned, connection)
        except _RoundFailed:
            for one in planned:
                self.slots.mark_dirty(one.entry.slot)
            raise
        return reply

    def _ask(self, connection: Connection, planned: Sequence[_Planned], step: RoundInput) -> StepReply:
        entries = [one.entry for one in planned]
        resyncs = [one.send.n_rows for one in planned if one.window is not None]
        pieces = self._pieces(planned, step.rows)
        answered = self._answered
        if answered is None and not self._client.holds(connection):
            raise _RoundFailed("reconnected")
        self._step_id += 1
        n_rows = sum([entry.n_rows for entry in entries])
        self._sampling = self._how_to_sample(step, planned) if self._shape.support else ()
        self._exchange = _Exchange(n_rows, resyncs, None, 0)
        sent_at = self._clock() if answered is None else answered.sent_s
        try:
            reply = self._client.step(
                connection,
                self._step_id,
                entries,
                pieces,
                self._flags,
                Deadline(sent_at + self._timeout_s, self._clock),
                self._sampling,
                answered,
            )
        except TimeoutError:
            self._silent_steps += 1
            self._note_late(n_rows)
            if connection.channel.is_closed:
                self._client.drop(connection, "a STEP could not be sent before its deadline")
            elif self._silent_steps >= SILENT_STEPS:
                # It may have stopped in the middle of a frame, for good; a new connection is made beside the rounds.
                self._client.drop(connection, f"no reply to {self._silent_steps} STEPs in a row")
            raise _RoundFailed("timeout", is_attempt=True) from None
        except TransportError as error:
            self._client.drop(connection, str(error))
            raise _RoundFailed("transport_error", is_attempt=True) from error
        except ProtocolError as error:
            self.last_bad_reply = str(error)
            self._client.drop(connection, str(error))
            raise _RoundFailed("bad_reply", is_attempt=True) from error
        except Refused as refused:
            raise self._refused(connection, refused) from refused
        self._silent_steps = 0
        answered_at = self._clock() if answered is None or answered.answered_s is None else answered.answered_s
        self.asked_and_answered_s = sent_at, answered_at
        self._note_in_time(n_rows, answered_at - sent_at)
        self._exchange = _Exchange(n_rows, resyncs, (answered_at - sent_at) * 1e6, reply.worker_us)
        return reply

    def _refused(self, connection: Connection, refused: Refused) -> _RoundFailed:
        known = refused.status in FrameStatus._value2member_map_
        status = FrameStatus(refused.status) if known else None
        name = status.name.lower() if status else f"unknown_{refused.status}"
        if status is not None and status.is_final:
            self._client.give_up(connection, f"{connection.endpoint}: {status.name} in answer to a STEP: {refused}")
        elif status is FrameStatus.NO_SESSION:
            self._client.drop(connection, f"the worker has no such session: {refused}", Loss.SESSION)
        return _RoundFailed(f"frame_{name}", is_attempt=True)

    def _how_to_sample(self, step: RoundInput, planned: Sequence[_Planned]) -> list[Sampling]:
        """Of each entry; empty where nothing of the round is to be drawn: then the STEP is as it would be without sampling."""
        rows = [one.row for one in planned]
        columns = np.ascontiguousarray(step.meta[:, len(MetaColumn) :])[rows]
        bits = np.ascontiguousarray(columns[:, 0])
        seeds = np.ascontiguousarray(columns[:, 1:]).view(np.int64)[:, 0]
        return how_to_sample(bits.view(np.float32), seeds, [one.entry.needs_draft for one in planned])

    def _check(self, reply: StepReply, planned: Sequence[_Planned], connection: Connection) -> None:
        """Trust nothing: raises _RoundFailed("bad_reply") and keeps the reason."""
        entries = [one.entry for one in planned]
        self._dropped = {}
        why = find_fault(
            reply,
            entries,
            step_id=self._step_id,
            num_drafts=self._shape.num_drafts,
            vocab_size=self._shape.vocab_size,
            context=connection.welcome.context,
            want_margins=bool(self._flags & StepFlag.MARGINS),
            want_sampled=bool(self._sampling),
        )
        if why is not None:
            self.last_bad_reply = why
            raise _RoundFailed("bad_reply", is_attempt=True)
        if self._sampling:
            self._dropped = find_faults_of_draws(reply, entries, self._sampling, vocab_size=self._shape.vocab_size)

    def _pack(self, reply: StepReply, planned: Sequence[_Planned], needed: int, result: PackedResult) -> RoundOutcome:
        """Put the drafts into `result`."""
        places = [index for index, answer in enumerate(reply.entries) if answer.status.has_drafts]
        if self._dropped:
            places = [index for index in places if index not in self._dropped]
        rows = [planned[index].row for index in places]
        self._has_all = len(rows) == result.num_requests
        if self._has_all:
            # Then they stand in batch order.
            result.put(reply.tokens, reply.confidences, len(rows))
        elif rows:
            shape = (len(planned), self._shape.num_drafts)
            tokens = np.frombuffer(reply.tokens, dtype=np.int32).reshape(shape)
            confidences = np.frombuffer(reply.confidences, dtype=np.float32).reshape(shape)
            result.ok[rows] = 1
            result.tokens[rows] = tokens[places]
            result.confidences[rows] = confidences[places]
        if rows and reply.sampled is not None:
            _put_sampled(reply, places, rows, result)
        if needed == 0:
            outcome = RoundOutcome.NOTHING
        elif len(rows) == needed:
            outcome = RoundOutcome.OK
        else:
            outcome = RoundOutcome.SOME_FAILED if rows else RoundOutcome.FAILED
        result.set_outcome(outcome)
        return outcome

    def _settle(self, reply: StepReply, planned: Sequence[_Planned], connection: Connection, needed: int) -> None:
        """Take note of what the worker said of each slot; `needed`: requests that wanted drafts of a round that counts."""
        last = self.last_drafts
        last.connection = connection
        if reply.margins is not None:
            margins = np.frombuffer(reply.margins, dtype=np.float32).reshape(len(planned), self._shape.num_drafts)
            last.margins = np.zeros((self._shape.slots, self._shape.num_drafts), dtype=np.float32)
        got = 0
        for index, (one, answer) in enumerate(zip(planned, reply.entries, strict=True)):
            self._stats.add(_STATUS_COUNTER[answer.status])
            self.slots.settle(one.entry.slot, answer.status, answer.window_rows)
            last.entry_status[one.row] = answer.status
            last.places[one.row] = index
            if answer.status is RequestStatus.STALE_GENERATION:
                self._stats.add("stale_generation_new_sessions")
                why = f"slot {one.entry.slot}: the worker knows a newer generation"
                self._client.drop(connection, why, Loss.SESSION)
            if answer.status.has_drafts and index not in self._dropped:
                got += 1
                if last.margins is not None:
                    last.margins[one.row] = margins[index]
        if reply.sampled is not None:
            self._count_sampled(reply, planned)
        if got < needed:
            asked = sum(one.entry.needs_draft for one in planned)
            self._count("undrafted_dropped", asked - got)
            self._count("undrafted_none", needed - asked)

    def _count_sampled(self, reply: StepReply, planned: Sequence[_Planned]) -> None:
        assert reply.sampled is not None
        drawn = sum(one == 1 and place not in self._dropped for place, one in enumerate(reply.sampled.mask))
        self._stats.add("rounds_sampled")
        self._count("sampled_requests", drawn)
        if not self._dropped:
            return
        self._stats.add("sampled_refused", len(self._dropped))
        place, why = next(iter(self._dropped.items()))
        self.last_bad_reply = f"slot {planned[place].entry.slot}: {why}"
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "farspark: sampled drafts refused, the target decodes that request without drafts: %s; further ones are counted "
                "as sampled_refused",
                self.last_bad_reply,
            )


def _put_sampled(reply: StepReply, places: Sequence[int], rows: Sequence[int], result: PackedResult) -> None:
    """What the drafts of batch `rows` were drawn from, out of `places` of the reply."""
    assert reply.sampled is not None
    shape = len(reply.entries), *result.q.shape[1:]
    result.sampled[rows] = np.frombuffer(reply.sampled.mask, dtype=np.int32)[places]
    result.support_ids[rows] = np.frombuffer(reply.sampled.support, dtype=np.int32).reshape(shape)[places]
    result.q[rows] = np.frombuffer(reply.sampled.q, dtype=np.float32).reshape(shape)[places]
