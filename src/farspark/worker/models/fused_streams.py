"""Hyper-connections in a few Triton launches, for GPUs: as plain operations the Sinkhorn iterations alone are a hundred.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models.hyper_connections import HyperConnection, Mixes

# Programs that share one token's projection: a few tokens must fill a GPU.
_SPLITS: Final = 16
_COLUMNS: Final = 512


@triton.jit
def _project_kernel(
    stream,
    fn,
    partial,
    width,
    per_split,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (t, s): part s of fn · h and of Σ h² of token t: [T, splits, rows], the squares behind the outputs."""
    token, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    squares = 0.0
    for start in range(0, per_split, COLUMNS):
        column = split * per_split + start + tl.arange(0, COLUMNS)
        inside = (start + tl.arange(0, COLUMNS) < per_split) & (column < width)
        values = tl.load(stream + token * width + column, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(
            fn + row[:, None].to(tl.int64) * width + column[None, :],
            mask=(row < OUTPUTS)[:, None] & inside[None, :],
            other=0.0,
        )
        total += tl.sum(weights * values[None, :], axis=1)
        squares += tl.sum(values * values)
    tl.store(partial + (token * SPLITS + split) * ROWS + row, tl.where(row == OUTPUTS, squares, total))


@triton.jit
def _mixes_kernel(
    partial,
    base,
    scale,
    pre,
    post,
    comb,
    width,
    norm_eps,
    eps,
    COPIES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program t: the three sets of weights of token t."""
    token = tl.program_id(0).to(tl.int64)
    split, copy = tl.arange(0, SPLITS), tl.arange(0, COPIES)
    parts = partial + (token * SPLITS + split) * ROWS
    outputs: tl.constexpr = (2 + COPIES) * COPIES
    factor = tl.rsqrt(tl.sum(tl.load(parts + outputs)) / width + norm_eps)
    before = tl.sum(tl.load(parts[:, None] + copy[None, :]), axis=0) * factor
    after = tl.sum(tl.load(parts[:, None] + COPIES + copy[None, :]), axis=0) * factor
    cell = copy[:, None] * COPIES + copy[None, :]
    mixed = tl.sum(tl.load(parts[:, None, None] + 2 * COPIES + cell[None, :, :]), axis=0) * factor
    before = tl.sigmoid(before * tl.load(scale) + tl.load(base + copy)) + eps
    after = 2 * tl.sigmoid(after * tl.load(scale + 1) + tl.load(base + COPIES + copy))
    mixed = mixed * tl.load(scale + 2) + tl.load(base + 2 * COPIES + cell)
    mixed = tl.exp(mixed - tl.max(mixed, axis=1)[:, None])
    mixed = mixed / tl.sum(mixed, axis=1)[:, None] + eps
    mixed = mixed / (tl.sum(mixed, axis=0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        mixed = mixed / (tl.sum(mixed, axis=1) + eps)[:, None]
        mixed = mixed / (tl.sum(mixed, axis=0) + eps)[None, :]
    tl.store(pre + token * COPIES + copy, before)
    tl.store(post + token * COPIES + copy, after)
    tl.store(comb + token * COPIES * COPIES + cell, mixed)


@triton.jit
def _collapse_norm_kernel(
    stream, pre, weight, out, width, eps, COPIES: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Program t: Σ pre_i h_i, rounded; then, with a norm, normed and rounded once more."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for copy in tl.static_range(COPIES):
        values = tl.load(stream + (token * COPIES + copy) * width + column, mask=inside, other=0.0)
        total += tl.load(pre + token * COPIES + copy) * values.to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if HAS_NORM:
        total *= tl.rsqrt(tl.sum(total * total) / width + eps)
        total *= tl.load(weight + column, mask=inside, other=0.0)
    tl.store(out + token * width + column, total.to(dtype), mask=inside)


@triton.jit
def _spread_kernel(output, stream, post, comb, out, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, c): columns c of all copies of token t: post_j y + Σ_i comb_ij h_i."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    y = tl.load(output + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for to in tl.static_range(COPIES):
        total = tl.load(post + token * COPIES + to) * y
        for source in tl.static_range(COPIES):
            values = tl.load(stream + (token * COPIES + source) * width + column, mask=inside, other=0.0)
            total += tl.load(comb + (token * COPIES + source) * COPIES + to) * values.to(tl.float32)
        tl.store(out + (token * COPIES + to) * width + column, total.to(out.dtype.element_ty), mask=inside)


def mixes(connection: HyperConnection, stream: Tensor) -> Mixes:
    """As the connection itself: [..., copies, D] -> its mixes, in two launches."""
    copies, width = stream.shape[-2], stream.shape[-2] * stream.shape[-1]
    flat = stream.contiguous().view(-1, width)
    tokens, outputs = len(flat), len(connection.fn)
    rows = int(triton.next_power_of_2(outputs + 1))
    partial = torch.empty((tokens, _SPLITS, rows), dtype=torch.float32, device=stream.device)
    _project_kernel[(tokens, _SPLITS)](
        flat,
        connection.fn,
        partial,
        width,
        triton.cdiv(width, _SPLITS),
        OUTPUTS=outputs,
        ROWS=rows,
        SPLITS=_SPLITS,
        COLUMNS=_COLUMNS,
    )
    leading = stream.shape[:-2]
    pre, post = (torch.empty((*leading, copies), dtype=torch.float32, device=stream.device) for _ in range(2))
    comb = torch.empty((*leading, copies, copies), dtype=torch.float32, device=stream.device)
    _mixes_kernel[(tokens,)](
        partial,
        connection.base,
        connection.scale,
        pre,
        post,
        comb,
        width,
        connection.norm_eps,
        connection.eps,
        COPIES=copies,
        ITERATIONS=connection.iterations,
        ROWS=rows,
        SPLITS=_SPLITS,
        num_warps=1,
    )
    return Mixes(pre, post, comb)


def collapse(stream: Tensor, pre: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Σ_i pre_i h_i of [..., copies, D] rounded to `dtype`; with `weight` float32 [D] its norm, rounded once more: [..., D]."""
    copies, width = stream.shape[-2:]
    flat = stream.contiguous()
    out = torch.empty((*stream.shape[:-2], width), dtype=dtype, device=stream.device)
    _collapse_norm_kernel[(out.numel() // width,)](
        flat,
        pre.contiguous(),
        pre if weight is None else weight,
        out,
        width,
        eps,
        COPIES=copies,
        HAS_NORM=weight is not None,
        BLOCK=int(triton.next_power_of_2(width)),
        num_warps=8,
    )
    return out


def spread(output: Tensor, stream: Tensor, mixed: Mixes, dtype: torch.dtype) -> Tensor:
    """post_j y + Σ_i comb_ij h_i of [..., D] and [..., copies, D], rounded to `dtype`: [..., copies, D]."""
    copies, width = stream.shape[-2:]
    out = torch.empty(stream.shape, dtype=dtype, device=stream.device)
    block = 1024
    _spread_kernel[(out.numel() // (copies * width), triton.cdiv(width, block))](
        output.contiguous(),
        stream.contiguous(),
        mixed.post,
        mixed.comb,
        out,
        width,
        COPIES=copies,
        BLOCK=block,
    )
    return out
