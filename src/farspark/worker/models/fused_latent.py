"""Latent attention in a few Triton launches, for GPUs: the latents in front of it, the attention over the context where it lies,
and the products of groups of heads behind it.

Rounding is that of the plain operations (`deepseek_v4`); sums are taken in another order. Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models.base import Ring
from farspark.worker.models.fused_products import power_of_two, summed

# Heads of one token that a program attends for: the least number of rows that a tensor core takes.
_HEADS: Final = 16
# Positions that a program attends to, in bf16 and in float32.
_KEYS: Final = 32
_WIDE_KEYS: Final = 16
_ATTEND_WARPS: Final = 8
# Of the product of groups: the rows that it takes, a program's outputs, and the bytes of a row that one turn of its loop reads.
# Six stages would be 4 % faster on an H200; four have room in the 99 KiB that a program has on an RTX 3090.
_MOST_ROWS: Final = 64
_OUTPUTS: Final = 64
_COLUMN_BYTES: Final = 256
_STAGES: Final = 4
_WARPS: Final = 4


@triton.jit
def _turned(x, c, s, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pairs of neighbours of [ROWS, COLUMNS] turned by the angles of [COLUMNS / 2], float32."""
    a, b = x.reshape(ROWS, COLUMNS // 2, 2).split()
    c, s = c[None, :], s[None, :]
    return tl.join(a * c - b * s, b * c + a * s).reshape(ROWS, COLUMNS)


@triton.jit
def _angles(cos, sin, token, DIM: tl.constexpr, STRAIGHT: tl.constexpr, COLUMNS: tl.constexpr):
    """Of the pairs of a head of DIM, whose first STRAIGHT dimensions stay as they are; cos and sin [T, (DIM - STRAIGHT) / 2]."""
    pair = tl.arange(0, COLUMNS // 2)
    is_turned = (pair >= STRAIGHT // 2) & (pair < DIM // 2)
    at = token * ((DIM - STRAIGHT) // 2) + pair - STRAIGHT // 2
    return tl.load(cos + at, mask=is_turned, other=1.0), tl.load(sin + at, mask=is_turned, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _latents_kernel(
    queries,
    latents,
    query_norm,
    latent_norm,
    cos,
    sin,
    query,
    own,
    query_slice,
    query_row,
    latent_slice,
    latent_row,
    tokens,
    eps,
    QUERY_SLICES: tl.constexpr,
    LATENT_SLICES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    STRAIGHT: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    LAYERS: tl.constexpr,
):
    """Program (t, l): what is seen of token t in layer l: normed and rotated. Behind the layers: t's query latent, normed."""
    token = tl.program_id(0).to(tl.int64)
    dtype = query.dtype.element_ty
    layer = tl.program_id(1)
    if LAYERS > 0:  # noqa: SIM102 - the first is decided when it is compiled
        if layer < LAYERS:
            column = tl.arange(0, DIM_BLOCK)
            inside = column < DIM
            source = latents + token * latent_row + layer * DIM + column
            x = summed(source, latent_slice, inside, LATENT_SLICES, dtype)
            x *= tl.rsqrt(tl.sum(x * x) / DIM + eps)
            x *= tl.load(latent_norm + layer * DIM + column, mask=inside, other=0.0)
            c, s = _angles(cos, sin, token, DIM, STRAIGHT, DIM_BLOCK)
            turned = _turned(x.to(dtype).to(tl.float32)[None, :], c, s, 1, DIM_BLOCK)
            target = own + (layer * tokens + token) * DIM + column[None, :]
            tl.store(target, turned.to(dtype), mask=inside[None, :])
    if RANK > 0:  # noqa: SIM102
        if layer == LAYERS:
            place = tl.arange(0, RANK_BLOCK)
            is_query = place < RANK
            values = summed(queries + token * query_row + place, query_slice, is_query, QUERY_SLICES, dtype)
            values *= tl.rsqrt(tl.sum(values * values) / RANK + eps)
            values *= tl.load(query_norm + place, mask=is_query, other=0.0)
            tl.store(query + token * RANK + place, values.to(dtype), mask=is_query)


@triton.jit(do_not_specialize=["context"])
def _attend_kernel(
    queries,
    own,
    entries,
    slots,
    anchors,
    visible_from,
    cos,
    sin,
    sums,
    peaks,
    weights,
    query_slice,
    query_row,
    context,
    scale,
    eps,
    QUERY_SLICES: tl.constexpr,
    VISIBLE: tl.constexpr,
    LENGTH: tl.constexpr,
    NORMS_QUERY: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    STRAIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (t, h, p): heads h of token t, normed or not and rotated, over part p of what it sees: the context, then its block.

    Parts, not one program over all keys: a draft has few tokens, so what takes the time is how long one program's chain is.
    """
    token = tl.program_id(0).to(tl.int64)
    request = token // LENGTH
    head = tl.program_id(1) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)
    column = tl.arange(0, COLUMNS)
    is_head, is_column = head < HEADS, column < DIM

    slot, anchor = tl.load(slots + request), tl.load(anchors + request)
    # A position more than the context away has been overwritten by a newer one.
    lowest = tl.maximum(tl.load(visible_from + request), anchor - context)
    place = tl.program_id(2) * KEYS + tl.arange(0, KEYS)
    position = anchor - VISIBLE + place
    is_held = (place < VISIBLE) & (position >= lowest)
    is_own = (place >= VISIBLE) & (place < VISIBLE + LENGTH)
    # Of what is not visible nothing is read: it may be NaN, or another request's.
    row = slot * context + tl.where(is_held, position, 0) % context
    keys = tl.load(
        entries + row[:, None] * DIM + column[None, :], mask=is_held[:, None] & is_column[None, :], other=0.0
    )
    row = request * LENGTH + place - VISIBLE
    keys += tl.load(own + row[:, None] * DIM + column[None, :], mask=is_own[:, None] & is_column[None, :], other=0.0)
    dtype: tl.constexpr = keys.dtype

    source = queries + token * query_row + head[:, None] * DIM
    inside = is_head[:, None] & is_column[None, :]
    query = summed(source + column[None, :], query_slice, inside, QUERY_SLICES, dtype)
    # Loaded again in place of changing places within registers, which takes far more of them.
    neighbour = summed(source + (column ^ 1)[None, :], query_slice, inside, QUERY_SLICES, dtype)
    if NORMS_QUERY:
        factor = tl.rsqrt(tl.sum(query * query, axis=1) / DIM + eps)[:, None]
        query = (query * factor).to(dtype).to(tl.float32)
        neighbour = (neighbour * factor).to(dtype).to(tl.float32)
    is_turned = is_column & (column >= STRAIGHT)
    angle = token * ((DIM - STRAIGHT) // 2) + (column - STRAIGHT) // 2
    c = tl.load(cos + angle, mask=is_turned, other=1.0)
    s = tl.load(sin + angle, mask=is_turned, other=0.0)
    s = tl.where(column % 2 == 0, -s, s)
    query = tl.where(is_turned[None, :], query * c[None, :] + neighbour * s[None, :], query).to(dtype)

    scores = tl.dot(query, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where((is_held | is_own)[None, :], scores, float("-inf"))
    peak = tl.max(scores, axis=1)
    # Where nothing is visible there is nothing to subtract from.
    odds = tl.exp(scores - tl.where(peak == float("-inf"), 0.0, peak)[:, None])
    # Twice the bits of the values: what they are weighted by is not rounded to theirs.
    high = odds.to(dtype)
    total = tl.dot(high, keys, input_precision=PRECISION)
    if dtype != tl.float32:
        total = tl.dot((odds - high.to(tl.float32)).to(dtype), keys, total, input_precision=PRECISION)
    target = (token * HEADS + head) * tl.num_programs(2) + tl.program_id(2)
    tl.store(peaks + target, peak, mask=is_head)
    tl.store(weights + target, tl.sum(odds, axis=1), mask=is_head)
    tl.store(sums + target[:, None] * DIM + column[None, :], total, mask=is_head[:, None] & is_column[None, :])


@triton.jit
def _attended_kernel(
    sums,
    peaks,
    weights,
    sink,
    cos,
    sin,
    out,
    parts,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    STRAIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (t, h): one head of token t over all parts and its sink, rounded, rotated back and rounded again."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = (token * HEADS + head) * parts
    part, column = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    is_part, inside = part < parts, column < DIM
    dtype = out.dtype.element_ty
    peak = tl.load(peaks + source + part, mask=is_part, other=float("-inf"))
    weight = tl.load(weights + source + part, mask=is_part, other=0.0)
    total = tl.load(
        sums + (source + part)[:, None] * DIM + column[None, :], mask=is_part[:, None] & inside[None, :], other=0.0
    )
    # The sink takes its share of the softmax, without a value.
    sinks = tl.load(sink + head)
    highest = tl.maximum(tl.max(peak), sinks)
    share = tl.exp(peak - highest)
    weight = tl.sum(share * weight) + tl.exp(sinks - highest)
    attended = (tl.sum(total * share[:, None], axis=0) / weight).to(dtype).to(tl.float32)
    # The value is the key, rotation included; turned back by the query's own position only distances remain.
    c, s = _angles(cos, sin, token, DIM, STRAIGHT, COLUMNS)
    turned = _turned(attended[None, :], c, -s, 1, COLUMNS).to(dtype)
    tl.store(out + (token * HEADS + head) * DIM + column[None, :], turned, mask=inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def _grouped_product_kernel(
    x,
    weights,
    out,
    rows,
    WIDTH: tl.constexpr,
    RANK: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (o, g): outputs o of group g: x [rows, GROUPS, WIDTH] by weights [GROUPS, RANK, WIDTH], rounded."""
    group = tl.program_id(1)
    output, row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    is_output, is_row = output < RANK, row < rows
    weights += group.to(tl.int64) * RANK * WIDTH
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        inside = column < WIDTH
        tile = tl.load(
            weights + output[:, None] * WIDTH + column[None, :], mask=is_output[:, None] & inside[None, :], other=0.0
        )
        values = tl.load(
            x + (row[None, :] * GROUPS + group) * WIDTH + column[:, None],
            mask=is_row[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(tile, values, total, input_precision=PRECISION)
    target = out + (row[None, :] * GROUPS + group) * RANK + output[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def latents(
    queries: Tensor,
    keys: Tensor,
    query_norm: Tensor,
    latent_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(queries' latents normed [T, rank], the block's own entries [T, d]) of two products [slices, T, .].

    Norms float32; `cos` and `sin` float32 [T, rotated dimensions / 2], contiguous.
    """
    query, own = _latents(queries, query_norm, keys, latent_norm.unsqueeze(0), eps, cos, sin, dtype)
    return query, own[0]


def normed(sums: Tensor, norm: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """[T, width] of a product [slices, T, width]; `norm` float32."""
    return _latents(sums, norm, sums[..., :0], norm[:0].view(0, 0), eps, norm, norm, dtype)[0]


def entries(sums: Tensor, norms: Tensor, eps: float, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept of T context positions in every layer, [layers, T, d], of a product [slices, T, layers * d]."""
    return _latents(sums[..., :0], norms[0], sums, norms, eps, cos, sin, dtype)[1]


def _latents(
    queries: Tensor,
    query_norm: Tensor,
    keys: Tensor,
    latent_norms: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Both may be of width 0: nothing is made of it then."""
    tokens, rank, (layers, dim) = queries.shape[1], queries.shape[2], latent_norms.shape
    query = torch.empty((tokens, rank), dtype=dtype, device=queries.device)
    own = torch.empty((layers, tokens, dim), dtype=dtype, device=queries.device)
    _latents_kernel[(tokens, layers + (rank > 0))](
        queries,
        keys,
        query_norm,
        latent_norms,
        cos,
        sin,
        query,
        own,
        *queries.stride()[:2],
        *keys.stride()[:2],
        tokens,
        eps,
        QUERY_SLICES=len(queries),
        LATENT_SLICES=len(keys),
        RANK=rank,
        RANK_BLOCK=power_of_two(rank),
        DIM=dim,
        STRAIGHT=dim - 2 * cos.shape[-1] if layers else 0,
        DIM_BLOCK=power_of_two(dim, 2),
        LAYERS=layers,
    )
    return query, own


def attend(
    queries: Tensor,
    own: Tensor,
    ring: Ring,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    query_eps: float | None,
) -> Tensor:
    """Attention of every block position over {visible context} and {its own block}: [T, heads * d] in own's dtype.

    `queries` a product [slices, T, heads * d], neither rotated nor, where `query_eps` is a number, normed by head. `own` [T, d]
    as `ring.entries` holds them. `sink` float32 [heads].
    """
    tokens, dim = own.shape
    heads, length = len(sink), tokens // len(ring.slots)
    is_wide = own.dtype == torch.float32
    keys = _WIDE_KEYS if is_wide else _KEYS
    parts = triton.cdiv(ring.visible + length, keys)
    sums = torch.empty((tokens, heads, parts, dim), dtype=torch.float32, device=own.device)
    peaks, weights = (torch.empty(sums.shape[:-1], dtype=torch.float32, device=own.device) for _ in range(2))
    sizes = {
        "HEADS": heads,
        "DIM": dim,
        "STRAIGHT": dim - 2 * cos.shape[-1],
        "COLUMNS": power_of_two(dim, 16),
    }
    _attend_kernel[(tokens, triton.cdiv(heads, _HEADS), parts)](
        queries,
        own,
        ring.entries,
        ring.slots,
        ring.anchors,
        ring.visible_from,
        cos,
        sin,
        sums,
        peaks,
        weights,
        *queries.stride()[:2],
        ring.context,
        scale,
        0.0 if query_eps is None else query_eps,
        QUERY_SLICES=len(queries),
        VISIBLE=ring.visible,
        LENGTH=length,
        NORMS_QUERY=query_eps is not None,
        HEADS_BLOCK=_HEADS,
        **sizes,
        KEYS=keys,
        PRECISION="ieee" if is_wide else "tf32",
        num_warps=_ATTEND_WARPS,
    )
    out = torch.empty((tokens, heads * dim), dtype=own.dtype, device=own.device)
    _attended_kernel[(tokens, heads)](
        sums, peaks, weights, sink, cos, sin, out, parts, **sizes, PARTS=power_of_two(parts), num_warps=2
    )
    return out


def grouped_product(x: Tensor, weights: Tensor) -> Tensor:
    """x [T, groups * width] by each group's own weights [groups, rank, width]: [T, groups * rank] in x's dtype."""
    groups, rank, width = weights.shape
    rows = len(x)
    if rows > _MOST_ROWS:
        return torch.bmm(x.view(rows, groups, width).transpose(0, 1), weights.mT).transpose(0, 1).reshape(rows, -1)
    out = torch.empty((rows, groups * rank), dtype=x.dtype, device=x.device)
    _grouped_product_kernel[(triton.cdiv(rank, _OUTPUTS), groups)](
        x,
        weights,
        out,
        rows,
        WIDTH=width,
        RANK=rank,
        GROUPS=groups,
        ROWS=power_of_two(rows, 16),
        OUTPUTS=_OUTPUTS,
        COLUMNS=_COLUMN_BYTES // x.itemsize,
        STAGES=_STAGES,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=_WARPS,
    )
    return out
