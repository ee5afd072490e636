"""Real vLLM and two real workers: one is told to stop and comes back, is killed and comes back; the text never notices."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.vllm import tiny_pair
from tests.vllm.processes import Worker, run_engine
from tests.vllm.test_end_to_end import identity_of, job, prompt, remote

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MOVING: dict[str, Any] = {
    "name": "moving",
    "prompts": [prompt(70 + i, 30 + i) for i in range(3)],
    "max_tokens": 150,
    "pauses": {"4": "drain", "14": "restart", "24": "kill", "34": "restart"},
}


def test_a_worker_that_is_told_to_stop_costs_no_round_and_one_that_is_killed_a_few(tmp_path: Path) -> None:
    pair = tiny_pair.make_tiny_pair(tmp_path / "pair", 0, agreeable=True)
    workers = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        workers.append(Worker(pair.drafter, pair.target, tmp_path / name))
    first, second = workers
    ended: list[int] = []

    def restart() -> None:
        assert first._process is not None or ended[-1:] == [-signal.SIGKILL]
        if first._process is not None:
            ended.append(first._process.wait(20))
        first.start()
        time.sleep(1.0)  # some looks

    def kill() -> None:
        assert first._process is not None
        process = first._process
        first.kill()
        ended.append(process.returncode)

    actions = {"drain": lambda: first.signal(signal.SIGTERM), "restart": restart, "kill": kill}
    try:
        for worker in workers:
            worker.start()
        endpoints = first.endpoint, second.endpoint
        stats = tmp_path / "stats.json"
        run = run_engine(
            job(pair, MOVING),
            remote("capacity", ",".join(endpoints), identity_of(pair), stats),
            on_pause=lambda name: actions[name](),
            timeout_s=900.0,
        )
    finally:
        for worker in workers:
            worker.kill()
    calm = {name: value for name, value in MOVING.items() if name != "pauses"}
    alone = run_engine(job(pair, calm, drafts=False), timeout_s=900.0)
    assert run["phases"]["moving"]["tokens"] == alone["phases"]["moving"]["tokens"]
    assert ended == [0, -signal.SIGKILL]
    found = json.loads(stats.read_text())
    counters = found["counters"]
    assert (counters["drains"], counters["failovers"], counters["returns"], counters["hellos"]) == (1, 2, 2, 5)
    lost = {name: count for name, count in counters.items() if name.startswith("fallback_")}
    print(lost)
    assert set(lost) <= {"fallback_transport_error", "fallback_not_ready"}, "the drain and both returns cost nothing"
    assert lost["fallback_transport_error"] == 1
    assert lost.get("fallback_not_ready", 0) <= 3
    assert found["endpoints"][endpoints[0]]["state"] == "serving"
