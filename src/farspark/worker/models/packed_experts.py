"""The routed experts with their fp4 weights left packed, for GPUs: a quarter of the memory, and of the bytes that a draft reads.

Few tokens come to an expert, so what counts is that weights arrive at the speed of the memory and that a weight costs few
instructions. Hence:
    * One warp is one program. It multiplies a few rows of one expert, over a slice of their columns, by at most `_PAIRS` tokens
      of that expert, and stores float32 sums; the slices are added by the kernel that reads them.
    * Weights lie in memory as a tensor core's lanes want them (`laid_out`): a lane's 16 bytes are its part of a matrix of 16 x
      64, and a masked shift makes a bf16 of each code, times 2^-126: its exponent's two bits are the low ones of bf16's, and
      a half is subnormal in both. The activations are multiplied by 2^80 instead, the sums by 2^46.
    * A group's scale is multiplied with the sum over its 32 columns, in float32: weights from 2^-100 to 2^127 count.

Nothing is sorted and nothing asks the host. Importing this module imports Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.experts import Routing
from farspark.worker.models.fused_products import power_of_two, processors, summed
from farspark.worker.models.quantised import quantised_input

_PAIRS: Final = 8  # (token, expert) pairs of one program: the columns of a tensor core's product
_BLOCKS: Final = 4  # of 16 rows, of one program
_STAGES: Final = 4  # parts of 64 columns that are on their way from memory at once
# That the slices are cut for: for the pairs of a request or two, and for more of them.
_FEW_PAIRS: Final = 32
_WARPS_A_PROCESSOR: Final = (32, 64)
_LEAST_SLICE: Final = 4  # parts of 64 columns
_LEAST_ALL: Final = 64  # pairs that a program looks through; the number is compiled in
_COLUMNS: Final = 1024  # of one program of the small kernels

ROW_TILE: Final = 64
COLUMN_TILE: Final = 64
# Of the four codes of a 16-bit word: where the three bits of the magnitude begin, and where the sign is. Shifted to bits 6 and 15
# they are a bf16, and the first two get there in one shift.
_MAGNITUDES: Final = (6, 3, 0, 9)
_SIGNS: Final = (15, 12, 14, 13)


def laid_out(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix's codes uint8 [rows, columns / 2] and e8m0 uint8 [rows, columns / 32] as the kernel reads them.

    int16 [⌈rows/16⌉, ⌈columns/64⌉, 256]: word (8g + t, r) of 16 rows and 64 columns is row 8·r[2] + g, and its code 2q + p the
    column 32q + 8t + 4p + r[0..1]. int32 [⌈rows/64⌉, ⌈columns/64⌉, 8, 4]: element (g, b), byte 2q + i is the scale of row
    16b + 8i + g, columns 32q on. Rows and columns are filled up with zeros to 64.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    more_rows, more_columns = -rows % ROW_TILE, -columns % COLUMN_TILE
    packed = F.pad(packed, (0, more_columns // 2, 0, more_rows))
    scale = F.pad(scale, (0, more_columns // 32, 0, more_rows))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1)
    # block, row bit 3, g, part, q, t, p, r[1], r[0]
    codes = codes.view(-1, 2, 8, packed.shape[1] // 32, 2, 4, 2, 2, 2).permute(0, 3, 2, 5, 1, 7, 8, 4, 6)
    words = torch.zeros(codes.shape[:-2], dtype=torch.int32, device=packed.device)
    for code, magnitude, sign in zip(codes.flatten(-2).unbind(-1), _MAGNITUDES, _SIGNS, strict=True):
        words |= (code & 7).int() << magnitude | (code >> 3).int() << sign
    # tile, b, i, g, part, q
    bytes_ = scale.view(-1, 4, 2, 8, packed.shape[1] // 32, 2).permute(0, 4, 3, 1, 5, 2).contiguous()
    return words.to(torch.int16).flatten(2), bytes_.flatten(-2).view(torch.int32).squeeze(-1)


@triton.jit
def _plane(words, MAGNITUDE: tl.constexpr, SIGN: tl.constexpr):
    """float32, times 2^-126, of the codes whose bits begin at MAGNITUDE and SIGN of int16 words."""
    wide = words.to(tl.int32)
    bits = ((wide << 6) >> MAGNITUDE) & 0x01C0 | (wide << (15 - SIGN)) & 0x8000
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _planes(words, BY_PAIRS: tl.constexpr):
    """The four codes of int16 words, times 2^-126. BY_PAIRS: bf16, two words at a time; else float32."""
    if BY_PAIRS:
        a, b, c, d = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 magnitude, sign;
            and.b32 $0, $4, 0x81c081c0;
            shl.b32 magnitude, $4, 3;
            and.b32 $1, magnitude, 0x81c081c0;
            shl.b32 magnitude, $4, 6;
            and.b32 magnitude, magnitude, 0x01c001c0;
            shl.b32 sign, $4, 1;
            lop3.b32 $2, sign, 0x80008000, magnitude, 0xea;
            shr.u32 magnitude, $4, 3;
            and.b32 magnitude, magnitude, 0x01c001c0;
            shl.b32 sign, $4, 2;
            lop3.b32 $3, sign, 0x80008000, magnitude, 0xea;
            }
            """,
            "=r,=r,=r,=r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = _plane(words, 6, 15), _plane(words, 3, 12), _plane(words, 0, 14), _plane(words, 9, 13)
    return a, b, c, d


@triton.jit
def _raised(x, BY_PAIRS: tl.constexpr):
    """Times 2^80: bf16 BY_PAIRS, else float32."""
    if BY_PAIRS:
        x = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 factor, zero;
            mov.b32 factor, 0x67806780;
            mov.b32 zero, 0x80008000;
            fma.rn.bf16x2 $0, $1, factor, zero;
            }
            """,
            "=r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        x = x * 1208925819614629174706176.0
    return x


@triton.jit
def _rows_by_columns(plane, BLOCKS: tl.constexpr):
    """[BLOCKS, 256] in the order of memory -> [rows, 16]."""
    return plane.reshape(BLOCKS, 8, 4, 2, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(BLOCKS * 16, 16)


@triton.jit
def _columns_by_pairs(x, BY_PAIRS: tl.constexpr, PAIRS: tl.constexpr):
    """[PAIRS, 32] of a group -> two of [16, PAIRS], columns as those of two planes; times 2^80."""
    first, second = x.reshape(PAIRS, 4, 2, 2, 2).permute(0, 1, 3, 4, 2).split()
    first = first.permute(2, 1, 3, 0).reshape(16, PAIRS)
    second = second.permute(2, 1, 3, 0).reshape(16, PAIRS)
    return _raised(first, BY_PAIRS), _raised(second, BY_PAIRS)


@triton.jit
def _factors(scales, LOW: tl.constexpr, BLOCKS: tl.constexpr, PAIRS: tl.constexpr):
    """Bytes LOW and LOW + 1 of int32 [BLOCKS, 4, 8] as powers of two, float32 [rows, PAIRS].

    2^-127 counts as nothing: what it adds is below the normal numbers.
    """
    if LOW == 0:
        low, high = scales << 23, scales << 15
    else:
        low, high = scales << 7, scales >> 1
    low = (low & 0x7F800000).to(tl.float32, bitcast=True)
    high = (high & 0x7F800000).to(tl.float32, bitcast=True)
    both = tl.join(low, high).permute(0, 3, 2, 1).reshape(BLOCKS, 2, 8, 1, 4, 1)
    return tl.broadcast_to(both, BLOCKS, 2, 8, PAIRS // 8, 4, 2).reshape(BLOCKS * 16, PAIRS)


@triton.jit
def _pairs_with(experts, leader, pairs, ALL: tl.constexpr, PAIRS: tl.constexpr):
    """The pairs that program `leader` takes: (its expert, int32 [PAIRS], whether there is one, whether there is any).

    An expert's pairs go to its first one, its (PAIRS + 1)-th one, and so on.
    """
    every = tl.arange(0, ALL)
    expert = tl.load(experts + leader)
    is_mine = (tl.load(experts + every, mask=every < pairs, other=-1) == expert).to(tl.int32)
    before = tl.sum(tl.where(every < leader, is_mine, 0))
    wanted = before + tl.arange(0, PAIRS)
    found = (is_mine != 0)[None, :] & ((tl.cumsum(is_mine, 0) - 1)[None, :] == wanted[:, None])
    pair = tl.sum(tl.where(found, every[None, :], 0), axis=1)
    return expert, pair, wanted < tl.sum(is_mine), before % PAIRS == 0


@triton.jit(do_not_specialize=["pairs", "expert_count", "slice_parts"])
def _product_kernel(
    x,
    experts,
    words,
    scales,
    sums,
    pairs,
    expert_count,
    slice_parts,
    PER_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ALL: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    BY_PAIRS: tl.constexpr,
):
    """Program (l, o, s): outputs o of the pairs that l leads, over the columns of slice s.

    x [., WIDTH], a row for each PER_ROW pairs. `words` and `scales` of one matrix of every expert, then of the next, if any.
    `sums` float32 [slices, pairs, matrices, OUTPUTS].
    """
    TILES: tl.constexpr = (OUTPUTS + BLOCKS * 16 - 1) // (BLOCKS * 16)
    ROW_BLOCKS: tl.constexpr = (OUTPUTS + 63) // 64 * 4
    PARTS: tl.constexpr = (WIDTH + 63) // 64
    expert, pair, is_pair, is_any = _pairs_with(experts, tl.program_id(0), pairs, ALL, PAIRS)
    if is_any:
        matrix, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
        place = matrix * expert_count + expert
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        lane_words = words + place * (ROW_BLOCKS * PARTS * 256)
        lane_words += block[:, None] * (PARTS * 256) + tl.arange(0, 256)[None, :]
        lane_scales = scales + place * (ROW_BLOCKS * PARTS * 8)
        lane_scales += (block // 4 * (PARTS * 32) + block % 4)[:, None, None] + 4 * tl.arange(0, 8)[None, None, :]
        lane_scales += tl.zeros([1, 4, 1], tl.int32)
        column = tl.arange(0, 32)[None, :]
        row = x + (pair // PER_ROW).to(tl.int64)[:, None] * WIDTH + column
        total = tl.zeros([BLOCKS * 16, PAIRS], tl.float32)
        first = tl.program_id(2) * slice_parts
        for part in tl.range(first, tl.minimum(first + slice_parts, PARTS), num_stages=STAGES):
            codes = tl.load(lane_words + part * 256)
            scale = tl.load(lane_scales + part * 32)
            if WIDTH % 64 == 0:
                is_read, is_read_too = is_pair[:, None], is_pair[:, None]
            else:
                is_read = is_pair[:, None] & (part * 64 + column < WIDTH)
                is_read_too = is_pair[:, None] & (part * 64 + 32 + column < WIDTH)
            group = tl.load(row + part * 64, mask=is_read, other=0.0)
            next_group = tl.load(row + part * 64 + 32, mask=is_read_too, other=0.0)
            if not BY_PAIRS:
                group, next_group = group.to(tl.float32), next_group.to(tl.float32)
            a, b, c, d = _planes(codes, BY_PAIRS)
            xa, xb = _columns_by_pairs(group, BY_PAIRS, PAIRS)
            xc, xd = _columns_by_pairs(next_group, BY_PAIRS, PAIRS)
            product = tl.dot(_rows_by_columns(a, BLOCKS), xa, input_precision="ieee")
            product = tl.dot(_rows_by_columns(b, BLOCKS), xb, product, input_precision="ieee")
            total += product * _factors(scale, 0, BLOCKS, PAIRS)
            product = tl.dot(_rows_by_columns(c, BLOCKS), xc, input_precision="ieee")
            product = tl.dot(_rows_by_columns(d, BLOCKS), xd, product, input_precision="ieee")
            total += product * _factors(scale, 2, BLOCKS, PAIRS)
        output = tile * (BLOCKS * 16) + tl.arange(0, BLOCKS * 16)
        matrices = tl.num_programs(1) // TILES
        target = (tl.program_id(2) * pairs + pair).to(tl.int64) * matrices + matrix
        mask = is_pair[None, :] & (output < OUTPUTS)[:, None]
        tl.store(sums + target[None, :] * OUTPUTS + output[:, None], total * 70368744177664.0, mask=mask)


@triton.jit
def clamped_swiglu(gate, up, limit):
    """`experts.swiglu`, float32."""
    gate = tl.minimum(gate, limit)
    return gate * tl.sigmoid(gate) * tl.maximum(tl.minimum(up, limit), -limit)


@triton.jit
def _activation_kernel(
    sums,
    weights,
    inner,
    pairs,
    limit,
    SLICES: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (p, c): columns c of pair p: weight · swiglu of the two products, whose slices `sums` has."""
    pair = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < INNER
    dtype = inner.dtype.element_ty
    source = sums + pair * (2 * INNER) + column
    gate = summed(source, pairs * (2 * INNER), inside, SLICES, dtype)
    up = summed(source + INNER, pairs * (2 * INNER), inside, SLICES, dtype)
    values = clamped_swiglu(gate, up, limit) * tl.load(weights + pair)
    tl.store(inner + pair * INNER + column, values.to(dtype), mask=inside)


@triton.jit
def _sum_kernel(
    sums,
    out,
    pairs,
    PER_TOKEN: tl.constexpr,
    SLICES: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Program (t, c): columns c of token t: the sum over its experts, each rounded to DTYPE."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros([COLUMNS], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        source = sums + (token * PER_TOKEN + choice) * WIDTH + column
        total += summed(source, pairs * WIDTH, inside, SLICES, DTYPE)
    tl.store(out + token * WIDTH + column, total, mask=inside)


class Matrices:
    """One matrix of every expert, or one after the other, as the kernel reads them."""

    def __init__(self, matrices: Iterable[tuple[Tensor, Tensor]], per_expert: int) -> None:
        words: list[Tensor] = []
        scales: list[Tensor] = []
        outputs = 0
        for packed, scale in matrices:
            outputs = len(packed)
            for kind, one in zip((words, scales), laid_out(packed, scale), strict=True):
                kind.append(one)
        self.words, self.scales = torch.stack(words), torch.stack(scales)
        self.per_expert = per_expert
        self.experts = len(words) // per_expert
        self.outputs = outputs
        self._processors = processors(self.words.device)

    def times(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [pairs / k, columns] by the matrices of its experts [pairs]: float32 [slices, pairs, per_expert, outputs]."""
        pairs, width, outputs = experts.numel(), x.shape[1], self.outputs
        tiles = self.per_expert * triton.cdiv(outputs, _BLOCKS * 16)
        parts = triton.cdiv(width, COLUMN_TILE)
        leaders = min(pairs, self.experts + pairs // _PAIRS)
        wanted = self._processors * _WARPS_A_PROCESSOR[pairs > _FEW_PAIRS]
        slice_parts = max(_LEAST_SLICE, parts // triton.cdiv(wanted, leaders * tiles))
        slices = triton.cdiv(parts, slice_parts)
        sums = torch.empty((slices, pairs, self.per_expert, outputs), dtype=torch.float32, device=x.device)
        _product_kernel[(pairs, tiles, slices)](
            x,
            experts,
            self.words,
            self.scales,
            sums,
            pairs,
            self.experts,
            slice_parts,
            PER_ROW=pairs // len(x),
            WIDTH=width,
            OUTPUTS=outputs,
            ALL=power_of_two(pairs, _LEAST_ALL),
            PAIRS=_PAIRS,
            BLOCKS=_BLOCKS,
            STAGES=_STAGES,
            BY_PAIRS=x.dtype == torch.bfloat16 and x.device.type == "cuda",
            num_warps=1,
        )
        return sums


class PackedExperts:
    """`Experts` whose weights stay fp4.

    `gate`, `up` and `down` give each expert's codes, uint8 [inner, D / 2] or [D, inner / 2] with two e2m1 in each, and their
    scales uint8 (e8m0), one for each 32 values. They are laid out anew as they come. Inputs are below 2^47.
    """

    def __init__(
        self,
        gate: Iterable[tuple[Tensor, Tensor]],
        up: Iterable[tuple[Tensor, Tensor]],
        down: Iterable[tuple[Tensor, Tensor]],
        limit: float,
        group: int | None,
        arithmetic: Arithmetic,
    ) -> None:
        self._gate_up = Matrices(itertools.chain(gate, up), 2)
        self._down = Matrices(down, 1)
        self._limit = limit
        self._group = group
        self._dtype: tl.dtype = getattr(tl, str(arithmetic.dtype).removeprefix("torch."))

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """As `Experts`: [T, D] -> float32 [T, D]."""
        sums = self.sums(x, routing)
        tokens, width = x.shape
        out = torch.empty((tokens, width), dtype=torch.float32, device=x.device)
        _sum_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
            sums,
            out,
            sums.shape[1],
            PER_TOKEN=sums.shape[1] // tokens,
            SLICES=len(sums),
            WIDTH=width,
            COLUMNS=_COLUMNS,
            DTYPE=self._dtype,
        )
        return out

    def sums(self, x: Tensor, routing: Routing) -> Tensor:
        """Every token's experts, weighted, in slices that are not added up yet: [T, D] -> float32 [slices, T * k, D]."""
        x = quantised_input(x, self._group).contiguous()
        experts, weights = routing.experts.contiguous(), routing.weights.contiguous()
        pairs = experts.numel()
        inner_width = self._gate_up.outputs
        sums = self._gate_up.times(x, experts)
        inner = torch.empty((pairs, inner_width), dtype=x.dtype, device=x.device)
        _activation_kernel[(pairs, triton.cdiv(inner_width, _COLUMNS))](
            sums,
            weights,
            inner,
            pairs,
            self._limit,
            SLICES=len(sums),
            INNER=inner_width,
            COLUMNS=_COLUMNS,
        )
        return self._down.times(quantised_input(inner, self._group), experts).squeeze(2)
