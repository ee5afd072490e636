from __future__ import annotations

import numpy as np

from farspark.engine.shadow import ShadowComparison


def test_agreement_is_counted_by_position_and_the_first_mismatch_is_judged_by_its_margin() -> None:
    shadow = ShadowComparison(3)
    local = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    remote = np.array([[1, 2, 3], [1, 9, 3], [8, 9, 7]])
    margins = np.array([[5, 5, 5], [5, 0.1, 5], [4.0, 0.0, 0.0]], dtype=np.float32)
    shadow.observe(local, remote, margins=margins)
    snapshot = shadow.snapshot()
    assert snapshot["blocks"] == 3
    assert snapshot["agree_rate_by_position"] == [0.66667, 0.33333, 0.66667]
    assert snapshot["first_mismatch"] == {"0": 1, "1": 1, "2": 0, "3": 1}
    assert snapshot["full_block_agree_rate"] == 0.33333
    assert (snapshot["ties"], snapshot["diverged"], snapshot["unjudged"]) == (1, 1, 0)
    assert snapshot["largest_mismatch_margin"] == 4.0
    assert snapshot["examples"][0]["remote"] == [1, 9, 3]


def test_without_margins_a_mismatch_is_not_judged() -> None:
    shadow = ShadowComparison(2)
    shadow.observe(np.array([[1, 2]]), np.array([[1, 3]]))
    assert shadow.snapshot()["unjudged"] == 1


def test_confidences_are_compared_only_up_to_the_first_mismatch() -> None:
    shadow = ShadowComparison(3)
    shadow.observe(
        np.array([[1, 2, 3]]),
        np.array([[1, 9, 3]]),
        local_confidences=np.array([[0.5, 0.5, 0.1]], dtype=np.float32),
        remote_confidences=np.array([[0.5, 0.25, 0.9]], dtype=np.float32),
    )
    assert shadow.snapshot()["largest_confidence_difference"] == 0.25


def test_METRICS_nothing_compared_is_not_a_division_by_zero() -> None:
    snapshot = ShadowComparison(2).snapshot()
    assert snapshot["full_block_agree_rate"] is None
    assert snapshot["agree_rate_by_position"] == [None, None]
