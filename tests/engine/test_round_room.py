"""What finds no room in a STEP, by the worker's limit or by the deadline, waits a little and never for ever."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from tests.fakes.channel import WrappedChannel
from tests.fakes.drafters import ArithmeticDrafter, info
from tests.fakes.engine_world import SLOTS, Row, World, WorldRequest

from farspark.clock import Deadline
from farspark.engine.breaker import State
from farspark.engine.result import RoundOutcome
from farspark.transport import Channel, Piece
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


class NarrowChannel(WrappedChannel):
    """Until a round's deadline so many bytes fit through it."""

    def __init__(self, inner: Channel, room: int) -> None:
        super().__init__(inner)
        self._room = room

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        if sum(memoryview(piece).nbytes for piece in pieces) > self._room:
            self.close()
            raise TimeoutError("deadline passed while sending a frame; closed, because a part of the frame was sent")
        super().send(pieces, deadline)


class NarrowWorld(World):
    def _connect(self, endpoint: Any, deadline: Deadline) -> Any:
        return NarrowChannel(super()._connect(endpoint, deadline), self.most * self.info.row_bytes)


def test_windows_that_do_not_get_there_in_time_go_a_few_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    narrow = 3 * RING
    with NarrowWorld(
        drafter=ArithmeticDrafter(info(num_drafts=N, context=40, slots=SLOTS)),
        ring=RING,
        most=narrow,
        trip=3,
        cooldown=1000,
    ) as world:
        requests = prefill(world, rows=RING)
        world.client_notices()
        world.wait_ready()
        world.lose(*(Row(request, 0, sampled=True) for request in requests))
        rounds = 0
        while not all(decode(world, *requests)):
            rounds += 1
            assert rounds < 10
            world.wait_ready()
        assert world.round.breaker.state is State.CLOSED
        assert "a STEP of 120 rows was not answered in time; at most 60 at once" in caplog.text
        # What is quick enough takes more again.
        assert world.round._rows_per_step(world.client.connection()) > 120  # type: ignore[arg-type]


def test_a_worker_that_is_silent_makes_no_step_smaller() -> None:
    with a_world() as world:
        requests = prefill(world, rows=RING)
        channel = world.channel
        assert channel is not None
        for _ in range(2):
            channel.late = True
            assert world.step(*(Row(request, 1, sampled=True) for request in requests)) is RoundOutcome.FAILED
        world.lose(*(Row(request, 0, sampled=True) for request in requests))
        assert decode(world, *requests) == [True] * SLOTS
