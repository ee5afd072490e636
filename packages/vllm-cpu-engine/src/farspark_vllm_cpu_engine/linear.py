"""Linear layers of a bfloat16 model on a CPU that cannot multiply bfloat16 matrices.

Without AVX512-BF16, oneDNN takes no bfloat16 weights, and torch's own loop costs for every row what it costs for one: a
verification of six rows takes six times as long. Float32 copies of the weights are multiplied by oneDNN instead, and the
result is rounded once. A last bit then seldom depends on the number of rows, so neither does a token. The price is
memory: four bytes per weight in place of two.
"""

import functools
from typing import Any

import torch


def install() -> None:
    """Give vLLM's choice of a CPU matrix product this one for bfloat16, where the CPU lacks the instructions."""
    if torch.cpu._is_avx512_bf16_supported():
        return
    # Both users import it at each call, so replacing the attribute reaches them.
    from vllm.model_executor.layers import utils

    choose: Any = utils.dispatch_cpu_unquantized_gemm
    if getattr(choose, "_farspark_float32", False):
        return

    @functools.wraps(choose)
    def choose_float32(layer: torch.nn.Module, remove_weight: bool) -> None:
        if not _use_float32(layer, remove_weight):
            choose(layer, remove_weight)

    choose_float32._farspark_float32 = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = choose_float32


def _use_float32(layer: torch.nn.Module, remove_weight: bool) -> bool:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    if weight.is_meta or weight.ndim != 2 or weight.dtype is not torch.bfloat16:
        return False
    from vllm import _custom_ops as ops

    if not ops._supports_onednn:
        return False
    # The handle owns its own packed copy.
    handle: Any = ops.create_onednn_mm(weight.detach().to(torch.float32).t(), 32)

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = ops.onednn_mm(
            handle, x.to(torch.float32), None if bias is None else bias.to(torch.float32)
        )
        return product.to(x.dtype)

    layer.cpu_linear = multiply  # type: ignore[assignment]
    if remove_weight:
        empty = torch.empty(0, dtype=weight.dtype, device=weight.device)
        layer.weight = torch.nn.Parameter(empty, requires_grad=False)
    return True
