"""Attention of a block over the context store, for GPUs: keys and values are read where they lie, and long contexts are shared
out over the whole device.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Positions that are worth a program of their own.
_SHORTEST_PART: Final = 32
# Of queries that a program holds, and of keys that it looks at together: registers and shared memory of any GPU have room for it.
_QUERY_BYTES: Final = 32 << 10
_KEY_BYTES: Final = 16 << 10
_LONG_HEAD: Final = 256
# Partial sums that a program of the second launch holds, so that it spills none.
_PARTIAL_SUMS: Final = 8 << 10
# What every GPU from Ampere on has for one program, where torch does not say.
_SHARED_BYTES: Final = 99 << 10
# Multiprocessors of the device that there is not, under Triton's interpreter: so few that parts are longer than a tile.
_INTERPRETED: Final = 40


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
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LENGTH: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    VALUES: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (q, v), s, (b, h): columns v of the values, for queries q of those of request b that share key head h, over part s
    of the positions it sees: those it holds, then its own. Programs that read the same keys run beside each other.

    Parts are of what a request does see, not of what it might. One that nothing is left for has no weight and writes no sums.
    """
    slices: tl.constexpr = COLUMNS // VALUES
    part = tl.program_id(1)
    request, head = (tl.program_id(2) // KV_HEADS).to(tl.int64), tl.program_id(2) % KV_HEADS
    slot = tl.load(slots + request)
    anchor = tl.load(anchors + request)
    # A position more than the context away has been overwritten by a newer one.
    lowest = tl.maximum(tl.load(visible_from + request), anchor - context)
    first = (lowest % context).to(tl.int32)
    held = (anchor - lowest).to(tl.int32)
    seen = held + LENGTH
    group: tl.constexpr = HEADS // KV_HEADS
    q = tl.program_id(0) // slices * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, COLUMNS)
    value = tl.program_id(0) % slices * VALUES + tl.arange(0, VALUES)
    is_query, is_column, is_value = q < group * LENGTH, column < DIM, value < DIM
    place = (request * LENGTH + q % LENGTH) * HEADS + head * group + q // LENGTH
    queries = tl.load(
        query + place[:, None] * DIM + column[None, :], mask=is_query[:, None] & is_column[None, :], other=0.0
    )
    of_held = kv + (slot * context * 2 * KV_HEADS + head) * DIM
    of_own = own + (request * LENGTH * 2 * KV_HEADS + head) * DIM
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    weight = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([QUERIES, VALUES], tl.float32)

    length = tl.cdiv(tl.cdiv(seen, tl.num_programs(1)), KEYS) * KEYS
    for start in range(part * length, tl.minimum((part + 1) * length, seen), KEYS):
        at = start + tl.arange(0, KEYS)
        is_held, is_seen = at < held, at < seen
        # Of what is not visible nothing is read: it may be NaN, or another request's. A ring is turned over once at most, which
        # spares every key a remainder.
        turned = tl.where(first + at < context, first + at, first + at - context)
        row = tl.where(is_held, turned, at - held).to(tl.int64)
        source = tl.where(is_held, of_held, of_own) + row * (2 * KV_HEADS * DIM)
        keys = tl.load(source[None, :] + column[:, None], mask=is_seen[None, :] & is_column[:, None], other=0.0)
        values = tl.load(
            source[:, None] + KV_HEADS * DIM + value[None, :], mask=is_seen[:, None] & is_value[None, :], other=0.0
        )
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        shrink = tl.exp(peak - higher)
        odds = tl.exp(scores - higher[:, None])
        weight = weight * shrink + tl.sum(odds, axis=1)
        total = total * shrink[:, None] + tl.dot(odds.to(values.dtype), values, input_precision=PRECISION)
        peak = higher

    target = (tl.program_id(2) * tl.num_programs(1) + part) * (tl.num_programs(0) // slices * QUERIES) + q
    tl.store(peaks + target, peak)
    tl.store(weights + target, weight)
    if part * length < seen:
        tl.store(sums + target[:, None].to(tl.int64) * COLUMNS + value[None, :], total)


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
    VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program q, v, (b, h): columns v of one query over all parts."""
    q = tl.program_id(0)
    request, head = tl.program_id(2) // KV_HEADS, tl.program_id(2) % KV_HEADS
    group: tl.constexpr = HEADS // KV_HEADS
    part = tl.arange(0, PARTS)
    column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
    source = (tl.program_id(2) * parts + part) * QUERIES + q
    peak = tl.load(peaks + source, mask=part < parts, other=float("-inf"))
    # The block's own positions are in a part, so one at least has a weight.
    is_summed = peak > float("-inf")
    total = tl.load(sums + source[:, None].to(tl.int64) * COLUMNS + column[None, :], mask=is_summed[:, None], other=0.0)
    share = tl.exp(peak - tl.max(peak))
    weight = tl.sum(share * tl.load(weights + source, mask=is_summed, other=0.0))
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
    tile = _tile(kv, queries, columns)
    beside = queries // tile.queries * (columns // tile.values)
    # One more than run at once, and it would begin when all the others end.
    most = tile.at_once * _multiprocessors(kv.device) // (batch * kv_heads * beside)
    parts = max(1, min(most, triton.cdiv(visible + length, max(tile.keys, _SHORTEST_PART))))
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
    _attend_kernel[(beside, parts, batch * kv_heads)](
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
        scale,
        **sizes,
        QUERIES=tile.queries,
        VALUES=tile.values,
        KEYS=tile.keys,
        PRECISION="ieee" if kv.dtype == torch.float32 else "tf32",
        num_stages=_stages(kv, tile.queries * columns, tile.keys * (columns + tile.values)),
        num_warps=8 if columns > _LONG_HEAD else 4,
    )
    padded = int(triton.next_power_of_2(parts))
    values = min(columns, max(16, _PARTIAL_SUMS // padded))
    _combine_kernel[(length * heads // kv_heads, columns // values, batch * kv_heads)](
        sums, peaks, weights, out, parts, **sizes, QUERIES=queries, VALUES=values, PARTS=padded
    )
    return out


class _Tile(NamedTuple):
    """What one program works on at a time."""

    queries: int
    values: int  # columns of the values; of the keys it needs all
    keys: int
    at_once: int  # programs for each multiprocessor


def _tile(kv: Tensor, queries: int, columns: int) -> _Tile:
    if columns > _LONG_HEAD and queries >= 64 and _has_wide_products(kv):
        # Keys are read once for as many queries as there are, which leaves registers for half of the columns.
        return _Tile(min(queries, 128), columns // 2, 32, at_once=1)
    most_queries, most_keys = (max(16, size // (columns * kv.itemsize)) for size in (_QUERY_BYTES, _KEY_BYTES))
    return _Tile(min(queries, most_queries), columns, min(64, most_keys), at_once=2)


def _has_wide_products(kv: Tensor) -> bool:
    """Whether products of 64 rows are the fast ones, with the shared memory for them: on Hopper.

    Triton's interpreter has room for anything, and tests there what no other device would run.
    """
    if kv.device.type != "cuda":
        return True
    return kv.itemsize == 2 and torch.cuda.get_device_properties(kv.device).major == 9


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _stages(kv: Tensor, held: int, loaded: int) -> int:
    """How many loads of `loaded` values may be under way at once, beside `held` values, in a program's shared memory."""
    if kv.device.type != "cuda":
        return 1
    facts = torch.cuda.get_device_properties(kv.device)
    room = getattr(facts, "shared_memory_per_block_optin", _SHARED_BYTES) // kv.itemsize - held
    return int(min(max(room // loaded, 1), 3))
