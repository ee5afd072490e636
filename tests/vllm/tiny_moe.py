"""The tiny pair's target as a mixture of experts: every expert is the dense layer, so that the text stays the dense target's."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from tests.vllm.tiny_pair import INTERMEDIATE, TinyPair

EXPERTS = 4
PER_TOKEN = 2


def with_experts(pair: TinyPair, folder: Path) -> TinyPair:
    """`pair` with another target, written below `folder`."""
    config = json.loads((pair.target / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN,
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,  # the weights of the chosen experts add up to 1
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    tensors = {}
    for name, tensor in load_file(pair.target / "model.safetensors").items():
        layer, found, rest = name.partition(".mlp.")
        if not found:
            tensors[name] = tensor
            continue
        for expert in range(EXPERTS):
            tensors[f"{layer}.mlp.experts.{expert}.{rest}"] = tensor.clone()
        if rest.startswith("gate_proj"):
            # Something to choose by; which experts are chosen makes no difference.
            tensors[f"{layer}.mlp.gate.weight"] = tensor[:EXPERTS].clone()
    target = folder / "moe-target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return TinyPair(target, pair.drafter, pair.vocab_size, pair.block_size)
