"""Two workers as processes, real signals, and rounds that go on at a decode step's pace: how many bring nothing, and where drafts
come from. Synchronous, and with the rounds in a proxy thread and a proxy process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest
from tests.engine.test_moves import Moving
from tests.fakes.async_world import HostDevice, World, make_info, settings, talker_spec
from tests.fakes.engine_world import INFO
from tests.fakes.signalled_worker import SignalledWorker

from farspark.clock import Deadline
from farspark.engine.config import AsyncProxy
from farspark.engine.result import RoundOutcome
from farspark.transport import parse_endpoint

PACE_S = 0.02
TIMEOUT_S = 0.1
# One of each after the other, so no first wait may double for long.
BACKOFF: dict[str, Any] = {"backoff_s": 0.1, "backoff_max_s": 0.2}
PATIENCE_S = 30.0


class Engine(Protocol):
    """Checks each draft that comes."""

    def round(self) -> None: ...
    @property
    def failed(self) -> int:
        """Rounds without drafts so far."""
        ...

    def serves(self, endpoint: str) -> bool: ...
    def counters(self) -> dict[str, int]: ...


class Synchronous:
    def __init__(self, world: Moving) -> None:
        self._world = world

    def round(self) -> None:
        self._world.one_round()

    @property
    def failed(self) -> int:
        return self._world.failed

    def serves(self, endpoint: str) -> bool:
        return self._world.serves(endpoint)

    def counters(self) -> dict[str, int]:
        return dict(self._world.stats.counters())


class Asynchronous:
    def __init__(self, world: World) -> None:
        self._world = world

    def round(self) -> None:
        self._world.step([self._world.row(0, 2)])

    @property
    def failed(self) -> int:
        self._world.drain()
        return self._world.outcomes.count(RoundOutcome.FAILED)

    def serves(self, endpoint: str) -> bool:
        self._world.drain()
        return bool(self._world.handoff.side.details()["endpoint"] == endpoint)

    def counters(self) -> dict[str, int]:
        return dict(self._world.counters())


@pytest.fixture(params=["synchronous", "thread", pytest.param("process", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, SignalledWorker, SignalledWorker]]:
    """With the preferred worker and the other one."""
    kind = request.param
    info = INFO if kind == "synchronous" else make_info()
    with ExitStack() as stack:
        first, second = (stack.enter_context(SignalledWorker(info)) for _ in range(2))
        endpoints = f"{first.endpoint},{second.endpoint}"
        if kind == "synchronous":
            others = parse_endpoint(first.endpoint), parse_endpoint(second.endpoint)
            moving = Moving(
                listen=f"memory://nowhere-{id(stack)}",
                hidden={f"nowhere-{id(stack)}"},
                others=others,
                timeout_s=TIMEOUT_S,
                trip=3,
                **BACKOFF,
            )
            yield Synchronous(stack.enter_context(moving)), first, second
            return
        spec = talker_spec(info, endpoints, timeout_s=TIMEOUT_S, trip=3, cooldown=256, **BACKOFF)
        chosen = settings(AsyncProxy(kind), watchdog_s=4 * TIMEOUT_S)
        world = stack.enter_context(World(HostDevice(info), info, chosen, spec, seed=1))
        world.wait_ready()
        yield Asynchronous(world), first, second


def rounds_until(engine: Engine, is_so: Callable[[], bool]) -> int:
    """How many of them brought nothing."""
    before, deadline = engine.failed, Deadline.after(PATIENCE_S)
    while True:
        for _ in range(5):
            engine.round()
            time.sleep(PACE_S)
        if is_so():
            return engine.failed - before
        assert not deadline.has_passed(), engine.counters()


def steady(engine: Engine, endpoint: str) -> None:
    """Twenty good rounds there."""
    rounds_until(engine, lambda: engine.serves(endpoint))
    before = engine.failed
    for _ in range(20):
        engine.round()
    assert engine.failed == before
    assert engine.serves(endpoint)


def test_half_open_a_killed_a_stopped_and_a_drained_worker_cost_the_rounds_that_found_out_and_no_return_costs_one(
    engine: tuple[Engine, SignalledWorker, SignalledWorker],
) -> None:
    rounds, first, second = engine
    lost: dict[str, int] = {}

    def away(what: str) -> None:
        lost[what] = rounds_until(rounds, lambda: rounds.serves(second.endpoint))
        steady(rounds, second.endpoint)

    def back(what: str) -> None:
        lost[what] = rounds_until(rounds, lambda: rounds.serves(first.endpoint))
        steady(rounds, first.endpoint)

    steady(rounds, first.endpoint)
    first.signal(signal.SIGTERM)
    away("drained")
    assert first.wait() == 0
    first.restart()
    back("back after a drain")
    first.signal(signal.SIGKILL)
    away("killed")
    first.wait()
    first.restart()
    back("back after a kill")
    first.signal(signal.SIGSTOP)
    away("stopped")
    first.signal(signal.SIGCONT)
    back("back after a stop")
    print(f"rounds of {PACE_S * 1000:g} ms without drafts: {lost}")

    is_async = isinstance(rounds, Asynchronous)
    assert lost["drained"] == 0
    assert {lost[what] for what in lost if what.startswith("back")} == {0}
    # The round in hand; while the other one is asked some go by, and in flight some more.
    assert 1 <= lost["killed"] <= (8 if is_async else 4)
    # Three that miss their deadline, which are rounds in flight too.
    assert 3 <= lost["stopped"] <= (16 if is_async else 7)
    counters = rounds.counters()
    assert (counters["failovers"], counters["returns"], counters["drains"]) == (3, 3, 1)
    assert counters["hellos"] == 7
    assert counters.get("stale_generation_new_sessions", 0) == 0
