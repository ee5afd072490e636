"""One engine under test, in this process, that does what it is told: a job as JSON on the first line of stdin, as for
`tests.vllm.pp_run`, then a command a line. Answers are lines `KIND JSON` on stdout; everything else goes to stderr.

- `{"run": PHASE}`: `did`, with the phase's texts, steps and seconds.
- `{"stress": {"for_s", "vocab", "salt", "prompts"}}`: `at` every second with the texts that have ended since, then
  `did`. Any line ends it early, in order.
- `{"trace": {"phase": PHASE, "stem"}}`: `did`, with the files that the stages wrote: a phase under torch's profiler.
- `{"margins": [[PROMPT, TEXT], ...]}`: `did`, with the two best tokens behind each, and how far they are apart.
- `{"report": true}`: `did`, with what is left and what the stages recorded.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from typing import Any, TextIO

from tests.vllm import engine_run
from tests.vllm.pp_run import schedule_ahead

AT_S = 1.0


def main() -> None:
    job = json.loads(sys.stdin.readline())
    protocol = engine_run.take_stdout()
    if job.get("schedules_ahead"):
        schedule_ahead()
    result, llm = engine_run.run(job | {"phases": []}, protocol)
    say(protocol, "ready", {"started_s": result["started_s"]})
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=read, args=(commands,), daemon=True).start()
    while command := commands.get():
        (name, given), *_ = json.loads(command).items()
        if name == "run":
            say(protocol, "did", engine_run.run_phase(llm.llm_engine, given, protocol, None))
        elif name == "stress":
            say(protocol, "did", stress(llm.llm_engine, given, protocol, commands))
        elif name == "trace":
            llm.collective_rpc("pp_begin_trace")
            engine_run.run_phase(llm.llm_engine, given["phase"], protocol, None)
            say(protocol, "did", {"files": llm.collective_rpc("pp_end_trace", args=(given["stem"],))})
        elif name == "margins":
            say(protocol, "did", {"best": [best_two(llm.llm_engine, *one) for one in given]})
        else:
            say(protocol, "did", report(llm))
    llm.llm_engine.engine_core.shutdown()


def say(protocol: TextIO, kind: str, what: dict[str, Any]) -> None:
    protocol.write(f"{kind} {json.dumps(what)}\n")


def read(commands: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        commands.put(line)
    commands.put("")


def request(number: int, job: dict[str, Any]) -> tuple[list[int], int]:
    """The prompt and the limit of a stress' request: the same in every engine. Every fourth is long and begins as no other does,
    so that nothing of it is cached; most limits fall into a block that is accepted whole."""
    if number % 4 == 0:
        vocab = job["vocab"]
        prompt = [number % vocab, number // vocab % vocab, *job["salt"]]
    else:
        prompt = job["prompts"][number % len(job["prompts"])]
    return prompt, 3 + 11 * number % 60


def streams(number: int) -> int:
    """How many run at a time: two to four."""
    return 2 + number // 25 % 3


def stress(engine: Any, job: dict[str, Any], protocol: TextIO, commands: queue.SimpleQueue[str]) -> dict[str, Any]:
    from vllm import SamplingParams

    began = said = time.monotonic()
    number, steps, running, longest_step_s = 0, 0, 0, 0.0
    texts: dict[str, list[int]] = {}
    while True:
        is_on = time.monotonic() - began < job["for_s"] and commands.empty()
        while is_on and running < streams(number):
            prompt, limit = request(number, job)
            params = SamplingParams(temperature=0.0, max_tokens=limit, detokenize=False)
            engine.add_request(f"stress-{number}", {"prompt_token_ids": prompt}, params)
            number, running = number + 1, running + 1
        if not engine.has_unfinished_requests():
            break
        stepped = time.monotonic()
        for output in engine.step():
            if output.finished:
                running -= 1
                texts[output.request_id.rsplit("-", 1)[-1]] = list(output.outputs[0].token_ids)
        steps += 1
        now = time.monotonic()
        longest_step_s = max(longest_step_s, now - stepped)
        if now - said >= AT_S:
            say(protocol, "at", {"texts": texts, "started": number, "steps": steps})
            said, texts = now, {}
    say(protocol, "at", {"texts": texts, "started": number, "steps": steps})
    return {
        "seconds": round(time.monotonic() - began, 1),
        "requests": number,
        "steps": steps,
        "longest_step_s": round(longest_step_s, 3),
    }


def best_two(engine: Any, prompt: list[int], text: list[int]) -> dict[str, Any]:
    """The target's own two best tokens behind `text`, and their distance in logits."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2, detokenize=False)
    engine.add_request("margin", {"prompt_token_ids": [*prompt, *text]}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = sorted(output.outputs[0].logprobs[0].items(), key=lambda one: -one[1].logprob)[:2]
    return {"tokens": [token for token, _ in found], "margin": found[0][1].logprob - found[1][1].logprob}


def report(llm: Any) -> dict[str, Any]:
    core = llm.llm_engine.engine_core.engine_core
    return {
        "left": core.scheduler.get_request_counts(),
        "batches_in_flight": core.batch_queue_size,
        "drafts": [one for stage in llm.collective_rpc("pp_drafts") for one in stage],
        "metrics": engine_run.metrics(llm.llm_engine),
    }


if __name__ == "__main__":
    main()
