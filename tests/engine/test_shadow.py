from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from farspark.engine import accepted_lengths
from farspark.engine.shadow import JudgedChains, ShadowComparison, gaps_in_ulps


def judged(
    best: list[list[int]],
    gaps: list[list[float]],
    *,
    peak: float = 20.0,
    confidence: float = 0.5,
    routing: list[float] | None = None,
) -> JudgedChains:
    shape = np.shape(best)
    return JudgedChains(
        np.array(best, dtype=np.int32),
        np.array(gaps, dtype=np.float32),
        np.full(shape, peak, dtype=np.float32),
        np.full(shape, confidence, dtype=np.float32),
        None if routing is None else np.array(routing, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("peak", "ulp"), [(0.1, 2**-7), (1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (17.7, 0.125), (32.0, 0.25)]
)
def test_a_gap_is_measured_in_bf16_steps_at_the_size_of_the_greatest_logit(peak: float, ulp: float) -> None:
    assert gaps_in_ulps(judged([[1]], [[3 * ulp]], peak=peak)).item() == pytest.approx(3.0)


def test_agreement_is_counted_by_position_and_a_block_that_differs_is_judged_step_by_step() -> None:
    shadow = ShadowComparison(3)
    local = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    remote = np.array([[1, 2, 3], [1, 9, 3], [8, 9, 7]])
    assert shadow.differing(local, remote).tolist() == [1, 2]
    # A near tie, and equal behind it; a tie by value with another choice, a step far off, equal.
    answer = judged([[1, 9, 3], [8, 9, 3]], [[0, 0.25, 0], [0, 2.0, 0]])
    shadow.observe(local, remote, judge=lambda _: answer, margins=np.ones((3, 3), dtype=np.float32))
    snapshot = shadow.snapshot()
    assert snapshot["blocks"] == 3
    assert snapshot["agree_rate_by_position"] == [0.66667, 0.33333, 0.66667]
    assert snapshot["first_mismatch"] == {"0": 1, "1": 1, "2": 0, "3": 1}
    assert snapshot["full_block_agree_rate"] == 0.33333
    assert (snapshot["steps"], snapshot["equal"], snapshot["ties"], snapshot["diverged"]) == (9, 6, 2, 1)
    assert (snapshot["far_diverged"], snapshot["unjudged"], snapshot["largest_gap_ulps"]) == (1, 0, 16.0)
    assert snapshot["gap_ulps"] == {"<=0": 1, "<=2": 1, ">8": 1}
    assert snapshot["passes"] is False
    assert snapshot["examples"][0] == {
        "first_mismatch": 1,
        "local": [1, 2, 3],
        "remote": [1, 9, 3],
        "margins": [1.0, 1.0, 1.0],
        "gap_ulps": [0.0, 2.0, 0.0],
    }


def test_the_first_16_blocks_that_differ_are_kept_as_examples() -> None:
    shadow = ShadowComparison(1)
    for first in (0, 10, 20):
        shadow.observe(np.arange(first, first + 10)[:, None], np.full((10, 1), 99))
    assert [example["local"] for example in shadow.snapshot()["examples"]] == [[one] for one in range(16)]


def test_parity_allows_ties_but_no_step_far_off_and_few_that_diverge() -> None:
    def passes(gap_ulps: float, blocks: int) -> object:
        shadow = ShadowComparison(1)
        shadow.observe(np.ones((blocks, 1), int), np.ones((blocks, 1), int))
        shadow.observe(np.array([[1]]), np.array([[2]]), judge=lambda _: judged([[2]], [[gap_ulps * 0.125]]))
        return shadow.snapshot()["passes"]

    assert passes(2, 1) is True
    assert passes(2.1, 198) is False
    assert passes(2.1, 199) is True, "one in 200"
    assert passes(8, 100_000) is True
    assert passes(8.1, 100_000) is False
    assert ShadowComparison(1).snapshot()["bounds"] == {"equal_or_tie_rate": 0.995, "confidence_difference": 0.01}


# Routers ----------------------------------------------------------------------------------------------------------------

BELOW, AT = 2**-7 - 2**-20, 2**-7


def test_every_block_of_a_drafter_with_a_router_is_judged_and_those_near_a_tie_are_kept_out() -> None:
    shadow, asked = ShadowComparison(2), []
    local = np.array([[1, 2], [1, 2], [1, 2], [1, 2]])
    remote = np.array([[1, 2], [1, 9], [8, 9], [1, 2]])
    # The first two are near a tie; of the others the first one is far off at both positions.
    answer = judged([[1, 2], [1, 9], [8, 9], [1, 2]], [[0, 0], [0, 8], [9, 9], [0, 0]], routing=[0, BELOW, AT, 0.5])

    def judge(which: np.ndarray[tuple[int, ...], np.dtype[np.intp]]) -> JudgedChains:
        asked.extend(which.tolist())
        return answer

    shadow.observe(local, remote, judge=judge, has_router=True)
    snapshot = shadow.snapshot()
    assert asked == [0, 1, 2, 3]
    assert (snapshot["has_router"], snapshot["routing_ambiguous"], snapshot["blocks"]) == (True, 2, 4)
    assert (snapshot["steps"], snapshot["equal"], snapshot["far_diverged"]) == (4, 2, 2), "of two blocks"
    assert snapshot["full_block_agree_rate"] == 0.5, "the chains as they are, of all blocks"
    assert snapshot["first_mismatch"] == {"0": 1, "1": 1, "2": 2}
    assert snapshot["routing_margins"] == {"<2^-13": 1, "<2^-7": 1, "<2^-6": 1, ">=2^-3": 1}
    assert snapshot["bounds"] == {
        "equal_or_tie_rate": 0.995,
        "confidence_difference": 0.03,
        "routing_margin": 2**-7,
    }
    assert [example["remote"] for example in snapshot["examples"]] == [[8, 9]]
    assert snapshot["passes"] is False


@pytest.mark.parametrize(
    ("has_router", "gap_ulps", "is_tie"),
    [(False, 2.1, False), (None, 2.1, False), (True, 3.9, True), (True, 4.1, False)],
)
def test_a_tie_may_be_wider_where_the_engine_keeps_its_context_in_fp8(
    has_router: bool | None, gap_ulps: float, is_tie: bool
) -> None:
    shadow = ShadowComparison(1)
    answer = judged([[2]], [[gap_ulps * 0.125]], routing=[AT] if has_router else None)
    shadow.observe(np.array([[1]]), np.array([[2]]), judge=lambda _: answer, has_router=has_router)
    snapshot = shadow.snapshot()
    assert (snapshot["ties"], snapshot["diverged"]) == (int(is_tie), int(not is_tie))
    assert snapshot["passes"] is is_tie


def test_nothing_but_near_ties_of_a_router_is_no_verdict() -> None:
    shadow = ShadowComparison(1)
    shadow.observe(
        np.array([[1]]),
        np.array([[2]]),
        judge=lambda _: judged([[2]], [[99.0]], routing=[0.0]),
        has_router=True,
        local_confidences=np.array([[0.0]], dtype=np.float32),
        remote_confidences=np.array([[1.0]], dtype=np.float32),
    )
    snapshot = shadow.snapshot()
    assert (snapshot["passes"], snapshot["largest_confidence_difference"]) == (None, None)


@pytest.mark.parametrize(
    ("has_router", "difference", "passes"),
    [
        (False, 0.0099, True),
        (False, 0.0101, False),
        (None, 0.0101, False),
        (True, 0.0101, True),
        (True, 0.0299, True),
        (True, 0.0301, False),
    ],
)
def test_confidences_may_differ_by_more_where_there_is_a_router(
    has_router: bool | None, difference: float, passes: bool
) -> None:
    shadow = ShadowComparison(1)
    drafts = np.array([[1], [1]])
    shadow.observe(
        drafts,
        drafts,
        # Asked of all blocks where there is a router, else of none. The second one's confidence is another expert's.
        judge=lambda _: judged([[1], [1]], [[0], [0]], routing=[AT, BELOW]),
        has_router=has_router,
        local_confidences=np.array([[0.5], [0.9 if has_router else 0.5]], dtype=np.float32),
        remote_confidences=np.array([[0.5 + difference], [0.5]], dtype=np.float32),
    )
    snapshot = shadow.snapshot()
    assert snapshot["largest_confidence_difference"] == pytest.approx(difference, abs=1e-6)
    assert snapshot["passes"] is passes


def test_blocks_of_a_router_that_nobody_judged_do_not_pass_even_where_they_agree() -> None:
    shadow = ShadowComparison(1)
    agreeing = np.array([[1]])
    shadow.observe(agreeing, agreeing, judge=lambda _: judged([[1]], [[0]], routing=[1.0]), has_router=True)
    assert shadow.snapshot()["passes"] is True
    shadow.observe(agreeing, agreeing, judge=lambda _: None, has_router=True)
    snapshot = shadow.snapshot()
    assert (snapshot["unjudged"], snapshot["steps"], snapshot["passes"]) == (1, 1, False)


def test_what_is_known_of_a_router_stays_known() -> None:
    shadow, block = ShadowComparison(1), np.array([[1]])
    shadow.observe(block, block)
    assert shadow.snapshot()["has_router"] is None
    shadow.observe(block, block, has_router=False)
    shadow.observe(block, block)
    assert shadow.snapshot()["has_router"] is False
    assert shadow.snapshot()["routing_margins"] == {}


def test_a_block_that_nobody_judged_is_counted_and_does_not_pass() -> None:
    shadow = ShadowComparison(2)
    shadow.observe(np.array([[1, 2], [1, 2]]), np.array([[1, 3], [1, 2]]))
    snapshot = shadow.snapshot()
    assert (snapshot["unjudged"], snapshot["steps"], snapshot["passes"]) == (1, 2, False)


def test_confidences_are_compared_where_both_describe_the_same_tokens() -> None:
    ours = np.array([[0.5, 0.5, 0.5]], dtype=np.float32)
    theirs = np.array([[0.5, 0.25, 0.9]], dtype=np.float32)
    local, remote = np.array([[1, 2, 3]]), np.array([[1, 9, 3]])

    def difference(answer: JudgedChains | None, remote: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> object:
        shadow = ShadowComparison(3)
        shadow.observe(local, remote, judge=lambda _: answer, local_confidences=ours, remote_confidences=theirs)
        return shadow.snapshot()["largest_confidence_difference"]

    assert difference(None, remote) is None, "another chain's confidences say nothing"
    assert difference(None, local) == pytest.approx(0.4)
    assert difference(judged([[1, 9, 3]], [[0, 1, 0]], confidence=0.75), remote) == 0.25
    assert difference(judged([[1, 9, 3]], [[0, 1, 0]], confidence=float("nan")), remote) == 1.0


@pytest.mark.parametrize("known", ["local_confidences", "remote_confidences"])
def test_confidences_of_one_side_alone_are_not_compared(known: str) -> None:
    shadow, block = ShadowComparison(1), np.array([[1]])
    confidences: dict[str, Any] = {known: np.array([[0.5]], dtype=np.float32)}
    shadow.observe(block, block, **confidences)
    snapshot = shadow.snapshot()
    assert (snapshot["largest_confidence_difference"], snapshot["passes"]) == (None, True)


def test_METRICS_nothing_compared_is_not_a_division_by_zero() -> None:
    snapshot = ShadowComparison(2).snapshot()
    assert snapshot["full_block_agree_rate"] is None
    assert snapshot["equal_or_tie_rate"] is None
    assert snapshot["passes"] is None
    assert snapshot["agree_rate_by_position"] == [None, None]


@pytest.mark.parametrize("remote", [True, False])
def test_accepted_lengths_that_differ_fail_whoever_judged_but_pass_only_what_was_judged(
    monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(accepted_lengths, "ENOUGH_BLOCKS", 3)
    shadow = ShadowComparison(1)
    shadow.observe(np.array([[1]]), np.array([[2]]), has_router=True)
    for position in range(0, 10, 2):
        shadow.accepted.observe(0, "a", position, 7, local=[8], remote=[8 if remote else 9], verified=[8])
    snapshot = shadow.snapshot()
    assert (snapshot["unjudged"], snapshot["passes"]) == (1, None if remote else False)


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("has_router", [True, False])
def test_accepted_lengths_speak_for_a_router_that_keeps_every_block_out(
    monkeypatch: pytest.MonkeyPatch, has_router: bool, remote: bool
) -> None:
    monkeypatch.setattr(accepted_lengths, "ENOUGH_BLOCKS", 3)
    shadow = ShadowComparison(1)
    one, other = np.array([[1]]), np.array([[2]])
    shadow.observe(one, other, judge=lambda _: judged([[2]], [[0.0]], routing=[0.0]), has_router=has_router)
    for position in range(0, 10, 2):
        shadow.accepted.observe(0, "a", position, 7, local=[8], remote=[8 if remote else 9], verified=[8])
    assert shadow.snapshot()["accepted_lengths"]["blocks"] == 4
    assert shadow.snapshot()["passes"] is (remote if has_router else None)
    # Steps that pass do not outweigh them.
    shadow.observe(one, one, judge=lambda _: judged([[1]], [[0.0]], routing=[1.0]), has_router=has_router)
    assert shadow.snapshot()["passes"] is (remote or not has_router)
