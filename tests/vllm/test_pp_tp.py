"""Real vLLM with two stages of two ranks and a remote drafter: of four processes one talks, and all agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.vllm import test_pp, tiny_pair
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import CHUNKED, CONCURRENT, identity_of, remote

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PHASES = [CONCURRENT, CHUNKED]


def test_tp_agree_two_stages_of_two_ranks_keep_the_text_and_the_last_ones_first_rank_talks(tmp_path: Path) -> None:
    pair = tiny_pair.make_tiny_pair(tmp_path / "pair", 0, agreeable=True)
    worker = Worker(pair.drafter, pair.target, tmp_path)
    worker.start()
    try:
        stats = tmp_path / "stats.json"
        plan = tmp_path / "plan.json"
        plan.write_text("{}")
        job = test_pp.job(pair, 2, ahead=False, phases=PHASES)
        job["engine"]["tensor_parallel_size"] = 2
        run = run_engine(
            job,
            test_pp.environment_of(2)
            | test_pp.TRANSPORT
            | {"VLLM_CPU_OMP_THREADS_BIND": "0|1|0|1", "PP_TEST_PLAN": str(plan)}
            | remote("capacity", worker.endpoint, identity_of(pair), stats, _TIMEOUT_MS="20000"),
            module="tests.vllm.pp_run",
            timeout_s=900.0,
        )
    finally:
        worker.kill()
    alone = run_engine(
        test_pp.job(pair, 1, ahead=False, phases=PHASES) | {"drafter": None},
        test_pp.environment_of(1) | {"PP_TEST_PLAN": str(plan)},
        timeout_s=900.0,
    )
    for phase in ("concurrent", "chunked"):
        assert run["phases"][phase]["tokens"] == alone["phases"][phase]["tokens"]
    assert run["left"] == [0, 0]
    assert [history.split("\n")[0] for history in run["histories"]] == ["TokenHandler"] * 4
    counters = json.loads(stats.read_text())["counters"]
    assert counters["hellos"] == 1
    assert counters["rounds_ok"] > 20
    assert counters["accepted_drafts"] > 30
    assert "internal_error" not in counters
    # Both ranks of the last stage have one, the first of them talks.
    assert run["log"].count("remote drafter chosen") == 2
    assert run["log"].count("worker ready") == 1
