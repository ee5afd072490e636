"""The Gemma 4 DSpark block: as the Qwen3 one in what it attends to, with Gemma 4's own layers.

Differences: embeddings are scaled by √hidden, attention by 1; values are normed without a weight, come from the key
projection where keys and values are one, and do not turn; only a part of a head's dimensions turns; norms stand on both
sides of attention and MLP, and a scalar closes a layer; logits are soft-capped.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.worker.checkpoint import EMBEDDING, LM_HEAD, Gemma4DSparkConfig
from farspark.worker.models.base import Arithmetic, BlockContext
from farspark.worker.models.dense import inverse_frequencies, rotation, take_confidence, take_markov
from farspark.worker.models.heads import soft_capped


@dataclass(frozen=True, slots=True)
class _Layer:
    """Weights of one layer, in the carrier dtype. [out, in] as in the checkpoint."""

    input_norm: Tensor  # [hidden]
    query: Tensor  # [heads * d, hidden]
    query_bias: Tensor | None
    query_norm: Tensor  # [d]
    key_norm: Tensor  # [d]
    output: Tensor  # [hidden, heads * d]
    output_bias: Tensor | None
    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]
    out_norm: Tensor  # [hidden]
    scalar: Tensor  # [1]


class Gemma4DSpark:
    """A `DraftModel`. Takes its weights out of `tensors`, in the carrier dtype, so that what is merged is not held twice."""

    to_target = None

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
        self.context_layers = config.num_layers
        self.context_entry = (2, config.num_kv_heads, config.head_dim)
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
        self._projections = 1 if config.values_are_keys else 2
        keys_values, biases, self._layers = [], [], []
        for index in range(config.num_layers):
            layer, attention = f"layers.{index}.", f"layers.{index}.self_attn."
            for name in ("k_proj", "v_proj")[: self._projections]:
                keys_values.append(rest.pop(f"{attention}{name}.weight"))
                if config.attention_bias:
                    biases.append(rest.pop(f"{attention}{name}.bias"))
            self._layers.append(
                _Layer(
                    input_norm=rest.pop(layer + "input_layernorm.weight"),
                    query=rest.pop(attention + "q_proj.weight"),
                    query_bias=rest.pop(attention + "q_proj.bias", None),
                    query_norm=rest.pop(attention + "q_norm.weight"),
                    key_norm=rest.pop(attention + "k_norm.weight"),
                    output=rest.pop(attention + "o_proj.weight"),
                    output_bias=rest.pop(attention + "o_proj.bias", None),
                    attention_norm=rest.pop(layer + "post_attention_layernorm.weight"),
                    mlp_norm=rest.pop(layer + "pre_feedforward_layernorm.weight"),
                    gate_up=torch.cat(
                        (rest.pop(layer + "mlp.gate_proj.weight"), rest.pop(layer + "mlp.up_proj.weight"))
                    ),
                    down=rest.pop(layer + "mlp.down_proj.weight"),
                    out_norm=rest.pop(layer + "post_feedforward_layernorm.weight"),
                    scalar=rest.pop(layer + "layer_scalar"),
                )
            )
        # [layers * 1 or 2 * kv heads * d, hidden]: one product projects the context for all layers, and each layer's slice
        # serves its block.
        self._keys_values = torch.cat(keys_values)
        self._keys_values_bias = torch.cat(biases) if biases else None
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
        projected = arithmetic.linear(combined, self._keys_values, self._keys_values_bias)
        projected = projected.view(
            -1, config.num_layers, self._projections, config.num_kv_heads, config.head_dim
        ).transpose(0, 1)
        return self._entries(projected, self._key_norms, positions)

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        batch, length = tokens.shape
        eps, round_ = config.rms_norm_eps, arithmetic.round
        cos, sin = rotation(positions, self._frequencies, arithmetic.dtype)
        layer_width = self._projections * config.num_kv_heads * config.head_dim
        hidden = round_(F.embedding(tokens, self._embedding) * self._embedding_scale)
        for index, layer in enumerate(self._layers):
            normed = arithmetic.rms_norm(hidden, layer.input_norm, eps)
            query = arithmetic.linear(normed, layer.query, layer.query_bias)
            query = query.view(batch, length, config.num_heads, config.head_dim)
            query = arithmetic.norm_rotate(query, layer.query_norm, eps, cos, sin, is_neox=True)
            own = slice(index * layer_width, (index + 1) * layer_width)
            bias = None if self._keys_values_bias is None else self._keys_values_bias[own]
            projected = arithmetic.linear(normed, self._keys_values[own], bias)
            projected = projected.view(batch, length, self._projections, config.num_kv_heads, config.head_dim)
            entries = self._entries(projected, layer.key_norm, positions)
            attended = round_(arithmetic.attend(context, index, query, entries, 1.0))
            attended = arithmetic.linear(attended, layer.output, layer.output_bias)
            hidden = round_(arithmetic.rms_norm(attended, layer.attention_norm, eps) + hidden)
            normed = arithmetic.rms_norm(hidden, layer.mlp_norm, eps)
            gate, up = arithmetic.linear(normed, layer.gate_up).chunk(2, dim=-1)
            inner = round_(round_(F.gelu(gate, approximate="tanh")) * up)
            inner = arithmetic.linear(inner, layer.down)
            hidden = round_(arithmetic.rms_norm(inner, layer.out_norm, eps) + hidden)
            hidden = round_(hidden * layer.scalar)
        return arithmetic.rms_norm(hidden, self._norm, eps)

    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = self.arithmetic.vocabulary_linear(hidden, self._lm_head)
        cap = self._config.soft_cap
        return soft_capped(logits, cap, self.arithmetic) if cap else logits

    def _entries(self, projected: Tensor, key_norm: Tensor, positions: Tensor) -> Tensor:
        """Keys and values [A, T, 2, kv heads, d] of projections [A, T, 1 or 2, kv heads, d]; `key_norm` [d] or [A, d]."""
        arithmetic, eps = self.arithmetic, self._config.rms_norm_eps
        values = arithmetic.wide_rms_norm(projected[:, :, -1:], None, eps)
        keys_values = torch.cat((projected[:, :, :1], values), dim=2)
        cos, sin = rotation(positions, self._frequencies, arithmetic.dtype)
        return arithmetic.norm_rotate_keys(keys_values, key_norm, eps, cos, sin, is_neox=True)
