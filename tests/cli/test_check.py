"""`farspark check` against a server of the test's own; rounds and statistics are made by the real engine side and worker."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.http_engine import HttpEngine
from tests.fakes.recorded_engine import CONTEXT, SLOTS, RecordedEngine, serving
from tests.fakes.tiny_checkpoint import write_tiny

from farspark.check.measurement import read_measurement
from farspark.check.run import CHECKS
from farspark.cli.check import _start as start_worker
from farspark.cli.main import main
from farspark.errors import ConfigError
from farspark.worker.server import Server

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server without Farspark."""
    path = tmp_path_factory.mktemp("baselines") / "a.json"
    with HttpEngine() as server:
        assert main(["check", "baseline", "--url", server.url, "--save", str(path), *FEW]) == 0
    return path


FEW = ["--max-tokens", "40", "--concurrency", "2"]


def engine(folder: Path, worker: str, tmp_path: Path, policy: str, **settings: str) -> RecordedEngine:
    told = {"POLICY": policy, "CAPTURE": "", "BACKOFF_MS": "50", "BACKOFF_MAX_MS": "100", **settings}
    return RecordedEngine(folder, worker, tmp_path / "engine", told)


def stats_of(tmp_path: Path) -> str:
    return str(tmp_path / "engine.stats.json")


def check(
    capsys: pytest.CaptureFixture[str], name: str, server: HttpEngine, tmp_path: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """The exit code, and every criterion's verdict."""
    capsys.readouterr()
    arguments = ["--url", server.url, "--stats", stats_of(tmp_path), "--json", *FEW, *options]
    code = main(["check", name, *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    return code, {one["what"]: one["verdict"] for one in found["findings"]} | {"settings": found.get("settings")}


def test_shadow_passes_where_both_drafters_agree(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(folder, worker.endpoint, tmp_path, "shadow") as real, HttpEngine(real) as server:
        code, found = check(capsys, "shadow", server, tmp_path)
        assert code == 0, found
        assert found["worker"] == found["equal or a near tie"] == found["drafts far off"] == "PASS"
        assert found["whole blocks equal"] == "NOTE"
        assert found["confidences"] == "PASS"
        # The same in words, and the cost settings to paste.
        arguments = ["--url", server.url, "--stats", stats_of(tmp_path), *FEW, "--round-ms", "900,1000,1100"]
        assert main(["check", "timing", *arguments]) == 0
        out = capsys.readouterr().out
        assert "\nVLLM_DSPARK_REMOTE_DRAFT_MS=" in out
        assert "\nVLLM_DSPARK_REMOTE_ROUND_MS=" in out
        assert out.endswith("check timing: passed\n")


def test_shadow_fails_where_a_drafter_is_another(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(folder, worker.endpoint, tmp_path, "shadow") as real, HttpEngine(real) as server:
        # A local drafter that reads its rows in the wrong order.
        draft = real.plain.draft
        real.plain.draft = lambda rows, *rest, **more: draft(rows.flip(0), *rest, **more)  # type: ignore[method-assign]
        code, found = check(capsys, "shadow", server, tmp_path)
        assert code == 1
        assert found["worker"] == "PASS"
        assert found["equal or a near tie"] == found["drafts far off"] == "FAIL"


def test_shadow_remote_compares_acceptance_and_text_with_the_baseline(
    folder: Path, worker: Server, tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        engine(folder, worker.endpoint, tmp_path, "shadow", SHADOW_USE="remote") as real,
        HttpEngine(real) as server,
    ):
        code, found = check(capsys, "shadow-remote", server, tmp_path, "--baseline", str(baseline))
        assert (code, found["accepted drafts"], found["text"]) == (0, "PASS", "PASS")
        server.accepts = 0
        code, found = check(capsys, "shadow-remote", server, tmp_path, "--baseline", str(baseline))
        assert (code, found["accepted drafts"]) == (1, "FAIL")


def write_log(path: Path, gib: float) -> str:
    path.write_text(f"(Worker pid=1) INFO [model_runner.py:424] Model loading took {gib} GiB memory and 1.0 seconds\n")
    return str(path)


def test_capacity_prefix_cache_and_kv_are_compared_with_the_baseline(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, capacity = str(tmp_path / "a.json"), str(tmp_path / "capacity.json")
    with HttpEngine() as alone:
        arguments = ["--url", alone.url, "--save", base, "--log", write_log(tmp_path / "a.log", 2.0), *FEW]
        assert main(["check", "baseline", *arguments]) == 0
    log = write_log(tmp_path / "capacity.log", 1.5)
    with engine(folder, worker.endpoint, tmp_path, "capacity") as real, HttpEngine(real) as server:
        code, found = check(capsys, "capacity", server, tmp_path, "--baseline", base, "--log", log, "--save", capacity)
        assert code == 0, found
        assert found["load size, Worker"] == found["text"] == found["KV cache"] == "PASS"
        assert found["speed"] == "NOTE"
        code, found = check(capsys, "prefix-cache", server, tmp_path, "--baseline", base)
        assert (code, found["cached tokens"], found["the last block"]) == (0, "PASS", "PASS")
        server.loses_blocks = 1
        code, found = check(capsys, "prefix-cache", server, tmp_path, "--baseline", base)
        assert (code, found["cached tokens"], found["the last block"]) == (1, "FAIL", "FAIL")
        # The same of a baseline that has lost the block to its own drafter.
        lost = replace(read_measurement(Path(base)), cached_tokens=0)
        lost.save(tmp_path / "lost.json")
        code, found = check(capsys, "prefix-cache", server, tmp_path, "--baseline", str(tmp_path / "lost.json"))
        assert (code, found["cached tokens"], found["the last block"]) == (1, "PASS", "FAIL")
        code, found = check(capsys, "kv", server, tmp_path, "--baseline", capacity)
        assert (code, found["KV cache"]) == (1, "FAIL")
        server.blocks = 1000
        code, found = check(capsys, "kv", server, tmp_path, "--baseline", capacity)
        assert (code, found["KV cache"], found["concurrency"]) == (0, "PASS", "PASS")
        server.wrong_from = 7
        code, found = check(capsys, "capacity", server, tmp_path, "--baseline", base, "--log", log)
        assert (code, found["text"]) == (1, "FAIL")


def test_the_baseline_holds_what_was_measured(baseline: Path) -> None:
    found = read_measurement(baseline)
    assert len(found.answers) == 4
    assert all(len(answer.tokens) == 40 for answer in found.answers)
    assert found.answers[0].gaps == [3.0] * 40
    assert found.cached_tokens is not None
    assert found.cached_tokens > 1000
    # 13 rounds of 3 tokens behind the first token.
    assert (found.metrics.drafts, found.metrics.drafted, found.metrics.accepted) == (52, 260, 104)
    assert found.concurrency == 5.0


def test_a_server_without_chat_template_and_logprobs_is_asked_otherwise(
    folder: Path, worker: Server, tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        engine(folder, worker.endpoint, tmp_path, "shadow", SHADOW_USE="remote") as real,
        HttpEngine(real, knows_chat=False, tells_logprobs=False) as server,
    ):
        code, found = check(capsys, "shadow-remote", server, tmp_path, "--baseline", str(baseline))
        assert (code, found["text"]) == (0, "PASS")


# The drills, with a worker that is a process.

# What a start command starts is in a session of its own: it must end even where these tests are killed (PR_SET_PDEATHSIG).
ENDS_WITH_THE_TESTS = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def end_started(pid: int) -> None:
    """Kill a child that a start command left, and wait for it, so that not even a zombie is left behind."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.fixture
def process(folder: Path, tmp_path: Path) -> Iterator[tuple[str, str, str]]:
    """The endpoint, and commands that stop and start what listens there."""
    ready, pid = tmp_path / "ready", tmp_path / "pid"
    arguments = [
        *(sys.executable, "-m", "farspark", "worker", str(folder), "--dtype", "float32"),
        *("--slots", str(SLOTS), "--context", str(CONTEXT), "--ready-file", str(ready)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    first = subprocess.Popen(
        [*arguments, "--listen", "tcp://127.0.0.1:0"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        ends = time.monotonic() + 120
        while not ready.exists():
            assert first.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.05)
        endpoint = ready.read_text().split()[0]
        pid.write_text(str(first.pid))
        command = shlex.join([sys.executable, "-c", ENDS_WITH_THE_TESTS, *arguments, "--listen", endpoint])
        # `exec`, so that the shell's process is the worker's.
        start = f"echo $$ > {shlex.quote(str(pid))}; OMP_NUM_THREADS=1 exec {command} >/dev/null 2>&1"
        yield endpoint, f"kill -9 $(cat {shlex.quote(str(pid))})", start
    finally:
        first.kill()
        first.wait()
        last = int(pid.read_text()) if pid.exists() else first.pid
        if last != first.pid:
            end_started(last)


@pytest.mark.parametrize(("name", "policy"), [("resilience", "resilience"), ("failure", "capacity")])
def test_FAIL_LIFETIME_the_worker_is_killed_and_started_while_requests_go_on(
    name: str,
    policy: str,
    folder: Path,
    process: tuple[str, str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    endpoint, stop, start = process
    # Long answers, so that requests live through the outage.
    options = ["--max-tokens", "600", "--stop-command", stop, "--start-command", start]
    with engine(folder, endpoint, tmp_path, policy) as real, HttpEngine(real, pause_s=0.05) as server:
        code, found = check(capsys, name, server, tmp_path, *options)
    assert code == 0, found
    assert (
        found["rounds without the worker"]
        == found["windows sent again"]
        == found["requests during the drill"]
        == "PASS"
    )
    assert ("local rounds" in found) == (policy == "resilience")


def test_a_worker_that_does_not_come_back_ends_the_drill_with_its_reason(
    folder: Path, process: tuple[str, str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, stop, _ = process
    options = ["--stop-command", stop, "--start-command", "true", "--patience-s", "6"]
    with engine(folder, endpoint, tmp_path, "capacity") as real, HttpEngine(real, pause_s=0.02) as server:
        arguments = ["--url", server.url, "--stats", stats_of(tmp_path), *options, *FEW]
        assert main(["check", "failure", *arguments]) == 1
    err = capsys.readouterr().err
    assert "rounds with it again: 0 within 6 s, expected 5; the worker is connecting" in err


def test_a_drill_in_which_nothing_is_stopped_does_not_pass(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(folder, worker.endpoint, tmp_path, "capacity") as real, HttpEngine(real, pause_s=0.02) as server:
        arguments = ["--url", server.url, "--stats", stats_of(tmp_path), "--patience-s", "6", *FEW]
        assert main(["check", "failure", *arguments, "--stop-command", "true", "--start-command", "true"]) == 1
        assert "rounds without the worker: 0 within 6 s" in capsys.readouterr().err
        arguments += ["--patience-s", "60"]
        assert main(["check", "failure", *arguments, "--stop-command", "exit 3", "--start-command", "true"]) == 2
        assert "--stop-command 'exit 3' ended with 3" in capsys.readouterr().err


def test_a_start_command_that_fails_at_once_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--start-command 'exit 4' ended with 4"):
        start_worker("exit 4")
    pid = tmp_path / "pid"
    start_worker(f"echo $$ > {shlex.quote(str(pid))}; exec sleep 30")
    assert "exec sleep 30" in capsys.readouterr().err
    end_started(int(pid.read_text()))


# What a person must put right.


def test_the_list_explains_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--list"]) == 0
    out = capsys.readouterr().out
    for one in CHECKS:
        assert f"{one.name}: {one.title}" in out
    assert out.count("  passes  ") == len(CHECKS)


def test_what_cannot_be_checked_is_one_sentence(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_DSPARK_REMOTE_STATS_FILE", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    stats = tmp_path / "stats.json"
    stats.write_text(json.dumps({"policy": "capacity", "counters": {}}))
    with HttpEngine() as server, HttpEngine(fails=True) as broken:
        here, broken_at = ["--url", server.url], ["--url", broken.url]
        for arguments, said in (
            ([], "which check? expected one of baseline, shadow"),
            (["shadow", *here], "no farspark-stats-*.json in"),
            (["shadow", *here, "--stats", str(tmp_path / "none")], "rank 0 of a running engine writes it"),
            (["shadow", *here, "--stats", str(stats)], "the engine's policy is capacity, check shadow needs shadow"),
            (["capacity", *here, "--stats", str(stats)], "check capacity needs --baseline FILE"),
            (["baseline", *here], "give --save FILE"),
            (["baseline", "--save", "x", "--url", "http://127.0.0.1:1"], "no vLLM answers there"),
            (["baseline", "--save", "x", "--url", "tcp://h:1"], "expected something like http://127.0.0.1:8000"),
            (["baseline", *here, "--save", str(tmp_path / "no" / "x"), *FEW], "--save"),
            (["baseline", *broken_at, "--save", str(tmp_path)], f"--save {tmp_path}: expected a file"),
            (["baseline", *broken_at, "--save", "x", "--log", str(tmp_path / "none")], "none: No such file"),
            (["baseline", *here, "--save", "x", "--prompts", str(tmp_path / "none")], "--prompts"),
            (["baseline", *here, "--save", "x", "--max-tokens", "0"], "--max-tokens 0"),
            (["timing", *here, "--stats", str(stats), "--round-ms", "8,x"], "--round-ms='8,x'"),
            (["shadow", *here, "--stats", str(stats), "--round-ms", "8"], "--round-ms goes with check timing"),
            (["shadow", *here, "--stats", str(stats), "--stop-command", "true"], "goes with check failure, resilience"),
            (["failure", *here, "--stats", str(stats)], "give --stop-command and --start-command"),
        ):
            assert main(["check", *arguments]) == 2, arguments
            assert said in capsys.readouterr().err, arguments
        assert main(["check", "baseline", *broken_at, "--save", str(tmp_path / "x")]) == 1
        assert "/v1/completions answered 500: out of order" in capsys.readouterr().err


def test_what_was_found_is_said_where_it_cannot_be_saved(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(folder, worker.endpoint, tmp_path, "shadow") as real, HttpEngine(real) as server:
        assert main(["check", "baseline", "--url", server.url, "--save", "/dev/full", *FEW]) == 2
    said = capsys.readouterr()
    assert "check baseline: passed" in said.out
    assert "--save /dev/full: No space left on device" in said.err


def test_the_newest_stats_file_is_found(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_DSPARK_REMOTE_STATS_FILE", raising=False)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    (tmp_path / "farspark-stats-1.json").write_text("{}")
    os.utime(tmp_path / "farspark-stats-1.json", (1, 1))
    newest = str(tmp_path / "farspark-stats-2.json")
    with (
        engine(folder, worker.endpoint, tmp_path, "shadow", STATS_FILE=newest) as real,
        HttpEngine(real) as server,
    ):
        server._serve([1, 2, 3], 4)
        assert main(["check", "shadow", "--url", server.url, *FEW]) == 0


def test_the_stats_file_of_another_engine_is_refused(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with engine(folder, worker.endpoint, tmp_path, "shadow") as real, HttpEngine(real) as server:
        assert check(capsys, "shadow", server, tmp_path)[0] == 0
    # What that engine has left behind, beside a server whose rounds it does not count.
    with HttpEngine() as another:
        assert main(["check", "shadow", "--url", another.url, "--stats", stats_of(tmp_path), *FEW]) == 2
    assert "it counts none of this server's rounds" in capsys.readouterr().err


def test_a_baseline_of_other_questions_is_not_compared(
    folder: Path, worker: Server, tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(read_measurement(baseline), questions="others")
    other.save(tmp_path / "other.json")
    with engine(folder, worker.endpoint, tmp_path, "capacity") as real, HttpEngine(real) as server:
        _, found = check(capsys, "prefix-cache", server, tmp_path, "--baseline", str(tmp_path / "other.json"))
        assert found["cached tokens"] == "SKIP"
