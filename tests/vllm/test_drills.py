"""Failure drills on real vLLM with a real worker, under every policy: stopped, killed and restarted, replaced by another drafter,
while several requests run, join and are aborted.

One engine to a policy, its drills one after another. The models are float32, so there are no ties: the text must be the
target's own, token for token. What drafts must be is taken from an undisturbed engine that refuses every draft, and so drafts
at every position.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm import tiny_pair
from tests.vllm.processes import Worker, run_engine

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

N = 5
SLOTS = 6
TIMEOUT_S = 1.5
CONNECT_TIMEOUT_S = 1.0
TRIP, COOLDOWN = 2, 2
# The worker's margins, some of them above 10, are the same to 0.0001 for the same rows and anchors, whatever happened before. A
# window that was sent again one position off changes half of them by more than 0.05.
SAME_ROWS = 0.005

POLICIES = {
    "shadow": {"_POLICY": "shadow"},
    "shadow_remote": {"_POLICY": "shadow", "_SHADOW_USE": "remote"},
    "resilience": {"_POLICY": "resilience"},
    "capacity": {"_POLICY": "capacity"},
}
# One OpenMP thread: with more, a matrix product waits for whoever else has the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
TWO_RANKS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "OMP_NUM_THREADS": "1",
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": SLOTS,
    # Less than the long prompt, which is prefilled in chunks, also while the worker is away.
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": False,
}


def prompts(seed: int) -> list[list[int]]:
    """Of different lengths; the first four run from the start, the others join later."""
    rng = random.Random(seed)
    return [[rng.randrange(500) for _ in range(length)] for length in (33, 5, 150, 1, 24, 12)]


def drill(
    name: str, seed: int, *, joins: Mapping[str, int], aborts: Mapping[str, int], **pauses: int
) -> dict[str, Any]:
    return {
        "name": name,
        "prompts": prompts(seed),
        "max_tokens": [72, 60, 56, 12, 40, 9],
        "joins": {"4": joins["4"], "5": joins["5"]},
        "aborts": {str(step): int(index) for index, step in aborts.items()},
        "pauses": {str(step): name for name, step in pauses.items()},
    }


# By the step ahead of which it happens. Request 4 joins and request 1 is aborted during the outage, request 5 joins at its end.
STALLED = drill("stalled", 1, joins={"4": 4, "5": 5}, aborts={"1": 5}, stop=4, resume_at_once=5)
# Two timeouts open the breaker, two rounds cool, the probe times out: three silent steps, the connection is given up.
STOPPED = drill("stopped", 2, joins={"4": 5, "5": 10}, aborts={"1": 7}, stop=3, resume=10)
KILLED = drill("killed", 3, joins={"4": 5, "5": 8}, aborts={"1": 6}, kill=4, start=9)
REPLACED = drill("replaced", 4, joins={"4": 5, "5": 9}, aborts={"1": 8}, kill=3, start_another=7)
DRILLS = {phase["name"]: phase for phase in (STALLED, STOPPED, KILLED, REPLACED)}
# Where remote drafts begin and end, and where they come back: with the first round that may use the network.
FIRST_FAILED = {"stalled": 4, "stopped": 3, "killed": 4, "replaced": 3}
# In "stopped" that is the probe at the end of the second cool-down, twice as long, two of whose rounds had no connection.
RESUMES = {"stalled": 5, "stopped": 10 + 2 * COOLDOWN - 2, "killed": 9}
# What the rounds of each drill must be counted as; whatever else has this prefix must not have moved.
FALLBACKS = {
    "stalled": {"timeout": 1},
    "stopped": {"timeout": 3, "cooldown": 3 * COOLDOWN - 2, "not_ready": 2},
    "killed": {"transport_error": 1, "not_ready": 4},
    "replaced": {"transport_error": 1, "not_ready": 3},  # and disabled, to the end
}


@dataclass(frozen=True, slots=True)
class Checkpoints:
    pair: tiny_pair.TinyPair
    identity: str
    another: tiny_pair.TinyPair  # the same target, a drafter with other weights
    another_identity: str


def identity_of(pair: tiny_pair.TinyPair) -> str:
    program = "import sys; from farspark.cli.main import main; sys.exit(main())"
    arguments = [sys.executable, "-c", program, "identity", str(pair.drafter), "--target", str(pair.target)]
    said = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    found = re.search(r"[0-9a-f]{64}", said)
    assert found is not None
    return found[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder = tmp_path_factory.mktemp("pairs")
    pair = tiny_pair.make_tiny_pair(folder / "one", 0, agreeable=True, dtype=torch.float32)
    other = tiny_pair.make_tiny_pair(folder / "other", 7, agreeable=True, dtype=torch.float32)
    return Checkpoints(pair, identity_of(pair), other, identity_of(other))


def job(
    checkpoints: Checkpoints, phases: Iterable[dict[str, Any]], *, drafts: bool = True, **more: Any
) -> dict[str, Any]:
    engine = ENGINE | more.pop("engine", {})
    return {
        "target": str(checkpoints.pair.target),
        "drafter": str(checkpoints.pair.drafter) if drafts else None,
        "num_drafts": N,
        "record_drafts": drafts and engine.get("tensor_parallel_size", 1) == 1,
        "engine": engine,
        "phases": list(phases),
    } | more


def settings_for(policy: str, worker: Worker, identity: str, stats: Path) -> dict[str, str]:
    settings = {
        "": worker.endpoint,
        "_IDENTITY": identity,
        "_STATS_FILE": str(stats),
        "_TIMEOUT_MS": f"{1000 * TIMEOUT_S:g}",
        "_CONNECT_TIMEOUT_MS": f"{1000 * CONNECT_TIMEOUT_S:g}",
        "_BACKOFF_MS": "50",
        "_BACKOFF_MAX_MS": "200",
        "_TRIP": str(TRIP),
        "_COOLDOWN": str(COOLDOWN),
        "_WANT_MARGIN": "1",
    }
    return {f"VLLM_DSPARK_REMOTE{suffix}": value for suffix, value in (settings | POLICIES[policy]).items()}


def make_worker(pair: tiny_pair.TinyPair, folder: Path) -> Worker:
    return Worker(pair.drafter, pair.target, folder, dtype="float32", slots=SLOTS)


class Drillmaster:
    """What happens to the worker at the pauses, and what the engine then waits for."""

    def __init__(self, worker: Worker, another: Worker) -> None:
        self._worker = worker
        self._another = another

    def __call__(self, name: str) -> str | None:
        match name:
            case "stop":
                self._worker.signal(signal.SIGSTOP)
            case "resume_at_once":
                self._worker.signal(signal.SIGCONT)
            case "resume":
                self._worker.signal(signal.SIGCONT)
                return "ready"
            case "kill":
                self._worker.kill()
            case "start":
                self._worker.start()
                return "ready"
            case "start_another":
                self._another.start_at(self._worker.endpoint)
                return "disabled"
        return None


def calm() -> list[dict[str, Any]]:
    return [phase | {"pauses": {}, "aborts": {}} for phase in DRILLS.values()]


@pytest.fixture(scope="module")
def alone(checkpoints: Checkpoints) -> dict[str, Any]:
    """The target without speculation; nobody is aborted."""
    return run_engine(job(checkpoints, calm(), drafts=False), ONE_THREAD)


@pytest.fixture(scope="module")
def undisturbed(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[tuple[str, int], dict[str, Any]]]:
    """What both drafters say at every position while nothing happens to the worker, by drill, request and position."""
    folder = tmp_path_factory.mktemp("undisturbed")
    worker = make_worker(checkpoints.pair, folder)
    worker.start()
    try:
        settings = settings_for("shadow", worker, checkpoints.identity, folder / "stats.json")
        run = run_engine(job(checkpoints, calm(), spoil_drafts=True), ONE_THREAD | settings)
    finally:
        worker.kill()
    assert all(one["ok"] for phase in run["phases"].values() for one in phase["drafts"])
    return {
        drill: {(one["request"], one["position"]): one for one in phase["drafts"]}
        for drill, phase in run["phases"].items()
    }


@pytest.fixture(scope="module", params=POLICIES)
def drilled(
    request: pytest.FixtureRequest, checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The drills under one policy."""
    folder = tmp_path_factory.mktemp(request.param)
    worker = make_worker(checkpoints.pair, folder)
    (folder / "another").mkdir()
    another = make_worker(checkpoints.another, folder / "another")
    worker.start()
    try:
        settings = settings_for(request.param, worker, checkpoints.identity, folder / "stats.json")
        run = run_engine(
            job(checkpoints, DRILLS.values()), ONE_THREAD | settings, on_pause=Drillmaster(worker, another)
        )
    finally:
        worker.kill()
        another.kill()
    return run | {"policy": request.param}


def assert_text_is_the_targets(run: Mapping[str, Any], alone: Mapping[str, Any], phase: dict[str, Any]) -> None:
    expected = alone["phases"][phase["name"]]["tokens"]
    found = run["phases"][phase["name"]]["tokens"]
    aborted = {str(index) for index in phase["aborts"].values()}
    for name in expected.keys() - aborted:
        assert found[name] == expected[name], name
    for name in aborted:
        # It has the beginning of its text; what it is not given is the end.
        assert 0 < len(found[name]) < len(expected[name])
        assert found[name] == expected[name][: len(found[name])], name


def counted(run: Mapping[str, Any], drill: str) -> dict[str, int]:
    """By how much each counter moved in this drill."""
    names = list(DRILLS)
    at = names.index(drill)
    before = run["phases"][names[at - 1]]["counters"] if at else {}
    return {name: value - before.get(name, 0) for name, value in run["phases"][drill]["counters"].items()}


@pytest.mark.parametrize("phase", DRILLS.values(), ids=DRILLS)
def test_fail_lifetime_text_is_the_targets_own(
    drilled: dict[str, Any], alone: dict[str, Any], phase: dict[str, Any]
) -> None:
    assert_text_is_the_targets(drilled, alone, phase)


@pytest.mark.parametrize("drill", DRILLS)
def test_metrics_every_failed_round_has_its_reason_counted(drilled: dict[str, Any], drill: str) -> None:
    counters = counted(drilled, drill)
    steps = drilled["phases"][drill]["steps"]
    fallbacks = {
        name.removeprefix("fallback_"): n for name, n in counters.items() if name.startswith("fallback_") and n
    }
    expected = dict(FALLBACKS[drill])
    if drill == "replaced":
        assert fallbacks["disabled"] > 5
        expected["disabled"] = steps - FIRST_FAILED[drill] - sum(expected.values())
    assert fallbacks == expected
    assert counters["rounds_failed"] == sum(expected.values())
    assert counters.get("rounds_some_failed", 0) == 0
    assert counters["rounds_ok"] + counters["rounds_failed"] == steps
    fell_back = counters["rounds_failed"] if drilled["policy"] == "resilience" else 0
    assert counters.get("local_fallback_rounds", 0) == fell_back
    # The first HELLO was at the engine's start.
    assert counters["hellos"] == {"stalled": 1, "stopped": 1, "killed": 1, "replaced": 0}[drill]
    assert counters.get("disconnects", 0) == (0 if drill == "stalled" else 1)
    # The probe that timed out opened the breaker a second time.
    assert counters.get("breaker_trips", 0) == (2 if drill == "stopped" else 0)
    assert counters.get("breaker_recoveries", 0) == (1 if drill == "stopped" else 0)
    assert counters.get("resync_rounds", 0) >= (0 if drill == "replaced" else 1)
    for never in ("internal_error", "stale_generation_new_sessions", "req_status_partial_window", "req_status_gap"):
        assert counters.get(never, 0) == 0, never
    if drill == "stalled":
        assert counters["late_replies"] == 1


@pytest.mark.parametrize("drill", DRILLS)
def test_fail_lifetime_drafting_resumes_with_the_round_that_may_use_the_network(
    drilled: dict[str, Any], drill: str
) -> None:
    drafts = drilled["phases"][drill]["drafts"]
    resumes = RESUMES.get(drill, drilled["phases"][drill]["steps"])
    ok = {
        step: {one["ok"] for one in drafts if one["step"] == step} for step in range(drilled["phases"][drill]["steps"])
    }
    expected = {step: step < FIRST_FAILED[drill] or step >= resumes for step in ok}
    assert {step: found == {expected[step]} for step, found in ok.items() if found} == dict.fromkeys(
        (step for step, found in ok.items() if found), True
    )
    if drill in RESUMES:
        # Those that were there, and those that came while the worker was away.
        assert {"0", "2", "4"} <= {one["request"].rsplit("-", 1)[1] for one in drafts if one["step"] == resumes}


def is_within_text(one: Mapping[str, Any]) -> bool:
    """Behind the last token of a text that ended at its limit no draft is wanted, and the reference has none."""
    phase, index = one["request"].rsplit("-", 1)
    return bool(one["position"] < len(DRILLS[phase]["prompts"][int(index)]) + DRILLS[phase]["max_tokens"][int(index)])


@pytest.mark.parametrize("drill", DRILLS)
def test_resync_the_workers_drafts_are_exact_at_once(
    drilled: dict[str, Any], undisturbed: dict[str, Any], drill: str
) -> None:
    answered = [one for one in drilled["phases"][drill]["drafts"] if one["ok"] and is_within_text(one)]
    compared = [
        (undisturbed[drill][place], one)
        for one in answered
        if (place := (one["request"], one["position"])) in undisturbed[drill]
    ]
    # What the reference lacks are positions that followed an accepted token 0.
    assert len(compared) >= 0.97 * len(answered)
    for expected, one in compared:
        assert one["remote"] == expected["remote"], one
        assert one["margins"] == pytest.approx(expected["margins"], abs=SAME_ROWS), one
    if drill in RESUMES:
        assert len([one for _, one in compared if one["step"] == RESUMES[drill]]) >= 3


@pytest.mark.parametrize("drill", DRILLS)
def test_what_is_verified_is_what_the_policy_says(
    drilled: dict[str, Any], undisturbed: dict[str, Any], drill: str
) -> None:
    policy = drilled["policy"]
    stood_in, others = 0, []
    for one in drilled["phases"][drill]["drafts"]:
        if one["ok"] and policy != "shadow":
            assert one["drafts"] == one["remote"]
        elif policy == "capacity":
            assert one["drafts"] == [0] * N, one
            assert one["confidences"] == [0.0] * N
        elif (place := (one["request"], one["position"])) in undisturbed[drill]:
            stood_in += 1
            if one["drafts"] != undisturbed[drill][place]["drafts"]:
                others.append((one, undisturbed[drill][place]))
    # Batches of other shapes round differently.
    assert len(others) <= 0.03 * stood_in, others
    assert stood_in >= (0 if policy == "capacity" else 4)


@pytest.mark.parametrize("drill", DRILLS)
def test_half_open_nothing_waits_longer_than_the_timeout(drilled: dict[str, Any], drill: str) -> None:
    step_s = drilled["phases"][drill]["step_s"]
    waited = [seconds for seconds in step_s if seconds >= TIMEOUT_S]
    # The steps that waited are those that were counted as timeouts; the others did not wait at all.
    assert len(waited) == FALLBACKS[drill].get("timeout", 0)
    assert max(step_s) < TIMEOUT_S + 1.0


def test_another_identity_disables_the_remote_and_logs_both_digests(
    drilled: dict[str, Any], checkpoints: Checkpoints
) -> None:
    [line] = [line for line in drilled["log"].splitlines() if "disabled for this engine run" in line]
    assert "IDENTITY" in line
    assert checkpoints.identity in line
    assert checkpoints.another_identity in line


def test_changes_of_state_are_logged_once(drilled: dict[str, Any]) -> None:
    log = drilled["log"]
    assert log.count("remote drafter chosen") == 1
    assert log.count("worker ready") == 3
    assert log.count("given up") == 3
    assert log.count("breaker open") == 2
    assert log.count("breaker closed") == 1
    assert "farspark: internal error" not in log


def test_tp_agree_two_ranks_keep_the_text_when_the_worker_dies_under_load(
    checkpoints: Checkpoints, alone: dict[str, Any], tmp_path: Path
) -> None:
    # It dies in the middle of whatever the engine does, and is back before the second phase.
    killed = KILLED | {"pauses": {"3": "kill_soon"}}
    after = STALLED | {"pauses": {"0": "wait_for_worker"}}
    worker = make_worker(checkpoints.pair, tmp_path)
    worker.start()

    def kill_and_restart() -> None:
        time.sleep(0.2)
        worker.kill()
        worker.start()

    restart = threading.Thread(target=kill_and_restart)

    def on_pause(name: str) -> None:
        if name == "kill_soon":
            restart.start()
        else:
            restart.join()
            time.sleep(1.0)  # several back-offs of the connector thread

    settings = TWO_RANKS | settings_for("resilience", worker, checkpoints.identity, tmp_path / "stats.json")
    try:
        run = run_engine(
            job(checkpoints, [killed, after], engine={"tensor_parallel_size": 2}), settings, on_pause=on_pause
        )
    finally:
        if restart.ident is not None:
            restart.join()
        worker.kill()
    assert_text_is_the_targets(run, alone, killed)
    assert_text_is_the_targets(run, alone, after)
    stats = json.loads((tmp_path / "stats.json").read_text())
    counters = stats["counters"]
    assert counters["hellos"] == 2  # both from rank 0: the other rank never connects
    assert counters["rounds_failed"] == counters["local_fallback_rounds"] >= 1
    fallbacks = {name.removeprefix("fallback_") for name in counters if name.startswith("fallback_")}
    assert fallbacks <= {"transport_error", "timeout", "not_ready"}
    # With this many ranks the engine goes on through a pause: few rounds before the worker died, the second phase behind it.
    assert counters["rounds_ok"] >= 10
    assert stats["worker"]["state"] == "ready"
    assert "internal_error" not in counters
    assert run["log"].count("remote drafter chosen") == 2
