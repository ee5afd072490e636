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

from farspark.worker.models import fused_products
from farspark.worker.models.base import Arithmetic, HeadProjections
from farspark.worker.models.fused_products import power_of_two, processors, row_normed, whole_row
from farspark.worker.models.fused_streams import FusedStreams
from farspark.worker.models.fused_sublayers import FusedSublayers
from farspark.worker.models.heads import ConfidenceHead, MarkovHead, SoftCappedMarkov, VanillaMarkov
from farspark.worker.models.packed_experts import PackedExperts

# Rows of the Markov head's second matrix that a program reads at once, at most, and the bytes of them; how many of these parts
# are on their way from memory. A GPU with 99 KiB of shared memory has room for them too.
_VOCABULARY_ROWS: Final = 64
_TILE_BYTES: Final = 32 << 10
_CHAIN_STAGES: Final = 3
_CHAIN_WARPS: Final = 4
_PROGRAMS_A_PROCESSOR: Final = 2
# Requests that share one reading of it: the least number of columns that a tensor core takes.
_REQUESTS: Final = 16


@triton.jit(do_not_specialize=["mask_token", "last_position"])
def _block_kernel(anchors, anchor_tokens, tokens, positions, mask_token, last_position, LENGTH: tl.constexpr):
    """Program b: the tokens and the positions of block b, int64 [B, LENGTH]."""
    request = tl.program_id(0).to(tl.int64)
    anchor, token = tl.load(anchors + request), tl.load(anchor_tokens + request)
    for place in tl.static_range(LENGTH):
        target = request * LENGTH + place
        tl.store(tokens + target, token if place == 0 else mask_token.to(tl.int64))
        tl.store(positions + target, tl.minimum(anchor + place, last_position))


@triton.jit
def _embed_norm_kernel(tokens, embedding, weight, embedded, normed, width, scale, eps, BLOCK: tl.constexpr):
    """Program t: the embedding of token t, scaled, and its norm."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    norm = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dtype = embedded.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(tokens + row) * width
    values = tl.load(embedding + source + column, mask=inside, other=0.0).to(tl.float32)
    values = (values * scale).to(dtype)
    tl.store(embedded + row * width + column, values, mask=inside)
    tl.store(normed + row * width + column, row_normed(values.to(tl.float32), norm, width, eps, dtype), mask=inside)


@triton.jit
def _rotation_kernel(positions, frequencies, cos, sin, pairs, IS_ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """Program t: cosine and sine of the angles at position t, float32 [tokens, pairs], rounded to bf16 or not."""
    pair = tl.arange(0, BLOCK)
    inside = pair < pairs
    frequency = tl.load(frequencies + pair, mask=inside, other=0.0)
    row = tl.program_id(0).to(tl.int64)
    angles = tl.load(positions + row).to(tl.float32) * frequency
    cosine, sine = tl.cos(angles), tl.sin(angles)
    if IS_ROUNDED:
        cosine, sine = cosine.to(tl.bfloat16).to(tl.float32), sine.to(tl.bfloat16).to(tl.float32)
    tl.store(cos + row * pairs + pair, cosine, mask=inside)
    tl.store(sin + row * pairs + pair, sine, mask=inside)


@triton.jit
def _rms_norm_kernel(
    x,
    weight,
    normed,
    width,
    eps,
    HAS_WEIGHT: tl.constexpr,
    IS_WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program r: row r of [rows, width], contiguous; rounded in front of the weight too, or once at the end."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    if HAS_WEIGHT:
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    dtype = normed.dtype.element_ty
    if not IS_WIDE:
        values = values.to(dtype).to(tl.float32)
    if HAS_WEIGHT:
        values *= scale
    tl.store(normed + row + column, values.to(dtype), mask=inside)


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
    """Program (a, t), (p, h): one head of one token. Part 0 (keys) is normed and rotated, part 1 (values) is copied.

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
def _tanh(x):
    """Within a few steps of float32, also around 0."""
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * 62.0 / 2835.0))))
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit(do_not_specialize=["step", "steps", "requests"])
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
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (v, g): tiles v, v + programs and so on of the vocabulary compete for position `step` of requests g.

    `best` int64 [requests, steps] holds a key for each position: the logit above, the complement of the id below, so that
    the greatest key is the lowest id with the greatest logit. NaN is above every number, and stands for the last id.
    Every second position goes backwards, through what of w2 the cache still holds.
    """
    request = tl.program_id(1) * REQUESTS + tl.arange(0, REQUESTS)
    is_asked = request < requests
    dtype = base.dtype.element_ty
    count = tl.cdiv(tl.cdiv(vocabulary, ROWS) - tl.program_id(0), tl.num_programs(0))
    start = tl.where(step % 2 == 0, 0, count - 1)
    turn = tl.where(step % 2 == 0, 1, -1)
    if RANK > 0:
        if step == 0:
            previous = tl.load(anchors + request, mask=is_asked, other=0)
        else:
            won = tl.load(best + request * steps + step - 1, mask=is_asked, other=0xFFFFFFFF)
            previous = 0xFFFFFFFF - (won & 0xFFFFFFFF)
        column = tl.arange(0, COLUMNS)
        embedded = tl.load(
            w1 + previous[None, :] * RANK + column[:, None],
            mask=is_asked[None, :] & (column < RANK)[:, None],
            other=0.0,
        )
    order = tl.full([ROWS, REQUESTS], -0x80000000, tl.int32)
    token = tl.zeros([ROWS, REQUESTS], tl.int32)
    for at in tl.range(0, count, num_stages=STAGES):
        row = (tl.program_id(0) + (start + turn * at) * tl.num_programs(0)) * ROWS + tl.arange(0, ROWS)
        in_vocabulary = row < vocabulary
        mask = in_vocabulary[:, None] & is_asked[None, :]
        if RANK > 0:
            tile = tl.load(
                w2 + row[:, None].to(tl.int64) * RANK + column[None, :],
                mask=in_vocabulary[:, None] & (column < RANK)[None, :],
                other=0.0,
            )
        logits = tl.load(base + request[None, :].to(tl.int64) * base_stride + row[:, None], mask=mask, other=0.0)
        if RANK > 0:
            bias = tl.dot(tile, embedded, input_precision=PRECISION).to(dtype)
            if BIAS == "scaled":
                bias = (bias.to(tl.float32) * scale).to(dtype)
            if BIAS == "capped":
                # As torch divides by a number on a GPU.
                bias = (bias.to(tl.float32) * (1.0 / scale)).to(dtype)
                bias = (_tanh(bias.to(tl.float32)).to(dtype).to(tl.float32) * scale).to(dtype)
            logits = (logits.to(tl.float32) + bias.to(tl.float32)).to(dtype)
        wide = logits.to(tl.float32)
        # Floats in their own order as integers: the bits of a negative one count downwards.
        bits = wide.to(tl.int32, bitcast=True)
        bits = tl.where(wide == 0.0, 0, bits)
        new_order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        new_order = tl.where(wide != wide, 0x7FFFFFFF, new_order)
        new_token = tl.where(wide != wide, vocabulary - 1, row[:, None])
        is_better = mask & ((new_order > order) | ((new_order == order) & (new_token < token)))
        order = tl.where(is_better, new_order, order)
        token = tl.where(is_better, new_token, token)
    key = (order.to(tl.int64) << 32) + (0xFFFFFFFF - token.to(tl.int64))
    tl.atomic_max(best + request * steps + step, tl.max(key, axis=0), mask=is_asked)


@triton.jit
def _answer_kernel(
    best,
    anchors,
    w1,
    hidden,
    weight,
    bias,
    packed,
    hidden_request,
    hidden_step,
    steps,
    width,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    READS_MARKOV: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (b, k): what won position k of request b, whether it and the confidence are finite, and the confidence."""
    request, step = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    if HAS_CONFIDENCE:
        weights = tl.load(weight + column, mask=column < width, other=0.0)
    confidence = 1.0
    if HAS_CONFIDENCE:
        source = hidden + request * hidden_request + step * hidden_step
        total = tl.sum(weights * tl.load(source + column, mask=column < width, other=0.0).to(tl.float32))
        if READS_MARKOV:
            if step == 0:
                previous = tl.load(anchors + request)
            else:
                won = tl.load(best + request * steps + step - 1)
                previous = 0xFFFFFFFF - (won & 0xFFFFFFFF)
            place = tl.arange(0, COLUMNS)
            vector = tl.load(w1 + previous * RANK + place, mask=place < RANK, other=0.0).to(tl.float32)
            total += tl.sum(vector * tl.load(weight + width + place, mask=place < RANK, other=0.0))
        if HAS_BIAS:
            total += tl.load(bias)
        confidence = tl.sigmoid(total)
    key = tl.load(best + request * steps + step)
    order = (key >> 32).to(tl.int32)
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    top = bits.to(tl.float32, bitcast=True)
    # What is infinite or not a number minus itself is not zero.
    is_finite = (top - top == 0.0) & (confidence - confidence == 0.0)
    target = packed + request * 3 * steps + step
    tl.store(target, (0xFFFFFFFF - (key & 0xFFFFFFFF)).to(tl.int32))
    tl.store(target + steps, is_finite.to(tl.int32))
    tl.store(target + 2 * steps, tl.cast(confidence, tl.float32).to(tl.int32, bitcast=True))


class FusedArithmetic(Arithmetic):
    """`Arithmetic` on a GPU. Its dtype and its carrier are the same."""

    packed_experts: ClassVar = PackedExperts
    fused_streams: ClassVar = FusedStreams
    fused_sublayers: ClassVar = FusedSublayers

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if weight.dim() != 1:
            return super().rms_norm(x, weight, eps)
        return self._norm(x, weight, eps, is_wide=False)

    def wide_rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if weight is not None and weight.dim() != 1:
            return super().wide_rms_norm(x, weight, eps)
        return self._norm(x, weight, eps, is_wide=True)

    def _norm(self, x: Tensor, weight: Tensor | None, eps: float, *, is_wide: bool) -> Tensor:
        width = x.shape[-1]
        rows = x.contiguous().view(-1, width)
        normed = torch.empty_like(rows, dtype=self.dtype)
        _rms_norm_kernel[(len(rows),)](
            rows,
            rows if weight is None else weight,
            normed,
            width,
            eps,
            HAS_WEIGHT=weight is not None,
            IS_WIDE=is_wide,
            **whole_row(width),
        )
        return normed.view(x.shape)

    def block_inputs(
        self, anchors: Tensor, anchor_tokens: Tensor, mask_token: int, length: int, last_position: int
    ) -> tuple[Tensor, Tensor]:
        tokens, positions = (anchors.new_empty((len(anchors), length)) for _ in range(2))
        _block_kernel[(len(anchors),)](
            anchors,
            anchor_tokens,
            tokens,
            positions,
            mask_token,
            last_position,
            LENGTH=length,
            num_warps=1,
        )
        return tokens, positions

    def embed_norm(
        self, tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        width = embedding.shape[1]
        shape = *tokens.shape, width
        embedded, normed = (torch.empty(shape, dtype=self.dtype, device=tokens.device) for _ in range(2))
        _embed_norm_kernel[(tokens.numel(),)](
            tokens.contiguous(),
            embedding,
            weight,
            embedded,
            normed,
            width,
            scale,
            eps,
            **whole_row(width),
        )
        return normed, embedded

    def rotation(self, positions: Tensor, frequencies: Tensor, *, is_rounded: bool = True) -> tuple[Tensor, Tensor]:
        pairs = len(frequencies)
        shape = *positions.shape, 1, pairs
        cos, sin = (torch.empty(shape, dtype=torch.float32, device=positions.device) for _ in range(2))
        _rotation_kernel[(positions.numel(),)](
            positions.contiguous(),
            frequencies,
            cos,
            sin,
            pairs,
            IS_ROUNDED=is_rounded and self.dtype == torch.bfloat16,
            BLOCK=power_of_two(pairs),
            num_warps=1,
        )
        return cos, sin

    def norm_rotate_keys(
        self, keys_values: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool
    ) -> Tensor:
        outer, tokens, parts, heads, dim = keys_values.shape
        out = torch.empty(keys_values.shape, dtype=self.dtype, device=keys_values.device)
        strides = keys_values.stride()
        cos, sin = cos.contiguous(), sin.contiguous()
        _norm_rotate_kernel[(outer * tokens, parts * heads)](
            keys_values if strides[-1] == 1 else keys_values.contiguous(),
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
            HALF=power_of_two(dim // 2),
            num_warps=1,
        )
        return out

    def project_heads(
        self, x: Tensor, projections: HeadProjections, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool
    ) -> tuple[Tensor, Tensor]:
        sums = fused_products.products(
            x, projections.query, projections.query_bias, projections.keys_values, projections.keys_values_bias
        )
        query, key_value = fused_products.heads(
            *sums,
            projections.query_norm,
            projections.key_norm,
            eps,
            cos,
            sin,
            projections.entry,
            is_neox=is_neox,
            norms_values=projections.norms_values,
        )
        return query.view(*x.shape[:2], *query.shape[1:]), key_value.view(*x.shape[:2], *key_value.shape[1:])

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return fused_products.add_norm(fused_products.product(x, weight, bias), residual, norm, eps)

    def linear_norm_add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own_norm: Tensor,
        residual: Tensor,
        scalar: Tensor | None,
        norm: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        sums = fused_products.product(x, weight, bias)
        return fused_products.add_norm(sums, residual, norm, eps, own_norm=own_norm, scalar=scalar)

    def gated_linear(self, x: Tensor, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        return fused_products.gated_product(x, gate_up, is_gelu=is_gelu)

    def greedy_answer(
        self,
        base: Tensor,
        hidden: Tensor,
        anchor_tokens: Tensor,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
    ) -> Tensor | None:
        if markov is None:
            return greedy_answer(base, hidden, anchor_tokens, None, None, confidence)
        if type(markov) is VanillaMarkov:
            return greedy_answer(base, hidden, anchor_tokens, markov.w1, markov.w2, confidence, scale=markov.scale)
        if type(markov) is SoftCappedMarkov:
            return greedy_answer(base, hidden, anchor_tokens, markov.w1, markov.w2, confidence, soft_cap=markov.cap)
        # A head that reads the hidden state or keeps one of its own goes step by step.
        return None


def greedy_answer(
    base: Tensor,
    hidden: Tensor,
    anchor_tokens: Tensor,
    w1: Tensor | None,
    w2: Tensor | None,
    confidence: ConfidenceHead | None,
    *,
    scale: float = 1.0,
    soft_cap: float = 0.0,
) -> Tensor:
    """`Arithmetic.greedy_answer`, one launch a position and one for all confidences.

    `w1` and `w2` [vocabulary, r], or None. The bias is multiplied by `scale` or capped as `heads.SoftCappedMarkov` does (0: not),
    not both.
    """
    requests, steps, vocabulary = base.shape
    device = base.device
    rank = 0 if w1 is None else w1.shape[1]
    best = torch.full((requests, steps), torch.iinfo(torch.int64).min, device=device)
    packed = torch.empty((requests, 3, steps), dtype=torch.int32, device=device)
    nothing: Any = base
    columns = power_of_two(rank, 16)
    row_bytes = columns * (base if w2 is None else w2).itemsize
    rows = min(_VOCABULARY_ROWS, _TILE_BYTES // row_bytes)
    tiles = triton.cdiv(vocabulary, rows)
    programs = min(tiles, processors(device) * _PROGRAMS_A_PROCESSOR)
    for step in range(steps):
        _chain_kernel[(programs, triton.cdiv(requests, _REQUESTS))](
            base[:, step],
            nothing if w1 is None else w1,
            nothing if w2 is None else w2,
            anchor_tokens,
            best,
            step,
            base.stride(0),
            steps,
            vocabulary,
            requests,
            soft_cap or scale,
            RANK=rank,
            COLUMNS=columns,
            ROWS=rows,
            REQUESTS=_REQUESTS,
            STAGES=_CHAIN_STAGES,
            BIAS="capped" if soft_cap else "scaled" if scale != 1.0 else "plain",
            PRECISION="ieee" if w2 is None or w2.dtype == torch.float32 else "tf32",
            num_warps=_CHAIN_WARPS,
        )
    width = hidden.shape[-1]
    _answer_kernel[(requests, steps)](
        best,
        anchor_tokens,
        nothing if w1 is None else w1,
        hidden,
        nothing if confidence is None else confidence.weight,
        nothing if confidence is None or confidence.bias is None else confidence.bias,
        packed,
        hidden.stride(0),
        hidden.stride(1),
        steps,
        width,
        RANK=rank,
        COLUMNS=columns,
        BLOCK=power_of_two(width),
        HAS_CONFIDENCE=confidence is not None,
        READS_MARKOV=confidence is not None and confidence.with_markov,
        HAS_BIAS=confidence is not None and confidence.bias is not None,
        num_warps=4,
    )
    return packed
