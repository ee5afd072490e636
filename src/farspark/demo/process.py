"""A child process with a log file, a readiness check and a bounded end, which comes however this process is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from farspark.clock import Deadline
from farspark.errors import FarsparkError

_LOG_TAIL_LINES = 15


@contextlib.contextmanager
def left_in_order() -> Iterator[None]:
    """SIGTERM, and the SIGHUP of a terminal that goes, end the block as Ctrl-C does: what was started in it is ended. Main
    thread only."""

    def leave(number: int, _frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # once is enough, and must not cut the ends of children short
        raise SystemExit(128 + number)

    asked = (signal.SIGTERM, signal.SIGHUP)
    # What nohup has ignored stays ignored.
    before = {one: signal.signal(one, leave) for one in asked if signal.getsignal(one) is not signal.SIG_IGN}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class ChildFailed(FarsparkError):
    """The child ended, or did not become ready in time. The message ends with the tail of its log."""


class Child:
    """Started by `with`; ended by SIGTERM, then SIGKILL, together with every process of its own."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Child:
        with open(self.log, "wb") as output:
            # A session of its own, so that one signal reaches the engine's workers too, and so that a Ctrl-C in the
            # terminal is ours to pass on.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        return self

    def wait_ready(self, is_ready: Callable[[], bool], deadline: Deadline, waiting: Callable[[float], None]) -> None:
        """Poll `is_ready`; `waiting(seconds so far)` is called between polls. Raises ChildFailed."""
        assert self._process is not None
        started = time.monotonic()
        while not is_ready():
            if self._process.poll() is not None:
                raise ChildFailed(f"{self.name} ended with exit code {self._process.returncode}; {self._log_tail()}")
            if deadline.has_passed():
                raise ChildFailed(f"{self.name} was not ready in time; {self._log_tail()}")
            waiting(time.monotonic() - started)
            time.sleep(0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
                break
        # The leader is gone; whoever of its session is left has nothing to serve.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return f"the end of {self.log}:\n  " + "\n  ".join(lines)
