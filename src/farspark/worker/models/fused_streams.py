"""Hyper-connections in two Triton launches between two sublayers, for GPUs: as plain operations the Sinkhorn iterations alone are
a hundred.

The first adds up what the sublayer's products left in slices, spreads it over the stream and projects the new stream for
the next sublayer's mixes, so that the stream is read once. The second makes the mixes, and the next sublayer's input.
Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.fused_products import power_of_two, summed
from farspark.worker.models.hyper_connections import HyperConnection, HyperHead, Mixes

_TOKENS: Final = 16  # of one program of the first: the least number of rows that a tensor core takes
_COLUMNS: Final = 32  # of each copy, of one program of the first


class Output(NamedTuple):
    """What a sublayer adds to the stream, before it is summed and rounded. T tokens."""

    sums: Tensor  # [slices, T, D]: the slices' sum is rounded
    routed: Tensor | None = None  # float32 [slices, T * k, D]: each token's k, each the sum of its slices, rounded


class Stream(NamedTuple):
    """Of T tokens, in front of a sublayer."""

    values: Tensor  # [T, copies, D]
    partial: Tensor  # float32 [T, parts, rows]: of the projection of the next mixes, and behind it of the squares' sum


@triton.jit(do_not_specialize=["tokens"])
def _advance_kernel(
    sums,
    routed,
    stream,
    post,
    comb,
    fn,
    out,
    partial,
    tokens,
    WIDTH: tl.constexpr,
    IS_FIRST: tl.constexpr,
    SLICES: tl.constexpr,
    ROUTED_SLICES: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (c, g): columns c of all copies of tokens g: post_j y + Σ_i comb_ij h_i, and their part of the projection by fn.

    IS_FIRST: `stream` is an embedding and `sums` the int64 ids of the tokens; every copy is the same. All that is read is read
    before the first store: a load behind a store waits for it.
    """
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_token = token < tokens
    token = token.to(tl.int64)
    inside = is_token[:, None] & (column < WIDTH)[None, :]
    dtype = out.dtype.element_ty
    if IS_FIRST:
        row = tl.load(sums + token, mask=is_token, other=0)
        a = tl.load(stream + row[:, None] * WIDTH + column[None, :], mask=inside, other=0.0)
        b, c, d = a, a, a
    else:
        place = token[:, None] * WIDTH + column[None, :]
        y = summed(sums + place, tokens * WIDTH, inside, SLICES, dtype)
        if PER_TOKEN > 0:
            total = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for choice in tl.static_range(PER_TOKEN):
                at = (token[:, None] * PER_TOKEN + choice) * WIDTH + column[None, :]
                total += summed(routed + at, tokens * PER_TOKEN * WIDTH, inside, ROUTED_SLICES, dtype)
            y = (total + y).to(dtype).to(tl.float32)
        held = stream + token[:, None] * (4 * WIDTH) + column[None, :]
        h0 = tl.load(held, mask=inside, other=0.0).to(tl.float32)
        h1 = tl.load(held + WIDTH, mask=inside, other=0.0).to(tl.float32)
        h2 = tl.load(held + 2 * WIDTH, mask=inside, other=0.0).to(tl.float32)
        h3 = tl.load(held + 3 * WIDTH, mask=inside, other=0.0).to(tl.float32)
        post += token * 4
        comb += token * 16
        a = _copy(0, y, h0, h1, h2, h3, post, comb, is_token).to(dtype)
        b = _copy(1, y, h0, h1, h2, h3, post, comb, is_token).to(dtype)
        c = _copy(2, y, h0, h1, h2, h3, post, comb, is_token).to(dtype)
        d = _copy(3, y, h0, h1, h2, h3, post, comb, is_token).to(dtype)
    if OUTPUTS > 0:
        row = tl.arange(0, ROWS)
        is_weight = (row < OUTPUTS)[None, :] & (column < WIDTH)[:, None]
        weights = fn + row[None, :] * (4 * WIDTH) + column[:, None]
        first, second = tl.load(weights, mask=is_weight, other=0.0), tl.load(weights + WIDTH, mask=is_weight, other=0.0)
        third = tl.load(weights + 2 * WIDTH, mask=is_weight, other=0.0)
        fourth = tl.load(weights + 3 * WIDTH, mask=is_weight, other=0.0)
        wa, wb, wc, wd = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)
        projected = tl.dot(wa, first, input_precision="tf32x3")
        projected = tl.dot(wb, second, projected, input_precision="tf32x3")
        projected = tl.dot(wc, third, projected, input_precision="tf32x3")
        projected = tl.dot(wd, fourth, projected, input_precision="tf32x3")
        squares = tl.sum(wa * wa + wb * wb + wc * wc + wd * wd, axis=1)
        part = (token * tl.num_programs(0) + tl.program_id(0))[:, None] * ROWS + row[None, :]
        tl.store(
            partial + part, tl.where((row == OUTPUTS)[None, :], squares[:, None], projected), mask=is_token[:, None]
        )
    target = out + token[:, None] * (4 * WIDTH) + column[None, :]
    tl.store(target, a, mask=inside)
    tl.store(target + WIDTH, b, mask=inside)
    tl.store(target + 2 * WIDTH, c, mask=inside)
    tl.store(target + 3 * WIDTH, d, mask=inside)


@triton.jit
def _copy(TO: tl.constexpr, y, h0, h1, h2, h3, post, comb, is_token):
    """The copy TO of the new stream, float32."""
    new = tl.load(post + TO, mask=is_token, other=0.0)[:, None] * y
    new += tl.load(comb + TO, mask=is_token, other=0.0)[:, None] * h0
    new += tl.load(comb + 4 + TO, mask=is_token, other=0.0)[:, None] * h1
    new += tl.load(comb + 8 + TO, mask=is_token, other=0.0)[:, None] * h2
    return new + tl.load(comb + 12 + TO, mask=is_token, other=0.0)[:, None] * h3


@triton.jit
def _input_kernel(
    stream,
    partial,
    base,
    scale,
    before,
    weight,
    x,
    pre,
    post,
    comb,
    before_stride,
    parts,
    norm_eps,
    eps,
    eps_of_input,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    IS_DELAYED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, 0): the collapse of token t, rounded, with a norm normed and rounded once more. Program (t, 1): its mixes."""
    token = tl.program_id(0).to(tl.int64)
    dtype = x.dtype.element_ty
    part = tl.arange(0, PARTS)
    is_part = part < parts
    source = partial + (token * parts + part) * ROWS
    if tl.program_id(1) == 0:
        if not IS_DELAYED:
            squares = tl.sum(tl.load(source + OUTPUTS, mask=is_part, other=0.0))
            factor = tl.rsqrt(squares / (COPIES * WIDTH) + norm_eps)
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        total = tl.zeros([BLOCK], tl.float32)
        for copy in tl.static_range(COPIES):
            if IS_DELAYED:
                share = tl.load(before + token * before_stride + copy)
            else:
                share = tl.sum(tl.load(source + copy, mask=is_part, other=0.0)) * factor
                share = tl.sigmoid(share * tl.load(scale) + tl.load(base + copy)) + eps
            values = tl.load(stream + (token * COPIES + copy) * WIDTH + column, mask=inside, other=0.0)
            total += share * values.to(tl.float32)
        total = total.to(dtype).to(tl.float32)
        if HAS_NORM:
            total *= tl.rsqrt(tl.sum(total * total) / WIDTH + eps_of_input)
            total *= tl.load(weight + column, mask=inside, other=0.0)
        tl.store(x + token * WIDTH + column, total.to(dtype), mask=inside)
    else:
        squares = tl.sum(tl.load(source + OUTPUTS, mask=is_part, other=0.0))
        factor = tl.rsqrt(squares / (COPIES * WIDTH) + norm_eps)
        copy = tl.arange(0, COPIES)
        cell = copy[:, None] * COPIES + copy[None, :]
        first = tl.load(source[:, None] + copy[None, :], mask=is_part[:, None], other=0.0)
        after = tl.load(source[:, None] + COPIES + copy[None, :], mask=is_part[:, None], other=0.0)
        both = tl.load(source[:, None, None] + 2 * COPIES + cell[None, :, :], mask=is_part[:, None, None], other=0.0)
        first, after, mixed = (
            tl.sum(first, axis=0) * factor,
            tl.sum(after, axis=0) * factor,
            tl.sum(both, axis=0) * factor,
        )
        first = tl.sigmoid(first * tl.load(scale) + tl.load(base + copy)) + eps
        after = 2 * tl.sigmoid(after * tl.load(scale + 1) + tl.load(base + COPIES + copy))
        mixed = mixed * tl.load(scale + 2) + tl.load(base + 2 * COPIES + cell)
        mixed = tl.exp(mixed - tl.max(mixed, axis=1)[:, None])
        mixed = mixed / tl.sum(mixed, axis=1)[:, None] + eps
        mixed = mixed / (tl.sum(mixed, axis=0) + eps)[None, :]
        for _ in range(ITERATIONS - 1):
            mixed = mixed / (tl.sum(mixed, axis=1) + eps)[:, None]
            mixed = mixed / (tl.sum(mixed, axis=0) + eps)[None, :]
        tl.store(pre + token * COPIES + copy, first)
        tl.store(post + token * COPIES + copy, after)
        tl.store(comb + token * COPIES * COPIES + cell, mixed)


def _rows_of(fn: Tensor) -> int:
    """The projection's rows, one for the squares, and what is missing to a size that a tensor core takes."""
    return power_of_two(len(fn) + 1, 16)


class FusedStreams:
    """`streams.Streams` of `FUSED_COPIES` copies. What a sublayer gives is an `Output`, or [T, D]."""

    def __init__(self, arithmetic: Arithmetic, eps: float) -> None:
        self._eps = eps

    def enter(self, tokens: Tensor, embedding: Tensor, connection: HyperConnection) -> Stream:
        values = torch.empty(
            (len(tokens), connection.copies, embedding.shape[1]), dtype=embedding.dtype, device=embedding.device
        )
        return _advance(Output(tokens), embedding, None, connection.fn, values)

    def sublayer_input(
        self, stream: Stream, connection: HyperConnection, before: Tensor | None, norm: Tensor
    ) -> tuple[Tensor, Mixes]:
        tokens, copies, _ = stream.values.shape
        device = stream.values.device
        pre, post = (torch.empty((tokens, copies), dtype=torch.float32, device=device) for _ in range(2))
        mixes = Mixes(pre, post, torch.empty((tokens, copies, copies), dtype=torch.float32, device=device))
        return _input(stream, connection, connection.iterations, mixes, before, norm, self._eps), mixes

    def advance(
        self, output: Output | Tensor, stream: Stream, mixes: Mixes, following: HyperConnection | HyperHead | None
    ) -> Stream:
        if isinstance(output, Tensor):
            output = Output(output.contiguous().unsqueeze(0))
        fn = None if following is None else following.fn
        return _advance(output, stream.values, mixes, fn, torch.empty_like(stream.values))

    def leave(self, stream: Stream, head: HyperHead | None, before: Tensor) -> Tensor:
        return _input(stream, head, 0, None, before if head is None else None, None, 0.0)


def _advance(output: Output, stream: Tensor, mixes: Mixes | None, fn: Tensor | None, out: Tensor) -> Stream:
    """Without `mixes` the stream is an embedding, and the output's sums the ids."""
    sums, routed = output
    tokens, _, width = out.shape
    parts, rows = triton.cdiv(width, _COLUMNS), 16 if fn is None else _rows_of(fn)
    partial = torch.empty((tokens, parts, rows), dtype=torch.float32, device=out.device)
    _advance_kernel[(parts, triton.cdiv(tokens, _TOKENS))](
        sums,
        partial if routed is None else routed,
        stream,
        partial if mixes is None else mixes.post,
        partial if mixes is None else mixes.comb,
        partial if fn is None else fn,
        out,
        partial,
        tokens,
        WIDTH=width,
        IS_FIRST=mixes is None,
        SLICES=0 if mixes is None else len(sums),
        ROUTED_SLICES=0 if routed is None else len(routed),
        PER_TOKEN=0 if routed is None else routed.shape[1] // tokens,
        OUTPUTS=0 if fn is None else len(fn),
        ROWS=rows,
        TOKENS=_TOKENS,
        COLUMNS=_COLUMNS,
    )
    return Stream(out, partial)


def _input(
    stream: Stream,
    connection: HyperConnection | HyperHead | None,
    iterations: int,
    mixes: Mixes | None,
    before: Tensor | None,
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    values, partial = stream
    tokens, copies, width = values.shape
    x = torch.empty((tokens, width), dtype=values.dtype, device=values.device)
    _input_kernel[(tokens, 1 if mixes is None else 2)](
        values,
        partial,
        partial if connection is None else connection.base,
        partial if connection is None else connection.scale,
        partial if before is None else before,
        partial if weight is None else weight,
        x,
        *((partial, partial, partial) if mixes is None else mixes),
        0 if before is None or len(before) == 1 else copies,
        partial.shape[1],
        0.0 if connection is None else connection.norm_eps,
        0.0 if connection is None else connection.eps,
        eps,
        WIDTH=width,
        COPIES=copies,
        OUTPUTS=0 if connection is None else len(connection.fn),
        ROWS=partial.shape[2],
        PARTS=power_of_two(partial.shape[1]),
        ITERATIONS=iterations,
        IS_DELAYED=before is not None,
        HAS_NORM=weight is not None,
        BLOCK=power_of_two(width),
    )
    return x
