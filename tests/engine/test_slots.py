"""Slots: positions in, decisions out."""

from __future__ import annotations

import random

from farspark.engine.slots import Increment, Send, Slots
from farspark.wire.layout import EntryFlag, RequestStatus

NEW = EntryFlag.NEW_GEN
RESYNC = EntryFlag.NEW_GEN | EntryFlag.RESYNC


def announced(slots: Slots, slot: int, owner: str, start: int, rows: int) -> None:
    slots.plan(slot, slots.advance(slot, owner, start, rows), 99)
    slots.settle(slot, RequestStatus.OK, rows)


def test_the_first_rows_of_a_request_are_a_new_generation() -> None:
    slots = Slots(2, ring=8, context=16)
    increment = slots.advance(1, "a", 0, 5)
    assert increment == Increment(0, 5, False)
    assert slots.plan(1, increment, 99) == Send(0, 5, NEW, from_ring=False)
    assert slots[1].generation == 1


def test_rows_that_continue_an_announced_slot_are_an_increment() -> None:
    slots = Slots(1, ring=8, context=16)
    announced(slots, 0, "a", 0, 5)
    assert slots.plan(0, slots.advance(0, "a", 5, 3), 99) == Send(5, 3, EntryFlag(0), from_ring=False)
    assert slots[0].generation == 1


def test_LATE_REPLY_another_owner_of_the_slot_is_another_generation() -> None:
    slots = Slots(1, ring=8, context=16)
    announced(slots, 0, "a", 0, 5)
    assert slots.plan(0, slots.advance(0, "b", 5, 3), 99) == Send(5, 3, NEW, from_ring=False)
    assert slots[0].generation == 2
    assert slots[0].ring_first == 5


def test_APC_GAP_the_same_owner_back_at_another_position_is_another_generation() -> None:
    slots = Slots(1, ring=8, context=16)
    announced(slots, 0, "a", 0, 5)
    assert slots.plan(0, slots.advance(0, "a", 3, 3), 99) == Send(3, 3, NEW, from_ring=False)
    assert slots[0].generation == 2


def test_a_dirty_slot_is_sent_whole_from_the_ring() -> None:
    slots = Slots(1, ring=8, context=16)
    announced(slots, 0, "a", 0, 5)
    slots.mark_dirty(0)
    assert slots.plan(0, slots.advance(0, "a", 5, 1), 99) == Send(0, 6, RESYNC, from_ring=True)
    assert slots.plan(0, slots.advance(0, "a", 6, 6), 99) == Send(4, 8, RESYNC, from_ring=True)
    assert slots[0].generation == 1


def test_a_dirty_slot_whose_increment_is_its_window_is_not_a_resync() -> None:
    slots = Slots(1, ring=4, context=16)
    announced(slots, 0, "a", 0, 5)
    slots.mark_dirty(0)
    assert slots.plan(0, slots.advance(0, "a", 5, 6), 99) == Send(5, 6, NEW, from_ring=False)


def test_CHUNK_TRIM_a_chunk_beyond_the_context_starts_the_window_afresh() -> None:
    slots = Slots(1, ring=8, context=16)
    announced(slots, 0, "a", 0, 5)
    increment = slots.advance(0, "a", 5, 40)
    assert increment == Increment(29, 16, True)
    assert slots.plan(0, increment, 99) == Send(29, 16, NEW, from_ring=False)


def test_a_failed_status_makes_the_slot_dirty_and_a_usable_one_cleans_it() -> None:
    slots = Slots(1, ring=8, context=16)
    announced(slots, 0, "a", 0, 5)
    for status in RequestStatus:
        slots.settle(0, status, window_rows=5)
        assert slots[0].dirty is not status.is_usable


def test_a_partial_window_is_resent_only_if_the_ring_holds_more() -> None:
    slots = Slots(1, ring=8, context=16)
    slots.advance(0, "a", 100, 6)
    slots.settle(0, RequestStatus.PARTIAL_WINDOW, window_rows=6)
    assert not slots[0].dirty
    slots.settle(0, RequestStatus.PARTIAL_WINDOW, window_rows=3)
    assert slots[0].dirty


def test_RING_REWIND_the_ring_holds_the_newest_committed_rows_always() -> None:
    """10,000 random steps against a list: rows held are the newest min(ring, committed) ones."""
    rng = random.Random(5)
    slots = Slots(3, ring=7, context=20)
    committed: list[list[int]] = [[], [], []]
    owners = [0, 0, 0]
    for _ in range(10_000):
        slot = rng.randrange(3)
        if rng.random() < 0.02:
            owners[slot] += 1
            committed[slot] = []
        # A prefix-cache hit may start a request anywhere.
        start = committed[slot][-1] + 1 if committed[slot] else rng.randrange(50)
        rows = rng.choice([1, 1, 2, 6, 30])
        increment = slots.advance(slot, owners[slot], start, rows)
        committed[slot] += range(start, start + rows)
        held = list(range(slots[slot].ring_first, slots[slot].end))
        assert held == committed[slot][-7:]
        assert (
            list(range(increment.first_pos, increment.first_pos + increment.n_rows))
            == committed[slot][-min(rows, 20) :]
        )
