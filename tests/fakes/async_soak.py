"""Faults of all kinds put between the rounds of an `async_world.World`, and the accounts that must balance afterwards."""

from __future__ import annotations

import enum
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from tests.fakes.async_worker import WorkerProcess
from tests.fakes.async_world import World

from farspark.engine.config import AsyncSettings
from farspark.engine.handoff.process import ProxyProcess

MS: Final = 1_000_000
# A reconnect, a new process: on a busy machine.
RECOVERY_S: Final = 20.0


class Fault(enum.Enum):
    LATE = "late reply"
    FRAME = "drafter failed"
    ENTRY = "entry failed"
    CUT = "connections cut"
    WORKER_KILLED = "worker killed"
    WORKER_STOPPED = "worker stopped"
    PREEMPTED = "watchdog in mid-round"
    PROXY_STOPPED = "proxy stopped for a while"
    PROXY_BEHIND = "proxy stopped for more rounds than are kept"
    PROXY_KILLED = "proxy killed"
    PROXY_STALLED = "proxy stopped for good"


OF_ANY_PROXY: Final = (
    Fault.LATE,
    Fault.FRAME,
    Fault.ENTRY,
    Fault.CUT,
    Fault.WORKER_KILLED,
    Fault.WORKER_STOPPED,
    Fault.PREEMPTED,
)
OF_A_PROCESS: Final = (Fault.PROXY_STOPPED, Fault.PROXY_BEHIND, Fault.PROXY_KILLED, Fault.PROXY_STALLED)


class Soak:
    """`run` steps the world with a fault every so often; `check` says what does not add up."""

    def __init__(self, world: World, worker: WorkerProcess, settings: AsyncSettings, timeout_s: float) -> None:
        self.world = world
        self.worker = worker
        self.faults: Counter[str] = Counter()
        self.longest_recovery_s = 0.0
        self._settings = settings
        self._timeout_s = timeout_s

    @property
    def _page(self):  # type: ignore[no-untyped-def]
        return self.world.handoff._page

    def run(self, rounds: int, faults: Sequence[Fault], *, between: Callable[[int], None] = lambda at: None) -> None:
        """At least so many rounds, `faults` spread evenly over them; `between` is called in front of each."""
        every = max(1, rounds // (len(faults) + 1))
        left = list(faults)
        at = 0
        while at < rounds or left:
            between(at)
            self.world.step()
            at += 1
            if left and at % every == 0:
                self.inject(left.pop(0))
        self.world.drain()

    def inject(self, fault: Fault) -> None:
        """One fault, while rounds are in flight, then rounds until one is good again."""
        self.faults[fault.value] += 1
        tell = self.worker.tell
        match fault:
            case Fault.LATE:
                tell(f"late {1.5 * self._timeout_s * 1000}")
                self._steps(4)
            case Fault.FRAME:
                tell("fail")
                self._steps(4)
            case Fault.ENTRY:
                tell("entry")
                self._steps(4)
            case Fault.CUT:
                tell("cut")
                self._steps(4)
            case Fault.WORKER_KILLED:
                self._steps(2)
                self.worker.process.send_signal(signal.SIGKILL)
                self._steps(4)
                self.worker.restart()
            case Fault.WORKER_STOPPED:
                self.worker.process.send_signal(signal.SIGSTOP)
                self._steps(5)
                self.worker.process.send_signal(signal.SIGCONT)
            case Fault.PREEMPTED:
                tell(f"late {0.6 * self._timeout_s * 1000}")
                self._page.set_watchdog_deadline(round(0.1 * self._timeout_s * 1e9))
                self._steps(5)
                self._page.set_watchdog_deadline(round(self._settings.watchdog_s * 1e9))
            case Fault.PROXY_STOPPED:
                os.kill(self._proxy_pid(), signal.SIGSTOP)
                self._page.set_watchdog_deadline(5 * MS)
                self._steps(6)
                self._page.set_watchdog_deadline(round(self._settings.watchdog_s * 1e9))
                os.kill(self._proxy_pid(), signal.SIGCONT)
            case Fault.PROXY_BEHIND:
                os.kill(self._proxy_pid(), signal.SIGSTOP)
                self._page.set_watchdog_deadline(1 * MS)
                self._steps(90)
                self._page.set_watchdog_deadline(round(self._settings.watchdog_s * 1e9))
                os.kill(self._proxy_pid(), signal.SIGCONT)
            case Fault.PROXY_KILLED:
                self._steps(1)
                self._replaced_after(signal.SIGKILL)
            case Fault.PROXY_STALLED:
                self._replaced_after(signal.SIGSTOP)
        self._recover()

    def _replaced_after(self, number: signal.Signals) -> None:
        pid = self._proxy_pid()
        os.kill(pid, number)
        until = time.monotonic() + RECOVERY_S
        while self._proxy_pid() == pid:
            self._steps(1)
            assert time.monotonic() < until, f"a proxy was not replaced after {number.name}"
            time.sleep(0.001)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    def _proxy_pid(self) -> int:
        """Waits for the next one where one is gone."""
        until = time.monotonic() + RECOVERY_S
        while True:
            side = self.world.handoff.side
            assert isinstance(side, ProxyProcess)
            pid = side.facts()["proxy_pid"]
            if pid is not None:
                return int(pid)
            assert time.monotonic() < until, "no proxy process"
            time.sleep(0.005)

    def _recover(self) -> None:
        world, began = self.world, time.monotonic()
        world.drain()
        good = 0
        while good < 2:
            world.step()
            good = good + 1 if world.was_good and world.was_good[-1] else 0
            assert time.monotonic() < began + RECOVERY_S, (
                f"no good round for {RECOVERY_S:g} s after {self.faults}: {world.counters()} {world.handoff.side.details()}"
            )
            time.sleep(0.001)
        self.longest_recovery_s = max(self.longest_recovery_s, time.monotonic() - began)

    def settle(self) -> None:
        """Until the proxy has taken note of everything."""
        until = time.monotonic() + RECOVERY_S
        region, gate = self.world.handoff._region, self.world.handoff._gate
        while region.noted != gate.newest:
            assert time.monotonic() < until, f"{region!r} {gate!r}"
            time.sleep(0.002)
        time.sleep(0.05)  # it writes its counters after that

    def faults_of_accounts(self) -> list[str]:
        """What does not add up; call `settle` before."""
        world, counters = self.world, self.world.counters()
        watchdog = self._page.watchdog_stats()
        side = world.handoff.side
        respawns = side.facts()["proxies_started"] - 1 if isinstance(side, ProxyProcess) else 0
        found = []
        ended = counters["rounds_ok"] + counters["rounds_some_failed"] + counters["rounds_failed"]
        if ended != world.tally.rounds:
            found.append(f"{world.tally.rounds} rounds, {ended} in the counters: {counters}")
        reasons = sum(count for name, count in counters.items() if name.startswith("fallback_"))
        # A batch without a row, and a row without one, are two reasons for one round.
        if reasons - counters["fallback_no_rows"] > counters["rounds_failed"] or (
            counters["rounds_failed"] and not reasons
        ):
            found.append(f"{counters['rounds_failed']} failed rounds, {reasons} reasons: {counters}")
        lost = counters["watchdog_preempted"] + counters["watchdog_skipped_unknown_ring"]
        if respawns == 0 and watchdog.preempted != lost:
            found.append(f"the watchdog ended {watchdog.preempted} rounds, the proxy lost {lost}: {counters}")
        allowed = world.info.slots * (respawns + counters["watchdog_skipped_unknown_ring"])
        if world.tally.afresh > allowed:
            found.append(f"{world.tally.afresh} slots began anew, at most {allowed} may have")
        failure = getattr(world.handoff.stream, "failure", None)
        if failure is not None:
            found.append(f"the stream: {failure!r}")
        return found
