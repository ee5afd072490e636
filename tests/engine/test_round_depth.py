"""The round with a depth policy and a schedule of caps: what is asked for, what is worth verifying, what is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.test_round import failed, good
from tests.fakes.engine_world import INFO, SLOTS, Row, World

from farspark.engine.depth import Costs, NOut, choose_depths, parse_policy, resolve
from farspark.engine.depth_control import DepthControl
from farspark.engine.result import RoundOutcome

N = INFO.num_drafts
COSTS = Costs((8, 8.5, 9, 10, 12, 15), 1)
SCHEDULE = NOut((0, 5, 5, 4, 4), "a test")


def control(policy: str, file: Path | None = None) -> DepthControl:
    return DepthControl(parse_policy(policy), num_drafts=N, costs=COSTS, file=file)


def test_without_a_policy_every_draft_that_came_is_verified() -> None:
    with World() as world:
        first, second = world.admit(0), world.admit(1)
        good(world, Row(first, 3, sampled=True), Row(second, 4, sampled=False))
        assert world.result.depths.tolist() == [N, 0, 0, 0]
        assert world.stats.count("drafts_cut") == 0


@pytest.mark.parametrize("policy", ["fixed:2", "conf", "confb"])
def test_the_policy_decides_from_the_confidences_that_came(policy: str) -> None:
    with World(depth=control(policy)) as world:
        requests = [world.admit(slot) for slot in range(3)]
        good(world, *[Row(request, 3 + i, sampled=True) for i, request in enumerate(requests)])
        resolved = resolve(parse_policy(policy), N, COSTS, own_table=False)
        known, ok = world.result.confidences[:3].tolist(), world.result.ok[:3].astype(bool).tolist()
        depths = choose_depths(resolved, known, ok, N)
        assert world.result.depths.tolist() == [*depths, 0]
        assert 0 < sum(depths) < 3 * N
        assert world.stats.count("drafts_cut") == 3 * N - sum(depths)


@pytest.mark.parametrize("policy", ["off", "fixed:2", "conf", "confb"])
def test_a_round_that_failed_verifies_nothing(policy: str) -> None:
    with World(depth=control(policy)) as world:
        request, other = world.admit(0), world.admit(1)
        good(world, Row(request, 3, sampled=True), Row(other, 3, sampled=True))
        assert world.channel is not None
        world.channel.late = True
        failed(world, Row(request, 1, sampled=True), Row(other, 1, sampled=True))
        assert world.result.depths.tolist() == [0] * SLOTS
        # Of a round in which one request failed, that one.
        world.drafter.not_finite = {0}
        assert world.step(Row(request, 1, sampled=True), Row(other, 1, sampled=True)) is RoundOutcome.SOME_FAILED
        failed_row = world.result.ok[:2].tolist().index(0)
        assert world.result.depths[failed_row] == 0


def test_K0_STATE_a_round_that_wants_no_drafts_appends_its_rows_and_verifies_nothing() -> None:
    with World(depth=control("conf")) as world:
        request = world.admit(0)
        good(world, Row(request, 3, sampled=True))
        good(world, Row(request, 2, sampled=False))
        assert world.result.depths.tolist() == [0] * SLOTS
        # The next draft is from all of them.
        good(world, Row(request, 1, sampled=True))


def test_DYN_K_only_as_many_positions_are_asked_for_as_the_schedule_allows() -> None:
    with World(depth=control("conf"), n_out=SCHEDULE) as world:
        requests = [world.admit(slot) for slot in range(4)]
        for n, asked in ((1, 5), (2, 5), (3, 4), (4, 4)):
            rows = [Row(request, 2, sampled=True) for request in requests[:n]]
            # Compared with a drafter that was asked for so many; the reply's tail must be zero.
            good(world, *rows)
            assert world.result.depths.max() <= asked
            assert (world.result.tokens[:n, asked:] == 0).all()
        assert world.stats.count("rounds_n_out_cut") == 2


def test_DYN_K_where_the_schedule_wants_none_the_rows_are_appended_and_nothing_is_drafted() -> None:
    with World(depth=control("conf"), n_out=NOut((0, 5, 0), "a test")) as world:
        first, second = world.admit(0), world.admit(1)
        rows = Row(first, 3, sampled=True), Row(second, 3, sampled=True)
        assert world.step(*rows) is RoundOutcome.NOTHING
        world.keep(*rows)
        assert world.result.depths.tolist() == [0] * SLOTS
        assert world.stats.count("req_status_not_needed") == 2
        good(world, Row(first, 1, sampled=True))


def test_METRICS_drafted_is_what_was_sent_to_verify_and_accepted_what_of_it_left_rows() -> None:
    with World() as world:
        first, second = world.admit(0), world.admit(1)
        good(world, Row(first, 7, sampled=True), Row(second, 2, sampled=True))
        assert (world.stats.count("drafted_tokens"), world.stats.count("accepted_drafts")) == (0, 0)
        assert "accepted_drafts" not in world.stats.counters()
        # Three of five drafts accepted, none of two, and a request that had none.
        third = world.admit(2)
        good(
            world,
            Row(first, 4, sampled=True, k_window=5),
            Row(second, 1, sampled=True, k_window=2),
            Row(third, 6, sampled=True),
        )
        assert (world.stats.count("drafted_tokens"), world.stats.count("accepted_drafts")) == (7, 3)


def test_METRICS_requests_without_drafts_are_counted_by_what_became_of_the_reply() -> None:
    with World(n_out=SCHEDULE) as world:
        request, other = world.admit(0), world.admit(1)
        rows = Row(request, 1, sampled=True), Row(other, 1, sampled=True)
        kinds = ("undrafted_late", "undrafted_none", "undrafted_dropped")

        def counted() -> list[int]:
            return [world.stats.count(kind) for kind in kinds]

        good(world, *rows)
        assert counted() == [0, 0, 0]
        assert world.channel is not None
        world.channel.late = True
        failed(world, *rows)
        assert counted() == [2, 0, 0]
        world.channel.corrupt = (4, b"\xff\xff\xff\xff")
        failed(world, *rows)
        assert counted() == [2, 0, 2]
        world.drafter.not_finite = {0}
        assert world.step(*rows) is RoundOutcome.SOME_FAILED
        assert counted() == [2, 0, 3]
        world.channel.close()
        failed(world, *rows)
        assert counted() == [2, 2, 3]


def test_a_depth_file_acts_with_the_next_round_a_failed_one_too(tmp_path: Path) -> None:
    file = tmp_path / "depth"
    file.write_text("fixed:1", encoding="utf-8")
    with World(depth=control("fixed:3", file)) as world:
        request = world.admit(0)
        good(world, Row(request, 3, sampled=True))
        assert world.result.depths[0] == 1
        assert world.channel is not None
        world.channel.late = True
        file.write_text("fixed:22", encoding="utf-8")
        failed(world, Row(request, 1, sampled=True))
        file.write_text("fixed:4 # more", encoding="utf-8")
        world.channel.late = True
        failed(world, Row(request, 1, sampled=True))
        assert world.round.depth.without_confidences == 4
