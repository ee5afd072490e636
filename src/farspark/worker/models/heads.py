"""The heads behind the block: the Markov bias between drafts, the confidence, and the choice of the token."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# Ids that a draft is drawn from: the most probable ones.
SUPPORT: Final = 32
# What sets the draws apart from whatever else may be made of a request's seed, the target's own noise above all.
DRAW_DOMAIN: Final = 0x46535041524B0001  # "FSPARK", 1
# SplitMix64's increment, and the constants of its finaliser (Stafford's variant 13), as signed integers of 64 bits.
_GAMMA: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX: Final = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))


class Rounds(Protocol):
    """The part of `Arithmetic` that the heads use."""

    def round(self, x: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class MarkovHead(Protocol):
    """What is added to the logits of a position for the token in front of it, anchor included, one position after the other."""

    def embed(self, previous: Tensor) -> Tensor:
        """int64 [...], the target's ids -> [..., r]: also what the confidence reads."""
        ...

    def start(self, anchors: Tensor, ignored: Tensor) -> Tensor | None:
        """The state in front of the first position that predicts, [B, r]; None for a head without one.

        `anchors` int64 [B] are tokens, `ignored` [B, S, hidden] what the block gave for the S positions before.
        """
        ...

    def step(
        self, base: Tensor, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(logits, the next state) of one position: base [B, vocabulary], hidden [B, hidden], embedded [B, r]."""
        ...


class VanillaMarkov:
    """A `MarkovHead` with B(prev) = W2 · W1[prev].

    `w1` [vocabulary, r] embeds the previous token, `w2` [drafted vocabulary, r] projects; both in the carrier dtype.
    vLLM scales this bias as it scales the base logits.
    """

    def __init__(self, w1: Tensor, w2: Tensor, scale: float, arithmetic: Rounds) -> None:
        self.w1 = w1
        self.w2 = w2
        self.scale = scale
        self.arithmetic = arithmetic

    def embed(self, previous: Tensor) -> Tensor:
        return F.embedding(previous, self.w1)

    def start(self, anchors: Tensor, ignored: Tensor) -> Tensor | None:
        return None

    def step(
        self, base: Tensor, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self.arithmetic.round(base + self.bias(embedded)), None

    def bias(self, latent: Tensor) -> Tensor:
        """[B, r] -> [B, vocabulary]"""
        bias = self.arithmetic.linear(latent, self.w2)
        return bias if self.scale == 1.0 else self.arithmetic.round(bias * self.scale)


class SoftCappedMarkov(VanillaMarkov):
    """B(prev) = c · tanh(W2 · W1[prev] / c), c = `cap`: vLLM sends the bias through what it sends the base logits through."""

    def __init__(self, w1: Tensor, w2: Tensor, cap: float, arithmetic: Rounds) -> None:
        super().__init__(w1, w2, 1.0, arithmetic)
        self.cap = cap

    def bias(self, latent: Tensor) -> Tensor:
        return soft_capped(super().bias(latent), self.cap, self.arithmetic)


class _OverPlain:
    """What a head has that shares the two matrices of a `VanillaMarkov`, and has a projection of its own."""

    def __init__(self, plain: VanillaMarkov, weight: Tensor, bias: Tensor) -> None:
        self.plain = plain
        self._weight = weight
        self._bias = bias

    def embed(self, previous: Tensor) -> Tensor:
        return self.plain.embed(previous)


class GatedMarkov(_OverPlain):
    """A `MarkovHead` with B = W2 · (g ⊙ W1[prev]), g = σ(G · [h ; W1[prev]] + b); `weight` [r, hidden + r], `bias` [r].

    `plain` embeds and projects.
    """

    def start(self, anchors: Tensor, ignored: Tensor) -> Tensor | None:
        return None

    def step(
        self, base: Tensor, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        arithmetic = self.plain.arithmetic
        gate = arithmetic.linear(torch.cat((hidden, embedded), dim=-1), self._weight, self._bias)
        gated = arithmetic.round(arithmetic.round(torch.sigmoid(gate)) * embedded)
        return arithmetic.round(base + self.plain.bias(gated)), None


class RecurrentMarkov(_OverPlain):
    """A `MarkovHead` with B = W2 · tanh(o) and a state s that runs through the block, 0 in front of it.

    (g, c, o) = J · [s ; W1[prev] ; h] + b in three parts; s ← σ(g) ⊙ s + (1 - σ(g)) ⊙ tanh(c). `weight` [3r, 2r + hidden],
    `bias` [3r]; `plain` embeds and projects.
    """

    def start(self, anchors: Tensor, ignored: Tensor) -> Tensor | None:
        # Training runs the state through the whole block, so through the positions too that predict nothing; the token in
        # front of them is the anchor.
        embedded = self.embed(anchors)
        state = torch.zeros_like(embedded)
        for hidden in ignored.unbind(dim=1):
            state, _ = self._advance(hidden, embedded, state)
        return state

    def step(
        self, base: Tensor, hidden: Tensor, embedded: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert state is not None
        state, output = self._advance(hidden, embedded, state)
        return self.plain.arithmetic.round(base + self.plain.bias(output)), state

    def _advance(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(the next state, tanh(o)), [B, r] each."""
        arithmetic = self.plain.arithmetic
        joint = arithmetic.linear(torch.cat((state, embedded, hidden), dim=-1), self._weight, self._bias)
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate, candidate = arithmetic.round(torch.sigmoid(gate)), arithmetic.round(torch.tanh(candidate))
        kept, new = arithmetic.round(gate * state), arithmetic.round(arithmetic.round(1.0 - gate) * candidate)
        return arithmetic.round(kept + new), arithmetic.round(torch.tanh(output))


def soft_capped(logits: Tensor, cap: float, arithmetic: Rounds) -> Tensor:
    """cap · tanh(logits / cap), rounded after each of the three."""
    return arithmetic.round(arithmetic.round(torch.tanh(arithmetic.round(logits / cap))) * cap)


class ConfidenceHead:
    """c = sigmoid(w · [h ; E(prev)] + b), in float32 whatever the model's dtype: P(accepted | all before accepted).

    `weight` [1, hidden (+ r)] and `bias` [1] (None: 0), float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, with_markov: bool) -> None:
        self.weight = weight.float()
        self.bias = None if bias is None else bias.float()
        self.with_markov = with_markov

    def __call__(self, hidden: Tensor, previous_embedded: Tensor | None) -> Tensor:
        """[..., hidden], [..., r] (None without a Markov head) -> float32 [...]"""
        features = hidden.float()
        if self.with_markov:
            assert previous_embedded is not None
            features = torch.cat((features, previous_embedded.float()), dim=-1)
        return torch.sigmoid(F.linear(features, self.weight, self.bias)).squeeze(-1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(int64 [B] the lowest id with the greatest logit, float32 [B] that logit) of [B, vocabulary].

    An id in range even where logits are NaN; the greatest logit is then NaN, which is how the caller learns of it.
    """
    if logits.device.type != "cpu":
        return lowest_of_equals(logits)
    # Only the CPU's argmax promises the first of several maxima; it is several times slower in bf16 than in float32.
    wide = logits.float()
    ids = wide.argmax(dim=-1)
    return ids, wide.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def lowest_of_equals(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`greedy` where argmax may answer with any of several equal maxima."""
    top = logits.amax(dim=-1, keepdim=True)
    everyone = torch.arange(logits.shape[-1], device=logits.device)
    ids = torch.where(logits == top, everyone, logits.shape[-1] - 1).amin(dim=-1)
    return ids, top.squeeze(-1).float()


class Draw(NamedTuple):
    """One draft per request, and what it was drawn from."""

    tokens: Tensor  # int64 [B], rows of the logits
    support: Tensor  # int64 [B, SUPPORT], the rows with the greatest logits, in descending order
    q: Tensor  # float32 [B, SUPPORT], their probabilities, which sum to 1 but for rounding
    margins: Tensor  # float32 [B], greatest minus second greatest logit


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Draw:
    """Draw from softmax(logits / temperature) over the SUPPORT greatest logits of [B, vocabulary].

    `temperatures` float32 [B]; where one is 0 what is drawn means nothing. `uniforms` float64 [B] in [0, 1): the token is where
    the cumulated q first exceeds that share of their sum, so it is drawn from q exactly as it is returned, rounding included.
    """
    values, support = logits.float().topk(SUPPORT, dim=-1)
    scale = torch.where(temperatures > 0, temperatures, 1.0)
    q = torch.softmax((values - values[:, :1]) / scale.unsqueeze(-1), dim=-1)
    reached = q.double().cumsum(dim=-1)
    places = (reached <= uniforms.unsqueeze(-1) * reached[:, -1:]).sum(dim=-1, keepdim=True).clamp_(max=SUPPORT - 1)
    return Draw(support.gather(-1, places).squeeze(-1), support, q, values[:, 0] - values[:, 1])


def draw_uniforms(seeds: Tensor, anchors: Tensor, steps: int) -> Tensor:
    """float64 [B, steps] in [0, 1): the draws of the drafts at positions anchor + 1 .. anchor + steps.

    A pure function of the request's seed int64 [B], of the absolute positions of its anchor int64 [B] and of the draft, and of
    DRAW_DOMAIN. With the anchor in it no draw is ever used for two rounds: a position that is drafted again after a rejection
    is drafted afresh. Source: SplitMix64 (Steele, Lea and Flood 2014), one finaliser for each of the three.
    """
    positions = anchors.unsqueeze(1) + torch.arange(1, steps + 1, device=anchors.device)
    state = _mixed(_mixed(seeds ^ DRAW_DOMAIN) + anchors * _GAMMA)
    return _shifted(_mixed(state.unsqueeze(1) + positions * _GAMMA), 11).double() * 2.0**-53


def _mixed(bits: Tensor) -> Tensor:
    for shift, factor in _MIX:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros from the left, as torch has no unsigned integers of 64 bits for that."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def margin(logits: Tensor) -> Tensor:
    """float32 [B]: greatest minus second greatest logit of [B, vocabulary]; 0 for a tie."""
    top = logits.float().topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]
