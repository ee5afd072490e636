"""vLLM's own DSpark speculator on a CPU, without anything of Farspark's: the reference that remote drafts are held against.

    python -m tests.vllm.local_dspark                 the agreeable tiny pair, drafted and not: equal text, acceptance, times
    python -m tests.vllm.local_dspark --random        the pair whose drafts are refused
    python -m tests.vllm.local_dspark --ranks 2       tensor parallel
    python -m tests.vllm.local_dspark --smollm2 DIR   a chat with SmolLM2, prepared in DIR, not drafted

An engine runs in a process of its own: vLLM reads its environment at import and does not give back all that it takes.
"""

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.vllm.tiny_pair import VOCAB, make_tiny_pair

from farspark_vllm_cpu_engine import KV_CACHE_MEMORY_BYTES, environment

ROOT = Path(__file__).parents[2]

Tokens = list[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One engine and what it generates, all requests at once."""

    model: str
    drafter: str | None = None
    prompts: list[Tokens] = dataclasses.field(default_factory=list)
    # Instead of prompts: a chat with the model's own tokenizer and template.
    chat: str | None = None
    max_tokens: int = 48
    temperature: float = 0.0
    num_drafts: int = 5
    ranks: int = 1
    dtype: str = "auto"
    engine_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    tokens: list[Tokens]
    text: list[str]
    import_s: float
    start_s: float
    # The same requests twice: the first time includes what is done once.
    first_s: float
    second_s: float
    # vLLM's counters over both times: draft steps, drafted tokens, accepted ones, accepted ones by position.
    num_steps: int
    num_drafted: int
    num_accepted: int
    accepted_by_position: list[int]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.second_s


def execute(run: Run, variables: Mapping[str, str] | None = None, timeout_s: float = 600.0) -> Report:
    """Run an engine in a child process. ``variables`` are added to its environment; its log goes to our stderr."""
    child_environment = os.environ | environment(ranks=run.ranks) | {"VLLM_LOGGING_LEVEL": "WARNING"}
    # With one rank everything is in the one child, which then can be debugged and profiled; more ranks need processes.
    child_environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if run.ranks == 1 else "1"
    child_environment |= variables or {}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "report.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.vllm.local_dspark",
                "--execute",
                json.dumps(dataclasses.asdict(run)),
                str(result),
            ],
            cwd=ROOT,
            env=child_environment,
            stdout=sys.stderr,
            timeout=timeout_s,
            check=True,
        )
        return Report(**json.loads(result.read_text()))


def random_prompts(count: int, seed: int = 0, length: int = 16) -> list[Tokens]:
    """Prompts for the tiny pair."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB - 1) for _ in range(length)] for _ in range(count)]


def engine_arguments(run: Run) -> dict[str, Any]:
    """The arguments of ``vllm.LLM`` that a CPU engine of ours needs."""
    arguments: dict[str, Any] = {
        "model": run.model,
        "dtype": run.dtype,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": KV_CACHE_MEMORY_BYTES,
        "tensor_parallel_size": run.ranks,
        "skip_tokenizer_init": run.chat is None,
        # The counters of acceptance are part of the statistics.
        "disable_log_stats": False,
    }
    if run.drafter is not None:
        arguments["speculative_config"] = {
            "method": "dspark",
            "model": run.drafter,
            "num_speculative_tokens": run.num_drafts,
        }
    return arguments | run.engine_arguments


def _execute_here(run: Run) -> Report:
    began = time.monotonic()
    from vllm import LLM, SamplingParams

    imported = time.monotonic()
    llm = LLM(**engine_arguments(run))
    started = time.monotonic()
    sampling = SamplingParams(
        temperature=run.temperature, seed=0, max_tokens=run.max_tokens, detokenize=run.chat is not None
    )

    def generate() -> Any:
        if run.chat is not None:
            return llm.chat([[{"role": "user", "content": run.chat}]], sampling, use_tqdm=False)
        return llm.generate([{"prompt_token_ids": prompt} for prompt in run.prompts], sampling, use_tqdm=False)

    first = generate()
    after_first = time.monotonic()
    generate()
    after_second = time.monotonic()
    counters: dict[str, Any] = {}
    for metric in llm.get_metrics():
        counters[metric.name] = metric.values if hasattr(metric, "values") else getattr(metric, "value", None)
    # Left to the end of the process, workers get five seconds before they are killed: too few on a busy machine.
    llm.llm_engine.engine_core.shutdown(timeout=30.0)
    prefix = "vllm:spec_decode_num_"
    return Report(
        tokens=[list(output.outputs[0].token_ids) for output in first],
        text=[output.outputs[0].text for output in first],
        import_s=imported - began,
        start_s=started - imported,
        first_s=after_first - started,
        second_s=after_second - after_first,
        num_steps=counters.get(f"{prefix}drafts", 0),
        num_drafted=counters.get(f"{prefix}draft_tokens", 0),
        num_accepted=counters.get(f"{prefix}accepted_tokens", 0),
        accepted_by_position=list(counters.get(f"{prefix}accepted_tokens_per_pos", [])),
    )


def _print(name: str, report: Report) -> None:
    print(
        f"{name}: import {report.import_s:.1f} s, start {report.start_s:.1f} s, "
        f"first {report.first_s:.2f} s, then {report.tokens_per_s:.1f} tokens/s"
    )
    if report.num_drafted:
        share = report.num_accepted / report.num_drafted
        print(
            f"{name}: {report.num_steps} drafts, {report.num_accepted} of {report.num_drafted} tokens accepted "
            f"({share:.0%}), by position {report.accepted_by_position}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", action="store_true", help="a pair that agrees by chance only")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--smollm2", type=Path, metavar="DIR")
    parser.add_argument("--execute", nargs=2, metavar=("RUN", "REPORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.execute:
        run, result = options.execute
        Path(result).write_text(json.dumps(dataclasses.asdict(_execute_here(Run(**json.loads(run))))))
        return 0

    if options.smollm2:
        from farspark_vllm_cpu_engine import smollm2

        folder = smollm2.prepare(options.smollm2)
        report = execute(Run(model=str(folder), chat="What is the capital of France?", ranks=options.ranks))
        _print("SmolLM2", report)
        print(report.text[0])
        return 0

    with tempfile.TemporaryDirectory() as work:
        pair = make_tiny_pair(work, agreeable=not options.random)
        alone = Run(
            model=str(pair.target),
            prompts=random_prompts(options.requests),
            ranks=options.ranks,
            temperature=options.temperature,
        )
        expected = execute(alone)
        _print("alone  ", expected)
        drafted = execute(dataclasses.replace(alone, drafter=str(pair.drafter)))
        _print("drafted", drafted)
    is_equal = drafted.tokens == expected.tokens
    print("the tokens are the same" if is_equal else f"the tokens differ:\n{expected.tokens}\n{drafted.tokens}")
    # At a temperature drafted text is drawn from the same distribution, not from the same noise.
    return 0 if is_equal or options.temperature > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
