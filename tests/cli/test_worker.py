"""`farspark worker` as a process of its own, with a tiny real checkpoint."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.shape import shape_for
from tests.fakes.tiny_checkpoint import TINY, write_gemma4, write_tiny

from farspark.cli.main import main
from farspark.clock import Deadline
from farspark.errors import TransportError
from farspark.transport import Channel, connect
from farspark.wire import codec
from farspark.wire.layout import Dtype, EntryFlag, FrameStatus, Operation, RequestStatus
from farspark.wire.messages import Entry, Header, Hello, Welcome
from farspark.worker.batch import DraftBatch, DraftEntry
from farspark.worker.drafter import open_drafter
from farspark.worker.models.families import ModelOptions


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "farspark", "worker", *map(str, arguments)]


@contextlib.contextmanager
def running(checkpoint: Path, ready: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(
            checkpoint, "--listen", "tcp://127.0.0.1:0", "--ready-file", ready, "--slots", 2, "--context", 16, *options
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = Deadline.after(120)
        while not ready.exists():
            assert process.poll() is None, process.communicate()[0]
            deadline.check("waiting for the ready file")
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def say_hello(channel: Channel, hello: Hello) -> tuple[int, Welcome]:
    deadline = Deadline.after(30)
    channel.send([codec.encode_frame(Header(Operation.HELLO, 1, 1, 0), codec.encode_hello(hello))], deadline)
    header, payload = codec.decode_frame(channel.recv(deadline))
    return header.status, codec.decode_welcome(payload)


def test_a_worker_announces_itself_serves_and_stops_cleanly(tmp_path: Path) -> None:
    checkpoint, ready = write_tiny(tmp_path / "drafter"), tmp_path / "ready"
    with running(checkpoint, ready) as process:
        endpoint = ready.read_text().strip()
        vocab, hidden, taps = TINY["vocab_size"], TINY["hidden_size"], 3
        assert isinstance(vocab, int)
        assert isinstance(hidden, int)
        row_bytes = 2 * hidden * taps
        deadline = Deadline.after(30)
        with contextlib.closing(connect(endpoint, deadline)) as channel:
            hello = Hello(
                engine="test",
                identity=bytes(32),
                markov_identity=bytes(32),
                row_bytes=row_bytes,
                taps=taps,
                hidden_size=hidden,
                dtype=Dtype.BF16,
                ring=16,
                context=16,
                num_drafts=5,
                slots=2,
                vocab_size=vocab,
            )
            # The first HELLO is refused and says who the worker is; the second one takes it at its word.
            status, welcome = say_hello(channel, hello)
            assert status == FrameStatus.IDENTITY
            status, welcome = say_hello(channel, replace(hello, identity=welcome.identity))
            assert status == FrameStatus.OK
            entry = Entry(0, 1, 0, 2, 5, 2, EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN)
            rows = bytes(2 * row_bytes)
            channel.send([codec.encode_step_head(1, 2, 9, [entry], len(rows)), rows], deadline)
            _, payload = codec.decode_frame(channel.recv(deadline))
            reply = codec.decode_step_reply(payload)
            assert [one.status for one in reply.entries] == [RequestStatus.OK]
            assert all(0 <= token < vocab for token in reply.tokens.tolist())
            assert any(reply.confidences.tolist())
            process.send_signal(signal.SIGTERM)
            with pytest.raises(TransportError):
                channel.recv(deadline)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
        assert f"ready on {endpoint}\n" in output
        assert f"identity          {welcome.identity.hex()}" in output
        assert "2 slots of 16 positions" in output
        assert "warming up" in output
        assert output.index("warming up") < output.index("ready on")
        assert "Traceback" not in output
        assert not ready.exists()


def test_a_ready_file_of_a_worker_that_died_goes_before_anything_is_loaded(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.write_text("tcp://127.0.0.1:1\n")
    done = subprocess.run(
        command(tmp_path / "nothing", "--listen", "tcp://127.0.0.1:0", "--ready-file", ready),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert not ready.exists()


def test_follow_decides_whose_reading_of_the_checkpoint_is_served(tmp_path: Path) -> None:
    """The process drafts what the drafter drafts that was opened with the same reading, and not what the other one does."""
    checkpoint, ready = write_gemma4(tmp_path / "drafter", final_logit_softcapping=1.0), tmp_path / "ready"
    rows = b"".join(bytes((index % 251, 0x3F)) for index in range(2 * 96))
    expected = {}
    for follow in ("vllm", "training"):
        drafter = open_drafter(checkpoint, dtype="float32", slots=2, context=16, options=ModelOptions(follow=follow))
        drafted = drafter.draft(DraftBatch([DraftEntry(0, True, 0, 2, 0, 5, True, 5)], memoryview(rows)))
        expected[follow] = list(drafted.tokens)
    assert expected["vllm"] != expected["training"]
    with running(checkpoint, ready, "--follow", "training", "--dtype", "float32"):
        deadline = Deadline.after(30)
        with contextlib.closing(connect(ready.read_text().strip(), deadline)) as channel:
            info = drafter.info
            hello = shape_for(info, ring=16, slots=2, context=16).hello(
                engine="test", identity=info.identity, markov_identity=info.markov_identity, want_margin=False
            )
            assert say_hello(channel, hello)[0] == FrameStatus.OK
            entry = Entry(0, 1, 0, 2, 5, 2, EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN)
            channel.send([codec.encode_step_head(1, 2, 9, [entry], len(rows)), rows], deadline)
            _, payload = codec.decode_frame(channel.recv(deadline))
            reply = codec.decode_step_reply(payload)
            assert [one.status for one in reply.entries] == [RequestStatus.OK]
            assert reply.tokens.tolist() == expected["training"]


def test_ctrl_c_stops_a_worker_that_nobody_uses(tmp_path: Path) -> None:
    with running(write_tiny(tmp_path / "drafter"), tmp_path / "ready") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
        assert process.returncode == 0, output
        assert "Traceback" not in output


@pytest.mark.parametrize(("is_impatient", "drain_s", "code"), [(False, 0.2, 0), (True, 60, 130)])
def test_a_worker_whose_output_nobody_reads_any_more_stops_as_it_should(
    is_impatient: bool, drain_s: float, code: int, tmp_path: Path
) -> None:
    """As `farspark worker … 2>&1 | tee log`: Ctrl-C ends tee first, and the worker still has sessions to see off."""
    with running(write_tiny(tmp_path / "drafter"), tmp_path / "ready", "--drain-s", drain_s) as process:
        assert process.stdout is not None
        endpoint = (tmp_path / "ready").read_text().strip()
        with contextlib.closing(connect(endpoint, Deadline.after(30))) as channel:
            info = open_drafter(tmp_path / "drafter", slots=1, context=16).info
            hello = shape_for(info, ring=16, slots=2, context=16).hello(
                engine="test", identity=info.identity, markov_identity=info.markov_identity, want_margin=False
            )
            assert say_hello(channel, hello)[0] == FrameStatus.OK
            process.stdout.close()
            process.stdout = None
            process.send_signal(signal.SIGINT)
            while is_impatient and process.poll() is None:
                time.sleep(0.1)
                process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == code


def test_the_first_process_of_a_container_can_be_told_to_stop_while_it_loads(tmp_path: Path) -> None:
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not make a PID namespace")
    os.mkfifo(tmp_path / "config.json")  # nobody writes to it: loading takes for ever
    with subprocess.Popen(
        [*alone, *command(tmp_path, "--listen", "tcp://127.0.0.1:0")], stdout=subprocess.PIPE, text=True
    ) as outside:
        try:
            assert outside.stdout is not None
            assert outside.stdout.readline().startswith("loading")
            first = int(Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text(encoding="ascii"))
            os.kill(first, signal.SIGTERM)
            assert outside.wait(timeout=10) == 143
        finally:
            outside.kill()


# A worker whose listener goes as soon as it is ready.
LOSING_ITS_LISTENER = """
import pathlib, sys, threading, time
from farspark.cli.main import main
from farspark.transport import memory
checkpoint, ready = sys.argv[1:]
def lose():
    while not pathlib.Path(ready).exists():
        time.sleep(0.01)
    memory._listeners["lost"].close()
threading.Thread(target=lose).start()
sys.exit(main(["worker", checkpoint, "--listen", "memory://lost", "--ready-file", ready, "--slots", "1", "--context", "16"]))
"""


def test_a_worker_that_nobody_can_reach_any_more_ends_as_one_that_failed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOSING_ITS_LISTENER, write_tiny(tmp_path / "drafter"), tmp_path / "ready"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "accepting has ended: memory://lost: closed" in done.stderr
    assert done.returncode == 1
    assert not (tmp_path / "ready").exists()


@pytest.mark.parametrize("streams", ["2>&-", "2>&1"])
def test_a_worker_whose_progress_nobody_reads_gets_ready_all_the_same(streams: str, tmp_path: Path) -> None:
    """As `farspark worker … 2>&1 | head -1`."""
    ready = tmp_path / "ready"
    worker = command(write_tiny(tmp_path / "drafter"), "--listen", "tcp://127.0.0.1:0", "--ready-file", ready)
    shell = ["sh", "-c", f'exec "$@" {streams}', "sh", *worker]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(shell, stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"loading")
        process.stdout.close()
        deadline = Deadline.after(120)
        while not ready.exists() and process.poll() is None:
            deadline.check("waiting for the ready file")
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--slots", "0"], "--slots 0: expected 1 to 4096"),
        (["--listen", "tcp://0.0.0.0:0"], "--allow-unauthenticated-network"),
        (["--listen", "nonsense"], "endpoint 'nonsense': it has no scheme"),
        (["--listen", "ucx://127.0.0.1:1?ucx_dir=/no/such"], "no UCX in /no/such"),
        (["--device", "tpu"], "--device 'tpu': expected cpu"),
        (["--spin-us", "-1"], "--spin-us -1: expected microseconds, 0 to 1000000"),
        (
            ["--spin-us", "5", "--listen", "tcp://127.0.0.1:0?spin_us=6"],
            "--spin-us 5 contradicts ?spin_us=6 of --listen; give only one of them",
        ),
        (["--ready-file", "/nowhere/at/all/ready"], "--ready-file /nowhere/at/all/ready: its folder does not exist"),
        (["--ready-file", "/proc/ready"], "--ready-file /proc/ready: its folder cannot be written to: No such file"),
        ([], "checkpoint /no/checkpoint: not a folder"),
        (["--target", "/no/target"], "checkpoint /no/checkpoint: not a folder"),
    ],
)
def test_what_a_person_must_put_right_is_one_sentence(options: list[str], said: str) -> None:
    done = subprocess.run(
        command("/no/checkpoint", *(["--listen", "tcp://127.0.0.1:0"] if "--listen" not in options else []), *options),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_said_before_anything_is_loaded_ADDR() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("/no/checkpoint", "--listen", f"tcp://127.0.0.1:{port}"),
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert f"127.0.0.1:{port}: the port is in use" in done.stderr
    assert "loading" not in done.stdout


def test_a_worker_with_a_token_listens_on_the_network_and_serves_its_holders_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, ready, token = write_tiny(tmp_path / "drafter"), tmp_path / "ready", tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    token.chmod(0o600)
    network = ("--listen", "tcp://0.0.0.0:0")
    with running(checkpoint, ready, *network, "--token-file", token) as process:
        port = ready.read_text().strip().rpartition(":")[2]
        probe = ["probe", "--endpoint", f"tcp://127.0.0.1:{port}", "--hello", "--no-metrics-check", "--rounds", "2"]
        assert main([*probe, "--token-file", str(token)]) == 0
        assert main(probe) == 1
        assert "answered PING with AUTH" in capsys.readouterr().err
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert f"peers must prove to hold the token of {token}\n" in output
    assert "0123456789abcdef" not in output


def test_a_token_that_others_can_read_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o640)
    done = subprocess.run(
        command(tmp_path / "nothing", "--token-file", token), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"--token-file='{token}': others may read or change it (mode 0640); chmod 600 it" in done.stderr
