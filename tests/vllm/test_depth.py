"""The depth policy in a real engine on the CPU: the text stays, fewer drafts are verified, and a dead worker costs none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.vllm import tiny_pair
from tests.vllm.engine_run import environment
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import identity_of, prompt, remote

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

N = 5
LENGTH = 24
PROMPTS = [prompt(seed, length) for seed, length in enumerate([16, 5, 24])]
# Each phase begins with its own line in the depth file; those that end so act as under asynchronous scheduling.
AHEAD = "ahead"
POLICIES = {
    "all": "off",
    "two": "fixed:2",
    "none": "fixed:0",
    "free": "conf:8,8,8,8,8,8",
    "dear": "confb:1,1,9000,9000,9000,9000",
    "twoahead": "fixed:2",
    "freeahead": "confb:8,8,8,8,8,8",
    "noneahead": "fixed:0",
    "deadahead": "off",
    "dead": "off",
}
DRAFTED = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
VERIFIED_REQUESTS = "vllm:spec_decode_num_drafts"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("depth")
    pair = tiny_pair.make_tiny_pair(folder, 0, agreeable=True)
    base: dict[str, Any] = {
        "target": str(pair.target),
        "engine": {"max_num_batched_tokens": 64, "block_size": 32, "dtype": "float32", "enable_prefix_caching": False},
    }
    phase: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": LENGTH}
    alone = run_engine(base | {"phases": [phase | {"name": "all"}]})

    policy_file = folder / "policy"
    worker = Worker(pair.drafter, pair.target, folder)
    worker.start()

    def begin(name: str) -> None:
        if name == "deadahead":
            worker.kill()
        (folder / "next").write_text(POLICIES[name], encoding="utf-8")
        os.replace(folder / "next", policy_file)

    settings = remote(
        "capacity", worker.endpoint, identity_of(pair), folder / "stats.json", _DRAFT_MS="0", _ROUND_MS="8,8,8,8,8,8"
    )
    try:
        capacity = run_engine(
            base
            | {
                "drafter": str(pair.drafter),
                "num_drafts": N,
                "record_drafts": True,
                "phases": [
                    phase | {"name": name, "pauses": {"0": name}, "as_if_scheduled_ahead": name.endswith(AHEAD)}
                    for name in POLICIES
                ],
            },
            settings | {"VLLM_DSPARK_DEPTH_FILE": str(policy_file)},
            on_pause=begin,
        )
    finally:
        worker.kill()
    stats = json.loads((folder / "stats.json").read_text(encoding="utf-8"))
    return {"alone": alone, "capacity": capacity, "counted": counted(capacity), "stats": stats}


def counted(run: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By phase: what Farspark and vLLM counted in it."""
    found: dict[str, dict[str, int]] = {}
    before: dict[str, int] = {}
    for name in POLICIES:
        phase = run["phases"][name]
        after = {key: int(value) for key, value in {**phase["counters"], **phase["metrics"]}.items()}
        found[name] = {key: value - before.get(key, 0) for key, value in after.items()}
        before = after
    return found


def test_the_text_is_the_targets_own_under_every_policy(runs: dict[str, dict[str, Any]]) -> None:
    expected = runs["alone"]["phases"]["all"]["tokens"]
    for name in POLICIES:
        assert runs["capacity"]["phases"][name]["tokens"] == expected, name


def test_METRICS_drafted_is_what_was_sent_to_verify_as_vllm_counts_it_too(runs: dict[str, dict[str, Any]]) -> None:
    for name, one in runs["counted"].items():
        assert (one["drafted_tokens"], one["accepted_drafts"]) == (one[DRAFTED], one[ACCEPTED]), name


def test_DYN_K_as_many_drafts_are_verified_as_the_policy_says(runs: dict[str, dict[str, Any]]) -> None:
    counted, phases = runs["counted"], runs["capacity"]["phases"]
    every = counted["all"]
    # Most drafts of this pair are right, so a step brings several tokens.
    assert phases["all"]["steps"] < LENGTH / 2
    assert every["drafted_tokens"] == N * every[VERIFIED_REQUESTS]
    assert counted["two"]["drafted_tokens"] == 2 * counted["two"][VERIFIED_REQUESTS]
    assert counted["none"]["drafted_tokens"] == 0
    assert phases["none"]["steps"] == LENGTH
    # Where depth costs nothing, all of it is worth it; where a second draft costs seconds, as many drafts as requests.
    assert counted["free"]["drafted_tokens"] == every["drafted_tokens"]
    assert 0 < counted["dear"]["drafted_tokens"] <= len(PROMPTS) * (phases["dear"]["steps"] - 1)
    assert counted["dear"]["drafted_tokens"] < counted["two"]["drafted_tokens"]


def test_a_step_that_was_scheduled_ahead_verifies_the_same(runs: dict[str, dict[str, Any]]) -> None:
    counted, phases = runs["counted"], runs["capacity"]["phases"]
    for name in ("two", "free", "none"):
        for key in ("drafted_tokens", "accepted_drafts", "rounds_decode"):
            assert counted[name + AHEAD][key] == counted[name][key], (name, key)
        assert phases[name + AHEAD]["steps"] == phases[name]["steps"]


@pytest.mark.parametrize("name", ["dead", "deadahead"])
def test_a_dead_worker_costs_no_verified_draft_under_any_policy(name: str, runs: dict[str, dict[str, Any]]) -> None:
    one = runs["counted"][name]
    assert one["rounds_failed"] == runs["capacity"]["phases"][name]["steps"] == LENGTH
    assert (one["drafted_tokens"], one[DRAFTED]) == (0, 0)
    assert one["undrafted_none"] == len(PROMPTS) * LENGTH


def test_the_stats_say_what_was_verified_at_what_traffic_and_which_policy_is_in_force(
    runs: dict[str, dict[str, Any]],
) -> None:
    stats = runs["stats"]
    counters = stats["counters"]
    assert stats["drafted_tokens"] == sum(one["drafted_tokens"] for one in runs["counted"].values())
    assert 0 < stats["acceptance_rate"] < 1
    traffic = counters["bytes_sent"] + counters["bytes_received"]
    assert stats["bytes_per_accepted_token"] == pytest.approx(traffic / stats["accepted_drafts"], abs=0.1)
    assert stats["depth"]["policy"] == "off"
    assert stats["depth"]["source"].endswith("policy")
    assert counters["depth_file_changes"] == len(POLICIES)
    assert (stats["n_out_by_reqs"], "VLLM_DSPARK_DEPTH_FILE may switch" in stats["n_out_reason"]) == (None, True)


ADAPTIVE = """
import json
from types import SimpleNamespace
import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager, _assign_draft_token_budget
from farspark.engine.vllm.depths import price_remote_round, worth_verifying
from farspark.engine.vllm.remote import RemoteDrafts

def remote(depths):
    confidences = torch.tensor([[.9, .9, .9], [.8, .8, .8], [0., 0., 0.]])
    ok = torch.tensor([True, True, False])
    return RemoteDrafts(torch.zeros(3, 3, dtype=torch.int32), confidences, ok, torch.tensor(depths))

def manager(confidences, draft_ms):
    one = object.__new__(AdaptiveVerificationManager)
    one.num_speculative_steps, one.num_bonus_tokens, one._max_total_logits, one._stale_idx = 3, 1, 100, 0
    one.req_states = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        num_computed_tokens_np=np.full(3, 9),
        prefill_len=SimpleNamespace(np=np.full(3, 5)),
    )
    one._stale_confidences = [SimpleNamespace(np=confidences.numpy())]
    # By rows: three without drafts take 1 ms, the first draft 8 ms more, each further one next to nothing.
    one.cost_tables = np.zeros(9), np.array([1., 1., 1., 1.] + [9 + i / 100 for i in range(9)])
    if draft_ms is not None:
        price_remote_round(one, draft_ms)
    return one

found = {}
drafts = {name: [-1] * 3 for name in "abc"}
tokens = {name: 4 for name in "abc"}
for name, depths, draft_ms in (
    ("all", [3, 3, 0], 50.), ("cut", [1, 2, 0], 50.), ("none", [0, 0, 0], 50.), ("cheap draft", [3, 3, 0], 0.)
):
    confidences = worth_verifying(remote(depths))
    budget = manager(confidences, draft_ms).get_num_tokens(tokens, drafts) - 3
    capacities = torch.full((3,), 3, dtype=torch.int32)
    if budget:
        _assign_draft_token_budget(confidences, torch.arange(3), capacities, budget, 3)
    else:
        capacities.zero_()
    found[name] = capacities.tolist()
print("found " + json.dumps(found))
"""


def test_adaptive_verification_is_fed_with_the_workers_confidences_and_the_cost_of_a_remote_round() -> None:
    """vLLM allows it with full CUDA graphs only, so here its own budget and ranking run without an engine."""
    said = subprocess.run(
        [sys.executable, "-c", ADAPTIVE], env=environment(dict(os.environ)), capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr[-3000:]
    found = json.loads(said.stdout.rpartition("found ")[2])
    # The third request's round failed.
    assert found["all"] == [3, 3, 0]
    assert found["cut"] == [1, 2, 0]
    assert found["none"] == [0, 0, 0]
    # As profiled, a draft seems to be free, and verifying too dear.
    assert found["cheap draft"] == [0, 0, 0]
