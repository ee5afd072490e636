"""The heads behind the block: the Markov bias between drafts, the confidence, and the choice of the token."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Rounds(Protocol):
    """The part of `Arithmetic` that the heads use."""

    def round(self, x: Tensor) -> Tensor: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...


class VanillaMarkov:
    """B(prev) = W2 · W1[prev]: a bias on the logits from the token before, anchor included.

    `w1` [vocabulary, r] embeds the previous token, `w2` [drafted vocabulary, r] projects; both in the carrier dtype.
    vLLM scales this bias as it scales the base logits.
    """

    def __init__(self, w1: Tensor, w2: Tensor, scale: float, arithmetic: Rounds) -> None:
        self._w1 = w1
        self._w2 = w2
        self._scale = scale
        self._arithmetic = arithmetic

    def embed(self, previous: Tensor) -> Tensor:
        """int64 [B] -> [B, r]"""
        return F.embedding(previous, self._w1)

    def bias(self, embedded: Tensor) -> Tensor:
        """[B, r] -> [B, vocabulary]"""
        bias = self._arithmetic.linear(embedded, self._w2)
        return bias if self._scale == 1.0 else self._arithmetic.round(bias * self._scale)


class ConfidenceHead:
    """c = sigmoid(w · [h ; E(prev)] + b), in float32 whatever the model's dtype: P(accepted | all before accepted).

    `weight` [1, hidden (+ r)] and `bias` [1], float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor, *, with_markov: bool) -> None:
        self._weight = weight.float()
        self._bias = bias.float()
        self._with_markov = with_markov

    def __call__(self, hidden: Tensor, previous_embedded: Tensor | None) -> Tensor:
        """[..., hidden], [..., r] (None without a Markov head) -> float32 [...]"""
        features = hidden.float()
        if self._with_markov:
            assert previous_embedded is not None
            features = torch.cat((features, previous_embedded.float()), dim=-1)
        return torch.sigmoid(F.linear(features, self._weight, self._bias)).squeeze(-1)


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


def margin(logits: Tensor) -> Tensor:
    """float32 [B]: greatest minus second greatest logit of [B, vocabulary]; 0 for a tie."""
    top = logits.float().topk(2, dim=-1).values
    return top[:, 0] - top[:, 1]
