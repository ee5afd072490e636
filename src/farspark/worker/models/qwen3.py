"""The Qwen3 DSpark block: a dense non-causal decoder whose context keys and values come from the target's tapped states.

One vector per context position, RMSNorm(fc(row)), is projected by every layer with that layer's own K and V weights;
the block's positions use the same weights on their own hidden states. Context is never an output of the drafter, so
rejected drafts leave nothing behind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from farspark.worker.checkpoint import EMBEDDING, LM_HEAD, Qwen3DSparkConfig
from farspark.worker.models.base import Arithmetic, BlockContext
from farspark.worker.models.dense import (
    KeysValues,
    head_projections,
    inverse_frequencies,
    seen,
    take_confidence,
    take_layer,
    take_markov,
    take_target_ids,
)


class Qwen3DSpark:
    """A `DraftModel`. Takes its weights out of `tensors`, in the carrier dtype, so that what is merged is not held twice."""

    routing_margins = None

    def __init__(
        self,
        config: Qwen3DSparkConfig,
        tensors: dict[str, Tensor],
        vocab_size: int,
        arithmetic: Arithmetic,
        *,
        as_trained: bool = False,
    ) -> None:
        """`as_trained`: layers with a window see what they saw in training, not what vLLM shows them."""
        self.arithmetic = arithmetic
        self.weight_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._config = config
        self._as_trained = as_trained
        rest = tensors
        self._fc = rest.pop("fc.weight")
        self._hidden_norm = rest.pop("hidden_norm.weight")
        self._norm = rest.pop("norm.weight")
        self._embedding = rest.pop(EMBEDDING)
        self.to_target = take_target_ids(config, rest, vocab_size)
        # Rows past the true vocabulary are padding: they must never win an argmax.
        rows = vocab_size if self.to_target is None else len(self.to_target)
        self._lm_head = rest.pop(LM_HEAD)[:rows]
        self._layers = [
            take_layer(rest, index, mlp_norm="post_attention_layernorm") for index in range(config.num_layers)
        ]
        self._keys_values = KeysValues(config, rest, ("k_proj", "v_proj"), arithmetic)
        self._heads = head_projections(self._layers, self._keys_values)
        self._key_norms = torch.stack([layer.key_norm for layer in self._layers])
        self.markov = take_markov(config, rest, rows, arithmetic, scale=config.logit_scale)
        self.confidence = take_confidence(config, rest)
        assert not rest, f"weights without a use: {sorted(rest)}"
        self._frequencies = inverse_frequencies(config.rope_theta, config.head_dim, config.head_dim, self._fc.device)

    def project_context(self, rows: Tensor, positions: Tensor) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        combined = arithmetic.linear(rows, self._fc)
        combined = arithmetic.rms_norm(combined, self._hidden_norm, config.rms_norm_eps)
        projected = self._keys_values.of_context(combined)
        cos, sin = arithmetic.rotation(positions, self._frequencies)
        return arithmetic.norm_rotate_keys(
            projected, self._key_norms, config.rms_norm_eps, cos, sin, is_neox=config.rope_is_neox
        )

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        eps, is_neox = config.rms_norm_eps, config.rope_is_neox
        scale = config.head_dim**-0.5
        cos, sin = arithmetic.rotation(positions, self._frequencies)
        masks = self._seen(tokens.shape[1], context)
        normed, residual = arithmetic.embed_norm(tokens, self._embedding, self._layers[0].input_norm, eps)
        # Each layer ends in the norm that comes next: adding and norming are one step for vLLM, and rounded as one.
        next_norms = [*(layer.input_norm for layer in self._layers[1:]), self._norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            query, key_value = arithmetic.project_heads(normed, self._heads[index], eps, cos, sin, is_neox=is_neox)
            attended = arithmetic.round(arithmetic.attend(context, index, query, key_value, scale, masks[index]))
            normed, residual = arithmetic.linear_add_norm(
                attended, layer.output, layer.output_bias, residual, layer.mlp_norm, eps
            )
            inner = arithmetic.gated_linear(normed, layer.gate_up)
            normed, residual = arithmetic.linear_add_norm(inner, layer.down, None, residual, next_norm, eps)
        return normed

    def base_logits(self, hidden: Tensor) -> Tensor:
        logits = self.arithmetic.vocabulary_linear(hidden, self._lm_head)
        scale = self._config.logit_scale
        return logits if scale == 1.0 else self.arithmetic.round(logits * scale)

    def _seen(self, block: int, context: BlockContext) -> list[Tensor | None]:
        """Of every layer, see `dense.seen`."""
        config, visible, device = self._config, context.visible, self._fc.device
        kinds = []
        for layer in range(config.num_layers):
            window = config.windows[layer] if config.windows else 0
            causal = config.causal[layer] if config.causal else False
            kinds.append((window, causal and not (self._as_trained and window and config.sliding_non_causal)))
        masks = {
            kind: seen(block, visible, *kind, as_trained=self._as_trained, device=device)
            for kind in dict.fromkeys(kinds)
        }
        return [masks[kind] for kind in kinds]
