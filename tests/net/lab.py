"""A worker's host, an engine's host, the link between them, both processes, and what the engine's rounds looked like."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.net.engine import EngineSettings, Record
from tests.net.hosts import Host, Link, Process

from farspark.engine.breaker import State
from farspark.engine.result import RoundOutcome

PORT = 18620
OK = RoundOutcome.OK.name
_CLOSED = State.CLOSED.value
# So many good rounds in a row are steady.
_STEADY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Report:
    """What the engine did between two questions."""

    records: Sequence[Record]
    counters: dict[str, int]
    breaker: dict[str, Any]
    state: str
    why: str | None
    connected_to: str | None


class Lab:
    """Owned by the thread that makes it. Logs of both processes go to `folder`."""

    def __init__(self, settings: EngineSettings, folder: Path, *, seed: int = 0) -> None:
        self.settings = settings
        self._log = (folder / "lab.log").open("a")
        self.engine_host, self.worker_host = Host(), Host()
        self.link = Link(self.engine_host, self.worker_host, seed=seed)
        self.worker: Process | None = None
        self.engine: Process | None = None

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        for process in (self.engine, self.worker):
            if process is not None:
                process.kill()
        self.link.close()
        self.engine_host.close()
        self.worker_host.close()
        self._log.close()

    def start_worker(self, *, identity: int | None = None, address: str | None = None) -> Process:
        """Another worker on the worker's host; ready when this returns. The one before must be gone."""
        self.worker = self.extra_worker(address or self.link.addresses[1], identity=identity)
        return self.worker

    def extra_worker(self, address: str, *, identity: int | None = None) -> Process:
        """A worker that the caller owns."""
        worker = self.worker_host.start(
            "tests.net.worker",
            f"tcp://{address}:{PORT}",
            str(self.settings.hidden_size),
            str(identity or self.settings.identity),
            log=self._log,
        )
        worker.answer()
        return worker

    def start_farspark_worker(self, checkpoint: Path, context: int, slots: int) -> None:
        """The real program, with a checkpoint; ready when this returns."""
        options = {"--dtype": "float32", "--context": str(context), "--slots": str(slots)}
        self.worker = self.worker_host.start(
            "farspark",
            "worker",
            str(checkpoint),
            "--allow-unauthenticated-network",
            f"--listen=tcp://{self.link.addresses[1]}:{PORT}",
            *(text for option in options.items() for text in option),
            log=self._log,
        )
        self.worker.wait_for_line("ready on")

    def kill_worker(self) -> None:
        assert self.worker is not None
        self.worker.kill()

    def signal_worker(self, number: signal.Signals) -> None:
        assert self.worker is not None
        self.worker.popen.send_signal(number)

    def slots_in_use(self) -> int:
        """As the worker counts them."""
        assert self.worker is not None
        return int(self.worker.ask("stats")["slots"]["in_use"])

    def wait_slots_free(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while in_use := self.slots_in_use():
            assert time.monotonic() < until_s, f"{in_use} slots in use after {timeout_s:g} s"
            time.sleep(0.02)

    def reboot_worker(self) -> None:
        """The worker's machine is gone without a word and another one, which knows of nothing, has its address."""
        self.link.cut()
        self.kill_worker()
        self.worker_host.close()
        self.worker_host = Host()
        self.link.plug(1, self.worker_host)
        self.start_worker()
        self.link.heal()

    def start_engine(self, *, hosts_file: Path | None = None) -> None:
        """Rounds begin at once."""
        settings = json.dumps(asdict(self.settings))
        self.engine = self.engine_host.start("tests.net.engine", settings, hosts_file=hosts_file, log=self._log)

    def tell_engine(self, word: str) -> None:
        """`pause` or `go`."""
        assert self.engine is not None
        self.engine.ask(word)

    def report(self) -> Report:
        assert self.engine is not None
        answer = self.engine.ask("report")
        return Report(**{**answer, "records": [Record(*record) for record in answer["records"]]})

    def wait_for(self, what: str, is_so: Callable[[list[Report]], bool], timeout_s: float) -> list[Report]:
        """Ask until the reports so far are so; all of them. Raises AssertionError with the last one at the time-out."""
        reports: list[Report] = []
        until_s = time.monotonic() + timeout_s
        while True:
            reports.append(self.report())
            if is_so(reports):
                return reports
            if time.monotonic() > until_s:
                last = reports[-1]
                records = last.records[-3:]
                raise AssertionError(f"not {what} within {timeout_s:g} s: {last.state}, {last.why}, {records}")
            time.sleep(0.05)

    def wait_steady(self, timeout_s: float = 60.0) -> list[Report]:
        """Wait until rounds succeed again, one after the other."""
        return self.wait_for("steady", _is_steady, timeout_s)

    def wait_calm(self, timeout_s: float = 60.0) -> list[Report]:
        """The same, until the breaker has forgotten what was before."""
        return self.wait_for("calm", _is_calm, timeout_s)


def _is_calm(reports: list[Report]) -> bool:
    return _is_steady(reports) and reports[-1].breaker["on_trial"] == 0


def _is_steady(reports: list[Report]) -> bool:
    last = [record for report in reports for record in report.records][-_STEADY_ROUNDS:]
    return len(last) == _STEADY_ROUNDS and all(record.outcome == OK and record.breaker == _CLOSED for record in last)
