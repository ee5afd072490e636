"""What finds no room in a STEP waits a little and never for ever."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.drafters import ArithmeticDrafter, info
from tests.fakes.engine_world import SLOTS, Row, World, WorldRequest

from farspark.wire.layout import RequestStatus

N, RING = 2, 30
DECODE_ROWS = SLOTS * (N + 1)


def a_world(**settings: Any) -> World:
    return World(drafter=ArithmeticDrafter(info(num_drafts=N, context=40, slots=SLOTS)), ring=RING, **settings)


def prefill(world: World, rows: int) -> list[WorldRequest]:
    """All slots, one request after another."""
    requests = [world.admit(slot) for slot in range(SLOTS)]
    for request in requests:
        decode(world, request, rows=rows)
        assert world.result.ok[0]
    return requests


def decode(world: World, *requests: WorldRequest, rows: int = 1) -> list[bool]:
    """A round of one row each; whether each has drafts, which must be right."""
    step = [Row(request, rows, sampled=True) for request in requests]
    world.step(*step)
    statuses = world.round.last_drafts.entry_status
    for index, row in enumerate(step):
        if statuses.get(index, RequestStatus.INTERNAL).is_usable:
            world.keep(row)
            world.check(index, row)
        else:
            world.lose(row)
    return [bool(one) for one in world.result.ok[: len(step)]]


@pytest.mark.parametrize("max_rows", [RING, DECODE_ROWS + 1])
def test_FAIL_LIFETIME_a_window_of_more_rows_than_a_step_may_have_is_cut_to_its_newest(max_rows: int) -> None:
    with a_world(max_rows=max_rows, most=min(RING, max_rows - DECODE_ROWS)) as world:
        request = world.admit(0)
        for _ in range(5):
            assert decode(world, request, rows=10) == [True]
        world.round.slots.mark_dirty(0)
        world.lose(Row(request, 0, sampled=True))
        for _ in range(3):
            assert decode(world, request) == [True]
        assert world.stats.count("resync_rounds") == 1


@pytest.mark.parametrize("order", [1, -1])
def test_windows_that_wait_for_room_never_cost_another_slot_its_own(order: int) -> None:
    """In the order of the batch, or against it: those that wait may stand in front."""
    with a_world(max_rows=2 * RING) as world:
        requests = prefill(world, rows=RING)
        world.round.slots.mark_all_dirty()
        world.lose(*(Row(request, 0, sampled=True) for request in requests))
        drafted = 0
        for _ in range(3):
            before, drafted = drafted, sum(decode(world, *requests))
            assert drafted >= min(before + 1, SLOTS)
            requests = requests[::order]
            requests.sort(key=lambda request: request.clean)
        assert drafted == SLOTS
