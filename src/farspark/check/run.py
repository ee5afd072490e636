"""The checks as procedures: ask the server, read the stats file, have the worker stopped and started, let `judge` judge."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from farspark.check import judge
from farspark.check.findings import Finding
from farspark.check.measurement import Answer, Measurement
from farspark.check.metrics import parse_memory
from farspark.check.server import Server, ServerError
from farspark.errors import ConfigError, FarsparkError

# Rank 0 writes its file with a round, and a second after the last time at the earliest.
_STATS_EVERY_S: Final = 1.2
_LOOK_EVERY_S: Final = 0.3
# Rounds that must have gone one way before a drill goes on.
_SETTLED_ROUNDS: Final = 5
_LONG_SENTENCE: Final = (
    "The committee read chapter {number} of the report aloud, slowly, and nobody objected to a word of it. "
)
_LONG_SENTENCES: Final = 60


@dataclass(frozen=True, slots=True)
class Check:
    """One of the in-engine checks, in words: `--list` prints them."""

    name: str
    title: str
    needs: str
    does: str
    passes: str
    needs_baseline: bool = False
    policy: str | None = None  # that the engine must be started with


CHECKS: Final = (
    Check(
        "baseline",
        "record what the others compare with",
        "the engine as it was without Farspark (A-local); --save FILE",
        "asks the prompts, the long one twice, and saves tokens, acceptance, speed, cached tokens and KV cache",
        "every answer has text and an end",
    ),
    Check(
        "shadow",
        "1. wiring and parity",
        "C-shadow and the worker",
        "asks the prompts and reads the stats file",
        f"worker ready; {judge.MIN_ROUNDS_OK:.0%} of the rounds succeed; the drafts are equal or near ties, none is far off, and "
        "the confidences lie near each other, by the bounds in the stats file (shadow.bounds); blocks in which a router was near "
        "a tie are kept out",
        policy="shadow",
    ),
    Check(
        "shadow-remote",
        "2. acceptance of the remote drafts",
        "C-shadow-remote and the worker; a baseline of A-local",
        "asks the baseline's prompts and compares accepted/drafted from /metrics",
        f"within {judge.NOISE:g} standard errors of the baseline; the text is the baseline's",
        needs_baseline=True,
        policy="shadow",
    ),
    Check(
        "timing",
        "3. the two remote cost settings",
        "C-shadow and the worker; for the verify-only table also the live one (--round-ms or VLLM_DSPARK_ROUND_MS)",
        "asks the prompts, reads the stats file and prints VLLM_DSPARK_REMOTE_DRAFT_MS and VLLM_DSPARK_REMOTE_ROUND_MS",
        "both could be derived, and the table does not fall with depth",
        policy="shadow",
    ),
    Check(
        "capacity",
        "4., 4b. the drafter's memory is gone and the output is sane",
        "C-capacity or C-capacity-async and the worker; a baseline of A-local, both with --log",
        "asks the baseline's prompts; reads load size and graph memory of every rank from vLLM's log",
        "load size below the baseline on every rank; KV cache and concurrency not below; the text is the baseline's; speed is "
        "told",
        needs_baseline=True,
        policy="capacity",
    ),
    Check(
        "prefix-cache",
        "4c. prefix-cache hits are kept",
        "C-capacity and the worker; a baseline of A-local",
        "asks the same long prompt twice",
        "as many cached tokens as the baseline; no whole block is computed again",
        needs_baseline=True,
        policy="capacity",
    ),
    Check(
        "kv",
        "5. a larger KV cache",
        "C-capacity with more memory for the KV cache; a baseline saved by `check capacity`",
        "asks the baseline's prompts",
        "more KV tokens and more concurrency than the baseline",
        needs_baseline=True,
        policy="capacity",
    ),
    Check(
        "resilience",
        "6. the worker is stopped and started in C-resilience",
        "C-resilience and a worker that may be stopped",
        "keeps asking; has the worker stopped, then started",
        "no request fails; local rounds are counted while it is gone; then one more HELLO, resyncs, successes",
        policy="resilience",
    ),
    Check(
        "failure",
        "7. the worker is stopped and started in C-capacity",
        "C-capacity and a worker that may be stopped",
        "keeps asking; has the worker stopped, then started",
        "no request fails; target-only rounds are counted while it is gone; then one more HELLO, resyncs, successes",
        policy="capacity",
    ),
)
BY_NAME: Final = {check.name: check for check in CHECKS}
DRILLS: Final = frozenset({"resilience", "failure"})
NEEDS_STATS: Final = frozenset(BY_NAME) - {"baseline"}


Progress = Callable[[str, int, int], None]
Act = Callable[[], None]
"""Has the worker stopped, or started, by whoever can, and returns when that is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    prompts: Sequence[str]
    max_tokens: int
    concurrency: int
    patience_s: float  # for a drill's worker to be missed, and to be back
    stats: Path | None
    log: Path | None  # vLLM's own
    round_ms: Sequence[float] | None


def run_check(
    name: str,
    settings: Settings,
    server: Server,
    baseline: Measurement | None,
    progress: Progress,
    *,
    stop: Act | None = None,
    start: Act | None = None,
) -> tuple[list[Finding], Measurement | None]:
    """The findings of check `name`, and what was measured on the way, to be saved.

    Raises ConfigError where the check cannot be made here, FarsparkError where the server or the worker does not play along.
    """
    check = BY_NAME[name]
    if check.needs_baseline and baseline is None:
        raise ConfigError(f"check {name} needs --baseline FILE: {check.needs}")
    if name == "baseline":
        measured = measure(settings, server, progress, with_long_prompt=True)
        return judge.sane(measured), measured
    if settings.stats is None:
        raise ConfigError(f"check {name} needs --stats FILE")
    stats = StatsFile(settings.stats)
    # A fresh engine has written nothing before its first request.
    before = settled(settings, server, stats)
    if check.policy is not None and before.get("policy") != check.policy:
        raise ConfigError(
            f"{settings.stats}: the engine's policy is {before.get('policy')}, check {name} needs {check.policy}: {check.needs}"
        )
    if name in DRILLS:
        assert stop is not None
        assert start is not None
        return drill(settings, server, stats, progress, stop, start), None
    measured = measure(settings, server, progress, with_long_prompt=name in ("capacity", "prefix-cache"))
    after = settled(settings, server, stats)
    findings = [*judge.health(before, after), *judge.sane(measured)]
    if name == "shadow":
        findings += judge.parity(after)
    elif name == "timing":
        findings += judge.timing(after, settings.round_ms)
    elif baseline is not None:
        findings += {
            "shadow-remote": lambda: judge.acceptance(measured, baseline) + judge.same_text(measured, baseline),
            "capacity": lambda: (
                judge.saved_memory(after, measured, baseline)
                + judge.same_text(measured, baseline)
                + judge.speed(measured, baseline)
            ),
            "prefix-cache": lambda: judge.prefix_cache(measured, baseline),
            "kv": lambda: judge.more_kv(measured, baseline),
        }[name]()
    return findings, measured


class StatsFile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """Raises ConfigError."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"--stats {self.path}: {error.strerror}; rank 0 of a running engine writes it "
                "(VLLM_DSPARK_REMOTE_STATS_FILE, or the file that its log names)"
            ) from error
        except ValueError as error:
            raise ConfigError(f"--stats {self.path}: not JSON: {error}") from error
        if not isinstance(data, dict) or "counters" not in data:
            raise ConfigError(f"--stats {self.path}: not a stats file of an engine")
        return data

    def rounds(self) -> int | None:
        """Counted so far; None where there is no file yet."""
        return self.read().get("rounds") if self.path.exists() else None


def questions_of(settings: Settings) -> str:
    """A digest of what is asked: two measurements with the same one can be compared."""
    asked = json.dumps([list(settings.prompts), settings.max_tokens, settings.concurrency])
    return hashlib.sha256(asked.encode()).hexdigest()[:16]


def measure(settings: Settings, server: Server, progress: Progress, *, with_long_prompt: bool) -> Measurement:
    """Ask every prompt once, and count what the engine counts meanwhile."""
    model, max_model_len = server.model()
    prompts = [server.tokenize(model, text) for text in settings.prompts]
    # Whatever the engine does once is not measured.
    server.complete(model, prompts[0], 4)
    before = server.metrics()
    began = time.monotonic()
    answers: list[Answer] = []
    with ThreadPoolExecutor(settings.concurrency) as pool:
        for answer in pool.map(lambda prompt: server.complete(model, prompt, settings.max_tokens), prompts):
            answers.append(answer)
            progress("asking", len(answers), len(prompts))
    seconds = time.monotonic() - began
    measured = Measurement(
        model=model,
        max_model_len=max_model_len,
        questions=questions_of(settings),
        answers=answers,
        seconds=seconds,
        metrics=server.metrics().since(before),
        memory=None if settings.log is None else parse_memory(read_log(settings.log)),
    )
    if with_long_prompt:
        length, cached = long_prompt_twice(server, model, max_model_len)
        measured = replace(measured, long_prompt_tokens=length, cached_tokens=cached)
    return measured


def long_prompt_twice(server: Server, model: str, max_model_len: int | None) -> tuple[int, int]:
    """Tokens of a long prompt, and those of its second time that came from the prefix cache. Nobody else must ask meanwhile."""
    text = "".join(_LONG_SENTENCE.format(number=number) for number in range(_LONG_SENTENCES))
    prompt = server.tokenize(model, text)[: (max_model_len or 1 << 20) - 16]
    server.complete(model, prompt, 4)
    before = server.metrics()
    server.complete(model, prompt, 4)
    return len(prompt), server.metrics().since(before).cached


def settled(settings: Settings, server: Server, stats: StatsFile) -> dict[str, Any]:
    """The stats file with everything in it that was asked so far. Raises ConfigError if it is not this engine's."""
    earlier = stats.rounds()
    time.sleep(_STATS_EVERY_S)
    model, _ = server.model()
    server.complete(model, server.tokenize(model, settings.prompts[0]), 4)
    now = stats.read()
    if earlier is not None and now.get("rounds") == earlier and now.get("off_because") is None:
        raise ConfigError(
            f"--stats {stats.path}: it counts none of this server's rounds, so it is another engine's, perhaps of one that "
            "has ended; this engine's log names its own"
        )
    return now


def drill(
    settings: Settings, server: Server, stats: StatsFile, progress: Progress, stop: Act, start: Act
) -> list[Finding]:
    """Keep asking while the worker goes and comes back."""
    model, _ = server.model()
    policy = str(stats.read().get("policy"))
    with _Traffic(settings, server, model) as traffic:
        begun = stats.read()
        before = _wait(
            stats, settings, progress, "rounds with the worker", lambda now: judge.grown(begun, now, "rounds_ok")
        )
        made_before = server.metrics().generated
        stop()
        down = _wait(
            stats,
            settings,
            progress,
            "rounds without the worker",
            lambda now: judge.grown(before, now, "rounds_failed") + judge.grown(before, now, "rounds_some_failed"),
        )
        made = server.metrics().generated - made_before
        start()
        after = _wait(
            stats,
            settings,
            progress,
            "rounds with it again",
            # The first rounds after its return send windows again; one of them has to be seen.
            lambda now: judge.grown(down, now, "rounds_ok") if judge.grown(down, now, "hellos") else 0,
        )
    return [
        *judge.outage(policy, before, down, generated=made),
        *judge.recovery(down, after),
        *judge.nobody_failed(traffic.answered, traffic.errors),
    ]


def _wait(
    stats: StatsFile, settings: Settings, progress: Progress, what: str, count: Callable[[dict[str, Any]], int]
) -> dict[str, Any]:
    """The first snapshot in which `count` has reached enough rounds. Raises FarsparkError when patience ends."""
    ends = time.monotonic() + settings.patience_s
    while (seen := count(now := stats.read())) < _SETTLED_ROUNDS:
        progress(what, max(0, seen), _SETTLED_ROUNDS)
        if time.monotonic() > ends:
            raise FarsparkError(
                f"{what}: {seen} within {settings.patience_s:g} s, expected {_SETTLED_ROUNDS}; the worker is "
                f"{now.get('worker', {}).get('state')} ({now.get('worker', {}).get('last_failure')})"
            )
        time.sleep(_LOOK_EVERY_S)
    progress(what, _SETTLED_ROUNDS, _SETTLED_ROUNDS)
    return now


class _Traffic:
    """Asks the prompts over and over on threads of its own, from entering to leaving."""

    def __init__(self, settings: Settings, server: Server, model: str) -> None:
        self._settings = settings
        self._server = server
        self._model = model
        self._prompts = [server.tokenize(model, text) for text in settings.prompts]
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self.answered = 0  # guarded by _lock
        self.errors: list[str] = []  # guarded by _lock
        self._threads = [
            threading.Thread(target=self._ask, args=(index,), name="farspark-check-traffic", daemon=True)
            for index in range(settings.concurrency)
        ]

    def __enter__(self) -> _Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over.set()
        # After a failure or a Ctrl-C nobody wants to wait for answers; the threads are daemons.
        for thread in self._threads if kind is None else ():
            thread.join()

    def _ask(self, index: int) -> None:
        for prompt in self._order(index):
            if self._is_over.is_set():
                return
            try:
                answer = self._server.complete(self._model, prompt, self._settings.max_tokens)
                error = None if answer.text.strip() else "an answer without text"
            except ServerError as failed:
                error = str(failed)
                self._is_over.wait(0.5)
            with self._lock:
                if error is None:
                    self.answered += 1
                else:
                    self.errors.append(error)

    def _order(self, index: int) -> Iterator[Sequence[int]]:
        while True:
            yield self._prompts[index % len(self._prompts)]
            index += 1


def read_log(path: Path) -> str:
    """Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--log {path}: {error.strerror}; redirect vLLM's output there") from error
