"""Tiny random drafter checkpoints in the published formats of dense drafters, and a target that lends what one may lack."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, object] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["full_attention", "full_attention"],
    "tie_word_embeddings": False,
    "num_target_layers": 6,
    "num_anchors": 512,
    "block_size": 5,
    "mask_token_id": 96,
    "target_layer_ids": [1, 3, 4],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}

# Keys of speculators' format that describe the transformer; they lie one level down.
BACKBONE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "attention_bias",
    "hidden_act",
    "max_position_embeddings",
    "rope_parameters",
    "layer_types",
    "sliding_window",
    "is_causal",
)

GEMMA4: dict[str, object] = {
    **{key: value for key, value in TINY.items() if key not in ("hidden_act", "num_key_value_heads")},
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4",
    "target_text_model_type": "gemma4_text",
    "sample_from_anchor": True,
    "hidden_activation": "gelu_pytorch_tanh",
    # Of the target's sliding layers; those of its global ones are the drafter's.
    "head_dim": 4,
    "num_key_value_heads": 4,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "final_logit_softcapping": 6.0,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
}


def tiny_config(**changes: object) -> dict[str, object]:
    """TINY with `changes`; a value of None takes the key out."""
    return {key: value for key, value in {**TINY, **changes}.items() if value is not None}


def gemma4_config(**changes: object) -> dict[str, object]:
    """GEMMA4 with `changes`; a value of None takes the key out."""
    return {key: value for key, value in {**GEMMA4, **changes}.items() if value is not None}


def speculators_config(**changes: object) -> dict[str, object]:
    """A drafter like TINY in speculators' format; `changes` are given flat, None takes a key out."""
    flat = tiny_config(**{"sample_from_anchor": True, "num_target_layers": None, "target_layer_ids": None, **changes})
    backbone = {key: flat.pop(key) for key in BACKBONE_KEYS if key in flat}
    block, is_anchor_first = flat["block_size"], flat.get("sample_from_anchor")
    assert isinstance(block, int)
    return {
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "draft_vocab_size": backbone["vocab_size"],
        "sliding_window_non_causal": False,
        "transformer_layer_config": backbone,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": block if is_anchor_first else block - 1}
            ],
            "verifier": {"name_or_path": "tiny/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        **flat,
        "architectures": ["DSparkSpeculator"],
    }


def _size(config: Mapping[str, object], key: str) -> int:
    value = config.get(key, 0)
    assert isinstance(value, int)
    return value


def tiny_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published format, what a target may lend included, written from its description."""
    backbone = config.get("transformer_layer_config")
    if backbone is not None:
        assert isinstance(backbone, dict)
        flat = {key: value for key, value in config.items() if key != "transformer_layer_config"}
        return tiny_shapes({**flat, **backbone, "target_layer_ids": config["aux_hidden_state_layer_ids"]})
    is_gemma = config["architectures"] == ["Gemma4DSparkModel"]
    hidden, inner = _size(config, "hidden_size"), _size(config, "intermediate_size")
    dim = _size(config, "global_head_dim" if is_gemma else "head_dim")
    kv_heads = _size(config, "num_key_value_heads")
    if config.get("attention_k_eq_v"):
        kv_heads = _size(config, "num_global_key_value_heads")
    query, key = _size(config, "num_attention_heads") * dim, kv_heads * dim
    vocab, rank = _size(config, "vocab_size"), _size(config, "markov_rank")
    drafted = _size(config, "draft_vocab_size") or vocab
    layers = config["target_layer_ids"]
    assert isinstance(layers, list)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (drafted, hidden),
        "fc.weight": (hidden, len(layers) * (_size(config, "target_hidden_size") or hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if drafted < vocab:
        shapes["d2t"] = (drafted,)
    for index in range(_size(config, "num_hidden_layers")):
        projections = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
        }
        if config.get("attention_k_eq_v"):
            del projections["self_attn.v_proj"]
        for name, shape in projections.items():
            shapes[f"layers.{index}.{name}.weight"] = shape
            if config.get("attention_bias"):
                shapes[f"layers.{index}.{name}.bias"] = shape[:1]
        shapes |= {
            f"layers.{index}.input_layernorm.weight": (hidden,),
            f"layers.{index}.post_attention_layernorm.weight": (hidden,),
            f"layers.{index}.self_attn.q_norm.weight": (dim,),
            f"layers.{index}.self_attn.k_norm.weight": (dim,),
            f"layers.{index}.mlp.gate_proj.weight": (inner, hidden),
            f"layers.{index}.mlp.up_proj.weight": (inner, hidden),
            f"layers.{index}.mlp.down_proj.weight": (hidden, inner),
        }
        if is_gemma:
            shapes[f"layers.{index}.pre_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"layers.{index}.post_feedforward_layernorm.weight"] = (hidden,)
            shapes[f"layers.{index}.layer_scalar"] = (1,)
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
    if rank and config.get("markov_head_type") == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, hidden + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if rank and config.get("markov_head_type") == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.get("enable_confidence_head"):
        width = hidden + (rank if config.get("confidence_head_with_markov") else 0)
        shapes["confidence_head.proj.weight"] = (1, width)
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def tiny_tensors(config: Mapping[str, object], seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights of a size at which every part of the drafter moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tiny_shapes(config).items():
        if name == "d2t":
            tensors[name] = shuffled_offsets(shape[0], tiny_shapes(config)["embed_tokens.weight"][0], generator)
            continue
        values = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "layer_scalar")):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif "embed" not in name and "markov_w" not in name:
            values = values * 1.5 / shape[-1] ** 0.5
        tensors[name] = values.to(dtype)
    return tensors


def shuffled_offsets(drafted: int, vocab: int, generator: torch.Generator) -> Tensor:
    """int64 [drafted]: what is added to a row of the head for the target's id; ids in no order, none twice."""
    return torch.randperm(vocab, generator=generator)[:drafted] - torch.arange(drafted)


def write_checkpoint(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], shards: int = 1
) -> Path:
    """Write config.json and the tensors, in one file or in `shards` with an index; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tiny(folder: Path, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """A tiny random drafter."""
    config = tiny_config(**changes)
    return write_checkpoint(folder, config, tiny_tensors(config, seed), shards)


def write_gemma4(folder: Path, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    config = gemma4_config(**changes)
    return write_checkpoint(folder, config, tiny_tensors(config, seed), shards)


def write_speculators(folder: Path, seed: int = 0, shards: int = 1, **changes: Any) -> Path:
    """As the library saves one: without what the target lends, with what only training needed."""
    config = speculators_config(**changes)
    tensors = tiny_tensors(config, seed)
    del tensors["embed_tokens.weight"]
    if "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        backbone = config["transformer_layer_config"]
        assert isinstance(backbone, dict)
        tensors["t2d"] = torch.isin(torch.arange(backbone["vocab_size"]), ids)
    else:
        del tensors["lm_head.weight"]
    return write_checkpoint(folder, config, tensors, shards)


def write_target(
    folder: Path, vocab: int = 97, hidden: int = 32, rows: int | None = None, tied: bool = False, shards: int = 1
) -> Path:
    """A target with an embedding, an lm_head unless tied, and a tensor that no drafter should open."""
    generator = torch.Generator().manual_seed(99)
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.randn(4, 4, generator=generator).bfloat16()}
    for name in ("model.embed_tokens.weight", "lm_head.weight")[: 1 if tied else 2]:
        tensors[name] = torch.randn((rows or vocab, hidden), generator=generator).bfloat16()
    config = {"vocab_size": vocab, "hidden_size": hidden, "tie_word_embeddings": tied}
    return write_checkpoint(folder, config, tensors, shards)
