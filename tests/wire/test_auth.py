from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from farspark.errors import ProtocolError, Refused
from farspark.wire import auth, codec
from farspark.wire.auth import NO_IDENTITY, EngineSide, WorkerSide, authenticate
from farspark.wire.layout import FrameStatus, Operation
from farspark.wire.messages import Proof

PARTS: dict[str, Any] = {
    "engine_nonce": bytes(range(32)),
    "worker_nonce": bytes(range(32, 64)),
    "identity": b"i" * 32,
    "markov_identity": b"m" * 32,
}
TOKEN = b"a token of some length"
OTHER_TOKEN = b"a token of some lengtH"


def engine_side(token: bytes = TOKEN, identity: bytes = b"i" * 32) -> EngineSide:
    nonce = PARTS["engine_nonce"]
    return EngineSide(token, identity=identity, markov_identity=b"m" * 32, nonce=nonce, setting="THE_SETTING")


def worker_side(token: bytes | None = TOKEN) -> WorkerSide:
    return WorkerSide(token, identity=b"I" * 32, markov_identity=b"M" * 32)


def asking(worker: WorkerSide, nonce: bytes = PARTS["worker_nonce"]) -> Any:
    """What `authenticate` asks with, answered by `worker`."""

    def ask(operation: Operation, payload: bytes) -> memoryview:
        if operation is Operation.CHALLENGE:
            return memoryview(worker.challenge(memoryview(payload), nonce))
        assert operation is Operation.PROVE
        return memoryview(worker.prove(memoryview(payload)))

    return ask


def test_a_proof_is_the_documented_hmac() -> None:
    message = PARTS["engine_nonce"] + PARTS["worker_nonce"] + b"i" * 32 + b"m" * 32
    for label, make in ((b"farspark engine 1\0", auth.engine_proof), (b"farspark worker 1\0", auth.worker_proof)):
        assert make(TOKEN, **PARTS) == hmac.new(TOKEN, label + message, hashlib.sha256).digest()


@pytest.mark.parametrize("part", [*PARTS, "token"])
@pytest.mark.parametrize("make", [auth.engine_proof, auth.worker_proof])
def test_every_part_changes_the_proof(part: str, make: Any) -> None:
    changed = dict(PARTS)
    token = TOKEN
    if part == "token":
        token = TOKEN[:-1] + b"x"
    else:
        changed[part] = bytes([changed[part][0] ^ 1]) + changed[part][1:]
    assert not auth.is_proof(make(token, **changed), make(TOKEN, **PARTS))


def test_one_sides_proof_is_not_the_others() -> None:
    assert auth.engine_proof(TOKEN, **PARTS) != auth.worker_proof(TOKEN, **PARTS)


@pytest.mark.parametrize("given", [b"", b"x", bytes(31), bytes(33)])
def test_another_length_is_no_proof(given: bytes) -> None:
    assert not auth.is_proof(given, auth.engine_proof(TOKEN, **PARTS))


@pytest.mark.parametrize("at", range(32))
def test_a_proof_with_one_wrong_byte_is_none(at: int) -> None:
    right = auth.engine_proof(TOKEN, **PARTS)
    wrong = right[:at] + bytes([right[at] ^ 1]) + right[at + 1 :]
    assert auth.is_proof(right, right)
    assert not auth.is_proof(wrong, right)


@pytest.mark.parametrize("part", ["engine_nonce", "worker_nonce", "identity", "markov_identity"])
def test_a_part_of_another_length_is_not_taken(part: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        auth.engine_proof(TOKEN, **(PARTS | {part: b"short"}))


def test_both_sides_prove_themselves_with_these_bytes() -> None:
    engine, worker = engine_side(), worker_side()
    assert engine.challenge() == PARTS["engine_nonce"]
    answer = worker.challenge(memoryview(engine.challenge()), PARTS["worker_nonce"])
    assert answer == PARTS["worker_nonce"] + b"\1\0\0\0"
    assert not worker.is_satisfied
    proof = engine.prove(memoryview(answer))
    assert proof == b"i" * 32 + b"m" * 32 + auth.engine_proof(TOKEN, **PARTS)
    reply = worker.prove(memoryview(proof))
    theirs = PARTS | {"identity": b"I" * 32, "markov_identity": b"M" * 32}
    assert reply == b"I" * 32 + b"M" * 32 + auth.worker_proof(TOKEN, **theirs)
    engine.check(memoryview(reply))
    assert worker.is_satisfied
    assert worker.is_proven(b"i" * 32, b"m" * 32)
    assert not worker.is_proven(b"I" * 32, b"m" * 32)
    assert not worker.is_proven(b"i" * 32, b"M" * 32)
    engine.check_welcome(b"I" * 32, b"M" * 32)
    for identity, markov_identity in ((b"i" * 32, b"M" * 32), (b"I" * 32, b"m" * 32)):
        with pytest.raises(Refused, match="other identities than it proved itself with"):
            engine.check_welcome(identity, markov_identity)


def test_a_welcome_before_the_workers_proof_is_refused() -> None:
    with pytest.raises(Refused):
        engine_side().check_welcome(NO_IDENTITY, NO_IDENTITY)


def test_an_engine_with_another_token_is_refused_and_told_what_to_compare() -> None:
    worker = worker_side()
    with pytest.raises(Refused, match="the proof is wrong; THE_SETTING here and --token-file there") as caught:
        authenticate(engine_side(OTHER_TOKEN), asking(worker))
    assert caught.value.status == FrameStatus.AUTH
    assert not worker.is_satisfied


def test_a_worker_that_demands_no_proof_gets_none() -> None:
    asked: list[Operation] = []

    def ask(operation: Operation, payload: bytes) -> memoryview:
        asked.append(operation)
        return memoryview(worker_side(None).challenge(memoryview(payload), PARTS["worker_nonce"]))

    with pytest.raises(Refused, match=r"the worker has no token.*--token-file.*THE_SETTING") as caught:
        authenticate(engine_side(), ask)
    assert caught.value.status == FrameStatus.AUTH
    assert asked == [Operation.CHALLENGE]


def test_a_worker_that_has_not_the_token_is_refused_though_it_takes_every_proof() -> None:
    def impostor(operation: Operation, payload: bytes) -> memoryview:
        if operation is Operation.CHALLENGE:
            return memoryview(codec.encode_challenge_reply(bytes(32), demands_proof=True))
        # The engine's own proof, sent back, is the best that it has.
        return memoryview(payload)

    with pytest.raises(Refused, match=r"the worker's own proof is wrong.*THE_SETTING") as caught:
        authenticate(engine_side(), impostor)
    assert caught.value.status == FrameStatus.AUTH


def test_a_refusal_for_another_reason_stays_what_it_is() -> None:
    def ask(operation: Operation, payload: bytes) -> memoryview:
        raise Refused(FrameStatus.BUSY, "full")

    with pytest.raises(Refused, match=r"^full$") as caught:
        authenticate(engine_side(), ask)
    assert caught.value.status == FrameStatus.BUSY


def test_nonces_are_good_for_one_proof() -> None:
    engine, worker = engine_side(), worker_side()
    proof = engine.prove(memoryview(worker.challenge(memoryview(engine.challenge()), PARTS["worker_nonce"])))
    worker.prove(memoryview(proof))
    with pytest.raises(Refused, match="CHALLENGE of its own"):
        worker.prove(memoryview(proof))
    assert not worker.is_satisfied
    worker.challenge(memoryview(engine.challenge()), b"n" * 32)
    with pytest.raises(Refused, match="the proof is wrong"):
        worker.prove(memoryview(proof))
    # A wrong proof uses them up as well.
    with pytest.raises(Refused, match="CHALLENGE of its own"):
        worker.prove(memoryview(engine.prove(memoryview(codec.encode_challenge_reply(b"n" * 32, demands_proof=True)))))


def test_a_proof_without_a_challenge_is_refused() -> None:
    with pytest.raises(Refused, match="CHALLENGE of its own"):
        worker_side().prove(
            memoryview(codec.encode_proof(Proof(identity=b"i" * 32, markov_identity=b"m" * 32, proof=bytes(32))))
        )


def test_a_peer_may_prove_itself_again_with_other_identities() -> None:
    worker = worker_side()
    authenticate(engine_side(identity=NO_IDENTITY), asking(worker, b"1" * 32))
    authenticate(engine_side(), asking(worker, b"2" * 32))
    assert worker.is_proven(b"i" * 32, b"m" * 32)
    assert not worker.is_proven(NO_IDENTITY, b"m" * 32)


def test_without_a_token_a_worker_serves_whoever_comes_and_takes_no_proof() -> None:
    worker = worker_side(None)
    assert worker.is_satisfied
    assert worker.is_proven(b"any" + bytes(29), bytes(32))
    assert worker.challenge(memoryview(bytes(32)), b"n" * 32) == b"n" * 32 + bytes(4)
    with pytest.raises(ProtocolError, match="no token"):
        worker.prove(memoryview(bytes(96)))
