"""Several endpoints over loopback: who is asked, in which order, for how long, and what ends the asking.

Black holes with rounds running are in `tests/net`.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.drafters import ArithmeticDrafter, info
from tests.fakes.served import served
from tests.fakes.shape import shape_for

from farspark.clock import Deadline
from farspark.engine.client import Client, ClientState
from farspark.engine.route import Loss
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, connect, parse_endpoint
from farspark.wire.messages import Hello
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

INFO = info()
HELLO = shape_for(INFO).hello(engine="test", identity=INFO.identity, markov_identity=bytes(32), want_margin=False)
CONNECT_TIMEOUT_S = 0.5
# Where somebody answers it is never waited for.
LONG_TIMEOUT_S = 10.0
# What a busy machine may add to a time that is measured here.
SLACK_S = 2.0


class Asked:
    """Connects as the client would, and writes down whom and when."""

    def __init__(self) -> None:
        self.when: list[tuple[float, Endpoint]] = []

    def __call__(self, endpoint: Endpoint, deadline: Deadline) -> Channel:
        self.when.append((time.monotonic(), endpoint))
        return connect(endpoint, deadline)

    @property
    def whom(self) -> list[Endpoint]:
        return [endpoint for _, endpoint in self.when]


@contextmanager
def worker(endpoint: str = "tcp://127.0.0.1:0", **changes: object) -> Iterator[Endpoint]:
    """A worker whose drafter differs from the engine's by `changes`."""
    config = WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint(endpoint))
    with served(Server(ArithmeticDrafter(info(**changes)), config)) as server:
        yield parse_endpoint(server.endpoint)


def endpoint_of(sock: socket.socket) -> Endpoint:
    host, port = sock.getsockname()
    return parse_endpoint(f"tcp://{host}:{port}")


@contextmanager
def refusing() -> Iterator[Endpoint]:
    """A port that nobody listens on, and that nobody else gets."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield endpoint_of(sock)


@contextmanager
def silent() -> Iterator[Endpoint]:
    """Takes connections and says nothing, as a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield endpoint_of(listener)


@contextmanager
def black_hole(host: str = "127.0.0.1", port: int = 0) -> Iterator[Endpoint]:
    """Packets go in and nothing comes out: the kernel drops what asks for a connection once its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((host, port), backlog=0))
        for _ in range(2):
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(listener.getsockname())
        time.sleep(0.05)
        yield endpoint_of(listener)


@contextmanager
def client(
    *endpoints: Endpoint,
    hello: Hello = HELLO,
    stats: Stats | None = None,
    asked: Asked | None = None,
    backoff_s: float = 0.01,
    backoff_max_s: float = 0.04,
    connect_timeout_s: float = LONG_TIMEOUT_S,
) -> Iterator[Client]:
    one = Client(
        hello,
        endpoints,
        connect_timeout_s=connect_timeout_s,
        backoff_s=backoff_s,
        backoff_max_s=backoff_max_s,
        stats=stats or Stats(),
        connect=asked or Asked(),
    )
    one.start()
    try:
        yield one
    finally:
        one.close()


def connected_to(one: Client) -> Endpoint:
    assert one.wait_ready(Deadline.after(10)), one.last_failure
    connection = one.connection()
    assert connection is not None
    return connection.endpoint


def lose(one: Client) -> None:
    """As the round does that finds its connection dead."""
    connection = one.connection()
    assert connection is not None
    one.drop(connection, "told to")


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = Deadline.after(10)
    while not is_so():
        assert not deadline.has_passed()
        time.sleep(0.005)


def test_the_second_takes_over_at_once_where_the_first_refuses() -> None:
    stats = Stats()
    started = time.monotonic()
    with refusing() as first, worker() as second, client(first, second, stats=stats) as one:
        assert connected_to(one) == second
    # The time-out is for those who do not answer; no back-off lies between two endpoints of one pass.
    assert time.monotonic() - started < SLACK_S
    assert stats.count("connect_failures") == 1
    assert stats.count("hellos") == 1


@pytest.mark.parametrize("absent", [silent, black_hole])
def test_HALF_OPEN_the_second_takes_over_after_one_time_out_where_the_first_does_not_answer(absent: Any) -> None:
    with absent() as first, worker() as second:
        started = time.monotonic()
        with client(first, second, connect_timeout_s=CONNECT_TIMEOUT_S) as one:
            assert connected_to(one) == second
            assert CONNECT_TIMEOUT_S <= time.monotonic() - started < CONNECT_TIMEOUT_S + SLACK_S


@pytest.mark.parametrize("changes", [{"identity": b"\x07" * 32}, {"markov_identity": b"\x07" * 32}, {"num_drafts": 4}])
def test_the_second_takes_over_where_the_first_can_never_serve(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    hello = replace(HELLO, markov_identity=INFO.markov_identity)
    asked = Asked()
    with worker(**changes) as first, worker() as second, client(first, second, hello=hello, asked=asked) as one:
        assert connected_to(one) == second
        # It was told once what is wrong, with both values, and is not asked again.
        lose(one)
        assert connected_to(one) == second
        assert asked.whom == [first, second, second]
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    assert str(first) in said[0]
    assert "not used any more in this engine run" in said[0]


def test_endpoints_that_can_never_serve_disable_the_remote_together_and_all_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = Asked()
    with worker(identity=b"\x07" * 32) as first, worker(num_drafts=4) as second:
        with client(first, second, asked=asked) as one:
            assert not one.wait_ready(Deadline.after(10))
            assert one.state is ClientState.DISABLED
            why = one.last_failure or ""
        assert str(first) in why
        assert "07" * 32 in why
        assert str(second) in why
        assert "N: engine 5, worker 4" in why
        assert asked.whom == [first, second]
    assert sum("disabled for this engine run" in record.message for record in caplog.records) == 1


def test_one_that_can_never_serve_and_one_that_is_absent_leave_the_remote_waiting_for_the_absent_one() -> None:
    asked = Asked()
    with worker(identity=b"\x07" * 32) as first, refusing() as second, client(first, second, asked=asked) as one:
        wait_until(lambda: len(asked.whom) >= 4)
        assert one.state is ClientState.CONNECTING
        assert asked.whom[:4] == [first, second, second, second]


def test_the_second_takes_over_from_one_that_dies_until_the_first_is_back() -> None:
    stats, asked = Stats(), Asked()
    with ExitStack() as stack:
        firsts = stack.enter_context(ExitStack())
        first = firsts.enter_context(worker())
        second = stack.enter_context(worker())
        one = stack.enter_context(client(first, second, stats=stats, asked=asked, backoff_s=0.2, backoff_max_s=0.4))
        assert connected_to(one) == first
        firsts.close()
        lose(one)
        assert connected_to(one) == second
        # The one that has just failed is not asked again before the others.
        assert asked.whom == [first, second]
        wait_until(lambda: len(asked.whom) >= 4)
        assert set(asked.whom[2:]) == {first}
        assert connected_to(one) == second
        stack.enter_context(worker(str(first)))
        wait_until(lambda: connected_to(one) == first)
        # Where nothing is preferred to the one in use nobody is asked.
        seen = len(asked.whom)
        time.sleep(0.5)
        assert asked.whom[seen:] == []
    times = [at_s for at_s, _ in asked.when]
    # It had not lasted, so the first look comes after twice the first wait, which is the longest.
    for earlier, later in itertools.pairwise(times[1:]):
        assert 0.4 <= later - earlier < 0.4 + SLACK_S
    assert stats.count("hellos") == 3
    assert stats.count("disconnects") == 1
    assert (stats.count("failovers"), stats.count("returns")) == (1, 1)


def test_a_session_that_is_void_is_opened_again_where_it_was() -> None:
    asked = Asked()
    with worker() as first, worker() as second, client(first, second, asked=asked) as one:
        connected_to(one)
        connection = one.connection()
        assert connection is not None
        one.drop(connection, "no such session", Loss.SESSION)
        assert connected_to(one) == first
        assert asked.whom == [first, first]


def test_a_preferred_worker_that_can_never_serve_is_looked_at_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked()
    with ExitStack() as stack:
        firsts = stack.enter_context(ExitStack())
        first = firsts.enter_context(worker())
        second = stack.enter_context(worker())
        one = stack.enter_context(client(first, second, asked=asked))
        assert connected_to(one) == first
        firsts.close()
        stack.enter_context(worker(str(first), num_drafts=4))
        lose(one)
        assert connected_to(one) == second
        wait_until(lambda: "not used any more" in caplog.text)
        seen = len(asked.whom)
        time.sleep(0.3)
        assert asked.whom[seen:] == []
        assert connected_to(one) == second
        assert one.last_failure is None


def test_every_pass_goes_in_order_and_the_back_off_lies_between_passes() -> None:
    asked = Asked()
    with refusing() as first, refusing() as second:
        with client(first, second, asked=asked, backoff_s=0.1, backoff_max_s=0.3):
            wait_until(lambda: len(asked.whom) >= 10)
        assert asked.whom[:10] == [first, second] * 5
    times = [at_s for at_s, _ in asked.when[:10]]
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    # Times only grow on a busy machine.
    for gap_s, least_s in zip(between[1::2], (0.1, 0.2, 0.3, 0.3), strict=True):
        assert least_s <= gap_s < least_s + SLACK_S
    assert sum(between[::2]) < SLACK_S


def test_each_attempt_is_bounded_and_a_pass_is_the_sum_of_them() -> None:
    asked = Asked()
    with black_hole() as first, black_hole() as second, silent() as third:
        with client(first, second, third, asked=asked, connect_timeout_s=CONNECT_TIMEOUT_S):
            wait_until(lambda: len(asked.whom) >= 4)
        assert asked.whom[:4] == [first, second, third, first]
    times = [at_s for at_s, _ in asked.when[:4]]
    for earlier, later in itertools.pairwise(times):
        assert CONNECT_TIMEOUT_S <= later - earlier < CONNECT_TIMEOUT_S + SLACK_S


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that the system resolves to 127.0.0.2 and 127.0.0.3."""
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *arguments: Any, **named: Any) -> Any:
        if host != "worker.example":
            return real(host, port, *arguments, **named)
        if named.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "not a literal")
        return [entry for each in ("127.0.0.2", "127.0.0.3") for entry in real(each, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return "worker.example"


def test_ADDR_a_name_with_several_addresses_is_served_by_the_one_that_answers(two_addresses: str) -> None:
    with worker("tcp://127.0.0.3:0") as real, client(replace(real, host=two_addresses)) as one:
        connected_to(one)
        connection = one.connection()
        assert connection is not None
        assert f"-> 127.0.0.3:{real.port}" in connection.channel.lane


def test_ADDR_an_address_that_swallows_packets_leaves_time_for_the_next_one_within_the_same_time_out(
    two_addresses: str,
) -> None:
    stats = Stats()
    with (
        worker("tcp://127.0.0.3:0") as real,
        black_hole("127.0.0.2", real.port),
        client(replace(real, host=two_addresses), stats=stats, connect_timeout_s=CONNECT_TIMEOUT_S) as one,
    ):
        connected_to(one)
    assert stats.count("connect_failures") == 0


def test_ADDR_all_addresses_of_a_name_share_one_time_out(two_addresses: str) -> None:
    asked = Asked()
    with (
        black_hole("127.0.0.2") as first,
        black_hole("127.0.0.3", first.port),
        worker() as second,
        client(replace(first, host=two_addresses), second, asked=asked, connect_timeout_s=CONNECT_TIMEOUT_S) as one,
    ):
        assert connected_to(one) == second
    (began_s, _), (next_s, _) = asked.when
    assert CONNECT_TIMEOUT_S <= next_s - began_s < CONNECT_TIMEOUT_S + SLACK_S
