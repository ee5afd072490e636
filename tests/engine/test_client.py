"""Connecting, greeting, giving up, coming back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.drafters import ArithmeticDrafter, info

from farspark.clock import Deadline
from farspark.engine.client import Client, ClientState
from farspark.engine.shape import ModelShape
from farspark.errors import TransportError
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, connect, listen, parse_endpoint
from farspark.wire import codec, layout
from farspark.wire.layout import FrameStatus, HeaderFlag, Operation
from farspark.wire.messages import Header, Hello
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

INFO = info()
SHAPE = ModelShape(
    num_drafts=INFO.num_drafts,
    vocab_size=INFO.vocab_size,
    hidden_size=INFO.hidden_size,
    taps=INFO.taps,
    slots=4,
    context=INFO.context,
    ring=4,
    max_position=1024,
)
HELLO = SHAPE.hello(engine="test", identity=INFO.identity, markov_identity=bytes(32), want_margin=False)


@contextmanager
def worker(name: str) -> Iterator[Endpoint]:
    endpoint = parse_endpoint(f"memory://{name}")
    server = Server(ArithmeticDrafter(INFO), WorkerConfig(checkpoint=Path("none"), listen=endpoint))
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield endpoint
    finally:
        server.stop()
        thread.join()


@contextmanager
def client(*endpoints: Endpoint, hello: Hello = HELLO, stats: Stats | None = None) -> Iterator[Client]:
    one = Client(
        hello,
        endpoints,
        connect_timeout_s=2,
        backoff_s=0.001,
        backoff_max_s=0.004,
        stats=stats or Stats(),
    )
    one.start()
    try:
        yield one
    finally:
        one.close()


def test_a_ready_worker_is_greeted_and_said_goodbye_to(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with worker("greeted") as endpoint, client(endpoint) as one:
        assert one.wait_ready(Deadline.after(5))
        connection = one.connection()
        assert connection is not None
        assert connection.welcome.kind == "ArithmeticDrafter"
        assert connection.epoch == 1
        assert repr(one) == "<Client ready memory://greeted epoch 1>"
    assert one.state is ClientState.CLOSED
    assert any("worker ready" in record.message and "epoch 1" in record.message for record in caplog.records)


def test_an_absent_worker_costs_no_wait_and_is_tried_again() -> None:
    stats = Stats()
    endpoint = parse_endpoint("memory://absent")
    with client(endpoint, stats=stats) as one:
        assert one.connection() is None
        assert not one.wait_ready(Deadline.after(0.05))
        assert one.state is ClientState.CONNECTING
        assert one.last_failure is not None
        with worker("absent"):
            assert one.wait_ready(Deadline.after(5))
    assert stats.count("connect_failures") >= 2
    assert stats.count("hellos") == 1


def test_endpoints_are_tried_in_order() -> None:
    with worker("second") as second, client(parse_endpoint("memory://first"), second) as one:
        assert one.wait_ready(Deadline.after(5))
        connection = one.connection()
        assert connection is not None
        assert connection.endpoint == second


@pytest.mark.parametrize(
    ("hello", "what"),
    [
        (replace(HELLO, identity=b"\x01" * 32), (b"\x01" * 32).hex()),
        (replace(HELLO, markov_identity=b"\x02" * 32), (b"\x02" * 32).hex()),
        (replace(HELLO, num_drafts=4), "4"),
        (replace(HELLO, vocab_size=999), "999"),
        (replace(HELLO, row_bytes=18), "18"),
        (replace(HELLO, taps=1), "1"),
    ],
)
def test_HELLO_LIMITS_a_worker_that_runs_something_else_disables_the_remote_and_both_values_are_said(
    hello: Hello, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with worker("else") as endpoint, client(endpoint, hello=hello) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
        assert one.connection() is None
        assert one.last_failure is not None
        assert what in one.last_failure
        assert sum("disabled for this engine run" in record.message for record in caplog.records) == 1


def test_HELLO_LIMITS_a_smaller_context_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    hello = replace(HELLO, context=INFO.context * 2)
    with worker("smaller") as endpoint, client(endpoint, hello=hello) as one:
        assert one.wait_ready(Deadline.after(5))
        connection = one.connection()
        assert connection is not None
        assert connection.welcome.context == INFO.context
    assert any("says:" in record.message for record in caplog.records)


@contextmanager
def scripted(name: str, answers: list[bytes]) -> Iterator[Endpoint]:
    """A peer that takes one frame per connection and answers with the next of `answers`, with the session put in."""
    endpoint = parse_endpoint(f"memory://{name}")
    listener = listen(endpoint, max_frame_bytes=1 << 20)

    def serve() -> None:
        channels: list[Channel] = []
        try:
            for answer in answers:
                channel = listener.accept(Deadline.after(5))
                channels.append(channel)
                header, _ = codec.decode_frame(channel.recv(Deadline.after(5)))
                frame = bytearray(answer)
                frame[8:16] = header.session.to_bytes(8, "little")
                channel.send([bytes(frame)], Deadline.after(5))
            channels[-1].recv(Deadline.after(5))
        except (TransportError, TimeoutError):
            pass
        finally:
            for channel in channels:
                channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield endpoint
    finally:
        listener.close()
        thread.join()


def answer(status: int, payload: bytes = b"no", *, version: int = layout.VERSION, sequence: int = 1) -> bytes:
    header = Header(Operation.HELLO, 0, sequence, 0, HeaderFlag.REPLY, status, version)
    return codec.encode_frame(header, payload)


@pytest.mark.parametrize("status", [FrameStatus.VERSION, FrameStatus.AUTH, FrameStatus.CONFIG])
def test_a_final_frame_status_ends_the_attempts(status: FrameStatus) -> None:
    with scripted("final", [answer(status)]) as endpoint, client(endpoint) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
        assert status.name in (one.last_failure or "")


def test_a_worker_of_another_version_is_named_with_both() -> None:
    with scripted("versions", [answer(FrameStatus.OK, version=9)]) as endpoint, client(endpoint) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert "engine 1, worker 9" in (one.last_failure or "")


@pytest.mark.parametrize(
    "wrong",
    [
        answer(FrameStatus.BUSY),
        answer(200),
        answer(FrameStatus.OK, b"garbage"),
        answer(FrameStatus.OK, sequence=5),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40),
    ],
)
def test_any_other_answer_is_tried_again(wrong: bytes) -> None:
    stats = Stats()
    with scripted("again", [wrong, answer(FrameStatus.CONFIG)]) as endpoint, client(endpoint, stats=stats) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
    assert stats.count("connect_failures") == 2


def test_dropping_a_connection_twice_makes_one_new_one() -> None:
    stats = Stats()
    with worker("dropped") as endpoint, client(endpoint, stats=stats) as one:
        assert one.wait_ready(Deadline.after(5))
        connection = one.connection()
        assert connection is not None
        one.drop(connection, "told to")
        one.drop(connection, "told to")
        assert one.wait_ready(Deadline.after(5))
        again = one.connection()
        assert again is not None
        assert again.epoch == 2
        assert again.session != connection.session
    assert stats.count("disconnects") == 1


def test_close_may_come_twice_and_in_the_middle_of_a_connect() -> None:
    entered = threading.Event()

    def slow(endpoint: Endpoint, deadline: Deadline) -> Channel:
        entered.set()
        return connect(endpoint, deadline, max_frame_bytes=1 << 20)

    one = Client(
        HELLO,
        [parse_endpoint("memory://nobody")],
        connect_timeout_s=0.2,
        backoff_s=30,
        backoff_max_s=30,
        stats=Stats(),
        connect=slow,
    )
    one.start()
    assert entered.wait(5)
    one.close()
    one.close()
    assert one.state is ClientState.CLOSED


def test_a_bug_in_the_connector_thread_is_said_and_disables(caplog: pytest.LogCaptureFixture) -> None:
    def broken(endpoint: Endpoint, deadline: Deadline) -> Channel:
        raise ZeroDivisionError

    one = Client(
        HELLO,
        [parse_endpoint("memory://nobody")],
        connect_timeout_s=0.2,
        backoff_s=30,
        backoff_max_s=30,
        stats=Stats(),
        connect=broken,
    )
    one.start()
    assert not one.wait_ready(Deadline.after(5))
    assert one.state is ClientState.DISABLED
    one.close()
    assert any("connector thread failed" in record.message for record in caplog.records)
