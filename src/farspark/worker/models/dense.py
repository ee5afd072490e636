"""What the models of dense drafters have in common: layers, heads, drafted vocabulary, rotation, who sees what of a block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farspark.errors import CheckpointError
from farspark.worker.checkpoint import D2T, DenseConfig
from farspark.worker.models.base import Arithmetic, Footprint, HeadProjections
from farspark.worker.models.heads import (
    ConfidenceHead,
    GatedMarkov,
    MarkovHead,
    RecurrentMarkov,
    SoftCappedMarkov,
    VanillaMarkov,
)


def footprint(config: DenseConfig, arithmetic: Arithmetic, device: torch.device) -> Footprint:
    """All weights in the carrier dtype but for few and small ones, counted as the widest that they may be stored in."""
    shapes, stored = config.tensor_shapes(), config.stored_dtypes()
    size = arithmetic.carrier.itemsize
    held = sum(math.prod(shape) * (8 if name in stored else size) for name, shape in shapes.items())
    # Before they are one, the parts of what is merged lie beside the whole: all keys and values, or a layer's gate and up.
    keys_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.hidden_size
    gate_up = 2 * config.intermediate_size * config.hidden_size
    return Footprint(held, max(keys_values, gate_up) * size)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer but for its keys and values, in the carrier dtype. [out, in] as in the checkpoint."""

    input_norm: Tensor  # [hidden]
    query: Tensor  # [heads * d, hidden]
    query_bias: Tensor | None
    query_norm: Tensor  # [d]
    key_norm: Tensor  # [d]
    output: Tensor  # [hidden, heads * d]
    output_bias: Tensor | None
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 * intermediate, hidden]
    down: Tensor  # [hidden, intermediate]


def take_layer(tensors: dict[str, Tensor], index: int, *, mlp_norm: str) -> Layer:
    """Layer `index`, taken out of `tensors`; `mlp_norm` is what the family calls the norm in front of the MLP."""
    layer, attention = f"layers.{index}.", f"layers.{index}.self_attn."
    return Layer(
        input_norm=tensors.pop(layer + "input_layernorm.weight"),
        query=tensors.pop(attention + "q_proj.weight"),
        query_bias=tensors.pop(attention + "q_proj.bias", None),
        query_norm=tensors.pop(attention + "q_norm.weight"),
        key_norm=tensors.pop(attention + "k_norm.weight"),
        output=tensors.pop(attention + "o_proj.weight"),
        output_bias=tensors.pop(attention + "o_proj.bias", None),
        mlp_norm=tensors.pop(layer + mlp_norm + ".weight"),
        gate_up=torch.cat((tensors.pop(layer + "mlp.gate_proj.weight"), tensors.pop(layer + "mlp.up_proj.weight"))),
        down=tensors.pop(layer + "mlp.down_proj.weight"),
    )


class KeysValues:
    """The key and value projections of all layers as one, taken out of `tensors`: one product projects the context for all
    layers, and each layer's slice serves its block. `names` are the projections that a layer has: k_proj, v_proj or one of them.
    """

    def __init__(
        self, config: DenseConfig, tensors: dict[str, Tensor], names: Sequence[str], arithmetic: Arithmetic
    ) -> None:
        self._arithmetic = arithmetic
        self._layers = config.num_layers
        self.entry = len(names), config.num_kv_heads, config.head_dim
        self._width = len(names) * config.num_kv_heads * config.head_dim
        projections = [f"layers.{index}.self_attn.{name}." for index in range(config.num_layers) for name in names]
        # [layers * names * kv heads * d, hidden]
        self._weight = torch.cat([tensors.pop(name + "weight") for name in projections])
        self._bias = torch.cat([tensors.pop(name + "bias") for name in projections]) if config.attention_bias else None

    def of_context(self, combined: Tensor) -> Tensor:
        """[M, hidden] -> [layers, M, names, kv heads, d]"""
        projected = self._arithmetic.linear(combined, self._weight, self._bias)
        return projected.view(-1, self._layers, *self.entry).transpose(0, 1)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """The weight [names * kv heads * d, hidden] and the bias of one layer."""
        own = slice(layer * self._width, (layer + 1) * self._width)
        return self._weight[own], None if self._bias is None else self._bias[own]


def head_projections(
    layers: Sequence[Layer], keys_values: KeysValues, *, norms_values: bool = False
) -> list[HeadProjections]:
    """Of every layer."""
    found = []
    for index, layer in enumerate(layers):
        weight, bias = keys_values.of_layer(index)
        found.append(
            HeadProjections(
                query=layer.query,
                query_bias=layer.query_bias,
                query_norm=layer.query_norm,
                keys_values=weight,
                keys_values_bias=bias,
                key_norm=layer.key_norm,
                entry=keys_values.entry,
                norms_values=norms_values,
            )
        )
    return found


def take_markov(
    config: DenseConfig,
    tensors: dict[str, Tensor],
    rows: int,
    arithmetic: Arithmetic,
    *,
    scale: float = 1.0,
    soft_cap: float = 0.0,
) -> MarkovHead | None:
    """The Markov head, its weights taken out of `tensors`; `rows` of the drafted vocabulary are used.

    What vLLM does to the base logits and so to the bias too: `scale`, or `soft_cap` (0: none).
    """
    if not config.markov_rank:
        return None
    w1, w2 = tensors.pop("markov_head.markov_w1.weight"), tensors.pop("markov_head.markov_w2.weight")
    plain = (
        SoftCappedMarkov(w1, w2[:rows], soft_cap, arithmetic)
        if soft_cap
        else VanillaMarkov(w1, w2[:rows], scale, arithmetic)
    )
    if config.markov_head_type == "gated":
        return GatedMarkov(
            plain, tensors.pop("markov_head.gate_proj.weight"), tensors.pop("markov_head.gate_proj.bias")
        )
    if config.markov_head_type == "rnn":
        joint = tensors.pop("markov_head.joint_proj.weight"), tensors.pop("markov_head.joint_proj.bias")
        return RecurrentMarkov(plain, *joint)
    return plain


def take_confidence(config: DenseConfig, tensors: dict[str, Tensor]) -> ConfidenceHead | None:
    if not config.has_confidence_head:
        return None
    weight, bias = tensors.pop("confidence_head.proj.weight"), tensors.pop("confidence_head.proj.bias")
    return ConfidenceHead(weight, bias, with_markov=config.confidence_with_markov)


def take_target_ids(config: DenseConfig, tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """int64 [drafted vocabulary]: the target's id of each row of the head; None where they are the same.

    Raises CheckpointError where an id is outside the target's vocabulary or has two rows.
    """
    if not config.is_reduced:
        return None
    offsets = tensors.pop(D2T).long()
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise CheckpointError(
            f"{D2T} maps row {row} of the head to id {int(ids[row])}, outside the target's vocabulary of {vocab_size}"
        )
    if len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{D2T} maps several rows of the head to one id of the target")
    return ids


def inverse_frequencies(theta: float, head_dim: int, rotated: int, device: torch.device) -> Tensor:
    """float32 [head_dim / 2]: theta^(-2j / head_dim) for the first `rotated` / 2 pairs, 0 for those that do not turn."""
    # Computed on the CPU and moved, as Hugging Face does: a device's own pow may differ in the last bit.
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / head_dim
    frequencies = torch.zeros(head_dim // 2)
    frequencies[: rotated // 2] = 1.0 / theta**exponents
    return frequencies.to(device)


def seen(
    block: int, visible: int, window: int, causal: bool, *, as_trained: bool, device: torch.device
) -> Tensor | None:
    """bool [Q, K + Q]: what each position of a block of Q sees of its K newest context positions and of the block.

    None: everything. `window` 0: no window. vLLM's window is about each position: the newest `window` positions up to its
    own, and as many to its right where the layer is not causal. The window of training hangs at the anchor, for the whole
    block: the newest `window` context positions, and of the block everything, or everything up to itself.
    """
    if not window and not causal:
        return None
    position = torch.arange(block, device=device).unsqueeze(1)
    other = torch.arange(-visible, block, device=device).unsqueeze(0)
    is_seen = other <= position if causal else torch.ones_like(other, dtype=torch.bool)
    is_seen = is_seen.expand(block, -1)
    if window and as_trained:
        return is_seen & (other >= -window)
    if window:
        return is_seen & ((other - position).abs() < window)
    return is_seen
