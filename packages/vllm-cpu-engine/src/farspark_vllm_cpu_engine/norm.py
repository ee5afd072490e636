"""The RMS norm of several layers in one call, each with its own weight.

A block drafter's context keys are normed for all of its layers at once: ``rms_norm(out, keys [L, n, heads, d], weight [L, d])``.
vLLM's GPU kernel takes row ``l`` of the weight for layer ``l``; its CPU kernel knows one weight only and takes row 0 for every
layer, without an error. The context keys of all layers but the first are then wrong, and drafts are refused that should not be.
"""

import functools
from typing import Any

import torch


def install() -> None:
    """Give vLLM's ``rms_norm`` operator weights [L, d] on the CPU; what it does with other weights stays."""
    from vllm import _custom_ops as ops

    norm: Any = ops.rms_norm
    if getattr(norm, "_farspark_per_layer", False):
        return

    # Every user looks the operator up in its module at each call, so replacing the attribute reaches them.
    @functools.wraps(norm)
    def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
        if weight is None or weight.ndim == 1:
            norm(out, input, weight, epsilon)
            return
        for layer_out, layer_input, layer_weight in zip(out, input, weight, strict=True):
            norm(layer_out, layer_input, layer_weight, epsilon)

    rms_norm._farspark_per_layer = True  # type: ignore[attr-defined]
    ops.rms_norm = rms_norm
