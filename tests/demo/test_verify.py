"""The proof that a text is the target's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from farspark.demo.verify import Continue, TargetToken, bf16_step, judge


def alone(script: dict[tuple[int, ...], list[TargetToken]]) -> Continue:
    def continue_from(so_far: Sequence[int], at_most: int) -> Sequence[TargetToken]:
        return script[tuple(so_far)][:at_most]

    return continue_from


def sure(token: int) -> TargetToken:
    return TargetToken(token, ((token, 20.0), (999, 10.0)))


def tie(token: int, other: int, gap: float) -> TargetToken:
    return TargetToken(token, ((token, 20.0), (other, 20.0 - gap)))


@pytest.mark.parametrize(("logit", "step"), [(1.0, 2**-7), (1.99, 2**-7), (2.0, 2**-6), (-20.0, 2**-3), (0.5, 2**-8)])
def test_a_bf16_step_follows_the_exponent(logit: float, step: float) -> None:
    assert bf16_step(logit) == step


def test_the_same_tokens_are_equal() -> None:
    verdict = judge([1, 2, 3], alone({(): [sure(1), sure(2), sure(3)]}), limit=3, allow_ties=True)
    assert (verdict.equal, verdict.near_ties, verdict.tokens) == (True, 0, 3)


def test_a_near_tie_counts_as_equal_and_the_rest_is_judged_after_it() -> None:
    script = {(): [sure(1), tie(2, 7, 0.25), sure(3)], (1, 7): [sure(8), sure(9)]}
    verdict = judge([1, 7, 8, 9], alone(script), limit=4, allow_ties=True)
    assert (verdict.equal, verdict.near_ties) == (True, 1)


def test_a_wrong_token_behind_a_near_tie_is_still_found() -> None:
    script = {(): [tie(2, 7, 0.25)], (7,): [sure(8)]}
    verdict = judge([7, 6], alone(script), limit=2, allow_ties=True)
    assert not verdict.equal
    assert verdict.difference is not None
    assert "token 1 is 6" in verdict.difference


def test_a_gap_above_two_steps_is_a_difference() -> None:
    verdict = judge([7], alone({(): [tie(2, 7, 0.3)]}), limit=1, allow_ties=True)
    assert not verdict.equal


def test_a_token_that_is_none_of_the_top_two_is_a_difference_however_close_those_are() -> None:
    assert not judge([5], alone({(): [tie(2, 7, 0.0)]}), limit=1, allow_ties=True).equal


def test_in_float32_no_tie_is_allowed() -> None:
    assert not judge([7], alone({(): [tie(2, 7, 0.0)]}), limit=1, allow_ties=False).equal


def test_a_text_that_ends_early_or_late_is_a_difference() -> None:
    early = judge([1], alone({(): [sure(1), sure(2)]}), limit=5, allow_ties=True)
    late = judge([1, 2], alone({(): [sure(1)]}), limit=5, allow_ties=True)
    assert early.difference == "ends at token 1, the target alone goes on"
    assert late.difference == "goes on after token 1, where the target alone ends"


def test_a_near_tie_on_the_last_token_ends_the_judgement() -> None:
    assert judge([1, 7], alone({(): [sure(1), tie(2, 7, 0.0)]}), limit=2, allow_ties=True).equal
