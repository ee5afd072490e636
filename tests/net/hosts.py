"""Hosts and the links between them, on this machine: network namespaces joined by a relay that can be told to be bad.

Nothing is left behind, even by a test run that is killed: a namespace without a name lives as long as a process in it, its
devices live as long as it does, and the kernel kills every process made here when the one that made it dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.net.impairment import CLEAN, CUT, Counts, Impairment

ROOT = Path(__file__).resolve().parent.parent.parent
_TOOLS = ("unshare", "nsenter", "setpriv", "ip")
_DIE_WITH_US = ("setpriv", "--pdeathsig", "KILL")
# What is measured is the engine's wait for worker and network, so neither they nor the relay wait for the rest of the machine.
_AHEAD_OF_OTHERS = ("chrt", "--rr", "10")


@functools.cache
def ahead_of_others() -> tuple[str, ...]:
    """What a command is preceded by to run before all ordinary processes; empty where that is not allowed."""
    try:
        allowed = subprocess.run([*_AHEAD_OF_OTHERS, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return ()
    return _AHEAD_OF_OTHERS if allowed else ()


def why_not() -> str | None:
    """Why this machine cannot have hosts of its own, as a sentence; None if it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages util-linux and iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"network namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else None


@contextlib.contextmanager
def first_on_the_machine() -> Iterator[None]:
    """This thread runs before those too: a fault that should last 100 ms must not last until there is a core again."""
    if ahead_of_others():
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(11))
    try:
        yield
    finally:
        if ahead_of_others():
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class Process:
    """A Python module of ours in a process of its own, asked and answering by lines of JSON; owned by one thread.

    It must be made by a thread that lives as long as it should: the kernel kills it with that thread.
    """

    def __init__(self, module: str, *arguments: str, enter: Sequence[str] = (), log: IO[str] | None = None) -> None:
        paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            [*enter, *_DIE_WITH_US, *ahead_of_others(), sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.name = module

    @property
    def pid(self) -> int:
        return self.popen.pid

    def ask(self, command: object) -> Any:
        """Send one line, wait for one line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(command) + "\n")
        self.popen.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        """The next line. Raises RuntimeError if the process has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.popen.wait()}, see its log")
        return json.loads(line)

    def wait_for_line(self, begin: str) -> None:
        """Read up to a line that begins so. Raises RuntimeError if the process has ended."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(begin):
                return
        raise RuntimeError(f"{self.name} ended with {self.popen.wait()}, see its log")

    def kill(self) -> None:
        """As `kill -9`. Idempotent."""
        self.popen.kill()
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    pass  # what was written last has no reader


class Host:
    """A machine as far as the network goes: a namespace with a loopback device of its own."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", *_DIE_WITH_US, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        # The answer comes from inside.
        self._holder.stdin.write("ready\n")
        self._holder.stdin.flush()
        if self._holder.stdout.readline() != "ready\n":
            raise RuntimeError("no network namespace could be made")
        self.run("ip", "link", "set", "lo", "up")

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """A process inside."""
        return self._holder.pid

    @property
    def enter(self) -> tuple[str, ...]:
        """What a command is preceded by to run here."""
        return ("nsenter", f"--net=/proc/{self.pid}/ns/net")

    def run(self, *command: str) -> str:
        """Run a command to its end; its output. Raises CalledProcessError."""
        return subprocess.run([*self.enter, *command], check=True, capture_output=True, text=True).stdout

    def start(
        self, module: str, *arguments: str, hosts_file: Path | None = None, log: IO[str] | None = None
    ) -> Process:
        """Start a Python module of ours here; `hosts_file` stands in place of /etc/hosts for it."""
        enter: tuple[str, ...] = self.enter
        if hosts_file is not None:
            mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
            enter = (*enter, "unshare", "--mount", "sh", "-c", mount, str(hosts_file))
        return Process(module, *arguments, enter=enter, log=log)

    def close(self) -> None:
        """The namespace goes with the last process in it, and those are their makers' to end. Idempotent."""
        self._holder.kill()
        self._holder.wait()
        for stream in (self._holder.stdin, self._holder.stdout):
            if stream is not None:
                stream.close()


class Link:
    """A cable between two hosts. `10.77.NUMBER.1` is the first one's address on it, `10.77.NUMBER.2` the second one's."""

    def __init__(self, first: Host, second: Host, *, number: int = 1, seed: int = 0) -> None:
        self.addresses = (f"10.77.{number}.1", f"10.77.{number}.2")
        self._device = f"link{number}"
        self._relay = Process("tests.net.relay", str(seed))
        self.plug(0, first)
        self.plug(1, second)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def plug(self, end: int, host: Host) -> None:
        """Put `host` at an end, in place of the one before; it gets the address of that end."""
        self._relay.ask({"open": end, "pid": host.pid, "name": self._device})
        # Without an address of its own making the device stays silent until it is used.
        host.run("ip", "link", "set", self._device, "addrgenmode", "none")
        host.run("ip", "address", "add", f"{self.addresses[end]}/24", "dev", self._device)
        host.run("ip", "link", "set", self._device, "up")

    def impair(self, there: Impairment, back: Impairment | None = None) -> None:
        """`there` for packets from the first host, `back` for those from the second; the same if it is left out."""
        for end, impairment in enumerate((there, there if back is None else back)):
            self._relay.ask({"from": end, "impairment": dataclasses.asdict(impairment)})

    def cut(self) -> None:
        self.impair(CUT)

    def heal(self) -> None:
        self.impair(CLEAN)

    def counts(self) -> tuple[Counts, Counts]:
        """Since the beginning, by the end that the packets came from."""
        first, second = (Counts(**counts) for counts in self._relay.ask({}))
        return first, second

    def close(self) -> None:
        self._relay.kill()
