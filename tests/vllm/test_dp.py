"""Real vLLM with data parallelism on the CPU: each rank has a session, a place among the endpoints and statistics of its own.

A dense target's ranks know nothing of each other. Those of a mixture of experts run in step, and one that has no request
runs steps without work.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import tiny_moe, tiny_pair
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import ENGINE, N, identity_of, job, prompt, remote

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 26}
# First the second rank alone has work, then both have, then the second one's worker dies; at last that rank alone again.
ONE: dict[str, Any] = {"name": "one", "prompts": [prompt(1, 20), prompt(2, 9)], "ranks": [1, 1], "max_tokens": [24, 24]}
BOTH: dict[str, Any] = {
    "name": "both",
    "prompts": [prompt(10 + i, 7 + 11 * i) for i in range(5)],
    "ranks": [0, 1, 0, 1, 1],
    "max_tokens": [30, 12, 25, 30, 18],
}
KILLED: dict[str, Any] = {
    "name": "killed",
    "prompts": [prompt(20 + i, 12 + i) for i in range(2)],
    "ranks": [0, 1],
    "max_tokens": [60, 60],
}
AGAIN: dict[str, Any] = {"name": "again", "prompts": [prompt(30, 10)], "ranks": [1], "max_tokens": [30]}
PHASES = [ONE, BOTH, KILLED, AGAIN]


def texts(run: dict[str, Any]) -> dict[str, dict[str, list[int]]]:
    return {name: phase["tokens"] for name, phase in run["phases"].items()}


def alone(pair: tiny_pair.TinyPair) -> dict[str, Any]:
    """The target without speculation, one process."""
    return run_engine(job(pair, *PHASES, drafts=False, **SMALL))


class TwoWorkers:
    """One per rank to begin with; the second one dies at the pause."""

    def __init__(self, pair: tiny_pair.TinyPair, folder: Path, stack: ExitStack) -> None:
        self._workers = []
        for name in ("first", "second"):
            (folder / name).mkdir()
            worker = Worker(pair.drafter, pair.target, folder / name)
            worker.start()
            stack.callback(worker.kill)
            self._workers.append(worker)
        self.endpoints = [worker.endpoint for worker in self._workers]

    def kill_second(self, _: str) -> None:
        self._workers[1].kill()
        time.sleep(0.5)  # some back-offs: the connector's thread runs while the engine pauses


def stats_of(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / ("stats-dp1.json" if rank else "stats.json")).read_text())
    return found


def assert_ranks_of_their_own(folder: Path, endpoints: list[str], log: str) -> None:
    """Each its session, its endpoint and its statistics. The second one's worker died."""
    calm, moved = (stats_of(folder, rank) for rank in (0, 1))
    assert list(calm["endpoints"]) == endpoints
    assert list(moved["endpoints"]) == endpoints[::-1], "the second rank begins elsewhere"
    assert calm["endpoint"] == moved["endpoint"] == endpoints[0]
    assert calm["counters"]["hellos"] == 1
    assert "failovers" not in calm["counters"]
    assert (moved["counters"]["hellos"], moved["counters"]["failovers"]) == (2, 1)
    for stats in (calm, moved):
        assert stats["counters"]["rounds_ok"] > 5
        assert "internal_error" not in stats["counters"]
    # The round that found out, and those until the other worker was there.
    lost = {name: count for name, count in moved["counters"].items() if name.startswith("fallback_")}
    assert set(lost) <= {"fallback_transport_error", "fallback_not_ready"}
    assert lost["fallback_transport_error"] == 1
    assert log.count("worker ready") == 3
    assert log.count("drafts come from") == 1


def run_two_ranks(
    pair: tiny_pair.TinyPair,
    folder: Path,
    *,
    timeout_s: float,
    tensor_parallel_size: int = 1,
    watches: Path | None = None,
    **settings: str,
) -> tuple[dict[str, Any], list[str]]:
    """Two data-parallel ranks behind one front, the second one's worker killed in the middle; and the workers' endpoints."""
    with ExitStack() as stack:
        workers = TwoWorkers(pair, folder, stack)
        endpoints = ",".join(workers.endpoints)
        environment = remote("capacity", endpoints, identity_of(pair), folder / "stats.json", **settings)
        run = run_engine(
            {
                "target": str(pair.target),
                "drafter": str(pair.drafter),
                "num_drafts": N,
                "engine": ENGINE | SMALL | {"data_parallel_size": 2, "tensor_parallel_size": tensor_parallel_size},
                "phases": [ONE, BOTH, KILLED | {"pauses": {"20": "kill"}}, AGAIN],
                "watches": str(watches) if watches else None,
            },
            environment
            | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
                "VLLM_CPU_OMP_THREADS_BIND": "|".join(["0|1"] * tensor_parallel_size),
                "OMP_NUM_THREADS": "1",
            },
            module="tests.vllm.dp_run",
            on_pause=workers.kill_second,
            timeout_s=timeout_s,
        )
    return run, workers.endpoints


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.make_tiny_pair(tmp_path_factory.mktemp("pair"), 0, agreeable=True)


@pytest.mark.slow
def test_two_dense_ranks_keep_the_text_each_with_a_worker_of_its_own(dense: tiny_pair.TinyPair, tmp_path: Path) -> None:
    run, endpoints = run_two_ranks(dense, tmp_path, timeout_s=600.0)
    assert texts(run) == texts(alone(dense))
    assert_ranks_of_their_own(tmp_path, endpoints, run["log"])


def of_rank(phase: dict[str, Any], rank: int) -> dict[str, Any]:
    prompts = {
        str(index): one
        for index, (one, its) in enumerate(zip(phase["prompts"], phase["ranks"], strict=True))
        if its == rank
    }
    return phase | {"prompts": prompts}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def run_in_step(pair: tiny_pair.TinyPair, folder: Path, policy: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Both ranks' results, and the endpoints."""
    with ExitStack() as stack:
        workers = TwoWorkers(pair, folder, stack)
        settings = remote(policy, ",".join(workers.endpoints), identity_of(pair), folder / "stats.json")
        port = free_port()

        def one(rank: int) -> dict[str, Any]:
            phases = [of_rank(phase, rank) for phase in PHASES]
            if rank == 1:
                phases[2]["pauses"] = {"4": "kill"}
            return run_engine(
                job(pair, *phases, **SMALL, distributed_executor_backend="uni") | {"record_drafts": False},
                settings
                | {
                    "VLLM_DP_SIZE": "2",
                    "VLLM_DP_RANK": str(rank),
                    "VLLM_DP_RANK_LOCAL": str(rank),
                    "VLLM_DP_MASTER_IP": "127.0.0.1",
                    "VLLM_DP_MASTER_PORT": str(port),
                    "VLLM_CPU_OMP_THREADS_BIND": str(rank),
                    "OMP_NUM_THREADS": "1",
                },
                module="tests.vllm.dp_rank_run",
                on_pause=workers.kill_second,
                timeout_s=600.0,
            )

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1))), workers.endpoints


def joined_texts(ranks: list[dict[str, Any]]) -> dict[str, dict[str, list[int]]]:
    first, second = (texts(rank) for rank in ranks)
    return {name: dict(sorted((first[name] | second[name]).items())) for name in first}


@pytest.fixture(scope="module")
def experts(dense: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_moe.with_experts(dense, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def in_step(experts: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two ranks in capacity."""
    folder = tmp_path_factory.mktemp("step")
    ranks, endpoints = run_in_step(experts, folder, "capacity")
    return {"ranks": ranks, "endpoints": endpoints, "folder": folder}


def test_ranks_in_step_have_a_session_an_endpoint_and_statistics_of_their_own(in_step: dict[str, Any]) -> None:
    assert [rank["ranks"] for rank in in_step["ranks"]] == [2, 2]
    log = "".join(rank["log"] for rank in in_step["ranks"])
    assert_ranks_of_their_own(in_step["folder"], in_step["endpoints"], log)


@pytest.mark.slow
def test_ranks_in_step_keep_the_text(in_step: dict[str, Any], experts: tiny_pair.TinyPair) -> None:
    assert joined_texts(in_step["ranks"]) == texts(alone(experts))


def assert_same_collectives(ranks: list[dict[str, Any]]) -> None:
    for phase in PHASES:
        one, other = (rank["phases"][phase["name"]] for rank in ranks)
        assert one["collectives"] == other["collectives"]
        assert one["engine_steps"] == other["engine_steps"]
        assert sum(one["speculator_steps"].values()) == sum(other["speculator_steps"].values()) > 0
        assert len(one["collectives"]) > sum(one["speculator_steps"].values())


def test_tp_agree_ranks_in_step_post_the_same_collectives_whoever_has_work(in_step: dict[str, Any]) -> None:
    assert_same_collectives(in_step["ranks"])


def test_warmup_rpc_a_step_without_work_takes_no_slot_and_sends_nothing(in_step: dict[str, Any]) -> None:
    idle, busy = (rank["phases"]["one"] for rank in in_step["ranks"])
    assert idle["speculator_steps"]["dummy"] > 5
    assert "real" not in idle["speculator_steps"]
    # HELLO, and not one round.
    assert {name for name in idle["counters"] if "round" in name or "rows" in name} == set()
    assert busy["counters"]["rounds_ok"] > 5


@pytest.mark.slow
def test_tp_agree_two_data_parallel_ranks_of_two_tensor_parallel_ones_keep_the_text_and_agree(
    experts: tiny_pair.TinyPair, tmp_path: Path
) -> None:
    watches = tmp_path / "steps"
    watches.mkdir()
    run, endpoints = run_two_ranks(
        experts, tmp_path, timeout_s=900.0, tensor_parallel_size=2, watches=watches, _TIMEOUT_MS="20000"
    )
    assert texts(run) == texts(alone(experts))
    # Of four processes that have the drafter the first of each data-parallel rank talks.
    assert run["log"].count("remote drafter chosen") == 4
    assert_ranks_of_their_own(tmp_path, endpoints, run["log"])
    steps = {path.stem: json.loads(path.read_text()) for path in watches.iterdir()}
    assert sorted(steps) == ["dp0-tp0", "dp0-tp1", "dp1-tp0", "dp1-tp1"]
    for rank in ("dp0", "dp1"):
        first, second = steps[f"{rank}-tp0"], steps[f"{rank}-tp1"]
        assert first["speculator_steps"] == second["speculator_steps"]
        assert first["drafts"] == second["drafts"]
        assert second["counters"] is None
        # A step without work took no round, every other one did.
        real = first["speculator_steps"]["real"]
        assert len(first["drafts"]) == real
        assert first["counters"]["rounds_ok"] + first["counters"].get("rounds_failed", 0) == real
        # One broadcast of the result in each of these.
        assert first["collectives"].count("broadcast of 2 by 1") == real
        assert first["collectives"] == second["collectives"]
        assert any(sum(map(sum, drafts.values())) for drafts in first["drafts"])
    assert steps["dp0-tp0"]["speculator_steps"]["dummy"] > 5
    # Those of tensor-parallel ranks, which are neighbours, alone depend on whether there is work.
    first, second = (
        [name for name in steps[rank]["collectives"] if "by 1" not in name] for rank in ("dp0-tp0", "dp1-tp0")
    )
    assert first == second
    assert len(first) > 100
    taken = [sum(one["speculator_steps"].values()) for one in steps.values()]
    assert len(set(taken)) == 1


@pytest.mark.slow
def test_tp_agree_a_local_drafter_that_stands_in_on_one_rank_leaves_the_collectives_equal(
    experts: tiny_pair.TinyPair, tmp_path: Path
) -> None:
    ranks, _ = run_in_step(experts, tmp_path, "resilience")
    assert joined_texts(ranks) == texts(alone(experts))
    assert_same_collectives(ranks)
    assert stats_of(tmp_path, 1)["counters"]["local_fallback_rounds"] >= 1
