"""A round whose result is handed to somebody: in time, too late, skipped, and with windows that are still on their way."""

from __future__ import annotations

import numpy as np
import pytest
from tests.fakes.engine_world import RING, Row, World

from farspark.engine.result import PackedResult, RoundOutcome
from farspark.engine.round import Deliver, MetaColumn, Phase, RoundInput, RoundRequest, WindowPending


def good(world: World, *rows: Row) -> None:
    assert world.step(*rows) is RoundOutcome.OK, world.stats.counters()
    world.keep(*rows)
    for index, row in enumerate(rows):
        world.check(index, row)


def hand_to(world: World, taker: Deliver) -> None:
    """Whose result every round of `world` is from here on."""
    run = world.round.run

    def handed(step: RoundInput, result: PackedResult, deliver: Deliver = taker) -> RoundOutcome:
        return run(step, result, deliver)

    world.round.run = handed  # type: ignore[method-assign]


def nobody() -> bool:
    return False


def test_the_result_is_whole_and_nothing_is_counted_when_it_is_handed_over() -> None:
    with World() as world:
        row = Row(world.admit(1), 3, sampled=True)
        seen: list[tuple[bool, RoundOutcome, int]] = []

        def deliver() -> bool:
            seen.append((bool(world.result.ok[0]), world.result.outcome, world.stats.count("rounds_ok")))
            return True

        hand_to(world, deliver)
        good(world, row)
        assert seen == [(True, RoundOutcome.OK, 0)]
        assert world.stats.count("rounds_ok") == 1


def test_late_reply_a_result_that_nobody_takes_is_no_draft_and_its_slots_send_their_windows() -> None:
    with World(trip=3) as world:
        request = world.admit(2)
        good(world, Row(request, 4, sampled=True))
        hand_to(world, nobody)
        lost = Row(request, 2, sampled=True)
        assert world.step(lost) is RoundOutcome.FAILED
        assert not world.result.tokens.any()
        assert not world.result.confidences.any()
        world.lose(lost)
        counters = world.stats.counters()
        assert counters["watchdog_preempted"] == counters["watchdog_preempted_decode"] == 1
        assert counters["fallback_preempted"] == counters["rounds_failed"] == counters["undrafted_dropped"] == 1
        assert world.round.breaker.failures_in_a_row == 0
        hand_to(world, lambda: True)
        # Rows may have been replaced while they were sent, so the worker gets all of them anew.
        good(world, Row(request, 1, sampled=True))
        assert world.stats.counters()["resync_rows"] == min(7, RING)


def test_a_failure_that_nobody_takes_keeps_its_reason() -> None:
    with World() as world:
        request = world.admit(0)
        good(world, Row(request, 2, sampled=True))
        assert world.channel is not None
        world.channel.status = 8
        hand_to(world, nobody)
        assert world.step(Row(request, 2, sampled=True)) is RoundOutcome.FAILED
        counters = world.stats.counters()
        assert counters["watchdog_preempted"] == 1
        assert counters["rounds_failed"] == 1
        assert "fallback_preempted" not in counters


def test_ring_rewind_a_skipped_round_keeps_the_books_and_sends_nothing() -> None:
    with World() as world:
        request = world.admit(3)
        good(world, Row(request, 3, sampled=True))
        sent = world.stats.count("bytes_sent")
        meta = np.zeros((1, len(MetaColumn)), dtype=np.int32)
        meta[0] = (request.end, 2, 7, 1)
        owner = (request.number, request.admission)
        world.round.skip(RoundInput([RoundRequest(3, owner, 5)], meta, memoryview(b""), Phase.DECODE))
        request.end += 2
        request.clean = False
        assert world.stats.count("bytes_sent") == sent
        assert world.stats.count("drafted_tokens") == 5
        assert world.stats.count("accepted_drafts") == 1
        good(world, Row(request, 1, sampled=True))
        assert world.stats.count("resync_rows") == 6


def test_ring_valid_after_rounds_of_which_nothing_is_known_every_slot_starts_afresh() -> None:
    with World() as world:
        request = world.admit(1)
        good(world, Row(request, 5, sampled=True))
        world.round.forget(2)
        assert world.stats.count("fallback_preempted") == world.stats.count("rounds_failed") == 2
        request.end += 4  # what went by unseen
        request.start = request.end
        request.clean = False
        good(world, Row(request, 2, sampled=True))
        assert world.stats.count("resync_rounds") == 0


@pytest.mark.parametrize("others", [0, 1])
def test_a_request_whose_window_is_on_its_way_is_left_out_and_the_others_are_served(others: int) -> None:
    with World() as world:
        late = world.admit(0)
        clean = [world.admit(slot) for slot in range(1, 1 + others)]
        good(world, Row(late, 4, sampled=True), *[Row(one, 1, sampled=True) for one in clean])
        world.round.slots.mark_dirty(0)
        window = world.window
        asked: list[int] = []

        def pending(slot: int, first_pos: int, n_rows: int) -> memoryview:
            asked.append(slot)
            raise WindowPending

        world.window = pending  # type: ignore[method-assign]
        rows = [Row(late, 1, sampled=True), *[Row(one, 1, sampled=True) for one in clean]]
        outcome = world.step(*rows)
        assert asked == [0]
        assert world.stats.count("entries_resync_pending") == 1
        if others:
            assert outcome is RoundOutcome.SOME_FAILED
            world.check(1, rows[1])
            assert not world.result.ok[0]
        else:
            assert outcome is RoundOutcome.FAILED
            assert world.stats.count("fallback_resync_pending") == 1
        world.lose(rows[0])
        world.window = window  # type: ignore[method-assign]
        good(world, Row(late, 1, sampled=True))
