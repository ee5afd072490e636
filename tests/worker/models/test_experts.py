from __future__ import annotations

import math

import pytest
import torch
from tests.fakes.plain_deepseek import PlainDeepseek
from tests.fakes.tiny_deepseek import tiny_config, tiny_tensors
from torch import Tensor

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.experts import Experts, Router, Routing, swiglu

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT32 = Arithmetic(torch.float32, torch.float32)
BFLOAT16 = Arithmetic(torch.bfloat16, torch.bfloat16)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_experts(arithmetic: Arithmetic, group: int | None = None, limit: float = 0.75) -> Experts:
    """7 experts of 64 x 32."""
    gate_up, down = make(7, 64, 64, seed=1) / 8, make(7, 64, 32, seed=2) / 6
    return Experts(gate_up.to(arithmetic.carrier), down.to(arithmetic.carrier), limit, group, arithmetic)


def routed(x: Tensor, per_token: int = 3) -> Routing:
    router = Router(make(7, 64, seed=3) / 8, make(7, seed=4) / 4, per_token, 1.5)
    return router(x)


# Routing --------------------------------------------------------------------------------------------------------------


def test_the_bias_chooses_and_does_not_weigh() -> None:
    weight = torch.zeros(4, 2)
    weight[:, 0] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    x = torch.tensor([[1.0, 0.0]])
    scores = [math.sqrt(math.log1p(math.exp(value))) for value in (3, 2, 1, 0)]
    plain = Router(weight, torch.zeros(4), 2, 1.0)(x)
    assert sorted(plain.experts[0].tolist()) == [0, 1]
    biased = Router(weight, torch.tensor([-9.0, 0.0, 0.0, 9.0]), 2, 2.5)(x)
    assert biased.experts[0].tolist() == [3, 1]
    wanted = [2.5 * score / (scores[3] + scores[1]) for score in (scores[3], scores[1])]
    assert biased.weights[0].tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("version", ["v4", "v41"])
def test_the_routing_is_that_of_the_formulas(version: str) -> None:
    config = tiny_config(version)
    plain = PlainDeepseek(config, tiny_tensors(config))
    text = plain.text
    count = text["dspark_num_experts_per_tok"] if version == "v41" else text["num_experts_per_tok"]
    router = Router(
        plain.weights["mtp.1.ffn.gate.weight"],
        plain.weights["mtp.1.ffn.gate.bias"],
        count,
        text["routed_scaling_factor"],
    )
    x = make(6, text["hidden_size"], seed=5)
    routing = router(x)
    for row in range(6):
        wanted = plain.chosen_experts(x[row], 1)
        assert router.margins(x)[row] == pytest.approx(plain.margins[-1], abs=1e-5)
        found = dict(zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True))
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_margin_is_between_the_last_chosen_and_the_first_not_chosen_biased_score() -> None:
    weight = torch.zeros(4, 2)
    weight[:, 0] = torch.tensor([3.0, 2.0, 1.0, 0.0])
    scores = [math.sqrt(math.log1p(math.exp(value))) for value in (3, 2, 1, 0)]
    x = torch.tensor([[1.0, 0.0]])
    for bias, last, next_one in (
        ([0.0, 0.0, 0.0, 0.0], scores[1], scores[2]),
        # The order is 3, 1, 2, 0, by the bias.
        ([-9.0, 0.0, 0.0, 9.0], scores[1], scores[2]),
        # Below 0: 0, then 1; 2 and 3 are further down.
        ([-2.0, -2.0, -5.0, -5.0], scores[1] - 2, scores[2] - 5),
    ):
        found = Router(weight, torch.tensor(bias), 2, 1.0).margins(x)
        assert found.dtype == torch.float32
        assert found.tolist() == pytest.approx([(last - next_one) / abs(last)])


def test_equal_scores_have_no_margin_and_a_choice_of_all_has_the_greatest() -> None:
    x, weight = make(5, 64, seed=6), make(4, 64, seed=3) / 8
    weight[2] = weight[0]
    alike = Router(weight, torch.tensor([1.0, 5.0, 1.0, -9.0]), 2, 1.0)
    assert alike.margins(x).tolist() == pytest.approx([0.0] * 5, abs=1e-6)
    nothing = Router(torch.zeros(4, 64), torch.full((4,), -math.sqrt(math.log(2))), 2, 1.0)
    assert nothing.margins(x).tolist() == [0.0] * 5, "scores of 0 are equal, too"
    assert Router(weight, torch.zeros(4), 4, 1.0).margins(x).tolist() == [math.inf] * 5


# Experts --------------------------------------------------------------------------------------------------------------


def test_the_gate_is_bounded_above_and_the_other_branch_on_both_sides() -> None:
    gate, up = torch.tensor([-50.0, 3.0, 50.0, 1.0]), torch.tensor([1.0, -50.0, 50.0, 0.5])
    silu = [value / (1 + math.exp(-value)) for value in (-50, 3, 10, 1)]
    wanted = [a * b for a, b in zip(silu, (1, -10, 10, 0.5), strict=True)]
    assert swiglu(gate, up, 10.0).tolist() == pytest.approx(wanted, rel=1e-5)


def one_by_one(x: Tensor, routing: Routing, experts: Experts, limit: float = 0.75) -> Tensor:
    """float32, token by token and expert by expert."""
    total = torch.zeros(x.shape)
    for row in range(len(x)):
        for expert, weight in zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True):
            hidden = experts.gate_up[expert].float() @ x[row].float()
            gate, up = hidden[:32].clamp(max=limit), hidden[32:].clamp(-limit, limit)
            total[row] += experts.down[expert].float() @ (weight * gate * torch.sigmoid(gate) * up)
    return total


def test_the_sum_over_the_experts_of_each_token() -> None:
    experts, x = make_experts(FLOAT32), make(9, 64, seed=6)
    routing = routed(x)
    torch.testing.assert_close(experts(x, routing), one_by_one(x, routing, experts))


def test_an_expert_that_nobody_chose_may_hold_anything() -> None:
    experts, x = make_experts(FLOAT32), make(2, 64, seed=6)
    routing = Routing(torch.tensor([[1, 3], [3, 5]]), torch.tensor([[0.5, 1.0], [1.0, 0.25]]))
    wanted = experts(x, routing)
    for unused in (0, 2, 4, 6):
        experts.gate_up[unused] = math.nan
    assert torch.equal(experts(x, routing), wanted)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("group", [None, 32])
def test_both_ways_to_run_the_experts_agree(tokens: int, group: int | None) -> None:
    """The grouped product is what a GPU uses; it runs on a CPU as well."""
    experts, x = make_experts(BFLOAT16, group), make(tokens, 64, seed=tokens).bfloat16()
    routing = routed(x)
    torch.testing.assert_close(experts.grouped(x, routing), experts.looped(x, routing), rtol=0.02, atol=0.02)
    assert experts.grouped(x, routing).dtype == torch.float32


@pytest.mark.parametrize("group", [None, 32])
def test_running_every_expert_gives_the_same_sum(group: int | None) -> None:
    """What a GPU does in float32, and an older one always."""
    experts, x = make_experts(FLOAT32, group), make(9, 64, seed=6)
    routing = routed(x)
    torch.testing.assert_close(experts.unchosen_too(x, routing), experts.looped(x, routing))


def test_grouping_bears_that_all_tokens_choose_the_same_experts() -> None:
    experts, x = make_experts(BFLOAT16), make(6, 64, seed=8).bfloat16()
    routing = Routing(torch.tensor([[6, 2]] * 6), torch.full((6, 2), 0.5))
    torch.testing.assert_close(experts.grouped(x, routing), experts.looped(x, routing), rtol=0.02, atol=0.02)


def test_the_routing_weight_goes_in_before_the_second_rounding() -> None:
    """Through fp8 a weight before w2 is not a weight behind it."""
    experts, x = make_experts(FLOAT32, 32), make(4, 64, seed=9)
    routing = Routing(torch.tensor([[0], [1], [2], [3]]), torch.full((4, 1), 0.3))
    before = experts(x, routing)
    behind = 0.3 * experts(x, routing._replace(weights=torch.ones(4, 1)))
    assert not torch.allclose(before, behind, rtol=1e-4, atol=1e-4)
    exact = make_experts(FLOAT32)
    torch.testing.assert_close(exact(x, routing), 0.3 * exact(x, routing._replace(weights=torch.ones(4, 1))))
