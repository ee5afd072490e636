"""Mixture of experts as DeepSeek-V4 has it: routing by √softplus with a selection bias, clamped SwiGLU experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.quantised import QuantisedLinear, quantised_input

# Of the sum of the chosen scores; a constant of the training, whatever the norms' eps is.
ROUTING_EPS = 1e-20


class Routing(NamedTuple):
    """The experts of T tokens."""

    experts: Tensor  # int64 [T, k], all different in a row
    weights: Tensor  # float32 [T, k]


@dataclass(frozen=True, slots=True)
class Router:
    """All tensors are float32."""

    weight: Tensor  # [experts, D]
    bias: Tensor  # [experts]: for the choice only, the weights come from the scores without it
    per_token: int
    scaling: float

    def _scores(self, x: Tensor) -> Tensor:
        """float32 [T, experts]"""
        return F.softplus(F.linear(x.float(), self.weight)).sqrt()

    def margins(self, x: Tensor) -> Tensor:
        """float32 [T]: how far the last chosen expert's biased score is above the first not chosen one's, in shares of it.

        inf where every expert is chosen.
        """
        if self.per_token == len(self.bias):
            return x.new_full((len(x),), torch.inf, dtype=torch.float32)
        last, next_one = (self._scores(x) + self.bias).topk(self.per_token + 1, dim=-1).values[:, -2:].unbind(-1)
        # A score may be 0 or below, by its bias; equal ones are a tie, whatever they are.
        return ((last - next_one) / last.abs()).masked_fill(last == next_one, 0.0)

    def __call__(self, x: Tensor) -> Routing:
        """[T, D] -> the k experts with the greatest biased scores."""
        scores = self._scores(x)
        experts = (scores + self.bias).topk(self.per_token, dim=-1).indices
        chosen = scores.gather(-1, experts)
        return Routing(experts, chosen / (chosen.sum(dim=-1, keepdim=True) + ROUTING_EPS) * self.scaling)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) · clamp(up, ±limit), float32."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class SharedExpert:
    """The expert that every token goes through, with weight 1."""

    def __init__(self, gate_up: QuantisedLinear, down: QuantisedLinear, limit: float, arithmetic: Arithmetic) -> None:
        """`gate_up` makes [T, 2 * inner], gate first."""
        self.gate_up, self.down = gate_up, down
        self._limit = limit
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self._arithmetic.round(swiglu(gate, up, self._limit)))


class RoutedExperts(Protocol):
    """The routed experts of one stage."""

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Σ over a token's experts of w2(weight · swiglu(w1 x, w3 x)), summed in float32: [T, D] -> float32 [T, D]."""
        ...


class Experts:
    """The routed experts of one stage, decoded.

    `gate_up` [experts, 2 * inner, D] (gate first) and `down` [experts, D, inner], in the carrier dtype. `group`: as in
    `QuantisedLinear`.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, limit: float, group: int | None, arithmetic: Arithmetic) -> None:
        self.gate_up, self.down = gate_up, down
        self._limit = limit
        self._group = group
        self._arithmetic = arithmetic
        # Of other dtypes, and on older GPUs, torch's grouped product asks the host where the groups end.
        device = gate_up.device
        is_new = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        self._is_groupable = is_new and gate_up.dtype == torch.bfloat16

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Σ over a token's experts of w2(weight · swiglu(w1 x, w3 x)), summed in float32: [T, D] -> float32 [T, D]."""
        x = quantised_input(x, self._group)
        if x.device.type == "cpu":
            return self.looped(x, routing)
        return self.grouped(x, routing) if self._is_groupable else self.unchosen_too(x, routing)

    def looped(self, x: Tensor, routing: Routing) -> Tensor:
        """One expert after the other. Asks the host which are used, so it fits no CUDA graph."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(routing.experts).tolist():
            token, choice = torch.where(routing.experts == expert)
            hidden = self._arithmetic.linear(x[token], self.gate_up[expert])
            inner = self._activate(hidden, routing.weights[token, choice])
            total[token] += self._arithmetic.linear(inner, self.down[expert]).float()
        return total

    def unchosen_too(self, x: Tensor, routing: Routing) -> Tensor:
        """Every expert with all tokens, of which those that did not choose it have the weight 0: static shapes, many products."""
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            weights = torch.where(routing.experts == expert, routing.weights, 0.0).sum(dim=-1)
            inner = self._activate(self._arithmetic.linear(x, gate_up), weights)
            total += self._arithmetic.linear(inner, down).float()
        return total

    def grouped(self, x: Tensor, routing: Routing) -> Tensor:
        """All experts in two grouped products over the tokens sorted by expert: static shapes, and nothing asks the host."""
        per_token = routing.experts.shape[1]
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.zeros(len(self.gate_up), dtype=torch.int32, device=x.device)
        ends = counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
        hidden = torch._grouped_mm(x[order // per_token], self.gate_up.transpose(1, 2), offs=ends)
        inner = self._activate(hidden, routing.weights.flatten()[order])
        output = torch._grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
        unsorted = torch.empty_like(output).index_copy_(0, order, output)
        return unsorted.view(-1, per_token, x.shape[1]).float().sum(dim=1)

    def _activate(self, hidden: Tensor, weights: Tensor) -> Tensor:
        """The routing weight goes in before w2, and before the rounding, as in the reference."""
        gate, up = hidden.chunk(2, dim=-1)
        inner = self._arithmetic.round(swiglu(gate, up, self._limit) * weights.unsqueeze(-1))
        return quantised_input(inner, self._group)
