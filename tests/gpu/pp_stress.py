"""The pipeline's token transport where it is meant for: two GPUs, NCCL, CUDA graphs, long enough to freeze what can freeze.

    python3 tests/gpu/pp_stress.py [--part transport|engine|all] [--steps 100000] [--minutes 10] [--out FILE]
    python3 tests/gpu/pp_stress.py --dry-run        # the same on a CPU, with one GPU or none: small, Gloo, no graphs

`transport` drives the handler without vLLM: random steps over NCCL, and over Gloo from pinned memory, one process to a stage,
then a stale header and a dead stage. `engine` starts vLLM with one and with two stages (0.32.0 or newer: 0.25.1 takes no drafter
in a pipeline), in every setting of the transport, and then stresses one for --minutes: concurrent requests that overflow their
limits, and long prompts with a salt. Prints one JSON report; exits 0 if text and drafts are equal, every fault was found within
a second, and nothing was left running or waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.gpu.run_vllm_0251 import SIZES  # noqa: E402

FAULT_LIMIT_S = 1.0
N = 5
SALTED = 700  # tokens of a long prompt
SETTINGS: dict[str, dict[str, str]] = {
    "device": {"VLLM_DSPARK_PP_TRANSPORT": "1"},
    "device, cap": {"VLLM_DSPARK_PP_TRANSPORT": "1", "VLLM_DSPARK_PP_CAP": "1"},
    "host, cap, eager draft": {
        "VLLM_DSPARK_PP_CPU": "1",
        "VLLM_DSPARK_PP_CAP": "1",
        "VLLM_DSPARK_PP_EAGER_DRAFT": "1",
    },
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("transport", "engine", "all"), default="all")
    parser.add_argument(
        "--steps", type=int, default=100_000, help="random steps of the transport (default %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of the engine's stress (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small: shows that the script itself works")
    parser.add_argument("--out", type=Path, help="also write the report there")
    options = parser.parse_args()
    if options.dry_run:
        options.steps, options.minutes = min(options.steps, 300), min(options.minutes, 0.2)
    report: dict[str, Any] = {}
    if options.part in ("transport", "all"):
        report["transport"] = stress_transport(options.steps, on_cpu=options.dry_run)
    if options.part in ("engine", "all"):
        report["engine"] = stress_engine(options.minutes, on_cpu=options.dry_run)
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


def stress_engine(minutes: float, *, on_cpu: bool) -> dict[str, Any]:
    from tests.vllm import tiny_pair

    vocab = tiny_pair.VOCAB - 12
    if not on_cpu:
        for name, value in SIZES.items():
            setattr(tiny_pair, name, value)
        vocab = SIZES["VOCAB"] - 96  # type: ignore[operator]
    with tempfile.TemporaryDirectory() as folder:
        pair = tiny_pair.make_tiny_pair(folder, 0, agreeable=True)

        def run(stages: int, settings: dict[str, str], *phases: dict[str, Any]) -> dict[str, Any]:
            return run_one_engine(pair, stages, settings, list(phases), on_cpu=on_cpu)

        return compare_and_stress(run, minutes, vocab, on_cpu=on_cpu)


def compare_and_stress(
    run: Callable[..., dict[str, Any]], minutes: float, vocab: int, *, on_cpu: bool
) -> dict[str, Any]:
    rng = random.Random(5)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(length)]

    phase = {
        "name": "compared",
        "prompts": [prompt(length) for length in (16, 5, 33, 1, 150, 7, 12, 90)],
        "max_tokens": [60, 17, 53, 45, 60, 6, 58, 3],
        "joins": {"4": 3, "5": 6},
    }
    alone = run(1, {}, phase)
    report: dict[str, Any] = {"good": True}
    for name, settings in list(SETTINGS.items())[-1 if on_cpu else 0 :]:
        two = run(2, settings, phase)
        drafts = [{(one[0], one[1]): one[2] for one in each["drafts"]} for each in (alone, two)]
        both = drafts[0].keys() & drafts[1].keys()
        found = {
            "text_equal": two["phases"]["compared"]["tokens"] == alone["phases"]["compared"]["tokens"],
            "drafts_compared": len(both),
            "drafts_equal": all(drafts[0][at] == drafts[1][at] for at in both),
            "batches_in_flight": two["batches_in_flight"],
            "seconds": two["phases"]["compared"]["seconds"],
        }
        report[name] = found
        report["good"] &= found["text_equal"] and found["drafts_equal"]
    # About two seconds a request on the CPU, twenty requests a second on a GPU; the engine is measured, not the estimate.
    requests = max(25, int(minutes * 60 * (0.5 if on_cpu else 20)))
    salt = prompt(SALTED if not on_cpu else 60)
    stress = {
        "name": "stress",
        "prompts": [prompt(1 + i % 90) if i % 4 else [i % vocab, *salt] for i in range(requests)],
        "max_tokens": [3 + 11 * i % 60 for i in range(requests)],
        "joins": {str(i): i // 2 for i in range(requests)},
    }
    settings = list(SETTINGS.values())[-1]
    ended = run(2, settings, stress)
    seconds = ended["phases"]["stress"]["seconds"]
    bad_lines = [
        line
        for line in ended["log"].splitlines()
        if any(word in line for word in ("died", "MISMATCH", "atchdog", "Traceback"))
    ]
    report["stress"] = {
        "requests": len(ended["phases"]["stress"]["tokens"]),
        "seconds": seconds,
        "running, waiting": ended["left"],
        "lines": bad_lines[:5],
    }
    report["good"] &= ended["left"] == [0, 0] and not bad_lines and report["stress"]["requests"] == requests
    return report


def run_one_engine(
    pair: Any, stages: int, settings: dict[str, str], phases: list[dict[str, Any]], *, on_cpu: bool
) -> dict[str, Any]:
    from tests.vllm import engine_run
    from tests.vllm.processes import run_engine

    environment = engine_run.environment(dict(os.environ), VLLM_WORKER_MULTIPROC_METHOD="spawn", **settings)
    if on_cpu:
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1" if stages > 1 else "0-1", "OMP_NUM_THREADS": "1"}
    else:
        for name in ("TRITON_INTERPRET", "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
            environment.pop(name, None)
    graphs = {} if on_cpu else {"enforce_eager": False, "max_model_len": 2048, "max_num_seqs": 32}
    job = {
        "target": str(pair.target),
        "drafter": str(pair.drafter),
        "num_drafts": N,
        "schedules_ahead": on_cpu,
        "engine": {
            "pipeline_parallel_size": stages,
            "worker_extension_cls": "tests.vllm.pp_extension.PpExtension",
            "dtype": "float32" if on_cpu else "bfloat16",
            "max_model_len": 288,
            "max_num_batched_tokens": 64 if on_cpu else 2048,
            "enable_prefix_caching": True,
            "block_size": 32,
        }
        | graphs,
        "phases": phases,
    }
    return run_engine(job, environment=environment, module="tests.vllm.pp_run", timeout_s=3600)


if __name__ == "__main__":
    sys.exit(main())
