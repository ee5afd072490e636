"""config.json of a DeepSeek-V4 or V4.1 target with DSpark stages: what each key means, and which tensors the drafter is.

The drafter is the stages `mtp.0`, `mtp.1`, ... of the target's own checkpoint, with the target's embedding and head. The
config is the target's: V4 writes it flat, V4.1 nests the language model under `text_config`. Pure: no torch, no files.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Final

from farspark.errors import CheckpointError
from farspark.worker.checkpoint.keys import ConfigKeys

logger = logging.getLogger(__name__)

EMBED: Final = "embed.weight"
HEAD: Final = "head.weight"
STAGES: Final = "mtp."

V4: Final = "DeepseekV4ForCausalLM"
V41: Final = "DeepseekV41ForCausalLM"
MODEL_TYPES: Final = {V4: "deepseek_v4", V41: "deepseek_v41"}

# One scale for so many neighbours of a row of packed fp4 weights, in both versions.
FP4_GROUP: Final = 32

# Dimensions of a context vector that share one scale. V4 quantises those without rotation, V4.1 all of them.
V4_KV_GROUP: Final = 64
V41_KV_GROUP: Final = 32

# Stored dtypes, as safetensors names them. What is not quantised keeps its value in either of the two.
QUANTISED: Final = frozenset({"F8_E4M3"})
PACKED: Final = frozenset({"I8"})
SCALE: Final = frozenset({"F8_E8M0", "F32"})
PLAIN: Final = frozenset({"BF16", "F32"})

# Name -> (shape as stored, dtypes that it may have).
_Tensors = dict[str, tuple[tuple[int, ...], frozenset[str]]]

_STAGE = re.compile(r"mtp\.(\d+)\.")
# The routing bias for tokens of images; a draft is text.
_IMAGE_BIAS = re.compile(r"mtp\.\d+\.ffn\.gate\.bias_vl")

# Keys of the target that no stage depends on: bookkeeping, its compressed attention, its hash routing, its n-gram
# memory, its vision tower.
_OF_THE_TARGET: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "candidate_block_size",
        "candidate_source_layer_id",
        "candidate_topk_blocks",
        "compress_rates",
        "compress_rope_theta",
        "dtype",
        "eos_token_id",
        "first_k_dense_replace",
        "image_token_id",
        "index_head_dim",
        "index_n_heads",
        "index_source_layer_ids",
        "index_topk",
        "initializer_range",
        "kv_source_layer_ids",
        "layer_types",
        "mlp_layer_types",
        "model_type",
        "moe_layer_freq",
        "num_hash_layers",
        "output_router_logits",
        "pad_token_id",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_OF_THE_TARGET_BY_PREFIX: Final = ("engram_", "vision_")


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """What the maths of the DSpark stages depends on; every field is part of the drafter's identity."""

    kind: str  # V4 or V41, the published architecture
    stages: int
    hidden_size: int
    moe_intermediate_size: int
    num_heads: int
    head_dim: int
    rope_head_dim: int  # the last dimensions of a head, those that are rotated
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    experts: int  # routed experts of a stage
    experts_per_token: int
    routed_scaling_factor: float
    swiglu_limit: float
    rms_norm_eps: float
    rope_theta: float
    window: int  # context positions that a draft sees
    hc_mult: int  # copies of the residual stream
    hc_sinkhorn_iters: int
    hc_eps: float
    fp8_block: int  # rows and columns that share one scale; also the width of an activation's group
    vocab_size: int
    max_position: int  # exclusive bound of positions
    block_size: int  # N
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # V4: layers whose outputs are tapped; V4.1: layers whose inputs are
    markov_rank: int

    @property
    def is_v41(self) -> bool:
        return self.kind == V41

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def max_drafts(self) -> int:
        return self.block_size

    @property
    def anchor_predicts(self) -> bool:
        return True

    @property
    def taps(self) -> int:
        return len(self.target_layer_ids)

    @property
    def tap_size(self) -> int:
        return self.hidden_size

    @property
    def row_bytes(self) -> int:
        """Bytes of one context row: all taps of one position, bf16."""
        return self.taps * self.tap_size * 2

    @property
    def context_layers(self) -> int:
        return self.stages

    @property
    def context_entry(self) -> tuple[int, ...]:
        return (self.head_dim,)  # one latent, key and value at once

    @property
    def markov_names(self) -> tuple[str, str]:
        """(the previous token's embedding, the projection to the vocabulary) of the last stage."""
        head = f"{STAGES}{self.stages - 1}.markov_head."
        return (
            (head + "embed.weight", head + "head.weight")
            if self.is_v41
            else (head + "markov_w1.weight", head + "markov_w2.weight")
        )

    def identity_values(self) -> dict[str, object]:
        """The part of the config that the identity covers; equal for every spelling of the same drafter."""
        return asdict(self)

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape, as stored, of every tensor of the drafter."""
        return {name: shape for name, (shape, _) in self._tensors().items()}

    def stored_dtypes(self) -> Mapping[str, frozenset[str]]:
        """Every tensor: the model takes all of them as they are stored."""
        return {name: dtypes for name, (_, dtypes) in self._tensors().items()}

    def ignores(self, name: str) -> bool:
        return _IMAGE_BIAS.fullmatch(name) is not None

    def lent_names(self) -> Mapping[str, tuple[str, ...]]:
        """None: the embedding and the head lie in the same checkpoint."""
        return {}

    def is_markov(self, name: str) -> bool:
        return name in self.markov_names

    def _tensors(self) -> _Tensors:
        hidden = self.hidden_size
        tensors: _Tensors = {EMBED: ((self.vocab_size, hidden), PLAIN), HEAD: ((self.vocab_size, hidden), PLAIN)}
        for stage in range(self.stages):
            tensors |= self._stage_tensors(f"{STAGES}{stage}.")
        first, last = f"{STAGES}0.", f"{STAGES}{self.stages - 1}."
        tensors |= self._fp8(first + "main_proj", hidden, self.taps * hidden)
        tensors[first + "main_norm.weight"] = ((hidden,), PLAIN)
        tensors[last + "norm.weight"] = ((hidden,), PLAIN)
        tensors[last + "confidence_head.proj.weight"] = ((1, hidden + self.markov_rank), PLAIN)
        for name in self.markov_names:
            tensors[name] = ((self.vocab_size, self.markov_rank), PLAIN)
        if not self.is_v41:
            copies = self.hc_mult
            tensors[last + "hc_head_fn"] = ((copies, copies * hidden), PLAIN)
            tensors[last + "hc_head_base"] = ((copies,), PLAIN)
            tensors[last + "hc_head_scale"] = ((1,), PLAIN)
        return tensors

    def _stage_tensors(self, stage: str) -> _Tensors:
        hidden, inner, copies = self.hidden_size, self.moe_intermediate_size, self.hc_mult
        query, mixes = self.num_heads * self.head_dim, (2 + copies) * copies
        attention, moe = stage + "attn.", stage + "ffn."
        tensors: _Tensors = {
            attention + "attn_sink": ((self.num_heads,), PLAIN),
            attention + "q_norm.weight": ((self.q_lora_rank,), PLAIN),
            attention + "kv_norm.weight": ((self.head_dim,), PLAIN),
            stage + "attn_norm.weight": ((hidden,), PLAIN),
            stage + "ffn_norm.weight": ((hidden,), PLAIN),
            moe + "gate.weight": ((self.experts, hidden), PLAIN),
            moe + "gate.bias": ((self.experts,), PLAIN),
        }
        for part in ("attn", "ffn"):
            tensors[f"{stage}hc_{part}_fn"] = ((mixes, copies * hidden), PLAIN)
            tensors[f"{stage}hc_{part}_base"] = ((mixes,), PLAIN)
            tensors[f"{stage}hc_{part}_scale"] = ((3,), PLAIN)
        for name, rows, columns in (
            (attention + "wq_a", self.q_lora_rank, hidden),
            (attention + "wq_b", query, self.q_lora_rank),
            (attention + "wkv", self.head_dim, hidden),
            (attention + "wo_a", self.o_groups * self.o_lora_rank, query // self.o_groups),
            (attention + "wo_b", hidden, self.o_groups * self.o_lora_rank),
            (moe + "shared_experts.w1", inner, hidden),
            (moe + "shared_experts.w3", inner, hidden),
            (moe + "shared_experts.w2", hidden, inner),
        ):
            tensors |= self._fp8(name, rows, columns)
        for expert in range(self.experts):
            for name, rows, columns in (("w1", inner, hidden), ("w3", inner, hidden), ("w2", hidden, inner)):
                where = f"{moe}experts.{expert}.{name}"
                tensors[where + ".weight"] = ((rows, columns // 2), PACKED)
                tensors[where + ".scale"] = ((rows, columns // FP4_GROUP), SCALE)
        return tensors

    def _fp8(self, name: str, rows: int, columns: int) -> _Tensors:
        block = self.fp8_block
        scales = (-(-rows // block), -(-columns // block))
        return {name + ".weight": ((rows, columns), QUANTISED), name + ".scale": (scales, SCALE)}


def claims(name: str) -> bool:
    """Whether a tensor of the target's checkpoint belongs to its drafter."""
    return name.startswith(STAGES) or name in (EMBED, HEAD)


def parse(keys: ConfigKeys, names: Collection[str]) -> DeepseekV4Config:
    """`names` are the claimed tensors: only they tell how many stages there are.

    Raises CheckpointError, naming the key, for what is missing, contradictory or not served.
    """
    kind = _kind(keys)
    text = keys.nested("text_config") if kind == V41 else keys
    if kind == V41 and not text.has("hidden_size"):
        raise CheckpointError(f"{text.name('hidden_size')} is missing; a {V41} nests its language model there")
    for scope in {id(one): one for one in (keys, text)}.values():
        scope.skip(_OF_THE_TARGET)
        unread = [key.rpartition(".")[2] for key in scope.unread()]
        scope.skip([key for key in unread if key.startswith(_OF_THE_TARGET_BY_PREFIX)])
    keys.skip({"vision_config"})
    if not text.has("dspark_block_size"):
        raise CheckpointError(
            f"{text.name('dspark_block_size')} is missing: this target has no DSpark drafter; what it may have as {STAGES}* is a "
            "head for classic MTP"
        )
    _refuse_other_maths(text)
    stages = _stages(text, kind, names)
    hidden_size = text.integer("hidden_size", at_least=1)
    head_dim = text.integer("head_dim", at_least=2)
    vocab_size = text.integer("vocab_size", at_least=2)
    experts, experts_per_token = _experts(text, kind)
    config = DeepseekV4Config(
        kind=kind,
        stages=stages,
        hidden_size=hidden_size,
        moe_intermediate_size=text.integer("moe_intermediate_size", at_least=1),
        num_heads=text.integer("num_attention_heads", at_least=1),
        head_dim=head_dim,
        rope_head_dim=_rope_head_dim(text, head_dim),
        q_lora_rank=text.integer("q_lora_rank", at_least=1),
        o_lora_rank=text.integer("o_lora_rank", at_least=1),
        o_groups=text.integer("o_groups", at_least=1),
        experts=experts,
        experts_per_token=experts_per_token,
        routed_scaling_factor=text.number("routed_scaling_factor"),
        swiglu_limit=_positive(text, "swiglu_limit"),
        rms_norm_eps=_positive(text, "rms_norm_eps"),
        rope_theta=_rope_theta(text),
        window=text.integer("sliding_window", at_least=1),
        hc_mult=text.integer("hc_mult", at_least=1),
        hc_sinkhorn_iters=text.integer("hc_sinkhorn_iters", at_least=1),
        hc_eps=_positive(text, "hc_eps"),
        fp8_block=_fp8_block(keys, text),
        vocab_size=vocab_size,
        max_position=text.integer("max_position_embeddings", at_least=2),
        block_size=text.integer("dspark_block_size", at_least=1),
        mask_token_id=_mask_token_id(text, vocab_size),
        target_layer_ids=_target_layer_ids(text),
        markov_rank=text.integer("dspark_markov_rank", at_least=1),
    )
    _check_sizes(config, text)
    unknown = sorted({*keys.unread(), *text.unread()})
    if unknown:
        logger.warning("config.json has keys that are not known here and were not used: %s", ", ".join(unknown))
    return config


def _kind(keys: ConfigKeys) -> str:
    """The architecture; the model type must agree with it."""
    architectures = keys.texts("architectures") or ()
    model_type = keys.text("model_type")
    kind = architectures[0] if len(architectures) == 1 else None
    if kind not in MODEL_TYPES or model_type not in (None, MODEL_TYPES[kind]):
        raise CheckpointError(
            f"config.json: architectures is {list(architectures)} and model_type {model_type!r}; supported: "
            + ", ".join(f"{name} with {its!r}" for name, its in MODEL_TYPES.items())
        )
    return kind


def _refuse_other_maths(text: ConfigKeys) -> None:
    """Keys of which one value only is implemented; absent means that value, as in the published configs."""
    for key, expected in (
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("hidden_act", "silu"),
    ):
        value = text.text(key)
        if value not in (None, expected):
            raise CheckpointError(f"{text.name(key)} is {value!r}; supported: {expected!r}")
    for key, wanted in (
        ("norm_topk_prob", True),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("tie_word_embeddings", False),
        ("enable_confidence_head", True),
    ):
        flag = text.flag(key)
        if flag not in (None, wanted):
            raise CheckpointError(f"{text.name(key)} is {flag}; supported: {wanted}")
    for key in ("num_key_value_heads", "n_shared_experts"):
        count = text.optional_integer(key, at_least=0)
        if count not in (None, 1):
            raise CheckpointError(f"{text.name(key)} is {count}; supported: 1")
    draft_vocab = text.optional_integer("draft_vocab_size", at_least=1)
    if draft_vocab not in (None, text.optional_integer("vocab_size", at_least=1)):
        raise CheckpointError(f"{text.name('draft_vocab_size')} is {draft_vocab}: a reduced vocabulary is not served")


def _stages(text: ConfigKeys, kind: str, names: Collection[str]) -> int:
    """Counted from the tensors: V4's published config says 1 where three stages ship."""
    found = sorted({int(match[1]) for name in names if (match := _STAGE.match(name))})
    said = [text.optional_integer(key, at_least=0) for key in ("n_mtp_layers", "num_nextn_predict_layers")]
    if not found:
        raise CheckpointError(f"there is no tensor {STAGES}0.* in the checkpoint: it has no DSpark stages")
    stages = found[-1] + 1
    for value in said:
        if value is not None and value != stages and not (kind == V4 and value == 1):
            raise CheckpointError(
                f"config.json says {value} stages, the checkpoint has tensors of {', '.join(f'mtp.{i}' for i in found)}"
            )
    layers = text.optional_integer("num_hidden_layers", at_least=1)
    ratios = text.integers("compress_ratios")
    if layers is not None and ratios is not None and any(ratios[layers : layers + stages]):
        raise CheckpointError(
            f"{text.name('compress_ratios')} ends in {list(ratios[layers:])}: stages with compressed attention are not served"
        )
    return stages


def _experts(text: ConfigKeys, kind: str) -> tuple[int, int]:
    """(routed experts of a stage, experts per token). V4.1's stages have numbers of their own."""
    experts = text.optional_integer("n_routed_experts", at_least=1)
    per_token = text.optional_integer("num_experts_per_tok", at_least=1)
    if kind == V41:
        experts = text.optional_integer("dspark_n_routed_experts", at_least=0) or experts
        per_token = text.optional_integer("dspark_num_experts_per_tok", at_least=0) or per_token
    if experts is None or per_token is None:
        missing = "n_routed_experts" if experts is None else "num_experts_per_tok"
        raise CheckpointError(f"{text.name(missing)} is missing")
    if per_token > experts:
        raise CheckpointError(f"config.json: {per_token} experts for each token out of {experts}")
    return experts, per_token


def _rope_head_dim(text: ConfigKeys, head_dim: int) -> int:
    size = text.optional_integer("qk_rope_head_dim", at_least=2)
    factor = text.optional_number("partial_rotary_factor")
    if size is None and factor is not None:
        size = int(head_dim * factor)
    if size is None:
        raise CheckpointError(f"{text.name('qk_rope_head_dim')} is missing")
    if size % 2 or not 2 <= size < head_dim:
        raise CheckpointError(
            f"{text.name('qk_rope_head_dim')} is {size}; expected an even number below head_dim {head_dim}"
        )
    return size


def _rope_theta(text: ConfigKeys) -> float:
    """Of layers without compression, which is what the stages are: YaRN and the other base are the compressed layers'."""
    theta = text.optional_number("rope_theta")
    parameters, main = text.nested("rope_parameters"), text.nested("rope_parameters").nested("main")
    text.skip({"rope_scaling"})
    for scope in (parameters, main):
        if theta is None:
            theta = scope.optional_number("rope_theta")
    if theta is None:
        raise CheckpointError(
            f"{text.name('rope_theta')} is missing; a guess would only lower the acceptance, silently"
        )
    if theta <= 0:
        raise CheckpointError(f"{text.name('rope_theta')} is {theta}; expected more than 0")
    return theta


def _positive(text: ConfigKeys, key: str) -> float:
    value = text.number(key)
    if value <= 0:
        raise CheckpointError(f"{text.name(key)} is {value}; expected more than 0")
    return value


def _fp8_block(keys: ConfigKeys, text: ConfigKeys) -> int:
    quantisation = keys.nested("quantization_config")
    method = quantisation.text("quant_method")
    if method != "fp8":
        raise CheckpointError(f"{quantisation.name('quant_method')} is {method!r}; supported: 'fp8', as published")
    for scope in (quantisation, text):
        expert_dtype = scope.text("expert_dtype")
        if expert_dtype not in (None, "fp4"):
            raise CheckpointError(f"{scope.name('expert_dtype')} is {expert_dtype!r}; supported: 'fp4', as published")
    block = quantisation.integers("weight_block_size")
    if block is None or len(block) != 2 or block[0] != block[1] or block[0] < FP4_GROUP or block[0] % FP4_GROUP:
        raise CheckpointError(
            f"{quantisation.name('weight_block_size')} is {None if block is None else list(block)}; expected two equal "
            f"multiples of {FP4_GROUP}"
        )
    return block[0]


def _mask_token_id(text: ConfigKeys, vocab_size: int) -> int:
    token = text.integer("dspark_noise_token_id", at_least=0)
    if token >= vocab_size:
        raise CheckpointError(
            f"{text.name('dspark_noise_token_id')} is {token}, outside the vocabulary of {vocab_size}"
        )
    return token


def _target_layer_ids(text: ConfigKeys) -> tuple[int, ...]:
    key = "dspark_target_layer_ids"
    layers = text.integers(key)
    if not layers:
        raise CheckpointError(f"{text.name(key)} is missing or empty")
    target_layers = text.optional_integer("num_hidden_layers", at_least=1)
    if any(later <= earlier for earlier, later in itertools.pairwise(layers)) or layers[0] < 0:
        raise CheckpointError(f"{text.name(key)} is {list(layers)}; expected strictly increasing layers from 0")
    if target_layers is not None and layers[-1] >= target_layers:
        raise CheckpointError(f"{text.name(key)} is {list(layers)}, but the target has {target_layers} layers")
    return layers


def _check_sizes(config: DeepseekV4Config, text: ConfigKeys) -> None:
    """What must divide what, so that groups of heads and of quantised values come out even."""
    if config.num_heads % config.o_groups:
        raise CheckpointError(
            f"{text.name('num_attention_heads')} is {config.num_heads}, not a multiple of o_groups {config.o_groups}"
        )
    block = config.fp8_block
    for name, size, divisor in (
        ("hidden_size", config.hidden_size, block),
        ("q_lora_rank", config.q_lora_rank, block),
        ("moe_intermediate_size", config.moe_intermediate_size, block),
        ("o_groups * o_lora_rank", config.o_groups * config.o_lora_rank, block),
        _kv_group(config),
    ):
        if size % divisor:
            raise CheckpointError(
                f"config.json: {name} is {size}, not a multiple of {divisor}, the size of a quantised group"
            )


def _kv_group(config: DeepseekV4Config) -> tuple[str, int, int]:
    if config.is_v41:
        return "head_dim", config.head_dim, V41_KV_GROUP
    return "head_dim - qk_rope_head_dim", config.head_dim - config.rope_head_dim, V4_KV_GROUP
