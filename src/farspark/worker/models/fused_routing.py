"""The choice of the routed experts and the activation of the shared one, in one Triton launch, for GPUs.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models.experts import ROUTING_EPS, Routing
from farspark.worker.models.fused_products import added, power_of_two, summed
from farspark.worker.models.packed_experts import clamped_swiglu

_COLUMNS: Final = 1024  # of the shared expert, of one program


@triton.jit
def _route_kernel(
    scores,
    shared,
    bias,
    experts,
    weights,
    inner,
    score_slice,
    score_row,
    shared_slice,
    shared_row,
    scaling,
    routing_eps,
    limit,
    SCORE_SLICES: tl.constexpr,
    SHARED_SLICES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    CHOICES: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (t, 0): token t's experts and their weights. Program (t, c + 1): columns c of its shared expert's swiglu."""
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        expert = tl.arange(0, BLOCK)
        inside = expert < EXPERTS
        x = added(scores + token * score_row + expert, score_slice, inside, SCORE_SLICES)
        # log(1 + e^x), good to the last bits where e^x is small too.
        power = tl.exp(tl.minimum(x, 20.0))
        above = 1.0 + power
        soft = tl.where(above == 1.0, power, tl.log(above) * (power / (above - 1.0)))
        score = tl.sqrt(tl.where(x > 20.0, x, soft))
        biased = tl.where(inside, score + tl.load(bias + expert, mask=inside, other=0.0), float("-inf"))
        # NaN is passed on to all weights, and never an expert that there is not.
        poison = tl.sum(tl.where(inside, score * 0.0, 0.0))
        biased = tl.where(biased != biased, 0.0, biased)
        choice = tl.arange(0, CHOICES)
        chosen = tl.zeros([CHOICES], tl.int32)
        shares = tl.zeros([CHOICES], tl.float32)
        for k in tl.static_range(PER_TOKEN):
            best = tl.min(tl.where(biased == tl.max(biased), expert, EXPERTS - 1))
            share = tl.sum(tl.where(expert == best, score, 0.0))
            chosen = tl.where(choice == k, best, chosen)
            shares = tl.where(choice == k, share, shares)
            biased = tl.where(expert == best, float("-inf"), biased)
        shares = shares / (tl.sum(shares) + routing_eps) * scaling + poison
        at = token * PER_TOKEN + choice
        tl.store(experts + at, chosen.to(tl.int64), mask=choice < PER_TOKEN)
        tl.store(weights + at, shares, mask=choice < PER_TOKEN)
    else:
        column = (tl.program_id(1) - 1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < INNER
        dtype = inner.dtype.element_ty
        source = shared + token * shared_row + column
        gate = summed(source, shared_slice, is_column, SHARED_SLICES, dtype)
        up = summed(source + INNER, shared_slice, is_column, SHARED_SLICES, dtype)
        tl.store(inner + token * INNER + column, clamped_swiglu(gate, up, limit).to(dtype), mask=is_column)


def route(
    scores: Tensor, shared: Tensor, bias: Tensor, per_token: int, scaling: float, limit: float, dtype: torch.dtype
) -> tuple[Routing, Tensor]:
    """(the experts of T tokens, the shared expert's activation [T, inner]) of two products.

    `scores` [slices, T, experts] of the router, not rounded, `shared` [slices, T, 2 * inner], gate first.
    """
    tokens, count, inner = scores.shape[1], scores.shape[2], shared.shape[2] // 2
    experts = torch.empty((tokens, per_token), dtype=torch.int64, device=scores.device)
    weights = torch.empty((tokens, per_token), dtype=torch.float32, device=scores.device)
    activated = torch.empty((tokens, inner), dtype=dtype, device=scores.device)
    _route_kernel[(tokens, 1 + triton.cdiv(inner, _COLUMNS))](
        scores,
        shared,
        bias,
        experts,
        weights,
        activated,
        *scores.stride()[:2],
        *shared.stride()[:2],
        scaling,
        ROUTING_EPS,
        limit,
        SCORE_SLICES=len(scores),
        SHARED_SLICES=len(shared),
        EXPERTS=count,
        BLOCK=power_of_two(count),
        PER_TOKEN=per_token,
        CHOICES=power_of_two(per_token),
        INNER=inner,
        COLUMNS=_COLUMNS,
    )
    return Routing(experts, weights), activated
