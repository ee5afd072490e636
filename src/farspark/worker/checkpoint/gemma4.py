"""config.json of a `Gemma4DSparkModel` checkpoint: a Gemma 4 text config with DSpark's keys beside its own.

Pure: no torch, no files. All layers are full-attention ones, so the sizes that Gemma 4 keeps apart for its global layers
are the ones that count. transformers wrote them at the top level first (`global_head_dim`), and layer by layer later
(`per_layer_config`); both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from farspark.errors import CheckpointError
from farspark.worker.checkpoint.dense import (
    HARMLESS_KEYS,
    DenseConfig,
    read_attention,
    read_block_size,
    read_deepspec_layout,
    read_heads,
    read_layer_types,
    read_mask_token_id,
    read_target_layer_ids,
    refuse_other_drafting,
    refuse_quantised,
    warn_of_unknown,
)
from farspark.worker.checkpoint.keys import ConfigKeys

# Of the target's config, and without meaning for a drafter: its own layers have none of it.
_TARGETS_KEYS: Final = frozenset(
    {
        "hidden_size_per_layer_input",
        "moe_intermediate_size",
        "num_experts",
        "num_kv_shared_layers",
        "head_dim",  # of sliding layers, as is num_key_value_heads where there is a global one
        "num_key_value_heads",
        "sliding_window",
        "target_model_type",
        "target_text_model_type",
        "top_k_experts",
        "use_bidirectional_attention",
        "use_double_wide_mlp",
        "vocab_size_per_layer_input",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4DSparkConfig(DenseConfig):
    """What the maths of a Gemma 4 DSpark drafter depends on; every field is part of the drafter's identity."""

    kind: ClassVar[str] = "Gemma4DSparkModel"

    values_are_keys: bool  # values come from the key projection; there is no value projection
    rotated: int  # dimensions of a head that turn with the position: pairs i, i + d/2 for i below half of this
    soft_cap: float  # c in c · tanh(logits / c); 0: none

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        # DenseConfig by name: with slots, super() knows the class before it was made anew.
        shapes = DenseConfig.layer_shapes(self)
        if self.values_are_keys:
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.v_proj.")}
        for name in ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"):
            shapes[name] = (self.hidden_size,)
        shapes["layer_scalar"] = (1,)
        return shapes

    def lent_names(self) -> Mapping[str, tuple[str, ...]]:
        # vLLM never lends this family anything either.
        return {}


def parse(keys: ConfigKeys, names: frozenset[str]) -> Gemma4DSparkConfig:
    """Raises CheckpointError, naming the key, for what is missing, contradictory or not served."""
    keys.skip(HARMLESS_KEYS | _TARGETS_KEYS)
    dflash = keys.nested("dflash_config")
    refuse_quantised(keys)
    refuse_other_drafting(keys, dflash)
    if keys.flag("enable_moe_block"):
        raise CheckpointError(
            f"{keys.name('enable_moe_block')} is true: drafters with experts are not implemented here"
        )
    keys.refuse("attn_logit_softcapping", "a soft cap on attention scores is not implemented")
    for scope, key in ((keys, "is_causal"), (dflash, "causal"), (dflash, "use_swa")):
        if scope.flag(key):
            raise CheckpointError(f"{scope.name(key)} is true: only full, non-causal attention is implemented")
    activation = keys.text("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise CheckpointError(f"{keys.name('hidden_activation')} is {activation!r}; supported: 'gelu_pytorch_tanh'")
    values_are_keys = bool(keys.flag("attention_k_eq_v"))
    head_dim = _global_size(keys, "head_dim", "global_head_dim")
    if head_dim is None:
        raise CheckpointError(f"{keys.name('global_head_dim')} is missing, and so is head_dim in per_layer_config")
    kv_heads = _global_size(keys, "num_key_value_heads", "num_global_key_value_heads")
    # transformers reads the global number only where keys and values are one.
    attention = read_attention(keys, head_dim=head_dim, num_kv_heads=kv_heads if values_are_keys else None)
    for index, layer_type in enumerate(read_layer_types(keys, attention.num_layers) or ("nothing",)):
        if layer_type != "full_attention":
            raise CheckpointError(
                f"{keys.name('layer_types')}[{index}] is {layer_type}: only full, non-causal attention is implemented"
            )
    vocab_size, block_size = keys.integer("vocab_size", at_least=2), read_block_size(keys, dflash)
    if keys.optional_integer("draft_vocab_size", at_least=1) not in (None, vocab_size):
        raise CheckpointError(
            f"{keys.name('draft_vocab_size')} is not vocab_size {vocab_size}: this family drafts the whole vocabulary"
        )
    soft_cap = keys.optional_number("final_logit_softcapping")
    if soft_cap is not None and soft_cap <= 0:
        raise CheckpointError(f"{keys.name('final_logit_softcapping')} is {soft_cap}; expected more than 0")
    theta, rotated = _rope(keys, attention.head_dim)
    config = Gemma4DSparkConfig(
        **attention._asdict(),
        **read_heads(keys, dflash)._asdict(),
        intermediate_size=keys.integer("intermediate_size", at_least=1),
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        attention_bias=bool(keys.flag("attention_bias")),
        rope_theta=theta,
        rotated=rotated,
        max_position=keys.integer("max_position_embeddings", at_least=2),
        block_size=block_size,
        anchor_predicts=read_deepspec_layout(keys, block_size),
        mask_token_id=read_mask_token_id(keys, dflash, vocab_size),
        target_layer_ids=read_target_layer_ids(keys, dflash),
        tap_size=keys.optional_integer("target_hidden_size", at_least=1) or attention.hidden_size,
        values_are_keys=values_are_keys,
        soft_cap=soft_cap or 0.0,
    )
    warn_of_unknown(keys, dflash)
    return config


def _global_size(keys: ConfigKeys, key: str, at_top: str) -> int | None:
    """`key` of the layers, all of which are global, from whichever spelling is there; they must agree."""
    found: dict[str, int] = {}
    size = keys.optional_integer(at_top, at_least=1)
    if size is not None:
        found[at_top] = size
    layers = keys.nested("per_layer_config")
    for layer in layers.names():
        size = layers.nested(layer).optional_integer(key, at_least=1)
        if size is not None:
            found[f"per_layer_config.{layer}.{key}"] = size
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config.json gives different values for the same thing: {found}")
    return next(iter(found.values()), None)


def _rope(keys: ConfigKeys, head_dim: int) -> tuple[float, int]:
    """(theta, dimensions of a head that turn) of global layers."""
    parameters = keys.nested("rope_parameters")
    parameters.skip({"sliding_attention"})
    if parameters.has("full_attention"):
        parameters = parameters.nested("full_attention")
    rope_type = parameters.text("rope_type")
    theta, factor = parameters.optional_number("rope_theta"), parameters.optional_number("partial_rotary_factor")
    if theta is None or theta <= 0:
        raise CheckpointError(f"{parameters.name('rope_theta')} is {theta}; expected a number above 0")
    if rope_type not in ("default", "proportional"):
        raise CheckpointError(f"{parameters.name('rope_type')} is {rope_type!r}; supported: 'default', 'proportional'")
    if rope_type == "default" and factor not in (None, 1.0):
        raise CheckpointError(f"{parameters.name('partial_rotary_factor')} is {factor} with rope_type 'default'")
    if factor is not None and not 0 < factor <= 1:
        raise CheckpointError(f"{parameters.name('partial_rotary_factor')} is {factor}; expected above 0, at most 1")
    for name in parameters.unread():
        raise CheckpointError(f"config.json: {name} changes the rotary positions in a way that is not implemented")
    return theta, 2 * int((1.0 if factor is None else factor) * head_dim // 2)
