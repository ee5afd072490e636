"""The routed experts with their fp4 weights left packed, for GPUs: a quarter of the memory, and of the bytes that a draft reads.

Two launches, decoding in registers. Every expert looks for its own tokens, so nothing is sorted and nothing asks the host.
Importing this module imports Triton.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.experts import Routing
from farspark.worker.models.quantised import quantised_input

_PAIRS: Final = 16  # (token, expert) pairs at once: the least that a tensor core takes
_OUTPUTS: Final = 128  # rows of a weight matrix that one program multiplies
_BYTES: Final = 64  # of such a row at once
_GROUP_BYTES: Final = 16  # of a row that share a scale: 32 values


@triton.jit
def _decoded(codes, scale):
    """e2m1 in the low four bits, times 2^(scale - 127): float32."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    normal = ((exponent + 126) << 23 | mantissa << 22).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.5, normal)
    factor = tl.where(scale == 0, 5.877471754111438e-39, (scale << 23).to(tl.float32, bitcast=True))
    return tl.where((codes & 8) != 0, -value, value) * factor


@triton.jit
def _product(
    x, rows, is_row, weight, scales, output, in_output, WIDTH: tl.constexpr, BYTES: tl.constexpr, GROUP: tl.constexpr,
    PAIRS: tl.constexpr, OUTPUTS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """float32 [OUTPUTS, PAIRS]: packed rows of weight [., WIDTH / 2] by rows of x [., WIDTH]."""
    total = tl.zeros([OUTPUTS, PAIRS], tl.float32)
    dtype = x.dtype.element_ty
    for start in range(0, WIDTH // 2, BYTES):
        byte = start + tl.arange(0, BYTES)
        inside = byte < WIDTH // 2
        mask = in_output[:, None] & inside[None, :]
        packed = tl.load(weight + output[:, None] * (WIDTH // 2) + byte[None, :], mask=mask, other=0)
        if HARDWARE:
            group = start // GROUP + tl.arange(0, BYTES // GROUP)
            in_width = group < WIDTH // 2 // GROUP
            place = output[:, None] * (WIDTH // 2 // GROUP) + group[None, :]
            scale = tl.load(scales + place, mask=in_output[:, None] & in_width[None, :], other=0)
            column = 2 * start + tl.arange(0, 2 * BYTES)
            source = x + rows[None, :] * WIDTH + column[:, None]
            values = tl.load(source, mask=is_row[None, :] & (column < WIDTH)[:, None], other=0.0)
            total = tl.dot_scaled(packed, scale, "e2m1", values, None, "bf16", acc=total, fast_math=True)
        else:
            place = output[:, None] * (WIDTH // 2 // GROUP) + (byte // GROUP)[None, :]
            scale = tl.load(scales + place, mask=mask, other=0).to(tl.int32)
            source = x + rows[None, :] * WIDTH + 2 * byte[:, None]
            is_read = is_row[None, :] & inside[:, None]
            even = tl.load(source, mask=is_read, other=0.0)
            odd = tl.load(source + 1, mask=is_read, other=0.0)
            codes = packed.to(tl.int32)
            total += tl.dot(_decoded(codes & 15, scale).to(dtype), even, input_precision="ieee")
            total += tl.dot(_decoded((codes >> 4) & 15, scale).to(dtype), odd, input_precision="ieee")
    return total


@triton.jit
def _pairs_of(experts, expert, chunk, pairs, ALL: tl.constexpr, PAIRS: tl.constexpr):
    """The pairs of `expert`, from the (chunk * PAIRS)-th on: (int64 [PAIRS], whether there is one, how many in all)."""
    every = tl.arange(0, ALL)
    is_mine = tl.load(experts + every, mask=every < pairs, other=-1) == expert
    rank = tl.cumsum(is_mine.to(tl.int32), 0) - 1 - chunk * PAIRS
    wanted = tl.arange(0, PAIRS)
    found = is_mine[None, :] & (rank[None, :] == wanted[:, None])
    pair = tl.sum(tl.where(found, every[None, :], 0), axis=1)
    count = tl.sum(is_mine.to(tl.int32))
    return pair.to(tl.int64), chunk * PAIRS + wanted < count, count


@triton.jit
def _gate_up_kernel(
    x,
    experts,
    weights,
    gate,
    gate_scale,
    up,
    up_scale,
    inner,
    pairs,
    limit,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ALL: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Program (e, o): inner values o of every token that expert e has."""
    expert = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_output = output < INNER
    start = expert * INNER * (WIDTH // 2)
    scale_start = expert * INNER * (WIDTH // 2 // GROUP)
    dtype = inner.dtype.element_ty
    pair, is_pair, count = _pairs_of(experts, expert, 0, pairs, ALL, PAIRS)
    for chunk in range(tl.cdiv(count, PAIRS)):
        pair, is_pair, count = _pairs_of(experts, expert, chunk, pairs, ALL, PAIRS)
        token = pair // PER_TOKEN
        g = _product(
            x, token, is_pair, gate + start, gate_scale + scale_start, output, in_output, WIDTH, BYTES, GROUP, PAIRS,
            OUTPUTS, HARDWARE,
        )  # fmt: skip
        u = _product(
            x, token, is_pair, up + start, up_scale + scale_start, output, in_output, WIDTH, BYTES, GROUP, PAIRS,
            OUTPUTS, HARDWARE,
        )  # fmt: skip
        g = tl.minimum(g.to(dtype).to(tl.float32), limit)
        u = tl.maximum(tl.minimum(u.to(dtype).to(tl.float32), limit), -limit)
        weight = tl.load(weights + pair, mask=is_pair, other=0.0)
        values = g * tl.sigmoid(g) * u * weight[None, :]
        mask = in_output[:, None] & is_pair[None, :]
        tl.store(inner + pair[None, :] * INNER + output[:, None], values.to(dtype), mask=mask)


@triton.jit
def _down_kernel(
    inner,
    experts,
    down,
    down_scale,
    out,
    pairs,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ALL: tl.constexpr,
    PAIRS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BYTES: tl.constexpr,
    GROUP: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Program (e, o): outputs o of every token that expert e has."""
    expert = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_output = output < WIDTH
    start = expert * WIDTH * (INNER // 2)
    scale_start = expert * WIDTH * (INNER // 2 // GROUP)
    pair, is_pair, count = _pairs_of(experts, expert, 0, pairs, ALL, PAIRS)
    for chunk in range(tl.cdiv(count, PAIRS)):
        pair, is_pair, count = _pairs_of(experts, expert, chunk, pairs, ALL, PAIRS)
        values = _product(
            inner, pair, is_pair, down + start, down_scale + scale_start, output, in_output, INNER, BYTES, GROUP, PAIRS,
            OUTPUTS, HARDWARE,
        )  # fmt: skip
        mask = in_output[:, None] & is_pair[None, :]
        tl.store(out + pair[None, :] * WIDTH + output[:, None], values.to(out.dtype.element_ty), mask=mask)


class PackedExperts:
    """`Experts` with weights as in the checkpoint.

    `gate`, `up` uint8 [experts, inner, D / 2] and `down` [experts, D, inner / 2], two e2m1 a byte; scales uint8 (e8m0), one
    for each 32 values: [experts, inner, D / 32], [experts, D, inner / 32].
    """

    def __init__(
        self,
        gate: tuple[Tensor, Tensor],
        up: tuple[Tensor, Tensor],
        down: tuple[Tensor, Tensor],
        limit: float,
        group: int | None,
        arithmetic: Arithmetic,
    ) -> None:
        self.gate, self.up, self.down = gate, up, down
        self._limit = limit
        self._group = group
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """As `Experts`: [T, D] -> float32 [T, D]."""
        x = quantised_input(x, self._group).contiguous()
        width, per_token = x.shape[1], routing.experts.shape[1]
        experts, weights = routing.experts.contiguous(), routing.weights.contiguous()
        pairs = experts.numel()
        count, inner_width = self.gate[0].shape[:2]
        inner = torch.empty((pairs, inner_width), dtype=x.dtype, device=x.device)
        sizes = {
            "WIDTH": width,
            "INNER": inner_width,
            "ALL": max(16, int(triton.next_power_of_2(pairs))),
            "PAIRS": _PAIRS,
            "OUTPUTS": _OUTPUTS,
            "BYTES": _BYTES,
            "GROUP": _GROUP_BYTES,
            # Triton's own decoding, which takes bf16 on the other side.
            "HARDWARE": x.dtype == torch.bfloat16 and x.device.type == "cuda",
        }
        _gate_up_kernel[(count, triton.cdiv(inner_width, _OUTPUTS))](
            x, experts, weights, *self.gate, *self.up, inner, pairs, self._limit, PER_TOKEN=per_token, **sizes
        )
        inner = quantised_input(inner, self._group)
        out = torch.empty((pairs, width), dtype=self._arithmetic.dtype, device=x.device)
        _down_kernel[(count, triton.cdiv(width, _OUTPUTS))](inner, experts, *self.down, out, pairs, **sizes)
        return out.view(-1, per_token, width).float().sum(dim=1)
