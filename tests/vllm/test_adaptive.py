"""Adaptive verification in a real engine on the CPU: vLLM's own budget, ranking and ragged verification, fed by the worker.

The first run stands for itself: what vLLM decided is computed again from the confidences that it was given, and the text of a
dead worker, of which nothing is verified, is the target's own. The slow ones hold it against vLLM's own drafter.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.vllm import tiny_pair
from tests.vllm.budgets import index_of
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import TP2, identity_of, prompt, remote

from farspark.engine.capture import ENTRY, CapturedRound, CaptureHeader
from farspark.engine.replay import Replay
from farspark.engine.result import RoundOutcome
from farspark.engine.round import Phase
from farspark.engine.shape import ModelShape
from farspark.transport import parse_endpoint

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

N = 5
LENGTH = 24
KILLED_AT, BACK_AT = 3, 6
# Prefilled in one step, each of them.
PROMPTS = [prompt(seed, length) for seed, length in enumerate([16, 5, 24])]
SLOTS = 4
DRAFT_MS = 4.0
# A line: about what is likelier than one half is worth its half millisecond.
VERIFY_MS = [(1, 1.5), (2, 2.0), (24, 13.0), (64, 33.0)]
# By phase: the line in the depth file. Those that end so act as under asynchronous scheduling.
AHEAD = "ahead"
POLICIES = {
    "crowded": "off",  # somebody else has two of the worker's four slots; later ones find those that this one left
    "all": "off",
    "two": "fixed:2",
    "dear": "conf:1,1,9000,9000,9000,9000",
    "budget": "confb:1,1,9000,9000,9000,9000",
    "free": "confb:8,8,8,8,8,8",
    "twoahead": "fixed:2",
    "outage": "off",  # no worker from step KILLED_AT to BACK_AT
    "deadahead": "off",
    "dead": "off",
}
BASE: dict[str, Any] = {
    "engine": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": SLOTS,
        "block_size": 32,
        "dtype": "float32",
        "enable_prefix_caching": False,
    }
}
DRAFTED: dict[str, Any] = {
    "num_drafts": N,
    "speculative": {"enable_adaptive_verification": True},
    "record_drafts": True,
    "record_budgets": True,
    "costs": {"verify_ms": VERIFY_MS, "draft_ms": DRAFT_MS},
}
OUTAGE = {str(KILLED_AT): "kill", str(BACK_AT): "restart"}
PHASE: dict[str, Any] = {"prompts": PROMPTS, "max_tokens": LENGTH}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.make_tiny_pair(tmp_path_factory.mktemp("pair"), 0, agreeable=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def capacity(pair: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("capacity")
    worker = Worker(pair.drafter, pair.target, folder, dtype="float32", slots=SLOTS)
    worker.start()
    policy_file = folder / "policy"
    identity = identity_of(pair)
    neighbour = contextlib.ExitStack()

    def begin(name: str) -> str | None:
        neighbour.close()
        if name == "kill":
            worker.kill()
            return None
        if name == "crowded":
            neighbour.enter_context(two_slots(worker.endpoint, identity))
        elif name == "restart":
            worker.start()
            return "ready"
        elif name == "deadahead":
            worker.kill()
        (folder / "next").write_text(POLICIES[name], encoding="utf-8")
        os.replace(folder / "next", policy_file)
        return None

    settings = remote(
        "capacity",
        worker.endpoint,
        identity,
        folder / "stats.json",
        _DRAFT_MS=f"{DRAFT_MS:g}",
        _ROUND_MS="8,8,8,8,8,8",
        _TRIP="0",
    )
    phases = [
        PHASE
        | {
            "name": name,
            "pauses": {"0": name} | (OUTAGE if name == "outage" else {}),
            "as_if_scheduled_ahead": name.endswith(AHEAD),
        }
        for name in POLICIES
    ]
    # A draft's price stays what Farspark made it.
    costs = {"costs": DRAFTED["costs"] | {"draft_ms": None}}
    job = BASE | DRAFTED | costs | {"target": str(pair.target), "drafter": str(pair.drafter), "phases": phases}
    try:
        run = run_engine(job, settings | {"VLLM_DSPARK_DEPTH_FILE": str(policy_file)}, on_pause=begin)
    finally:
        neighbour.close()
        worker.kill()
    return run | {"stats": json.loads((folder / "stats.json").read_text(encoding="utf-8"))}


@contextlib.contextmanager
def two_slots(endpoint: str, identity: str) -> Any:
    """A session that holds two of the worker's slots."""
    shape = ModelShape(
        num_drafts=N,
        vocab_size=tiny_pair.VOCAB,
        hidden_size=tiny_pair.HIDDEN,
        taps=len(tiny_pair.TAPS),
        slots=2,
        context=64,
        ring=64,
        max_position=1024,
    )
    header = CaptureHeader(
        shape=shape, identity=bytes.fromhex(identity), markov_identity=bytes(32), policy="", engine="", farspark=""
    )
    entries = np.zeros(2, dtype=ENTRY)
    entries["slot"], entries["owner"], entries["valid_rows"], entries["sampled"] = [0, 1], [1, 2], 1, 1
    rows = memoryview(bytes(2 * shape.row_bytes))
    with Replay(header, [parse_endpoint(endpoint)]) as replay:
        assert replay.play(CapturedRound(1, Phase.PREFILL, RoundOutcome.OK, entries, rows))
        assert not replay.tally.failed_rounds, replay.why()
        yield


def phase(run: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = run["phases"][name]
    return found


def share(budgets: list[dict[str, Any]]) -> float:
    """Of what was scheduled, how much was admitted."""
    scheduled = sum(sum(one["scheduled"].values()) for one in budgets)
    return float(sum(one["budget"] for one in budgets) / scheduled)


def price(tokens: int) -> float:
    return float(np.interp(tokens, [at for at, _ in VERIFY_MS], [ms for _, ms in VERIFY_MS]))


def assert_budgets_follow_from_confidences(found: dict[str, Any]) -> None:
    """vLLM's rule, written anew: the budget with the most expected tokens per millisecond, by the confidences of the round
    before the newest; given to the likeliest drafts, by the newest."""
    by_step = {one["step"]: one["requests"] for one in found["confidences"]}
    for one in found["budgets"]:
        step, budget, scheduled, admitted = one["step"], one["budget"], one["scheduled"], one["admitted"]
        old, new = known(by_step, step - 1), known(by_step, step)
        chances = [
            chance for request, n in scheduled.items() for chance in np.cumprod(np.float64(old(request)))[:n].tolist()
        ]
        expected = np.cumsum([len(scheduled), *sorted(chances, reverse=True)])
        rest = one["tokens"] - budget
        rates = expected / [DRAFT_MS + price(rest + drafts) for drafts in range(len(expected))]
        assert budget == int(np.argmax(rates)), one
        assert sum(admitted.values()) == budget
        ranked = {request: np.cumprod(np.float32(new(request)))[:n] for request, n in scheduled.items()}
        taken = [chance for request, chances in ranked.items() for chance in chances[: admitted[request]]]
        left = [chance for request, chances in ranked.items() for chance in chances[admitted[request] :]]
        assert not taken or not left or min(taken) >= max(left) - 1e-6, one


def known(by_step: dict[int, dict[str, list[float]]], step: int) -> Any:
    """By request: its newest confidences of all rounds in front of `step`; 1 where no round had it."""
    seen: dict[str, list[float]] = {}
    for at in sorted(by_step):
        if at < step:
            seen |= by_step[at]
    return lambda request: seen.get(request, [1.0] * N)


def test_the_text_is_the_targets_own_under_every_policy(capacity: dict[str, Any]) -> None:
    alone = phase(capacity, "dead")
    assert alone["steps"] == LENGTH  # a token a step: nothing was drafted
    for name in POLICIES:
        assert phase(capacity, name)["tokens"] == alone["tokens"], name


def test_CONF_MATH_vllm_spends_its_budget_by_the_prefix_products_of_the_workers_confidences(
    capacity: dict[str, Any],
) -> None:
    for name in ("all", "two", "dear", "budget", "free"):
        assert_budgets_follow_from_confidences(phase(capacity, name))
    every = phase(capacity, "all")
    # It bought some and left some, in steps of one shape and another: rows of a step had different lengths.
    assert 0.3 < share(every["budgets"]) < 0.95
    assert any(len(set(one["admitted"].values())) > 1 for one in every["budgets"])
    assert every["steps"] < LENGTH / 2
    # The worker's numbers, not ones that vLLM made up.
    by_place = {(index_of(one["request"]), one["step"]): one for one in every["drafts"]}
    for one in every["confidences"]:
        for request, given in one["requests"].items():
            assert given == pytest.approx(by_place[request, one["step"]]["confidences"], abs=1e-4)


def test_the_depth_policy_acts_in_front_of_the_budget(capacity: dict[str, Any]) -> None:
    two, dear, budget, free = (phase(capacity, name)["budgets"] for name in ("two", "dear", "budget", "free"))
    assert {n for one in two for n in one["scheduled"].values()} == {2}
    assert {n for one in dear for n in one["scheduled"].values()} == {1}
    # One draft for each request of the round before, where they promise most.
    assert all(sum(one["scheduled"].values()) <= len(PROMPTS) for one in budget)
    assert any(max(one["scheduled"].values()) > 1 for one in budget)
    assert {n for one in free for n in one["scheduled"].values()} == {N}
    # Past a request's depth the budget sees no chance.
    for one in phase(capacity, "two")["confidences"]:
        assert all(given[2:] == [0.0] * (N - 2) for given in one["requests"].values())


def test_a_step_that_was_scheduled_ahead_is_given_the_same_budget(capacity: dict[str, Any]) -> None:
    assert phase(capacity, "twoahead")["budgets"] == phase(capacity, "two")["budgets"] != []


def test_FAIL_LIFETIME_an_outage_is_verified_up_to_its_last_drafts_and_from_its_first_again(
    capacity: dict[str, Any],
) -> None:
    budgets = phase(capacity, "outage")["budgets"]
    assert_budgets_follow_from_confidences(phase(capacity, "outage"))
    before = [one for one in budgets if one["step"] <= KILLED_AT]
    assert before == phase(capacity, "all")["budgets"][:KILLED_AT]
    # The step of the return drafts; the budget of the next one goes by a failed round, that of the one after by drafts again.
    first, *later = budgets[len(before) :]
    assert (first["step"], set(first["scheduled"].values()), first["budget"]) == (BACK_AT + 1, {N}, 0)
    assert any(one["budget"] for one in later)


@pytest.mark.parametrize("name", ["dead", "deadahead"])
def test_of_a_dead_worker_nothing_is_scheduled_and_no_budget_is_spent(name: str, capacity: dict[str, Any]) -> None:
    found = phase(capacity, name)
    assert found["budgets"] == []
    assert len(found["confidences"]) == LENGTH
    assert all(given == [0.0] * N for one in found["confidences"] for given in one["requests"].values())


def test_PAD_SLOT0_a_request_that_the_worker_failed_is_not_scheduled_the_others_are(capacity: dict[str, Any]) -> None:
    found = phase(capacity, "crowded")
    failed = {index_of(one["request"]) for one in found["drafts"] if not one["ok"]}
    served = {index_of(one["request"]) for one in found["drafts"] if one["ok"]}
    assert len(failed - served) == 1
    for one in found["budgets"]:
        for request in failed - served:
            assert one["scheduled"].get(request, 0) == one["admitted"].get(request, 0) == 0
    assert sum(one["admitted"][request] for one in found["budgets"] for request in served if request in one["admitted"])
    assert_budgets_follow_from_confidences(found)


def test_a_draft_costs_what_the_settings_say_not_what_was_measured_without_a_worker(capacity: dict[str, Any]) -> None:
    measured = capacity["facts"]["measured_costs"]
    assert set(measured["draft_ms"]) == {DRAFT_MS}
    # The target's steps were measured; more tokens never cost less.
    assert measured["verify_ms"] == sorted(measured["verify_ms"])
    assert measured["verify_ms"][24] > 0


# Against vLLM's own drafter. Drafts and confidences of the two differ by the rounding of the rows on the wire.


def drafted_job(pair: tiny_pair.TinyPair, *phases: dict[str, Any]) -> dict[str, Any]:
    return BASE | DRAFTED | {"target": str(pair.target), "drafter": str(pair.drafter), "phases": list(phases)}


def killing(worker: Worker) -> Callable[[str], None]:
    return lambda _: worker.kill()


def given_by(run: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """What the worker gave in a phase, by "index position"."""
    found = phase(run, name)
    by_step = {one["step"]: one["requests"] for one in found["confidences"]}
    return {
        f"{index_of(one['request'])} {one['position']}": {
            "drafts": one["drafts"],
            "confidences": by_step[one["step"]][index_of(one["request"])],
        }
        for one in found["drafts"]
    }


@pytest.fixture(scope="module")
def local(pair: tiny_pair.TinyPair, capacity: dict[str, Any]) -> dict[str, Any]:
    """vLLM's own drafter, without Farspark: as it is, and with what the worker gave in place of its own."""
    given = PHASE | {"name": "given", "given": given_by(capacity, "all")}
    return run_engine(drafted_job(pair, PHASE | {"name": "all"}, given))


@pytest.fixture(scope="module")
def kept(pair: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By policy: a run that keeps the local drafter, with a worker that dies in its second phase."""
    runs = {}
    for name, policy, more in (
        ("shadow", "shadow", {}),
        ("shadow-remote", "shadow", {"_SHADOW_USE": "remote"}),
        ("resilience", "resilience", {}),
    ):
        folder = tmp_path_factory.mktemp(name)
        worker = Worker(pair.drafter, pair.target, folder, dtype="float32", slots=SLOTS)
        worker.start()
        settings = remote(policy, worker.endpoint, identity_of(pair), folder / "stats.json", _TRIP="0", **more)
        killed = PHASE | {"name": "killed", "pauses": {str(KILLED_AT): "kill"}}
        try:
            job = drafted_job(pair, PHASE | {"name": "all"}, killed)
            runs[name] = run_engine(job, settings, on_pause=killing(worker))
        finally:
            worker.kill()
    return runs


@pytest.mark.slow
def test_without_speculation_the_text_is_the_same(pair: tiny_pair.TinyPair, capacity: dict[str, Any]) -> None:
    alone = run_engine(BASE | {"target": str(pair.target), "phases": [PHASE | {"name": "all"}]})
    assert phase(alone, "all")["tokens"] == phase(capacity, "dead")["tokens"]


@pytest.mark.slow
def test_equal_drafts_and_confidences_are_verified_as_those_of_vllms_own_drafter(
    capacity: dict[str, Any], local: dict[str, Any]
) -> None:
    assert local["facts"]["speculator"] == "DSparkSpeculator"
    ours, theirs = phase(capacity, "all"), phase(local, "given")
    assert ours["budgets"] == theirs["budgets"] != []
    assert (ours["tokens"], ours["steps"]) == (theirs["tokens"], theirs["steps"])


@pytest.mark.slow
def test_the_workers_own_numbers_buy_what_vllms_own_would(capacity: dict[str, Any], local: dict[str, Any]) -> None:
    ours, theirs = phase(capacity, "all"), phase(local, "all")
    assert ours["tokens"] == theirs["tokens"]
    assert abs(ours["steps"] - theirs["steps"]) <= 1
    assert share(ours["budgets"]) == pytest.approx(share(theirs["budgets"]), abs=0.05)
    assert_budgets_follow_from_confidences(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all", "killed"])
def test_shadow_changes_no_budget(name: str, kept: dict[str, Any], local: dict[str, Any]) -> None:
    assert phase(kept["shadow"], name)["budgets"] == phase(local, "all")["budgets"] != []
    assert phase(kept["shadow"], name)["tokens"] == phase(local, "all")["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["shadow-remote", "resilience"])
def test_remote_drafts_beside_a_local_drafter_are_verified_as_in_capacity(
    policy: str, kept: dict[str, Any], capacity: dict[str, Any]
) -> None:
    assert phase(kept[policy], "all")["budgets"] == phase(capacity, "all")["budgets"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["shadow-remote", "resilience"])
def test_where_the_worker_dies_the_local_drafters_confidences_are_what_the_budget_goes_by(
    policy: str, kept: dict[str, Any], local: dict[str, Any]
) -> None:
    found = phase(kept[policy], "killed")
    assert found["tokens"] == phase(local, "all")["tokens"]
    assert_budgets_follow_from_confidences(found)
    later = [one for one in found["budgets"] if one["step"] > KILLED_AT + 2]
    assert any(one["budget"] for one in later)
    by_place = {(one["request"], one["position"]): one for one in found["drafts"]}
    assert not any(one["ok"] for one in by_place.values() if one["step"] > KILLED_AT)


@pytest.mark.slow
def test_TP_AGREE_two_ranks_buy_the_same_drafts_through_an_outage(
    pair: tiny_pair.TinyPair, capacity: dict[str, Any], tmp_path: Path
) -> None:
    worker = Worker(pair.drafter, pair.target, tmp_path, dtype="float32", slots=SLOTS)
    worker.start()
    job = drafted_job(pair, PHASE | {"name": "outage", "pauses": OUTAGE})
    job |= {"record_drafts": False, "record_budgets": False, "record_ranks_budgets": True}
    job["engine"] = BASE["engine"] | {
        "tensor_parallel_size": 2,
        "worker_extension_cls": "tests.vllm.budgets.BudgetExtension",
    }

    def act(name: str) -> None:
        if name == "kill":
            worker.kill()
        else:
            worker.start()

    try:
        settings = remote("capacity", worker.endpoint, identity_of(pair), tmp_path / "stats.json", _TRIP="0")
        run = run_engine(job, TP2 | settings, on_pause=act)
    finally:
        worker.kill()
    assert phase(run, "outage")["tokens"] == phase(capacity, "dead")["tokens"]
    first, second = run["ranks_budgets"]
    assert first == second
    assert 0.3 < share(first) < 0.95
