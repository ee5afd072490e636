"""Rounds that go on while the engine moves from one worker to another: what each move costs, and that drafts stay exact."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest
from tests.fakes.channel import WrappedChannel
from tests.fakes.drafters import ArithmeticDrafter
from tests.fakes.engine_world import CONTEXT, INFO, PATIENCE_S, SLOTS, FaultyChannel, Row, World
from tests.fakes.served import served

from farspark.clock import Deadline
from farspark.engine.client import TRANSITIONS, ClientState, Event
from farspark.engine.result import RoundOutcome
from farspark.errors import TransportError
from farspark.transport import Channel, Endpoint, parse_endpoint
from farspark.wire.layout import FrameStatus
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server


@contextmanager
def another_worker(endpoint: str, *, lease_s: float = 60.0) -> Iterator[Server]:
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint(endpoint),
        slots=SLOTS,
        context=CONTEXT,
        lease_s=lease_s,
        allow_unauthenticated_network=True,
    )
    with served(Server(ArithmeticDrafter(INFO), config)) as server:
        yield server


class Interrupted(FaultyChannel):
    """Lets something happen after the next request went out and before its reply is taken."""

    meanwhile: Callable[[], None] | None = None

    def recv(self, deadline: Deadline) -> memoryview:
        if self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super().recv(deadline)


class Closed:
    """A channel of which nothing is left."""

    is_closed = True

    def close(self) -> None:
        pass


@dataclass
class Moving(World):
    """A world with one request that is drafted for in every round, and a count of how the rounds went."""

    outcomes: Counter[RoundOutcome] = field(default_factory=Counter)
    before_exchange: Callable[[], None] | None = None
    hidden: set[str] = field(default_factory=set)  # hosts that cannot be reached
    meanwhile_connecting: Callable[[], None] | None = None

    def _connect(self, endpoint: Endpoint, deadline: Deadline) -> Channel:
        if endpoint.host in self.hidden:
            raise TransportError("no route to host")
        self.channel = Interrupted(super()._connect(endpoint, deadline))
        if self.meanwhile_connecting is not None:
            act, self.meanwhile_connecting = self.meanwhile_connecting, None
            act()
        return self.channel

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        if self.before_exchange is not None:
            act, self.before_exchange = self.before_exchange, None
            act()
        return super().window(slot, first_pos, n_rows)

    def one_round(self) -> RoundOutcome:
        """Drafts that come are exact, whichever worker made them."""
        request = self.by_slot.get(0) or self.admit(0)
        before = self.round._epoch
        row = Row(request, 2, True)
        outcome = self.step(row)
        if self.round._epoch != before:
            request.clean = False  # it was another worker: everything was sent again
        if outcome is RoundOutcome.OK:
            self.keep(row)
            self.check(0, row)
        else:
            self.lose(row)
        self.outcomes[outcome] += 1
        return outcome

    def rounds_until(self, is_so: Callable[[], bool]) -> None:
        """At least one."""
        deadline = Deadline.after(2 * PATIENCE_S)
        while True:
            self.one_round()
            if is_so():
                return
            assert not deadline.has_passed(), (self.client, self.stats.counters())
            time.sleep(0.002)

    def next_round_waits_for(
        self, endpoint: Endpoint, act: Callable[[], None], *, before_exchange: bool = True
    ) -> None:
        """The next round does `act` and goes on once the client has a connection to `endpoint`."""

        def wait() -> None:
            act()
            wait_until(lambda: (found := self.client.connection()) is not None and found.endpoint == endpoint)

        if before_exchange:
            # The window is read between the choice of the connection and the exchange.
            self.round.slots.mark_dirty(0)
            self.by_slot[0].clean = False
            self.before_exchange = wait
        else:
            assert isinstance(self.channel, Interrupted)
            self.channel.meanwhile = wait

    def serves(self, endpoint: Endpoint | str) -> bool:
        """A round has begun there."""
        return str(self.client.serving) == str(endpoint)

    @property
    def failed(self) -> int:
        return self.outcomes[RoundOutcome.FAILED]


def answer_next_step_with(world: Moving, status: FrameStatus) -> None:
    assert isinstance(world.channel, Interrupted)
    assert isinstance(world.channel.inner, FaultyChannel)
    world.channel.inner.status = status


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = Deadline.after(2 * PATIENCE_S)
    while not is_so():
        assert not deadline.has_passed()
        time.sleep(0.002)


@pytest.mark.parametrize("state", ClientState)
def test_every_state_answers_every_event(state: ClientState) -> None:
    assert set(TRANSITIONS[state]) == set(Event)


def test_once_disabled_or_closed_nothing_makes_it_ready_again() -> None:
    for event in Event:
        assert TRANSITIONS[ClientState.CLOSED][event] is ClientState.CLOSED
        assert TRANSITIONS[ClientState.DISABLED][event] in (ClientState.DISABLED, ClientState.CLOSED)


def test_failover_costs_the_round_that_found_out_and_the_return_costs_none(request: pytest.FixtureRequest) -> None:
    with another_worker(f"memory://{request.node.name}") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), backoff_s=0.05, backoff_max_s=0.2, name=request.node.name) as world:
            world.rounds_until(lambda: world.outcomes[RoundOutcome.OK] >= 5)
            world.stop_worker()
            assert world.one_round() is RoundOutcome.FAILED
            world.wait_ready()
            world.rounds_until(lambda: world.serves(elsewhere))
            assert world.failed == 1
            assert world.stats.counters()["failovers"] == 1
            world.start_worker()
            world.rounds_until(lambda: world.serves(world.endpoint))
            for _ in range(20):
                world.one_round()
            assert world.failed == 1
            assert world.stats.counters()["returns"] == 1
            assert world.stats.counters()["hellos"] == 3
            # Nothing of the engine is left where it was.
            wait_until(lambda: second.slots_in_use == 0)
            assert world.client.endpoints()[str(world.endpoint)]["state"] == "serving"


@pytest.mark.parametrize("when", ["before", "in"])
def test_a_preferred_worker_that_is_back_in_the_middle_of_a_round_serves_from_the_next_one_on(when: str) -> None:
    with another_worker(f"memory://{when}-the-exchange") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), backoff_s=0.05, backoff_max_s=0.2, name=when) as world:
            world.stop_worker()
            world.one_round()
            world.wait_ready()
            world.rounds_until(lambda: world.serves(elsewhere))
            before = world.failed

            world.next_round_waits_for(world.endpoint, world.start_worker, before_exchange=when == "before")
            assert world.one_round() is RoundOutcome.OK
            assert world.serves(elsewhere)
            assert world.one_round() is RoundOutcome.OK
            assert world.serves(world.endpoint)
            assert world.failed == before
            assert world.stats.count("fallback_reconnected") == 0


def test_an_idle_engine_leaves_the_worker_that_it_moved_from(request: pytest.FixtureRequest) -> None:
    with another_worker(f"memory://{request.node.name}") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), backoff_s=0.05, backoff_max_s=0.2, name=request.node.name) as world:
            world.stop_worker()
            world.one_round()
            world.wait_ready()
            world.rounds_until(lambda: world.serves(elsewhere))
            assert second.slots_in_use == 1
            world.start_worker()
            # No round comes that would find out.
            wait_until(lambda: second.slots_in_use == 0)
            assert world.one_round() is RoundOutcome.OK
            assert world.serves(world.endpoint)


def test_two_addresses_of_one_worker_are_two_places_and_returning_costs_no_round() -> None:
    with another_worker("tcp://0.0.0.0:0") as both:
        port = parse_endpoint(both.endpoint).port
        near, far = (parse_endpoint(f"tcp://{host}:{port}") for host in ("127.0.0.2", "127.0.0.3"))
        hidden = {"nowhere", near.host}
        with Moving(listen="memory://nowhere", others=(near, far), hidden=hidden, backoff_s=0.05) as world:
            world.rounds_until(lambda: world.serves(far))
            # In the middle of a round, which ends on the session that it began on.
            world.next_round_waits_for(near, lambda: hidden.remove(near.host))
            world.rounds_until(lambda: world.serves(near))
            for _ in range(10):
                world.one_round()
            assert world.failed == 0
            # The session there was not ended by the one that was made beside it; it is now.
            wait_until(lambda: len(both.snapshot()["sessions"]) == 1)


@pytest.mark.parametrize("other_way", [False, True])
def test_abort_race_what_a_lost_link_left_at_a_worker_ends_with_the_next_session_whichever_way_it_comes(
    other_way: bool,
) -> None:
    with another_worker("tcp://0.0.0.0:0") as both:
        port = parse_endpoint(both.endpoint).port
        near, far = (parse_endpoint(f"tcp://{host}:{port}") for host in ("127.0.0.2", "127.0.0.3"))
        hidden = {"nowhere"}
        with Moving(listen="memory://nowhere", others=(near, far), hidden=hidden, backoff_s=0.05) as world:
            world.rounds_until(lambda: world.serves(near))
            # The engine gives the connection up and the worker hears nothing of it.
            assert isinstance(world.channel, Interrupted)
            inner = world.channel.inner
            assert isinstance(inner, FaultyChannel)
            unheard, inner.inner = inner.inner, WrappedChannel(cast(Channel, Closed()))
            if other_way:
                hidden.add(near.host)
            world.client_notices()
            world.rounds_until(lambda: world.serves(far))
            if not other_way:
                world.rounds_until(lambda: world.serves(near))
            wait_until(lambda: len(both.snapshot()["sessions"]) == 1)
            assert both.slots_in_use == 1
            unheard.close()


def test_draining_costs_no_round_where_there_is_another_worker(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with another_worker(f"memory://{request.node.name}") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), backoff_s=0.05, backoff_max_s=0.2, name=request.node.name) as world:
            world.rounds_until(lambda: world.outcomes[RoundOutcome.OK] >= 5)
            left: list[bool] = []
            draining = threading.Thread(target=lambda: left.append(world.server.drain()))
            draining.start()
            world.rounds_until(lambda: world.serves(elsewhere))
            draining.join()
            assert left == [True], "the engine has gone of itself"
            for _ in range(10):
                world.one_round()
            assert world.failed == 0
            assert world.stats.count("drains") == 1
            assert world.stats.count("failovers") == 1
            # Its place is taken again once it is back.
            world.stop_worker()
            world.start_worker()
            world.rounds_until(lambda: world.serves(world.endpoint))
            assert world.failed == 0
    said = [record.getMessage() for record in caplog.records if "about to go" in record.getMessage()]
    assert len(said) == 1
    assert str(world.endpoint) in said[0]


def test_draining_without_another_worker_ends_the_session_at_once_and_the_next_worker_is_found() -> None:
    with Moving(name="alone") as world:
        world.one_round()
        draining = threading.Thread(target=world.server.drain)
        began = time.monotonic()
        draining.start()
        world.rounds_until(lambda: world.client.state is ClientState.CONNECTING)
        draining.join()
        assert time.monotonic() - began < world.server._config.drain_s / 2
        # The rounds up to there were good ones, but for those that found nobody.
        assert world.failed == world.stats.count("fallback_not_ready") + world.stats.count("fallback_reconnected")
        world.stop_worker()
        world.start_worker()
        world.wait_ready()
        assert world.one_round() is RoundOutcome.OK


def test_an_idle_engine_keeps_its_lease() -> None:
    with Moving(name="lease", lease_s=0.3) as world:
        world.one_round()
        time.sleep(1.0)
        assert world.one_round() is RoundOutcome.OK
        assert world.stats.count("hellos") == 1


def test_an_engine_that_says_nothing_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing."""
    monkeypatch.setattr("farspark.engine.client._LOOKS_PER_LEASE", 0.1)
    with Moving(name="no-lease", lease_s=0.3) as world:
        world.one_round()
        time.sleep(1.0)
        assert world.one_round() is RoundOutcome.FAILED


def test_half_open_a_worker_that_dies_while_the_engine_is_idle_costs_no_round(request: pytest.FixtureRequest) -> None:
    with another_worker(f"memory://{request.node.name}", lease_s=0.3) as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), lease_s=0.3, backoff_s=30, backoff_max_s=30, name=request.node.name) as world:
            world.one_round()
            world.stop_worker()
            wait_until(lambda: (found := world.client.connection()) is not None and found.endpoint == elsewhere)
            assert world.one_round() is RoundOutcome.OK
            assert world.failed == 0


def test_a_final_status_of_a_step_gives_up_that_worker_alone(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    with another_worker(f"memory://{request.node.name}") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), backoff_s=0.02, backoff_max_s=0.04, name=request.node.name) as world:
            world.one_round()
            answer_next_step_with(world, FrameStatus.IDENTITY)
            assert world.one_round() is RoundOutcome.FAILED
            world.wait_ready()
            world.rounds_until(lambda: world.serves(elsewhere))
            assert world.failed == 1
            # It is there, and still is not looked at any more.
            time.sleep(0.2)
            world.one_round()
            assert world.serves(elsewhere)
            assert world.failed == 1
            assert world.client.endpoints()[str(world.endpoint)]["state"] == "not used"
            assert world.stats.count("fallback_frame_identity") == 1
            assert (world.stats.count("hellos"), world.stats.count("failovers")) == (2, 1)

            # Now the last one that was left.
            answer_next_step_with(world, FrameStatus.CONFIG)
            assert world.one_round() is RoundOutcome.FAILED
            assert world.client.state is ClientState.DISABLED
            assert world.one_round() is RoundOutcome.FAILED
            assert world.stats.count("fallback_disabled") == 1
            why = world.client.last_failure or ""
            assert f"{world.endpoint}: IDENTITY in answer to a STEP: told to fail" in why
            assert f"{elsewhere}: CONFIG in answer to a STEP: told to fail" in why
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2
    assert f"not used any more in this engine run: {world.endpoint}" in errors[0]
    assert "disabled for this engine run" in errors[1]


def test_a_worker_that_is_given_up_while_the_connector_returns_to_it_is_not_taken() -> None:
    with another_worker("memory://given-up") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(others=(elsewhere,), backoff_s=0.02, backoff_max_s=0.04, name="-given-up") as world:
            world.stop_worker()
            world.one_round()
            world.wait_ready()
            world.rounds_until(lambda: world.serves(elsewhere))
            found = world.client.connection()
            assert found is not None

            # As a STEP in flight would, on a connection to the same endpoint that was just left.
            left = replace(found, endpoint=world.endpoint, channel=WrappedChannel(cast(Channel, Closed())))
            world.meanwhile_connecting = lambda: world.client.give_up(left, "told to")
            world.start_worker()
            wait_until(lambda: world.meanwhile_connecting is None)
            time.sleep(0.1)
            assert world.one_round() is RoundOutcome.OK
            assert world.serves(elsewhere)
            assert world.client.state is ClientState.READY
            wait_until(lambda: not world.server.snapshot()["sessions"])


def test_a_breaker_that_one_worker_opened_is_no_reason_to_wait_for_another(request: pytest.FixtureRequest) -> None:
    with another_worker(f"memory://{request.node.name}") as second:
        elsewhere = parse_endpoint(second.endpoint)
        with Moving(
            others=(elsewhere,), trip=3, cooldown=1000, backoff_s=30, backoff_max_s=30, name=request.node.name
        ) as world:
            world.one_round()
            for _ in range(3):
                assert isinstance(world.channel, Interrupted)
                world.channel.inner.late = True  # type: ignore[attr-defined]
                assert world.one_round() is RoundOutcome.FAILED
            assert world.stats.count("breaker_trips") == 1
            # Three without a reply, and the other one is asked first: the silent one would take a whole time-out.
            world.wait_ready()
            assert world.one_round() is RoundOutcome.OK
            assert world.serves(elsewhere)
            assert world.failed == 3
