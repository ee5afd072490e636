"""`farspark stats` on files as an engine writes them, on real workers, and on everything that is neither."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.drafters import ArithmeticDrafter
from tests.fakes.served import served

from farspark.cli import stats as command
from farspark.cli.main import main
from farspark.engine.stats_file import StatsFile
from farspark.transport import parse_endpoint
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

SNAPSHOT = {
    "policy": "shadow",
    "worker": {"state": "ready", "last_failure": None, "strict": True},
    "breaker": {},
    "counters": {"rounds_ok": 123456, "rounds_failed": 2},
    "latency": {
        "rtt_us": {"p50": 512.25, "p90": 600.0, "p99": 1234.5, "max": 98765.4, "count": 123456},
        "worker_us": {"p50": 300.0, "p90": 310.0, "p99": 320.0, "max": 330.0, "count": 9},
    },
    "shadow": {
        "agree_by_position": [0.96, 0.9],
        "examples": [{"step": 7, "near_tie": False}],
        "first": {"0": 1, "5": 9},
    },
}


@contextlib.contextmanager
def worker(endpoint: str = "tcp://127.0.0.1:0", token: bytes | None = None) -> Iterator[str]:
    config = WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint(endpoint), token=token)
    with served(Server(ArithmeticDrafter(), config)) as server:
        yield server.endpoint


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def file(tmp_path: Path) -> Path:
    StatsFile(tmp_path / "stats.json").close(SNAPSHOT)
    return tmp_path / "stats.json"


def test_a_stats_file_is_shown_as_aligned_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(file, (time.time() - 90, time.time() - 90))
    assert main(["stats", str(file)]) == 0
    assert capsys.readouterr().out.replace("91 s", "90 s") == (
        f"{file}, written 90 s ago\n"
        "  policy  shadow\n"
        "\n"
        "worker\n"
        "  state         ready\n"
        "  last_failure  –\n"
        "  strict        yes\n"
        "\n"
        "counters\n"
        "  rounds_ok      123,456\n"
        "  rounds_failed  2\n"
        "\n"
        "latency\n"
        "                p50  p90    p99     max    count\n"
        "  rtt_us     512.25  600  1,234  98,765  123,456\n"
        "  worker_us     300  310    320     330        9\n"
        "\n"
        "shadow\n"
        "  agree_by_position  0.96 0.9\n"
        "\n"
        "examples\n"
        "  0  step 7, near_tie no\n"
        "\n"
        "shadow.first\n"
        "  0  1\n"
        "  5  9\n"
    )


def test_json_is_the_snapshot_itself(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SNAPSHOT


def test_a_worker_is_asked_for_its_stats(capsys: pytest.CaptureFixture[str]) -> None:
    with worker() as endpoint:
        assert main(["stats", endpoint]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"worker at {endpoint}\n")
        assert "  kind             ArithmeticDrafter\n" in out
        assert f"  identity         {bytes(range(32)).hex()}\n" in out
        assert "\nconnections\n  open           1\n" in out
        assert main(["stats", endpoint, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["drafter"]["vocab_size"] == 1000


def test_what_a_worker_says_of_each_session_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("engine", "lane", "slots_in_use", "rounds", "rows", "drafts", "accepted", "worker_us_p50", "worker_us_p99")
    sessions = {
        "00000000000000aa": dict(zip(names, ("one", "tcp a", 2, 1000, 3000, 7000, 2100, 310.0, 420.5), strict=True)),
        "00000000000000bb": dict(zip(names, ("two", "tcp b", 0, 5, 5, 35, 10, 300.0, 400.0), strict=True)),
    }
    lines = command.plain_lines("a worker", command.sections({"sessions": sessions}))
    assert lines[:4] == [
        "a worker",
        "",
        "sessions",
        "                 00000000000000aa  00000000000000bb",
    ]
    assert "  engine                      one               two" in lines
    assert "  drafts                    7,000                35" in lines


def test_a_terminal_gets_the_same_values(file: Path) -> None:
    terminal = Terminal()
    command._show("a [title]", SNAPSHOT, terminal)
    shown = terminal.getvalue()
    for said in ("a [title]", "shadow", "123,456", "rtt_us", "98,765", "near_tie no", "agree_by_position"):
        assert said in shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "No such file or directory; rank 0 of a running engine writes it"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"[1]", "a JSON list, expected an object"),
        (b"\xff\xfe", "not JSON"),
    ],
)
def test_a_file_that_is_no_snapshot_is_one_sentence_and_2(
    text: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stats.json"
    if text is not None:
        path.write_bytes(text)
    for more in ([], ["--watch"]):
        assert main(["stats", str(path), *more]) == 2
        err = capsys.readouterr().err
        assert f"stats file {path}: " in err
        assert said in err


def test_a_folder_is_no_stats_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_an_endpoint_where_nobody_listens_is_one_sentence_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    assert main(["stats", f"tcp://127.0.0.1:{free}"]) == 1
    assert "nothing listens there" in capsys.readouterr().err
    assert main(["stats", "tpc://127.0.0.1:1"]) == 2
    assert "did you mean 'tcp'?" in capsys.readouterr().err


def reads(*outcomes: dict[str, Any] | BaseException) -> command.Read:
    """A source that gives these, one a look, then Ctrl-C."""
    left = iter(outcomes)

    def read() -> tuple[str, dict[str, Any]]:
        outcome = next(left, KeyboardInterrupt())
        if isinstance(outcome, BaseException):
            raise outcome
        return "source", outcome

    return read


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_watch_goes_on_while_the_source_is_away(stream: type[io.StringIO]) -> None:
    shown = stream()
    with pytest.raises(KeyboardInterrupt):
        command._watch(reads({"a": 1}, TimeoutError("late"), {"a": 2}), shown, as_json=False, seconds=0)
    text = shown.getvalue()
    assert text.index("source") < text.index("cannot be read at the moment: late")
    assert "2" in text[text.index("late") :]


def test_a_json_watch_prints_an_object_a_line_and_none_for_a_failed_look(capsys: pytest.CaptureFixture[str]) -> None:
    shown = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        command._watch(reads({"a": 1}, TimeoutError("late"), {"a": 2}), shown, as_json=True, seconds=0)
    assert shown.getvalue() == '{"a": 1}\n{"a": 2}\n'
    assert capsys.readouterr().err == "farspark: cannot be read at the moment: late\n"


def test_a_watch_of_a_worker_keeps_one_connection_and_makes_another_when_it_restarts() -> None:
    with worker() as endpoint, command._opened(endpoint) as read:
        assert [read()[1]["connections"]["accepted"] for _ in range(2)] == [1, 1]
    with command._opened(endpoint) as read:
        with worker(endpoint):
            read()
        with pytest.raises(Exception, match="no answer to STATS"):
            read()
        with worker(endpoint):
            assert read()[1]["connections"]["accepted"] == 1


def test_ctrl_c_ends_a_watch_with_0(file: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "farspark", "stats", str(file), "--watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts tests in the background has Ctrl-C ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        for rounds in (1, 2):
            assert json.loads(process.stdout.readline())["counters"]["rounds_failed"] == rounds + 1
            StatsFile(file).close({**SNAPSHOT, "counters": {"rounds_failed": 3}})
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, ""), out
    finally:
        process.kill()
        process.communicate()


def test_a_worker_with_a_token_is_asked_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    path = tmp_path / "token"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    with worker(token=b"0123456789abcdef") as endpoint:
        assert main(["stats", endpoint, "--json", "--token-file", str(path)]) == 0
        assert json.loads(capsys.readouterr().out)["connections"]["auth_failures"] == 0
        assert main(["stats", endpoint]) != 0
        assert "set --token-file to a file with the worker's token" in capsys.readouterr().err
    assert main(["stats", str(file), "--token-file", str(path)]) == 2
    assert f"--token-file {path}: {file} is a file" in capsys.readouterr().err
