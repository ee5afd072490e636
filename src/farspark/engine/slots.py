"""Rank 0's model of the world: per slot who owns it, which rows the ring holds, and what the worker is believed to hold.

Pure: positions in, decisions out. A slot index is reused by vLLM at once, so everything that leaves this file carries
the slot's generation.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

from farspark.wire.layout import EntryFlag, RequestStatus

# Plain integers, as in `wire.messages`.
_NEW_GEN: Final = int(EntryFlag.NEW_GEN)
_RESYNC: Final = int(EntryFlag.RESYNC)


@dataclass(slots=True)
class Slot:
    """The ring holds positions `ring_first .. end - 1`; `end` is the anchor's position."""

    owner: Hashable | None = None
    generation: int = 0
    ring_first: int = 0
    end: int = 0
    announced: bool = False  # the worker has this generation
    dirty: bool = False  # what the worker holds for it is unknown


class Increment(NamedTuple):
    """The rows of one slot that this round's gather packed: positions `first_pos .. first_pos + n_rows - 1`."""

    first_pos: int
    n_rows: int
    is_trimmed: bool  # older rows of the same step were left out: they lie outside the context


class Send(NamedTuple):
    """Which rows go to the worker, and with which flags."""

    first_pos: int
    n_rows: int
    flags: int  # of EntryFlag
    from_ring: bool


class Slots:
    """Owned by the thread that runs rounds."""

    def __init__(self, num_slots: int, *, ring: int, context: int) -> None:
        self._slots = [Slot() for _ in range(num_slots)]
        self._ring = ring
        self._context = context

    def __getitem__(self, slot: int) -> Slot:
        return self._slots[slot]

    def advance(self, slot: int, owner: Hashable, start_pos: int, valid_rows: int) -> Increment:
        """Take note of this step's rows: the ring has positions `start_pos .. start_pos + valid_rows - 1` of `owner` now.

        Rows that do not continue what the slot held (another owner, or the same one back at another position after a
        preemption) open a new generation.
        """
        state = self._slots[slot]
        if state.owner != owner or start_pos != state.end:
            state.owner = owner
            state.generation += 1
            state.announced = False
            state.dirty = False
            state.ring_first = start_pos
        state.end = start_pos + valid_rows
        state.ring_first = max(state.ring_first, state.end - self._ring)
        n_rows = min(valid_rows, self._context)
        return Increment(state.end - n_rows, n_rows, n_rows < valid_rows)

    def plan(self, slot: int, increment: Increment, most: int) -> Send:
        """What to send so that the worker holds the newest rows of `slot`; of those in the ring the newest `most`, for good: the
        older ones would never find room."""
        state = self._slots[slot]
        if state.announced and not state.dirty:
            # Rows outside the context were left out, so the packed ones do not continue the worker's window; they fill
            # the whole context, hence nothing that the reset forgets could have been seen.
            return Send(increment.first_pos, increment.n_rows, _NEW_GEN if increment.is_trimmed else 0, from_ring=False)
        if state.end - state.ring_first > increment.n_rows:
            state.ring_first = max(state.ring_first, state.end - most)
            return Send(state.ring_first, state.end - state.ring_first, _NEW_GEN | _RESYNC, from_ring=True)
        return Send(increment.first_pos, increment.n_rows, _NEW_GEN, from_ring=False)

    def in_ring(self, slot: int) -> tuple[int, int]:
        """The first position that the ring has of `slot`, and how many."""
        state = self._slots[slot]
        return state.ring_first, state.end - state.ring_first

    def settle(self, slot: int, status: RequestStatus, window_rows: int) -> None:
        """The worker answered for `slot`; after a partial window resend only if the ring has more to give."""
        state = self._slots[slot]
        if not status.is_usable:
            state.dirty = True
            return
        state.announced = True
        in_ring = state.end - state.ring_first
        state.dirty = status is RequestStatus.PARTIAL_WINDOW and in_ring > window_rows

    def mark_dirty(self, slot: int) -> None:
        self._slots[slot].dirty = True

    def forget_all(self) -> None:
        """Rows were written that nobody took note of: every slot starts afresh with its next ones."""
        for state in self._slots:
            state.owner = None

    def mark_all_dirty(self) -> None:
        """The connection changed: nobody knows what the worker holds."""
        for state in self._slots:
            state.dirty = True
