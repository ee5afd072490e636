"""The round against a real worker: what is drafted, and what happens when anything breaks."""

from __future__ import annotations

import math
import random
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.drafters import ArithmeticDrafter
from tests.fakes.engine_world import CONTEXT, INFO, SLOTS, Row, World

from farspark.engine.replies import find_fault, find_fault_of_judgement
from farspark.engine.result import RoundOutcome
from farspark.engine.round import SILENT_STEPS
from farspark.wire.layout import EntryFlag, RequestStatus
from farspark.wire.messages import Entry, EntryReply, Judge, Judgement, SampledDrafts, StepReply


def good(world: World, *rows: Row) -> None:
    outcome = world.step(*rows)
    assert outcome is (RoundOutcome.OK if any(row.sampled for row in rows) else RoundOutcome.NOTHING), (
        world.stats.counters()
    )
    world.keep(*rows)
    for index, row in enumerate(rows):
        if row.sampled:
            world.check(index, row)


def failed(world: World, *rows: Row) -> None:
    assert world.step(*rows) is RoundOutcome.FAILED
    assert world.result.tokens.max() == 0
    assert world.result.confidences.max() == 0
    world.lose(*rows)


def test_prefill_chunks_and_decode_steps_draft_from_every_row() -> None:
    with World() as world:
        request = world.admit(2)
        good(world, Row(request, 4, sampled=False))
        good(world, Row(request, 3, sampled=True))
        good(world, Row(request, 6, sampled=True))
        good(world, Row(request, 1, sampled=True))
        assert world.stats.count("rounds_ok") == 4
        assert world.stats.count("rows_sent") == 14
        assert world.stats.count("req_status_not_needed") == 1


def test_several_requests_are_matched_by_request_in_any_order() -> None:
    with World(want_margin=True) as world:
        requests = [world.admit(slot) for slot in (3, 0, 2)]
        good(world, *[Row(request, n, sampled=True) for request, n in zip(requests, (5, 1, 12), strict=True)])
        good(world, *[Row(request, n, sampled=True) for request, n in zip(reversed(requests), (2, 1, 6), strict=True)])


def test_FAIL_LIFETIME_a_late_reply_costs_one_round_and_is_never_taken_for_the_next() -> None:
    with World() as world:
        request = world.admit(1)
        good(world, Row(request, 3, sampled=True))
        assert world.channel is not None
        world.channel.late = True
        failed(world, Row(request, 2, sampled=True))
        assert world.stats.count("fallback_timeout") == 1
        good(world, Row(request, 1, sampled=True))
        assert world.stats.count("late_replies") == 1
        assert world.stats.count("resync_rounds") == 1
        assert world.stats.count("hellos") == 1


def test_HALF_OPEN_a_connection_that_stays_silent_is_given_up_and_made_again() -> None:
    with World() as world:
        request = world.admit(1)
        good(world, Row(request, 3, sampled=True))
        for _ in range(SILENT_STEPS):
            assert world.channel is not None
            world.channel.late = True
            failed(world, Row(request, 1, sampled=True))
        assert world.stats.count("disconnects") == 1
        world.wait_ready()
        good(world, Row(request, 1, sampled=True))
        assert world.stats.count("hellos") == 2


def test_LATE_REPLY_the_slot_is_reused_while_a_reply_is_late() -> None:
    with World() as world:
        first = world.admit(1)
        good(world, Row(first, 3, sampled=True))
        assert world.channel is not None
        world.channel.late = True
        failed(world, Row(first, 2, sampled=True))
        second = world.admit(1, start=5)
        good(world, Row(second, 2, sampled=True))


def test_a_lost_connection_is_made_again_and_the_window_comes_from_the_ring() -> None:
    with World() as world:
        request, other = world.admit(0), world.admit(3)
        good(world, Row(request, 9, sampled=True), Row(other, 2, sampled=True))
        assert world.channel is not None
        world.channel.close()
        failed(world, Row(request, 1, sampled=True))
        world.lose(Row(other, 0, False))
        world.wait_ready()
        good(world, Row(request, 2, sampled=True))
        good(world, Row(other, 1, sampled=True))
        assert world.stats.count("hellos") == 2
        assert world.stats.count("disconnects") == 1
        assert world.stats.count("resync_rounds") == 2


def test_a_round_without_a_connection_fails_at_once() -> None:
    with World() as world:
        request = world.admit(0)
        world.stop_worker()
        failed(world, Row(request, 1, sampled=True))
        failed(world, Row(request, 1, sampled=True))
        assert world.stats.count("fallback_not_ready") >= 1
        world.start_worker()
        world.wait_ready()
        good(world, Row(request, 1, sampled=True))


def test_a_failing_drafter_costs_its_round_and_drafting_resumes() -> None:
    with World() as world:
        request = world.admit(0)
        good(world, Row(request, 4, sampled=True))
        world.drafter.fail_next = 1
        failed(world, Row(request, 1, sampled=True))
        assert world.stats.count("req_status_internal") == 1
        good(world, Row(request, 1, sampled=True))


def test_one_bad_request_never_spoils_the_others() -> None:
    with World() as world:
        requests = [world.admit(slot) for slot in range(3)]
        good(world, *[Row(request, 2, sampled=True) for request in requests])
        world.drafter.not_finite = set(range(SLOTS))
        outcome = world.step(Row(requests[0], 1, sampled=False), Row(requests[1], 1, sampled=True))
        assert outcome is RoundOutcome.FAILED
        world.drafter.not_finite = set()
        for request in requests[:2]:
            request.clean = False
        good(world, *[Row(request, 1, sampled=True) for request in requests])


@pytest.mark.parametrize(
    ("offset", "put", "why"),
    [
        (4 * 2 * 5, struct.pack("<i", INFO.vocab_size), "draft id 1000"),
        (4 * 2 * 5, struct.pack("<i", -7), "draft id -7"),
        (4 * 2 * 5, struct.pack("<i", 2**31 - 1), "draft id 2147483647"),
        (4 * 5, struct.pack("<f", float("nan")), "confidence nan"),
        (4 * 5, struct.pack("<f", 1.5), "confidence 1.5"),
        (4 * 2 * 5 + 4, struct.pack("<H", 77), "request status 77"),
        (4 * 2 * 5 + 16, struct.pack("<I", 9), "answer for slot 9"),
        (4 * 2 * 5 + 12, struct.pack("<I", 9), "generation 9"),
        (4 * 2 * 5 + 8, struct.pack("<I", CONTEXT + 1), f"window of {CONTEXT + 1} rows"),
        (4 * 2 * 5 + 40, struct.pack("<Q", 99), "reply to step 99"),
    ],
)
def test_ID_RANGE_a_reply_that_cannot_be_right_is_refused_with_its_reason(offset: int, put: bytes, why: str) -> None:
    with World() as world:
        request = world.admit(0)
        good(world, Row(request, 3, sampled=True))
        assert world.channel is not None
        world.channel.corrupt = (offset, put)
        failed(world, Row(request, 1, sampled=True))
        assert world.stats.count("fallback_bad_reply") == 1
        assert world.round.last_bad_reply is not None
        assert why in world.round.last_bad_reply
        world.wait_ready()
        good(world, Row(request, 1, sampled=True))


def test_K0_STATE_rows_of_rounds_that_want_no_drafts_are_appended() -> None:
    with World() as world:
        request = world.admit(0)
        good(world, Row(request, 3, sampled=False))
        good(world, Row(request, 2, sampled=False))
        good(world, Row(request, 1, sampled=True))


def test_CHUNK_TRIM_a_chunk_longer_than_the_context_leaves_its_newest_rows() -> None:
    with World() as world:
        request = world.admit(0)
        good(world, Row(request, 3, sampled=False))
        world.lose(Row(request, 0, False))
        good(world, Row(request, 3 * CONTEXT + 1, sampled=True))
        good(world, Row(request, 2, sampled=True))


def test_a_program_of_random_steps_and_faults_drafts_what_a_reference_drafts() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    checked = 0
    with World(seed=seed) as world:
        for _ in range(600):
            for slot in range(SLOTS):
                if slot not in world.by_slot or rng.random() < 0.05:
                    world.admit(slot, start=rng.choice([0, 0, 7, 64]))
            slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
            rows = [Row(world.by_slot[slot], rng.choice([1, 1, 2, 3, 6, 9, 25]), rng.random() < 0.8) for slot in slots]
            world.wait_ready()
            if world.reconnected():
                for request in world.by_slot.values():
                    request.clean = False
            assert world.channel is not None
            fault = rng.choice([None] * 8 + ["late", "close", "garbage", "internal"])
            if fault == "late":
                world.channel.late = True
            elif fault == "close":
                world.channel.close()
            elif fault == "garbage":
                world.channel.corrupt = (4, struct.pack("<f", 2.0))
            elif fault == "internal":
                world.drafter.fail_next = 1
            outcome = world.step(*rows)
            if fault is None:
                assert outcome in (RoundOutcome.OK, RoundOutcome.NOTHING), (seed, world.stats.counters())
                world.keep(*rows)
                for index, row in enumerate(rows):
                    if row.sampled:
                        world.check(index, row)
                        checked += 1
            else:
                assert outcome in (RoundOutcome.FAILED, RoundOutcome.NOTHING), (seed, fault)
                assert world.result.tokens.max() == 0
                world.lose(*rows)
            if fault == "close":
                for request in world.by_slot.values():
                    request.clean = False
                world.wait_ready()
    assert checked > 500
    assert world.stats.count("stale_generation_new_sessions") == 0


ENTRY = Entry(1, 2, 0, 3, 5, 3, EntryFlag.NEED_DRAFT, n_out=2)


def reply(tokens: list[int], confidences: list[float], status: RequestStatus = RequestStatus.OK) -> StepReply:
    return StepReply(
        7,
        3,
        10,
        (EntryReply(1, 2, 3, status),),
        np.array(tokens, dtype=np.int32).data,
        np.array(confidences, dtype=np.float32).data,
    )


def fault_of(answer: StepReply, *, want_margins: bool = False) -> str | None:
    return find_fault(answer, [ENTRY], step_id=7, num_drafts=3, vocab_size=10, context=8, want_margins=want_margins)


def test_probabilities_that_nobody_asked_for_are_a_fault_and_so_are_missing_ones() -> None:
    answer = reply([1, 9, 0], [0.0, 1.0, 0.0])
    nothing = memoryview(bytes(4)).cast("i")
    unasked = answer._replace(sampled=SampledDrafts(nothing, nothing, nothing))
    assert fault_of(unasked) == "probabilities sent unasked"
    asked: dict[str, Any] = {"step_id": 7, "num_drafts": 3, "vocab_size": 10, "context": 8, "want_margins": False}
    assert find_fault(unasked, [ENTRY], **asked, want_sampled=True) is None
    assert find_fault(answer, [ENTRY], **asked, want_sampled=True) == "probabilities missing"


def test_a_right_reply_has_no_fault() -> None:
    assert fault_of(reply([1, 9, 0], [0.0, 1.0, 0.0])) is None


def test_a_confidence_of_minus_0_is_one_of_0_and_1_beside_it_is_right() -> None:
    assert fault_of(reply([1, 9, 0], [-0.0, 1.0, 0.0])) is None


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -0.25, 1.5, float(np.nextafter(np.float32(1), 2))])
def test_a_confidence_that_cannot_be_is_a_fault_at_every_place(wrong: float, place: int) -> None:
    confidences = [0.5, 1.0, 0.0]
    confidences[place] = wrong
    assert (
        fault_of(reply([1, 9, 0], confidences)) == f"confidence {wrong} at entry 0, position {place}, expected 0 to 1"
    )


@given(
    st.lists(st.one_of(st.integers(-1, 10), st.integers(-(1 << 31), (1 << 31) - 1)), min_size=2, max_size=2),
    st.lists(st.one_of(st.floats(width=32), st.floats(0, 1, width=32), st.just(-0.0)), min_size=2, max_size=2),
)
def test_ids_and_confidences_are_right_exactly_where_each_is_in_its_range(
    tokens: list[int], confidences: list[float]
) -> None:
    right = all(0 <= one < 10 for one in tokens) and all(0 <= one <= 1 for one in confidences)
    assert (fault_of(reply([*tokens, 0], [*confidences, 0.0])) is None) == right


def test_what_stands_past_n_out_must_be_zero() -> None:
    assert "past the positions asked for" in (fault_of(reply([1, 9, 4], [0.5, 1.0, 0.0])) or "")
    assert "past the positions asked for" in (fault_of(reply([1, 9, 0], [0.5, 1.0, 0.5])) or "")


def test_drafts_of_a_failed_request_must_be_zero() -> None:
    assert "past the positions" in (fault_of(reply([1, 0, 0], [0.0, 0.0, 0.0], RequestStatus.INTERNAL)) or "")


def test_margins_are_there_exactly_when_asked_for() -> None:
    right = reply([1, 9, 0], [0.5, 1.0, 0.0])
    assert fault_of(right, want_margins=True) == "margins missing"
    with_margins = right._replace(margins=np.zeros(3, dtype=np.float32).data)
    assert fault_of(with_margins) == "margins sent unasked"
    assert fault_of(with_margins, want_margins=True) is None
    nan = right._replace(margins=np.array([0, 1, np.nan], dtype=np.float32).data)
    assert fault_of(nan, want_margins=True) == "margin nan at entry 0, position 2, expected 0 or more"


def test_a_status_that_contradicts_the_request_is_a_fault() -> None:
    assert "NOT_NEEDED though a draft was asked for" in (
        fault_of(reply([0, 0, 0], [0, 0, 0], RequestStatus.NOT_NEEDED)) or ""
    )


def test_the_breaker_keeps_rounds_at_home_and_the_probe_brings_drafts_back() -> None:
    with World(trip=2, cooldown=3) as world:
        request = world.admit(0)
        good(world, Row(request, 4, sampled=True))
        world.drafter.fail_next = 2
        for _ in range(2):
            failed(world, Row(request, 1, sampled=True))
        calls = world.drafter.calls
        for _ in range(3):
            failed(world, Row(request, 1, sampled=True))
        assert world.drafter.calls == calls
        assert world.stats.count("fallback_cooldown") == 3
        good(world, Row(request, 1, sampled=True))
        assert (world.stats.count("breaker_trips"), world.stats.count("breaker_recoveries")) == (1, 1)


def test_the_breaker_does_not_count_rounds_that_asked_for_nothing_or_had_no_connection() -> None:
    with World(trip=1) as world:
        request = world.admit(0)
        world.drafter.fail_next = 1
        assert world.step(Row(request, 4, sampled=False)) is RoundOutcome.NOTHING
        world.lose(Row(request, 0, False))
        good(world, Row(request, 1, sampled=True))
        world.stop_worker()
        assert world.channel is not None
        world.client.drop(world.client.connection() or pytest.fail("no connection"), "told to")
        failed(world, Row(request, 1, sampled=True))
        assert world.round.breaker.state.value == "closed"
        world.start_worker()
        world.wait_ready()
        good(world, Row(request, 1, sampled=True))


def test_a_request_that_fails_among_others_is_a_success_for_the_breaker() -> None:
    with World(trip=1) as world:
        first, second = world.admit(0), world.admit(1)
        good(world, Row(first, 2, sampled=True), Row(second, 2, sampled=True))
        world.drafter.not_finite = {0}
        outcome = world.step(Row(first, 1, sampled=True), Row(second, 1, sampled=True))
        assert outcome is RoundOutcome.SOME_FAILED
        assert sorted(world.result.ok[:2].tolist()) == [0, 1]
        assert world.round.breaker.state.value == "closed"


# Judging other drafts --------------------------------------------------------------------------------------------------


def test_local_drafts_of_a_round_are_judged_by_batch_row() -> None:
    with World(want_margin=True) as world:
        first, second = world.admit(3), world.admit(0)
        good(world, Row(first, 4, sampled=True), Row(second, 2, sampled=False), Row(world.admit(2), 3, sampled=True))
        drafted = world.result.tokens[[0, 2]].copy()
        other = drafted[::-1].copy()
        other[0, 1] = (drafted[1, 1] + 1) % INFO.vocab_size
        other[0, 0], other[0, 2:] = drafted[1, 0], drafted[1, 2:]
        judged = world.round.judge([2, 0], other)
        assert judged is not None
        assert judged.gaps.tolist() == [[0, 1, 1, *[0] * (INFO.num_drafts - 3)], [0] * INFO.num_drafts]
        assert judged.best[1].tolist() == drafted[0].tolist()
        good(world, Row(first, 1, sampled=True))


def test_only_what_the_newest_round_drafted_can_be_judged() -> None:
    with World(want_margin=True) as world:
        request = world.admit(1)
        chain = np.zeros((1, INFO.num_drafts), dtype=np.int64)
        good(world, Row(request, 3, sampled=False))
        assert world.round.judge([1], chain) is None, "no such row"
        assert world.round.judge([0], chain) is None, "nothing was drafted for it"
        assert world.stats.count("judge_failures") == 1
        good(world, Row(request, 1, sampled=True))
        assert world.round.judge([0], chain) is not None
        assert world.channel is not None
        world.channel.late = True
        failed(world, Row(request, 1, sampled=True))
        assert world.round.judge([0], chain) is None
        assert world.stats.count("hellos") == 1


def test_HALF_OPEN_a_judge_that_does_not_answer_costs_one_deadline_and_no_draft() -> None:
    with World(want_margin=True, timeout_s=0.05) as world:
        request = world.admit(1)
        good(world, Row(request, 3, sampled=True))
        assert world.channel is not None
        world.channel.late = True
        assert world.round.judge([0], np.zeros((1, INFO.num_drafts), dtype=np.int64)) is None
        assert world.stats.count("judge_failures") == 1
        good(world, Row(request, 1, sampled=True))
        assert world.stats.count("late_replies") == 1


def floats(*values: float) -> memoryview:
    return np.array(values, dtype=np.float32).data


def ids(*values: int) -> memoryview:
    return np.array(values, dtype=np.int32).data


def test_a_judgement_is_checked_not_trusted() -> None:
    judge = Judge(7, 2, [0], ids(1, 2))
    right = Judgement(7, 2, ids(0, 9), floats(0, 1), floats(0, 4), floats(0, 1))
    assert find_fault_of_judgement(right, judge, 10, has_router=False) is None
    for wrong in (
        right._replace(step_id=8),
        right._replace(num_drafts=1),
        right._replace(best=ids(1)),
        right._replace(best=ids(1, 10)),
        right._replace(best=ids(-1, 1)),
        right._replace(gaps=floats(0, -1)),
        right._replace(gaps=floats(0, float("nan"))),
        right._replace(peaks=floats(0, float("inf"))),
        right._replace(confidences=floats(0, 1.5)),
        right._replace(confidences=floats(float("nan"), 1)),
    ):
        assert find_fault_of_judgement(wrong, judge, 10, has_router=False) is not None, wrong


@pytest.mark.parametrize("has_router", [False, True])
def test_routing_margins_are_there_exactly_where_the_welcome_said_so(has_router: bool) -> None:
    judge = Judge(7, 1, [0, 1], ids(1, 2))
    without = Judgement(7, 1, ids(1, 9), floats(0, 1), floats(3, 4), floats(0, 1))
    routed = without._replace(routing=floats(0, 1e30))
    why = find_fault_of_judgement(routed if not has_router else without, judge, 10, has_router=has_router)
    assert (
        why
        == f"judgement with{'out' * has_router} routing margins, from a drafter with{'out' * (not has_router)} a router"
    )
    right = routed if has_router else without
    assert find_fault_of_judgement(right, judge, 10, has_router=has_router) is None


@pytest.mark.parametrize(
    ("value", "said"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (-0.25, "-0.25")]
)
def test_a_routing_margin_that_can_be_none_is_refused_with_its_value(value: float, said: str) -> None:
    judge = Judge(7, 1, [0, 1], ids(1, 2))
    answer = Judgement(7, 1, ids(1, 9), floats(0, 1), floats(3, 4), floats(0, 1), floats(0.5, value))
    assert (
        find_fault_of_judgement(answer, judge, 10, has_router=True)
        == f"judgement with a routing margin of {said}, expected a finite number, 0 or more"
    )


def routed_world() -> World:
    return World(want_margin=True, drafter=ArithmeticDrafter(replace(INFO, has_router=True)))


def test_routing_margins_come_with_the_judged_chains() -> None:
    with routed_world() as world:
        assert world.round.last_drafts.has_router is None, "nothing was drafted"
        good(world, Row(world.admit(3), 4, sampled=True), Row(world.admit(0), 2, sampled=True))
        assert world.round.last_drafts.has_router is True
        drafted = world.result.tokens[:2].copy()
        judged = world.round.judge([1, 0], drafted[::-1])
        assert judged is not None
        assert judged.routing is not None
        steps = [(int(drafted[row, 1]) - int(drafted[row, 0])) % INFO.vocab_size for row in (1, 0)]
        assert judged.routing.tolist() == [pytest.approx(step / INFO.vocab_size) for step in steps]


def test_ID_RANGE_a_routing_margin_that_can_be_none_costs_the_judgement_and_is_kept_as_the_reason() -> None:
    with routed_world() as world:
        good(world, Row(world.admit(3), 4, sampled=True))
        assert world.channel is not None
        # The only chain's margin is the end of the frame.
        world.channel.corrupt = (4, struct.pack("<f", math.nan))
        assert world.round.judge([0], world.result.tokens[:1]) is None
        assert (
            world.round.last_bad_reply == "judgement with a routing margin of nan, expected a finite number, 0 or more"
        )
        assert world.stats.count("judge_failures") == 1
        assert world.round.judge([0], world.result.tokens[:1]) is not None


def test_a_drafter_without_a_router_says_so_and_has_no_routing_margins() -> None:
    with World(want_margin=True) as world:
        good(world, Row(world.admit(3), 4, sampled=True))
        assert world.round.last_drafts.has_router is False
        judged = world.round.judge([0], world.result.tokens[:1])
        assert judged is not None
        assert judged.routing is None


def test_an_engine_that_wants_no_margins_hears_nothing_of_a_router() -> None:
    with World(drafter=ArithmeticDrafter(replace(INFO, has_router=True))) as world:
        good(world, Row(world.admit(3), 4, sampled=True))
        assert world.round.last_drafts.has_router is None
