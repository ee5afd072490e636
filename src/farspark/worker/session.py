"""One engine's slots, seen from the worker: judges every entry of a STEP, knows which positions the drafter holds for whom,
and turns the drafter's answer into a reply. Pure: no socket, no clock, no torch.

An entry that is refused leaves its slot as it was, but for NEW_GEN of a generation that is not stale: that voids the slot
whatever else is wrong with the entry, because the engine has said that everything held for it is void.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from farspark.stats import Stats
from farspark.wire.layout import EntryFlag, RequestStatus, StepFlag
from farspark.wire.messages import Entry, EntryReply, Freed, Step, StepReply
from farspark.worker.batch import DraftBatch, DraftEntry, DrafterInfo, DraftResult

# Plain integers: the operators of enum.IntFlag take microseconds.
_NEED_DRAFT, _NEW_GEN = int(EntryFlag.NEED_DRAFT), int(EntryFlag.NEW_GEN)
_MARGINS, _NO_FLAGS = int(StepFlag.MARGINS), StepFlag(0)
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
    """A judged STEP. `batch` is what the drafter must do; None where there is nothing to do."""

    step: Step
    batch: DraftBatch | None
    statuses: list[RequestStatus]  # [entries]; those in the batch: what they become if the drafter succeeds
    held: list[_Held | None]  # [entries]
    batched: Sequence[int]  # the entry of each entry of the batch


class _RowPicker:
    """Walks over packed rows and picks some: as a view where they are neighbours, joined where they are not."""

    def __init__(self, rows: memoryview, row_bytes: int) -> None:
        self._rows = rows
        self._row_bytes = row_bytes
        self._pieces: list[memoryview] = []
        self._from = 0  # the piece in the making, in bytes
        self._to = 0

    def skip(self, n_rows: int) -> None:
        if not n_rows:
            return
        if self._to > self._from:
            self._pieces.append(self._rows[self._from : self._to])
        self._from = self._to = self._to + n_rows * self._row_bytes

    def pick(self, n_rows: int, newest: int) -> None:
        """Of the next `n_rows`, the `newest` last."""
        if n_rows != newest:
            self.skip(n_rows - newest)
        self._to += newest * self._row_bytes

    def picked(self) -> memoryview:
        last = self._rows[self._from : self._to]
        return memoryview(b"".join([*self._pieces, last])) if self._pieces else last


class Session:
    """Used under the drafting lock, like the pool that it draws from."""

    def __init__(self, info: DrafterInfo, pool: SlotPool, *, slots: int, context: int, stats: Stats) -> None:
        self._info = info
        self._pool = pool
        self._slots = slots
        self._context = context
        self._stats = stats
        self._held: dict[int, _Held] = {}

    def __repr__(self) -> str:
        return f"<Session slots {len(self._held)} of {self._slots}, context {self._context}>"

    @property
    def slots_in_use(self) -> int:
        return len(self._held)

    def plan(self, step: Step) -> Plan:
        """Judge every entry on its own and build the drafter's batch from those that pass.

        The windows are moved on as if the drafter will succeed; `complete` voids them where it did not.
        """
        statuses: list[RequestStatus] = []
        held_of: list[_Held | None] = []
        batched: list[int] = []
        drafts: list[DraftEntry] = []
        rows = _RowPicker(step.rows, self._info.row_bytes)
        seen: set[int] = set()
        for index, entry in enumerate(step.entries):
            slot = entry.slot
            if slot in seen or slot >= self._slots:
                status, held, draft = RequestStatus.BAD_ENTRY, None, None
            else:
                seen.add(slot)
                status, held, draft = self._judge(entry, self._held.get(slot))
            statuses.append(status)
            held_of.append(held)
            if draft is None:
                rows.skip(entry.n_rows)
            else:
                batched.append(index)
                drafts.append(draft)
                rows.pick(entry.n_rows, draft.n_rows)
        batch = DraftBatch(drafts, rows.picked(), bool(int(step.flags) & _MARGINS)) if drafts else None
        return Plan(step, batch, statuses, held_of, batched)

    def complete(self, plan: Plan, result: DraftResult | None, worker_us: int) -> StepReply:
        """The reply to a planned STEP. `result` is None where the drafter failed: every entry of the batch is INTERNAL."""
        step, statuses = plan.step, plan.statuses
        if result is None or not all(result.ok):
            for index, entry_index in enumerate(plan.batched):
                if result is None or not result.ok[index]:
                    statuses[entry_index] = RequestStatus.INTERNAL
                    held = plan.held[entry_index]
                    assert held is not None
                    held.is_void = True
        replies = [
            EntryReply(
                entry.slot,
                entry.generation,
                0 if held is None or held.is_void else held.end - held.start,
                status,
            )
            for entry, held, status in zip(step.entries, plan.held, statuses, strict=True)
        ]
        for status in set(statuses):
            self._stats.add(_COUNTERS[status], statuses.count(status))
        margins: memoryview | None = None
        if result is not None and len(plan.batched) == len(step.entries):
            tokens, confidences, margins = result.tokens, result.confidences, result.margins
        else:
            tokens = self._spread(plan, result.tokens if result else None, "i")
            confidences = self._spread(plan, result.confidences if result else None, "f")
            if int(step.flags) & _MARGINS:
                margins = self._spread(plan, result.margins if result else None, "f")
        return StepReply(
            step.step_id,
            self._info.num_drafts,
            worker_us,
            replies,
            tokens,
            confidences,
            margins,
            _NO_FLAGS if margins is None else StepFlag.MARGINS,
        )

    def free(self, freed: Sequence[Freed]) -> None:
        """Forget these slots, but for those that have meanwhile got a newer generation, and those never heard of."""
        for one in freed:
            held = self._held.get(one.slot)
            if held is not None and one.generation >= held.generation:
                del self._held[one.slot]
                self._pool.give_back(held.drafter_slot)

    def close(self) -> None:
        """Give every slot back. Idempotent."""
        for held in self._held.values():
            self._pool.give_back(held.drafter_slot)
        self._held.clear()

    def _judge(self, entry: Entry, held: _Held | None) -> tuple[RequestStatus, _Held | None, DraftEntry | None]:
        slot, generation, first_pos, n_rows, anchor_token, anchor_pos, _, k_window, n_out = entry
        flags = int(entry.flags)
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
        if anchor_pos != first_pos + n_rows or anchor_pos > self._info.max_position:
            return RequestStatus.BAD_ENTRY, held, None
        # An anchor that nobody drafts from may be any placeholder.
        if needs_draft and not (
            n_rows and 0 <= anchor_token < self._info.vocab_size and n_out <= self._info.num_drafts
        ):
            return RequestStatus.BAD_ENTRY, held, None
        if reset:
            assert held is not None
            held.start = first_pos
        elif held is None or held.is_void or generation != held.generation:
            return RequestStatus.NO_WINDOW, held, None
        elif first_pos != held.end:
            return RequestStatus.GAP, held, None
        elif k_window:
            # The rows of a verified step are the anchor's and one for each accepted draft.
            self._stats.add("drafts_verified", k_window)
            self._stats.add("drafts_accepted", max(0, min(n_rows - 1, k_window)))
        held.is_void = False
        held.end = anchor_pos
        window_from = max(held.start, anchor_pos - self._context)
        held.start = window_from
        # Rows in front of the context are dropped here; what the slot holds is then out of sight too, and the rest does
        # not continue it.
        if window_from > first_pos:
            first_pos, reset = window_from, True
        draft = DraftEntry(
            held.drafter_slot,
            reset,
            first_pos,
            anchor_pos - first_pos,
            window_from,
            anchor_token if needs_draft else 0,
            needs_draft,
            n_out or self._info.num_drafts,
        )
        if not needs_draft:
            return RequestStatus.NOT_NEEDED, held, draft
        if window_from and anchor_pos - window_from < self._context:
            return RequestStatus.PARTIAL_WINDOW, held, draft
        return RequestStatus.OK, held, draft

    def _spread(self, plan: Plan, array: memoryview | None, kind: Literal["i", "f"]) -> memoryview:
        """The batch's array with zeros in place of the entries that are not in it."""
        width = 4 * self._info.num_drafts
        spread = bytearray(width * len(plan.step.entries))
        if array is not None:
            source = array.cast("B")
            for index, entry_index in enumerate(plan.batched):
                spread[entry_index * width : (entry_index + 1) * width] = source[index * width : (index + 1) * width]
        return cast(memoryview, memoryview(spread).cast(kind))
