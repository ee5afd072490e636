"""Two tensor-parallel ranks of real vLLM 0.25.1 on two GPUs, the worker on one of them: killed, stopped and away in mid-serving.

Run on a machine with two GPUs after `bash .gpu/a/unpack.sh` and `source .gpu/b/unpack.sh`:
    python3 tests/gpu/two_ranks.py [--engines alone,capacity,async-process,async-thread,resilience] [--out FOLDER]
    python3 tests/gpu/two_ranks.py --dry-run        # on a CPU: two engines, no graphs, Gloo
Ranks that disagreed about one draft would verify different tokens: the text would be another one, or the engine would hang. The
engines run at the same time, each with a worker of its own to be drilled with, after a measurement of the broadcast that every
round costs. Takes three minutes and a half. Prints one JSON report; exits 0 if all text is the target's own and
the drills were felt.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.gpu import run_vllm_0251 as engines  # noqa: E402
from tests.vllm import engine_run, tiny_pair  # noqa: E402
from tests.vllm.processes import Worker, run_engine  # noqa: E402

STOPPED_S = 1.0
BACK_S = 2.0  # some back-offs of the connector
BUSY_CYCLES = 1_000_000  # some half a millisecond
# From the start of an engine to the end of its drills.
LIMIT_ON_CPU_S = 600.0
# A drill lasts a hundred steps or two, of some milliseconds each, and a worker takes ten seconds to come back.
HASTY = {
    f"VLLM_DSPARK_REMOTE_{name}": value
    for name, value in (("TIMEOUT_MS", "200"), ("COOLDOWN", "16"), ("BACKOFF_MS", "50"), ("BACKOFF_MAX_MS", "250"))
}
# Behind the name of a drill: the steps at which something happens to the worker. A drill has TOKENS / (N + 1) steps at least,
# those of one whose drafts are all accepted.
TOKENS = 400
DRILLS: list[dict[str, Any]] = [
    {"name": "killed", "pauses": {"10": "kill", "20": "start"}},
    {"name": "stopped", "pauses": {"10": "stop"}},
    {"name": "killedagain", "pauses": {"0": "wait", "5": "kill_soon"}},
    {"name": "after", "pauses": {"0": "start"}},
]


def phases() -> list[dict[str, Any]]:
    vocab = tiny_pair.VOCAB - 12
    prompts = [
        [token % vocab for token in engines.prompt(40 + index, length)] for index, length in enumerate((16, 300, 5, 90))
    ]
    return [drill | {"prompts": prompts, "max_tokens": TOKENS, "joins": {"3": 4}} for drill in DRILLS]


class Drills(engines.Comparison):
    """Every engine through the same drills, all of them at once."""

    limit_s = 240.0

    def drill(self, device: str, *, on_cpu: bool) -> dict[str, Any]:
        self._is_cuda = not on_cpu
        self._engine |= {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}
        if on_cpu:
            binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "OMP_NUM_THREADS": "1"}
            self._environment = engine_run.environment(
                dict(os.environ), VLLM_WORKER_MULTIPROC_METHOD="spawn", **binding
            )
            self._engine |= {"dtype": "float32", "kv_cache_memory_bytes": 1 << 27}
        else:
            self._engine |= {"gpu_memory_utilization": 0.08}  # room for all of them
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        report: dict[str, Any] = {"machine": engines.machine(), "engine": self._engine, "engines": {}, "errors": {}}
        runs: dict[str, dict[str, Any]] = {}
        with ThreadPoolExecutor(len(self._names)) as pool:
            for name, ran in zip(
                self._names, pool.map(lambda name: self._drilled(name, device), self._names), strict=True
            ):
                if isinstance(ran, str):
                    report["errors"][name] = ran
                else:
                    runs[name] = ran
        for name, ran in runs.items():
            report["engines"][name] = self._judged(name, ran, next(iter(runs.values())))
        return report | {"passed": not report["errors"] and all(one["good"] for one in report["engines"].values())}

    def _drilled(self, name: str, device: str) -> dict[str, Any] | str:
        """The run, or why there is none."""
        try:
            if name not in engines.REMOTE:
                return self._run(name, {}, None)
            return self._beside_its_worker(name, device)
        except (RuntimeError, TimeoutError) as error:
            return str(error)[-4000:]

    def _beside_its_worker(self, name: str, device: str) -> dict[str, Any]:
        from farspark.worker.checkpoint import identities

        folder = self._folder / name
        folder.mkdir()
        identity = identities(self._pair.drafter, self._pair.target).identity.hex()
        dtype = str(self._engine.get("dtype", "bfloat16"))
        worker = Worker(self._pair.drafter, self._pair.target, folder, device=device, dtype=dtype, slots=8)
        worker.start()
        try:
            return self._run(name, self._settings(name, worker.endpoint, identity) | HASTY, worker)
        finally:
            worker.kill()

    def _run(self, name: str, settings: dict[str, str], worker: Worker | None) -> dict[str, Any]:
        job = {
            "target": str(self._pair.target),
            "drafter": None if name == "alone" else str(self._pair.drafter),
            "num_drafts": engines.N,
            "engine": self._engine,
            "phases": [phase if worker else without_pauses(phase) for phase in phases()],
        }
        run = run_engine(
            job,
            settings,
            environment=self._environment,
            on_pause=None if worker is None else lambda pause: act(worker, pause),
            timeout_s=self.limit_s if self._is_cuda else LIMIT_ON_CPU_S,
        )
        print(f"{name}: ran, started in {run['started_s']} s", file=sys.stderr, flush=True)
        if self._out:
            (self._out / f"{name}.log").write_text(run["log"])
        return run

    def _judged(self, name: str, run: dict[str, Any], reference: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "start_s": run["started_s"],
            "steps": {phase: one["steps"] for phase, one in run["phases"].items()},
            "seconds": {phase: one["seconds"] for phase, one in run["phases"].items()},
            "longest_step_s": {phase: max(one["step_s"]) for phase, one in run["phases"].items()},
            "different_texts": engines.different_texts(run, reference),
        }
        found["good"] = not found["different_texts"]
        if name in engines.REMOTE:
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
        time.sleep(BACK_S)
    elif pause == "stop":
        worker.signal(signal.SIGSTOP)
        threading.Timer(STOPPED_S, go_on, [worker]).start()
    else:
        time.sleep(BACK_S)


def go_on(worker: Worker) -> None:
    # By then the next drill may have killed it.
    if worker.is_running:
        worker.signal(signal.SIGCONT)


def broadcast(rank: int, folder: str, size: int, on_cpu: bool) -> None:
    """What the collective of a round costs by itself: one int32 buffer of `size` values from rank 0."""
    import torch
    import torch.distributed as dist

    cuda: Any = torch.cuda
    if not on_cpu:
        cuda.set_device(rank)
    dist.init_process_group("gloo" if on_cpu else "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    buffer = torch.zeros(size, dtype=torch.int32, device="cpu" if on_cpu else f"cuda:{rank}")
    host_us, device_us = [], []
    for _ in range(300):
        dist.barrier()
        if not on_cpu:
            start, end = (cuda.Event(enable_timing=True) for _ in range(2))
            cuda.synchronize()
            # Behind a device that is busy until all is enqueued, or the time were the host's.
            cuda._sleep(BUSY_CYCLES)
            start.record()
        began = time.perf_counter_ns()
        dist.broadcast(buffer, 0)
        host_us.append((time.perf_counter_ns() - began) / 1000)
        if not on_cpu:
            end.record()
            end.synchronize()
            device_us.append(start.elapsed_time(end) * 1000)
    if rank == 0:
        found: dict[str, Any] = {"values": size, "host_us_p50": round(sorted(host_us)[150], 1)}
        if device_us:
            found["device_us_p50"] = round(sorted(device_us)[150], 1)
        Path(folder, "broadcast.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure_broadcast(*, on_cpu: bool) -> dict[str, Any]:
    from torch.multiprocessing.spawn import spawn

    from farspark.engine.result import ResultLayout

    with tempfile.TemporaryDirectory() as folder:
        size = ResultLayout(8, engines.N, 0).size
        spawn(broadcast, args=(folder, size, on_cpu), nprocs=2)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "broadcast.json").read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--engines",
        default="alone,capacity,async-process,async-thread,resilience",
        help="which, in this order; the first one's text is the reference (default: %(default)s)",
    )
    parser.add_argument("--worker-device", default="cuda:1", help="of every worker (default: %(default)s)")
    parser.add_argument(
        "--limit",
        type=float,
        default=240.0,
        help="seconds for an engine to start and be drilled (default: %(default)s)",
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: half the start time")
    parser.add_argument("--out", type=Path, help="also write the report and the engines' logs there")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU: shows that the script itself works")
    arguments = parser.parse_args()
    if arguments.dry_run:
        arguments.worker_device, arguments.eager = "cpu", True
        engines.SIZES.clear()  # the smallest pair there is
        if arguments.engines == parser.get_default("engines"):
            arguments.engines = "alone,capacity"
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    report: dict[str, Any] = {"broadcast": measure_broadcast(on_cpu=arguments.dry_run)}
    print(f"broadcast: {report['broadcast']}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        drills = Drills(Path(folder), arguments.out, arguments.engines.split(","), is_eager=arguments.eager)
        drills.limit_s = arguments.limit
        report |= drills.drill(arguments.worker_device, on_cpu=arguments.dry_run)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        (arguments.out / "two_ranks.json").write_text(text + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
