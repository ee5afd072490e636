"""As `engine_run`, for one rank of several that run in step: all processes get the same phases, each with prompts of its own.

Every rank asks equally often whether anybody has work, so requests join at the beginning of a phase alone. What the
speculator was asked for and which collectives crossed processes is in the result.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any, TextIO

import torch.distributed as dist
from tests.vllm import engine_run
from tests.vllm.uneven_collectives import add_uneven_collectives

_COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")


def main() -> None:
    job = json.loads(sys.stdin.readline())
    protocol = engine_run.take_stdout()
    result, llm = run(job, protocol)
    protocol.write(engine_run.RESULT + json.dumps(result) + "\n")
    llm.llm_engine.engine_core.shutdown()


def run(job: dict[str, Any], protocol: TextIO) -> tuple[dict[str, Any], Any]:
    add_uneven_collectives()
    # Starts the engine, and runs nothing.
    result, llm = engine_run.run(job | {"phases": []}, protocol)
    watch = Watch(engine_run.runner_of(llm).speculator)
    for phase in job["phases"]:
        result["phases"][phase["name"]] = run_phase(llm.llm_engine, phase, protocol) | watch.found()
    parallel = engine_run.runner_of(llm).vllm_config.parallel_config
    result["rank"], result["ranks"] = parallel.data_parallel_rank, parallel.data_parallel_size
    return result, llm


def run_phase(engine: Any, phase: dict[str, Any], protocol: TextIO) -> dict[str, Any]:
    from vllm import SamplingParams

    pauses = {int(step): name for step, name in phase.get("pauses", {}).items()}
    for index, prompt in phase["prompts"].items():
        params = SamplingParams(temperature=0.0, max_tokens=phase["max_tokens"][int(index)], detokenize=False)
        engine.add_request(f"{phase['name']}-{index}", {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    began, step = time.monotonic(), 0
    while engine.has_unfinished_requests():
        if step in pauses:
            protocol.write(f"paused {pauses[step]}\n")
            sys.stdin.readline()
        for output in engine.step():
            tokens[output.request_id.rsplit("-", 1)[-1]] = list(output.outputs[0].token_ids)
        step += 1
    return {"tokens": tokens, "engine_steps": step, "seconds": round(time.monotonic() - began, 2)}


class Watch:
    """Counts, from now on, the speculator's steps and the collectives that cross processes, and keeps what was drafted."""

    def __init__(self, speculator: Any) -> None:
        self._remote = speculator.remote
        self._steps: Counter[str] = Counter()
        self._collectives: list[str] = []
        self._drafts: list[dict[str, list[int]]] = []
        propose = speculator.propose

        def counting_propose(input_batch: Any, *rest: Any, dummy_run: bool = False, **more: Any) -> Any:
            self._steps["dummy" if dummy_run else "real"] += 1
            drafts = propose(input_batch, *rest, dummy_run=dummy_run, **more)
            if not dummy_run:
                self._drafts.append(dict(zip(input_batch.req_ids, drafts.tolist(), strict=False)))
            return drafts

        speculator.propose = counting_propose
        for name in _COLLECTIVES:
            self._count_calls(name)

    def _count_calls(self, name: str) -> None:
        original = getattr(dist, name)

        def counting(*rest: Any, **more: Any) -> Any:
            size = dist.get_world_size(more.get("group"))
            if size > 1:
                self._collectives.append(f"{name} of {size}{_apart(more.get('group'))}")
            return original(*rest, **more)

        setattr(dist, name, counting)

    def so_far(self) -> dict[str, Any]:
        return {
            "speculator_steps": dict(self._steps),
            "drafts": list(self._drafts),  # of real steps, by request
            "collectives": list(self._collectives),
            "counters": self._remote.rank0.counters() if self._remote.rank0 is not None else None,
        }

    def found(self) -> dict[str, Any]:
        """Of the phase that is over."""
        found = self.so_far()
        self._steps.clear()
        self._drafts.clear()
        self._collectives.clear()
        return found


def _apart(group: Any) -> str:
    """How far apart its ranks are, which tells groups of one size apart; nothing for one that vLLM has made beside the world."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except KeyError:
        return ""
    return f" by {ranks[1] - ranks[0]}"


if __name__ == "__main__":
    main()
