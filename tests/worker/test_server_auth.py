"""What a worker with a token answers to those who have it, those who have not, and those who say nothing; over real TCP."""

from __future__ import annotations

import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter
from tests.worker.peer import DRAFT, HELLO, NEW, Peer, entry, ids, soon, until
from tests.worker.peer import serving as serving_on_memory

from farspark.errors import TransportError
from farspark.wire import auth, codec, layout
from farspark.wire.auth import NO_IDENTITY, EngineSide, authenticate
from farspark.wire.layout import FrameStatus, Operation
from farspark.wire.messages import Header, Proof
from farspark.worker.server import Server

TOKEN = b"the token of both sides"
MAX = layout.MAX_GREETING_BYTES


@contextmanager
def serving(token: bytes | None = TOKEN, **changes: Any) -> Iterator[Server]:
    with serving_on_memory(ArithmeticDrafter(), listen="tcp://127.0.0.1:0", token=token, **changes) as server:
        yield server


@pytest.fixture(autouse=True)
def a_short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "REFUSED_KEEPS_PLACE_S", 0.05)


def payload_of(answer: tuple[Header, memoryview]) -> memoryview:
    header, payload = answer
    assert header.status == FrameStatus.OK, codec.decode_message(payload)
    return payload


def prove(
    peer: Peer,
    identity: bytes = INFO.identity,
    markov_identity: bytes = INFO.markov_identity,
    token: bytes = TOKEN,
) -> EngineSide:
    side = EngineSide(
        token,
        identity=identity,
        markov_identity=markov_identity,
        nonce=secrets.token_bytes(32),
        setting="--token-file",
    )
    authenticate(side, lambda operation, payload: payload_of(peer.ask(operation, payload)))
    return side


def challenged(peer: Peer) -> tuple[bytes, bytes]:
    """Both nonces of a CHALLENGE."""
    nonce = secrets.token_bytes(32)
    worker_nonce, demands_proof = codec.decode_challenge_reply(payload_of(peer.ask(Operation.CHALLENGE, nonce)))
    assert demands_proof
    return nonce, worker_nonce


def proof_of(make: Any, nonces: tuple[bytes, bytes], token: bytes = TOKEN) -> bytes:
    identities = {"identity": INFO.identity, "markov_identity": INFO.markov_identity}
    made = make(token, engine_nonce=nonces[0], worker_nonce=nonces[1], **identities)
    return codec.encode_proof(Proof(proof=made, **identities))


def assert_refused(peer: Peer, answer: tuple[Header, memoryview]) -> None:
    """AUTH with a sentence that says nothing about the worker, and then the end."""
    header, payload = answer
    assert header.status == FrameStatus.AUTH
    assert 0 < len(payload) < 200
    said = codec.decode_message(payload)
    for told in (INFO.identity.hex(), INFO.kind, "farspark ", str(INFO.vocab_size)):
        assert told not in said
    assert INFO.identity not in bytes(payload)
    with pytest.raises(TransportError):
        peer.channel.recv(soon())


def failures(server: Server) -> int:
    return int(server.snapshot()["connections"]["auth_failures"])


def test_an_engine_with_the_token_is_served_and_the_worker_proves_itself_too() -> None:
    with serving() as server, Peer(server) as peer:
        side = prove(peer)
        welcome = codec.decode_welcome(payload_of(peer.hello()))
        side.check_welcome(welcome.identity, welcome.markov_identity)
        assert peer.step(entry(0, 0, 2, DRAFT | NEW)).tokens.tolist() == ids(0, 0, 2)
        assert failures(server) == 0


def test_a_wrong_token_is_refused_counted_and_logged_without_the_proof(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        for number in (1, 2):
            with Peer(server) as peer:
                proof = proof_of(auth.engine_proof, challenged(peer), TOKEN[:-1] + b"S")
                assert_refused(peer, peer.ask(Operation.PROVE, proof))
                lane = peer.channel.lane.split(" -> ")
                assert failures(server) == number
                (record,) = [one for one in caplog.records if "authentication failed" in one.message]
                assert lane[0].removeprefix("tcp ") in record.message
                assert proof[-32:].hex() not in record.message
                caplog.clear()


@pytest.mark.parametrize(
    ("operation", "payload"),
    [
        (Operation.HELLO, codec.encode_hello(HELLO)),
        (Operation.PING, b"x"),
        (Operation.STATS, b""),
        (Operation.FREE, codec.encode_free([])),
        (Operation.BYE, b""),
        (Operation.JUDGE, bytes(16)),
        (Operation.STEP, bytes(16)),
        (200, b""),
    ],
)
@pytest.mark.parametrize("is_challenged", [False, True])
def test_before_the_proof_everything_else_is_refused_and_closed(
    operation: int, payload: bytes, is_challenged: bool
) -> None:
    with serving() as server, Peer(server) as peer:
        if is_challenged:
            challenged(peer)
        assert_refused(peer, peer.ask(operation, payload))
        assert server.slots_in_use == 0
        assert failures(server) == 0


def test_another_version_is_told_no_more_than_others() -> None:
    with serving() as server, Peer(server) as peer:
        peer.sequence += 1
        frame = codec.encode_frame(Header(Operation.HELLO, 1, 1, 0, version=9), codec.encode_hello(HELLO))
        peer.channel.send([frame], soon())
        assert_refused(peer, codec.decode_frame(peer.channel.recv(soon())))


def test_a_proof_that_was_overheard_is_of_no_use() -> None:
    with serving() as server:
        with Peer(server) as engine:
            nonces = challenged(engine)
            overheard = proof_of(auth.engine_proof, nonces)
            payload_of(engine.ask(Operation.PROVE, overheard))
            # On the same connection, whose nonces are used up.
            assert_refused(engine, engine.ask(Operation.PROVE, overheard))
        with Peer(server) as thief:
            assert challenged(thief)[1] != nonces[1]
            assert_refused(thief, thief.ask(Operation.PROVE, overheard))
        with Peer(server) as thief:
            # The engine's part of the challenge can be played again, the worker's cannot.
            payload_of(thief.ask(Operation.CHALLENGE, nonces[0]))
            assert_refused(thief, thief.ask(Operation.PROVE, overheard))
        assert failures(server) == 3


def test_the_proof_of_the_other_side_is_none() -> None:
    with serving() as server, Peer(server) as peer:
        assert_refused(peer, peer.ask(Operation.PROVE, proof_of(auth.worker_proof, challenged(peer))))


def test_a_worker_gives_its_own_proof_to_nobody_who_has_not_proven_to_know_the_token() -> None:
    with serving() as server, Peer(server) as peer:
        header, payload = peer.ask(Operation.PROVE, bytes(96))
        assert_refused(peer, (header, payload))


def test_HELLO_with_other_identities_than_proven_opens_no_session() -> None:
    with serving() as server, Peer(server) as peer:
        prove(peer, NO_IDENTITY, NO_IDENTITY)
        # A probe may look.
        assert peer.ask(Operation.PING, b"x")[0].status == FrameStatus.OK
        assert peer.ask(Operation.STATS)[0].status == FrameStatus.OK
        header, payload = peer.hello()
        assert header.status == FrameStatus.AUTH
        assert "other identities than were proven" in codec.decode_message(payload)
        assert peer.ask(Operation.BYE)[0].status == FrameStatus.NO_SESSION
        prove(peer)
        assert peer.hello(replace(HELLO, markov_identity=bytes(32)))[0].status == FrameStatus.AUTH
        assert peer.hello()[0].status == FrameStatus.OK


def test_a_failed_second_proof_ends_the_connection_and_its_session() -> None:
    with serving() as server, Peer(server) as peer:
        prove(peer)
        peer.hello()
        peer.step(entry(0, 0, 2, DRAFT | NEW))
        assert_refused(peer, peer.ask(Operation.PROVE, proof_of(auth.engine_proof, challenged(peer), b"x" * 20)))
        until(lambda: server.slots_in_use == 0)


def test_without_a_token_a_challenge_says_so_and_a_proof_is_a_bad_frame() -> None:
    with serving(None) as server, Peer(server) as peer:
        answer = payload_of(peer.ask(Operation.CHALLENGE, bytes(32)))
        assert codec.decode_challenge_reply(answer)[1] is False
        assert peer.ask(Operation.PROVE, bytes(96))[0].status == FrameStatus.BAD_FRAME
        assert peer.ask(Operation.CHALLENGE, bytes(31))[0].status == FrameStatus.BAD_FRAME
        assert peer.hello()[0].status == FrameStatus.OK


def challenge_on(peer: Peer) -> None:
    """Until the worker ends it."""
    deadline = soon()
    while not deadline.has_passed():
        challenged(peer)
        time.sleep(0.01)


@pytest.mark.parametrize("talks", [False, True])
def test_SLOW_PEER_a_connection_that_never_proves_itself_is_closed(
    talks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "PROVE_WITHIN_S", 0.5)
    with serving() as server, Peer(server) as engine:
        prove(engine)
        with Peer(server) as idle:
            started = time.monotonic()
            with pytest.raises(TransportError):
                challenge_on(idle) if talks else idle.channel.recv(soon())
            assert 0.3 < time.monotonic() - started < 4
        time.sleep(0.5)
        # One that is proven may be silent for as long as it likes.
        assert engine.ask(Operation.PING)[0].status == FrameStatus.OK


def drip(peer: socket.socket) -> None:
    """Until the worker ends it."""
    deadline = soon()
    while not deadline.has_passed():
        peer.sendall(b"\x10")
        time.sleep(0.02)


def test_SLOW_PEER_a_frame_that_comes_byte_by_byte_does_not_hold_a_place_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Server, "PROVE_WITHIN_S", 0.3)
    with serving() as server, bare(server) as peer:
        # A length of 4,112 bytes, of which one comes now and then.
        peer.sendall(b"\x10\x10\x00\x00")
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            drip(peer)
        until(lambda: server.snapshot()["connections"]["open"] == 0)


@contextmanager
def bare(server: Server) -> Iterator[socket.socket]:
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as peer:
        peer.settimeout(5)
        yield peer


def test_too_many_strangers_are_told_busy_and_an_engine_that_is_proven_does_not_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Server, "MAX_TURNED_AWAY", 3)
    with serving(max_connections=64) as server, Peer(server) as engine, ExitStack() as others:
        prove(engine)
        engine.hello()
        strangers = [others.enter_context(Peer(server)) for _ in range(Server.MAX_UNPROVEN)]
        until(lambda: server.snapshot()["connections"]["unproven"] == Server.MAX_UNPROVEN)
        turned_away = [others.enter_context(Peer(server)) for _ in range(3)]
        until(lambda: server.snapshot()["connections"]["open"] == Server.MAX_UNPROVEN + 4)
        with Peer(server) as beyond, pytest.raises(TransportError):
            beyond.ask(Operation.CHALLENGE, bytes(32))
        for at in range(20):
            step = entry(0, at, 1, DRAFT if at else DRAFT | NEW)
            assert engine.step(step).entries[0].status.is_usable
        for peer in turned_away:
            header, payload = peer.ask(Operation.CHALLENGE, bytes(32))
            assert header.status == FrameStatus.BUSY
            assert "try again" in codec.decode_message(payload)
        # A place is free again as soon as a stranger is proven, or gone.
        prove(strangers[0])
        strangers[1].channel.close()
        until(lambda: server.snapshot()["connections"]["unproven"] == Server.MAX_UNPROVEN - 2)
        with Peer(server) as late:
            prove(late)


def test_those_who_are_turned_away_take_no_place_of_those_who_are_served() -> None:
    with serving(max_connections=2) as server, Peer(server) as one, Peer(server) as two, ExitStack() as others:
        prove(one)
        prove(two)
        with Peer(server) as full:
            header, payload = full.ask(Operation.CHALLENGE, bytes(32))
            assert header.status == FrameStatus.BUSY
            assert "2" not in codec.decode_message(payload)
        for _ in range(3):
            others.enter_context(Peer(server))
        until(lambda: (at := server.snapshot()["connections"])["accepted"] == 6 and at["open"] == 5)
        two.channel.close()
        until(lambda: server.snapshot()["connections"]["open"] == 4)
        with Peer(server) as again:
            prove(again)


def test_who_was_refused_keeps_its_place_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "REFUSED_KEEPS_PLACE_S", 30)
    with serving() as server:
        for _ in range(Server.MAX_UNPROVEN):
            with Peer(server) as guesser:
                assert_refused(
                    guesser, guesser.ask(Operation.PROVE, proof_of(auth.engine_proof, challenged(guesser), b"?"))
                )
        with Peer(server) as guesser:
            assert guesser.ask(Operation.CHALLENGE, bytes(32))[0].status == FrameStatus.BUSY
        # Which the end of the server does not wait for.
        started = time.monotonic()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("token", [TOKEN, None])
def test_before_HELLO_a_frame_above_64_KiB_is_refused_on_its_length_alone_FRAMING(token: bytes | None) -> None:
    with serving(token) as server, bare(server) as peer:
        peer.sendall(struct.pack("<I", MAX + 1))
        assert peer.recv(1) == b""


@pytest.mark.parametrize("token", [TOKEN, None])
def test_before_HELLO_a_frame_of_64_KiB_is_taken_and_after_it_the_full_size(token: bytes | None) -> None:
    with serving(token) as server, Peer(server) as peer, Peer(server) as looking:
        if token is not None:
            prove(peer)
            prove(looking, NO_IDENTITY, NO_IDENTITY)
        assert peer.ask(Operation.PING, bytes(MAX - layout.HEADER.size))[0].status == FrameStatus.BAD_FRAME
        assert peer.hello()[0].status == FrameStatus.OK
        rows = MAX // INFO.row_bytes
        header, _ = peer.raw_step(entry(0, 0, rows, DRAFT | NEW), rows=bytes(rows * INFO.row_bytes))
        assert header.status == FrameStatus.OK
        # To be proven is not enough.
        with pytest.raises(TransportError):
            looking.ask(Operation.PING, bytes(MAX))


def test_stop_ends_those_who_are_not_proven_yet() -> None:
    with ExitStack() as others:
        with serving() as server:
            for _ in range(3):
                others.enter_context(Peer(server))
            until(lambda: server.snapshot()["connections"]["unproven"] == 3)
            started = time.monotonic()
        assert time.monotonic() - started < 3


def test_the_log_of_a_session_with_a_token_is_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server, Peer(server) as peer:
        prove(peer)
        peer.hello()
    assert len(caplog.records) == 3  # connected, session, gone
    assert TOKEN.decode() not in caplog.text


def test_many_engines_prove_themselves_at_once() -> None:
    with serving(max_connections=64) as server:
        outcomes: list[int] = []

        def one() -> None:
            with Peer(server) as peer:
                prove(peer)
                outcomes.append(peer.ask(Operation.PING)[0].status)

        threads = [threading.Thread(target=one) for _ in range(Server.MAX_UNPROVEN)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert outcomes == [FrameStatus.OK] * Server.MAX_UNPROVEN


def test_a_connection_over_memory_proves_itself_in_the_same_way() -> None:
    with serving_on_memory(token=TOKEN) as server, Peer(server) as peer:
        prove(peer)
        assert peer.hello()[0].status == FrameStatus.OK
