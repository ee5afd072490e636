"""Real vLLM 0.25.1 with CUDA graphs and asynchronous scheduling: the target alone, local DSpark and every policy, compared.

Run on the GPU machine after `bash .gpu/a/unpack.sh` and `source .gpu/b/unpack.sh`:
    python3 tests/gpu/run_vllm_0251.py [--out FOLDER] [--eager]
Every engine is a process of its own with its own time limit, one after the other; the worker shares the GPU. Prints one JSON
report and exits 0 if text and drafts are as they must be.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.gpu.environment import with_plugin  # noqa: E402
from tests.vllm import tiny_pair  # noqa: E402
from tests.vllm.processes import Worker, run_engine  # noqa: E402

N = 5
# What each engine with a remote drafter is told, beside the endpoint.
REMOTE: dict[str, dict[str, str]] = {
    "capacity": {"POLICY": "capacity"},
    "shadow": {"POLICY": "shadow"},
    "resilience": {"POLICY": "resilience"},
    "async-thread": {"POLICY": "capacity", "ASYNC": "1", "ASYNC_PROXY": "thread"},
    "async-process": {"POLICY": "capacity", "ASYNC": "1", "ASYNC_PROXY": "process"},
}
ENGINES = ("alone", "local", *REMOTE)
# The first engine compiles the kernels that the others find in the cache: about a minute more.
ENGINE_LIMIT_S = 130.0
# Two steps of bf16 between 16 and 32, where these logits lie.
TIE_MARGIN = 0.25

# Large enough for FlashAttention 3 and for graphs to matter, small enough to be written in a second.
SIZES = {
    "HIDDEN": 512,
    "HEAD_DIM": 128,
    "HEADS": 4,
    "KV_HEADS": 2,
    "INTERMEDIATE": 1024,
    "VOCAB": 4096,
    "MASK_TOKEN": 4095,
    "TARGET_LAYERS": 8,
    "DRAFT_LAYERS": 3,
    "TAPS": (1, 3, 5),
    "MARKOV_RANK": 64,
}


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4000) for _ in range(length)]


PHASES: list[dict[str, Any]] = [
    {
        "name": "concurrent",
        "prompts": [prompt(seed, length) for seed, length in enumerate([16, 5, 33, 1, 300, 7, 12])],
        "max_tokens": [60, 17, 53, 45, 60, 6, 58],
        "joins": {"4": 3, "5": 6},
    },
    {"name": "chunked", "prompts": [prompt(50, 900), prompt(51, 300)], "max_tokens": 40, "joins": {"1": 2}},
    {
        "name": "aborted",
        "prompts": [prompt(60 + i, 20) for i in range(7)],
        "max_tokens": 40,
        "aborts": {"3": 1, "5": 3, "6": 0},
    },
    {"name": "cachedfirst", "prompts": [prompt(80, 400)], "max_tokens": 20},
    {"name": "cachedagain", "prompts": [prompt(80, 400), prompt(80, 200)], "max_tokens": 20},
    {"name": "timed1", "prompts": [prompt(90, 64)], "max_tokens": 600, "is_timed": True},
    {"name": "timed4", "prompts": [prompt(91 + i, 64) for i in range(4)], "max_tokens": 600, "is_timed": True},
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the report and the engines' logs there")
    parser.add_argument(
        "--engines",
        default=",".join(ENGINES),
        help="which to run, in this order; the first one is the reference of the text (default: %(default)s)",
    )
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: half the start time")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Comparison(Path(folder), arguments.out, arguments.engines.split(","), is_eager=arguments.eager).run()
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        (arguments.out / "report.json").write_text(text + "\n")
    return 0 if report["passed"] else 1


class Comparison:
    """One pair, one worker, four engines."""

    def __init__(self, folder: Path, out: Path | None, engines: list[str], *, is_eager: bool) -> None:
        self._folder = folder
        self._out = out
        self._names = engines
        for name, value in SIZES.items():
            setattr(tiny_pair, name, value)
        self._pair = tiny_pair.make_tiny_pair(folder / "pair", 0, agreeable=True)
        self._engine: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            # What must be free at the start, so that it runs beside others; how much it takes is said in bytes.
            "gpu_memory_utilization": 0.1,
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": is_eager,
        }
        if not is_eager:
            self._engine["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        self._environment = with_plugin(dict(os.environ), folder, hangs_after_s=ENGINE_LIMIT_S - 4)

    def run(self) -> dict[str, Any]:
        runs: dict[str, dict[str, Any]] = {}

        def one(name: str, settings: dict[str, str]) -> dict[str, Any]:
            runs[name] = self._engine_run(name, settings)
            return summary(runs[name])

        report = self._beside_a_worker(self._pair.drafter, self._pair.target, one)
        return report | compare(runs, report["errors"])

    def _beside_a_worker(
        self,
        drafter: Path,
        target: Path,
        one: Callable[[str, dict[str, str]], dict[str, Any]],
        *,
        device: str = "cuda",
        slots: int = 8,
        at_once: int = 1,
        **options: Any,
    ) -> dict[str, Any]:
        """`one(name, how to reach the worker)` for every engine, `at_once` at a time, beside a worker with the options."""
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        from farspark.worker.checkpoint import identities

        identity = identities(drafter, target).identity.hex()
        worker = self._worker = Worker(drafter, target, self._folder, device=device, slots=slots, **options)
        report: dict[str, Any] = {"machine": machine(), "engine": self._engine, "engines": {}, "errors": {}}

        def run(name: str) -> None:
            try:
                report["engines"][name] = one(name, self._settings(name, worker.endpoint, identity))
                print(f"{name}: {json.dumps(report['engines'][name])[:600]}", file=sys.stderr, flush=True)
            except (RuntimeError, TimeoutError) as error:
                report["errors"][name] = str(error)[-4000:]

        try:
            began = time.monotonic()
            worker.start()
            report["worker_start_s"] = round(time.monotonic() - began, 1)
            with ThreadPoolExecutor(at_once) as pool:
                for _ in pool.map(run, self._names):
                    pass
        except RuntimeError as error:
            report["errors"]["worker"] = str(error)[-4000:]
        finally:
            worker.kill()
        return report

    def _stats_file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _settings(self, name: str, endpoint: str, identity: str) -> dict[str, str]:
        """None for an engine without a remote drafter."""
        if name not in REMOTE:
            return {}
        told = REMOTE[name] | {"IDENTITY": identity, "STATS_FILE": str(self._stats_file(name)), "STRICT_START": "1"}
        return {"VLLM_DSPARK_REMOTE": endpoint} | {f"VLLM_DSPARK_REMOTE_{key}": value for key, value in told.items()}

    def _engine_run(self, name: str, settings: dict[str, str]) -> dict[str, Any]:
        if settings:
            settings |= {"VLLM_DSPARK_REMOTE_TIMEOUT_MS": "500", "VLLM_DSPARK_REMOTE_WANT_MARGIN": "1"}
        job = {
            "target": str(self._pair.target),
            "drafter": None if name == "alone" else str(self._pair.drafter),
            "num_drafts": N,
            # The host never sees the drafts of an asynchronous round.
            "record_drafts": name != "alone" and "ASYNC" not in REMOTE.get(name, {}),
            "engine": self._engine,
            "phases": [without_aborts(phase) if name == "alone" else phase for phase in PHASES],
        }
        run = run_engine(job, settings, environment=self._environment, timeout_s=ENGINE_LIMIT_S)
        if self._out:
            (self._out / f"{name}.log").write_text(run["log"])
        stats = self._stats_file(name)
        return run | {"stats": json.loads(stats.read_text()) if stats.exists() else None}


def without_aborts(phase: dict[str, Any]) -> dict[str, Any]:
    """An abort comes at another place of the text where steps bring more tokens."""
    return {name: value for name, value in phase.items() if name != "aborts"}


def machine() -> dict[str, Any]:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return {"device": device, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d %H:%M")}


def summary(run: dict[str, Any]) -> dict[str, Any]:
    """Figures of one engine."""
    phases = run["phases"]
    found = {
        "start_s": run["started_s"],
        "tokens_per_s": {
            name: round(sum(map(len, phases[name]["tokens"].values())) / phases[name]["seconds"], 1)
            for name in ("timed1", "timed4")
        },
        "steps": {name: phase["steps"] for name, phase in phases.items()},
        "cached_tokens": phases["cachedagain"]["cached"],
        "speculator": run["facts"].get("speculator"),
        "attention_layers": len(run["facts"].get("attention_layers", [])),
        "kv_cache_blocks": run["facts"].get("kv_cache_blocks"),
        "allocated_mib": round((run["facts"].get("allocated_bytes") or 0) / 2**20, 1),
    }
    if run["stats"]:
        names = (
            *("counters", "latency", "shadow", "rank0_buffers", "not_allocated", "off_because", "last_bad_reply"),
            *("async", "async_watchdog", "async_dead"),
        )
        found |= {name: run["stats"].get(name) for name in names if name in run["stats"]}
    return found


def compare(runs: dict[str, dict[str, Any]], errors: dict[str, str]) -> dict[str, Any]:
    """What differs. Text may differ where the target itself is at a near tie, so it is counted, and judged as a share."""
    reference = next(iter(runs.values()), None)
    texts = {name: different_texts(run, reference) for name, run in runs.items()} if reference else {}
    drafts = {}
    if "local" in runs and "capacity" in runs:
        drafts["capacity_against_local"] = different_drafts(runs["capacity"], runs["local"])
    if "shadow" in runs:
        drafts["shadow"] = different_drafts(runs["shadow"], None)
    passed = (
        not errors
        and not any(texts.values())
        and all(found["diverged"] == 0 and found["blocks"] > 50 for found in drafts.values())
        and all(capacity_is_like_alone(runs))
        and all(rounds_brought_drafts(run["stats"]) for name, run in runs.items() if name in REMOTE)
    )
    return {"different_texts": texts, "drafts": drafts, "passed": passed}


def capacity_is_like_alone(runs: dict[str, dict[str, Any]]) -> list[bool]:
    """No draft layer registered, no cached token lost; nothing to compare where one of the two did not run."""
    if "capacity" not in runs or "alone" not in runs:
        return []
    capacity, alone = runs["capacity"], runs["alone"]
    return [
        capacity["facts"]["attention_layers"] == alone["facts"]["attention_layers"],
        capacity["phases"]["cachedagain"]["cached"] == alone["phases"]["cachedagain"]["cached"],
    ]


def rounds_brought_drafts(stats: dict[str, Any]) -> bool:
    """Nearly every round did, and an engine that was told to be asynchronous was."""
    counters = stats["counters"]
    total = counters.get("rounds_ok", 0) + counters.get("rounds_failed", 0) + counters.get("rounds_some_failed", 0)
    return bool(total > 100 and counters.get("rounds_ok", 0) >= 0.98 * total and not stats.get("async_dead"))


def different_texts(run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    return [
        f"{phase}/{name}"
        for phase, found in run["phases"].items()
        for name, tokens in found["tokens"].items()
        if tokens != reference["phases"][phase]["tokens"][name][: len(tokens) if phase == "aborted" else None]
    ]


def different_drafts(run: dict[str, Any], reference: dict[str, Any] | None) -> dict[str, Any]:
    """Blocks of `run`'s worker against those of `reference`, place by place, or against the local ones beside them."""
    equal = ties = diverged = 0
    examples = []
    for name, phase in run["phases"].items():
        if name == "cachedagain":  # the worker has no rows of what came from the cache
            continue
        expected = {}
        if reference is not None:
            expected = {(one["request"], one["position"]): one for one in reference["phases"][name]["drafts"]}
        for one in phase["drafts"]:
            other = one if reference is None else expected.get((one["request"], one["position"]))
            if other is None or not one["ok"]:
                continue
            differing = [position for position in range(N) if other["drafts"][position] != one["remote"][position]]
            if not differing:
                equal += 1
            elif one["margins"][differing[0]] <= TIE_MARGIN:
                ties += 1
            else:
                diverged += 1
                examples.append({"phase": name, "worker": one, "local": other["drafts"]})
    return {
        "blocks": equal + ties + diverged,
        "equal": equal,
        "ties": ties,
        "diverged": diverged,
        "examples": examples[:5],
    }


if __name__ == "__main__":
    sys.exit(main())
