"""A worker process and engine processes that die, hang or are cut off, and a worker that is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.forwarder import Forwarder
from tests.fakes.tiny_checkpoint import write_tiny

from farspark.clock import Deadline
from farspark.errors import TransportError
from farspark.probe.peer import StatsReader
from farspark.transport import connect, parse_endpoint

LEASE_S = 1.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


class WorkerProcess:
    """`farspark worker` on a tiny checkpoint."""

    def __init__(self, checkpoint: Path, ready: Path, *options: object) -> None:
        arguments = ["--listen", "tcp://127.0.0.1:0", "--ready-file", ready, "--slots", 8, "--context", 16, *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "farspark", "worker", str(checkpoint), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        deadline = Deadline.after(120)
        while not ready.exists():
            assert self.process.poll() is None, self.process.communicate()[0]
            deadline.check("waiting for the ready file")
            time.sleep(0.02)
        self.ready = ready
        self.endpoint = ready.read_text().strip()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def stats(self) -> dict[str, Any]:
        with StatsReader(parse_endpoint(self.endpoint), 10.0) as reader:
            return reader.read()

    def slots_in_use(self) -> int:
        return int(self.stats()["slots"]["in_use"])


@contextlib.contextmanager
def engine(endpoint: str, session: int, seconds: float = 0) -> Iterator[subprocess.Popen[str]]:
    """A process that has drafted once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.engine_process", endpoint, str(session), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "drafted\n"
        yield process
    finally:
        end(process)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds
        time.sleep(0.05)
    return time.monotonic() - started


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("drafter"))


def test_HALF_OPEN_slots_in_use_return_to_0_after_kill_9_a_stop_and_a_cut_link(
    checkpoint: Path, tmp_path: Path
) -> None:
    with (
        WorkerProcess(checkpoint, tmp_path / "ready", "--lease-s", LEASE_S) as worker,
        engine(worker.endpoint, 1, 60) as alive,
        Forwarder(worker.endpoint) as link,
    ):
        assert worker.slots_in_use() == 2
        with engine(worker.endpoint, 2) as killed:
            assert worker.slots_in_use() == 4
            killed.kill()
            until(lambda: worker.slots_in_use() == 2)
        with engine(worker.endpoint, 3, 60) as stopped:
            assert worker.slots_in_use() == 4
            stopped.send_signal(signal.SIGSTOP)
            # Its kernel still answers for it: only the lease frees its slots.
            assert until(lambda: worker.slots_in_use() == 2) > LEASE_S / 2
            stopped.send_signal(signal.SIGCONT)
            assert "closed by the peer" in stopped.communicate(timeout=20)[0]
        with engine(link.endpoint, 4, 60):
            assert worker.slots_in_use() == 4
            link.cut()
            assert until(lambda: worker.slots_in_use() == 2) > LEASE_S / 2
        (session,) = worker.stats()["sessions"].values()
        assert (session["engine"], session["slots_in_use"]) == ("engine-1", 2)
        assert alive.poll() is None
        alive.kill()
        until(lambda: worker.slots_in_use() == 0)
        worker.process.kill()
        output = worker.process.communicate()[0]
    for number, why in ((2, "gone: "), (3, "silent for "), (4, "silent for ")):
        (line,) = [one for one in output.splitlines() if f"of engine 'engine-{number}'," in one]
        assert why in line
        assert "2 slots freed" in line


def test_draining_sigterm_lets_engines_go_after_a_whole_round_and_exits_with_0(
    checkpoint: Path, tmp_path: Path
) -> None:
    with (
        WorkerProcess(checkpoint, tmp_path / "ready", "--drain-s", "20") as worker,
        engine(worker.endpoint, 1, 60) as one,
        engine(worker.endpoint, 2, 60) as two,
        engine(worker.endpoint, 3) as idle,
    ):
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: not worker.ready.exists())
        for process in (one, two):
            output, _ = process.communicate(timeout=20)
            assert output.endswith(" steps, told to move\n"), output
        output, _ = worker.process.communicate(timeout=20)
        assert worker.process.returncode == 0, output
        assert idle.poll() is None
        assert "stopping: 3 engines may move elsewhere, for 20 s at most\n" in output
        assert "stopping: nobody is connected\n" in output
        with pytest.raises(TransportError):
            connect(worker.endpoint, Deadline.after(5))


def test_draining_a_second_signal_ends_the_worker_at_once(checkpoint: Path, tmp_path: Path) -> None:
    with WorkerProcess(checkpoint, tmp_path / "ready", "--drain-s", "60") as worker, engine(worker.endpoint, 1):
        worker.process.send_signal(signal.SIGTERM)
        until(lambda: not worker.ready.exists())
        time.sleep(0.1)
        worker.process.send_signal(signal.SIGINT)
        output, _ = worker.process.communicate(timeout=5)
        assert worker.process.returncode == 128 + signal.SIGINT
        assert "told to stop twice" in output
