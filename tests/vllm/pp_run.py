"""As `engine_run`, for a pipeline: asynchronous scheduling as the job says, what the stages recorded, and where the job says so
an end by a stale header.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from tests.vllm import engine_run

ENDS = "here the engine's end begins"


def main() -> None:
    job = json.loads(sys.stdin.readline())
    protocol = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if job.get("schedules_ahead"):
        schedule_ahead()
    result, llm = engine_run.run(job, protocol)
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
