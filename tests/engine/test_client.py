"""Connecting, greeting, giving up, coming back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.drafters import ArithmeticDrafter, info
from tests.fakes.served import served
from tests.fakes.shape import shape_for

from farspark.clock import Deadline
from farspark.engine.client import Client, ClientState
from farspark.errors import TransportError
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, connect, listen, parse_endpoint
from farspark.wire import auth, codec, layout
from farspark.wire.layout import FrameStatus, HeaderFlag, HelloFlag, Operation
from farspark.wire.messages import Header, Hello, Proof, Welcome
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

INFO = info()
HELLO = shape_for(INFO).hello(engine="test", identity=INFO.identity, markov_identity=bytes(32), want_margin=False)


@contextmanager
def worker(name: str, token: bytes | None = None) -> Iterator[Endpoint]:
    endpoint = parse_endpoint(f"memory://{name}")
    with served(Server(ArithmeticDrafter(INFO), WorkerConfig(checkpoint=Path("none"), listen=endpoint, token=token))):
        yield endpoint


@contextmanager
def client(
    *endpoints: Endpoint, hello: Hello = HELLO, stats: Stats | None = None, token: bytes | None = None
) -> Iterator[Client]:
    one = Client(
        hello,
        endpoints,
        connect_timeout_s=2,
        backoff_s=0.001,
        backoff_max_s=0.004,
        stats=stats or Stats(),
        token=token,
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
        assert str(one.last_failure).count("memory://absent") == 1
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
        # What is over is no failure any more, but why it came to that is still known.
        assert one.last_failure is None
        assert one.last_disconnect == "memory://dropped: told to"
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


TOKEN = b"the token of both sides"


def test_with_a_token_both_sides_prove_themselves_and_the_connection_works() -> None:
    with worker("proven", TOKEN) as endpoint, client(endpoint, token=TOKEN) as one:
        assert one.wait_ready(Deadline.after(5))
        connection = one.connection()
        assert connection is not None
        assert connection.sequence == 3  # CHALLENGE, PROVE, HELLO
        reply = one.step(connection, 7, [], [], layout.StepFlag(0), Deadline.after(5))
        assert (reply.step_id, connection.sequence) == (7, 4)
        one.drop(connection, "told to")
        assert one.wait_ready(Deadline.after(5))


@pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (
            TOKEN,
            None,
            "this worker demands a proof of the token before anything else; set VLLM_DSPARK_REMOTE_TOKEN_FILE to a file "
            "with the worker's token",
        ),
        (
            TOKEN,
            TOKEN[:-1] + b"S",
            "the proof is wrong; VLLM_DSPARK_REMOTE_TOKEN_FILE here and --token-file there must name files with the same token",
        ),
        (
            None,
            TOKEN,
            "the worker has no token, so anybody may have taken its place; start it with --token-file, or leave "
            "VLLM_DSPARK_REMOTE_TOKEN_FILE out here",
        ),
    ],
)
def test_AUTH_is_final_and_its_sentence_has_the_remedy(
    theirs: bytes | None, ours: bytes | None, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    stats = Stats()
    with worker("unproven", theirs) as endpoint, client(endpoint, token=ours, stats=stats) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
        assert one.last_failure == f"memory://unproven: AUTH: {said}"
    assert (stats.count("hellos"), stats.count("connect_failures")) == (0, 1)
    assert "token of both" not in caplog.text


Impostor = Callable[[Header, memoryview], bytes]


@contextmanager
def posing(name: str, reply: Impostor) -> Iterator[tuple[Endpoint, list[int]]]:
    """Somebody in the worker's place, who answers every request with OK and `reply`; and what it was asked."""
    endpoint = parse_endpoint(f"memory://{name}")
    listener = listen(endpoint, max_frame_bytes=1 << 20)
    asked: list[int] = []

    def serve() -> None:
        try:
            channel = listener.accept(Deadline.after(5))
        except TransportError:
            return
        try:
            while True:
                header, payload = codec.decode_frame(channel.recv(Deadline.after(5)))
                asked.append(int(header.operation))
                channel.send(
                    [codec.encode_frame(header._replace(flags=HeaderFlag.REPLY), reply(header, payload))],
                    Deadline.after(5),
                )
        except (TransportError, TimeoutError):
            pass
        finally:
            channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield endpoint, asked
    finally:
        listener.close()
        thread.join()


def welcome(identity: bytes = HELLO.identity) -> bytes:
    return codec.encode_welcome(
        Welcome(
            worker="posing",
            kind="worker",
            identity=identity,
            markov_identity=bytes(32),
            vocab_size=HELLO.vocab_size,
            context=HELLO.context,
            window=0,
            slots=HELLO.slots,
            max_rows=4096,
            num_drafts=HELLO.num_drafts,
        )
    )


def test_without_a_token_a_welcome_is_believed() -> None:
    # What the tests below rest on: this welcome is taken where nothing is to be proven.
    with posing("taken", lambda header, payload: welcome()) as (endpoint, _), client(endpoint) as one:
        assert one.wait_ready(Deadline.after(5))


def test_HELLO_LIMITS_a_worker_that_takes_hello_and_grants_no_sampled_drafts_is_not_used() -> None:
    hello = replace(HELLO, flags=HelloFlag.SAMPLED)
    with posing("grants", lambda header, payload: welcome()) as (endpoint, _), client(endpoint, hello=hello) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
        assert "CONFIG: sampled drafts: engine wants them, worker does not grant them" in str(one.last_failure)


def demands_nothing(header: Header, payload: memoryview) -> bytes:
    if header.operation == Operation.CHALLENGE:
        return codec.encode_challenge_reply(bytes(32), demands_proof=False)
    return welcome()


def takes_every_proof(header: Header, payload: memoryview) -> bytes:
    if header.operation == Operation.CHALLENGE:
        return codec.encode_challenge_reply(bytes(32), demands_proof=True)
    # The engine's own proof is sent back to it.
    return bytes(payload) if header.operation == Operation.PROVE else welcome()


def proves_with_another_token(header: Header, payload: memoryview) -> bytes:
    if header.operation != Operation.PROVE:
        return takes_every_proof(header, payload)
    identities = {"identity": HELLO.identity, "markov_identity": bytes(32)}
    proof = auth.worker_proof(b"another token", engine_nonce=bytes(32), worker_nonce=bytes(32), **identities)
    return codec.encode_proof(Proof(proof=proof, **identities))


@pytest.mark.parametrize(
    ("impostor", "said", "asked"),
    [
        (demands_nothing, "the worker has no token", [Operation.CHALLENGE]),
        (takes_every_proof, "the worker's own proof is wrong", [Operation.CHALLENGE, Operation.PROVE]),
        (proves_with_another_token, "the worker's own proof is wrong", [Operation.CHALLENGE, Operation.PROVE]),
    ],
)
def test_nobody_may_pose_as_the_worker(impostor: Impostor, said: str, asked: list[int]) -> None:
    with posing("posing", impostor) as (endpoint, seen), client(endpoint, token=TOKEN) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
        assert said in str(one.last_failure)
        assert "AUTH" in str(one.last_failure)
    assert seen == asked  # and no HELLO, which says what the engine serves


def test_a_welcome_of_another_than_was_proven_is_refused() -> None:
    nonces: list[bytes] = []

    def changes_its_mind(header: Header, payload: memoryview) -> bytes:
        if header.operation == Operation.CHALLENGE:
            nonces.append(bytes(payload))
            return codec.encode_challenge_reply(b"n" * 32, demands_proof=True)
        if header.operation == Operation.PROVE:
            identities = {"identity": b"\7" * 32, "markov_identity": bytes(32)}
            proof = auth.worker_proof(TOKEN, engine_nonce=nonces[0], worker_nonce=b"n" * 32, **identities)
            return codec.encode_proof(Proof(proof=proof, **identities))
        return welcome()

    with posing("changing", changes_its_mind) as (endpoint, _), client(endpoint, token=TOKEN) as one:
        assert not one.wait_ready(Deadline.after(5))
        assert one.state is ClientState.DISABLED
        assert "AUTH: the worker answers HELLO with other identities" in str(one.last_failure)


def test_an_impostor_at_one_endpoint_does_not_keep_the_engine_from_the_worker_at_the_other() -> None:
    with (
        posing("first", demands_nothing) as (first, _),
        worker("honest", TOKEN) as second,
        client(first, second, token=TOKEN) as one,
    ):
        assert one.wait_ready(Deadline.after(5))
        connection = one.connection()
        assert connection is not None
        assert connection.endpoint == second
