"""One message a step, of one shape."""

from __future__ import annotations

import pytest

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import Header
from farspark.engine.vllm.pp.history import StepHistory
from farspark.engine.vllm.pp.schedule import FrameShape, Order

SHAPE = FrameShape(max_reqs=8, num_drafts=5)


def test_a_message_is_tokens_counts_drafts_and_the_header_in_this_order() -> None:
    assert (SHAPE.counts_at, SHAPE.drafts_at, SHAPE.header_at, SHAPE.words) == (48, 56, 96, 100)


def test_a_step_is_posted_once_and_then_the_next_begins() -> None:
    order = Order()
    for sequence in (1, 2, 3):
        assert order.begin() == sequence
        order.post()


def test_the_sequence_moves_before_the_step_is_posted() -> None:
    order = Order()
    order.begin()
    assert order.sequence == 1
    order.post()
    assert order.sequence == 1


def test_a_step_is_not_posted_twice() -> None:
    order = Order()
    order.begin()
    order.post()
    with pytest.raises(TokenTransportError, match="step 1 would be posted twice"):
        order.post()


def test_a_step_does_not_begin_inside_another() -> None:
    order = Order()
    order.begin()
    with pytest.raises(TokenTransportError, match="a step begins while step 1 was not posted"):
        order.begin()


@pytest.mark.parametrize("shape", [(9, 6), (8, 7)])
def test_tokens_that_do_not_fit_are_refused_with_both_shapes(shape: tuple[int, int]) -> None:
    with pytest.raises(TokenTransportError, match=r"tokens of shape \[\d, \d\] do not fit into the fixed \[8, 6\]"):
        SHAPE.check_tokens(shape)


@pytest.mark.parametrize("shape", [(9, 5), (8, 4), (8, 6)])
def test_drafts_that_do_not_fit_are_refused_with_both_shapes(shape: tuple[int, int]) -> None:
    with pytest.raises(TokenTransportError, match=r"drafts of shape \[\d, \d\] do not fit into the fixed \[8, 5\]"):
        SHAPE.check_drafts(shape)


def test_what_fits_is_taken() -> None:
    SHAPE.check_tokens((8, 1))
    SHAPE.check_tokens((1, 6))
    SHAPE.check_drafts((0, 5))


def test_the_history_keeps_the_last_steps_and_says_where_each_stands() -> None:
    history = StepHistory("PP stage 1 of 2", kept=2)
    history.add("receive", Header(1, 5, 3), "", "consumed")
    history.add("receive", Header(2, 0xFF, 3), "", "arrived")
    step = history.add("receive", Header(3, 0xFF, 4), "", "posted")
    step.state = "MISMATCH: sequence expected 3, got 2"
    assert str(history).splitlines() == [
        "farspark: PP stage 1 of 2: the last 2 steps with tokens, newest last",
        "step 2 receive mask 000000ff num_reqs 3: arrived",
        "step 3 receive mask 000000ff num_reqs 4: MISMATCH: sequence expected 3, got 2",
    ]
