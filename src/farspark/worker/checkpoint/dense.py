"""What the dense drafters have in common: a transformer whose context comes from the target's tapped layers, with DSpark's heads.

Pure: no torch, no files. A config has two kinds of keys, those of the backbone, which are transformers' own, and DSpark's;
in some formats they lie in different objects.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Final, NamedTuple

from farspark.errors import CheckpointError
from farspark.worker.checkpoint.family import COMMON, EMBEDDING, LM_HEAD
from farspark.worker.checkpoint.keys import ConfigKeys

logger = logging.getLogger(__name__)

# An offset per row of the head: the target's id of row j is j + D2T[j].
D2T: Final = "d2t"
# Of no use to a drafter: the mask of DFlash (DSpark's is a row of the embedding, vLLM does not read it either), and what
# training needed.
UNUSED_TENSORS: Final = frozenset({"mask_embedding", "t2d", "verifier_norm.weight", "verifier_lm_head.weight"})

# Known keys that say nothing about a draft: bookkeeping of transformers, and settings of training.
HARMLESS_KEYS: Final = frozenset(
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
        "tie_word_embeddings",  # the lm_head is the checkpoint's or the target's, never this embedding
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
HEAD_KEYS: Final = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
MARKOV_HEADS: Final = ("vanilla", "gated", "rnn")
MASK_KEYS: Final = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """The part of a `DrafterConfig` that dense families share; every field is part of the drafter's identity."""

    kind: ClassVar[str]

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # rows of the embedding and of the Markov embedding
    draft_vocab_size: int  # rows of lm_head and of the Markov projection: more are padding, fewer are named by d2t
    rms_norm_eps: float
    attention_bias: bool
    rope_theta: float
    max_position: int  # exclusive bound of positions
    block_size: int  # positions of a whole block
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # the target's decoder layers whose outputs are tapped; -1 is the embedding
    tap_size: int  # width of one tap: the target's hidden size
    markov_rank: int  # 0: no Markov head
    has_confidence_head: bool
    confidence_with_markov: bool
    markov_head_type: str = "vanilla"
    anchor_predicts: bool = True

    @property
    def max_drafts(self) -> int:
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def window(self) -> int:
        return 0

    @property
    def taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def row_bytes(self) -> int:
        return self.taps * self.tap_size * 2

    @property
    def context_layers(self) -> int:
        return self.num_layers

    @property
    def context_entry(self) -> tuple[int, ...]:
        return 2, self.num_kv_heads, self.head_dim  # keys, values

    @property
    def is_reduced(self) -> bool:
        """Whether only some of the target's ids are drafted."""
        return self.draft_vocab_size < self.vocab_size

    def identity_values(self) -> dict[str, object]:
        # A field at its default is left out, so that one that comes later changes no identity.
        values = ((field, getattr(self, field.name)) for field in fields(self))
        kept = {field.name: value for field, value in values if field.default is MISSING or value != field.default}
        return {"architecture": self.kind, **kept}

    def stored_dtypes(self) -> Mapping[str, frozenset[str]]:
        # The confidence is evaluated in float32 anyway, so a float32 head loses nothing.
        names = [name for name in self.tensor_shapes() if name.startswith("confidence_head.")]
        return dict.fromkeys(names, frozenset({COMMON, "F32"})) | {D2T: frozenset({"I64", "I32"})}

    def ignores(self, name: str) -> bool:
        return name in UNUSED_TENSORS

    def lent_names(self) -> Mapping[str, tuple[str, ...]]:
        # Multimodal targets keep their language model one level down.
        lent: dict[str, tuple[str, ...]] = {
            EMBEDDING: (
                "model.embed_tokens.weight",
                "model.language_model.embed_tokens.weight",
                "language_model.model.embed_tokens.weight",
            )
        }
        if not self.is_reduced:
            lent[LM_HEAD] = ("lm_head.weight", "language_model.lm_head.weight")
        return lent

    def is_markov(self, name: str) -> bool:
        return name.startswith("markov_head.")

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        hidden, rank = self.hidden_size, self.markov_rank
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, hidden),
            LM_HEAD: (self.draft_vocab_size, hidden),
            "fc.weight": (hidden, self.taps * self.tap_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        if self.is_reduced:
            shapes[D2T] = (self.draft_vocab_size,)
        for index in range(self.num_layers):
            shapes |= {f"layers.{index}.{name}": shape for name, shape in self.layer_shapes().items()}
        if rank:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, rank)
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, rank)
            if self.markov_head_type == "gated":
                shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
                shapes["markov_head.gate_proj.bias"] = (rank,)
            if self.markov_head_type == "rnn":
                shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
                shapes["markov_head.joint_proj.bias"] = (3 * rank,)
        if self.has_confidence_head:
            width = hidden + (rank if self.confidence_with_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name in its layer and shape of every tensor of one layer."""
        hidden, inner, dim = self.hidden_size, self.intermediate_size, self.head_dim
        query, key = self.num_heads * dim, self.num_kv_heads * dim
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
        shapes["post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
        ):
            shapes[f"{name}.weight"] = (rows, columns)
            if self.attention_bias:
                shapes[f"{name}.bias"] = (rows,)
        shapes["self_attn.q_norm.weight"] = (dim,)
        shapes["self_attn.k_norm.weight"] = (dim,)
        shapes["mlp.gate_proj.weight"] = (inner, hidden)
        shapes["mlp.up_proj.weight"] = (inner, hidden)
        shapes["mlp.down_proj.weight"] = (hidden, inner)
        return shapes


class Heads(NamedTuple):
    markov_rank: int
    markov_head_type: str
    has_confidence_head: bool
    confidence_with_markov: bool


def read_heads(own: ConfigKeys, *elsewhere: ConfigKeys) -> Heads:
    """`elsewhere`: objects that may repeat these keys, and in which vLLM would overlook them."""
    for scope in elsewhere:
        for key in HEAD_KEYS:
            scope.require_same(key, own)
    markov_rank = own.integer("markov_rank", at_least=0)
    head_type = own.text("markov_head_type") or "vanilla"
    if markov_rank and head_type not in MARKOV_HEADS:
        supported = ", ".join(map(repr, MARKOV_HEADS))
        raise CheckpointError(f"{own.name('markov_head_type')} is {head_type!r}; supported: {supported}")
    has_confidence_head = bool(own.flag("enable_confidence_head"))
    with_markov = bool(own.flag("confidence_head_with_markov")) and has_confidence_head
    if with_markov and not markov_rank:
        raise CheckpointError(
            f"{own.name('confidence_head_with_markov')} is true, but markov_rank is 0: there is no Markov embedding"
        )
    return Heads(markov_rank, head_type if markov_rank else "vanilla", has_confidence_head, with_markov)


class Attention(NamedTuple):
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


def read_attention(keys: ConfigKeys, *, head_dim: int | None = None, num_kv_heads: int | None = None) -> Attention:
    """Sizes that are given here are not read."""
    num_heads = keys.integer("num_attention_heads", at_least=1)
    num_kv_heads = num_kv_heads or keys.integer("num_key_value_heads", at_least=1)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{keys.name('num_attention_heads')} is {num_heads}, not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = head_dim or keys.integer("head_dim", at_least=2)
    if head_dim % 2:
        raise CheckpointError(f"{keys.name('head_dim')} is {head_dim}; rotary positions need an even one")
    eps = keys.number("rms_norm_eps")
    if eps <= 0:
        raise CheckpointError(f"{keys.name('rms_norm_eps')} is {eps}; expected more than 0")
    return Attention(
        hidden_size=keys.integer("hidden_size", at_least=1),
        num_layers=keys.integer("num_hidden_layers", at_least=1),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=eps,
    )


def read_layer_types(keys: ConfigKeys, num_layers: int) -> tuple[str, ...] | None:
    layer_types = keys.texts("layer_types")
    if layer_types is None:
        return None
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"{keys.name('layer_types')} has {len(layer_types)} entries, num_hidden_layers is {num_layers}"
        )
    for index, layer_type in enumerate(layer_types):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise CheckpointError(
                f"{keys.name('layer_types')}[{index}] is {layer_type!r}; supported: full_attention, sliding_attention"
            )
    return layer_types


def read_block_size(own: ConfigKeys, dflash: ConfigKeys) -> int:
    dflash.require_same("block_size", own)
    block_size = own.optional_integer("block_size", at_least=1)
    other = own.optional_integer("dspark_block_size", at_least=1)
    if block_size is not None and other is not None and block_size != other:
        raise CheckpointError(f"config.json: block_size is {block_size}, but dspark_block_size is {other}")
    size = block_size or other
    if size is None:
        raise CheckpointError("config.json: neither block_size nor dspark_block_size is given")
    return size


def read_deepspec_layout(own: ConfigKeys, block_size: int) -> bool:
    """Whether the anchor predicts; DeepSpec, which trains no other layout, does not write it down."""
    if own.has("sample_from_anchor"):
        return read_layout(own, block_size)
    own.skip({"sample_from_anchor"})
    logger.warning(
        "config.json does not say sample_from_anchor: read as true (the anchor's own position predicts the first draft), "
        "as DeepSpec trains; a checkpoint trained to fill in 1 + N positions drafts nonsense this way"
    )
    return True


def read_layout(own: ConfigKeys, block_size: int) -> bool:
    """Whether the anchor predicts, from a config that must say so."""
    sample_from_anchor = own.flag("sample_from_anchor")
    if sample_from_anchor is None:
        raise CheckpointError(
            f"{own.name('sample_from_anchor')} is missing, and it cannot be guessed: speculators trains with true where "
            "nothing is said (the anchor's own position predicts the first draft), vLLM reads a missing one as false "
            "(1 + N positions are filled in). Write into config.json which of the two the drafter was trained with"
        )
    if not sample_from_anchor and block_size < 2:
        raise CheckpointError(
            f"{own.name('sample_from_anchor')} is false and block_size is {block_size}: the anchor alone makes that "
            "block, and nothing is left to be drafted"
        )
    return sample_from_anchor


def read_mask_token_id(own: ConfigKeys, dflash: ConfigKeys, vocab_size: int) -> int:
    """vLLM's order: dflash_config.mask_token_id, then the top level's keys in the order of MASK_KEYS."""
    found = [
        (scope.name(key), value)
        for scope, key in ((dflash, "mask_token_id"), *((own, key) for key in MASK_KEYS))
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


def read_target_layer_ids(
    own: ConfigKeys, dflash: ConfigKeys, *, entering_key: str = "eagle_aux_hidden_state_layer_ids"
) -> tuple[int, ...]:
    """The tapped layers, as outputs of decoder layers, from whichever spelling is there; they must agree."""
    found: dict[str, tuple[int, ...]] = {}
    # vLLM's own ids count "the stream entering layer id", one more than "the output of layer id".
    entering = own.integers(entering_key)
    if entering:
        found[f"{entering_key} - 1"] = tuple(layer - 1 for layer in entering)
    for name, scope, key in (
        ("dflash_config.target_layer_ids", dflash, "target_layer_ids"),
        ("dspark_target_layer_ids", own, "dspark_target_layer_ids"),
        ("target_layer_ids", own, "target_layer_ids"),
    ):
        layers = scope.integers(key)
        if layers:
            found[name] = layers
    if not found:
        raise CheckpointError(f"config.json: target_layer_ids is missing or empty, and so is {entering_key}")
    if len(set(found.values())) > 1:
        raise CheckpointError(f"config.json gives different tapped layers: {found}")
    name, layers = next(iter(found.items()))
    if any(later <= earlier for earlier, later in itertools.pairwise(layers)):
        raise CheckpointError(f"config.json: {name} is {list(layers)}; expected strictly increasing layers")
    if layers[0] < -1:
        raise CheckpointError(f"config.json: {name} is {list(layers)}; the lowest layer is -1, the embedding's output")
    target_layers = own.optional_integer("num_target_layers", at_least=1)
    if target_layers is not None and layers[-1] >= target_layers - 1:
        raise CheckpointError(
            f"config.json: {name} is {list(layers)}, but the target has {target_layers} layers and its last one, "
            f"{target_layers - 1}, cannot be tapped: training sees it after the final norm, vLLM before"
        )
    return layers


def refuse_quantised(*scopes: ConfigKeys) -> None:
    for scope in scopes:
        for key in ("quantization_config", "compression_config"):
            scope.refuse(key, "quantised drafters of this family are not served; use the bf16 checkpoint")


def refuse_other_drafting(*scopes: ConfigKeys) -> None:
    """What changes how drafts are made and is not implemented."""
    for scope in scopes:
        for key, only in (("projector_type", "dspark"), ("attention_mode", "gqa")):  # SpecForge writes them
            value = scope.text(key)
            if value not in (None, only):
                raise CheckpointError(f"{scope.name(key)} is {value!r}; supported: {only!r}")
        scope.refuse("dspark_draft_topk", "drafting from the top-k base logits only is not implemented")
        if scope.flag("use_aux_hidden_state") is False:
            raise CheckpointError(
                f"{scope.name('use_aux_hidden_state')} is false: a drafter without tapped hidden states is not served"
            )


def warn_of_unknown(*scopes: ConfigKeys) -> None:
    """They may be harmless, and may not."""
    unknown = [key for scope in scopes for key in scope.unread()]
    if unknown:
        logger.warning("config.json has keys that are not known here and were not used: %s", ", ".join(unknown))
