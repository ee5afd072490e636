from __future__ import annotations

import numpy as np
import pytest

from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome


def test_the_layout_has_no_gap_and_no_overlap() -> None:
    layout = ResultLayout(max_requests=3, num_drafts=5)
    assert (layout.ok, layout.depths) == (slice(2, 5), slice(5, 8))
    assert (layout.tokens, layout.confidences) == (slice(8, 23), slice(23, 38))
    assert layout.size == 38


def test_what_one_rank_writes_another_reads_from_the_same_bits() -> None:
    layout = ResultLayout(2, 3)
    sent = PackedResult.empty(layout)
    sent.clear(RoundOutcome.OK, 2)
    sent.ok[1] = 1
    sent.depths[1] = 2
    sent.tokens[1] = [7, 8, 9]
    sent.confidences[1] = [0.5, 0.25, 1.0]
    received = PackedResult(layout, sent.buffer.copy())
    assert (received.outcome, received.num_requests) == (RoundOutcome.OK, 2)
    assert received.tokens.tolist() == [[0, 0, 0], [7, 8, 9]]
    assert received.depths.tolist() == [0, 2]
    assert received.confidences.tolist() == [[0, 0, 0], [0.5, 0.25, 1.0]]
    assert repr(received) == "<PackedResult OK, 1 of 2 ok>"


def test_NEG1_EMBED_a_cleared_result_holds_legal_ids_with_confidence_zero() -> None:
    result = PackedResult.empty(ResultLayout(2, 3))
    result.tokens[:] = -1
    result.clear(RoundOutcome.FAILED, 2)
    assert result.tokens.min() == 0
    assert result.confidences.max() == 0


def test_a_buffer_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="expected int32"):
        PackedResult(ResultLayout(2, 3), np.zeros(5, dtype=np.int32))
