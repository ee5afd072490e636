from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.heads import (
    SUPPORT,
    ConfidenceHead,
    VanillaMarkov,
    draw,
    draw_uniforms,
    greedy,
    lowest_of_equals,
    margin,
)

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


# Drawing ----------------------------------------------------------------------------------------------------------------


def test_a_draw_says_what_it_was_drawn_from() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 3
    temperatures = torch.tensor([0.7, 1.0, 2.5])
    found = draw(logits, temperatures, torch.rand(3, dtype=torch.float64))
    for row in range(3):
        values, ids = logits[row].double().topk(SUPPORT)
        assert found.support[row].tolist() == ids.tolist()
        expected = torch.softmax(values / float(temperatures[row]), dim=0)
        assert found.q[row].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
        assert float(found.margins[row]) == pytest.approx(float(values[0] - values[1]))
    assert found.q.sum(dim=1).tolist() == pytest.approx([1.0] * 3, abs=1e-6)


def test_a_token_is_drawn_as_often_as_its_q_says() -> None:
    """Of every share of [0, 1) the token whose q covers it: 200,000 draws, chi-square within five deviations."""
    count = 200_000
    logits = (torch.randn(1, 60, generator=torch.Generator().manual_seed(2)) * 2).expand(count, -1)
    uniforms = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    found = draw(logits, torch.full((count,), 0.8), uniforms)
    expected = torch.zeros(60).index_put((found.support[0],), found.q[0]) * count
    seen = torch.bincount(found.tokens, minlength=60)
    likely = expected > 5
    chi2 = float(((seen - expected).square() / expected)[likely].sum())
    freedom = int(likely.sum()) - 1
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)
    assert not seen[expected == 0].any()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_share_draw_a_token_that_has_one(uniform: float) -> None:
    """Also where a low temperature leaves one token: the others' probabilities are 0, and are never drawn."""
    logits = torch.linspace(0, -4000, 100).unsqueeze(0)
    found = draw(logits, torch.tensor([0.01]), torch.tensor([uniform], dtype=torch.float64))
    assert found.tokens.tolist() == [0]
    assert found.q[0, 0] == 1
    flat = draw(torch.zeros(1, 100), torch.tensor([1.0]), torch.tensor([uniform], dtype=torch.float64))
    assert flat.tokens[0] == flat.support[0, 0 if uniform == 0 else SUPPORT - 1]


def test_ID_RANGE_a_draw_from_nan_is_an_id_in_range() -> None:
    found = draw(torch.full((1, 40), NAN), torch.tensor([1.0]), torch.tensor([0.3], dtype=torch.float64))
    assert 0 <= int(found.tokens[0]) < 40


def test_the_draws_are_those_that_the_engine_expects() -> None:
    """Bit for bit what `farspark.engine.draws` makes in numpy of the same numbers; neither side may change alone."""
    from farspark.engine.draws import draws

    rng = np.random.default_rng(7)
    seeds = np.concatenate([rng.integers(-(2**63), 2**63, 50), [0, -1, 2**63 - 1, -(2**63)]]).astype(np.int64)
    anchors = rng.integers(0, 2**31, len(seeds))
    found = draw_uniforms(torch.from_numpy(seeds), torch.from_numpy(anchors), 7)
    assert found.numpy().tolist() == draws(seeds, anchors, 7).tolist()
    assert float(found.min()) >= 0
    assert float(found.max()) < 1
