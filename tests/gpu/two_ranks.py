"""Two tensor-parallel ranks of real vLLM 0.25.1 on two GPUs, the worker on one of them: killed, stopped and away in mid-serving.

Run on a machine with two GPUs after `bash .gpu/a/unpack.sh` and `source .gpu/b/unpack.sh`:
    python3 tests/gpu/two_ranks.py [--engines alone,capacity,async-process,resilience] [--out FOLDER]
Ranks that disagreed about one draft would verify different tokens: the text would be another one, or the engine would hang. Also
measures the broadcast that every round costs. Prints one JSON report; exits 0 if all text is the target's own, the drills were
felt, and only rank 0 talked.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.gpu import run_vllm_0251 as engines  # noqa: E402
from tests.vllm.processes import Worker, run_engine  # noqa: E402

STOPPED_S = 1.0
# A drill lasts a hundred steps or two.
HASTY = {"VLLM_DSPARK_REMOTE_TIMEOUT_MS": "200", "VLLM_DSPARK_REMOTE_COOLDOWN": "16"}
# Behind the name of a drill: the steps at which something happens to the worker. A restarted one is back within seconds, so
# the second part of the phase sees it again.
DRILLS: list[dict[str, Any]] = [
    {"name": "killed", "pauses": {"10": "kill", "20": "start"}},
    {"name": "stopped", "pauses": {"0": "wait", "10": "stop"}},
    {"name": "killedagain", "pauses": {"5": "kill_soon", "40": "start"}},
    {"name": "after", "pauses": {"0": "wait"}},
]


def phases() -> list[dict[str, Any]]:
    prompts = [engines.prompt(40 + index, length) for index, length in enumerate((16, 300, 5, 90))]
    return [drill | {"prompts": prompts, "max_tokens": 120, "joins": {"3": 4}} for drill in DRILLS]


class Drills(engines.Comparison):
    """Every engine through the same drills."""

    def drill(self, device: str) -> dict[str, Any]:
        self._engine |= {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
        self._runs: dict[str, dict[str, Any]] = {}
        report = self._beside_a_worker(self._pair.drafter, self._pair.target, self._one, device=device)
        return report | {"passed": not report["errors"] and all(one["good"] for one in report["engines"].values())}

    def _one(self, name: str, settings: dict[str, str]) -> dict[str, Any]:
        is_remote = bool(settings)
        job = {
            "target": str(self._pair.target),
            "drafter": None if name == "alone" else str(self._pair.drafter),
            "num_drafts": engines.N,
            "engine": self._engine,
            "phases": [phase if is_remote else without_pauses(phase) for phase in phases()],
        }
        worker = self._worker
        run = run_engine(
            job,
            settings | (HASTY if is_remote else {}),
            environment=self._environment,
            on_pause=lambda pause: act(worker, pause),
            timeout_s=engines.ENGINE_LIMIT_S,
        )
        if self._out:
            (self._out / f"{name}.log").write_text(run["log"])
        self._runs[name] = run
        reference = next(iter(self._runs.values()))
        found: dict[str, Any] = {
            "start_s": run["started_s"],
            "steps": {phase: one["steps"] for phase, one in run["phases"].items()},
            "seconds": {phase: one["seconds"] for phase, one in run["phases"].items()},
            "longest_step_s": {phase: max(one["step_s"]) for phase, one in run["phases"].items()},
            "different_texts": engines.different_texts(run, reference),
        }
        found["good"] = not found["different_texts"]
        if is_remote:
            stats = json.loads(self._stats_file(name).read_text())
            counters = stats["counters"]
            found |= {"counters": counters, "worker": stats["worker"], "async": stats["async"]}
            found["rank0_chosen"] = run["log"].count("remote drafter chosen")
            felt = counters.get("rounds_failed", 0) > 0 and counters["rounds_ok"] > 60
            found["good"] &= felt and counters["hellos"] >= 3 and "internal_error" not in counters
        return found


def without_pauses(phase: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in phase.items() if name != "pauses"}


def act(worker: Worker, pause: str) -> None:
    if pause == "kill":
        worker.kill()
    elif pause == "kill_soon":  # in the middle of a round
        threading.Timer(0.05, worker.kill).start()
    elif pause == "start":
        worker.kill()
        worker.start()
    elif pause == "stop":
        worker.signal(signal.SIGSTOP)
        threading.Timer(STOPPED_S, lambda: worker.signal(signal.SIGCONT)).start()
    else:
        time.sleep(4.0)  # some back-offs of the connector


def broadcast(rank: int, folder: str, size: int) -> None:
    """What the collective of a round costs by itself: one int32 buffer of `size` values from rank 0."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    buffer = torch.zeros(size, dtype=torch.int32, device=f"cuda:{rank}")
    host_us, device_us = [], []
    for _ in range(300):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        began = time.perf_counter_ns()
        dist.broadcast(buffer, 0)
        host_us.append((time.perf_counter_ns() - began) / 1000)
        end.record()
        end.synchronize()
        device_us.append(start.elapsed_time(end) * 1000)
    if rank == 0:
        found = {
            "values": size,
            "host_us_p50": round(sorted(host_us)[150], 1),
            "device_us_p50": round(sorted(device_us)[150], 1),
        }
        Path(folder, "broadcast.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_broadcast() -> dict[str, Any]:
    from torch.multiprocessing.spawn import spawn

    from farspark.engine.result import ResultLayout

    with tempfile.TemporaryDirectory() as folder:
        spawn(broadcast, args=(folder, ResultLayout(8, engines.N, 0).size), nprocs=2)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "broadcast.json").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines",
        default="alone,capacity,async-process,async-thread,resilience",
        help="which, in this order; the first one's text is the reference (default: %(default)s)",
    )
    parser.add_argument("--worker-device", default="cuda:1", help="(default: %(default)s)")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: half the start time")
    parser.add_argument("--out", type=Path, help="also write the report and the engines' logs there")
    arguments = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    report: dict[str, Any] = {"broadcast": measure_broadcast()}
    with tempfile.TemporaryDirectory() as folder:
        drills = Drills(Path(folder), arguments.out, arguments.engines.split(","), is_eager=arguments.eager)
        report |= drills.drill(arguments.worker_device)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        (arguments.out / "two_ranks.json").write_text(text + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
