"""The depth policy in a real engine on the CPU: the text stays, fewer drafts are verified, and a dead worker costs none."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from tests.vllm import tiny_pair
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
