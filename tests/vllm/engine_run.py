"""One real vLLM engine in this process: reads a job as JSON on the first line of stdin, prints one JSON line as its result.

The job names the models, the engine's arguments and a list of phases; a phase submits prompts (token ids), may abort some of
them, and may pause between steps: then `paused NAME` is printed and a line is awaited, so that whoever started this process
can kill or start a worker at a known place. The line is `go`, or `until STATE` for a pause that lasts until rank 0's connection
is in that state. Everything but these lines goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tests.vllm import mtp_stand_in
from tests.vllm.budgets import BudgetRecorder, places, set_costs, tables

# Names a folder that `tests.vllm.lay_sources` made: another version's sources over the CPU binaries of the one that is installed.
SOURCES = "FARSPARK_TEST_VLLM"
ENGINE_ENV = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "OMP_NUM_THREADS": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
RESULT = "result "
UNTIL = "until "
UNTIL_S = 20.0


def main() -> None:
    job = json.loads(sys.stdin.readline())
    protocol = take_stdout()
    result, llm = run(job, protocol)
    # Ahead of the shutdown, in which vLLM's own processes may race each other into an exception.
    protocol.write(RESULT + json.dumps(result) + "\n")
    llm.llm_engine.engine_core.shutdown()


def take_stdout() -> TextIO:
    """For the protocol alone: vLLM logs there, and finds stderr in its place from here on."""
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return protocol


def run(job: dict[str, Any], protocol: TextIO) -> tuple[dict[str, Any], Any]:
    """The result and the engine, which is still up."""
    from vllm import LLM

    if job.get("mtp_buffer"):
        mtp_stand_in.add_mtp_buffer()
    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 28,
        "disable_log_stats": False,
        "seed": 0,
    }
    if job.get("drafter"):
        arguments["speculative_config"] = {
            "method": "dspark",
            "model": job["drafter"],
            "num_speculative_tokens": job.get("num_drafts", 5),
            **job.get("speculative", {}),
        }
    began = time.monotonic()
    llm = LLM(model=job["target"], **(arguments | job.get("engine", {})))
    started_s = time.monotonic() - began
    recorder = (
        Recorder(runner_of(llm).speculator, spoils=bool(job.get("spoil_drafts"))) if job.get("record_drafts") else None
    )
    adaptive, budgets = None, None
    if job.get("record_budgets"):
        adaptive, budgets = tables(runner_of(llm).adaptive_verification), BudgetRecorder(runner_of(llm))
        set_costs(runner_of(llm).adaptive_verification, **job["costs"])
    if job.get("record_ranks_budgets"):
        llm.collective_rpc("begin_budgets", args=(job["costs"],))
    phases = {}
    for phase in job["phases"]:
        if "as_if_scheduled_ahead" in phase:
            act_on_depths(runner_of(llm), as_if_scheduled_ahead=phase["as_if_scheduled_ahead"])
        phases[phase["name"]] = run_phase(llm.llm_engine, phase, protocol, recorder, budgets)
    result = {
        "started_s": round(started_s, 1),
        "phases": phases,
        "metrics": metrics(llm.llm_engine),
        "facts": facts(llm) | {"measured_costs": adaptive},
        "ranks_budgets": llm.collective_rpc("take_budgets") if job.get("record_ranks_budgets") else [],
    }
    return result, llm


def without_a_core_s() -> float:
    """How long this thread has been ready to run while others ran: the machine's time, not a step's."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def run_phase(
    engine: Any,
    phase: dict[str, Any],
    protocol: TextIO,
    recorder: Recorder | None,
    budgets: BudgetRecorder | None = None,
) -> dict[str, Any]:
    from vllm import SamplingParams

    if budgets is not None:
        budgets.begin(phase.get("given", {}))
    if recorder is not None:
        # A recorded step waits for the device, so what is timed is not recorded.
        recorder.drafts = []
        recorder.is_on = not phase.get("is_timed")
    pauses = {int(step): name for step, name in phase.get("pauses", {}).items()}
    aborts = {int(step): name for step, name in phase.get("aborts", {}).items()}
    # Prompts that join at a later step than 0.
    joins = {int(name): step for name, step in phase.get("joins", {}).items()}
    waiting = dict(enumerate(phase["prompts"]))
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    step_s: list[float] = []
    began, step = time.monotonic(), 0
    while waiting or engine.has_unfinished_requests():
        for index in [index for index in waiting if joins.get(index, 0) <= step]:
            params = SamplingParams(
                temperature=_of(phase.get("temperature", 0.0), index),
                seed=_of(phase.get("seed"), index),
                max_tokens=_of(phase["max_tokens"], index),
                detokenize=False,
            )
            engine.add_request(f"{phase['name']}-{index}", {"prompt_token_ids": waiting.pop(index)}, params)
        if step in pauses:
            protocol.write(f"paused {pauses[step]}\n")
            answer = sys.stdin.readline().strip()
            if answer.startswith(UNTIL):
                assert recorder is not None
                recorder.wait_until(answer.removeprefix(UNTIL))
        if step in aborts:
            engine.abort_request([f"{phase['name']}-{aborts[step]}"])
        if recorder is not None:
            recorder.step = step
        if budgets is not None:
            budgets.step = step
        stepped, queued = time.monotonic(), without_a_core_s()
        outputs = engine.step()
        step_s.append(round(time.monotonic() - stepped - (without_a_core_s() - queued), 3))
        for output in outputs:
            name = output.request_id.rsplit("-", 1)[-1] if "-" not in phase["name"] else output.request_id
            tokens[name] = list(output.outputs[0].token_ids)
            cached[name] = output.num_cached_tokens or 0
        step += 1
    return {
        "tokens": tokens,
        "cached": cached,
        "steps": step,
        "seconds": round(time.monotonic() - began, 4),
        "step_s": step_s,
        "drafts": recorder.drafts if recorder else [],
        "budgets": budgets.budgets if budgets else [],
        "confidences": budgets.confidences if budgets else [],
        "counters": recorder.counters() if recorder else {},
        "metrics": metrics(engine),
    }


def _of(setting: Any, index: int) -> Any:
    """A phase's setting for all of its prompts, or a list with one for each."""
    return setting[index] if isinstance(setting, list) else setting


def metrics(engine: Any) -> dict[str, float]:
    """What vLLM itself has counted so far."""
    return {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}


class Recorder:
    """Every draft while it is on: request, step, anchor position, ids that the engine got; with a remote also the worker's.

    `spoils`: the engine gets other ids than were recorded, so that it refuses them, makes one token a step, and drafts at every
    position.
    """

    def __init__(self, speculator: Any, *, spoils: bool = False) -> None:
        self.is_on = False
        self.step = 0
        self.drafts: list[dict[str, Any]] = []
        self._speculator = speculator
        propose = speculator.propose

        def recording_propose(input_batch: Any, *rest: Any, **more: Any) -> Any:
            drafts = propose(input_batch, *rest, **more)
            # vLLM 0.33.0 proposes nothing where no request of the step can use drafts: these are an earlier step's.
            if self.is_on and more.get("num_speculative_tokens") != 0:
                self._record(input_batch, rest[4], rest[5], drafts)
            if spoils:
                drafts.zero_()
            return drafts

        speculator.propose = recording_propose

    def wait_until(self, state: str) -> None:
        """Until the connection to the worker is in `state`. Raises TimeoutError."""
        client = self._speculator.remote.rank0.client
        ends = time.monotonic() + UNTIL_S
        while client.state.value != state:
            if time.monotonic() > ends:
                raise TimeoutError(f"the connection is {client.state.value}, not {state}, after {UNTIL_S:g} s")
            time.sleep(0.01)

    def counters(self) -> dict[str, int]:
        """Rank 0's counters so far; none without a remote."""
        remote = getattr(self._speculator, "remote", None)
        return {} if remote is None else dict(remote.rank0.stats.counters())

    def _record(self, input_batch: Any, num_sampled: Any, num_rejected: Any, drafts: Any) -> None:
        remote = getattr(self._speculator, "remote", None)
        margins = remote.rank0.round.last_drafts.margins if remote is not None else None
        for row, place in enumerate(places(input_batch, num_sampled, num_rejected)):
            if place is None:
                continue
            one: dict[str, Any] = {
                "request": place[0],
                "step": self.step,
                "position": place[1],
                "drafts": drafts[row].tolist(),
            }
            if remote is not None:
                one["ok"] = bool(remote._result.ok[row])
                one["remote"] = remote._result.tokens[row].tolist()
                one["confidences"] = [round(float(value), 4) for value in remote._result.confidences[row]]
                one["margins"] = None if margins is None else [round(float(value), 4) for value in margins[row]]
            self.drafts.append(one)


def runner_of(llm: Any) -> Any:
    """The model runner, where the engine lives in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def act_on_depths(runner: Any, *, as_if_scheduled_ahead: bool) -> None:
    """Have depths acted on as under asynchronous scheduling, which vLLM does not do on the CPU, or as without."""
    from farspark.engine.vllm.depths import verify_fewer

    for wrapped in ("take_draft_token_ids", "execute_model"):
        vars(runner).pop(wrapped, None)  # the class has vLLM's own
    verify_fewer(runner, runner.speculator.remote, is_async=as_if_scheduled_ahead)


def facts(llm: Any) -> dict[str, Any]:
    """What this process can say about the engine inside it."""
    import vllm

    with contextlib.suppress(AttributeError):
        runner = runner_of(llm)
        speculator = runner.speculator
        layers = runner.vllm_config.compilation_config.static_forward_context
        return {
            "version": vllm.__version__,
            "runner": [parent.__module__ for parent in type(runner).__mro__],
            "speculator": type(speculator).__name__,
            "speculator_module": type(speculator).__module__,
            "speculator_parents": [parent.__name__ for parent in type(speculator).__mro__],
            "attention_layers": sorted(layers),
            "kv_cache_tensors": len(runner.kv_caches),
            "kv_cache_blocks": runner.kv_cache_config.num_blocks,
            "kv_cache_groups": sorted(
                type(group.kv_cache_spec).__name__ for group in runner.kv_cache_config.kv_cache_groups
            ),
            "allocated_bytes": _allocated_bytes(),
            "mtp_buffer": mtp_stand_in.facts_of(runner.model),
            "draft_parameters": sum(p.numel() for p in speculator.model.parameters()) if speculator else 0,
            "farspark_modules": sorted(name for name in sys.modules if name.startswith("farspark.")),
        }
    return {}


def _allocated_bytes() -> int | None:
    """What this process holds on the device."""
    import torch

    return torch.cuda.memory_allocated() if torch.cuda.is_available() else None


def environment(base: dict[str, str], **settings: str) -> dict[str, str]:
    """The environment of such a process: `base` without anything of ours in it, plus `settings`."""
    clean = {name: value for name, value in base.items() if not name.startswith(("VLLM_", "FARSPARK_"))}
    root = Path(__file__).parents[2]
    # The sources beside these tests, whatever is installed.
    path = [str(root), str(root / "src")]
    other = {}
    if sources := base.get(SOURCES):
        path, other = [sources, *path], {"VLLM_TARGET_DEVICE": "cpu"}
    return clean | ENGINE_ENV | other | {"PYTHONPATH": os.pathsep.join(path)} | settings


if __name__ == "__main__":
    main()
