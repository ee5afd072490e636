"""Products of a few rows with a large matrix, and what follows them in a layer, for GPUs: one launch each.

A product gives sums: float32 [slices, rows, outputs], the slices being shares of the matrix's columns, as many as fill the
device. The kernel that comes next adds them up and rounds, so that no launch is spent on that. What cannot be multiplied
this way comes as torch's own product, as one slice of the model's dtype.

Rounding is that of `Arithmetic`. Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

# Of a column of the rows that this module's product takes: 64 rows of bf16, 32 of float32. From there on torch's own is as good,
# and the tiles would outgrow the shared memory of a GPU that has 99 KiB of it.
_MOST_BYTES: Final = 128
_OUTPUTS: Final = 64  # of one program
_COLUMNS: Final = 128  # of one turn of its loop
_STAGES: Final = 3  # turns whose loads are on their way from memory at once
_WARPS: Final = 4
_PROGRAMS_A_PROCESSOR = 2  # that the slices are cut for
_LEAST_TURNS = 4  # of a slice
_BLOCK: Final = 1024  # columns of one program of the gate


@triton.jit(do_not_specialize=["rows", "slice_turns"])
def _product_kernel(
    x,
    first,
    second,
    sums,
    rows,
    first_outputs,
    outputs,
    slice_turns,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    GATE: tl.constexpr,
):
    """Program (o, s): outputs o of `first`, then of `second`, both [., WIDTH], over the columns of slice s; x [rows, WIDTH].

    With a GATE, for which there is one slice, the outputs come in pairs of one of `first` and one of `second`, and what is
    stored in the model's dtype, [rows, outputs / 2], is activation(a) · b of each.
    """
    start = tl.program_id(0) * OUTPUTS
    output, row = tl.arange(0, OUTPUTS), tl.arange(0, ROWS)
    is_output, is_row = start + output < outputs, row < rows
    if GATE != "none":
        place = (start // 2 + output // 2).to(tl.int64) * WIDTH
        weights = tl.where(output % 2 == 0, first + place, second + place)
    else:
        if start < first_outputs:
            matrix = first + start.to(tl.int64) * WIDTH
        else:
            matrix = second + (start - first_outputs).to(tl.int64) * WIDTH
        weights = matrix + output * WIDTH
    turns: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    turn = tl.program_id(1) * slice_turns
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in tl.range(turn, tl.minimum(turn + slice_turns, turns), num_stages=STAGES):
        column = at * COLUMNS + tl.arange(0, COLUMNS)
        if WIDTH % COLUMNS == 0:
            is_weight, is_value = is_output[:, None], is_row[None, :]
        else:
            is_weight = is_output[:, None] & (column < WIDTH)[None, :]
            is_value = is_row[None, :] & (column < WIDTH)[:, None]
        tile = tl.load(weights[:, None] + column[None, :], mask=is_weight, other=0.0)
        values = tl.load(x + row[None, :] * WIDTH + column[:, None], mask=is_value, other=0.0)
        total = tl.dot(tile, values, total, input_precision=PRECISION)
    if GATE != "none":
        dtype = sums.dtype.element_ty
        pairs = tl.permute(tl.reshape(total, [OUTPUTS // 2, 2, ROWS]), (0, 2, 1))
        gates, ups = tl.split(pairs)
        gates, ups = gates.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32)
        pair = start // 2 + tl.arange(0, OUTPUTS // 2)
        mask = (pair < outputs // 2)[:, None] & is_row[None, :]
        tl.store(sums + row[None, :] * (outputs // 2) + pair[:, None], _gated(gates, ups, GATE, dtype), mask=mask)
    else:
        target = (tl.program_id(1) * rows + row)[None, :] * outputs + (start + output)[:, None]
        tl.store(sums + target, total, mask=is_output[:, None] & is_row[None, :])


@triton.jit
def _gated(gate, up, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """activation(gate) · up, rounded after each."""
    if GATE == "gelu":
        # x/2 · (1 + tanh z) = x · σ(2z)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        active = gate * tl.sigmoid(gate)
    return (active.to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def added(sums, slice_stride, mask, SLICES: tl.constexpr):
    """The slices of a product at `sums` added, float32. Masked places are 0."""
    found = tl.load(sums, mask=mask, other=0.0).to(tl.float32)
    for piece in tl.static_range(1, SLICES):
        found += tl.load(sums + piece * slice_stride, mask=mask, other=0.0).to(tl.float32)
    return found


@triton.jit
def summed(sums, slice_stride, mask, SLICES: tl.constexpr, DTYPE: tl.constexpr):
    """`added`, rounded to DTYPE, in float32."""
    return added(sums, slice_stride, mask, SLICES).to(DTYPE).to(tl.float32)


@triton.jit
def row_normed(values, weight, width, eps, DTYPE: tl.constexpr):
    """RMSNorm of one row in float32, rounded before it is multiplied and after."""
    values *= tl.rsqrt(tl.sum(values * values) / width + eps)
    return (values.to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    sums,
    residual,
    own_norm,
    scalar,
    norm,
    normed,
    total,
    rows,
    width,
    eps,
    SLICES: tl.constexpr,
    HAS_OWN_NORM: tl.constexpr,
    HAS_SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program r: row r of a product, normed first or not, added to the residual, multiplied or not, and normed."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    dtype = normed.dtype.element_ty
    weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_OWN_NORM:
        own_weight = tl.load(own_norm + column, mask=inside, other=0.0).to(tl.float32)
    held = tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
    values = summed(sums + row + column, rows * width, inside, SLICES, dtype)
    if HAS_OWN_NORM:
        values = row_normed(values, own_weight, width, eps, dtype).to(tl.float32)
        values = (values + held).to(dtype).to(tl.float32)
    else:
        # The norm sees the sum before it is rounded.
        values += held
    if HAS_SCALAR:
        values = (values * tl.load(scalar).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(total + row + column, values.to(dtype), mask=inside)
    tl.store(normed + row + column, row_normed(values, weight, width, eps, dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _gate_kernel(
    sums,
    out,
    rows,
    width,
    SLICES: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, c): columns c of row r: activation of the product's first half, times its second half."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dtype = out.dtype.element_ty
    source = sums + row * 2 * width + column
    gate = summed(source, rows * 2 * width, inside, SLICES, dtype)
    up = summed(source + width, rows * 2 * width, inside, SLICES, dtype)
    tl.store(out + row * width + column, _gated(gate, up, GATE, dtype), mask=inside)


@triton.jit
def _heads_kernel(
    queries,
    keys_values,
    query_norm,
    key_norm,
    cos,
    sin,
    query,
    key_value,
    query_slice,
    query_row,
    entry_slice,
    entry_row,
    eps,
    QUERY_SLICES: tl.constexpr,
    ENTRY_SLICES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    NAMES: tl.constexpr,
    DIM: tl.constexpr,
    NEOX: tl.constexpr,
    HALF: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
):
    """Program t, h: one head of one token: of the queries, then of the keys (both normed and rotated), then of the values.

    `queries` and `keys_values` are products with their strides by slice and row; without a projection for values (NAMES 1)
    theirs is that of the keys. query [T, HEADS, d] and key_value [T, 2, KV_HEADS, d]; cos and sin [T, d/2].
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    inside = pair < DIM // 2
    if NEOX:
        first, second = pair, pair + DIM // 2
    else:
        first, second = 2 * pair, 2 * pair + 1
    dtype = query.dtype.element_ty
    angle = token * (DIM // 2) + pair
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    if head < HEADS:
        source = queries + token * query_row + head * DIM
        a = summed(source + first, query_slice, inside, QUERY_SLICES, dtype)
        b = summed(source + second, query_slice, inside, QUERY_SLICES, dtype)
        a, b = _turned(a, b, query_norm, first, second, inside, c, s, eps, DIM, dtype)
        target = query + (token * HEADS + head) * DIM
        tl.store(target + first, a.to(dtype), mask=inside)
        tl.store(target + second, b.to(dtype), mask=inside)
    else:
        entry = head - HEADS
        is_value = entry >= KV_HEADS
        column = tl.where(is_value & (NAMES == 1), entry - KV_HEADS, entry) * DIM
        source = keys_values + token * entry_row + column
        a = summed(source + first, entry_slice, inside, ENTRY_SLICES, dtype)
        b = summed(source + second, entry_slice, inside, ENTRY_SLICES, dtype)
        if not is_value:
            a, b = _turned(a, b, key_norm, first, second, inside, c, s, eps, DIM, dtype)
        elif NORMS_VALUES:
            scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / DIM + eps)
            a, b = a * scale, b * scale
        target = key_value + (token * (2 * KV_HEADS) + entry) * DIM
        tl.store(target + first, a.to(dtype), mask=inside)
        tl.store(target + second, b.to(dtype), mask=inside)


@triton.jit
def _turned(a, b, norm, first, second, inside, c, s, eps, DIM: tl.constexpr, DTYPE: tl.constexpr):
    """The two halves of a head, normed and rotated, not rounded at the end."""
    scale = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / DIM + eps)
    norm_a = tl.load(norm + first, mask=inside, other=0.0).to(tl.float32)
    norm_b = tl.load(norm + second, mask=inside, other=0.0).to(tl.float32)
    a = ((a * scale).to(DTYPE).to(tl.float32) * norm_a).to(DTYPE).to(tl.float32)
    b = ((b * scale).to(DTYPE).to(tl.float32) * norm_b).to(DTYPE).to(tl.float32)
    return a * c - b * s, b * c + a * s


def power_of_two(size: int, least: int = 1) -> int:
    """The next one at or above `size`, and at or above `least`, which is one: what a kernel's ranges are as long as."""
    return max(least, int(triton.next_power_of_2(size)))


def whole_row(width: int) -> dict[str, int]:
    """Of a kernel whose programs hold a row of `width` each: BLOCK, and the warps that have room for it in their registers."""
    block = power_of_two(width)
    return {"BLOCK": block, "num_warps": 8 if block > 2048 else 4}


def processors(device: torch.device) -> int:
    """Of a GPU; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., width] by weight [outputs, width]: sums [slices, rows, outputs]."""
    rows = x.reshape(-1, x.shape[-1])
    if bias is not None or not takes(rows, weight):
        return F.linear(rows, weight, bias).unsqueeze(0)
    tiles, slices, slice_turns = _cut(rows, len(weight))
    sums = torch.empty((slices, len(rows), len(weight)), dtype=torch.float32, device=rows.device)
    _product(rows, weight, weight, sums, len(weight), (tiles, slices), slice_turns)
    return sums


def products(
    x: Tensor, first: Tensor, first_bias: Tensor | None, second: Tensor, second_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`product` with two matrices at once."""
    rows = x.reshape(-1, x.shape[-1])
    has_bias = first_bias is not None or second_bias is not None
    if has_bias or len(first) % _OUTPUTS or not (takes(rows, first) and takes(rows, second)):
        return product(x, first, first_bias), product(x, second, second_bias)
    outputs = len(first) + len(second)
    tiles, slices, slice_turns = _cut(rows, outputs)
    sums = torch.empty((slices, len(rows), outputs), dtype=torch.float32, device=rows.device)
    _product(rows, first, second, sums, outputs, (tiles, slices), slice_turns)
    return sums[..., : len(first)], sums[..., len(first) :]


def takes(rows: Tensor, weight: Tensor) -> bool:
    """Whether `product` multiplies rows [count, width] by this weight itself."""
    return len(rows) * rows.itemsize <= _MOST_BYTES and rows.dtype == weight.dtype and weight.is_contiguous()


def _cut(rows: Tensor, outputs: int) -> tuple[int, int, int]:
    """(tiles of outputs, slices, turns of a slice) of a product."""
    tiles, turns = triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows.shape[1], _COLUMNS)
    wanted = max(1, processors(rows.device) * _PROGRAMS_A_PROCESSOR // tiles)
    slice_turns = max(_LEAST_TURNS, triton.cdiv(turns, wanted))
    return tiles, triton.cdiv(turns, slice_turns), slice_turns


def _product(
    rows: Tensor,
    first: Tensor,
    second: Tensor,
    out: Tensor,
    outputs: int,
    grid: tuple[int, int],
    slice_turns: int,
    gate: str = "none",
) -> None:
    rows = rows.contiguous()
    count, width = rows.shape
    _product_kernel[grid](
        rows,
        first,
        second,
        out,
        count,
        len(first),
        outputs,
        slice_turns,
        WIDTH=width,
        ROWS=power_of_two(count, 16),
        OUTPUTS=_OUTPUTS,
        COLUMNS=_COLUMNS,
        STAGES=_STAGES,
        PRECISION="ieee" if rows.dtype == torch.float32 else "tf32",
        GATE=gate,
        num_warps=_WARPS,
    )


def add_norm(
    sums: Tensor,
    residual: Tensor,
    norm: Tensor,
    eps: float,
    *,
    own_norm: Tensor | None = None,
    scalar: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(RMSNorm(t), t) of t = the product + the residual. With `own_norm` the product is normed before it is added, and t
    rounded; with `scalar` [1] t is multiplied by it. Both of residual's shape and dtype."""
    residual = residual.contiguous()
    slices, rows, width = sums.shape
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    _add_norm_kernel[(rows,)](
        sums.contiguous(),
        residual,
        norm if own_norm is None else own_norm,
        norm if scalar is None else scalar,
        norm,
        normed,
        total,
        rows,
        width,
        eps,
        SLICES=slices,
        HAS_OWN_NORM=own_norm is not None,
        HAS_SCALAR=scalar is not None,
        **whole_row(width),
    )
    return normed, total


def gated_product(x: Tensor, gate_up: Tensor, *, is_gelu: bool) -> Tensor:
    """activation(a) · b of the product [a, b] of x [..., width] and gate_up [2 * outputs, width]: [..., outputs]."""
    rows = x.reshape(-1, x.shape[-1])
    both, gate = len(gate_up), "gelu" if is_gelu else "silu"
    outputs = both // 2
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if takes(rows, gate_up):
        tiles, slices, slice_turns = _cut(rows, both)
        if slices == 1:
            _product(rows, gate_up[:outputs], gate_up[outputs:], out, both, (tiles, 1), slice_turns, gate)
            return out
    sums = product(x, gate_up)
    _gate_kernel[(len(rows), triton.cdiv(outputs, _BLOCK))](
        sums, out, len(rows), outputs, SLICES=len(sums), GATE=gate, BLOCK=_BLOCK
    )
    return out


def heads(
    queries: Tensor,
    keys_values: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    entry: tuple[int, int, int],
    *,
    is_neox: bool,
    norms_values: bool,
) -> tuple[Tensor, Tensor]:
    """(query [T, heads, d], key_value [T, 2, kv heads, d]) of two products; `entry`: (projections, kv heads, d).

    `cos` and `sin` float32 [..., 1, d/2] for the T tokens.
    """
    names, kv_heads, dim = entry
    tokens, count = queries.shape[1], queries.shape[2] // dim
    dtype, device = query_norm.dtype, queries.device
    query = torch.empty((tokens, count, dim), dtype=dtype, device=device)
    key_value = torch.empty((tokens, 2, kv_heads, dim), dtype=dtype, device=device)
    _heads_kernel[(tokens, count + 2 * kv_heads)](
        queries,
        keys_values,
        query_norm,
        key_norm,
        cos.contiguous(),
        sin.contiguous(),
        query,
        key_value,
        queries.stride(0),
        queries.stride(1),
        keys_values.stride(0),
        keys_values.stride(1),
        eps,
        QUERY_SLICES=len(queries),
        ENTRY_SLICES=len(keys_values),
        HEADS=count,
        KV_HEADS=kv_heads,
        NAMES=names,
        DIM=dim,
        NEOX=is_neox,
        HALF=power_of_two(dim // 2),
        NORMS_VALUES=norms_values,
        num_warps=1,
    )
    return query, key_value
