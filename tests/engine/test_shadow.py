from __future__ import annotations

import numpy as np
import pytest

from farspark.engine.shadow import JudgedChains, ShadowComparison, gaps_in_ulps


def judged(
    best: list[list[int]], gaps: list[list[float]], *, peak: float = 20.0, confidence: float = 0.5
) -> JudgedChains:
    shape = np.shape(best)
    return JudgedChains(
        np.array(best, dtype=np.int32),
        np.array(gaps, dtype=np.float32),
        np.full(shape, peak, dtype=np.float32),
        np.full(shape, confidence, dtype=np.float32),
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


def test_parity_allows_ties_but_no_step_far_off_and_few_that_diverge() -> None:
    def passes(gap_ulps: float, blocks: int) -> object:
        shadow = ShadowComparison(1)
        shadow.observe(np.ones((blocks, 1), int), np.ones((blocks, 1), int))
        shadow.observe(np.array([[1]]), np.array([[2]]), judge=lambda _: judged([[2]], [[gap_ulps * 0.125]]))
        return shadow.snapshot()["passes"]

    assert passes(2, 1) is True
    assert passes(2.1, 198) is False
    assert passes(2.1, 199) is True, "one in 200"
    assert passes(8.1, 100_000) is False
    assert ShadowComparison(1).snapshot()["bounds"] == {"equal_or_tie_rate": 0.995, "confidence_difference": 0.01}


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


def test_METRICS_nothing_compared_is_not_a_division_by_zero() -> None:
    snapshot = ShadowComparison(2).snapshot()
    assert snapshot["full_block_agree_rate"] is None
    assert snapshot["equal_or_tie_rate"] is None
    assert snapshot["passes"] is None
    assert snapshot["agree_rate_by_position"] == [None, None]
