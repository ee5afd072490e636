"""The faults, one after the other, and what is measured while each lasts and until it is over."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from tests.net.engine import Record
from tests.net.hosts import first_on_the_machine
from tests.net.impairment import CLEAN, CUT, Impairment
from tests.net.lab import OK, Lab, Report

from farspark.engine.breaker import State

BOUND_MS = 5.0  # a round may take its time-out, and so much for everything else
# A peer that vanished: 10 seconds without an acknowledgement, or 5 + 3 x 2 seconds of silence, and what is between looks.
TCP_PATIENCE_S = 12.5
STAYED_AT_HOME = ("cooldown", "not_ready", "disabled")

Fault = Callable[[Lab], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Drill:
    name: str
    fault: Fault  # entered: it happens; left: it is over
    hold_s: float | None = None  # how long it lasts
    hold_rounds: int = 250  # so many steps, where `hold_s` is None
    hidden_size: int = 4
    heals: bool = True  # drafting resumes when it is over

    def lasts_s(self, pace_ms: float) -> float:
        return self.hold_rounds * pace_ms / 1000 if self.hold_s is None else self.hold_s


@dataclass(slots=True)
class Cooldown:
    """Rounds from one that opened the breaker to the next that went out."""

    is_longer: bool  # a probe opened it, or a recovery had not lasted
    rounds: int = 0
    is_exact: bool = True  # the last one had a connection, so that it was the cool-down alone that kept it at home


@dataclass(slots=True)
class Outcome:
    """Milliseconds, rounds, and what the counters say."""

    name: str
    rounds: int = 0
    ok: int = 0
    wrong: int = 0
    longest_ms: float = 0.0  # round, on the wall clock
    longest_own_ms: float = 0.0  # round, less the time its thread was ready and had no core
    longest_send_ms: float = 0.0  # handing a request over
    typical_us: float = 0.0  # median of the rounds that succeeded
    guarded: int = 0  # rounds that failed while the breaker was open or no connection was there, the probes among them
    guarded_us: float = 0.0  # their mean, less the time without a core
    recovery_rounds: int | None = None  # from the end of the fault to the first round that succeeded, that one included
    cooldowns: list[Cooldown] = field(default_factory=list)
    new_connections: list[str] = field(default_factory=list)  # outcome of the first STEP of each one made afterwards
    counters: Counter[str] = field(default_factory=Counter)
    state: str = ""
    why: str | None = None
    worker_freed_s: float | None = None  # from the begin of the fault until the worker had freed every slot

    @property
    def failed(self) -> int:
        return self.rounds - self.ok

    def guarded_share(self, step_ms: float) -> float:
        """What a guarded round costs, as a share of a step."""
        return self.guarded_us / 1000 / step_ms


def run(drill: Drill, lab: Lab, timeout_s: float = 60.0) -> Outcome:
    """From steady rounds through the fault to steady rounds. Raises AssertionError if they do not come back."""
    steady = [*lab.wait_calm(timeout_s), lab.report()]
    known = {record.epoch for report in steady for record in report.records}
    with first_on_the_machine():
        began_s = time.monotonic()
        with drill.fault(lab):
            freed_s = _hold(lab, began_s, drill.lasts_s(lab.settings.pace_ms))
        over_s = time.monotonic()
    if drill.heals:
        reports = lab.wait_steady(timeout_s)
    else:
        time.sleep(0.5)
        reports = [lab.report()]
    outcome = judge(drill.name, reports, over_s, known)
    outcome.worker_freed_s = freed_s
    return outcome


def _hold(lab: Lab, began_s: float, hold_s: float) -> float | None:
    """Let the fault last. In one that outlasts TCP, also look when the worker frees its slots."""
    freed_s = None
    while (left_s := began_s + hold_s - time.monotonic()) > 0:
        if hold_s >= TCP_PATIENCE_S and freed_s is None and lab.slots_in_use() == 0:
            freed_s = time.monotonic() - began_s
        time.sleep(min(left_s, 0.05))
    return freed_s


def judge(name: str, reports: Sequence[Report], over_s: float, known: Collection[int] = ()) -> Outcome:
    """Add up what the engine reported; the fault was over at `over_s`, the connections of epochs `known` are older."""
    records = [record for report in reports for record in report.records]
    outcome = Outcome(name, state=reports[-1].state, why=reports[-1].why)
    for report in reports:
        outcome.counters.update(report.counters)
    succeeded = sorted(record.took_ms for record in records if record.outcome == OK)
    outcome.rounds, outcome.ok = len(records), len(succeeded)
    outcome.wrong = sum(record.wrong for record in records)
    outcome.longest_ms = max((record.took_ms for record in records), default=0.0)
    outcome.longest_own_ms = max((record.own_ms for record in records), default=0.0)
    outcome.longest_send_ms = max((record.send_ms for record in records), default=0.0)
    outcome.typical_us = 1000 * succeeded[len(succeeded) // 2] if succeeded else 0.0
    guarded = list(_guarded(records))
    outcome.guarded = len(guarded)
    outcome.guarded_us = 1000 * sum(record.own_ms for record in guarded) / len(guarded) if guarded else 0.0
    outcome.cooldowns = list(_cooldowns(records, int(reports[-1].breaker["cooldown"])))
    after = [record for record in records if record.at_s >= over_s]
    good = [number for number, record in enumerate(after, start=1) if record.outcome == OK]
    outcome.recovery_rounds = good[0] if good else None
    asked = {record.epoch for record in records if record.at_s < over_s} | {0, *known}
    for record in after:
        if record.epoch not in asked:
            asked.add(record.epoch)
            outcome.new_connections.append(record.outcome)
    return outcome


def _guarded(records: Sequence[Record]) -> Iterator[Record]:
    """Failed rounds behind one that opened the breaker or found no connection, up to the next that succeeds."""
    is_guarded = False
    for record in records:
        if record.outcome == OK:
            is_guarded = is_guarded and record.breaker != State.CLOSED.value
            continue
        if is_guarded:
            yield record
        elif record.breaker != State.CLOSED.value or record.reason in ("not_ready", "disabled"):
            is_guarded = True


def _cooldowns(records: Sequence[Record], cooldown_rounds: int) -> Iterator[Cooldown]:
    """Those that are over: a round went out. The records begin in calm."""
    one: Cooldown | None = None
    before, on_trial = State.CLOSED.value, 0
    for record in records:
        if record.reason in STAYED_AT_HOME:
            if one is not None:
                one.rounds += 1
                one.is_exact = record.reason == "cooldown"
        else:
            if one is not None:
                yield one
            is_longer = before != State.CLOSED.value or on_trial > 0
            one = Cooldown(is_longer) if record.breaker == State.OPEN.value else None
            if record.outcome == OK:
                on_trial = max(0, on_trial - 1) if before == State.CLOSED.value else cooldown_rounds
        before = record.breaker


# Faults.


def on_link(there: Impairment, back: Impairment | None = None) -> Fault:
    @contextlib.contextmanager
    def fault(lab: Lab) -> Iterator[None]:
        lab.link.impair(there, back)
        try:
            yield
        finally:
            lab.link.heal()

    return fault


@contextlib.contextmanager
def stopped(lab: Lab) -> Iterator[None]:
    lab.signal_worker(signal.SIGSTOP)
    try:
        yield
    finally:
        lab.signal_worker(signal.SIGCONT)


@contextlib.contextmanager
def killed(lab: Lab) -> Iterator[None]:
    lab.kill_worker()
    yield
    lab.start_worker()


@contextlib.contextmanager
def restarted(lab: Lab) -> Iterator[None]:
    """As a person does it: the worker is told to end, and started again."""
    lab.signal_worker(signal.SIGTERM)
    yield
    lab.kill_worker()
    lab.start_worker()


@contextlib.contextmanager
def replaced(lab: Lab) -> Iterator[None]:
    """What is started again serves another checkpoint."""
    lab.kill_worker()
    lab.start_worker(identity=lab.settings.identity + 1)
    yield


@contextlib.contextmanager
def rebooted(lab: Lab) -> Iterator[None]:
    """While the engine is idle, so that its connection looks alive to it."""
    lab.tell_engine("pause")
    lab.reboot_worker()
    yield
    lab.tell_engine("go")


WIDE = 4096  # hidden size: a row of 16 KiB, so that a round is larger than what a slow link takes in its time

DRILLS = (
    Drill("no fault", on_link(CLEAN)),
    Drill("delay 1 ms, jitter 0.5", on_link(Impairment(delay_ms=1, jitter_ms=0.5))),
    Drill("delay 5 ms, jitter 2", on_link(Impairment(delay_ms=5, jitter_ms=2))),
    Drill("delay 60 ms, jitter 5", on_link(Impairment(delay_ms=60, jitter_ms=5)), hold_rounds=800),
    Drill("loss 1 %", on_link(Impairment(loss=0.01)), hold_rounds=500),
    Drill("loss 10 %", on_link(Impairment(loss=0.1)), hold_rounds=500),
    Drill("loss 30 %", on_link(Impairment(loss=0.3)), hold_rounds=500),
    Drill("reordering 25 %", on_link(Impairment(delay_ms=1, reorder=0.25, reorder_ms=3))),
    Drill("duplicates 25 %", on_link(Impairment(duplicate=0.25))),
    Drill("partition 60 ms", on_link(CUT), 0.06),
    Drill("partition 0.5 s", on_link(CUT), 0.5),
    Drill("partition 3 s", on_link(CUT), 3.0),
    Drill("partition longer than TCP waits", on_link(CUT), TCP_PATIENCE_S),
    Drill("half-open, requests lost", on_link(CUT, CLEAN)),
    Drill("half-open, replies lost", on_link(CLEAN, CUT)),
    Drill("worker stopped 60 ms (SIGSTOP)", stopped, 0.06),
    Drill("worker stopped 1 s (SIGSTOP)", stopped, 1.0),
    Drill("worker killed, started again", killed),
    Drill("worker ended by SIGTERM, started again", restarted),
    Drill("worker's machine rebooted", rebooted),
    Drill("pipe of 10 Mbit/s, rounds of 140 KB", on_link(Impairment(rate_mbit=10)), hold_rounds=600, hidden_size=WIDE),
    Drill("replaced by another checkpoint", replaced, heals=False),
)
