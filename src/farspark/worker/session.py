"""One engine's slots, seen from the worker: judges every entry of a STEP, knows which positions the drafter holds for whom,
and turns the drafter's answer into a reply. Pure: no socket, no clock, no torch.

An entry that is refused leaves its slot as it was, but for NEW_GEN of a generation that is not stale: that voids the slot
whatever else is wrong with the entry, because the engine has said that everything held for it is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import Literal, NamedTuple, cast

from farspark.errors import ProtocolError
from farspark.native.round_calls import Made, RoundCalls
from farspark.stats import Stats
from farspark.wire import layout
from farspark.wire.layout import SUPPORT_IDS, EntryFlag, RequestStatus, StepFlag
from farspark.wire.messages import (
    Entry,
    EntryReply,
    Freed,
    Judge,
    Judgement,
    SampledDrafts,
    Sampling,
    Step,
    StepReply,
    make_entry_reply,
    make_step_reply,
)
from farspark.worker.batch import (
    DraftBatch,
    DraftEntry,
    DrafterInfo,
    DraftResult,
    Judging,
    make_draft_batch,
    make_draft_entry,
)

# Plain integers: the operators of enum.IntFlag take microseconds.
_NEED_DRAFT, _NEW_GEN = int(EntryFlag.NEED_DRAFT), int(EntryFlag.NEW_GEN)
_MARGINS, _SAMPLED = int(StepFlag.MARGINS), int(StepFlag.SAMPLED)
_GREEDY = repeat(Sampling(0, 0.0))
_INFINITY = float("inf")
# An enum's member is looked up ten times as slowly as a name of the module.
_OK, _PARTIAL_WINDOW = RequestStatus.OK, RequestStatus.PARTIAL_WINDOW
_NOT_NEEDED, _BAD_ENTRY = RequestStatus.NOT_NEEDED, RequestStatus.BAD_ENTRY
_STEP_HEADERS = layout.HEADER.size + layout.STEP.size
_MADE: Made = (Entry, EntryReply, DraftEntry, _OK, _PARTIAL_WINDOW)
_COUNTERS = {status: f"entries_{status.name.lower()}" for status in RequestStatus}


class SlotPool:
    """The drafter's slots, shared by all sessions; each is lent to one engine slot at a time."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free = list(range(slots - 1, -1, -1))

    @property
    def in_use(self) -> int:
        return self.slots - len(self._free)

    def take(self) -> int | None:
        """A slot that nobody has, or None. The newest returned comes first: its memory is warm."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        if not 0 <= slot < self.slots or slot in self._free:
            raise ValueError(f"slot {slot} is not lent")
        self._free.append(slot)


@dataclass(slots=True)
class _Held:
    """What the drafter holds for one engine slot: positions `start .. end - 1`, within the session's context."""

    drafter_slot: int
    generation: int
    start: int = 0
    end: int = 0
    is_void: bool = True  # nothing is held, until NEW_GEN


class Plan(NamedTuple):
    """A judged STEP."""

    step: Step
    replies: list[EntryReply]  # [entries]; what they become if the drafter succeeds
    drafts: list[DraftEntry]  # what the drafter must do; empty where there is nothing to do
    held: list[_Held]  # of each of the drafts
    places: list[int]  # the entry of each of the drafts
    takes_all_rows: bool  # the rows of the drafts are all rows of the step
    verified: int  # drafts that the target verified before this step
    accepted: int  # of these


class _Judgeable(NamedTuple):
    """The newest step, if its drafter can still judge other drafts for it."""

    step_id: int
    drafted: dict[int, int]  # entry of the step -> entry of the batch, of those with drafts
    places: dict[int, int]  # slot -> entry of the step, of the same
    judging: Judging


class Session:
    """A STEP is judged under the lock of the sessions, which guards the pool too; `complete` and `judge` run in the turn."""

    def __init__(self, info: DrafterInfo, pool: SlotPool, *, slots: int, context: int, stats: Stats) -> None:
        self._info = info
        self._pool = pool
        self._slots = slots
        self._context = context
        self.stats = stats
        self.is_closed = False  # for good: its slots may be another's
        self._held: dict[int, _Held] = {}
        self._judgeable: _Judgeable | None = None

    def __repr__(self) -> str:
        return f"<Session slots {len(self._held)} of {self._slots}, context {self._context}>"

    @property
    def slots_in_use(self) -> int:
        return len(self._held)

    def plan(self, step: Step) -> Plan:
        """Judge every entry on its own. The rows are not looked at: they may still be on their way.

        The windows are moved on as if the drafter will succeed; `complete` voids them where it did not.
        """
        replies: list[EntryReply] = []
        drafts: list[DraftEntry] = []
        held_of: list[_Held] = []
        places: list[int] = []
        n_rows = verified = accepted = 0
        seen: set[int] = set()
        for entry, sampling in zip(step.entries, step.sampling or _GREEDY, strict=False):
            slot = entry.slot
            if slot in seen or slot >= self._slots:
                replies.append(make_entry_reply((slot, entry.generation, 0, _BAD_ENTRY)))
                continue
            seen.add(slot)
            status, held, draft = self._judge(entry, self._held.get(slot), sampling)
            if draft is not None:
                assert held is not None
                places.append(len(replies))
                drafts.append(draft)
                held_of.append(held)
                n_rows += draft.n_rows
                if entry.k_window and not int(entry.flags) & _NEW_GEN:
                    # The rows of a verified step are the anchor's and one for each accepted draft.
                    verified += entry.k_window
                    accepted += max(0, min(entry.n_rows - 1, entry.k_window))
            window_rows = 0 if held is None or held.is_void else held.end - held.start
            replies.append(make_entry_reply((slot, entry.generation, window_rows, status)))
        takes_all_rows = n_rows * self._info.row_bytes == len(step.rows)
        return Plan(step, replies, drafts, held_of, places, takes_all_rows, verified, accepted)

    def begin(
        self, calls: RoundCalls, frame: memoryview, arrived: int, session_id: int, max_rows: int
    ) -> tuple[int, Plan, bytearray] | None:
        """`plan` of a STEP's frame in which nothing is out of the ordinary: its sequence, the plan, the expected reply's head.

        None for any other frame, and nothing is changed then.
        """
        info = self._info
        rules = (
            self._slots, self._context, info.row_bytes, max_rows, info.num_drafts, info.vocab_size, info.max_position
        )  # fmt: skip
        found = calls.begin_step(frame, arrived, session_id, rules, self._held, _MADE)
        if found is None:
            return None
        sequence, step_id, flags, entries, replies, drafts, held, places, verified, accepted, head = found
        step = Step(step_id, entries, frame[_STEP_HEADERS + layout.ENTRY.size * len(entries) :], flags)
        return sequence, Plan(step, replies, drafts, held, places, True, verified, accepted), head

    def batch(self, plan: Plan) -> DraftBatch | None:
        """What the drafter must do, with its rows, which must all be there; None where there is nothing to do."""
        if not plan.drafts:
            return None
        rows = plan.step.rows if plan.takes_all_rows else self._pick(plan)
        return make_draft_batch((plan.drafts, rows, bool(int(plan.step.flags) & _MARGINS)))

    def complete(self, plan: Plan, result: DraftResult | None, worker_us: int) -> StepReply:
        """The reply to a planned STEP; once it is sent, `count` takes note of both.

        `result` is None where the drafter failed: every entry of the batch is INTERNAL.
        """
        step, replies, drafts, held_of, places, *_ = plan
        if result is None or not all(result.ok):
            replies = list(replies)
            for index, (place, held) in enumerate(zip(places, held_of, strict=True)):
                if result is None or not result.ok[index]:
                    held.is_void = True
                    replies[place] = replies[place]._replace(window_rows=0, status=RequestStatus.INTERNAL)
        self._judgeable = None
        if result is not None and result.judge is not None:
            drafted = {
                place: index for index, place in enumerate(places) if drafts[index].need_draft and result.ok[index]
            }
            slots = {replies[place].slot: place for place in drafted}
            self._judgeable = _Judgeable(step.step_id, drafted, slots, result.judge)
        margins: memoryview | None = None
        if result is not None and len(drafts) == len(replies):
            tokens, confidences, margins = result.tokens, result.confidences, result.margins
        else:
            tokens = self._spread(plan, result.tokens if result else None, "i")
            confidences = self._spread(plan, result.confidences if result else None, "f")
            if int(step.flags) & _MARGINS:
                margins = self._spread(plan, result.margins if result else None, "f")
        flags = 0 if margins is None else _MARGINS
        sampled: SampledDrafts | None = None
        if int(step.flags) & _SAMPLED:
            sampled = self._sampled(plan, result)
            flags |= _SAMPLED
        return make_step_reply(
            (step.step_id, self._info.num_drafts, worker_us, replies, tokens, confidences, margins, flags, sampled)
        )

    def count(self, plan: Plan, reply: StepReply, stats: Stats | None = None) -> None:
        """Take note, in `self.stats` or elsewhere, of a step that is done: `reply` is `complete`'s."""
        stats = stats or self.stats
        if plan.verified:
            stats.add("drafts_verified", plan.verified)
            stats.add("drafts_accepted", plan.accepted)
        entries = reply.entries
        asked = zip(plan.places, plan.drafts, strict=True)
        drafts = sum([draft.n_out for place, draft in asked if entries[place].status.has_drafts])
        if drafts:
            stats.add("drafts", drafts)
        statuses = [entry.status for entry in entries]
        for status in set(statuses):
            stats.add(_COUNTERS[status], statuses.count(status))

    def judge(self, judge: Judge) -> Judgement:
        """Raises ProtocolError where there is nothing to judge by, or the chains are not ones of this drafter's size."""
        kept, num_drafts = self._judgeable, self._info.num_drafts
        if kept is None or judge.step_id != kept.step_id:
            newest = "there is none" if kept is None else f"that is {kept.step_id}"
            raise ProtocolError(
                f"JUDGE of step {judge.step_id}; only the newest step with margins can be judged, and {newest}"
            )
        if judge.num_drafts != num_drafts:
            raise ProtocolError(f"JUDGE of chains of {judge.num_drafts} drafts; this worker drafts {num_drafts}")
        # Each once, so that the drafter's work is bounded by the step's.
        if len(set(judge.places)) != len(judge.places):
            raise ProtocolError("JUDGE of an entry twice")
        for place in judge.places:
            if place not in kept.drafted:
                raise ProtocolError(f"JUDGE of entry {place}, which has no drafts in step {judge.step_id}")
        if not all(0 <= token < self._info.vocab_size for token in judge.tokens):
            raise ProtocolError(f"JUDGE of a token outside 0 .. {self._info.vocab_size - 1}")
        judged = kept.judging([kept.drafted[place] for place in judge.places], judge.tokens)
        return Judgement(judge.step_id, num_drafts, *judged)

    def free(self, freed: Sequence[Freed]) -> None:
        """Forget these slots, but for those that have meanwhile got a newer generation, and those never heard of."""
        for one in freed:
            held = self._held.get(one.slot)
            if held is not None and one.generation >= held.generation:
                del self._held[one.slot]
                self._pool.give_back(held.drafter_slot)
                # The drafter may look at the slot again to judge, and from here on it may be another's.
                if self._judgeable is not None and one.slot in self._judgeable.places:
                    self._judgeable.drafted.pop(self._judgeable.places[one.slot], None)

    def close(self) -> None:
        """Give every slot back. Idempotent."""
        self.is_closed = True
        self._judgeable = None
        for held in self._held.values():
            self._pool.give_back(held.drafter_slot)
        self._held.clear()

    def _judge(
        self, entry: Entry, held: _Held | None, sampling: Sampling
    ) -> tuple[RequestStatus, _Held | None, DraftEntry | None]:
        slot, generation, first_pos, n_rows, anchor_token, anchor_pos, flags, _, n_out = entry
        info, flags = self._info, int(flags)
        reset = bool(flags & _NEW_GEN)
        needs_draft = bool(flags & _NEED_DRAFT)
        if held is not None and generation < held.generation:
            return RequestStatus.STALE_GENERATION, held, None
        if reset:
            if held is None:
                drafter_slot = self._pool.take()
                if drafter_slot is None:
                    return RequestStatus.NO_CAPACITY, None, None
                held = self._held[slot] = _Held(drafter_slot, generation)
            held.generation = generation
            held.is_void = True
        if anchor_pos != first_pos + n_rows or anchor_pos > info.max_position:
            return _BAD_ENTRY, held, None
        seed, temperature = sampling
        # An anchor that nobody drafts from may be any placeholder, and so may a temperature.
        if needs_draft and not (
            n_rows
            and 0 <= anchor_token < info.vocab_size
            and n_out <= info.num_drafts
            and 0.0 <= temperature < _INFINITY
        ):
            return _BAD_ENTRY, held, None
        if reset:
            assert held is not None
            held.start = first_pos
        elif held is None or held.is_void or generation != held.generation:
            return RequestStatus.NO_WINDOW, held, None
        elif first_pos != held.end:
            return RequestStatus.GAP, held, None
        held.is_void = False
        held.end = anchor_pos
        window_from = max(held.start, anchor_pos - self._context)
        held.start = window_from
        # Rows in front of the context are dropped here; what the slot holds is then out of sight too, and the rest does
        # not continue it.
        if window_from > first_pos:
            first_pos, reset = window_from, True
        draft = make_draft_entry(
            (
                held.drafter_slot,
                reset,
                first_pos,
                anchor_pos - first_pos,
                window_from,
                anchor_token if needs_draft else 0,
                needs_draft,
                # Of an entry that only appends, whatever it says: what is handed on is in range.
                (n_out if needs_draft else 0) or info.num_drafts,
                seed,
                temperature if needs_draft else 0.0,
            )
        )
        if not needs_draft:
            return _NOT_NEEDED, held, draft
        if window_from and anchor_pos - window_from < self._context:
            return _PARTIAL_WINDOW, held, draft
        return _OK, held, draft

    def _pick(self, plan: Plan) -> memoryview:
        """The rows of the drafts, the newest of each entry's: a view where they are neighbours, else joined."""
        step, _, drafts, _, places, *_ = plan
        row_bytes = self._info.row_bytes
        ends = [row_bytes * n_rows for n_rows in accumulate([entry.n_rows for entry in step.entries])]
        pieces: list[tuple[int, int]] = []  # from, to
        for place, draft in zip(places, drafts, strict=True):
            start, end = ends[place] - row_bytes * draft.n_rows, ends[place]
            if pieces and pieces[-1][1] == start:
                start, _ = pieces.pop()
            pieces.append((start, end))
        views = [step.rows[start:end] for start, end in pieces]
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

    def _sampled(self, plan: Plan, result: DraftResult | None) -> SampledDrafts:
        drawn = None if result is None else result.drawn
        if drawn is not None and len(plan.drafts) == len(plan.replies):
            return SampledDrafts(*drawn)
        mask, support, q = (None, None, None) if drawn is None else drawn
        width = self._info.num_drafts * SUPPORT_IDS
        return SampledDrafts(
            self._spread(plan, mask, "i", 1),
            self._spread(plan, support, "i", width),
            self._spread(plan, q, "f", width),
        )

    def _spread(
        self, plan: Plan, array: memoryview | None, kind: Literal["i", "f"], values: int | None = None
    ) -> memoryview:
        """The batch's array, of so many values an entry (N if None), with zeros in place of the entries that are not in it."""
        width = 4 * (self._info.num_drafts if values is None else values)
        spread = bytearray(width * len(plan.replies))
        if array is not None:
            source = array.cast("B")
            for index, place in enumerate(plan.places):
                spread[place * width : (place + 1) * width] = source[index * width : (index + 1) * width]
        return cast(memoryview, memoryview(spread).cast(kind))
