"""The bfloat16 product through float32 weights."""

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from farspark_vllm_cpu_engine import linear

current_platform.import_kernels()


def layer(*, bias: bool, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(48, 80, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 6])
def test_the_product_is_the_exact_one_rounded_once(rows: int, bias: bool) -> None:
    a_layer = layer(bias=bias)
    weight, x = a_layer.weight.clone(), torch.randn(rows, 48).to(torch.bfloat16)
    assert linear._use_float32(a_layer, remove_weight=True)
    multiply: Any = a_layer.cpu_linear
    found = multiply(x, a_layer.weight, a_layer.bias)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if not bias else a_layer.bias.double())
    assert found.dtype is torch.bfloat16
    assert a_layer.weight.numel() == 0
    # One rounding is at most half a unit in the last of 8 bits.
    assert torch.all((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6)


def test_the_weight_stays_where_it_is_also_looked_up() -> None:
    a_layer = layer(bias=False)
    assert linear._use_float32(a_layer, remove_weight=False)
    assert a_layer.weight.shape == (80, 48)


def test_other_types_are_left_to_vllm() -> None:
    assert not linear._use_float32(layer(bias=False, dtype=torch.float32), remove_weight=True)
