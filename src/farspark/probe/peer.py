"""One connection to a worker, one question at a time, and a bound on every wait."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from farspark.clock import Clock, Deadline
from farspark.errors import FarsparkError, ProtocolError, Refused, TransportError
from farspark.transport import Endpoint, Piece, connect
from farspark.wire import codec, layout
from farspark.wire.auth import NO_IDENTITY, EngineSide, authenticate, token_missing
from farspark.wire.layout import FrameStatus, Operation, StepFlag
from farspark.wire.messages import Entry, Header, Hello, StepReply, Welcome

TOKEN_OPTION: Final = "--token-file"


class Peer:
    """A connected worker, owned by one thread; `with` closes it.

    Every question raises TimeoutError after `timeout_s`, TransportError where the connection is gone, ProtocolError where
    the answer is none of ours, and Refused where the worker says no. With a `token` only a worker that proves to hold it
    is asked anything.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        token: bytes | None = None,
    ) -> None:
        """Connect, and with a token prove it; raises as every question, and takes at most three times `timeout_s`."""
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._clock = clock
        self._token = token
        self._session = 0
        self._sequence = 0
        self.last_us = 0.0  # from the first byte of the newest question to the last byte of its answer
        self._channel = connect(endpoint, self._deadline(), max_frame_bytes=layout.MAX_REPLY_BYTES)
        if token is not None:
            try:
                self._prove(token, NO_IDENTITY, NO_IDENTITY)
            except BaseException:
                self._channel.close()
                raise

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._channel.close()

    @property
    def lane(self) -> str:
        return self._channel.lane

    def ping(self, payload: bytes) -> None:
        answer = self._ask(Operation.PING, payload)
        if answer != payload:
            raise ProtocolError(f"PING of {len(payload)} bytes came back as {len(answer)} other bytes")

    def stats(self) -> dict[str, Any]:
        """The worker's STATS."""
        try:
            snapshot = json.loads(bytes(self._ask(Operation.STATS)))
        except ValueError as error:
            raise ProtocolError(f"STATS is not JSON: {error}") from error
        if not isinstance(snapshot, dict):
            raise ProtocolError(f"STATS is a JSON {type(snapshot).__name__}, expected an object")
        return snapshot

    def hello(self, hello: Hello) -> Welcome:
        """Open a session, under which the questions from here on are asked."""
        side = None
        if self._token is not None:
            side = self._prove(self._token, hello.identity, hello.markov_identity)
        self._session = secrets.randbits(64) or 1
        welcome = codec.decode_welcome(self._ask(Operation.HELLO, codec.encode_hello(hello)))
        if side is not None:
            side.check_welcome(welcome.identity, welcome.markov_identity)
        return welcome

    def step(self, step_id: int, entries: Sequence[Entry], rows: Piece) -> StepReply:
        self._sequence += 1
        head = codec.encode_step_head(self._session, self._sequence, step_id, entries, len(rows), StepFlag(0))
        return codec.decode_step_reply(self._exchange(Operation.STEP, [head, rows]))

    def bye(self) -> None:
        self._ask(Operation.BYE)

    def _prove(self, token: bytes, identity: bytes, markov_identity: bytes) -> EngineSide:
        side = EngineSide(
            token,
            identity=identity,
            markov_identity=markov_identity,
            nonce=secrets.token_bytes(layout.NONCE_BYTES),
            setting=TOKEN_OPTION,
        )
        authenticate(side, self._ask)
        return side

    def _deadline(self) -> Deadline:
        return Deadline.after(self._timeout_s, self._clock)

    def _ask(self, operation: Operation, payload: bytes = b"") -> memoryview:
        self._sequence += 1
        header = Header(operation, self._session, self._sequence, 0)
        return self._exchange(operation, [codec.encode_frame(header, payload)])

    def _exchange(self, operation: Operation, pieces: Sequence[Piece]) -> memoryview:
        # One deadline for both ways: a question may not take twice the time that was allowed for it.
        deadline = self._deadline()
        began_s = self._clock()
        try:
            self._channel.send(pieces, deadline)
            header, payload = codec.decode_frame(self._channel.recv(deadline))
        except TimeoutError:
            raise TimeoutError(
                f"{self._endpoint}: no answer to {operation.name} within {self._timeout_s:g} s"
            ) from None
        except TransportError as error:
            raise TransportError(f"{self._endpoint}: no answer to {operation.name}: {error}") from error
        except ProtocolError as error:
            raise ProtocolError(
                f"{self._endpoint}: the answer to {operation.name} is none of a Farspark worker: {error}"
            ) from error
        self.last_us = (self._clock() - began_s) * 1e6
        if header.version != layout.VERSION:
            raise Refused(
                FrameStatus.VERSION,
                f"{self._endpoint}: protocol version: here {layout.VERSION}, worker {header.version}; use equal versions",
            )
        if header.is_reply and header.status != FrameStatus.OK:
            # A worker that is full answers so before it looks at anything else.
            said = codec.decode_refusal(operation, payload)
            sentence = f"{self._endpoint} answered {operation.name} with {status_name(header.status)}: {said}"
            if header.status == FrameStatus.AUTH and self._token is None:
                raise token_missing(sentence, TOKEN_OPTION)
            raise Refused(int(header.status), sentence)
        answered = (header.is_reply, header.operation, header.session, header.sequence)
        if answered != (True, operation, self._session, self._sequence):
            raise ProtocolError(
                f"{self._endpoint}: the answer to {operation.name} belongs to another question: {header}"
            )
        return payload


def status_name(status: int) -> str:
    """A frame status by its name, or by its number where it is not one of ours."""
    return FrameStatus(status).name if status in FrameStatus._value2member_map_ else f"status {int(status)}"


class StatsReader:
    """Reads a worker's STATS again and again over one connection, which is made anew after a failure."""

    def __init__(self, endpoint: Endpoint, timeout_s: float, *, token: bytes | None = None) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._token = token
        self._peer: Peer | None = None

    def __enter__(self) -> StatsReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._drop()

    def read(self) -> dict[str, Any]:
        """As `Peer.stats`, connecting where there is no connection."""
        if self._peer is None:
            self._peer = Peer(self._endpoint, self._timeout_s, token=self._token)
        try:
            return self._peer.stats()
        except (FarsparkError, TimeoutError):
            self._drop()
            raise

    def _drop(self) -> None:
        if self._peer is not None:
            self._peer.__exit__(None, None, None)
            self._peer = None
