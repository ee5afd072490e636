"""config.json of a `Qwen3DSparkModel` checkpoint: what each key means, what is refused and why, which tensors must exist.

Pure: no torch, no files. Keys, defaults and their order of precedence follow vLLM's Qwen3 DSpark loader, which is what
the drafts are compared with; where vLLM falls back to a guess (a missing rope_theta) this is an error.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import asdict, dataclass
from typing import ClassVar

from farspark.errors import CheckpointError
from farspark.worker.checkpoint.keys import ConfigKeys

logger = logging.getLogger(__name__)

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

# Known keys that say nothing about a draft: bookkeeping of transformers, and settings of training.
HARMLESS_KEYS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "max_window_layers",
        "model_type",
        "num_anchors",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "sliding_window",  # read by sliding layers only, and those are refused
        "tie_word_embeddings",  # the lm_head is the checkpoint's or the target's, never this embedding
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
HEAD_KEYS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class Qwen3DSparkConfig:
    """What the maths of a Qwen3 DSpark drafter depends on; every field is part of the drafter's identity."""

    architecture: ClassVar[str] = "Qwen3DSparkModel"

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding and of the Markov embedding
    draft_vocab_size: int  # rows of lm_head and of the Markov projection; at least vocab_size, the rest is padding
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    rope_is_neox: bool  # True: dimension i pairs with i + d/2; False: 2i with 2i + 1
    max_position: int  # exclusive bound of positions
    block_size: int  # N
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # the target's decoder layers whose outputs are tapped; -1 is the embedding
    tap_size: int  # width of one tap: the target's hidden size
    markov_rank: int  # 0: no Markov head
    has_confidence_head: bool
    confidence_with_markov: bool
    logit_scale: float

    @property
    def taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def row_bytes(self) -> int:
        """Bytes of one context row: all taps of one position, bf16."""
        return self.taps * self.tap_size * 2

    def identity_values(self) -> dict[str, object]:
        """The part of the config that the identity covers; equal for every spelling of the same drafter."""
        return {"architecture": self.architecture, **asdict(self)}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the drafter."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        query, key = self.num_heads * dim, self.num_kv_heads * dim
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, hidden),
            LM_HEAD: (self.draft_vocab_size, hidden),
            "fc.weight": (hidden, self.taps * self.tap_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for index in range(self.num_layers):
            layer, attention = f"layers.{index}.", f"layers.{index}.self_attn."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
            for name, rows, columns in (
                ("q_proj", query, hidden),
                ("k_proj", key, hidden),
                ("v_proj", key, hidden),
                ("o_proj", hidden, query),
            ):
                shapes[f"{attention}{name}.weight"] = (rows, columns)
                if self.attention_bias:
                    shapes[f"{attention}{name}.bias"] = (rows,)
            shapes[attention + "q_norm.weight"] = (dim,)
            shapes[attention + "k_norm.weight"] = (dim,)
            shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
            shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
            shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
        if self.markov_rank:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, self.markov_rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, self.markov_rank)
        if self.has_confidence_head:
            width = hidden + (self.markov_rank if self.confidence_with_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    @classmethod
    def parse(cls, keys: ConfigKeys) -> Qwen3DSparkConfig:
        """Raises CheckpointError, naming the key, for what is missing, contradictory or not served.

        Keys that nobody knows are logged: they may be harmless, and may not.
        """
        keys.skip(HARMLESS_KEYS)
        _refuse_other_formats(keys)
        dflash = keys.nested("dflash_config")
        num_layers = keys.integer("num_hidden_layers", at_least=1)
        _refuse_other_attention(keys, dflash, num_layers)
        hidden_size = keys.integer("hidden_size", at_least=1)
        num_heads = keys.integer("num_attention_heads", at_least=1)
        num_kv_heads = keys.integer("num_key_value_heads", at_least=1)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{keys.name('num_attention_heads')} is {num_heads}, not a multiple of num_key_value_heads {num_kv_heads}"
            )
        head_dim = keys.integer("head_dim", at_least=2)
        if head_dim % 2:
            raise CheckpointError(f"{keys.name('head_dim')} is {head_dim}; rotary positions need an even one")
        activation = keys.text("hidden_act") or "silu"
        if activation != "silu":
            raise CheckpointError(f"{keys.name('hidden_act')} is {activation!r}; supported: 'silu'")
        vocab_size, draft_vocab_size = _vocabulary(keys)
        has_confidence_head, confidence_with_markov, markov_rank = _heads(keys, dflash)
        rms_norm_eps = keys.number("rms_norm_eps")
        if rms_norm_eps <= 0:
            raise CheckpointError(f"{keys.name('rms_norm_eps')} is {rms_norm_eps}; expected more than 0")
        is_neox = keys.flag("is_neox_style")
        logit_scale = keys.optional_number("logit_scale")
        config = cls(
            hidden_size=hidden_size,
            intermediate_size=keys.integer("intermediate_size", at_least=1),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=rms_norm_eps,
            attention_bias=bool(keys.flag("attention_bias")),
            rope_theta=_rope_theta(keys),
            rope_is_neox=True if is_neox is None else is_neox,
            max_position=keys.integer("max_position_embeddings", at_least=2),
            block_size=_block_size(keys),
            mask_token_id=_mask_token_id(keys, dflash, vocab_size),
            target_layer_ids=_target_layer_ids(keys, dflash),
            tap_size=keys.optional_integer("target_hidden_size", at_least=1) or hidden_size,
            markov_rank=markov_rank,
            has_confidence_head=has_confidence_head,
            confidence_with_markov=confidence_with_markov,
            logit_scale=1.0 if logit_scale is None else logit_scale,
        )
        unknown = keys.unread() + dflash.unread()
        if unknown:
            logger.warning("config.json has keys that are not known here and were not used: %s", ", ".join(unknown))
        return config


def _refuse_other_formats(keys: ConfigKeys) -> None:
    for key in ("speculators_model_type", "transformer_layer_config", "speculators_config"):
        keys.refuse(key, "checkpoints in the speculators format are not served, only DeepSpec's")
    for key in ("quantization_config", "compression_config"):
        keys.refuse(key, "quantised drafters are not served; use the bf16 checkpoint")
    keys.refuse("dspark_draft_topk", "drafting from the top-k base logits only is not implemented")
    sample_from_anchor = keys.flag("sample_from_anchor")
    if sample_from_anchor is None:
        logger.warning(
            "config.json does not say sample_from_anchor: read as true (the anchor's own position predicts the first "
            "draft), as DeepSpec trains; a checkpoint trained to fill in 1 + N positions drafts nonsense this way"
        )
    elif not sample_from_anchor:
        raise CheckpointError(
            f"{keys.name('sample_from_anchor')} is false: the fill-in layout of 1 + N positions is not implemented"
        )
    eagle = keys.nested("eagle_config")
    for scope in (keys, eagle):
        if scope.flag("use_aux_hidden_state") is False:
            raise CheckpointError(
                f"{scope.name('use_aux_hidden_state')} is false: a drafter without tapped hidden states is not served"
            )


def _refuse_other_attention(keys: ConfigKeys, dflash: ConfigKeys, num_layers: int) -> None:
    """Only full, non-causal attention is implemented: every block position sees the context and the whole block."""
    why = "only full, non-causal attention is implemented"
    for scope, key in ((keys, "is_causal"), (dflash, "causal")):
        if scope.flag(key):
            raise CheckpointError(f"{scope.name(key)} is true: {why}")
    if dflash.flag("use_swa"):
        raise CheckpointError(f"{dflash.name('use_swa')} is true: {why}")
    dflash.skip({"swa_window_size"})  # read by sliding layers only
    layer_types = keys.texts("layer_types")
    if layer_types is not None:
        if len(layer_types) != num_layers:
            raise CheckpointError(
                f"{keys.name('layer_types')} has {len(layer_types)} entries, num_hidden_layers is {num_layers}"
            )
        for index, layer_type in enumerate(layer_types):
            if layer_type != "full_attention":
                raise CheckpointError(f"{keys.name('layer_types')}[{index}] is {layer_type!r}: {why}")
    if keys.flag("use_sliding_window") and layer_types is None:
        raise CheckpointError(f"{keys.name('use_sliding_window')} is true and layer_types is absent: {why}")
    for scope, key in ((dflash, "attention_sink_bias"), (keys, "add_swa_attention_sink_bias")):
        if scope.flag(key):
            raise CheckpointError(f"{scope.name(key)} is true: attention sinks are not implemented")
    value_scale = dflash.optional_number("attention_value_scale")
    if value_scale not in (None, 1.0):
        raise CheckpointError(f"{dflash.name('attention_value_scale')} is {value_scale}: only 1.0 is implemented")


def _vocabulary(keys: ConfigKeys) -> tuple[int, int]:
    vocab_size = keys.integer("vocab_size", at_least=2)
    draft_vocab_size = keys.optional_integer("draft_vocab_size", at_least=1) or vocab_size
    if draft_vocab_size < vocab_size:
        raise CheckpointError(
            f"{keys.name('draft_vocab_size')} is {draft_vocab_size}, less than vocab_size {vocab_size}: "
            "reduced draft vocabularies are not implemented"
        )
    return vocab_size, draft_vocab_size


def _heads(keys: ConfigKeys, dflash: ConfigKeys) -> tuple[bool, bool, int]:
    """(has a confidence head, which reads the Markov embedding, Markov rank)."""
    for key in HEAD_KEYS:
        dflash.refuse(key, f"{key} is read at the top level of config.json only")
    markov_rank = keys.integer("markov_rank", at_least=0)
    head_type = keys.text("markov_head_type")
    if markov_rank and head_type not in (None, "vanilla"):
        raise CheckpointError(f"{keys.name('markov_head_type')} is {head_type!r}; supported: 'vanilla'")
    has_confidence_head = bool(keys.flag("enable_confidence_head"))
    with_markov = bool(keys.flag("confidence_head_with_markov")) and has_confidence_head
    if with_markov and not markov_rank:
        raise CheckpointError(
            f"{keys.name('confidence_head_with_markov')} is true, but markov_rank is 0: there is no Markov embedding"
        )
    return has_confidence_head, with_markov, markov_rank


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
            "config.json: rope_theta is missing, at the top level and in rope_parameters; a guess would only lower "
            "the acceptance, silently"
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


def _block_size(keys: ConfigKeys) -> int:
    block_size = keys.optional_integer("block_size", at_least=1)
    other = keys.optional_integer("dspark_block_size", at_least=1)
    if block_size is not None and other is not None and block_size != other:
        raise CheckpointError(f"config.json: block_size is {block_size}, but dspark_block_size is {other}")
    size = block_size or other
    if size is None:
        raise CheckpointError("config.json: neither block_size nor dspark_block_size is given")
    return size


def _mask_token_id(keys: ConfigKeys, dflash: ConfigKeys, vocab_size: int) -> int:
    """vLLM's order: dflash_config.mask_token_id, then the top level's keys in the order of MASK_KEYS."""
    found = [
        (scope.name(key), value)
        for scope, key in ((dflash, "mask_token_id"), *((keys, key) for key in MASK_KEYS))
        if (value := scope.optional_integer(key, at_least=0)) is not None
    ]
    if not found:
        raise CheckpointError(
            "config.json has no mask token id; looked for dflash_config.mask_token_id, " + ", ".join(MASK_KEYS)
        )
    name, mask_token_id = found[0]
    if mask_token_id >= vocab_size:
        raise CheckpointError(f"{name} is {mask_token_id}, outside the vocabulary of {vocab_size}")
    return mask_token_id


def _target_layer_ids(keys: ConfigKeys, dflash: ConfigKeys) -> tuple[int, ...]:
    """The tapped layers, as outputs of decoder layers, from whichever spelling is there; they must agree."""
    found: dict[str, tuple[int, ...]] = {}
    # vLLM's own ids count "the stream entering layer id", one more than "the output of layer id".
    entering = keys.integers("eagle_aux_hidden_state_layer_ids")
    if entering:
        found["eagle_aux_hidden_state_layer_ids - 1"] = tuple(layer - 1 for layer in entering)
    for name, scope, key in (
        ("dflash_config.target_layer_ids", dflash, "target_layer_ids"),
        ("dspark_target_layer_ids", keys, "dspark_target_layer_ids"),
        ("target_layer_ids", keys, "target_layer_ids"),
    ):
        layers = scope.integers(key)
        if layers:
            found[name] = layers
    if not found:
        raise CheckpointError("config.json: target_layer_ids is missing or empty")
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config.json gives different tapped layers: {found}")
    name, layers = next(iter(found.items()))
    if any(later <= earlier for earlier, later in itertools.pairwise(layers)):
        raise CheckpointError(f"config.json: {name} is {list(layers)}; expected strictly increasing layers")
    if layers[0] < -1:
        raise CheckpointError(f"config.json: {name} is {list(layers)}; the lowest layer is -1, the embedding's output")
    target_layers = keys.optional_integer("num_target_layers", at_least=1)
    if target_layers is not None and layers[-1] >= target_layers - 1:
        raise CheckpointError(
            f"config.json: {name} is {list(layers)}, but the target has {target_layers} layers and its last one, "
            f"{target_layers - 1}, cannot be tapped: training sees it after the final norm, vLLM before"
        )
    return layers
