"""What a step of a real engine costs with each way of drafting: a real-sized dummy pair on one GPU, the worker beside it.

Qwen3-8B shapes with its block-7 drafter, random weights: step times and memory are real, acceptance is not. Run on the GPU
machine after `bash .gpu/a/unpack.sh` and `source .gpu/b/unpack.sh`:
    python3 bench/gpu_engine.py [--engines alone,local,capacity,async-thread,async-process] [--out FOLDER]
        [--worker-device cuda:1] [--ranks 2]        # on a machine with two GPUs
Every engine is a process of its own. All start at the same time, then they take turns, one at a time and each several times,
so that their ratios are of one run. Prints one JSON report; a step's time is the median of the turns' means.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench import gpu_draft  # noqa: E402
from tests.gpu import run_vllm_0251 as engines  # noqa: E402
from tests.gpu.environment import with_plugin  # noqa: E402
from tests.vllm.processes import run_engine  # noqa: E402

N = 7
STEPS = 150
TURNS = 3
# The first steps prefill.
PREFILL_STEPS = 20
# From its start to the end of the last engine's last turn.
LIMIT_S = 270.0
# Of a GPU's memory, free when an engine starts. How much it takes is said in bytes.
FREE_SHARE = 0.15
ENGINES = ("alone", "local", "capacity", "async-thread", "async-process")


def write_pair(folder: Path) -> tuple[Path, Path]:
    """The target's config alone, and a drafter with random tensors."""
    drafter_config = dict(gpu_draft.QWEN3["qwen3-8b"])
    shared = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    target_config = {name: drafter_config[name] for name in (*shared, "rope_theta", "rms_norm_eps")} | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "eos_token_id": None,
        "bos_token_id": 0,
    }
    drafter_config |= {"dtype": "bfloat16", "eos_token_id": None, "bos_token_id": 0, "num_anchors": 512}
    for name, config in (("target", target_config), ("drafter", drafter_config)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    # In a process of its own, which leaves nothing on the device.
    code = (
        "import sys, torch; from safetensors.torch import save_file; from bench import gpu_draft;"
        "loaded = gpu_draft.random_checkpoint(gpu_draft.configs()['qwen3-8b'], torch.device('cuda', 0));"
        "save_file({n: t.to(torch.bfloat16).cpu().contiguous() for n, t in loaded.tensors.items()}, sys.argv[1])"
    )
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    subprocess.run(
        [sys.executable, "-c", code, str(folder / "drafter" / "model.safetensors")],
        check=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    return folder / "target", folder / "drafter"


REQUESTS = (1, 4)


def phases() -> list[dict[str, Any]]:
    """A turn is the phases of one number; the first waits to be given it. Turn 0 warms up."""
    return [
        {
            "name": f"{turn} with {count}",
            "prompts": [engines.prompt(count * 10 + i, 256) for i in range(count)],
            "max_tokens": STEPS if turn else 2 * PREFILL_STEPS,
            "is_timed": True,
            "pauses": {"0": f"turn {turn}"} if count == REQUESTS[0] else {},
        }
        for turn in range(TURNS + 1)
        for count in REQUESTS
    ]


class Turns:
    """One engine at a time, in the order of `names`, once every engine waits for its turn or is gone."""

    def __init__(self, names: list[str]) -> None:
        self._order = list(names)
        self._waiting: set[str] = set()
        self._whose: str | None = None
        self._changed = threading.Condition()

    def take(self, name: str) -> None:
        """The last turn of `name` is over, it waits for its next one."""
        with self._changed:
            self._waiting.add(name)
            self._go_on(name)
            self._changed.wait_for(lambda: self._whose == name)
            self._waiting.discard(name)

    def leave(self, name: str) -> None:
        with self._changed:
            self._order.remove(name)
            self._waiting.discard(name)
            self._go_on(name)

    def _go_on(self, over: str) -> None:
        if self._whose == over:
            self._whose = None
        if self._whose is None and self._order and self._waiting.issuperset(self._order):
            self._whose = self._order[0]
            self._order.append(self._order.pop(0))
            self._changed.notify_all()


class Steps(engines.Comparison):
    """Every engine over the same phases."""

    def __init__(self, folder: Path, names: list[str], *, worker_device: str, ranks: int) -> None:
        self._folder = folder
        self._names = names
        self._turns = Turns(names)
        self._worker_device = worker_device
        self._engine = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "max_model_len": 4096,
            "gpu_memory_utilization": FREE_SHARE,
            "kv_cache_memory_bytes": 4 << 30,
            "enforce_eager": False,
            "load_format": "dummy",
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            "tensor_parallel_size": ranks,
            # It needs peer access between the GPUs, which a virtual machine may not have.
            "disable_custom_all_reduce": True,
        }
        self._environment = with_plugin(dict(os.environ), folder, hangs_after_s=LIMIT_S - 4)

    def measure(self) -> dict[str, Any]:
        target, drafter = write_pair(self._folder)
        one = functools.partial(self._one, target, drafter)
        count = len(self._names)
        return self._beside_a_worker(
            drafter, target, one, device=self._worker_device, slots=8 * count, context=4096, at_once=count
        )

    def _one(self, target: Path, drafter: Path, name: str, settings: dict[str, str]) -> dict[str, Any]:
        job = {
            "target": str(target),
            "drafter": None if name == "alone" else str(drafter),
            "num_drafts": N,
            "record_drafts": False,
            "engine": self._engine,
            "phases": phases(),
        }
        try:
            run = run_engine(
                job,
                settings,
                environment=self._environment,
                on_pause=lambda _: self._turns.take(name),
                timeout_s=LIMIT_S,
            )
        finally:
            self._turns.leave(name)
        return figures(run) | self._counted(name)

    def _counted(self, name: str) -> dict[str, Any]:
        stats = self._stats_file(name)
        if not stats.exists():
            return {}
        written = json.loads(stats.read_text())
        return {key: written[key] for key in ("counters", "latency", "async", "fused_gather") if key in written}


def figures(run: dict[str, Any]) -> dict[str, Any]:
    """Of one engine: what a step took and brought, by number of requests."""
    found: dict[str, Any] = {"start_s": run["started_s"]}
    for count in REQUESTS:
        turns = [run["phases"][f"{turn} with {count}"] for turn in range(1, TURNS + 1)]
        # The resolution of one step's time is a millisecond, so the mean says more.
        means = [1000 * statistics.fmean(one["step_s"][PREFILL_STEPS:]) for one in turns]
        tokens = sum(len(tokens) for one in turns for tokens in one["tokens"].values())
        found |= {
            f"requests{count}_step_ms": round(statistics.median(means), 3),
            f"requests{count}_turns_ms": [round(mean, 3) for mean in means],
            f"requests{count}_tokens_per_step": round(tokens / sum(one["steps"] for one in turns), 3),
        }
    return found | {"allocated_mib": round((run["facts"].get("allocated_bytes") or 0) / 2**20)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=",".join(ENGINES), help="which, in this order (default: %(default)s)")
    parser.add_argument("--worker-device", default="cuda", help="cuda:1 for a GPU of its own (default: %(default)s)")
    parser.add_argument(
        "--ranks", type=int, default=1, help="GPUs of the engine, tensor parallel (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="also write the report there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(
            Path(folder),
            arguments.engines.split(","),
            worker_device=arguments.worker_device,
            ranks=arguments.ranks,
        )
        report = steps.measure() | {"worker_device": arguments.worker_device, "ranks": arguments.ranks}
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        (arguments.out / "gpu_engine.json").write_text(text + "\n")
    return 1 if report["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
