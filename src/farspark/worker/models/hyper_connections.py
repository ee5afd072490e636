"""Manifold-constrained hyper-connections: a residual stream of several copies, mixed around every sublayer.

Every sublayer derives three sets of weights from the stream h [copies, D] in front of it: `pre` collapses the copies into
the sublayer's input, `post` spreads its output over them, `comb` mixes the copies among themselves. V4 uses a sublayer's
own `pre`; V4.1 the one of the sublayer before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Mixes(NamedTuple):
    """Weights of one sublayer, float32."""

    pre: Tensor  # [..., copies]
    post: Tensor  # [..., copies]
    comb: Tensor  # [..., copies, copies]: from, to


@dataclass(frozen=True, slots=True)
class HyperConnection:
    """How one sublayer's weights come from the stream. All tensors are float32."""

    fn: Tensor  # [(2 + copies) * copies, copies * D]
    base: Tensor  # [(2 + copies) * copies]
    scale: Tensor  # [3]: of pre, post, comb
    copies: int
    iterations: int
    norm_eps: float
    eps: float

    def __call__(self, stream: Tensor) -> Mixes:
        """[..., copies, D] -> its mixes."""
        copies = self.copies
        weights = project_stream(stream, self.fn, self.norm_eps)
        parts = (slice(0, copies), slice(copies, 2 * copies), slice(2 * copies, None))
        pre, post, comb = (
            weights[..., part] * scale + self.base[part] for part, scale in zip(parts, self.scale, strict=True)
        )
        return Mixes(
            pre=torch.sigmoid(pre) + self.eps,
            post=2 * torch.sigmoid(post),
            comb=sinkhorn(comb.reshape(*comb.shape[:-1], copies, copies), self.iterations, self.eps),
        )


@dataclass(frozen=True, slots=True)
class HyperHead:
    """V4's own collapse of the last stream. All tensors are float32."""

    fn: Tensor  # [copies, copies * D]
    base: Tensor  # [copies]
    scale: Tensor  # [1]
    norm_eps: float
    eps: float

    def __call__(self, stream: Tensor) -> Tensor:
        """[..., copies, D] -> the weights of its collapse [..., copies]."""
        weights = project_stream(stream, self.fn, self.norm_eps)
        return torch.sigmoid(weights * self.scale + self.base) + self.eps


def project_stream(stream: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn · flatten(h) / √(mean(h²) + eps), one statistic over all copies: float32 [..., copies, D] -> [..., rows of fn]."""
    flat = stream.flatten(-2).float()
    return F.linear(flat, fn) * torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + eps)


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[..., copies, copies] -> nearly doubly stochastic: softmax over rows, then columns and rows normalised in turn.

    Ends with the columns, after `iterations` passes over them. `eps` keeps every divisor away from zero.
    """
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def collapse(stream: Tensor, pre: Tensor) -> Tensor:
    """Σ_i pre_i h_i: [..., copies, D], float32 [..., copies] -> float32 [..., D]."""
    return (pre.unsqueeze(-1) * stream.float()).sum(dim=-2)


def spread(output: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
    """h'_j = post_j y + Σ_i comb_ij h_i: [..., D], [..., copies, D] -> float32 [..., copies, D]."""
    mixed = (mixes.comb.unsqueeze(-1) * stream.float().unsqueeze(-2)).sum(dim=-3)
    return mixes.post.unsqueeze(-1) * output.float().unsqueeze(-2) + mixed
