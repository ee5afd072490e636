"""The Gemma 4 DSpark block: as the Qwen3 one in what it attends to, with Gemma 4's own layers.

Differences: embeddings are scaled by √hidden, attention by 1; values are normed without a weight, come from the key
projection where keys and values are one, and do not turn; only a part of a head's dimensions turns; norms stand on both
sides of attention and MLP, and a scalar closes a layer; logits are soft-capped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.worker.checkpoint import EMBEDDING, LM_HEAD, Gemma4DSparkConfig
from farspark.worker.models.base import Arithmetic, BlockContext
from farspark.worker.models.dense import (
    KeysValues,
    inverse_frequencies,
    rotation,
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
        return self._entries(self._keys_values.of_context(combined), self._key_norms, *self._rotation(positions))

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        batch, length = tokens.shape
        eps, round_ = config.rms_norm_eps, arithmetic.round
        cos, sin = self._rotation(positions)
        hidden = round_(F.embedding(tokens, self._embedding) * self._embedding_scale)
        for index, (layer, closing) in enumerate(zip(self._layers, self._closings, strict=True)):
            normed = arithmetic.rms_norm(hidden, layer.input_norm, eps)
            query = arithmetic.linear(normed, layer.query, layer.query_bias)
            query = query.view(batch, length, config.num_heads, config.head_dim)
            query = arithmetic.norm_rotate(query, layer.query_norm, eps, cos, sin, is_neox=True)
            entries = self._entries(self._keys_values.of_block(index, normed), layer.key_norm, cos, sin)
            attended = round_(arithmetic.attend(context, index, query, entries, 1.0))
            attended = arithmetic.linear(attended, layer.output, layer.output_bias)
            hidden = round_(arithmetic.rms_norm(attended, closing.attention_norm, eps) + hidden)
            normed = arithmetic.rms_norm(hidden, layer.mlp_norm, eps)
            gate, up = arithmetic.linear(normed, layer.gate_up).chunk(2, dim=-1)
            inner = round_(round_(F.gelu(gate, approximate="tanh")) * up)
            inner = arithmetic.linear(inner, layer.down)
            hidden = round_(arithmetic.rms_norm(inner, closing.out_norm, eps) + hidden)
            hidden = round_(hidden * closing.scalar)
        return arithmetic.rms_norm(hidden, self._norm, eps)

    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = self.arithmetic.vocabulary_linear(hidden, self._lm_head)
        cap = self._config.soft_cap
        return soft_capped(logits, cap, self.arithmetic) if cap else logits

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotation(positions, self._frequencies, self.arithmetic.dtype)

    def _entries(self, projected: Tensor, key_norm: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Keys and values [A, T, 2, kv heads, d] of projections [A, T, 1 or 2, kv heads, d]; `key_norm` [d] or [A, d]."""
        arithmetic, eps = self.arithmetic, self._config.rms_norm_eps
        values = arithmetic.wide_rms_norm(projected[:, :, -1:], None, eps)
        keys_values = torch.cat((projected[:, :, :1], values), dim=2)
        return arithmetic.norm_rotate_keys(keys_values, key_norm, eps, cos, sin, is_neox=True)
