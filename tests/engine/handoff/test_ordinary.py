"""Ordinary rounds in one native call: as good as all of them are, and each has the result that Python makes of its answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.engine.handoff.conftest import Open

from farspark.engine.breaker import State
from farspark.engine.client import Answered, Client
from farspark.engine.config import AsyncProxy
from farspark.engine.handoff import proxy as proxy_module
from farspark.engine.handoff.ordinary import OrdinaryRounds, Served
from farspark.engine.handoff.region import Submission, next_round
from farspark.engine.handoff.thread import ProxyThread
from farspark.engine.result import PackedResult, RoundOutcome
from farspark.engine.round import Deliver, Phase, RemoteRound, RoundInput, RoundRequest
from farspark.native import Status
from farspark.wire.layout import StepFlag


@pytest.mark.parametrize("proxy", AsyncProxy)
def test_rounds_that_go_on_take_one_call_each(open_world: Open, proxy: AsyncProxy) -> None:
    world, _ = open_world(proxy)
    for _ in range(60):
        world.step()
        time.sleep(0.001)
    world.drain()
    until = time.monotonic() + 5
    while (counters := world.counters())["rounds_ok"] < 60 and time.monotonic() < until:
        time.sleep(0.01)
    # New and preempted requests, and those in the middle of their prompt, take the other way.
    assert 15 < counters["rounds_in_one_call"] < 60
    assert world.tally.failed == 0


def test_a_descriptor_that_is_seen_in_part_before_its_round_is_due_is_not_believed(open_world: Open) -> None:
    """As a weakly ordered machine may show it: its number is there, and behind it stands something else."""
    world, _ = open_world(spec={"timeout_s": 10.0}, watchdog_s=30.0)
    for _ in range(10):
        world.step([world.row(0, 1)])
        world.drain()
    region, owner = world.handoff._region, world._requests[0].owner
    for slots, owners, k_windows in (([1001], [1000], [0]), ([0], [owner], [-1])):
        said = Submission(slots, owners, k_windows, Phase.DECODE, 1)
        region.describe(next_round(world.handoff._gate.newest), said, [])
        time.sleep(0.05)  # the proxy looks every millisecond
        world.step([world.row(0, 1)])
        world.drain()
        assert world.outcomes[-1] in (RoundOutcome.OK, RoundOutcome.NOTHING), said
    assert world.handoff.is_open


def test_python_makes_the_same_of_the_same_answer(open_world: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = Counter[bool]()
    whole = RemoteRound.finish

    def finish(
        self: RemoteRound, step: RoundInput, result: PackedResult, deliver: Deliver, answered: Answered
    ) -> RoundOutcome:
        published = bytes(result.buffer)

        def look() -> bool:
            if answered.answered_s is not None:
                compared[published == bytes(result.buffer)] += 1
            return deliver()

        return whole(self, step, result, look, answered)

    monkeypatch.setattr(RemoteRound, "finish", finish)
    world, _ = open_world(seed=7)
    for _ in range(150):
        world.step()
    world.drain()
    assert compared[True] > 40
    assert not compared[False]
    assert world.tally.failed == 0


def test_a_step_that_the_books_do_not_know_ends_its_connection(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sent and what is noted must be the same: else nobody knows what the worker holds."""
    serve, rounds = OrdinaryRounds.serve, itertools.count()

    def spoil(self: OrdinaryRounds, ready: Any, until_ns: int) -> Any:
        served = serve(self, ready, until_ns)
        if isinstance(served, Served) and next(rounds) == 3:
            served.answered.head[40] ^= 1
        return served

    monkeypatch.setattr(OrdinaryRounds, "serve", spoil)
    world, _ = open_world()
    for _ in range(200):
        world.step()
        world.drain()
        time.sleep(0.0005)
    counters = world.counters()
    assert counters["fallback_bad_reply"] == 1
    assert counters["disconnects"] == 1
    assert world.outcomes[-1] is not RoundOutcome.FAILED
    assert counters["rounds_in_one_call"] > 20


def test_what_is_lent_comes_back_where_the_books_cannot_be_kept(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = open_world()
    side = world.handoff.side
    assert isinstance(side, ProxyThread)
    for _ in range(10):
        world.step([world.row(0, 1)])
    world.drain()
    connection = side.talker.client.connection()
    assert connection is not None

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(side.talker.round, "finish", fail)
    for _ in range(10):
        world.step([world.row(0, 1)])
    world.drain()
    assert not world.handoff.is_open
    assert not connection.turn.locked()
    assert connection.channel.is_closed


def test_a_round_is_foreseen_only_where_its_metadata_alone_decides(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = open_world()
    side = world.handoff.side
    assert isinstance(side, ProxyThread)
    row = world.row(0, 1)
    for _ in range(4):
        world.step([row])
        world.drain()
        row = world.row(0, 1)
    # The proxy has nothing to do until the next step.
    talker, ordinary = side.talker, side._proxy._ordinary
    assert ordinary is not None
    here, other = RoundRequest(0, row.request.owner, 0), RoundRequest(0, row.request.owner + 1, 0)
    until = time.monotonic() + 5
    while not ordinary.lay_ready(1, b"", [here]) and time.monotonic() < until:
        time.sleep(0.005)  # it keeps its books
    assert ordinary.lay_ready(1, b"", [here])
    assert not ordinary.lay_ready(1, b"", [other])
    assert not ordinary.lay_ready(1, b"", [here, here])
    changes: list[tuple[Any, str, Any]] = [
        (talker.round.breaker, "state", State.OPEN),
        (talker.depth, "_file", Path("depths")),
        (talker.round, "_flags", StepFlag.MARGINS),
        (talker.round, "_epoch", 0),
        (talker.round, "_clock", lambda: 0.0),
        (talker, "capture", object()),
        (talker.client, "_connection", None),
    ]
    for owner, name, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not ordinary.lay_ready(1, b"", [here]), name
    assert ordinary.lay_ready(1, b"", [here])


def test_a_connection_that_is_in_use_or_was_replaced_is_not_lent(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = open_world()
    side = world.handoff.side
    assert isinstance(side, ProxyThread)
    client: Client = side.talker.client
    connection = client.connection()
    assert connection is not None
    with connection.turn:
        assert client.lend(connection) is None
    assert client.lend(connection) is not None
    assert client.lend(connection) is None
    client.end_loan(connection)
    with monkeypatch.context() as patch:
        patch.setattr(client, "_connection", None)  # another takes its place
        assert client.lend(connection) is None
    client.drop(connection, "planted")
    assert client.lend(connection) is None
    assert not connection.turn.locked()


@pytest.mark.parametrize("when", ["before it is awaited", "once it is there"])
def test_declined_rounds_go_the_other_way(open_world: Open, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = open_world()
    side = world.handoff.side
    assert isinstance(side, ProxyThread)
    proxy = side._proxy
    ordinary = proxy._ordinary
    assert ordinary is not None
    declined = Counter[Status]()

    def decline(*arguments: Any) -> Status:
        status = proxy._page.wait_gathered(proxy._round, spin_ns=0, nap_ns=1000, deadline_ns=arguments[-1])
        declined[status] += 1
        return status

    if when == "once it is there":
        monkeypatch.setattr(ordinary, "_serve", decline)
    else:
        monkeypatch.setattr(side.talker.client, "lend", lambda connection: None)
    for _ in range(100):
        world.step()
    world.drain()
    assert world.tally.failed == 0
    assert "rounds_in_one_call" not in world.counters()
    assert (declined[Status.OK] > 20) == (when == "once it is there")


def test_a_long_wait_leaves_the_connection_to_others(open_world: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rounds somebody must be able to say PING; the round that comes in the end is an ordinary one all the same."""
    monkeypatch.setattr(proxy_module, "_KEPT_SLICES", 2)
    world, _ = open_world(watchdog_s=30.0, spec={"timeout_s": 10.0})
    side, handoff = world.handoff.side, world.handoff
    assert isinstance(side, ProxyThread)
    for _ in range(6):
        world.step([world.row(0, 1)])
    world.drain()
    client = side.talker.client
    connection = client.connection()
    assert connection is not None
    while (counted := world.counters())["rounds_ok"] < 6:
        time.sleep(0.002)
    before = counted["rounds_in_one_call"]
    go_on = threading.Event()
    handoff.stream.run(lambda: go_on.wait(20))  # a long step of the target's
    world.step([world.row(0, 1)])
    until = time.monotonic() + 10
    while not connection.turn.locked() and time.monotonic() < until:
        time.sleep(0.001)
    assert connection.turn.locked()  # it is kept at first
    free = 0
    while free < 20 and time.monotonic() < until:
        free = 0 if connection.turn.locked() else free + 1
        time.sleep(0.002)
    assert free == 20
    go_on.set()
    world.drain()
    while world.counters()["rounds_in_one_call"] == before and time.monotonic() < until + 5:
        time.sleep(0.002)
    assert world.counters()["rounds_in_one_call"] == before + 1
