"""The pipeline's token transport where it is meant for: two GPUs, NCCL, CUDA graphs, long enough to freeze what can freeze.

    python3 tests/gpu/pp_stress.py [--part transport|engine|stress|all] [--rounds 8] [--minutes 15] [--out FILE] [--log FILE]
    python3 tests/gpu/pp_stress.py --dry-run        # the same on a CPU, with one GPU or none: small, Gloo, no graphs

`transport` drives the handler without vLLM: random steps over NCCL, and over Gloo from pinned memory, one process to a stage,
then a stale header and a dead stage. The other parts run vLLM (0.32.0 or newer: 0.25.1 takes no drafter in a pipeline;
`tests/gpu/bundle_032.sh` packs it): an engine of one stage and one of two for every setting of the transport, with the local
drafter and with a worker, all started at the same time. `engine` compares text and drafts, and then times the engines in turn,
all others idle: --rounds times those that are to be as fast as vLLM's own, twice the others. `stress` has all of them serve
two to four streams at a time for --minutes: long prompts that no cache knows, limits that cut blocks, every text held against
the one stage's. What is found goes into --log as it is found, and at the end into one JSON report, also in --out. Exits 0 if
text and drafts are equal, every fault was found within a second, no step stalled, and nothing was left running or waiting; 1
if not; 3 if all was well until a signal ended it. With --traces FOLDER, where each stage's host and device spend some steps
goes there at the end, for a trace viewer.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import queue
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.gpu.environment import with_plugin  # noqa: E402
from tests.gpu.pp_engine import request  # noqa: E402
from tests.gpu.run_vllm_0251 import SIZES, TIE_MARGIN  # noqa: E402
from tests.vllm import engine_run, tiny_pair  # noqa: E402
from tests.vllm.processes import Worker, end_keeper, end_with_us  # noqa: E402

FAULT_LIMIT_S = 1.0
FAULT_RUN_S = 60.0
AFTER_S = 10.0
N = 5
SALTED = 700  # tokens of a long prompt
START_S = 240.0
PHASE_S = 60.0
# A step that takes longer is a stall: its stages are asked where they are, and given as long again.
STALL_S = 15.0
# The part of a worker's drafts that may differ from the local ones: a few are near ties of its other kernels.
REMOTE_TIES = 0.05
# vLLM warns with a traceback of what it could not import.
BAD_LINE = re.compile(r"died|MISMATCH|[Ww]atchdog|ERROR.*Traceback|^Traceback|ends with status")
ALONE = "one stage"
OWN = "vLLM's own"
# How the tokens go from the last stage to the first; without a setting it is vLLM's own way.
SETTINGS: dict[str, dict[str, str]] = {
    ALONE: {},
    OWN: {},
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
ON_CPU = (ALONE, "host")
# What is to be as fast as vLLM's own: timed in every turn. The others cost time, and are timed in the first ones.
COMPARED = (OWN, "device", "host")
OTHERS_TURNS = 2


class Ended(Exception):
    """By a signal: what was found so far is the report."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part",
        default="all",
        help="transport, engine, stress, several of them with commas, or all; engines are started once (default %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=20_000, help="random steps of the transport (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns that the engines are timed for (default %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="of the engines' stress (default %(default)s)")
    parser.add_argument(
        "--settings",
        help="which engines, with semicolons, of: " + "; ".join(SETTINGS) + " (default: all; the first is always one)",
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small: shows that the script itself works")
    parser.add_argument("--out", type=Path, help="also write the report there, after every part and at the end")
    parser.add_argument("--log", type=Path, help="write there what is found as it is found (default: --out with .log)")
    parser.add_argument(
        "--traces", type=Path, help="have the engines that are compared trace some steps at the end, there"
    )
    options = parser.parse_args()
    parts = {"transport", "engine", "stress"} if options.part == "all" else set(options.part.split(","))
    if unknown := parts - {"transport", "engine", "stress"}:
        parser.error(f"--part: {', '.join(sorted(unknown))} is none of transport, engine, stress, all")
    names = [ALONE, *(options.settings.split(";") if options.settings else ON_CPU if options.dry_run else SETTINGS)]
    names = list(dict.fromkeys(name.strip() for name in names))
    if wrong := [name for name in names if name not in SETTINGS]:
        parser.error(f"--settings: {'; '.join(wrong)} is none of {'; '.join(SETTINGS)}")
    if options.dry_run:
        options.steps, options.minutes = min(options.steps, 300), min(options.minutes, 0.2)
        options.rounds = min(options.rounds, 2)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

    def end(number: int, _: Any) -> None:
        raise Ended(f"signal {number}")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    log = options.log or (options.out.with_suffix(".log") if options.out else None)
    with Report(options.out, log) as report:
        try:
            if "transport" in parts:
                report.add("transport", stress_transport(options.steps, on_cpu=options.dry_run))
            if parts & {"engine", "stress"}:
                with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                    run_engines(Path(folder), names, parts, options, report)
        except Ended as ended:
            report.ended_by = str(ended)
        except Exception:
            report.add("error", {"good": False, "traceback": traceback.format_exc()})
        return report.finish()


class Report:
    """What was found, on disk as soon as it was."""

    def __init__(self, out: Path | None, log: Path | None) -> None:
        self.parts: dict[str, dict[str, Any]] = {}
        self.ended_by: str | None = None
        self._out = out
        self._log = log.open("a") if log else None
        self._began = time.monotonic()

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:6.1f} s] {text}"
        print(line, file=sys.stderr, flush=True)
        if self._log is not None:
            print(line, file=self._log, flush=True)

    def add(self, name: str, part: dict[str, Any]) -> None:
        self.parts[name] = part
        self.say(f"{name}: {json.dumps(part)[:2000]}")
        self._write()

    def _write(self) -> str:
        good = bool(self.parts) and all(part["good"] for part in self.parts.values())
        whole = self.parts | {"ended_by": self.ended_by, "good": good}
        text = json.dumps(whole, indent=1)
        if self._out is not None:
            self._out.write_text(text + "\n")
        return text

    def finish(self) -> int:
        print(self._write())
        good = bool(self.parts) and all(part["good"] for part in self.parts.values())
        status = (3 if self.ended_by else 0) if good else 1
        self.say(f"ended with status {status}")
        return status


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
        stages = [context.Process(target=run_stage, args=(job | {"rank": rank},), daemon=True) for rank in range(2)]
        for stage in stages:
            stage.start()
        limit_s = FAULT_RUN_S if job.get("fault") else job["steps"] * 0.05 + 120
        for stage in stages:
            stage.join(limit_s)
            limit_s = AFTER_S  # the faulty one may wait for the peer that found it
            if stage.is_alive():
                stage.kill()
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

    from farspark.engine.vllm.pp.faults import TokenTransportError

    os.dup2(os.open(f"{job['folder']}/{job['rank']}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 1)
    if not job["on_cpu"]:
        torch.cuda.set_device(job["rank"])
    store = f"file://{job['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=job["rank"], world_size=job["world"])
    group = dist.new_group(backend="nccl" if job["wire"] == "cuda" else "gloo")
    device = "cpu" if job["on_cpu"] else f"cuda:{job['rank']}"
    wire = device if job["wire"] == "cuda" else "cpu"
    stage = Stage(job | {"device": device, "wire": wire}, group)
    try:
        stage.run()
    except TokenTransportError as error:
        stage.end(error)
    print(json.dumps({"consumed": stage.consumed, "digest": stage.digest}), flush=True)
    dist.barrier()
    os._exit(0)


class Engine:
    """A process of `tests.gpu.pp_engine`, and what it has said."""

    def __init__(self, name: str, job: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self.texts: dict[int, array.array[int]] = {}
        self.heard = time.monotonic()
        self.stalls: list[str] = []
        self.error: str | None = None
        self.is_ready = False
        self.answers_signals = any(setting.startswith("VLLM_DSPARK_PP") for setting in environment)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.pp_engine"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # the engine's own workers end with it
            )
        self._keeper = end_with_us(self._process)
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self.tell(job)

    def _read(self, stdout: TextIO) -> None:
        for line in stdout:
            self.heard = time.monotonic()
            if line.startswith("at "):
                for number, text in json.loads(line[3:])["texts"].items():
                    self.texts[int(number)] = array.array("i", text)
            else:
                self._lines.put(line)
        self._lines.put("")

    def tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is heard of as an answer that does not come
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """What it says to what it was told last. None, and `error`, where it has ended or says nothing in time."""
        if self.error is not None:
            return None
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.fail(f"said nothing for {timeout_s:g} s")
            return None
        if not line:
            self.fail("ended")
            return None
        answer: dict[str, Any] = json.loads(line.partition(" ")[2])
        return answer

    def has_answered(self) -> bool:
        return self.error is not None or not self._lines.empty()

    def fail(self, what: str) -> None:
        """Of no use from here on."""
        self.error = f"{what}:\n{self.log.read_text(errors='replace')[-3000:]}"
        self.kill()

    def ask_where(self) -> None:
        """Have every process of a stalled engine write its stacks into the log."""
        if not self.answers_signals:
            return
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                session = int(file.read_text().rpartition(")")[2].split()[3])
                command = (file.parent / "cmdline").read_bytes()
                if session == self._process.pid and b"resource_tracker" not in command:
                    os.kill(int(file.parent.name), signal.SIGUSR1)

    def bad_lines(self) -> list[str]:
        return [line for line in self.log.read_text(errors="replace").splitlines() if BAD_LINE.search(line)]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        end_keeper(self._keeper)


class Fleet:
    """The engines, started at the same time, and the worker beside them."""

    def __init__(self, folder: Path, names: list[str], *, on_cpu: bool) -> None:
        self._folder = folder
        self._on_cpu = on_cpu
        self.vocab = tiny_pair.VOCAB - 12
        if not on_cpu:
            for name, value in SIZES.items():
                setattr(tiny_pair, name, value)
            self.vocab = SIZES["VOCAB"] - 96  # type: ignore[operator]
        self._pair = tiny_pair.make_tiny_pair(folder, 0, agreeable=True)
        rng = random.Random(5)
        self.salt = [rng.randrange(self.vocab) for _ in range(60 if on_cpu else SALTED)]
        self.prompts = [[rng.randrange(self.vocab) for _ in range(length)] for length in (16, 5, 33, 1, 150, 7, 12, 90)]
        self._names = names
        self.engines: dict[str, Engine] = {}

    @contextlib.contextmanager
    def started(self, report: Report) -> Iterator[dict[str, Engine]]:
        """Those that came up; the others' errors are in the report."""
        remote = [name for name in self._names if "VLLM_DSPARK_REMOTE_POLICY" in SETTINGS[name]]
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.callback(self._kill)
            for name in self._names:
                if name not in remote:
                    self._start(name, {})
            reach: dict[str, str] = {}
            if remote:
                try:
                    reach = stack.enter_context(self._worker())
                except RuntimeError as error:
                    report.add("worker", {"good": False, "error": str(error)[-3000:]})
                else:
                    report.say(f"the worker is ready after {time.monotonic() - began:.0f} s")
                    for name in remote:
                        self._start(name, reach)
            # Engines that start at the same time may choose the same port: one that ended may try again.
            for name in self._await_start(report, began + START_S):
                self._start(name, reach if name in remote else {})
            self._await_start(report, time.monotonic() + START_S / 2)
            yield self.engines

    def _await_start(self, report: Report, ends: float) -> list[str]:
        """Those that have ended instead."""
        ended = []
        for name, engine in self.engines.items():
            if engine.is_ready:
                continue
            ready = engine.answer(max(1.0, ends - time.monotonic()))
            engine.is_ready = ready is not None
            report.say(f"{name}: " + (f"started in {ready['started_s']} s" if ready else str(engine.error)))
            if ready is None:
                ended.append(name)
        return ended

    def _kill(self) -> None:
        for engine in self.engines.values():
            if engine.error is None:
                engine.kill()

    def _start(self, name: str, reach: dict[str, str]) -> None:
        stages = 1 if name == ALONE else 2
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        plan = folder / "plan.json"
        plan.write_text(json.dumps({"records": "compared"}))
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
            environment = with_plugin(dict(os.environ), folder)
            engine |= {"dtype": "bfloat16", "max_model_len": 2048, "max_num_batched_tokens": 2048, "max_num_seqs": 32}
            # Graphs without torch.compile: half the start time. Room for all of them on the two devices.
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            # Said in bytes: what others take while an engine starts would count as its own.
            engine |= {"enforce_eager": False, "compilation_config": graphs, "gpu_memory_utilization": 0.08}
            engine |= {"kv_cache_memory_bytes": 2 << 30}
        job = {
            "target": str(self._pair.target),
            "drafter": str(self._pair.drafter),
            "num_drafts": N,
            "schedules_ahead": self._on_cpu,
            "engine": engine,
        }
        environment |= SETTINGS[name] | reach | {"PP_TEST_PLAN": str(plan)}
        self.engines[name] = Engine(name, job, environment, folder / "log")

    @contextlib.contextmanager
    def _worker(self) -> Iterator[dict[str, str]]:
        """A worker for all engines that want one; how to reach it."""
        from farspark.worker.checkpoint import identities

        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        device = "cpu" if self._on_cpu else "cuda"
        dtype = "float32" if self._on_cpu else "bfloat16"
        worker = Worker(
            self._pair.drafter, self._pair.target, self._folder, device=device, dtype=dtype, slots=64, context=2048
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


def run_engines(folder: Path, names: list[str], parts: set[str], options: Any, report: Report) -> None:
    fleet = Fleet(folder, names, on_cpu=options.dry_run)
    with fleet.started(report) as engines:
        if "engine" in parts:
            report.add("engine", compare(fleet, engines))
            report.add("timed", time_in_turn(fleet, engines, options, report))
            print(table(report.parts["engine"], report.parts["timed"]), file=sys.stderr, flush=True)
        if "stress" in parts:
            report.add("stress", stress(fleet, engines, options.minutes, report))
        if options.traces:
            report.add("traces", trace(fleet, engines, options))


def compare(fleet: Fleet, engines: dict[str, Engine]) -> dict[str, Any]:
    """Text and drafts of two stages against those of one, all engines at once."""
    phase = {
        "name": "compared",
        "prompts": fleet.prompts,
        "max_tokens": [60, 17, 53, 45, 60, 6, 58, 3],
        "joins": {"4": 3, "5": 6},
    }
    found: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for engine in engines.values():
        engine.tell({"run": phase})
        engine.tell({"report": True})
    for name, engine in engines.items():
        ran, said = engine.answer(PHASE_S), engine.answer(PHASE_S)
        if ran and said:
            found[name] = ran, said
    report: dict[str, Any] = {"good": ALONE in found}
    drafts = {name: {(one[0], one[1]): one[2] for one in said["drafts"]} for name, (_, said) in found.items()}
    for name, engine in engines.items():
        if name == ALONE:
            continue
        if ALONE not in found or name not in found:
            report[name] = {"error": engine.error}
            report["good"] &= name == OWN
            continue
        both = drafts[ALONE].keys() & drafts[name].keys()
        one = {
            "text_equal": found[name][0]["tokens"] == found[ALONE][0]["tokens"],
            "drafts_compared": len(both),
            "drafts_differing": sum(drafts[ALONE][at] != drafts[name][at] for at in both),
            "batches_in_flight": found[name][1]["batches_in_flight"],
            "left": found[name][1]["left"],
        }
        may_differ = REMOTE_TIES * len(both) if "remote" in name else 0
        is_good = one["text_equal"] and one["drafts_differing"] <= may_differ and one["left"] == [0, 0]
        report["good"] &= is_good or name == OWN
        report[name] = one
    return report


def time_in_turn(fleet: Fleet, engines: dict[str, Engine], options: Any, report: Report) -> dict[str, Any]:
    """What a step takes while all others are idle: one batch that waits for its own tokens, and two that fill both stages."""
    long = 20 if options.dry_run else 1200
    phases: list[dict[str, Any]] = [
        {"name": "one batch", "prompts": fleet.prompts[:4], "max_tokens": long},
        {
            "name": "two batches",
            "prompts": fleet.prompts,
            "max_tokens": long,
            "joins": {str(i): 1 for i in range(4, 8)},
        },
    ]
    turns: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {one["name"]: [] for one in phases} for name in engines
    }
    for turn in range(options.rounds + 1):  # the first one is for warming up
        timed = [name for name in engines if turn <= OTHERS_TURNS or name in COMPARED]
        for name in timed if turn % 2 else reversed(timed):
            engine = engines[name]
            for phase in phases:
                if engine.error is not None:
                    continue
                engine.tell({"run": phase})
                ran = engine.answer(PHASE_S)
                if ran and turn:
                    tokens = sum(map(len, ran["tokens"].values()))
                    turns[name][phase["name"]].append(
                        {"ms": 1000 * ran["seconds"] / ran["steps"], "tokens_per_s": tokens / ran["seconds"]}
                    )
        report.say(f"timed, turn {turn} of {options.rounds}")
    return {name: summary(each, turns.get(OWN, {})) for name, each in turns.items()} | {"good": True}


def trace(fleet: Fleet, engines: dict[str, Engine], options: Any) -> dict[str, Any]:
    """The files written, by engine: one batch, all others idle."""
    options.traces.mkdir(parents=True, exist_ok=True)
    phase = {"name": "traced", "prompts": fleet.prompts[:4], "max_tokens": 20 if options.dry_run else 100}
    report: dict[str, Any] = {"good": True}
    for name in [name for name in engines if name in COMPARED]:
        stem = str((options.traces / name.replace(" ", "_").replace("'", "")).resolve())
        engines[name].tell({"trace": {"phase": phase, "stem": stem}})
        report[name] = engines[name].answer(PHASE_S)
    return report


def summary(turns: dict[str, list[dict[str, float]]], own: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and of the ratio to vLLM's own in the same turn."""
    found: dict[str, Any] = {}
    for phase, each in turns.items():
        if not each:
            continue
        found[phase] = {
            "ms_a_step": round(statistics.median(one["ms"] for one in each), 3),
            "ms_a_step_all": [round(one["ms"], 2) for one in each],
            "tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in each)),
        }
        pairs = list(zip(each, own.get(phase, []), strict=False))
        if pairs:
            found[phase]["to_own"] = round(statistics.median(one["ms"] / other["ms"] for one, other in pairs), 3)
            found[phase]["ms_more_than_own"] = round(
                statistics.median(one["ms"] - other["ms"] for one, other in pairs), 3
            )
    return found


def table(compared: dict[str, Any], timed: dict[str, Any]) -> str:
    lines = [
        "| tokens by | text | drafts compared, different | in flight | one batch: ms a step, to own, tokens/s | two batches |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, one in timed.items():
        if name == "good":
            continue
        text = compared.get(name, {})
        cells = [
            name,
            {True: "equal", False: "DIFFERS"}.get(text.get("text_equal", ""), "–"),
            f"{text.get('drafts_compared', '–')}, {text.get('drafts_differing', '–')}",
            str(text.get("batches_in_flight", "–")),
        ]
        for phase in ("one batch", "two batches"):
            found = one.get(phase)
            cells.append(
                f"{found['ms_a_step']:.2f}, {found.get('to_own', float('nan')):.2f}, {found['tokens_per_s']}"
                if found
                else "–"
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def stress(fleet: Fleet, engines: dict[str, Engine], minutes: float, report: Report) -> dict[str, Any]:
    """All engines at once, each at its own speed through the same requests."""
    job = {"for_s": 60 * minutes, "vocab": fleet.vocab, "salt": fleet.salt, "prompts": fleet.prompts}
    living = {name: engine for name, engine in engines.items() if engine.error is None}
    for engine in living.values():
        engine.tell({"stress": job})
        engine.heard = time.monotonic()
    began = said = time.monotonic()
    stopped: Ended | None = None
    try:
        while not all(engine.has_answered() for engine in living.values()):
            time.sleep(0.2)
            watch(living, report)
            if time.monotonic() - said >= 15.0:
                said = time.monotonic()
                done = ", ".join(f"{name} {len(engine.texts)}" for name, engine in living.items())
                report.say(f"stress, {said - began:.0f} s, requests: {done}")
    except Ended as ended:
        stopped = ended
        for engine in living.values():
            engine.tell({"end": True})
    found = {name: engine.answer(STALL_S * 2) for name, engine in living.items()}
    for name, engine in living.items():
        if stopped is not None:
            engine.answer(STALL_S)  # to what ended it
        engine.tell({"report": True})
        said_at_end = engine.answer(STALL_S)
        found[name] = (found[name] or {}) | {"left": said_at_end["left"] if said_at_end else None}
    judged = judge(fleet, living, found)
    if stopped is not None:
        report.add("stress", judged)
        raise stopped
    return judged


def watch(engines: dict[str, Engine], report: Report) -> None:
    for name, engine in engines.items():
        silent_s = time.monotonic() - engine.heard
        if engine.has_answered() or silent_s < STALL_S:
            continue
        if silent_s >= 2 * STALL_S:
            engine.fail(f"stood still for {silent_s:.0f} s")
            report.say(f"{name}: {engine.error}")
        elif not engine.stalls or engine.stalls[-1] != f"{engine.heard:.1f}":
            engine.stalls.append(f"{engine.heard:.1f}")
            report.say(f"{name}: has said nothing for {silent_s:.0f} s")
            engine.ask_where()


def judge(fleet: Fleet, engines: dict[str, Engine], found: dict[str, Any]) -> dict[str, Any]:
    """Every text against the one stage's. Where it differs, the one stage says what it thinks of the two tokens: they may only
    be its own two best, too close for two shapes of a forward to agree."""
    report: dict[str, Any] = {"good": ALONE in engines and bool(engines[ALONE].texts)}
    job = {"vocab": fleet.vocab, "salt": fleet.salt, "prompts": fleet.prompts}
    alone = engines[ALONE].texts if ALONE in engines else {}
    for name, engine in engines.items():
        both = alone.keys() & engine.texts.keys()
        differing = [number for number in sorted(both) if alone[number] != engine.texts[number]]
        places: list[tuple[int, int, list[int], set[int]]] = []
        for number in differing[:200]:
            mine, theirs = engine.texts[number], alone[number]
            at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), -1)
            if at < 0 or len(mine) != len(theirs):
                places.append((number, at, [], {-1}))
            else:
                places.append((number, at, list(theirs[:at]), {mine[at], theirs[at]}))
        best: list[dict[str, Any]] = []
        if places and engines[ALONE].error is None:
            engines[ALONE].tell({"margins": [(request(number, job)[0], text) for number, _, text, _ in places]})
            best = (engines[ALONE].answer(PHASE_S) or {"best": []})["best"]
        ties = sum(
            set(one["tokens"]) == tokens and one["margin"] <= TIE_MARGIN
            for one, (*_, tokens) in zip(best, places, strict=False)
        )
        lines = engine.bad_lines()
        one = (found[name] or {}) | {
            "texts": len(engine.texts),
            "compared": len(both),
            "tokens": sum(map(len, engine.texts.values())),
            "near_ties": ties,
            "differing": len(differing) - ties,
            "first_differing": [(number, at) for number, at, *_ in places][:5],
            "stalls": len(engine.stalls),
            "lines": lines[:5],
            "error": engine.error,
        }
        is_whole = one.get("requests") == one["texts"] > 0 and one["left"] == [0, 0]
        is_good = is_whole and not (one["differing"] or one["stalls"] or lines or engine.error)
        report["good"] &= is_good or name == OWN
        report[name] = one | {"good": is_good}
    return report


if __name__ == "__main__":
    sys.exit(main())
