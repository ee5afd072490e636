"""Engines and workers as processes of their own: clean environments, real sockets, real signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.vllm import engine_run

ROOT = Path(__file__).parents[2]
START_S = 120.0
EXIT_S = 20.0


class Worker:
    """`farspark worker` on a fixed port, so that the engine finds the next one where the last one was."""

    def __init__(
        self,
        checkpoint: Path,
        target: Path,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        slots: int = 4,
        context: int = 1024,
    ) -> None:
        self._ready_file = folder / "worker-ready"
        self._log = folder / "worker.log"
        self._arguments = [
            *(sys.executable, "-c", "import sys; from farspark.cli.main import main; sys.exit(main())"),
            *("worker", str(checkpoint)),
            *("--target", str(target), "--device", device, "--dtype", dtype, "--slots", str(slots)),
            *("--context", str(context), "--ready-file", str(self._ready_file)),
        ]
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start_at(self, endpoint: str) -> None:
        """`start` where another worker was."""
        self._port = _port_of(endpoint)
        self.start()

    def start(self) -> None:
        """Returns once the worker is ready to serve."""
        self._ready_file.unlink(missing_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [*self._arguments, "--listen", f"tcp://127.0.0.1:{self._port}"],
                env=environment | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=log,
            )
        ends = time.monotonic() + START_S
        while not self._ready_file.exists():
            if self._process.poll() is not None or time.monotonic() > ends:
                self.kill()
                raise RuntimeError(f"the worker did not become ready:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)
        self._port = _port_of(self.endpoint)

    @property
    def endpoint(self) -> str:
        return self._ready_file.read_text().split()[0]

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


def _port_of(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])


def run_engine(
    job: Mapping[str, Any],
    settings: Mapping[str, str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    on_pause: Callable[[str], str | None] | None = None,
    timeout_s: float = 420.0,
    module: str = "tests.vllm.engine_run",
) -> dict[str, Any]:
    """The result of `job` (see engine_run.py) with `settings` in the environment (of the CPU engine); its stderr is in "log".

    `on_pause` is called with each pause's name, and says in which state of the connection the engine goes on, or None: at once.
    Raises RuntimeError with the end of that log where the engine fails, TimeoutError where it takes too long.
    """
    if environment is None:
        environment = engine_run.environment(dict(os.environ))
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**environment, **(settings or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # the engine's own workers end with it
    )
    keeper = end_with_us(process)
    assert process.stdin is not None
    log = bytearray()
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
        result = _converse(process, log, on_pause, time.monotonic() + timeout_s)
        process.stdin.close()
        return result | {"log": log.decode(errors="replace")}
    finally:
        _end_group(process)
        end_keeper(keeper)


def _converse(
    process: subprocess.Popen[bytes], log: bytearray, on_pause: Callable[[str], str | None] | None, ends: float
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    lines = bytearray()
    result: dict[str, Any] | None = None
    with selectors.DefaultSelector() as selector:
        for stream in (process.stdout, process.stderr):
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and not (result and time.monotonic() > ends):
            if time.monotonic() > ends:
                raise TimeoutError(f"the engine did not finish in time:\n{_tail(log)}")
            for key, _ in selector.select(timeout=1.0):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stderr:
                    log += chunk
                else:
                    lines += chunk
                    while b"\n" in lines:
                        line, _, rest = bytes(lines).partition(b"\n")
                        lines = bytearray(rest)
                        text = line.decode()
                        if text.startswith(engine_run.RESULT):
                            result = json.loads(text.removeprefix(engine_run.RESULT))
                            # What the engine's processes still say at their end, but no longer than this.
                            ends = time.monotonic() + EXIT_S
                        elif text.startswith("paused ") and on_pause is not None:
                            state = on_pause(text.removeprefix("paused "))
                            answer = "go" if state is None else engine_run.UNTIL + state
                            process.stdin.write(answer.encode() + b"\n")
                            process.stdin.flush()
    if result is None:
        raise RuntimeError(f"the engine failed:\n{_tail(log)}")
    return result


def _tail(log: bytearray) -> str:
    return log.decode(errors="replace")[-30_000:]


def end_with_us(leader: subprocess.Popen[Any]) -> subprocess.Popen[bytes]:
    """Have a session's leader, and all that it has started, end when this process does, however it ends: a test run that is
    killed runs no `finally`, and a stage that waits for a message notices nothing. The result is for `end_keeper`."""
    # Its standard input ends with the last process that has the other end, which is this one.
    kill = f"read line; kill -s KILL -- -{leader.pid}"
    return subprocess.Popen(["/bin/sh", "-c", kill], stdin=subprocess.PIPE, start_new_session=True)


def end_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """After the session it was made for: its number may be another's soon."""
    keeper.kill()
    keeper.communicate()


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process and of what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()
