"""Four messages a step, in one order, in shapes that do not change."""

from __future__ import annotations

import pytest

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import Header
from farspark.engine.vllm.pp.history import StepHistory
from farspark.engine.vllm.pp.schedule import SENTINEL, FrameShape, Message, Order, guard_of

SHAPE = FrameShape(max_reqs=8, num_drafts=5)


def test_the_shapes_hold_every_request_and_one_guard_row() -> None:
    assert [SHAPE.of(message) for message in Message] == [(3,), (9, 6), (9, 2), (9, 5)]


def test_a_step_posts_header_tokens_counts_drafts_and_then_the_next_begins() -> None:
    order = Order()
    for sequence in (1, 2, 3):
        assert order.begin() == sequence
        for message in (Message.HEADER, Message.TOKENS, Message.COUNTS, Message.DRAFTS):
            order.post(message)


def test_the_sequence_moves_before_the_header_is_posted() -> None:
    order = Order()
    order.begin()
    assert order.sequence == 1
    order.post(Message.HEADER)
    assert order.sequence == 1


@pytest.mark.parametrize("due", list(Message))
@pytest.mark.parametrize("posted", list(Message))
def test_any_other_message_than_the_one_that_is_due_is_refused(due: Message, posted: Message) -> None:
    order = Order()
    order.begin()
    for message in list(Message)[:due]:
        order.post(message)
    if posted is due:
        order.post(posted)
        return
    with pytest.raises(
        TokenTransportError, match=f"step 1 would post its {posted.name.lower()} where its {due.name.lower()}"
    ):
        order.post(posted)


def test_a_step_does_not_begin_inside_another() -> None:
    order = Order()
    order.begin()
    order.post(Message.HEADER)
    with pytest.raises(TokenTransportError, match="step 1 has not posted its tokens"):
        order.begin()


@pytest.mark.parametrize(
    ("message", "shape"),
    [
        (Message.TOKENS, (9, 6)),
        (Message.TOKENS, (8, 7)),
        (Message.DRAFTS, (8, 4)),
        (Message.DRAFTS, (8, 6)),
        (Message.COUNTS, (8, 3)),
    ],
)
def test_a_payload_of_another_size_is_refused_with_both_shapes(message: Message, shape: tuple[int, int]) -> None:
    with pytest.raises(TokenTransportError, match=r"of shape \[\d, \d\] do not fit into the fixed \[8, \d\]"):
        SHAPE.check_rows(message, shape)


@pytest.mark.parametrize(
    ("message", "shape"), [(Message.TOKENS, (8, 1)), (Message.TOKENS, (1, 6)), (Message.DRAFTS, (0, 5))]
)
def test_a_payload_that_fits_is_taken(message: Message, shape: tuple[int, int]) -> None:
    SHAPE.check_rows(message, shape)


@pytest.mark.parametrize("sequence", [1, 2**31 - 1, 2**31, 2**40])
def test_a_guard_fits_int32_and_is_never_the_sentinel(sequence: int) -> None:
    assert 0 <= guard_of(sequence) < 2**31
    assert guard_of(sequence) != SENTINEL
    assert guard_of(sequence) != guard_of(sequence + 1)


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
