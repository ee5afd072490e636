"""Tiny random drafter checkpoints in the published Qwen3 DSpark format, and a target that lends what one may lack."""

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


def tiny_config(**changes: object) -> dict[str, object]:
    """TINY with `changes`; a value of None takes the key out."""
    return {key: value for key, value in {**TINY, **changes}.items() if value is not None}


def _size(config: Mapping[str, object], key: str) -> int:
    value = config.get(key, 0)
    assert isinstance(value, int)
    return value


def tiny_shapes(config: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the published format, written from its description."""
    hidden, inner, dim = (_size(config, key) for key in ("hidden_size", "intermediate_size", "head_dim"))
    query, key = _size(config, "num_attention_heads") * dim, _size(config, "num_key_value_heads") * dim
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
    for index in range(_size(config, "num_hidden_layers")):
        projections = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
        }
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
    if rank:
        shapes["markov_head.markov_w1.weight"] = (vocab, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
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
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif "embed" not in name and "markov" not in name:
            values = values * 1.5 / shape[-1] ** 0.5
        tensors[name] = values.to(dtype)
    return tensors


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
