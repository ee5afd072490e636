"""Real vLLM in pipeline stages on the CPU, DSpark on, with the token transport: text and draft ids are those of one stage.

Every engine is a set of processes of its own; one run serves many tests. Float32, so that no forward shape turns a choice.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import tiny_pair
from tests.vllm.pp_run import ENDS
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import (
    ABORTED,
    CACHED_AGAIN,
    CACHED_FIRST,
    CHUNKED,
    CONCURRENT,
    identity_of,
    prompt,
    remote,
)

from farspark.engine.vllm.pp.faults import EXIT_STATUS

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

N = 5
MAX_LEN = 288
OVERFLOW: dict[str, Any] = {
    "name": "overflow",
    # Whole blocks are accepted as a rule, so that nearly every limit falls into one; the last runs into the model's length.
    "prompts": [prompt(90 + i, 6 + 5 * i) for i in range(8)] + [prompt(99, MAX_LEN - 20)],
    "max_tokens": [1, 2, 3, 4, 7, 11, 64, 90, 50],
    "joins": {"6": 4, "7": 2},
}
PHASES = [CONCURRENT, CHUNKED, ABORTED, CACHED_FIRST, CACHED_AGAIN, OVERFLOW]
TRANSPORT = {"VLLM_DSPARK_PP_TRANSPORT": "1"}
ON_CPU = {"VLLM_DSPARK_PP_CPU": "1", "VLLM_DSPARK_PP_CAP": "1", "VLLM_DSPARK_PP_EAGER_DRAFT": "1"}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.make_tiny_pair(tmp_path_factory.mktemp("pair"), 0, agreeable=True)


Engine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def engine(pair: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Runs an engine of so many stages, `settings` in its environment."""

    def run(
        stages: int,
        settings: dict[str, str] | None = None,
        *,
        ahead: bool = False,
        plan: dict[str, Any] | None = None,
        phases: list[dict[str, Any]] = PHASES,
        ends_with: dict[str, Any] | None = None,
        on_pause: Callable[[str], str | None] | None = None,
        timeout_s: float = 420.0,
    ) -> dict[str, Any]:
        file = tmp_path_factory.mktemp("plan") / "plan.json"
        file.write_text(json.dumps(plan or {}))
        return run_engine(
            job(pair, stages, ahead, phases) | {"ends_with": ends_with},
            environment_of(stages) | {"PP_TEST_PLAN": str(file)} | (settings or {}),
            module="tests.vllm.pp_run",
            on_pause=on_pause,
            timeout_s=timeout_s,
        )

    return run


def job(pair: tiny_pair.TinyPair, stages: int, ahead: bool, phases: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "target": str(pair.target),
        "drafter": str(pair.drafter),
        "num_drafts": N,
        "schedules_ahead": ahead,
        "asks_for_structure": stages > 1 and not ahead,
        "engine": {
            "pipeline_parallel_size": stages,
            "worker_extension_cls": "tests.vllm.pp_extension.PpExtension",
            "dtype": "float32",
            "max_model_len": MAX_LEN,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": True,
            "block_size": 32,
        },
        "phases": phases,
    }


def environment_of(stages: int) -> dict[str, str]:
    return {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[stage % 2] for stage in range(stages)) if stages > 1 else "0-1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def alone(engine: Engine) -> dict[str, Any]:
    """One stage, stock vLLM, its local drafter."""
    return engine(1)


def drafts_of(run: dict[str, Any]) -> dict[tuple[str, int], list[int]]:
    return {(request, position): drafts for request, position, drafts in run["drafts"]}


def assert_same_text(run: dict[str, Any], alone: dict[str, Any], *, finds_as_much: bool = True) -> int:
    """The tokens compared. Aborts fall at other lengths where steps overlap otherwise: there, the shorter is the beginning.

    `finds_as_much`: in the prefix cache.
    """
    compared = 0
    for name, phase in run["phases"].items():
        expected = alone["phases"][name]["tokens"]
        if name != "aborted":
            assert phase["tokens"] == expected, name
            assert not finds_as_much or phase["cached"] == alone["phases"][name]["cached"]
        for request, tokens in phase["tokens"].items():
            known = expected.get(request, tokens)
            length = min(len(tokens), len(known))
            assert tokens[:length] == known[:length], (name, request)
            compared += length
    assert run["left"] == [0, 0]
    return compared


def assert_equals_one_stage(run: dict[str, Any], alone: dict[str, Any], stages: int) -> None:
    assert assert_same_text(run, alone) >= 500
    mine, theirs = drafts_of(run), drafts_of(alone)
    both = mine.keys() & theirs.keys()
    assert len(both) >= 0.9 * len(theirs)
    assert {at: mine[at] for at in both} == {at: theirs[at] for at in both}
    assert run["log"].count("farspark: token transport on: PP stage") == stages
    assert [history.split("\n")[0] for history in run["histories"]] == ["TokenHandler"] * stages
    assert all("posted" in history or "consumed" in history for history in run["histories"])


def signal_every_process() -> int:
    """SIGUSR1 to every process of the engine that this process has started, in a session of its own."""
    parents, sessions = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, parent, _, its_session = file.read_text().rpartition(")")[2].split()[:4]
            parents[int(file.parent.name)], sessions[int(file.parent.name)] = int(parent), int(its_session)
    leaders = {pid for pid, above in parents.items() if above == os.getpid() and sessions[pid] == pid}
    signalled = 0
    for pid in [pid for pid, session in sessions.items() if session in leaders]:
        # One that ends while it is looked at is no process of the engine, which is in the middle of its work.
        with contextlib.suppress(OSError):
            command, environment = (Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            # Other tests may have left something; and Python's own tracker of shared memory is no process of the
            # engine, and would die of it.
            if b"PP_TEST_PLAN=" not in environment or b"resource_tracker" in command:
                continue
            os.kill(pid, signal.SIGUSR1)
            signalled += 1
            # One after the other, since all write to the same pipe.
            time.sleep(0.5)
    return signalled


@pytest.fixture(scope="module")
def synchronous(engine: Engine) -> dict[str, Any]:
    """Two stages without asynchronous scheduling; SIGUSR1 in the middle, a stale header at the end."""
    signalled = []

    def on_pause(_: str) -> None:
        signalled.append(signal_every_process())
        time.sleep(1.0)

    phases = [CONCURRENT | {"pauses": {"12": "signal"}}, *PHASES[1:]]
    run = engine(2, TRANSPORT, phases=phases, ends_with=CONCURRENT, on_pause=on_pause)
    log, _, end = run["log"].partition(ENDS)
    return run | {"log": log, "end": end, "signalled": signalled}


def test_two_stages_without_asynchronous_scheduling_equal_one(
    synchronous: dict[str, Any], alone: dict[str, Any]
) -> None:
    assert (synchronous["scheduler"], synchronous["batches_in_flight"]) == ("Scheduler", 2)
    assert_equals_one_stage(synchronous, alone, 2)


def test_structured_output_without_asynchronous_scheduling_is_refused(synchronous: dict[str, Any]) -> None:
    assert "needs asynchronous scheduling" in synchronous["refused"]


def test_every_process_says_where_it_is_when_it_is_asked(synchronous: dict[str, Any]) -> None:
    log = synchronous["log"]
    # In the middle of the work all three processes said where they were, and both stages what they had sent and received.
    assert synchronous["signalled"] == [3]
    assert log.count("in run_phase") == 1
    assert log.count("Current thread 0x") == 3, [line for line in log.splitlines() if "thread 0x" in line.lower()]
    assert log.count("steps with tokens, newest last") == 2
    assert re.search(r"step \d+ receive mask [0-9a-f]{8} num_reqs \d: consumed", log)
    assert re.search(r"step \d+ send mask [0-9a-f]{8} num_reqs \d tokens \[.*\] drafts \[.*\]: posted", log)


def test_a_stale_header_ends_the_engine_with_one_line_that_says_what_and_where(synchronous: dict[str, Any]) -> None:
    at = synchronous["stale_at"]
    assert re.search(
        rf"farspark: PP stage 0 of 2, TP rank 0: step {at} from the last stage \(rank 1\): sequence expected {at}, got {at - 1}; "
        rf"process \d+ ends with status {EXIT_STATUS}",
        synchronous["end"],
    )
    # vLLM names the status only where it sees the death before the other stage's error; the process has it always.
    assert synchronous["stages_ended_with"][0] == EXIT_STATUS
    assert synchronous["ended_by"] != "nothing"


def test_two_stages_scheduled_ahead_over_the_host_equal_one(engine: Engine, alone: dict[str, Any]) -> None:
    run = engine(2, ON_CPU, ahead=True)
    assert (run["scheduler"], run["batches_in_flight"]) == ("AsyncScheduler", 2)
    assert_equals_one_stage(run, alone, 2)


@pytest.mark.slow
def test_two_stages_scheduled_ahead_without_the_cap_equal_one(engine: Engine, alone: dict[str, Any]) -> None:
    run = engine(2, TRANSPORT, ahead=True)
    assert (run["scheduler"], run["batches_in_flight"]) == ("AsyncScheduler", 3)
    assert_equals_one_stage(run, alone, 2)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_four_stages_equal_one(engine: Engine, alone: dict[str, Any], ahead: bool) -> None:
    run = engine(4, TRANSPORT | ON_CPU, ahead=ahead)
    assert run["batches_in_flight"] == 4
    assert_equals_one_stage(run, alone, 4)


def continuation_plan(alone: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Drafts from the target's own text, wrong at random places."""
    tokens = {
        f"{phase['name']}-{index}": phase["prompts"][index]
        + alone["phases"][phase["name"]]["tokens"].get(str(index), [])
        for phase in PHASES
        for index in range(len(phase["prompts"]))
    }
    return {"tokens": tokens, "keep": 0.7} | more


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_partly_right_drafts_are_verified_as_they_are(engine: Engine, alone: dict[str, Any], ahead: bool) -> None:
    run = engine(2, TRANSPORT, ahead=ahead, plan=continuation_plan(alone))
    assert assert_same_text(run, alone) >= 500
    accepted = run["metrics"]["vllm:spec_decode_num_accepted_tokens"]
    drafted = run["metrics"]["vllm:spec_decode_num_draft_tokens"]
    assert 0.2 < accepted / drafted < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_that_do_not_reach_the_first_stage_change_the_text(
    engine: Engine, alone: dict[str, Any], ahead: bool
) -> None:
    plan = continuation_plan(alone, zero_first_stage=True)
    run = engine(2, TRANSPORT, ahead=ahead, plan=plan, phases=[CONCURRENT])
    assert run["phases"]["concurrent"]["tokens"] != alone["phases"]["concurrent"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_a_remote_drafter_in_capacity_serves_the_last_stage_alone(
    engine: Engine, alone: dict[str, Any], pair: tiny_pair.TinyPair, tmp_path: Path, ahead: bool
) -> None:
    worker = Worker(pair.drafter, pair.target, tmp_path)
    worker.start()
    try:
        stats = tmp_path / "stats.json"
        # A late reply would be a round without drafts, and no comparison.
        settings = remote("capacity", worker.endpoint, identity_of(pair), stats, _TIMEOUT_MS="20000")
        one = engine(1, settings)
        two = engine(2, settings | TRANSPORT, ahead=ahead)
    finally:
        worker.kill()
    # Without a draft layer the last cached block of a prompt is not given up.
    assert assert_same_text(one, alone, finds_as_much=False) >= 500
    assert_equals_one_stage(two, one, 2)
    counters = json.loads(stats.read_text())["counters"]
    assert counters["hellos"] == 1
    assert counters["rounds_ok"] > 20
    assert two["log"].count("farspark: remote drafter chosen") == 1  # on no other stage is one built


@pytest.mark.slow
def test_without_the_transport_the_same_engine_asserts_and_ends_or_hangs(engine: Engine) -> None:
    """Else the tests above would prove nothing."""
    # The stage that asserts is not the one that the engine listens to: it waits, as long as this says.
    patience = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "20"}
    with pytest.raises((RuntimeError, TimeoutError), match="AssertionError"):
        engine(2, patience, phases=[CONCURRENT])


@pytest.mark.slow
def test_twenty_five_overflowing_requests_leave_nothing_behind(engine: Engine) -> None:
    stress = {
        "name": "stress",
        "prompts": [prompt(200 + i, 5 + 37 * i % (MAX_LEN - 10)) for i in range(25)],
        "max_tokens": [3 + 11 * i % 60 for i in range(25)],
        "joins": {str(i): i // 2 for i in range(25)},
    }
    run = engine(2, ON_CPU, phases=[stress])
    assert len(run["phases"]["stress"]["tokens"]) == 25
    assert run["left"] == [0, 0]
    assert "died" not in run["log"]
    assert "MISMATCH" not in run["log"]
