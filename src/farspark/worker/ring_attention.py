"""Attention of a block over the context store, for GPUs: keys and values are read where they lie, and long contexts are shared
out over the whole device.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that fill a GPU. Fewer, and most of it waits; more, and putting the parts together costs too much.
_PROGRAMS: Final = 512
_SHORTEST_PART: Final = 64
_LONGEST_PART: Final = 512
# Queries times dimensions that a program sums up in its registers, and the keys it looks at together where heads are long.
_SUMS: Final = 16 << 10
_LONG_HEAD: Final = 256
_KEYS_OF_LONG_HEADS: Final = 16
# What every GPU from Ampere on has for one program, where torch does not say.
_SHARED_BYTES: Final = 99 << 10


@triton.jit
def _attend_kernel(
    query,
    own,
    kv,
    slots,
    anchors,
    visible_from,
    sums,
    peaks,
    weights,
    context,
    visible,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    OWN: tl.constexpr,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (b, h), s, q: queries q of those of request b that share key head h, over part s of the positions it sees.

    Part 0 begins with the block's own positions, so its greatest score is finite and the sum over parts never empty.
    """
    request, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    part = tl.program_id(1)
    slot = tl.load(slots + request)
    anchor = tl.load(anchors + request)
    # A position more than the context away has been overwritten by a newer one.
    lowest = tl.maximum(tl.load(visible_from + request), anchor - context)
    start = anchor - visible + part * PART
    group: tl.constexpr = HEADS // KV_HEADS
    q = tl.program_id(2) * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, COLUMNS)
    is_query, is_column = q < group * LENGTH, column < DIM
    place = (request * LENGTH + q % LENGTH) * HEADS + head * group + q // LENGTH
    queries = tl.load(
        query + place[:, None] * DIM + column[None, :], mask=is_query[:, None] & is_column[None, :], other=0.0
    )
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, COLUMNS], tl.float32)

    if part == 0:
        o = tl.arange(0, OWN)
        is_own = o < LENGTH
        source = own + ((request * LENGTH + o) * 2 * KV_HEADS + head) * DIM
        keys = tl.load(source[None, :] + column[:, None], mask=is_own[None, :] & is_column[:, None], other=0.0)
        values = tl.load(
            source[:, None] + KV_HEADS * DIM + column[None, :], mask=is_own[:, None] & is_column[None, :], other=0.0
        )
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        scores = tl.where(is_own[None, :], scores, float("-inf"))
        peak = tl.max(scores, axis=1)
        odds = tl.exp(scores - peak[:, None])
        weight = tl.sum(odds, axis=1)
        total = tl.dot(odds.to(values.dtype), values, input_precision=PRECISION)

    if start + PART > lowest:
        for offset in range(0, PART, KEYS):
            position = start + offset + tl.arange(0, KEYS)
            is_visible = (position >= lowest) & (position < anchor)
            # Of what is not visible nothing is read: it may be NaN, or another request's.
            row = slot * context + tl.where(is_visible, position, 0) % context
            source = kv + (row * 2 * KV_HEADS + head) * DIM
            keys = tl.load(source[None, :] + column[:, None], mask=is_visible[None, :] & is_column[:, None], other=0.0)
            values = tl.load(
                source[:, None] + KV_HEADS * DIM + column[None, :],
                mask=is_visible[:, None] & is_column[None, :],
                other=0.0,
            )
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            scores = tl.where(is_visible[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            # While nothing was visible there is nothing to subtract from.
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            shrink = tl.exp(peak - finite)
            odds = tl.exp(scores - finite[:, None])
            weight = weight * shrink + tl.sum(odds, axis=1)
            total = total * shrink[:, None] + tl.dot(odds.to(values.dtype), values, input_precision=PRECISION)
            peak = higher

    target = (tl.program_id(0) * tl.num_programs(1) + part) * (tl.num_programs(2) * QUERIES) + q
    tl.store(peaks + target, peak)
    tl.store(weights + target, weight)
    tl.store(sums + target[:, None].to(tl.int64) * COLUMNS + column[None, :], total)


@triton.jit
def _combine_kernel(
    sums,
    peaks,
    weights,
    out,
    parts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (b, h), q: one query over all parts."""
    request, head = tl.program_id(0) // KV_HEADS, tl.program_id(0) % KV_HEADS
    q = tl.program_id(1)
    group: tl.constexpr = HEADS // KV_HEADS
    part = tl.arange(0, PARTS)
    column = tl.arange(0, COLUMNS)
    source = (tl.program_id(0) * parts + part) * QUERIES + q
    here = part < parts
    peak = tl.load(peaks + source, mask=here, other=float("-inf"))
    share = tl.exp(peak - tl.max(peak))
    weight = tl.sum(share * tl.load(weights + source, mask=here, other=0.0))
    total = tl.load(sums + source[:, None].to(tl.int64) * COLUMNS + column[None, :], mask=here[:, None], other=0.0)
    attended = tl.sum(total * share[:, None], axis=0) / weight
    place = (request * LENGTH + q % LENGTH) * HEADS + head * group + q // LENGTH
    tl.store(out + place * DIM + column, attended.to(out.dtype.element_ty), mask=column < DIM)


def attend_ring(
    query: Tensor,
    key_value: Tensor,
    kv: Tensor,
    slots: Tensor,
    anchors: Tensor,
    visible_from: Tensor,
    *,
    visible: int,
    context: int,
    scale: float,
) -> Tensor:
    """Softmax attention of block positions over {context} and {their own block}, in two launches.

    `query` [B, N, heads, d] and `key_value` [B, N, 2, kv heads, d], contiguous; `kv` [rows, 2, kv heads, d] with position p
    of a slot at row `slot * context + p % context`; `slots`, `anchors`, `visible_from` int64 [B]; `visible` bounds
    `anchors - visible_from`. Returns [B, N, heads * d] in kv's dtype.
    """
    batch, length, heads, dim = query.shape
    kv_heads = kv.shape[2]
    queries = max(16, int(triton.next_power_of_2(length * heads // kv_heads)))
    columns = max(16, int(triton.next_power_of_2(dim)))
    together = min(queries, max(16, _SUMS // columns))
    blocks = queries // together
    fair = int(triton.next_power_of_2(triton.cdiv(visible * batch * kv_heads * blocks, _PROGRAMS)))
    part = min(max(fair, _SHORTEST_PART), _LONGEST_PART)
    parts = max(1, triton.cdiv(visible, part))
    shape = (batch * kv_heads, parts, queries)
    sums = torch.empty((*shape, columns), dtype=torch.float32, device=kv.device)
    peaks, weights = (torch.empty(shape, dtype=torch.float32, device=kv.device) for _ in range(2))
    out = torch.empty((batch, length, heads * dim), dtype=kv.dtype, device=kv.device)
    sizes = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "LENGTH": length,
        "DIM": dim,
        "COLUMNS": columns,
    }
    is_long = columns > _LONG_HEAD
    keys = _KEYS_OF_LONG_HEADS if is_long else 64 if part <= 128 else 32
    _attend_kernel[(batch * kv_heads, parts, blocks)](
        query,
        key_value,
        kv,
        slots,
        anchors,
        visible_from,
        sums,
        peaks,
        weights,
        context,
        parts * part,
        scale,
        **sizes,
        QUERIES=together,
        OWN=max(16, int(triton.next_power_of_2(length))),
        PART=part,
        KEYS=keys,
        PRECISION="ieee" if kv.dtype == torch.float32 else "tf32",
        num_stages=_stages(kv, together * columns, 2 * keys * columns),
        num_warps=8 if is_long else 4,
    )
    _combine_kernel[(batch * kv_heads, length * heads // kv_heads)](
        sums, peaks, weights, out, parts, **sizes, QUERIES=queries, PARTS=int(triton.next_power_of_2(parts))
    )
    return out


def _stages(kv: Tensor, held: int, loaded: int) -> int:
    """How many loads of `loaded` values may be under way at once, beside `held` values, in a program's shared memory."""
    if kv.device.type != "cuda":
        return 1
    facts = torch.cuda.get_device_properties(kv.device)
    room = getattr(facts, "shared_memory_per_block_optin", _SHARED_BYTES) // kv.itemsize - held
    return int(min(max(room // loaded, 1), 3))
