"""The Gemma 4 DSpark block: as the Qwen3 one in what it attends to, with Gemma 4's own layers.

Differences: embeddings are scaled by √hidden, attention by 1; values are normed without a weight, come from the key
projection where keys and values are one, and do not turn; only a part of a head's dimensions turns; norms stand on both
sides of attention and MLP, and a scalar closes a layer; logits are soft-capped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from farspark.worker.checkpoint import EMBEDDING, LM_HEAD, Gemma4DSparkConfig
from farspark.worker.models.base import Arithmetic, BlockContext
from farspark.worker.models.dense import (
    KeysValues,
    head_projections,
    inverse_frequencies,
    take_confidence,
    take_layer,
    take_markov,
)
from farspark.worker.models.heads import soft_capped


class _Closing(NamedTuple):
    """What a layer has besides, in the carrier dtype."""

    attention_norm: Tensor  # [hidden]: of the attention's output
    out_norm: Tensor  # [hidden]: of the MLP's
    scalar: Tensor  # [1]


class Gemma4DSpark:
    """A `DraftModel`. Takes its weights out of `tensors`, in the carrier dtype, so that what is merged is not held twice."""

    to_target = None
    routing_margins = None

    def __init__(
        self,
        config: Gemma4DSparkConfig,
        tensors: dict[str, Tensor],
        vocab_size: int,
        arithmetic: Arithmetic,
        *,
        as_trained: bool = False,
    ) -> None:
        """`as_trained`: the Markov bias is added as it is, as DeepSpec does; vLLM soft-caps it like the base logits."""
        self.arithmetic = arithmetic
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._config = config
        rest = tensors
        self._fc = rest.pop("fc.weight")
        self._hidden_norm = rest.pop("hidden_norm.weight")
        self._norm = rest.pop("norm.weight")
        self._embedding = rest.pop(EMBEDDING)
        # The scale is a number of the model's dtype.
        self._embedding_scale = float(torch.tensor(config.hidden_size**0.5, dtype=arithmetic.dtype))
        # Rows past the true vocabulary are padding: they must never win an argmax.
        self._lm_head = rest.pop(LM_HEAD)[:vocab_size]
        self._layers = [
            take_layer(rest, index, mlp_norm="pre_feedforward_layernorm") for index in range(config.num_layers)
        ]
        self._closings = [
            _Closing(
                attention_norm=rest.pop(f"layers.{index}.post_attention_layernorm.weight"),
                out_norm=rest.pop(f"layers.{index}.post_feedforward_layernorm.weight"),
                scalar=rest.pop(f"layers.{index}.layer_scalar"),
            )
            for index in range(config.num_layers)
        ]
        names = ("k_proj",) if config.values_are_keys else ("k_proj", "v_proj")
        self._keys_values = KeysValues(config, rest, names, arithmetic)
        self._heads = head_projections(self._layers, self._keys_values, norms_values=True)
        self._key_norms = torch.stack([layer.key_norm for layer in self._layers])
        soft_cap = 0.0 if as_trained else config.soft_cap
        self.markov = take_markov(config, rest, vocab_size, arithmetic, soft_cap=soft_cap)
        self.confidence = take_confidence(config, rest)
        assert not rest, f"weights without a use: {sorted(rest)}"
        self._frequencies = inverse_frequencies(config.rope_theta, config.head_dim, config.rotated, self._fc.device)

    def project_context(self, rows: Tensor, positions: Tensor) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        combined = arithmetic.linear(rows, self._fc)
        combined = arithmetic.rms_norm(combined, self._hidden_norm, config.rms_norm_eps)
        projected = arithmetic.with_normed_values(self._keys_values.of_context(combined), config.rms_norm_eps)
        cos, sin = arithmetic.rotation(positions, self._frequencies)
        return arithmetic.norm_rotate_keys(projected, self._key_norms, config.rms_norm_eps, cos, sin, is_neox=True)

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        eps, round_ = config.rms_norm_eps, arithmetic.round
        cos, sin = arithmetic.rotation(positions, self._frequencies)
        first_norm = self._layers[0].input_norm
        normed, hidden = arithmetic.embed_norm(tokens, self._embedding, first_norm, eps, self._embedding_scale)
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for index, (layer, closing, next_norm) in enumerate(zip(self._layers, self._closings, next_norms, strict=True)):
            query, entries = arithmetic.project_heads(normed, self._heads[index], eps, cos, sin, is_neox=True)
            attended = round_(arithmetic.attend(context, index, query, entries, 1.0))
            normed, hidden = arithmetic.linear_norm_add_norm(
                attended, layer.output, layer.output_bias, closing.attention_norm, hidden, None, layer.mlp_norm, eps
            )
            inner = arithmetic.gated_linear(normed, layer.gate_up, is_gelu=True)
            normed, hidden = arithmetic.linear_norm_add_norm(
                inner, layer.down, None, closing.out_norm, hidden, closing.scalar, next_norm, eps
            )
        return normed

    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = self.arithmetic.vocabulary_linear(hidden, self._lm_head)
        cap = self._config.soft_cap
        return soft_capped(logits, cap, self.arithmetic) if cap else logits
