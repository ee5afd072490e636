"""Tiny random DeepSeek-V4 and V4.1 targets with DSpark stages, in the published format: shards, an index, block scales."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 97,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 96,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "o_groups": 2,
    "hidden_act": "silu",
    "swiglu_limit": 0.75,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0, 0, 0],
    "n_routed_experts": 5,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 3,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "index_head_dim": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 96,
    "dspark_target_layer_ids": [3, 4, 5],
    "dspark_markov_rank": 6,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
}

_V41_TEXT: dict[str, Any] = {
    **{key: value for key, value in V4.items() if key not in ("architectures", "expert_dtype", "quantization_config")},
    "model_type": "deepseek_v41_text",
    "hidden_size": 96,
    "moe_intermediate_size": 64,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "rms_norm_eps": 1e-20,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "compress_ratios": [0, 0, 2, 2, 1, 1, 0, 0, 0],
    "n_routed_experts": 24,
    "num_experts_per_tok": 4,
    "num_nextn_predict_layers": 3,
    "engram_layer_ids": [1],
    "kv_source_layer_ids": [2],
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 3,
}

V41: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "image_token_id": 90,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    },
    "text_config": _V41_TEXT,
    "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 2},
}

TINY = {"v4": V4, "v41": V41}


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's settings."""
    text: Mapping[str, Any] = config.get("text_config", config)
    return text


def tiny_config(version: str, **changes: Any) -> dict[str, Any]:
    """V4 or V41 with `changes` of the language model's settings; a value of None takes the key out."""
    config = json.loads(json.dumps(TINY[version]))
    text = config.get("text_config", config)
    text.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        del text[key]
    assert isinstance(config, dict)
    return config


class _Random:
    def __init__(self, seed: int, block: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.block = block

    def normal(self, *shape: int, size: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (size * torch.randn(shape, generator=self.generator)).to(dtype)

    def around_one(self, *shape: int) -> Tensor:
        return (1 + 0.2 * torch.randn(shape, generator=self.generator)).bfloat16()

    def exponents(self, size: float, *shape: int) -> Tensor:
        """e8m0 scales around `size`, not all the same."""
        middle = 127 + round(float(torch.tensor(size).log2()))
        codes = torch.randint(middle - 1, middle + 2, shape, generator=self.generator)
        return codes.to(torch.uint8).view(torch.float8_e8m0fnu)

    def fp8(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        block = self.block
        codes = torch.randn((rows, columns), generator=self.generator).to(torch.float8_e4m3fn)
        scale = self.exponents(1.5 / columns**0.5, -(-rows // block), -(-columns // block))
        return {name + ".weight": codes, name + ".scale": scale}

    def fp4(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        packed = torch.randint(0, 256, (rows, columns // 2), generator=self.generator).to(torch.uint8).view(torch.int8)
        return {name + ".weight": packed, name + ".scale": self.exponents(0.6 / columns**0.5, rows, columns // 32)}


def tiny_tensors(config: Mapping[str, Any], seed: int = 0, stages: int = 3) -> dict[str, Tensor]:
    """The drafter's tensors, written from the description of the format; sizes at which every part moves the logits."""
    text, is_v41 = text_of(config), config["model_type"] == "deepseek_v41"
    random = _Random(seed, config["quantization_config"]["weight_block_size"][0])
    hidden, inner, vocab = text["hidden_size"], text["moe_intermediate_size"], text["vocab_size"]
    heads, dim, rank = text["num_attention_heads"], text["head_dim"], text["dspark_markov_rank"]
    latent, groups, copies = text["q_lora_rank"], text["o_groups"], text["hc_mult"]
    experts = text["dspark_n_routed_experts"] if is_v41 else text["n_routed_experts"]
    tensors = {"embed.weight": random.normal(vocab, hidden), "head.weight": random.normal(vocab, hidden, size=0.3)}
    for stage in range(stages):
        at = f"mtp.{stage}."
        tensors |= random.fp8(at + "attn.wq_a", latent, hidden)
        tensors |= random.fp8(at + "attn.wq_b", heads * dim, latent)
        tensors |= random.fp8(at + "attn.wkv", dim, hidden)
        tensors |= random.fp8(at + "attn.wo_a", groups * text["o_lora_rank"], heads * dim // groups)
        tensors |= random.fp8(at + "attn.wo_b", hidden, groups * text["o_lora_rank"])
        tensors[at + "attn.q_norm.weight"] = random.around_one(latent)
        tensors[at + "attn.kv_norm.weight"] = random.around_one(dim)
        tensors[at + "attn.attn_sink"] = random.normal(heads, dtype=torch.float32)
        tensors[at + "attn_norm.weight"] = random.around_one(hidden)
        tensors[at + "ffn_norm.weight"] = random.around_one(hidden)
        for part in ("attn", "ffn"):
            mixes = (2 + copies) * copies
            size = 1 / (copies * hidden) ** 0.5
            tensors[f"{at}hc_{part}_fn"] = random.normal(mixes, copies * hidden, size=size, dtype=torch.float32)
            tensors[f"{at}hc_{part}_base"] = random.normal(mixes, size=0.5, dtype=torch.float32)
            tensors[f"{at}hc_{part}_scale"] = 1 + random.normal(3, size=0.3, dtype=torch.float32)
        tensors[at + "ffn.gate.weight"] = random.normal(experts, hidden, size=1 / hidden**0.5)
        tensors[at + "ffn.gate.bias"] = random.normal(experts, size=0.2, dtype=torch.float32)
        if is_v41:
            tensors[at + "ffn.gate.bias_vl"] = random.normal(experts, dtype=torch.float32)
        for name in ("shared_experts", *(f"experts.{expert}" for expert in range(experts))):
            make = random.fp8 if name == "shared_experts" else random.fp4
            tensors |= make(f"{at}ffn.{name}.w1", inner, hidden)
            tensors |= make(f"{at}ffn.{name}.w3", inner, hidden)
            tensors |= make(f"{at}ffn.{name}.w2", hidden, inner)
    first, last = "mtp.0.", f"mtp.{stages - 1}."
    tensors |= random.fp8(first + "main_proj", hidden, len(text["dspark_target_layer_ids"]) * hidden)
    tensors[first + "main_norm.weight"] = random.around_one(hidden)
    tensors[last + "norm.weight"] = random.around_one(hidden)
    tensors[last + "confidence_head.proj.weight"] = random.normal(1, hidden + rank, size=1 / hidden**0.5)
    names = ("embed", "head") if is_v41 else ("markov_w1", "markov_w2")
    for name in names:
        tensors[f"{last}markov_head.{name}.weight"] = random.normal(vocab, rank)
    if not is_v41:
        size = 1 / (copies * hidden) ** 0.5
        tensors[last + "hc_head_fn"] = random.normal(copies, copies * hidden, size=size, dtype=torch.float32)
        tensors[last + "hc_head_base"] = random.normal(copies, size=0.5, dtype=torch.float32)
        tensors[last + "hc_head_scale"] = torch.tensor([1.2])
    return tensors


def target_tensors(seed: int = 9) -> dict[str, Tensor]:
    """What else such a target holds: nothing that a drafter should open."""
    random = _Random(seed, 32)
    return {
        "layers.0.attn_norm.weight": random.around_one(16),
        **random.fp8("layers.0.attn.wkv", 32, 64),
        "layers.0.ffn.gate.tid2eid": torch.zeros((8, 2), dtype=torch.int64),
        "norm.weight": random.around_one(16),
    }


def write_deepseek(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 4) -> Path:
    """config.json, the index and the shards of a target: each holds a part of the drafter but the last, which has none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    for index, (name, tensor) in enumerate(tensors.items()):
        parts[index % (shards - 1)][name] = tensor
    others = target_tensors()
    parts[0]["layers.0.attn_norm.weight"] = others.pop("layers.0.attn_norm.weight")
    parts[-1] |= others
    weight_map: dict[str, str] = {}
    for index, part in enumerate(parts):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index_json = {"metadata": {"total_size": sum(one.nbytes for part in parts for one in part.values())}}
    (folder / "model.safetensors.index.json").write_text(json.dumps({**index_json, "weight_map": weight_map}))
    return folder


def write_tiny_deepseek(folder: Path, version: str, seed: int = 0, stages: int = 3, **changes: Any) -> Path:
    """A tiny random target, "v4" or "v41"; `changes` as in `tiny_config`."""
    config = tiny_config(version, **changes)
    return write_deepseek(folder, config, tiny_tensors(config, seed, stages))
