"""Drafters in speculators' format in real vLLM: its own drafter and the worker draft the same, round by round.

Gemma 4 drafters are not here: vLLM gives their layers the names that the tiny target's have.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.vllm import tiny_pair
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import identity_of, prompt, remote, stats_of

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 5
WINDOW = 16
# Of the drafter's keys those that describe the transformer.
BACKBONE = (
    "model_type",
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


def speculators(
    folder: Path, *, is_anchor_first: bool = True, drafted: int | None = None, slides: bool = False
) -> tuple[tiny_pair.TinyPair, int]:
    """The tiny pair with its drafter saved as the speculators library does, and its number of drafts."""
    pair = tiny_pair.make_tiny_pair(folder, 3, dtype=torch.float32, own_embed=False, own_lm_head=drafted is not None)
    flat = json.loads((pair.drafter / "config.json").read_text())
    backbone = {key: flat[key] for key in BACKBONE} | {
        "rope_parameters": {"rope_type": "default", "rope_theta": flat["rope_theta"]}
    }
    if slides:
        backbone |= {"layer_types": ["sliding_attention"] * tiny_pair.DRAFT_LAYERS, "sliding_window": WINDOW}
    count = BLOCK if is_anchor_first else BLOCK - 1
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": backbone,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in tiny_pair.TAPS],
        "block_size": BLOCK,
        "draft_vocab_size": drafted or tiny_pair.VOCAB,
        "mask_token_id": tiny_pair.MASK_TOKEN,
        "markov_rank": tiny_pair.MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": is_anchor_first,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "verifier": {"name_or_path": str(pair.target), "architectures": ["Qwen3ForCausalLM"]},
        },
        "dtype": "float32",
    }
    (pair.drafter / "config.json").write_text(json.dumps(config))
    if drafted is not None:
        tensors = load_file(pair.drafter / "model.safetensors")
        ids = torch.randperm(tiny_pair.VOCAB, generator=torch.Generator().manual_seed(1))[:drafted].sort().values
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][ids].contiguous()
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.isin(torch.arange(tiny_pair.VOCAB), ids)
        save_file(tensors, pair.drafter / "model.safetensors", metadata={"format": "pt"})
    return pair, count


CASES: dict[str, Callable[[Path], tuple[tiny_pair.TinyPair, int]]] = {
    "speculators 1+N, reduced": lambda folder: speculators(folder, is_anchor_first=False, drafted=200),
    "speculators": speculators,
    "speculators, sliding": lambda folder: speculators(folder, slides=True),
}


@pytest.fixture(scope="module", params=CASES)
def shadow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("formats")
    pair, count = CASES[request.param](folder)
    worker = Worker(pair.drafter, pair.target, folder, dtype="float32")
    worker.start()
    try:
        settings = remote("shadow", worker.endpoint, identity_of(pair), folder / "stats.json")
        job = {
            "target": str(pair.target),
            "drafter": str(pair.drafter),
            "num_drafts": count,
            "record_drafts": True,
            "engine": {"dtype": "float32", "max_num_batched_tokens": 64},
            "phases": [
                {
                    "name": "only",
                    "prompts": [prompt(seed, length) for seed, length in enumerate([90, 5, 33, 1])],
                    "max_tokens": 30,
                }
            ],
        }
        result = run_engine(job, settings)
    finally:
        worker.kill()
    return result | {"stats": stats_of(folder / "stats.json")}


def test_AUX_INDEX_LAYOUT_1N_D2T_the_worker_drafts_what_vllm_drafts(shadow: dict[str, Any]) -> None:
    found = shadow["stats"]["shadow"]
    assert found["blocks"] >= 60
    assert found["unjudged"] == 0
    assert found["equal_or_tie_rate"] >= 0.995
    assert found["far_diverged"] == 0
    assert found["full_block_agree_rate"] >= 0.9
