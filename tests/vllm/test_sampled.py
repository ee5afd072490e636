"""Sampled drafts in real vLLM on the CPU: whatever is drafted, accepted and resampled, tokens are distributed as the target's.

One engine serves all of it. Every token's own distribution, given those before it, is the target's logits by Transformers; a
token's rank in it, made uniform, is uniform in [0, 1) if and only if it was drawn from it, whatever it was. So all tokens of all
requests are one sample, for one test of uniformity.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.vllm import tiny_pair
from tests.vllm.processes import ROOT, Worker, run_engine
from tests.vllm.test_end_to_end import TP2, identity_of, prompt, remote

from farspark.engine.draws import draws

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

N = 5
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"
# The greatest distance of an empirical distribution of n from uniform, times sqrt(n): beyond it once in a million.
KOLMOGOROV = 2.7

REQUESTS, LENGTH = 16, 24
PROMPTS = [prompt(200 + number, 3 + number % 5) for number in range(REQUESTS)]
SEEDS = [1000, 1001, 1002]
# Greedy requests beside sampled ones.
MIXED = [0.0 if number % 3 == 0 else 1.0 for number in range(6)]
FEW: dict[str, Any] = {"prompts": PROMPTS[:6], "max_tokens": LENGTH}
REPEATED: dict[str, Any] = {"prompts": PROMPTS[:3], "max_tokens": LENGTH, "temperature": 1.0, "seed": SEEDS}


def sampled_phase(temperature: float, requests: int = REQUESTS, **more: Any) -> dict[str, Any]:
    name = f"t{round(10 * temperature)}"
    return {"name": name, "prompts": PROMPTS[:requests], "max_tokens": LENGTH, "temperature": temperature, **more}


def engine_job(
    pair: tiny_pair.TinyPair, phases: list[dict[str, Any]], *, drafts: bool = True, **more: Any
) -> dict[str, Any]:
    return {
        "target": str(pair.target),
        "drafter": str(pair.drafter) if drafts else None,
        "num_drafts": N,
        "engine": {
            "max_num_batched_tokens": 128,
            "block_size": 32,
            "dtype": "float32",
            "enable_prefix_caching": False,
            "max_num_seqs": 8,
        },
        "phases": phases,
        **more,
    }


def settings_for(policy: str, endpoint: str, pair: tiny_pair.TinyPair, stats: Path, **more: str) -> dict[str, str]:
    settings = remote(policy, endpoint, identity_of(pair), stats, _WANT_MARGIN="0", **more)
    return settings | {"VLLM_DSPARK_SAMPLED_TOP32": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.make_tiny_pair(tmp_path_factory.mktemp("sampled"), 0, agreeable=True)


@pytest.fixture(scope="module")
def worker(pair: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = Worker(pair.drafter, pair.target, tmp_path_factory.mktemp("worker"), dtype="float32", slots=8)
    one.start()
    yield one
    one.kill()


@pytest.fixture(scope="module")
def run(pair: tiny_pair.TinyPair, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    stats = tmp_path_factory.mktemp("stats") / "stats.json"

    def restart(pause: str) -> str | None:
        if pause == "ready":
            return "ready"
        worker.kill()
        worker.start()
        return None

    phases = [
        sampled_phase(0.7),
        sampled_phase(1.0),
        FEW | {"name": "greedy"},
        FEW | {"name": "mixed", "temperature": MIXED},
        REPEATED | {"name": "once"},
        # Rounds fail in it, until the new worker is there.
        {"name": "between", "prompts": PROMPTS[:1], "max_tokens": LENGTH, "pauses": {"0": "restart"}},
        REPEATED | {"name": "again", "pauses": {"0": "ready"}},
    ]
    job = engine_job(pair, phases, record_drafts=True)
    found = run_engine(job, settings_for("capacity", worker.endpoint, pair, stats), on_pause=restart)
    return found | {"stats": json.loads(stats.read_text(encoding="utf-8"))}


def rejection(draws: int, plant: str = "none", *options: str) -> dict[str, float]:
    """What `rejection_run.py` says."""
    arguments = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tests.vllm.rejection_run",
        "--draws",
        str(draws),
        "--plant",
        plant,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*arguments, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["none", "one-hot"])
def test_50000_draws_through_vllms_own_sampler_are_the_targets_marginals_and_pairs(plant: str) -> None:
    """One-hot: place-holders and greedy drafts, each verified as certain, beside which it is exact, too."""
    found = rejection(50_000, plant)
    assert found["draws"] >= 50_000
    assert abs(found["marginals_z"]) < 5
    assert abs(found["pairs_z"]) < 5
    # Three times what 50,000 draws leave by chance.
    assert found["marginals_tv"] < 0.035


@pytest.mark.slow
@pytest.mark.parametrize("plant", ["other-q", "greedy-drafts"])
def test_a_q_that_the_drafts_were_not_drawn_from_is_seen(plant: str) -> None:
    assert rejection(12_000, plant)["pairs_z"] > 5


@pytest.mark.slow
def test_vllms_kernels_under_the_interpreter_say_the_same() -> None:
    found, interpreted = rejection(500), rejection(500, "none", "--interpreted")
    assert found == pytest.approx(interpreted)


def test_the_draws_have_nothing_to_do_with_the_numbers_that_the_target_accepts_and_resamples_by() -> None:
    """Of the same seed at the same positions: no correlation beyond five deviations of 4,096 pairs."""
    from farspark_vllm_cpu_engine.kernels import noise

    seeds, position = np.arange(4096, dtype=np.int64) * 7919 - 10**6, 321
    drawn = draws(seeds, np.full(len(seeds), position), 1)[:, 0]
    within = 5 / math.sqrt(len(seeds))
    # vLLM counts the position in front of the token; the one behind it is its neighbour's.
    for at in (position, position + 1):
        accepts = [noise.philox_uniform(int(seed), at) for seed in seeds]
        resamples = [noise.gumbel(int(seed), at, 0, 1)[0] for seed in seeds]
        for theirs in (accepts, resamples):
            assert abs(np.corrcoef(drawn, np.array(theirs, dtype=np.float64))[0, 1]) < within


class Target:
    """The target's own distributions, by Transformers in float32."""

    def __init__(self, pair: tiny_pair.TinyPair) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32)

    def ranks(
        self, prompts: list[list[int]], tokens: dict[str, list[int]], temperature: float, seed: int
    ) -> torch.Tensor:
        """float64 [all tokens]: of each the probability of all likelier ones, and a share of its own drawn by `seed`."""
        generator = torch.Generator().manual_seed(seed)
        found = []
        for name, ids in tokens.items():
            text = prompts[int(name)] + ids
            with torch.inference_mode():
                logits = self._model(torch.tensor([text])).logits[0].double()
            p = torch.softmax(logits[len(text) - len(ids) - 1 : -1] / temperature, dim=1)
            own = p.gather(1, torch.tensor(ids).unsqueeze(1))
            likelier = torch.where(p > own, p, 0.0).sum(dim=1)
            found.append(likelier + own.squeeze(1) * torch.rand(len(ids), generator=generator, dtype=torch.float64))
        return torch.cat(found)


def distance(ranks: torch.Tensor) -> float:
    """Kolmogorov's distance from uniform, times sqrt(n)."""
    n = len(ranks)
    ordered = ranks.sort().values
    steps = torch.arange(n, dtype=torch.float64) / n
    return float(torch.maximum(ordered - steps, steps + 1 / n - ordered).max()) * math.sqrt(n)


@pytest.fixture(scope="module")
def target(pair: tiny_pair.TinyPair) -> Target:
    return Target(pair)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_are_distributed_as_the_targets_own(run: dict[str, Any], target: Target, temperature: float) -> None:
    phase = run["phases"][f"t{round(10 * temperature)}"]
    ranks = target.ranks(PROMPTS, phase["tokens"], temperature, seed=20261130)
    assert len(ranks) == REQUESTS * LENGTH
    assert distance(ranks) < KOLMOGOROV
    # Nobody's luck: tokens of another temperature are told apart.
    assert distance(target.ranks(PROMPTS, phase["tokens"], 2 * temperature, seed=20261130)) > KOLMOGOROV


def test_most_drafts_were_drawn_and_verified_by_what_they_were_drawn_from(run: dict[str, Any]) -> None:
    counters = run["stats"]["counters"]
    assert counters["sampled_requests"] > 2 * REQUESTS
    assert counters.get("sampled_refused", 0) == 0
    assert counters.get("fallback_bad_reply", 0) == 0
    assert run["metrics"][ACCEPTED] > 0.2 * run["metrics"][DRAFTED]
    # float32 for each slot, position and id, and the ids that stand there.
    assert run["stats"]["sampled"] == {"support": 32, "device_bytes_per_rank": 8 * N * (512 * 4 + 32 * 8)}


def test_greedy_requests_beside_sampled_ones_have_the_greedy_text(run: dict[str, Any]) -> None:
    greedy, mixed = run["phases"]["greedy"]["tokens"], run["phases"]["mixed"]["tokens"]
    is_equal = [greedy[str(number)] == mixed[str(number)] for number in range(len(MIXED))]
    assert all(equal for equal, temperature in zip(is_equal, MIXED, strict=True) if temperature == 0)
    assert not all(is_equal)


def test_a_seeded_request_is_repeated_across_a_restart_of_the_worker(run: dict[str, Any]) -> None:
    once, again = run["phases"]["once"], run["phases"]["again"]
    assert once["tokens"] == again["tokens"]
    assert again["counters"]["hellos"] == once["counters"]["hellos"] + 1
    assert again["counters"]["rounds_failed"] == run["phases"]["between"]["counters"]["rounds_failed"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["capacity on two ranks", "resilience"])
def test_tokens_are_the_targets_on_two_ranks_and_where_a_local_drafter_stands_in(
    policy: str, pair: tiny_pair.TinyPair, worker: Worker, target: Target, tmp_path: Path
) -> None:
    """In resilience the worker dies in the middle, and the local drafter draws from then on."""
    is_tp = policy != "resilience"
    phase = sampled_phase(1.0) if is_tp else sampled_phase(1.0, pauses={"9": "kill"})
    job = engine_job(pair, [phase])
    job["engine"] |= {"tensor_parallel_size": 2} if is_tp else {}
    settings = settings_for(policy.split()[0], worker.endpoint, pair, tmp_path / "stats.json") | (TP2 if is_tp else {})

    def kill(_: str) -> None:
        worker.kill()

    try:
        found = run_engine(job, settings, on_pause=kill)
    finally:
        if not is_tp:
            worker.start()
    stats = json.loads((tmp_path / "stats.json").read_text(encoding="utf-8"))
    assert stats["counters"]["sampled_requests"] > 0
    assert stats["counters"].get("sampled_refused", 0) == 0
    assert (stats["counters"].get("local_fallback_rounds", 0) > 0) != is_tp
    assert found["metrics"][ACCEPTED] > 0.2 * found["metrics"][DRAFTED]
    assert distance(target.ranks(PROMPTS, found["phases"]["t10"]["tokens"], 1.0, seed=20261130)) < KOLMOGOROV


@pytest.mark.slow
def test_drafts_that_are_not_what_was_drawn_are_seen(
    pair: tiny_pair.TinyPair, worker: Worker, target: Target, tmp_path: Path
) -> None:
    """The engine verifies other ids than the worker drew, by the q of those: the test above sees it."""
    job = engine_job(pair, [sampled_phase(1.0)], record_drafts=True, spoil_drafts=True)
    found = run_engine(job, settings_for("capacity", worker.endpoint, pair, tmp_path / "stats.json"))
    assert distance(target.ranks(PROMPTS, found["phases"]["t10"]["tokens"], 1.0, seed=20261130)) > KOLMOGOROV
