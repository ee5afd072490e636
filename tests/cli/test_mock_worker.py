"""`farspark mock-worker`: the command as a process, and the probe against it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.mock.test_relay import mock

from farspark.cli.main import main
from farspark.mock.faults import KINDS
from farspark.probe.peer import Peer
from farspark.transport import parse_endpoint

SHAPE_OPTIONS = ["--drafts", "5", "--vocab", "1000", "--hidden", "4", "--taps", "2", "--slots", "4", "--context", "10"]


def test_the_command_serves_until_a_signal_and_says_how_many_answers_failed() -> None:
    command = [sys.executable, "-m", "farspark", "mock-worker", "--listen", "tcp://127.0.0.1:0", *SHAPE_OPTIONS]
    for stop in ("terminate", "SIGINT"):
        process = subprocess.Popen(
            [*command, "--fault", "silence", "--on", "ping"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert "mock drafts (for shadow only), silence on every 1. answer to PING" in process.stdout.readline()
            endpoint = process.stdout.readline().removeprefix("ready on ").strip()
            with Peer(parse_endpoint(endpoint), 0.5) as peer:
                assert peer.stats()["drafter"]["num_drafts"] == 5
                with pytest.raises(TimeoutError, match="no answer to PING"):
                    peer.ping(b"x")
            if stop == "terminate":
                process.terminate()
            else:
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
            assert process.returncode == 0, err
            assert out == "stopped after 1 faults\n"
            assert "Traceback" not in err
        finally:
            process.kill()
            process.communicate()


def test_the_probe_passes_against_a_mock_worker_and_says_what_a_fault_did(capsys: pytest.CaptureFixture[str]) -> None:
    probe = [
        "probe",
        "--hello",
        "--no-metrics-check",
        "--pings",
        "3",
        "--rounds",
        "3",
        "--timeout-s",
        "0.5",
        "--endpoint",
    ]
    with mock() as worker:
        assert main([*probe, str(worker.endpoint)]) == 0
        assert "3 of 4 rows (64 bytes): OK 3" in capsys.readouterr().out
    for fault, said in (
        ("silence", "no answer to STEP within 0.5 s"),
        ("half", "no answer to STEP within 0.5 s"),
        ("close:9", "no answer to STEP: "),
        ("garbage", "is none of a Farspark worker"),
        ("frame-status:8", "answered STEP with INTERNAL: the mock worker was told to refuse"),
        ("frame-status:77", "answered STEP with status 77"),
        ("version", "protocol version: here 1, worker 99"),
        ("sequence", "belongs to another question"),
        ("step-id", "the reply is to step 0"),
        ("generation", "the reply is for slot 0 generation 0"),
        ("request-status:8", "status INTERNAL, no drafts"),
        ("window", "a window of 4294967295 rows"),
        ("id:-7", "draft id -7, the vocabulary has 1000"),
        ("confidence", "confidence nan, expected 0 to 1"),
    ):
        with mock(fault) as worker:
            assert main([*probe, str(worker.endpoint)]) == 1, fault
            err = capsys.readouterr().err
            assert said in err, (fault, err)
            assert "cannot be used" in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--fault", "nonsense"], "--fault 'nonsense': unknown"),
        (["--fault", "id:V", "--on", "ping"], "only the answer to a STEP can fail so"),
        (["--fault", "routing"], "only the answer to a JUDGE can fail so"),
        (["--routing-margin", "-1"], "--routing-margin -1: expected a number from 0 to 1e+30"),
        (["--routing-margin", "nan"], "--routing-margin nan: expected a number from 0"),
        (["--every", "0"], "--every 0: expected 1 to"),
        (["--drafts", "65"], "--drafts 65: expected 1 to 64"),
        (["--slots", "0"], "--slots 0: expected 1 to"),
        (["--identity", "abc"], "--identity 'abc': expected 64 hex digits or any"),
        (["--listen", "tcp://0.0.0.0:0"], "--allow-unauthenticated-network"),
        (["--listen", "memory://x"], "expected tcp://HOST:PORT"),
        (["--listen", "tcp://203.0.113.1:0"], "cannot listen"),
    ],
)
def test_what_a_person_must_put_right_is_one_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    listen = [] if "--listen" in options else ["--listen", "tcp://127.0.0.1:0"]
    more = ["--allow-unauthenticated-network"] if "203" in "".join(options) else []
    assert main(["mock-worker", *SHAPE_OPTIONS, *listen, *more, *options]) == 2
    assert said in capsys.readouterr().err
    # What the process starts next inherits the mask.
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_the_help_has_a_sentence_for_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mock-worker", "--help"])
    out = capsys.readouterr().out
    for kind in KINDS:
        assert any(line.strip().startswith(kind.name) and line.endswith(kind.sentence) for line in out.splitlines())


def test_with_a_token_the_mock_may_listen_on_the_network_and_demands_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    command = [sys.executable, "-m", "farspark", "mock-worker", "--listen", "tcp://0.0.0.0:0", *SHAPE_OPTIONS]
    process = subprocess.Popen([*command, "--token-file", str(token)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        port = process.stdout.readline().strip().rpartition(":")[2]
        probe = ["probe", "--endpoint", f"tcp://127.0.0.1:{port}", "--hello", "--no-metrics-check", "--rounds", "2"]
        assert main([*probe, "--token-file", str(token)]) == 0
        capsys.readouterr()
        assert main(probe) == 1
        assert "answered PING with AUTH" in capsys.readouterr().err
    finally:
        process.kill()
        process.communicate()


def test_a_port_that_is_taken_is_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["mock-worker", "--listen", listen, *SHAPE_OPTIONS]) == 2
    said = (
        f"farspark: --listen {listen}: cannot listen: the port is in use; stop what listens there or choose another\n"
    )
    assert capsys.readouterr().err == said
