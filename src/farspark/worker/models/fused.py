"""The small operations of a draft in one Triton launch each, for GPUs: a block is some hundred of them, and their launches
and passes over memory would otherwise take as long as the weights.

Rounding is that of `Arithmetic`; sums are taken in another order, so a result may differ by one step of the dtype.
Importing this module imports Triton: ask `farspark.worker.device.work_on`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models import fused_streams
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.heads import MarkovHead, VanillaMarkov
from farspark.worker.models.hyper_connections import HyperConnection, Mixes
from farspark.worker.models.packed_experts import PackedExperts

# Rows of the Markov head's second matrix that one program reads, at most, and the bytes of them that also a GPU with 99 KiB of
# shared memory has room for.
_VOCABULARY_ROWS: Final = 128
_TILE_BYTES: Final = 64 << 10
# Requests that share one reading of it: the least number of columns that a tensor core takes.
_REQUESTS: Final = 16


@triton.jit
def _rms_norm_kernel(x, residual, weight, normed, total, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Program r: row r of [rows, width], contiguous."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row + column, values.to(total.dtype.element_ty), mask=inside)
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    dtype = normed.dtype.element_ty
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + column, (values.to(dtype).to(tl.float32) * scale).to(dtype), mask=inside)


@triton.jit
def _norm_rotate_kernel(
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    outer_stride,
    token_stride,
    part_stride,
    head_stride,
    weight_stride,
    rotation_stride,
    eps,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (a, t), (p, h): one head of one token. Part 0 is normed and rotated, part 1 (values) is copied.

    x [A, T, parts, heads, d] by strides, out the same contiguous; cos and sin [A, T, d/2] with A's stride given.
    """
    row = tl.program_id(0).to(tl.int64)
    outer, token = row // tokens, row % tokens
    part, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    pair = tl.arange(0, HALF)
    inside = pair < DIM // 2
    if NEOX:
        first, second = pair, pair + DIM // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    source = x + outer * outer_stride + token * token_stride + part * part_stride + head * head_stride
    target = out + ((row * PARTS + part) * HEADS + head) * DIM
    a = tl.load(source + first, mask=inside, other=0.0)
    b = tl.load(source + second, mask=inside, other=0.0)
    if part == 0:
        dtype = out.dtype.element_ty
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        scale = tl.rsqrt((tl.sum(wide_a * wide_a) + tl.sum(wide_b * wide_b)) / DIM + eps)
        weights = weight + outer * weight_stride
        norm_a = tl.load(weights + first, mask=inside, other=0.0).to(tl.float32)
        norm_b = tl.load(weights + second, mask=inside, other=0.0).to(tl.float32)
        wide_a = ((wide_a * scale).to(dtype).to(tl.float32) * norm_a).to(dtype).to(tl.float32)
        wide_b = ((wide_b * scale).to(dtype).to(tl.float32) * norm_b).to(dtype).to(tl.float32)
        angle = outer * rotation_stride + token * (DIM // 2) + pair
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        a = (wide_a * c - wide_b * s).to(dtype)
        b = (wide_b * c + wide_a * s).to(dtype)
    tl.store(target + first, a, mask=inside)
    tl.store(target + second, b, mask=inside)


@triton.jit
def _silu_times_kernel(gate, up, out, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    """Program (r, c): columns c of row r."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    gated = (g * tl.sigmoid(g)).to(dtype).to(tl.float32)
    tl.store(out + row * width + column, (gated * u).to(dtype), mask=inside)


@triton.jit
def _chain_kernel(
    base,
    w1,
    w2,
    anchors,
    best,
    step,
    base_stride,
    steps,
    vocabulary,
    requests,
    scale,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    IS_SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (v, g): rows v of the vocabulary compete for position `step` of requests g.

    `best` int64 [requests, steps] holds a key for each position: the logit above, the complement of the id below, so that
    the greatest key is the lowest id with the greatest logit. NaN is above every number, and stands for the last id.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tl.program_id(1) * REQUESTS + tl.arange(0, REQUESTS)
    in_vocabulary, is_asked = row < vocabulary, request < requests
    mask = in_vocabulary[:, None] & is_asked[None, :]
    dtype = base.dtype.element_ty
    logits = tl.load(base + request[None, :].to(tl.int64) * base_stride + row[:, None], mask=mask, other=0.0)
    if RANK > 0:
        column = tl.arange(0, COLUMNS)
        tile = tl.load(
            w2 + row[:, None].to(tl.int64) * RANK + column[None, :],
            mask=in_vocabulary[:, None] & (column < RANK)[None, :],
            other=0.0,
        )
        if step == 0:
            previous = tl.load(anchors + request, mask=is_asked, other=0)
        else:
            won = tl.load(best + request * steps + step - 1, mask=is_asked, other=0xFFFFFFFF)
            previous = 0xFFFFFFFF - (won & 0xFFFFFFFF)
        embedded = tl.load(
            w1 + previous[None, :] * RANK + column[:, None],
            mask=is_asked[None, :] & (column < RANK)[:, None],
            other=0.0,
        )
        bias = tl.dot(tile, embedded, input_precision=PRECISION).to(dtype)
        if IS_SCALED:
            bias = (bias.to(tl.float32) * scale).to(dtype)
        logits = (logits.to(tl.float32) + bias.to(tl.float32)).to(dtype)
    wide = logits.to(tl.float32)
    # Floats in their own order as integers: the bits of a negative one count downwards.
    bits = wide.to(tl.int32, bitcast=True)
    bits = tl.where(wide == 0.0, 0, bits)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(wide != wide, 0x7FFFFFFF, order)
    token = tl.where(wide != wide, vocabulary - 1, row[:, None])
    key = (order.to(tl.int64) << 32) + (0xFFFFFFFF - token.to(tl.int64))
    key = tl.where(mask, key, -0x7FFFFFFFFFFFFFFF)
    tl.atomic_max(best + request * steps + step, tl.max(key, axis=0), mask=is_asked)


@triton.jit
def _chosen_kernel(
    best, anchors, w1, chosen, tops, embedded, steps, vocabulary, RANK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (b, k): what won position k of request b, and the embedding of the token before it."""
    request, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key = tl.load(best + request * steps + step)
    order = (key >> 32).to(tl.int32)
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    tl.store(chosen + request * steps + step, 0xFFFFFFFF - (key & 0xFFFFFFFF))
    tl.store(tops + request * steps + step, bits.to(tl.float32, bitcast=True))
    if RANK > 0:
        if step == 0:
            previous = tl.load(anchors + request)
        else:
            won = tl.load(best + request * steps + step - 1)
            previous = 0xFFFFFFFF - (won & 0xFFFFFFFF)
        column = tl.arange(0, COLUMNS)
        vector = tl.load(w1 + previous * RANK + column, mask=column < RANK, other=0.0)
        tl.store(embedded + (request * steps + step) * RANK + column, vector, mask=column < RANK)


def _power_of_two(size: int, least: int = 1) -> int:
    return max(least, int(triton.next_power_of_2(size)))


class FusedArithmetic(Arithmetic):
    """`Arithmetic` on a GPU. Its dtype and its carrier are the same."""

    packed_experts: ClassVar = PackedExperts

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() != 1:
            return super().rms_norm(x, weight, eps)
        return self._norm(x, None, weight, eps)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        width = x.shape[-1]
        rows = x.contiguous().view(-1, width)
        normed = torch.empty_like(rows, dtype=self.dtype)
        total = normed if residual is None else torch.empty_like(normed)
        added = rows if residual is None else residual.contiguous()
        block = _power_of_two(width)
        _rms_norm_kernel[(len(rows),)](
            rows,
            added,
            weight,
            normed,
            total,
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
        )
        return normed.view(x.shape), total.view(x.shape)

    def norm_rotate(self, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool) -> Tensor:
        return self._norm_rotate(x.unsqueeze(-3), weight, eps, cos, sin, is_neox).squeeze(-3)

    def norm_rotate_keys(
        self, keys_values: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool
    ) -> Tensor:
        return self._norm_rotate(keys_values, weight, eps, cos, sin, is_neox)

    def _norm_rotate(self, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
        outer, tokens, parts, heads, dim = x.shape
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        strides = x.stride()
        cos, sin = cos.contiguous(), sin.contiguous()
        _norm_rotate_kernel[(outer * tokens, parts * heads)](
            x if strides[-1] == 1 else x.contiguous(),
            weight,
            cos,
            sin,
            out,
            tokens,
            *strides[:4],
            0 if weight.dim() == 1 else weight.stride(0),
            0 if cos.dim() < 4 else cos.stride(0),
            eps,
            HEADS=heads,
            PARTS=parts,
            DIM=dim,
            NEOX=is_neox,
            HALF=_power_of_two(dim // 2),
            num_warps=1,
        )
        return out

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        width = gate.shape[-1]
        rows_gate, rows_up = gate.view(-1, width), up.view(-1, width)
        out = torch.empty(rows_gate.shape, dtype=self.dtype, device=gate.device)
        block = 1024
        _silu_times_kernel[(len(out), triton.cdiv(width, block))](
            rows_gate, rows_up, out, rows_gate.stride(0), rows_up.stride(0), width, BLOCK=block
        )
        return out.view(gate.shape)

    def mixes(self, connection: HyperConnection, stream: Tensor) -> Mixes:
        return fused_streams.mixes(connection, stream)

    def collapse(self, stream: Tensor, pre: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        return fused_streams.collapse(stream, pre, weight, eps, self.dtype)

    def spread(self, output: Tensor, stream: Tensor, mixes: Mixes) -> Tensor:
        return fused_streams.spread(output, stream, mixes, self.dtype)

    def greedy_chain(
        self, base: Tensor, anchors: Tensor, markov: MarkovHead | None
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if markov is None:
            return greedy_chain(base, anchors, None, None, 1.0)
        # A head that reads the hidden state or keeps one of its own goes step by step.
        return (
            greedy_chain(base, anchors, markov.w1, markov.w2, markov.scale) if type(markov) is VanillaMarkov else None
        )


def greedy_chain(
    base: Tensor, anchors: Tensor, w1: Tensor | None, w2: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sequential stage: every position's token given the one before it, one launch a position.

    `base` [B, steps, vocabulary] contiguous; `anchors` int64 [B]; `w1` and `w2` [vocabulary, r], or None.
    Returns tokens int64 [B, steps] (the lowest id with the greatest logit), those logits float32 [B, steps] (NaN where any
    logit of the position is), and the embeddings of the tokens before [B, steps, r].
    """
    requests, steps, vocabulary = base.shape
    device = base.device
    rank = 0 if w1 is None else w1.shape[1]
    best = torch.full((requests, steps), torch.iinfo(torch.int64).min, device=device)
    chosen = torch.empty((requests, steps), dtype=torch.int64, device=device)
    tops = torch.empty((requests, steps), dtype=torch.float32, device=device)
    embedded = None if w1 is None else torch.empty((requests, steps, rank), dtype=w1.dtype, device=device)
    nothing: Any = base
    columns = _power_of_two(rank, 16)
    rows = min(_VOCABULARY_ROWS, _TILE_BYTES // (columns * base.itemsize))
    sizes = {"RANK": rank, "COLUMNS": columns}
    for step in range(steps):
        _chain_kernel[(triton.cdiv(vocabulary, rows), triton.cdiv(requests, _REQUESTS))](
            base[:, step],
            nothing if w1 is None else w1,
            nothing if w2 is None else w2,
            anchors,
            best,
            step,
            base.stride(0),
            steps,
            vocabulary,
            requests,
            scale,
            **sizes,
            ROWS=rows,
            REQUESTS=_REQUESTS,
            IS_SCALED=scale != 1.0,
            PRECISION="ieee" if w2 is None or w2.dtype == torch.float32 else "tf32",
        )
    _chosen_kernel[(requests, steps)](
        best,
        anchors,
        nothing if w1 is None else w1,
        chosen,
        tops,
        nothing if embedded is None else embedded,
        steps,
        vocabulary,
        **sizes,
    )
    return chosen, tops, embedded
