"""The pipeline's token transport where it is meant for: two GPUs, NCCL, CUDA graphs, long enough to freeze what can freeze.

    python3 tests/gpu/pp_stress.py [--part transport|engine|stress|all] [--steps 100000] [--minutes 15] [--out FILE]
    python3 tests/gpu/pp_stress.py --dry-run        # the same on a CPU, with one GPU or none: small, Gloo, no graphs

`transport` drives the handler without vLLM: random steps over NCCL, and over Gloo from pinned memory, one process to a stage,
then a stale header and a dead stage. `engine` runs vLLM with one and with two stages (0.32.0 or newer: 0.25.1 takes no drafter in
a pipeline; `tests/gpu/bundle_032.sh` packs it), in every setting of the transport, with the local drafter and with a worker, and
compares text, drafts and the time of a step. `stress` repeats concurrent requests that overflow their limits, and long prompts
with a salt, for --minutes. Prints one JSON report; exits 0 if text and drafts are equal, every fault was found within a second,
and nothing was left running or waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.gpu.environment import with_plugin  # noqa: E402
from tests.gpu.run_vllm_0251 import SIZES  # noqa: E402
from tests.vllm import engine_run, tiny_pair  # noqa: E402
from tests.vllm.processes import Worker, run_engine  # noqa: E402

FAULT_LIMIT_S = 1.0
N = 5
SALTED = 700  # tokens of a long prompt
ENGINE_S = 200.0
# vLLM warns with a traceback of what it could not import.
BAD_LINE = re.compile(r"died|MISMATCH|[Ww]atchdog|ERROR.*Traceback|^Traceback")
# How the tokens go from the last stage to the first; without a setting it is vLLM's own way.
SETTINGS: dict[str, dict[str, str]] = {
    "vLLM's own": {},
    "device": {"VLLM_DSPARK_PP_TRANSPORT": "1"},
    "host": {"VLLM_DSPARK_PP_CPU": "1"},
    "host, cap, eager draft": {
        "VLLM_DSPARK_PP_CPU": "1",
        "VLLM_DSPARK_PP_CAP": "1",
        "VLLM_DSPARK_PP_EAGER_DRAFT": "1",
    },
    "device, remote": {"VLLM_DSPARK_PP_TRANSPORT": "1", "VLLM_DSPARK_REMOTE_POLICY": "capacity"},
    "host, cap, remote": {
        "VLLM_DSPARK_PP_CPU": "1",
        "VLLM_DSPARK_PP_CAP": "1",
        "VLLM_DSPARK_REMOTE_POLICY": "capacity",
    },
}
ON_CPU = ("host, cap, eager draft", "host, cap, remote")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("transport", "engine", "stress", "all"), default="all")
    parser.add_argument(
        "--steps", type=int, default=100_000, help="random steps of the transport (default %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of the engine's stress (default %(default)s)")
    parser.add_argument(
        "--stressed", choices=SETTINGS, default=ON_CPU[0], help="the settings that are stressed (default: %(default)s)"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small: shows that the script itself works")
    parser.add_argument("--out", type=Path, help="also write the report there")
    options = parser.parse_args()
    if options.dry_run:
        options.steps, options.minutes = min(options.steps, 300), min(options.minutes, 0.2)
    report: dict[str, Any] = {}
    if options.part in ("transport", "all"):
        report["transport"] = stress_transport(options.steps, on_cpu=options.dry_run)
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(Path(folder), on_cpu=options.dry_run)
        if options.part in ("engine", "all"):
            report["engine"] = engines.compare()
        if options.part in ("stress", "all"):
            report["stress"] = engines.stress(options.minutes, options.stressed)
    report["good"] = all(part["good"] for part in report.values())
    text = json.dumps(report, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")
    return 0 if report["good"] else 1


def stress_transport(steps: int, *, on_cpu: bool) -> dict[str, Any]:
    report: dict[str, Any] = {"good": True}
    for wire in ("cpu",) if on_cpu else ("cuda", "cpu"):
        began = time.monotonic()
        ended = run_stages(wire, on_cpu=on_cpu, steps=steps)
        logs = {(one["consumed"], one["digest"]) for one in ended if "digest" in one}
        equal = len(logs) == 1 and all("digest" in one for one in ended)
        report[f"over {wire}"] = {
            "equal": equal,
            "us_a_step": round((time.monotonic() - began) / steps * 1e6, 1),
            "errors": [one["error"] for one in ended if "error" in one],
        }
        report["good"] &= equal
        # A stage whose peer is dead waits inside NCCL until vLLM's executor ends it, so that only Gloo must notice.
        for fault in ("stale", "dead") if wire == "cpu" else ("stale",):
            ended = run_stages(wire, on_cpu=on_cpu, steps=10**6, fault=fault, fault_at=50, fault_rank=1)
            waited = ended[0].get("raised", float("inf")) - ended[1].get("planted", 0.0)
            report[f"over {wire}"][f"{fault} found after s"] = round(waited, 3)
            report["good"] &= waited < FAULT_LIMIT_S
    return report


def run_stages(wire: str, *, on_cpu: bool, **job: Any) -> list[dict[str, Any]]:
    """What the two stages of a random program said."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        job |= {"world": 2, "folder": folder, "wire": wire, "on_cpu": on_cpu}
        context = mp.get_context("spawn")
        stages = [context.Process(target=run_stage, args=(job | {"rank": rank},)) for rank in range(2)]
        for stage in stages:
            stage.start()
        for stage in stages:
            stage.join(job["steps"] * 0.05 + 120)
            if stage.is_alive() and job.get("fault"):
                stage.kill()  # the faulty one may wait for the peer that found it
            stage.join()
        said = []
        for rank in range(2):
            one: dict[str, Any] = {}
            for line in Path(folder, f"{rank}.out").read_text().splitlines():
                if line.startswith("{"):
                    one |= json.loads(line)
            said.append(one)
        return said


def run_stage(job: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from tests.engine.pp.rank import Stage

    from farspark.engine.vllm.pp.faults import TokenTransportError, end_process

    os.dup2(os.open(f"{job['folder']}/{job['rank']}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    if not job["on_cpu"]:
        torch.cuda.set_device(job["rank"])
    store = f"file://{job['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=job["rank"], world_size=job["world"])
    group = dist.new_group(backend="nccl") if job["wire"] == "cuda" else None
    device = "cpu" if job["on_cpu"] else f"cuda:{job['rank']}"
    wire = device if job["wire"] == "cuda" else "cpu"
    stage = Stage(job | {"device": device, "wire": wire}, group)
    try:
        stage.run()
    except TokenTransportError as error:
        print(json.dumps({"raised": time.monotonic(), "error": str(error)}), flush=True)
        end_process(error, where=f"stage {job['rank']}", history=str(stage.transport.history))
    print(json.dumps({"consumed": stage.consumed, "digest": stage.digest}), flush=True)
    dist.barrier()
    os._exit(0)


class Engines:
    """The same requests through engines of one and of two stages, each a process of its own, and the worker beside them."""

    def __init__(self, folder: Path, *, on_cpu: bool) -> None:
        self._folder = folder
        self._on_cpu = on_cpu
        self.vocab = tiny_pair.VOCAB - 12
        if not on_cpu:
            for name, value in SIZES.items():
                setattr(tiny_pair, name, value)
            self.vocab = SIZES["VOCAB"] - 96  # type: ignore[operator]
        self._pair = tiny_pair.make_tiny_pair(folder, 0, agreeable=True)
        rng = random.Random(5)
        self._salt = [rng.randrange(self.vocab) for _ in range(60 if on_cpu else SALTED)]
        self._prompts = [
            [rng.randrange(self.vocab) for _ in range(length)] for length in (16, 5, 33, 1, 150, 7, 12, 90)
        ]

    def compare(self) -> dict[str, Any]:
        """Text and drafts of two stages against those of one, and what a step takes with each way of the tokens."""
        long = 40 if self._on_cpu else 400
        phases: list[dict[str, Any]] = [
            {
                "name": "compared",
                "prompts": self._prompts,
                "max_tokens": [60, 17, 53, 45, 60, 6, 58, 3],
                "joins": {"4": 3, "5": 6},
            },
            {"name": "timed", "prompts": self._prompts[:4], "max_tokens": long},
        ]
        alone = self._run(1, {}, phases, records="compared")
        report: dict[str, Any] = {"one stage": timed(alone), "good": True}
        for name, settings in SETTINGS.items():
            if self._on_cpu and name not in ON_CPU:
                continue
            try:
                two = self._run(2, settings, phases, records="compared")
            except (RuntimeError, TimeoutError) as error:
                report[name] = {"error": str(error)[-3000:]}
                report["good"] = False
                continue
            drafts = [{(one[0], one[1]): one[2] for one in each["drafts"]} for each in (alone, two)]
            both = drafts[0].keys() & drafts[1].keys()
            texts = [[each["phases"][phase["name"]]["tokens"] for phase in phases] for each in (alone, two)]
            report[name] = {
                "text_equal": texts[0] == texts[1],
                "drafts_compared": len(both),
                "drafts_differing": sum(drafts[0][at] != drafts[1][at] for at in both),
                "batches_in_flight": two["batches_in_flight"],
                "left": two["left"],
                **timed(two),
            }
            # A remote draft is of rows in bf16 on both sides, but the worker's kernels are not vLLM's: a few are near ties.
            differing = 0.05 * len(both) if "VLLM_DSPARK_REMOTE_POLICY" in settings else 0
            report["good"] &= texts[0] == texts[1] and report[name]["drafts_differing"] <= differing
            print(f"{name}: {report[name]}", file=sys.stderr, flush=True)
        return report

    def stress(self, minutes: float, name: str) -> dict[str, Any]:
        """Four requests at a time, most of them cut by their limit, a quarter of them long and never cached."""
        count = 12 if self._on_cpu else 100
        prompts = [self._prompts[i % 8] if i % 4 else [i % self.vocab, *self._salt] for i in range(count)]
        phase = {
            "name": "stress",
            "prompts": prompts,
            "max_tokens": [3 + 11 * i % 60 for i in range(count)],
            "joins": {str(i): i // 2 for i in range(count)},
        }
        job = {"phase": phase, "salted": list(range(0, count, 4)), "vocab": self.vocab, "for_s": 60 * minutes}
        ended = self._run(2, SETTINGS[name], [], records="none", stress=job)
        lines = [line for line in ended["log"].splitlines() if BAD_LINE.search(line)]
        report: dict[str, Any] = ended["stress"] | {
            "settings": name,
            "running, waiting": ended["left"],
            "lines": lines[:5],
        }
        is_whole = report["requests"] == report["expected_requests"] > 0
        report["good"] = ended["left"] == [0, 0] and not lines and is_whole
        return report

    def _run(
        self, stages: int, settings: dict[str, str], phases: list[dict[str, Any]], *, records: str, **more: Any
    ) -> dict[str, Any]:
        plan = self._folder / "plan.json"
        plan.write_text(json.dumps({"records": records}))
        settings = settings | {"PP_TEST_PLAN": str(plan)}
        engine: dict[str, Any] = {
            "pipeline_parallel_size": stages,
            "worker_extension_cls": "tests.vllm.pp_extension.PpExtension",
            "enable_prefix_caching": True,
            "block_size": 32,
        }
        if self._on_cpu:
            binding = {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if stages > 1 else "0-1", "OMP_NUM_THREADS": "1"}
            environment = engine_run.environment(dict(os.environ), VLLM_WORKER_MULTIPROC_METHOD="spawn", **binding)
            engine |= {"dtype": "float32", "max_model_len": 288, "max_num_batched_tokens": 64}
        else:
            environment = with_plugin(dict(os.environ), Path(tempfile.mkdtemp(dir=self._folder)))
            engine |= {"dtype": "bfloat16", "max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 32}
            # Graphs without torch.compile: half the start time.
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            engine |= {"enforce_eager": False, "compilation_config": graphs}
        job = {
            "target": str(self._pair.target),
            "drafter": str(self._pair.drafter),
            "num_drafts": N,
            "schedules_ahead": self._on_cpu,
            "engine": engine,
            "phases": phases,
        } | more
        run = functools.partial(
            run_engine, job, environment=environment, module="tests.vllm.pp_run", timeout_s=ENGINE_S
        )
        if more:
            run = functools.partial(run, timeout_s=ENGINE_S + more["stress"]["for_s"])
        if "VLLM_DSPARK_REMOTE_POLICY" not in settings:
            return run(settings=settings)
        with self._worker() as reach:
            return run(settings=settings | reach)

    @contextlib.contextmanager
    def _worker(self) -> Iterator[dict[str, str]]:
        """A worker beside the last stage; how to reach it."""
        from farspark.worker.checkpoint import identities

        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        device = "cpu" if self._on_cpu else "cuda"
        dtype = "float32" if self._on_cpu else "bfloat16"
        worker = Worker(
            self._pair.drafter, self._pair.target, self._folder, device=device, dtype=dtype, slots=32, context=2048
        )
        worker.start()
        try:
            yield {
                "VLLM_DSPARK_REMOTE": worker.endpoint,
                "VLLM_DSPARK_REMOTE_IDENTITY": identities(self._pair.drafter, self._pair.target).identity.hex(),
                "VLLM_DSPARK_REMOTE_STRICT_START": "1",
                "VLLM_DSPARK_REMOTE_TIMEOUT_MS": "500",
            }
        finally:
            worker.kill()


def timed(run: dict[str, Any]) -> dict[str, Any]:
    phase = run["phases"]["timed"]
    tokens = sum(map(len, phase["tokens"].values()))
    return {
        "start_s": run["started_s"],
        "ms_a_step": round(1000 * phase["seconds"] / phase["steps"], 3),
        "tokens_per_s": round(tokens / phase["seconds"], 1),
    }


if __name__ == "__main__":
    sys.exit(main())
