"""Acceptance at a temperature: drafts that are drawn and verified by what they were drawn from, against the drafter's most
probable ones, which are verified as if they were certain.

Real vLLM on the CPU, a real worker, SmolLM2-135M-Instruct and its trained drafter, the same prompts and seeds for both. Needs the
environment of `make demo`:

    python bench/sampled_acceptance.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

PROMPTS: Final = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short recipe for tomato soup.",
    "What is the difference between a list and a tuple in Python?",
    "Give me five tips for sleeping better.",
    "Tell me a short story about a dog that finds a key.",
    "What should I see in Rome in one day?",
    "Write a polite e-mail that moves a meeting to Friday.",
    "How does a bicycle stay upright?",
)
# VLLM_DSPARK_SAMPLED_TOP32, and what it means.
DRAFTS: Final = {"greedy": ("0", "greedy, verified as certain"), "drawn": ("1", "drawn, verified by q")}
RESULT: Final = "result "


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--temperatures", default="0.7,1.0", help="separated by commas (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="answers to each prompt (default: %(default)s)")
    parser.add_argument("--drafts", default=",".join(DRAFTS), help="which, separated by commas (default: both)")
    parser.add_argument("--engine", help=argparse.SUPPRESS)  # this process is the engine of that job
    options = parser.parse_args()
    if options.engine:
        print(RESULT + json.dumps(engine(json.loads(options.engine))), flush=True)
        # vLLM's shutdown may take its time.
        os._exit(0)
    temperatures = [float(one) for one in options.temperatures.split(",")]
    print(f"{len(PROMPTS)} prompts, {options.seeds} answers of {options.tokens} tokens to each")
    print("| drafts | temperature | rounds | tokens per round | accepted at positions 1, 2, … |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name in options.drafts.split(","):
        switch, meaning = DRAFTS[name]
        found = measure(switch, temperatures, options.tokens, options.seeds)
        for temperature in temperatures:
            one = found[str(temperature)]
            shares = ", ".join(f"{share:.2f}" for share in one["by_position"])
            row = f"| {meaning} | {temperature:g} | {one['rounds']:.0f} | {one['tokens_per_round']:.2f} | {shares} |"
            print(row, flush=True)
        print(f"counters: {found['counters']}", flush=True)
    return 0


def measure(switch: str, temperatures: list[float], tokens: int, seeds: int) -> dict[str, Any]:
    """One engine and one worker: by temperature, and the engine's counters of sampled drafts."""
    import farspark_smollm2_drafter
    from farspark_vllm_cpu_engine import environment, smollm2

    target = smollm2.prepare(Path.home() / ".cache" / "farspark")
    drafter = farspark_smollm2_drafter.path()
    said = subprocess.run(
        [sys.executable, "-m", "farspark", "identity", str(drafter), "--target", str(target), "--json"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    with tempfile.TemporaryDirectory() as scratch:
        ready, stats = Path(scratch) / "ready", Path(scratch) / "stats.json"
        command = [*(sys.executable, "-m", "farspark", "worker", str(drafter), "--target", str(target))]
        command += ["--listen", "tcp://127.0.0.1:0", "--ready-file", str(ready), "--slots", "4", "--context", "1024"]
        with open(Path(scratch) / "worker.log", "wb") as log:
            worker = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
        try:
            while not ready.exists():
                if worker.poll() is not None:
                    raise SystemExit(f"the worker ended: {(Path(scratch) / 'worker.log').read_text()[-2000:]}")
                time.sleep(0.1)
            settings = {
                "VLLM_DSPARK_REMOTE": ready.read_text().split()[0],
                "VLLM_DSPARK_REMOTE_POLICY": "capacity",
                "VLLM_DSPARK_REMOTE_IDENTITY": json.loads(said)["identity"],
                "VLLM_DSPARK_REMOTE_STATS_FILE": str(stats),
                "VLLM_DSPARK_REMOTE_TIMEOUT_MS": "5000",
                "VLLM_DSPARK_REMOTE_STRICT_START": "1",
                "VLLM_DSPARK_SAMPLED_TOP32": switch,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
            job = {
                "target": str(target),
                "drafter": str(drafter),
                "temperatures": temperatures,
                "tokens": tokens,
                "seeds": seeds,
            }
            done = subprocess.run(
                [sys.executable, __file__, "--engine", json.dumps(job)],
                env=os.environ | environment() | settings,
                stdout=subprocess.PIPE,
                text=True,
            )
        finally:
            worker.kill()
            worker.wait()
    lines = [line.removeprefix(RESULT) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise SystemExit("the engine ended without a result")
    found: dict[str, Any] = json.loads(lines[0])
    return found


def engine(job: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(job["target"])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS
    ]
    num_drafts = json.loads((Path(job["drafter"]) / "config.json").read_text())["block_size"]
    llm = LLM(
        model=job["target"],
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        kv_cache_memory_bytes=1 << 28,
        disable_log_stats=False,
        speculative_config={"method": "dspark", "model": job["drafter"], "num_speculative_tokens": num_drafts},
    )
    found: dict[str, Any] = {}
    before = counts(llm)
    for temperature in job["temperatures"]:
        texts = [{"prompt_token_ids": one} for one in prompts for _ in range(job["seeds"])]
        params = [
            SamplingParams(temperature=temperature, seed=number, max_tokens=job["tokens"], ignore_eos=True)
            for number in range(len(texts))
        ]
        llm.generate(texts, params, use_tqdm=False)
        after = counts(llm)
        rounds = after["rounds"] - before["rounds"]
        by_position = [(b - a) / rounds for a, b in zip(before["by_position"], after["by_position"], strict=True)]
        found[str(temperature)] = {
            "rounds": rounds,
            "tokens_per_round": 1 + sum(by_position),
            "by_position": by_position,
        }
        before = after
    speculator = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.speculator
    counters = speculator.remote.rank0.stats.counters()
    found["counters"] = {name: counters[name] for name in counters if "sampled" in name or name.startswith("rounds_")}
    return found


def counts(llm: Any) -> dict[str, Any]:
    """Verified requests (rounds), and of these how many accepted the draft at each position."""
    by_name = {one.name: one for one in llm.get_metrics()}
    return {
        "rounds": by_name["vllm:spec_decode_num_drafts"].value,
        "by_position": list(by_name["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    }


if __name__ == "__main__":
    sys.exit(main())
