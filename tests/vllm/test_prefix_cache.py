"""Cached tokens of real engines, plain and with interleaved sliding windows: capacity must lose none against no speculation.

The first time a long prompt fills the cache, the second time it is found there; how much of it is asked of vLLM's own output.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.vllm import tiny_pair
from tests.vllm.processes import run_engine

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

N = 5
BLOCK = 32
WINDOW = 48  # tokens; not a multiple of the block, and less than the prompts
# Nobody listens there: rounds fail at once and the target decodes alone, which the cache must not notice.
NOBODY = "tcp://127.0.0.1:1"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(500) for _ in range(length)]


# By how many whole blocks and how many tokens more: none more, so that the hit must stop a token short; a few; all but one.
LENGTHS = {"whole": 5 * BLOCK, "more": 5 * BLOCK + 7, "almost": 6 * BLOCK - 1}
PHASES: list[dict[str, Any]] = [
    {"name": f"{name}{time}", "prompts": [prompt(seed, length)], "max_tokens": 12}
    for time in ("first", "again")
    for seed, (name, length) in enumerate(LENGTHS.items())
] + [
    # A prompt whose beginning is another's.
    {"name": "branch", "prompts": [prompt(0, 5 * BLOCK)[: 3 * BLOCK] + prompt(9, 40)], "max_tokens": 12},
]


def sliding_pair(folder: Path) -> tiny_pair.TinyPair:
    """The tiny pair with a Llama target every other layer of which slides; of vLLM's models with taps the plainest that can."""
    pair = tiny_pair.make_tiny_pair(folder, 3, agreeable=True, dtype=torch.float32)
    file = pair.target / "config.json"
    config = json.loads(file.read_text())
    layers = config["num_hidden_layers"]
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "layer_types": ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(layers)],
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "mlp_bias": False,
    }
    file.write_text(json.dumps(config))
    weights = pair.target / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(weights).items()
        if not name.endswith(("q_norm.weight", "k_norm.weight"))
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    return pair


@dataclass(frozen=True, slots=True)
class Engines:
    alone: dict[str, Any]  # no speculation
    local: dict[str, Any]  # vLLM's own DSpark
    keeps: dict[str, Any]  # capacity
    leaves: dict[str, Any] | None  # capacity with KEEP_CACHED_BLOCKS=0


def run_all(pair: tiny_pair.TinyPair, folder: Path, *, keeps: dict[str, str], leaves: dict[str, str] | None) -> Engines:
    has_mtp_buffer = leaves is not None

    def run(drafts: bool, **settings: str) -> dict[str, Any]:
        job = {
            "target": str(pair.target),
            "drafter": str(pair.drafter) if drafts else None,
            "num_drafts": N,
            "mtp_buffer": has_mtp_buffer,
            "engine": {"dtype": "float32", "enable_prefix_caching": True, "block_size": BLOCK},
            "phases": PHASES,
        }
        return run_engine(job, ONE_THREAD | {f"VLLM_DSPARK_REMOTE{name}": value for name, value in settings.items()})

    def capacity(**settings: str) -> dict[str, Any]:
        stats = folder / f"stats{'-'.join(settings.values())}.json"
        chosen = {"": NOBODY, "_POLICY": "capacity", "_IDENTITY": "11" * 32, "_STATS_FILE": str(stats)} | settings
        return run(True, **chosen) | {"stats": json.loads(stats.read_text())}

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, False), pool.submit(run, True), pool.submit(capacity, **keeps)]
        if leaves is not None:
            jobs.append(pool.submit(capacity, **leaves))
        results = [one.result() for one in jobs]
    return Engines(*results, *[None] * (4 - len(results)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("plain")
    pair = tiny_pair.make_tiny_pair(folder, 3, agreeable=True, dtype=torch.float32)
    keeps = {"_KEEP_CACHED_BLOCKS": "1", "_RECLAIM_MTP": "0"}
    return run_all(pair, folder, keeps=keeps, leaves={"_KEEP_CACHED_BLOCKS": "0"})


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("sliding")
    return run_all(sliding_pair(folder), folder, keeps={}, leaves=None)


def cached(run: dict[str, Any] | None) -> dict[str, int]:
    assert run is not None
    return {phase: found["cached"]["0"] for phase, found in run["phases"].items()}


def tokens(run: dict[str, Any]) -> dict[str, list[int]]:
    return {phase: found["tokens"]["0"] for phase, found in run["phases"].items()}


def test_apc_loss_capacity_finds_as_many_cached_tokens_as_no_speculation(plain: Engines) -> None:
    # All whole blocks but the one with the last token, which must be computed.
    assert cached(plain.alone) == {
        **dict.fromkeys(["wholefirst", "morefirst", "almostfirst"], 0),
        "wholeagain": 4 * BLOCK,
        "moreagain": 5 * BLOCK,
        "almostagain": 5 * BLOCK,
        "branch": 3 * BLOCK,
    }
    assert cached(plain.keeps) == cached(plain.alone)
    assert tokens(plain.keeps) == tokens(plain.alone)


def test_apc_loss_a_setting_leaves_vllms_own_rule_which_loses_a_block_to_every_hit(plain: Engines) -> None:
    lost = {phase: hit and hit - BLOCK for phase, hit in cached(plain.alone).items()}
    assert cached(plain.leaves) == lost
    assert cached(plain.local) == lost


def test_apc_loss_a_target_with_sliding_layers_loses_nothing_in_capacity_either(sliding: Engines) -> None:
    assert set(sliding.alone["facts"]["kv_cache_groups"]) == {"FullAttentionSpec", "SlidingWindowSpec"}
    found = cached(sliding.alone)
    assert found["moreagain"] == found["almostagain"] == 5 * BLOCK
    assert cached(sliding.keeps) == found
    assert tokens(sliding.keeps) == tokens(sliding.alone)
    # What it would lose.
    assert cached(sliding.local)["moreagain"] == found["moreagain"] - BLOCK


def test_capacity_gives_back_the_mtp_buffer_of_a_target_and_nothing_is_copied_any_more(plain: Engines) -> None:
    assert plain.leaves is not None
    held = plain.local["facts"]["mtp_buffer"]["held_bytes"]
    assert held > 0
    assert plain.local["facts"]["mtp_buffer"]["rows_copied"] > 0
    assert plain.leaves["facts"]["mtp_buffer"] == {"held_bytes": 0, "rows_copied": 0}
    assert plain.leaves["stats"]["mtp_buffer"] == {"reclaimed_bytes": held, "kept_because": None}
    assert f"{held / (1 << 20):.1f} MiB reclaimed on this rank" in plain.leaves["log"]
    assert tokens(plain.leaves) == tokens(plain.alone)


def test_the_mtp_buffer_stays_where_the_setting_says_so(plain: Engines) -> None:
    assert plain.keeps["facts"]["mtp_buffer"] == plain.alone["facts"]["mtp_buffer"]
    assert "mtp_buffer" not in plain.keeps["stats"]


def test_a_target_that_has_no_mtp_buffer_has_nothing_reclaimed(sliding: Engines) -> None:
    assert sliding.keeps["stats"]["mtp_buffer"] == {"reclaimed_bytes": 0, "kept_because": None}
