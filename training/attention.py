"""Attention over packed rows, for the target, for draft blocks and for one decoding step.

On CUDA the block-sparse kernels of flex attention and one Triton kernel do the work; elsewhere, and as their
reference, a dense mask does. Both come from the same mask functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

try:
    import triton
    import triton.language as tl
except ImportError:  # A CPU needs no Triton.
    triton = None

TILE = 128  # rows and columns of one block of flex attention


@dataclass(frozen=True, slots=True)
class Compiled:
    """Whether functions go through torch.compile; on CUDA only, where it pays for itself."""

    enabled: bool

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself, or its compiled form for fixed shapes."""
        return torch.compile(function, dynamic=False) if self.enabled else function


_compiled_flex = torch.compile(flex_attention, dynamic=False)


@dataclass(slots=True)
class PackedMask:
    """Who sees whom, as a predicate over (row, query, key) and as the tiles in which it can hold."""

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    positions: Tensor  # [B, S] rotary positions of the queries
    queries: int
    keys: int
    blocks: BlockMask | None  # None off CUDA

    def dense(self, rows: int) -> Tensor:
        """[B, 1, Q, K], True where a query sees a key."""
        device = self.positions.device
        row = torch.arange(rows, device=device)[:, None, None]
        query = torch.arange(self.queries, device=device)[:, None]
        key = torch.arange(self.keys, device=device)
        return self.sees(row, row, query, key)[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask, compiled: Compiled) -> Tensor:
    """Grouped-query attention. q [B, Q, heads, d], k and v [B, K, kv, d] -> [B, Q, heads, d]"""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if mask.blocks is not None and compiled.enabled:
        return _compiled_flex(q, k, v, block_mask=mask.blocks, enable_gqa=True).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(q.shape[0]), enable_gqa=True).transpose(1, 2)


def _block_mask(sees: Callable[..., Tensor], some: Tensor, every: Tensor, queries: int, keys: int) -> BlockMask:
    """some, every [B, query tiles, key tiles]: where the predicate may hold, and where it always does."""

    def listing(tiles: Tensor) -> tuple[Tensor, Tensor]:
        order = torch.argsort(tiles.int(), dim=-1, descending=True, stable=True)
        return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None].contiguous()

    partial = listing(some & ~every)
    full = listing(every)
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(queries, keys))


class DocumentMask:
    """Causal attention inside each document of a packed row.

    The tensors live in fixed buffers that the predicate closes over, so that one compiled kernel serves every batch.
    """

    def __init__(self, rows: int, length: int, device: torch.device) -> None:
        self._first = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self._length = length
        first = self._first

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key >= first[row, query])

        self._sees = sees

    def set(self, first: Tensor) -> PackedMask:
        """first [B, S]: the index at which the document of each position starts."""
        self._first.copy_(first)
        index = torch.arange(self._length, device=first.device)
        blocks = None
        if first.is_cuda:
            tile = torch.arange(self._length // TILE, device=first.device)
            tiles = self._first.unflatten(1, (-1, TILE))
            low, high = tiles.amin(-1)[..., None], tiles.amax(-1)[..., None]
            some = (tile <= tile[:, None]) & ((tile + 1) * TILE > low)
            every = (tile < tile[:, None]) & (tile * TILE >= high)
            blocks = _block_mask(self._sees, some, every, self._length, self._length)
        return PackedMask(self._sees, index - self._first, self._length, self._length, blocks)


class BlockDraftMask:
    """Draft blocks over a packed row: all held context before the anchor, and the whole own block.

    Keys are the row's positions followed by all block positions.
    """

    def __init__(self, rows: int, length: int, anchors: int, block_size: int, device: torch.device) -> None:
        self._anchor = torch.zeros(rows, anchors, dtype=torch.int64, device=device)
        self._first = torch.zeros(rows, anchors, dtype=torch.int64, device=device)
        self._length, self._block = length, block_size
        anchor, first = self._anchor, self._first

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // block_size
            context = (key < length) & (key < anchor[row, block]) & (key >= first[row, block])
            own = (key >= length) & ((key - length) // block_size == block)
            return context | own

        self._sees = sees

    def set(self, anchor: Tensor, first: Tensor) -> PackedMask:
        """anchor, first [B, A]: ascending indices of the anchors, and the starts of their documents."""
        self._anchor.copy_(anchor)
        self._first.copy_(first)
        size, length = self._block, self._length
        queries = anchor.shape[1] * size
        offset = torch.arange(size, device=anchor.device)
        positions = ((anchor - first)[..., None] + offset).flatten(1)
        blocks = None
        if anchor.is_cuda:
            index = torch.arange(queries, device=anchor.device) // size  # block of each query
            low_anchor, high_anchor = _tile_bounds(self._anchor[:, index])
            low_first, high_first = _tile_bounds(self._first[:, index])
            tile = torch.arange((length + queries) // TILE, device=anchor.device)
            begin, end = tile * TILE, (tile + 1) * TILE
            context = end <= length
            some = context & (begin < high_anchor) & (end > low_first)
            every = context & (end <= low_anchor) & (begin >= high_first)
            query = torch.arange(queries // TILE, device=anchor.device)[:, None] * TILE
            own_begin, own_end = query // size * size, ((query + TILE - 1) // size + 1) * size
            some = some | ((end > length) & (begin < length + own_end) & (end > length + own_begin))
            blocks = _block_mask(self._sees, some, every, queries, length + queries)
        return PackedMask(self._sees, positions, queries, length + queries, blocks)


def _tile_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value in each tile of queries. [B, Q] -> 2 of [B, Q / TILE, 1]"""
    tiles = values.unflatten(1, (-1, TILE))
    return tiles.amin(-1)[..., None], tiles.amax(-1)[..., None]


if triton is not None:

    @triton.jit
    def _decode_kernel(
        q_p, k_p, v_p, out_p, first_p, step_p, length, scale,
        KV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0)
        head = tl.program_id(1)
        last = tl.load(step_p)
        first = tl.load(first_p + row)
        d = tl.arange(0, D)
        g = tl.arange(0, 16)  # the smallest tile a matrix unit takes; rows from GROUP on are padding
        real = (g < GROUP)[:, None]
        q_offset = ((row * KV + head) * GROUP + g[:, None]) * D + d[None, :]
        q = tl.load(q_p + q_offset, mask=real, other=0.0)
        base = (row.to(tl.int64) * KV + head) * length * D
        top = tl.full([16], float("-inf"), tl.float32)
        total = tl.zeros([16], tl.float32)
        mixed = tl.zeros([16, D], tl.float32)
        for begin in range(first // BLOCK * BLOCK, last + 1, BLOCK):
            n = begin + tl.arange(0, BLOCK)
            seen = (n >= first) & (n <= last)
            offset = base + n[:, None] * D + d[None, :]
            k = tl.load(k_p + offset, mask=seen[:, None], other=0.0)
            v = tl.load(v_p + offset, mask=seen[:, None], other=0.0)
            score = tl.dot(q, tl.trans(k)) * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp(score - new_top[:, None])
            shrink = tl.exp(top - new_top)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
            top = new_top
        tl.store(out_p + q_offset, mixed / total[:, None], mask=real)


def decode_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, first: Tensor, step: Tensor) -> Tensor:
    """One query per row over keys first..step. q [B, heads, d], caches [B, kv, S, d], first [B], step [1]"""
    if not q.is_cuda:
        return decode_attention_reference(q, k_cache, v_cache, first, step)
    return decode_attention_triton(q, k_cache, v_cache, first, step)


def decode_attention_triton(q: Tensor, k_cache: Tensor, v_cache: Tensor, first: Tensor, step: Tensor) -> Tensor:
    """Reads only the keys of the current document."""
    rows, kv, length, d = k_cache.shape
    q = q.contiguous()
    out = torch.empty_like(q)
    _decode_kernel[(rows, kv)](
        q, k_cache, v_cache, out, first, step, length, d**-0.5,
        KV=kv, GROUP=q.shape[1] // kv, D=d, BLOCK=64, num_warps=4,
    )  # fmt: skip
    return out


def decode_attention_reference(q: Tensor, k_cache: Tensor, v_cache: Tensor, first: Tensor, step: Tensor) -> Tensor:
    """The same with a dense mask."""
    rows, kv, length, d = k_cache.shape
    key = torch.arange(length, device=q.device)
    seen = (key >= first[:, None]) & (key <= step)
    grouped = q.view(rows, kv, -1, d)
    return F.scaled_dot_product_attention(grouped, k_cache, v_cache, attn_mask=seen[:, None, None]).reshape(q.shape)
