"""Proofs that both sides hold the same token, without sending it. Pure: whoever calls brings the nonces and moves the bytes.

Each side's proof is HMAC-SHA-256 with the token over a label of its own, both nonces and the identities that it claims. The
labels keep one side's proof from being the other's, the nonces keep an old one from being played again.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from typing import Final

from farspark.errors import ProtocolError, Refused
from farspark.wire import codec
from farspark.wire.layout import IDENTITY_BYTES, NONCE_BYTES, FrameStatus, Operation
from farspark.wire.messages import Proof

_ENGINE: Final = b"farspark engine 1\0"
_WORKER: Final = b"farspark worker 1\0"

NO_IDENTITY: Final = bytes(IDENTITY_BYTES)
"""What a peer claims that opens no session."""


def engine_proof(
    token: bytes, *, engine_nonce: bytes, worker_nonce: bytes, identity: bytes, markov_identity: bytes
) -> bytes:
    """32 bytes that only a holder of `token` can make: the engine's, in PROVE."""
    return _proof(_ENGINE, token, engine_nonce, worker_nonce, identity, markov_identity)


def worker_proof(
    token: bytes, *, engine_nonce: bytes, worker_nonce: bytes, identity: bytes, markov_identity: bytes
) -> bytes:
    """The worker's, in its reply to PROVE, over its own identities."""
    return _proof(_WORKER, token, engine_nonce, worker_nonce, identity, markov_identity)


def is_proof(given: bytes, expected: bytes) -> bool:
    """In a time that does not tell how much of it is right."""
    return hmac.compare_digest(given, expected)


class EngineSide:
    """The engine's steps on one connection: `challenge`, `prove`, `check`, each once and in this order.

    `nonce` is 32 bytes, random and never used before. `setting` names what the token was given with, for the sentences.
    """

    def __init__(self, token: bytes, *, identity: bytes, markov_identity: bytes, nonce: bytes, setting: str) -> None:
        self._token = token
        self._identity = identity
        self._markov_identity = markov_identity
        self._nonce = nonce
        self._worker_nonce = b""
        self._setting = setting
        self._worker: Proof | None = None  # once it is checked

    def challenge(self) -> bytes:
        """The payload of CHALLENGE."""
        return codec.encode_challenge(self._nonce)

    def prove(self, payload: memoryview) -> bytes:
        """From the reply to CHALLENGE, the payload of PROVE. Raises Refused where the worker demands no proof."""
        self._worker_nonce, demands_proof = codec.decode_challenge_reply(payload)
        if not demands_proof:
            raise Refused(
                FrameStatus.AUTH,
                "the worker has no token, so anybody may have taken its place; start it with --token-file, or leave "
                f"{self._setting} out here",
            )
        proof = engine_proof(
            self._token,
            engine_nonce=self._nonce,
            worker_nonce=self._worker_nonce,
            identity=self._identity,
            markov_identity=self._markov_identity,
        )
        return codec.encode_proof(Proof(identity=self._identity, markov_identity=self._markov_identity, proof=proof))

    def check(self, payload: memoryview) -> None:
        """The reply to PROVE. Raises Refused where the worker's own proof is wrong."""
        worker = codec.decode_proof(payload)
        expected = worker_proof(
            self._token,
            engine_nonce=self._nonce,
            worker_nonce=self._worker_nonce,
            identity=worker.identity,
            markov_identity=worker.markov_identity,
        )
        if not is_proof(worker.proof, expected):
            raise Refused(
                FrameStatus.AUTH,
                f"the worker's own proof is wrong: it has not the token of {self._setting}, so it is not the worker that was "
                "meant; look who listens there",
            )
        self._worker = worker

    def check_welcome(self, identity: bytes, markov_identity: bytes) -> None:
        """The identities of a welcome are those that the worker proved itself with. Raises Refused."""
        worker = self._worker
        if worker is None or (worker.identity, worker.markov_identity) != (identity, markov_identity):
            raise Refused(FrameStatus.AUTH, "the worker answers HELLO with other identities than it proved itself with")

    def same_token(self, said: str) -> Refused:
        """What to raise where the worker refuses the proof; `said` is its sentence."""
        return Refused(
            FrameStatus.AUTH,
            f"{said}; {self._setting} here and --token-file there must name files with the same token",
        )


def authenticate(side: EngineSide, ask: Callable[[Operation, bytes], memoryview]) -> None:
    """CHALLENGE and PROVE. `ask` sends a request and returns the payload of its reply, or raises Refused.

    Raises Refused with AUTH where either side is not proven, and whatever `ask` raises.
    """
    proof = side.prove(ask(Operation.CHALLENGE, side.challenge()))
    try:
        answer = ask(Operation.PROVE, proof)
    except Refused as refused:
        if refused.status == FrameStatus.AUTH:
            raise side.same_token(str(refused)) from refused
        raise
    side.check(answer)


def token_missing(said: str, setting: str) -> Refused:
    """What to raise where a worker demands a proof of a peer that has no token; `said` is its sentence."""
    return Refused(FrameStatus.AUTH, f"{said}; set {setting} to a file with the worker's token")


class WorkerSide:
    """The worker's steps on one connection. `token` None: it demands no proof."""

    def __init__(self, token: bytes | None, *, identity: bytes, markov_identity: bytes) -> None:
        self._token = token
        self._identity = identity
        self._markov_identity = markov_identity
        self._nonces: tuple[bytes, bytes] | None = None  # the engine's and ours, for one PROVE
        self._proven: tuple[bytes, bytes] | None = None

    @property
    def is_satisfied(self) -> bool:
        """Whether the peer may ask for something."""
        return self._token is None or self._proven is not None

    def is_proven(self, identity: bytes, markov_identity: bytes) -> bool:
        """Whether the peer may open a session with these identities."""
        return self._token is None or self._proven == (identity, markov_identity)

    def challenge(self, payload: memoryview, nonce: bytes) -> bytes:
        """The reply to CHALLENGE. `nonce` is 32 bytes, random and never used before."""
        self._nonces = codec.decode_challenge(payload), nonce
        return codec.encode_challenge_reply(nonce, demands_proof=self._token is not None)

    def prove(self, payload: memoryview) -> bytes:
        """The reply to PROVE. Raises Refused where it proves nothing, ProtocolError where no proof is demanded."""
        # Both before anything else: nonces are good for one attempt, and a peer that fails has proven nothing.
        nonces, self._nonces, self._proven = self._nonces, None, None
        if self._token is None:
            raise ProtocolError("PROVE to a worker that has no token")
        claimed = codec.decode_proof(payload)
        if nonces is None:
            raise Refused(FrameStatus.AUTH, "a PROVE needs a CHALLENGE of its own in front of it")
        engine_nonce, worker_nonce = nonces
        expected = engine_proof(
            self._token,
            engine_nonce=engine_nonce,
            worker_nonce=worker_nonce,
            identity=claimed.identity,
            markov_identity=claimed.markov_identity,
        )
        if not is_proof(claimed.proof, expected):
            raise Refused(FrameStatus.AUTH, "the proof is wrong")
        self._proven = claimed.identity, claimed.markov_identity
        own = worker_proof(
            self._token,
            engine_nonce=engine_nonce,
            worker_nonce=worker_nonce,
            identity=self._identity,
            markov_identity=self._markov_identity,
        )
        return codec.encode_proof(Proof(identity=self._identity, markov_identity=self._markov_identity, proof=own))


def _proof(label: bytes, token: bytes, engine: bytes, worker: bytes, *identities: bytes) -> bytes:
    # Every part has a fixed length, so no two different sets of parts make the same message.
    for nonce in (engine, worker):
        if len(nonce) != NONCE_BYTES:
            raise ValueError(f"nonce of {len(nonce)} bytes, expected {NONCE_BYTES}")
    if any(len(identity) != IDENTITY_BYTES for identity in identities):
        raise ValueError(f"identities are {IDENTITY_BYTES} bytes")
    return hmac.new(token, b"".join((label, engine, worker, *identities)), hashlib.sha256).digest()
