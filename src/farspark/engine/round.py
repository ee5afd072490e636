"""One remote round: take note of the step's rows, build the entries, exchange, check the reply, pack the result.

No torch, no CUDA, no vLLM: the same piece serves the engine thread, a proxy thread and a proxy process. Whatever the worker
or the network does, `run` returns a whole result.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from farspark.clock import Clock, Deadline
from farspark.engine.breaker import Breaker, State
from farspark.engine.client import Client, ClientState, Connection
from farspark.engine.depth import NOut
from farspark.engine.depth_control import DepthControl
from farspark.engine.result import PackedResult, RoundOutcome
from farspark.engine.shadow import JudgedChains
from farspark.engine.shape import ModelShape
from farspark.engine.slots import Increment, Send, Slots
from farspark.errors import ProtocolError, Refused, TransportError
from farspark.stats import Stats
from farspark.wire.layout import EntryFlag, FrameStatus, RequestStatus, StepFlag
from farspark.wire.messages import Entry, Judge, Judgement, StepReply

logger = logging.getLogger(__name__)


class MetaColumn(enum.IntEnum):
    """Columns of the gather's metadata, int32 `[n, 4]`. Positions and counts are those of the step, untrimmed."""

    START_POS = 0  # of the first valid row
    VALID_ROWS = 1  # rows that are not rejected
    ANCHOR_TOKEN = 2
    SAMPLED = 3  # 1: the step sampled a token, so a draft is wanted; 0: an unfinished prefill chunk


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
    meta: npt.NDArray[np.int32]  # [n, 4], see MetaColumn
    rows: memoryview  # packed: request after request, the newest min(valid rows, context) rows each
    phase: Phase


@dataclass(slots=True)
class LastDrafts:
    """What the newest successful round brought, for the shadow comparison: views that the next round replaces."""

    margins: npt.NDArray[np.float32] | None = None  # [M, N]
    entry_status: dict[int, RequestStatus] = field(default_factory=dict)  # by batch row
    places: dict[int, int] = field(default_factory=dict)  # by batch row: its entry of the STEP
    connection: Connection | None = None  # that the STEP went over


# Names of the module, the flag a plain integer: members of enums and their operators are slow, and a round asks for
# every entry.
_NOT_NEEDED: Final = RequestStatus.NOT_NEEDED
_NEED_DRAFT: Final = int(EntryFlag.NEED_DRAFT)
# So many STEPs in a row without a reply, and the connection is given up.
SILENT_STEPS: Final = 3

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
}


class RingReader(Protocol):
    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        """Rows `first_pos .. first_pos + n_rows - 1` of `slot` from rank 0's ring, in order, on the host."""
        ...


class _Planned(NamedTuple):
    row: int  # in the batch
    entry: Entry
    send: Send
    packed_at: int  # byte offset of the increment in the packed rows


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
        self._stats = stats
        self._timeout_s = timeout_s
        self._flags = StepFlag.MARGINS if want_margin else StepFlag(0)
        self._clock = clock
        self._epoch = 0
        self._silent_steps = 0  # STEPs of this connection without a reply, in a row
        self._step_id = 0

    def run(self, step: RoundInput, result: PackedResult) -> RoundOutcome:
        """Fill `result` for the batch of `step` and say how it went. Raises nothing that a worker or a network can cause."""
        n = len(step.requests)
        self.last_drafts = LastDrafts()
        self._stats.add(f"rounds_{step.phase.value}")
        increments = [
            self.slots.advance(
                request.slot, request.owner, int(row[MetaColumn.START_POS]), int(row[MetaColumn.VALID_ROWS])
            )
            for request, row in zip(step.requests, step.meta, strict=True)
        ]
        self._count_verified(step)
        self.depth.look()
        n_out = self._shape.num_drafts if self._n_out is None else self._n_out.of(n, self._shape.num_drafts)
        wanted = [bool(row[MetaColumn.SAMPLED]) and n_out > 0 for row in step.meta]
        result.clear(RoundOutcome.FAILED if any(wanted) else RoundOutcome.NOTHING, n)
        try:
            outcome = self._exchange(step, increments, wanted, n_out, result)
        except _RoundFailed as failed:
            self._stats.add(f"fallback_{failed.reason}")
            self._stats.add("rounds_failed")
            self._count(_UNDRAFTED.get(failed.reason, "undrafted_dropped"), sum(wanted))
            if failed.is_attempt:
                self._count_for_breaker(success=False)
            return result.outcome
        result.set_outcome(outcome)
        if outcome is not RoundOutcome.NOTHING:
            self._count_for_breaker(success=outcome is not RoundOutcome.FAILED)
        self._stats.add(_ROUND_COUNTER[outcome])
        if outcome is not RoundOutcome.NOTHING:
            self._choose_depths(result, n, n_out)
        return outcome

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
            why = find_fault_of_judgement(judgement, judge, self._shape.vocab_size)
            if why is None:
                return JudgedChains.of(judgement)
            self.last_bad_reply = why
        self._stats.add("judge_failures")
        logger.debug("farspark: JUDGE failed: %s", why)
        return None

    def _count_verified(self, step: RoundInput) -> None:
        """Drafted is what was sent to verify; of that the valid rows less the anchor's were accepted."""
        drafted = accepted = 0
        for row, request in enumerate(step.requests):
            if request.k_window:
                drafted += request.k_window
                accepted += max(int(step.meta[row, MetaColumn.VALID_ROWS]) - 1, 0)
        self._count("drafted_tokens", drafted)
        self._count("accepted_drafts", accepted)

    def _choose_depths(self, result: PackedResult, n: int, n_out: int) -> None:
        is_ok = result.ok[:n] != 0
        depths = self.depth.choose(result.confidences[:n], is_ok, n_out)
        result.depths[:n] = depths
        self._count("drafts_cut", int(is_ok.sum()) * n_out - sum(depths))

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

    def _exchange(
        self,
        step: RoundInput,
        increments: Sequence[Increment],
        wanted: Sequence[bool],
        n_out: int,
        result: PackedResult,
    ) -> RoundOutcome:
        connection = self._client.connection()
        if connection is None:
            # Nothing of this round reaches a worker, so whatever one holds has a gap from here on.
            self.slots.mark_all_dirty()
            self.breaker.stayed_home()
            raise _RoundFailed("disabled" if self._client.state is ClientState.DISABLED else "not_ready")
        if connection.epoch != self._epoch:
            self.slots.mark_all_dirty()
            self._epoch = connection.epoch
            self._silent_steps = 0
        if not self.breaker.allows():
            for request in step.requests:
                self.slots.mark_dirty(request.slot)
            raise _RoundFailed("cooldown")
        planned = self._plan(step, increments, wanted, n_out, connection)
        if not planned:
            raise _RoundFailed("no_rows")
        if n_out < self._shape.num_drafts and any(wanted):
            self._stats.add("rounds_n_out_cut")
        try:
            reply = self._send(connection, planned, step)
            self._check(reply, planned, connection)
        except _RoundFailed:
            for one in planned:
                self.slots.mark_dirty(one.entry.slot)
            raise
        self._stats.record_us("worker_us", reply.worker_us)
        return self._settle(reply, planned, wanted, result, connection)

    def _plan(
        self,
        step: RoundInput,
        increments: Sequence[Increment],
        wanted: Sequence[bool],
        n_out: int,
        connection: Connection,
    ) -> list[_Planned]:
        planned = []
        packed_at = 0
        rows_left = connection.welcome.max_rows
        for row, (request, increment) in enumerate(zip(step.requests, increments, strict=True)):
            here, packed_at = packed_at, packed_at + increment.n_rows * self._shape.row_bytes
            send = self.slots.plan(request.slot, increment)
            if send.n_rows == 0 or send.n_rows > rows_left:
                # Without a row there is no anchor position to speak of; beyond the worker's limit the slot waits for
                # another round and is then sent whole.
                self._stats.add("fallback_no_rows" if send.n_rows == 0 else "entries_over_row_limit")
                self.slots.mark_dirty(request.slot)
                continue
            rows_left -= send.n_rows
            flags = send.flags | _NEED_DRAFT if wanted[row] else send.flags
            state = self.slots[request.slot]
            entry = Entry(
                slot=request.slot,
                generation=state.generation,
                first_pos=send.first_pos,
                n_rows=send.n_rows,
                anchor_token=int(step.meta[row, MetaColumn.ANCHOR_TOKEN]),
                anchor_pos=send.first_pos + send.n_rows,
                flags=flags,
                k_window=request.k_window,
                n_out=n_out if wanted[row] and n_out < self._shape.num_drafts else 0,
            )
            planned.append(_Planned(row, entry, send, here))
        return planned

    def _pieces(self, planned: Sequence[_Planned], rows: memoryview) -> list[memoryview]:
        """The rows in entry order, runs of packed ones in one piece."""
        pieces: list[memoryview] = []
        run_start = run_end = 0
        for one in planned:
            size = one.send.n_rows * self._shape.row_bytes
            if not one.send.from_ring and run_end == one.packed_at:
                run_end += size
                continue
            if run_end > run_start:
                pieces.append(rows[run_start:run_end])
            if one.send.from_ring:
                pieces.append(self._ring.window(one.entry.slot, one.send.first_pos, one.send.n_rows))
                run_start = run_end = 0
            else:
                run_start, run_end = one.packed_at, one.packed_at + size
        if run_end > run_start:
            pieces.append(rows[run_start:run_end])
        return pieces

    def _send(self, connection: Connection, planned: Sequence[_Planned], step: RoundInput) -> StepReply:
        entries = [one.entry for one in planned]
        resyncs = [one.send for one in planned if one.send.from_ring]
        pieces = self._pieces(planned, step.rows)
        if self._client.connection() is not connection:
            raise _RoundFailed("reconnected")
        self._step_id += 1
        n_rows = sum(entry.n_rows for entry in entries)
        sent_at = self._clock()
        try:
            reply = self._client.step(
                connection, self._step_id, entries, pieces, self._flags, Deadline.after(self._timeout_s, self._clock)
            )
        except TimeoutError:
            self._silent_steps += 1
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
        finally:
            self._stats.add("rows_sent", n_rows)
            self._stats.add(f"rows_sent_{step.phase.value}", n_rows)
            if resyncs:
                self._stats.add("resync_rounds")
                self._stats.add("resync_rows", sum(entry.n_rows for entry in resyncs))
        self._silent_steps = 0
        rtt_us = (self._clock() - sent_at) * 1e6
        self._stats.record_us("rtt_us", rtt_us)
        self._stats.record_us(f"rtt_us_{step.phase.value}", rtt_us)
        return reply

    def _refused(self, connection: Connection, refused: Refused) -> _RoundFailed:
        known = refused.status in FrameStatus._value2member_map_
        status = FrameStatus(refused.status) if known else None
        name = status.name.lower() if status else f"unknown_{refused.status}"
        if status is not None and status.is_final:
            self._client.disable(f"{connection.endpoint} answered STEP with {status.name}: {refused}")
        elif status is FrameStatus.NO_SESSION:
            self._client.drop(connection, f"the worker has no such session: {refused}")
        return _RoundFailed(f"frame_{name}", is_attempt=True)

    def _check(self, reply: StepReply, planned: Sequence[_Planned], connection: Connection) -> None:
        """Trust nothing: raises _RoundFailed("bad_reply") and keeps the reason."""
        why = find_fault(
            reply,
            [one.entry for one in planned],
            step_id=self._step_id,
            num_drafts=self._shape.num_drafts,
            vocab_size=self._shape.vocab_size,
            context=connection.welcome.context,
            want_margins=bool(self._flags & StepFlag.MARGINS),
        )
        if why is not None:
            self.last_bad_reply = why
            raise _RoundFailed("bad_reply", is_attempt=True)

    def _settle(
        self,
        reply: StepReply,
        planned: Sequence[_Planned],
        wanted: Sequence[bool],
        result: PackedResult,
        connection: Connection,
    ) -> RoundOutcome:
        shape = (len(planned), self._shape.num_drafts)
        tokens = np.frombuffer(reply.tokens, dtype=np.int32).reshape(shape)
        confidences = np.frombuffer(reply.confidences, dtype=np.float32).reshape(shape)
        margins = None if reply.margins is None else np.frombuffer(reply.margins, dtype=np.float32).reshape(shape)
        if margins is not None:
            self.last_drafts.margins = np.zeros(result.tokens.shape, dtype=np.float32)
        self.last_drafts.connection = connection
        got = 0
        for index, (one, answer) in enumerate(zip(planned, reply.entries, strict=True)):
            self._stats.add(f"req_status_{answer.status.name.lower()}")
            self.slots.settle(one.entry.slot, answer.status, answer.window_rows)
            self.last_drafts.entry_status[one.row] = answer.status
            self.last_drafts.places[one.row] = index
            if answer.status is RequestStatus.STALE_GENERATION:
                self._stats.add("stale_generation_new_sessions")
                self._client.drop(connection, f"slot {one.entry.slot}: the worker knows a newer generation")
            if answer.status.has_drafts:
                got += 1
                result.ok[one.row] = 1
                result.tokens[one.row] = tokens[index]
                result.confidences[one.row] = confidences[index]
                if margins is not None and self.last_drafts.margins is not None:
                    self.last_drafts.margins[one.row] = margins[index]
        needed = sum(wanted)
        if needed == 0:
            return RoundOutcome.NOTHING
        if got < needed:
            asked = sum(one.entry.needs_draft for one in planned)
            self._count("undrafted_dropped", asked - got)
            self._count("undrafted_none", needed - asked)
        if got == needed:
            return RoundOutcome.OK
        return RoundOutcome.SOME_FAILED if got else RoundOutcome.FAILED


def find_fault(
    reply: StepReply,
    entries: Sequence[Entry],
    *,
    step_id: int,
    num_drafts: int,
    vocab_size: int,
    context: int,
    want_margins: bool,
) -> str | None:
    """Why `reply` cannot be the answer to `entries`, as a sentence with the values; None if it can."""
    if reply.step_id != step_id:
        return f"reply to step {reply.step_id}, in flight is {step_id}"
    if reply.num_drafts != num_drafts or len(reply.entries) != len(entries):
        return f"{len(reply.entries)} entries by {reply.num_drafts} drafts, asked were {len(entries)} by {num_drafts}"
    if want_margins != (reply.margins is not None):
        return f"margins {'missing' if want_margins else 'sent unasked'}"
    # Lists: for the few dozen values of a round plain Python is several times faster than as many numpy calls.
    tokens, confidences = reply.tokens.tolist(), reply.confidences.tolist()
    stray: list[int] = []
    end = 0
    for asked, (slot, generation, window_rows, status) in zip(entries, reply.entries, strict=True):
        if slot != asked.slot or generation != asked.generation:
            return (
                f"answer for slot {slot} generation {generation}, asked was slot {asked.slot} "
                f"generation {asked.generation}"
            )
        if window_rows > context:
            return f"slot {slot}: window of {window_rows} rows, the context is {context}"
        if status.has_drafts:
            if not asked.flags & _NEED_DRAFT:
                return f"slot {slot}: status {status.name} though no draft was asked for"
            wanted = asked.n_out or num_drafts
        else:
            if status is _NOT_NEEDED and asked.needs_draft:
                return f"slot {slot}: status NOT_NEEDED though a draft was asked for"
            wanted = 0
        beyond, end = end + wanted, end + num_drafts
        if beyond < end and (any(tokens[beyond:end]) or any(confidences[beyond:end])):
            stray.append(slot)
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        wrong = [not 0 <= one < vocab_size for one in tokens]
        return f"draft id {_first(tokens, wrong, num_drafts)}, the vocabulary has {vocab_size}"
    # Where one of them is NaN, the least and the greatest may not tell, but the sum is NaN, which fails every comparison.
    if not (min(confidences) >= 0 and max(confidences) <= 1 and sum(confidences) >= 0):
        wrong = [not 0 <= one <= 1 for one in confidences]
        return f"confidence {_first(confidences, wrong, num_drafts)}, expected 0 to 1"
    if reply.margins is not None:
        margins = reply.margins.tolist()
        if not (min(margins) >= 0 and sum(margins) >= 0):
            wrong = [not one >= 0 for one in margins]
            return f"margin {_first(margins, wrong, num_drafts)}, expected 0 or more"
    return f"slot {stray[0]}: drafts past the positions asked for" if stray else None


def find_fault_of_judgement(judgement: Judgement, judge: Judge, vocab_size: int) -> str | None:
    """Why `judgement` cannot be the answer to `judge`; None if it can."""
    wanted = len(judge.places) * judge.num_drafts
    if (judgement.step_id, judgement.num_drafts, len(judgement.best)) != (judge.step_id, judge.num_drafts, wanted):
        return f"judgement of {len(judgement.best)} drafts of step {judgement.step_id}, asked were {wanted} of {judge.step_id}"
    best, confidences = np.asarray(judgement.best), np.asarray(judgement.confidences)
    if not ((best >= 0) & (best < vocab_size)).all():
        return f"judgement with an id outside 0 .. {vocab_size - 1}"
    for name, values in (("gap", np.asarray(judgement.gaps)), ("peak", np.asarray(judgement.peaks))):
        if not (np.isfinite(values) & (values >= 0)).all():
            return f"judgement with a {name} that is not finite or below 0"
    if not ((confidences >= 0) & (confidences <= 1)).all():
        return "judgement with a confidence outside 0 to 1"
    return None


def _first(values: Sequence[float], wrong: Sequence[bool], num_drafts: int) -> str:
    """The first value that is wrong, with its place."""
    at = wrong.index(True)
    return f"{values[at]} at entry {at // num_drafts}, position {at % num_drafts}"
