"""Block-scaled fp8 and packed fp4: decoding of weights, and the rounding of activations that the reference makes.

Formats (OCP 8-bit floating point and microscaling formats):
    e4m3   sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f and 0xff are NaN; largest 448
    e2m1   sign, 2 bits of exponent (bias 1), 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6; two in a byte, the even one low
    e8m0   a power of two, 2^(byte - 127); 0xff is NaN
An e4m3 or e2m1 value times a power of two (2^-124 or more) is a bf16 value, so decoding to bf16 loses nothing.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from farspark.worker.models.base import Arithmetic

E4M3_MAX: Final = 448.0
# Keeps an all-zero group's scale away from zero.
SMALLEST_PEAK: Final = 1e-4

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_fp8(weight: Tensor, scale: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """float8_e4m3fn [out, in] times its scale [⌈out/block⌉, ⌈in/block⌉], float8_e8m0fnu or float32 -> `dtype` [out, in].

    Exact for e8m0 scales and a `dtype` of bfloat16 or float32; for float32 scales one rounding.
    """
    rows, columns = weight.shape
    wide = scale.float().repeat_interleave(block, dim=0)[:rows].repeat_interleave(block, dim=1)[:, :columns]
    return (weight.float() * wide).to(dtype)


def decode_fp4(packed: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """int8 or uint8 [..., in / 2], two e2m1 in each, times the scale of each `group` [..., in / group] -> [..., in].

    Exact as `decode_fp8` is.
    """
    pairs = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)
    codes = packed.view(torch.uint8).int()
    values = torch.stack((pairs[codes & 15], pairs[codes >> 4]), dim=-1).flatten(-2)
    return (values.view(*scale.shape, group) * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)


def through_fp8(x: Tensor, group: int) -> Tensor:
    """`x` [..., n] as it comes back from e4m3 with one power of two for each `group` along the last dimension; float32.

    The scale is the least power of two that keeps the group's greatest magnitude, or `SMALLEST_PEAK`, within 448; values
    are rounded to nearest, ties to even. As DeepSeek's `act_quant` with scale_fmt "ue8m0".
    """
    groups = x.float().reshape(*x.shape[:-1], -1, group)
    peak = groups.abs().amax(dim=-1, keepdim=True).clamp_min(SMALLEST_PEAK)
    scale = power_of_two_above(peak * (1.0 / E4M3_MAX))
    # Within 448 but for the last bit of the quotient, which rounds away.
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2)


def power_of_two_above(x: Tensor) -> Tensor:
    """The least power of two that is `x` or more, of normal float32 values: from the bits, so that no logarithm rounds."""
    bits = x.contiguous().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent << 23).view(torch.float32)


class QuantisedLinear:
    """y = W x with a decoded W [out, in] in the carrier dtype.

    With `group` the input goes through fp8 first, as in the reference, whose products take fp8 on both sides.
    """

    def __init__(self, weight: Tensor, group: int | None, arithmetic: Arithmetic) -> None:
        self.weight = weight
        self._group = group
        self._arithmetic = arithmetic

    def __call__(self, x: Tensor) -> Tensor:
        return self._arithmetic.linear(quantised_input(x, self._group), self.weight)

    def part(self, rows: slice) -> QuantisedLinear:
        """The product with these rows of W alone, on the same memory."""
        return QuantisedLinear(self.weight[rows], self._group, self._arithmetic)


def quantised_input(x: Tensor, group: int | None) -> Tensor:
    """What a quantised product sees of `x`, in x's dtype: `x` itself without a group."""
    return x if group is None else through_fp8(x, group).to(x.dtype)
