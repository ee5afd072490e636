"""The simulator itself: it runs, it finds what is planted, and it shrinks."""

from __future__ import annotations

import random
import secrets

import pytest
from tests.fakes.engine_world import World
from tests.sim.program import Fault, Mismatch, Op, Round, Tally, random_program, run, shrink

from farspark.engine.slots import Slots
from farspark.wire.layout import RequestStatus


def test_random_programs_draft_what_the_reference_drafts() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    tally = Tally()
    for offset in range(4):
        run(list(random_program(random.Random(seed + offset), 150)), tally, seed=seed + offset)
    print(tally)
    assert tally.checked > 300
    assert tally.neighbours > 100
    assert tally.joint > 0
    assert tally.hangs == 0
    assert len(tally.faults) >= 6


class ForgetfulSlots(Slots):
    """Believes that a slot whose round failed is still as the worker had it."""

    def mark_dirty(self, slot: int) -> None:
        pass

    def settle(self, slot: int, status: RequestStatus, window_rows: int) -> None:
        super().settle(slot, RequestStatus.OK, window_rows)


def test_a_planted_fault_is_found_and_shrunk_to_a_small_program(monkeypatch: pytest.MonkeyPatch) -> None:
    init = World.__post_init__

    def forgetful(world: World) -> None:
        init(world)
        world.round.slots = ForgetfulSlots(world.shape.slots, ring=world.shape.ring, context=world.shape.context)

    monkeypatch.setattr(World, "__post_init__", forgetful)
    program: list[Op] = [
        *[Round(((slot, 3, True), (slot + 1, 1, True))) for slot in (0, 1, 2)],
        Round(((1, 1, True),), Fault.INTERNAL),
        *[Round(((slot, 1, True),)) for slot in (0, 1, 2, 3)],
    ]
    with pytest.raises(Mismatch):
        run(program, Tally())
    small = shrink(program, 0)
    assert 1 <= len(small) <= 3
    assert any(isinstance(op, Round) and op.fault is Fault.INTERNAL for op in small)
