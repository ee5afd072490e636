"""The sublayers of a DeepSeek stage in seven (attention) and six (experts) Triton launches, for GPUs; plain mode only.

A product leaves its sums in slices (`fused_products`); what comes next adds them up. Importing this module imports Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.worker.models import fused_latent, fused_products, fused_routing
from farspark.worker.models.fused_streams import Output
from farspark.worker.models.packed_experts import PackedExperts

if TYPE_CHECKING:
    from farspark.worker.checkpoint.deepseek import DeepseekV4Config
    from farspark.worker.models.base import BlockContext, RingContext
    from farspark.worker.models.deepseek_v4 import Rotation, Stage
    from farspark.worker.models.quantised import QuantisedLinear


class FusedSublayers:
    """Computes what `DeepseekV4` computes of `stages`; routed experts that are not packed take launches of their own."""

    def __init__(self, config: DeepseekV4Config, stages: list[Stage], dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        # Checkpoints have the router's weights in bf16; as such they go into one product with the shared expert's.
        self._routers = [_exactly(stage.router.weight, dtype) for stage in stages]

    def context_entries(
        self,
        rows: Tensor,
        main: QuantisedLinear,
        main_norm: Tensor,
        latents: QuantisedLinear,
        latent_norms: Tensor,
        rotation: Rotation,
    ) -> Tensor:
        """`DeepseekV4.project_context` of rows [M, taps]: [layers, M, d]."""
        eps = self._config.rms_norm_eps
        combined = fused_latent.normed(fused_products.product(rows, main.weight), main_norm, eps, self._dtype)
        cos, sin = (one.view(len(rows), -1) for one in rotation)
        sums = fused_products.product(combined, latents.weight)
        return fused_latent.entries(sums, latent_norms, eps, cos, sin, self._dtype)

    def attend(self, stage: Stage, index: int, x: Tensor, rotation: Rotation, context: BlockContext) -> Output:
        """[T, D]; `rotation` of the T tokens."""
        config, attention = self._config, stage.attention
        cos, sin = (one.view(len(x), -1) for one in rotation)
        sums = fused_products.products(x, attention.query_down.weight, None, attention.latent.weight, None)
        query, own = fused_latent.latents(
            *sums, attention.query_norm, attention.latent_norm, config.rms_norm_eps, cos, sin, self._dtype
        )
        attended = fused_latent.attend(
            fused_products.product(query, attention.query_up.weight),
            own,
            cast("RingContext", context).ring(index),
            attention.sink,
            cos,
            sin,
            config.head_dim**-0.5,
            None if config.is_v41 else config.rms_norm_eps,
        )
        grouped = fused_latent.grouped_product(attended, attention.output_down.mT)
        return Output(fused_products.product(grouped, attention.output_up.weight))

    def mix_experts(self, stage: Stage, index: int, x: Tensor) -> Output:
        """[T, D]"""
        gate_up, router = stage.shared.gate_up.weight, self._routers[index]
        if router is None or not fused_products.takes(x, gate_up):
            shared = fused_products.product(x, gate_up)
            scores = F.linear(x.float(), stage.router.weight).unsqueeze(0)
        else:
            shared, scores = fused_products.products(x, gate_up, None, router, None)
        routing, inner = fused_routing.route(
            scores,
            shared,
            stage.router.bias,
            stage.router.per_token,
            stage.router.scaling,
            self._config.swiglu_limit,
            self._dtype,
        )
        if not isinstance(stage.experts, PackedExperts):
            return Output((stage.experts(x, routing) + stage.shared.down(inner).float()).unsqueeze(0))
        routed = stage.experts.sums(x, routing)
        return Output(fused_products.product(inner, stage.shared.down.weight), routed)


def _exactly(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`weight` in `dtype`, if that is the same."""
    narrow = weight.to(dtype)
    return narrow if torch.equal(narrow.float(), weight) else None
