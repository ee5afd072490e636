"""As `engine_run`, for a pipeline: asynchronous scheduling as the job says, what the stages recorded, and where the job says so
an end by a stale header.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO

from tests.vllm import engine_run

ENDS = "here the engine's end begins"


def main() -> None:
    job = json.loads(sys.stdin.readline())
    protocol = engine_run.take_stdout()
    if job.get("schedules_ahead"):
        schedule_ahead()
    result, llm = engine_run.run(job, protocol)
    if job.get("stress"):
        result["stress"] = stress(llm.llm_engine, job["stress"], protocol)
    result["drafts"] = [one for stage in llm.collective_rpc("pp_drafts") for one in stage]
    result["histories"] = llm.collective_rpc("pp_history")
    core = llm.llm_engine.engine_core.engine_core
    result["scheduler"] = type(core.scheduler).__name__
    result["batches_in_flight"] = core.batch_queue_size
    result["refused"] = refusal_of_structure(llm) if job.get("asks_for_structure") else None
    result["left"] = core.scheduler.get_request_counts()
    if job.get("ends_with"):
        result |= end_with_a_stale_header(llm, job["ends_with"], protocol)
    protocol.write(engine_run.RESULT + json.dumps(result) + "\n")
    llm.llm_engine.engine_core.shutdown()


def stress(engine: Any, job: dict[str, Any], protocol: TextIO) -> dict[str, Any]:
    """Repeat a phase for `for_s` seconds. The first token of the prompts in `salted` is another one each time, so that nothing
    of them is cached; the others' text is held against the first time's, a few of which may differ by near ties.
    """
    began, repetitions, requests, differing, tokens, longest_step_s = time.monotonic(), 0, 0, 0, 0, 0.0
    texts: dict[str, list[int]] = {}
    while time.monotonic() - began < job["for_s"]:
        prompts = [list(prompt) for prompt in job["phase"]["prompts"]]
        for index in job["salted"]:
            prompts[index][0] = (prompts[index][0] + 1 + repetitions) % job["vocab"]
        found = engine_run.run_phase(engine, job["phase"] | {"prompts": prompts}, protocol, None)
        unsalted = {name: text for name, text in found["tokens"].items() if int(name) not in job["salted"]}
        texts = texts or unsalted
        differing += sum(text != texts[name] for name, text in unsalted.items())
        requests += len(found["tokens"])
        tokens += sum(map(len, found["tokens"].values()))
        longest_step_s = max(longest_step_s, *found["step_s"])
        repetitions += 1
    return {
        "seconds": round(time.monotonic() - began, 1),
        "repetitions": repetitions,
        "requests": requests,
        "expected_requests": repetitions * len(job["phase"]["prompts"]),
        "tokens": tokens,
        "texts_differing": differing,
        "longest_step_s": longest_step_s,
    }


def end_with_a_stale_header(llm: Any, phase: dict[str, Any], protocol: TextIO) -> dict[str, Any]:
    """Run `phase` until the last stage sends one: at which step it did, what the engine told whoever waited for it, and with
    which status each stage's process ended.
    """
    sequence = max(llm.collective_rpc("pp_send_a_stale_header"))
    stages = [worker.proc for worker in llm.llm_engine.engine_core.engine_core.model_executor.workers]
    print(ENDS, file=sys.stderr, flush=True)
    ended_by = "nothing"
    try:
        engine_run.run_phase(llm.llm_engine, phase, protocol, None)
    except Exception as error:
        ended_by = repr(error)
        for stage in stages:
            stage.join(30)
    return {"stale_at": sequence, "ended_by": ended_by, "stages_ended_with": [stage.exitcode for stage in stages]}


def refusal_of_structure(llm: Any) -> str:
    """What a request with structured output is told."""
    from vllm.sampling_params import StructuredOutputsParams

    from vllm import SamplingParams

    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[0-9]+"))
    try:
        llm.llm_engine.add_request("structured", {"prompt_token_ids": [1, 2, 3]}, params)
    except ValueError as error:
        return str(error)
    return "nothing"


def schedule_ahead() -> None:
    """Undo that vLLM switches asynchronous scheduling off on the CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check: Any = CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: Any, vllm_config: Any) -> None:
        before = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = before

    CpuPlatform.check_and_update_config = classmethod(check_and_keep)


if __name__ == "__main__":
    main()
