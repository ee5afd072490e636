"""As `engine_run`, for data parallelism: one engine in front of a core per rank, which gets its requests by its number.

A phase names a rank for each prompt, and may pause after so many tokens of all its requests; the others' go on meanwhile. Where
the job names a folder as `watches`, every worker's steps are written there, see `dp_extension`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from tests.vllm import engine_run


def main() -> None:
    job = json.loads(sys.stdin.readline())
    protocol = engine_run.take_stdout()
    asyncio.run(run(job, protocol))


async def run(job: dict[str, Any], protocol: TextIO) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_num_seqs": 4,
        "seed": 0,
        "speculative_config": {
            "method": "dspark",
            "model": job["drafter"],
            "num_speculative_tokens": job["num_drafts"],
        },
    }
    watches = job.get("watches")
    if watches:
        arguments["worker_extension_cls"] = "tests.vllm.dp_extension.DpExtension"
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=job["target"], **(arguments | job["engine"])))
    try:
        if watches:
            await engine.collective_rpc("watch_steps")
        phases = {phase["name"]: await run_phase(engine, phase, protocol) for phase in job["phases"]}
        if watches:
            await write_steps(engine, watches)
    finally:
        engine.shutdown()
    protocol.write(engine_run.RESULT + json.dumps({"phases": phases}) + "\n")


async def write_steps(engine: Any, folder: str) -> None:
    """Once they are over: ranks in step go on for some steps without work, and are asked at different ones."""
    before = None
    while before != (found := steps_in(folder)) or not found:
        before = found
        await asyncio.sleep(1.0)
        await engine.collective_rpc("write_steps", args=(folder,))


def steps_in(folder: str) -> dict[str, dict[str, int]]:
    """How many of which kind, by worker."""
    return {path.stem: json.loads(path.read_text())["speculator_steps"] for path in Path(folder).iterdir()}


async def run_phase(engine: Any, phase: dict[str, Any], protocol: TextIO) -> dict[str, Any]:
    from vllm import SamplingParams

    pauses = {int(tokens): name for tokens, name in phase.get("pauses", {}).items()}
    made = 0

    async def one(index: int, prompt: list[int]) -> list[int]:
        nonlocal made
        params = SamplingParams(temperature=0.0, max_tokens=phase["max_tokens"][index], detokenize=False)
        name, rank = f"{phase['name']}-{index}", phase["ranks"][index]
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name, data_parallel_rank=rank):
            made += len(output.outputs[0].token_ids) - len(tokens)
            tokens = list(output.outputs[0].token_ids)
            for due in [due for due in pauses if due <= made]:
                protocol.write(f"paused {pauses.pop(due)}\n")
                await asyncio.to_thread(sys.stdin.readline)
        return tokens

    began = time.monotonic()
    tokens = await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(phase["prompts"])))
    return {
        "tokens": {str(index): one for index, one in enumerate(tokens)},
        "seconds": round(time.monotonic() - began, 2),
    }


if __name__ == "__main__":
    main()
