from __future__ import annotations

import math

import pytest
import torch

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.heads import ConfidenceHead, VanillaMarkov, greedy, lowest_of_equals, margin

NAN = float("nan")
FLOAT32 = Arithmetic(torch.float32, torch.float32)
NATIVE = Arithmetic(torch.bfloat16, torch.bfloat16)
CARRIED = Arithmetic(torch.bfloat16, torch.float32)


@pytest.mark.parametrize("choose", [greedy, lowest_of_equals])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_of_several_greatest_logits_is_chosen(choose: type, dtype: torch.dtype) -> None:
    logits = torch.full((4, 1000), -1.0)
    logits[0, [7, 500, 999]] = 3.0
    logits[1, 999] = 3.0
    logits[2] = 2.0
    logits[3, [0, 1]] = 5.0
    ids, top = choose(logits.to(dtype))
    assert ids.tolist() == [7, 999, 0, 0]
    assert ids.dtype == torch.int64
    assert top.tolist() == [3, 3, 2, 5]
    assert top.dtype == torch.float32


@pytest.mark.parametrize("choose", [greedy, lowest_of_equals])
def test_ID_RANGE_nan_and_infinite_logits_give_an_id_in_range_and_a_top_that_tells(choose: type) -> None:
    logits = torch.zeros(4, 10)
    logits[0] = NAN
    logits[1, 4] = NAN
    logits[2, 6] = float("inf")
    logits[3] = -float("inf")
    ids, top = choose(logits)
    assert all(0 <= one < 10 for one in ids.tolist())
    assert not top.isfinite().any()


def test_the_margin_is_between_the_two_greatest() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.5, 0.0], [2.0, 2.0, 1.0, 0.0], [-3.0, -1.0, -9.0, -9.0]])
    assert margin(logits).tolist() == [0.5, 0.0, 2.0]


def test_MARKOV_the_bias_is_w2_times_the_row_of_w1() -> None:
    w1, w2 = torch.randn(11, 3), torch.randn(11, 3)
    for scale in (1.0, 0.5):
        head = VanillaMarkov(w1, w2, scale, FLOAT32)
        embedded = head.embed(torch.tensor([4, 0]))
        assert torch.equal(embedded, w1[[4, 0]])
        torch.testing.assert_close(head.bias(embedded), scale * (w1[[4, 0]] @ w2.T))


def test_MARKOV_bf16_biases_are_rounded_once_in_either_carrier() -> None:
    w1, w2 = torch.randn(11, 3).bfloat16(), torch.randn(11, 3).bfloat16()
    previous = torch.tensor([4, 0])
    exact = (w1[previous].double() @ w2.double().T).bfloat16()
    native = VanillaMarkov(w1, w2, 1.0, NATIVE)
    carried = VanillaMarkov(w1.float(), w2.float(), 1.0, CARRIED)
    assert torch.equal(native.bias(native.embed(previous)), exact)
    assert torch.equal(carried.bias(carried.embed(previous)), exact.float())


def test_CONF_MATH_the_confidence_is_one_sigmoid_of_hidden_and_markov_embedding() -> None:
    weight, bias = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([0.25])
    hidden, embedded = torch.tensor([[[1.0, 2.0], [0.0, 1.0]]]), torch.tensor([[[4.0], [-2.0]]])
    head = ConfidenceHead(weight, bias, with_markov=True)
    logits = [1.0 - 4.0 + 2.0 + 0.25, -2.0 - 1.0 + 0.25]
    assert head(hidden, embedded)[0].tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in logits])
    plain = ConfidenceHead(weight[:, :2], bias, with_markov=False)
    assert plain(hidden, None)[0].tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in (-2.75, -1.75)])


def test_CONF_MATH_it_is_float32_and_in_range_whatever_comes_in() -> None:
    head = ConfidenceHead(torch.tensor([[1e4]]).bfloat16(), torch.zeros(1).bfloat16(), with_markov=False)
    confidence = head(torch.tensor([[1e4], [-1e4], [0.0]]).bfloat16(), None)
    assert confidence.dtype == torch.float32
    assert confidence.tolist() == [1.0, 0.0, 0.5]
    assert head(torch.tensor([[NAN]]), None).isnan().all()
