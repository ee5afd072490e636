"""config.json of a `Qwen3DSparkModel` checkpoint: what each key means, what is refused and why, which tensors must exist.

Pure: no torch, no files. Keys, defaults and their order of precedence follow vLLM's Qwen3 DSpark loader, which is what
the drafts are compared with; where vLLM falls back to a guess (a missing rope_theta) this is an error.
"""

from __future__ import annotations

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

# What SpecForge calls the model.
SPECFORGE: Final = "DSparkDraftModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3DSparkConfig(DenseConfig):
    """What the maths of a Qwen3 DSpark drafter depends on; every field is part of the drafter's identity."""

    kind: ClassVar[str] = "Qwen3DSparkModel"

    rope_is_neox: bool  # True: dimension i pairs with i + d/2; False: 2i with 2i + 1
    logit_scale: float
    windows: tuple[int, ...] = ()  # newest positions that each layer sees, 0 for all; empty: all layers see all
    causal: tuple[bool, ...] = ()  # whether each layer's block positions see only the ones before, as vLLM runs them
    sliding_non_causal: bool = False  # the layers with a window were trained to see the whole block all the same

    @property
    def window(self) -> int:
        return max(self.windows) if self.windows and all(self.windows) else 0


def parse(keys: ConfigKeys, names: frozenset[str]) -> Qwen3DSparkConfig:
    """DeepSpec's format: all keys at the top level. SpecForge writes it too, under another architecture, and repeats keys of
    the top level in `dflash_config`."""
    model_type = keys.text("model_type")
    if keys.texts("architectures") == (SPECFORGE,) and model_type != "qwen3":
        raise CheckpointError(
            f"{keys.name('architectures')} is {SPECFORGE} with model_type {model_type!r}; supported: 'qwen3'"
        )
    keys.skip(HARMLESS_KEYS)
    for key in ("transformer_layer_config", "speculators_config"):
        keys.refuse(key, "this is the speculators format, but speculators_model_type is missing")
    dflash, eagle = keys.nested("dflash_config"), keys.nested("eagle_config")
    refuse_quantised(keys)
    refuse_other_drafting(keys, dflash, eagle)
    block_size = read_block_size(keys, dflash)
    vocab_size = keys.integer("vocab_size", at_least=2)
    config = read_drafter(
        backbone=keys,
        own=keys,
        dflash=dflash,
        vocab_size=vocab_size,
        block_size=block_size,
        anchor_predicts=read_deepspec_layout(keys, block_size),
        mask_token_id=read_mask_token_id(keys, dflash, vocab_size),
        target_layer_ids=read_target_layer_ids(keys, dflash),
    )
    warn_of_unknown(keys, dflash)
    return config


def read_drafter(
    *,
    backbone: ConfigKeys,
    own: ConfigKeys,
    dflash: ConfigKeys,
    vocab_size: int,
    block_size: int,
    anchor_predicts: bool,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...],
    sliding_non_causal: bool = False,
) -> Qwen3DSparkConfig:
    """The drafter whose transformer `backbone` describes and whose DSpark keys are in `own`.

    Raises CheckpointError, naming the key, for what is missing, contradictory or not served.
    """
    attention = read_attention(backbone)
    activation = backbone.text("hidden_act") or "silu"
    if activation != "silu":
        raise CheckpointError(f"{backbone.name('hidden_act')} is {activation!r}; supported: 'silu'")
    _refuse_sinks(backbone, dflash)
    windows, causal = _masks(backbone, dflash, attention.num_layers)
    is_neox, logit_scale = backbone.flag("is_neox_style"), backbone.optional_number("logit_scale")
    return Qwen3DSparkConfig(
        **attention._asdict(),
        **read_heads(own, *(scope for scope in (dflash, backbone) if scope is not own))._asdict(),
        intermediate_size=backbone.integer("intermediate_size", at_least=1),
        vocab_size=vocab_size,
        draft_vocab_size=own.optional_integer("draft_vocab_size", at_least=1) or vocab_size,
        attention_bias=bool(backbone.flag("attention_bias")),
        rope_theta=_rope_theta(backbone),
        rope_is_neox=True if is_neox is None else is_neox,
        max_position=backbone.integer("max_position_embeddings", at_least=2),
        block_size=block_size,
        anchor_predicts=anchor_predicts,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids,
        tap_size=own.optional_integer("target_hidden_size", at_least=1) or attention.hidden_size,
        logit_scale=1.0 if logit_scale is None else logit_scale,
        windows=windows if any(windows) else (),
        causal=causal if any(causal) else (),
        sliding_non_causal=sliding_non_causal and any(windows),
    )


def _refuse_sinks(keys: ConfigKeys, dflash: ConfigKeys) -> None:
    for scope, key in ((dflash, "attention_sink_bias"), (keys, "add_swa_attention_sink_bias")):
        if scope.flag(key):
            raise CheckpointError(f"{scope.name(key)} is true: attention sinks are not implemented")
    value_scale = dflash.optional_number("attention_value_scale")
    if value_scale not in (None, 1.0):
        raise CheckpointError(f"{dflash.name('attention_value_scale')} is {value_scale}: only 1.0 is implemented")


def _masks(keys: ConfigKeys, dflash: ConfigKeys, num_layers: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """(window, causal) of every layer, by vLLM's rules.

    `use_swa` makes every layer slide where layer_types has none that does. A layer is causal as `is_causal` says, else as
    `dflash_config.causal` does, else if it slides.
    """
    layer_types = read_layer_types(keys, num_layers)
    slides = [layer_type == "sliding_attention" for layer_type in layer_types or ("full_attention",) * num_layers]
    if dflash.flag("use_swa") and not any(slides):
        slides = [True] * num_layers
    own, usual = (
        dflash.optional_integer("swa_window_size", at_least=1),
        keys.optional_integer("sliding_window", at_least=1),
    )
    size = usual if own is None else own
    if size is None and any(slides):
        raise CheckpointError(
            f"{keys.name('sliding_window')} is missing, and so is dflash_config.swa_window_size; layers slide"
        )
    if keys.flag("use_sliding_window") and layer_types is None:
        raise CheckpointError(
            f"{keys.name('use_sliding_window')} is true, but layer_types does not say which layers slide"
        )
    said = [flag for flag in (keys.flag("is_causal"), dflash.flag("causal")) if flag is not None]
    causal = [said[0]] * num_layers if said else slides
    return tuple((size or 0) if one else 0 for one in slides), tuple(causal)


def _rope_theta(keys: ConfigKeys) -> float:
    """From `rope_parameters` or the legacy `rope_theta` with `rope_scaling`; both must agree if both are there."""
    found: dict[str, float] = {}
    theta = keys.optional_number("rope_theta")
    if theta is not None:
        found["rope_theta"] = theta
    for key in ("rope_parameters", "rope_scaling"):
        parameters = keys.nested(key)
        for type_key in ("rope_type", "type"):
            rope_type = parameters.text(type_key)
            if rope_type not in (None, "default"):
                raise CheckpointError(f"{parameters.name(type_key)} is {rope_type!r}; supported: 'default'")
        theta = parameters.optional_number("rope_theta")
        if theta is not None:
            found[f"{key}.rope_theta"] = theta
        _refuse_partial_rotation(parameters)
        for name in parameters.unread():
            raise CheckpointError(f"config.json: {name} changes the rotary positions in a way that is not implemented")
    _refuse_partial_rotation(keys)
    if not found:
        raise CheckpointError(
            f"{keys.name('rope_theta')} is missing, there and in rope_parameters; a guess would only lower the "
            "acceptance, silently"
        )
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config.json gives different values for the same thing: {found}")
    theta = next(iter(found.values()))
    if theta <= 0:
        raise CheckpointError(f"config.json: rope_theta is {theta}; expected more than 0")
    return theta


def _refuse_partial_rotation(keys: ConfigKeys) -> None:
    factor = keys.optional_number("partial_rotary_factor")
    if factor not in (None, 1.0):
        raise CheckpointError(f"{keys.name('partial_rotary_factor')} is {factor}: only 1.0 is implemented")
