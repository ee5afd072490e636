"""The mock worker: a real server with made-up drafts, and a relay in front of it that spoils answers.

The `Server` listens inside this process. On the public port the relay passes frames on one by one and spoils the answers
that it is told to spoil; what must break a frame itself (half of one, bytes that are none) is written to the socket as it is.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from farspark.clock import Deadline
from farspark.errors import ConfigError, FarsparkError, ProtocolError, TransportError
from farspark.mock.drafter import MockDrafter
from farspark.mock.faults import Fault, spoiled
from farspark.transport import Channel, Endpoint, connect, parse_endpoint
from farspark.transport.addresses import reason
from farspark.wire import auth, codec
from farspark.wire.layout import MAX_GREETING_BYTES, FrameStatus, Operation
from farspark.wire.messages import Proof
from farspark.worker.batch import DrafterInfo
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
# Longer than any round: what takes longer inside is a fault of ours, and the peer is let go.
_INSIDE_S = 30.0
_GARBAGE = bytes.fromhex("deadbeef") * 16


class Nonces(NamedTuple):
    engine: bytes
    worker: bytes


@dataclass(eq=False, slots=True)
class _Link:
    """One peer, served by a thread of its own."""

    sock: socket.socket
    inside: Channel
    thread: threading.Thread | None = None
    held: bytes | None = None  # an answer that waits for the next request
    max_frame_bytes: int = MAX_GREETING_BYTES
    nonces: Nonces | None = None  # of the newest CHALLENGE


class MockWorker:
    """Listens from construction to `stop`; `with` stops it. `fault` hits the answers to `operation`, every `every`-th of them.

    `routing_margin`: as in `MockDrafter`.
    """

    def __init__(
        self,
        info: DrafterInfo,
        endpoint: Endpoint,
        *,
        fault: Fault | None = None,
        every: int = 1,
        operation: Operation = Operation.STEP,
        any_identity: bool = False,
        max_rows: int = 4096,
        token: bytes | None = None,
        routing_margin: float = 0.0,
    ) -> None:
        self._fault = fault
        self._every = every
        self._operation = operation
        self._any_identity = any_identity
        self._identity = info.identity
        self._answers = 0  # to `operation`, on all connections; guarded by _lock
        self._faults = 0  # guarded by _lock
        self._lock = threading.Lock()
        self._links: set[_Link] = set()  # guarded by _lock
        self._stopping = threading.Event()
        inside = parse_endpoint(f"memory://mock-{secrets.token_hex(8)}")
        config = WorkerConfig(
            checkpoint=Path(), listen=inside, max_rows=max_rows, name="farspark mock", drain_s=1.0, token=token
        )
        self._token = token
        self._max_frame_bytes = config.frame_bytes(info.row_bytes)
        self._server = Server(MockDrafter(info, routing_margin), config)
        try:
            self._listener = _listening(endpoint)
        except BaseException:
            self._server.stop()
            raise
        host, port = self._listener.getsockname()[:2]
        self.endpoint = Endpoint("tcp", host, port)
        self._threads = [
            threading.Thread(target=self._server.serve, name="farspark-mock-server", daemon=True),
            threading.Thread(target=self._accept, name="farspark-mock-accept", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<MockWorker {self.endpoint} {self._faults} faults in {self._answers} answers>"

    def __enter__(self) -> MockWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    @property
    def faults(self) -> int:
        """Answers that were spoiled."""
        return self._faults

    def stop(self) -> None:
        """End every connection and thread. Idempotent; from any thread but ours."""
        self._stopping.set()
        with contextlib.suppress(OSError):
            # Wakes the accepting thread, which then closes it.
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            links = list(self._links)
        for link in links:
            _shut(link)
        for thread in [*(link.thread for link in links if link.thread), self._threads[1]]:
            thread.join(5)
        self._server.stop()
        self._threads[0].join(5)

    def _accept(self) -> None:
        with self._listener:
            while not self._stopping.is_set():
                try:
                    sock, peer = self._listener.accept()
                except OSError as error:
                    if not self._stopping.is_set():
                        logger.error("accepting has ended: %s", error)
                    return
                logger.info("%s: connected", peer)
                self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            inside = connect(parse_endpoint(self._server.endpoint), Deadline.after(_INSIDE_S))
        except (FarsparkError, TimeoutError):
            sock.close()
            return
        link = _Link(sock, inside)
        link.thread = threading.Thread(target=self._relay, args=(link,), name="farspark-mock-link", daemon=True)
        with self._lock:
            self._links.add(link)
            link.thread.start()
        if self._stopping.is_set():
            _shut(link)

    def _relay(self, link: _Link) -> None:
        try:
            with link.sock:
                while self._pass_on(link):
                    pass
        except (OSError, FarsparkError, TimeoutError) as error:
            logger.info("a connection has ended: %s", error)
        finally:
            link.inside.close()
            with self._lock:
                self._links.discard(link)

    def _pass_on(self, link: _Link) -> bool:
        """One request and what becomes of its answer; False when the connection is to end."""
        request = self._received(link)
        if request is None:
            return False
        asked = None
        if self._any_identity:
            request, asked = self._as_our_own(link, request)
        link.inside.send([request], Deadline.after(_INSIDE_S))
        # The server answers every request once, so that the next frame is the answer to this one.
        answer = bytes(link.inside.recv(Deadline.after(_INSIDE_S)))
        header, payload = codec.decode_frame(memoryview(answer))
        if header.status == FrameStatus.OK:
            if header.operation == Operation.HELLO:
                link.max_frame_bytes = self._max_frame_bytes
            elif header.operation == Operation.CHALLENGE:
                link.nonces = Nonces(
                    codec.decode_challenge(_payload(request)), codec.decode_challenge_reply(payload)[0]
                )
        if asked is not None:
            answer = self._as_asked(link, answer, *asked)
        if link.held is not None:
            _send(link.sock, link.held)
            link.held = None
        if not self._is_to_fail(answer):
            _send(link.sock, answer)
            return True
        assert self._fault is not None
        return self._fail(link, self._fault, answer)

    def _is_to_fail(self, answer: bytes) -> bool:
        if self._fault is None or codec.decode_frame(memoryview(answer))[0].operation != self._operation:
            return False
        with self._lock:
            self._answers += 1
            is_hit = self._answers % self._every == 0
            self._faults += is_hit
        return is_hit

    def _fail(self, link: _Link, fault: Fault, answer: bytes) -> bool:
        whole = _LENGTH.pack(len(answer)) + answer
        match fault.kind:
            case "delay":
                self._stopping.wait(fault.number / 1000)
                _send(link.sock, answer)
            case "silence":
                pass
            case "late":
                link.held = answer
            case "half":
                link.sock.sendall(whole[: len(whole) // 2])
                # Whatever came next would be read as the other half.
                while link.sock.recv(65536):
                    pass
                return False
            case "close":
                link.sock.sendall(whole[: int(fault.number)])
                return False
            case "garbage":
                link.sock.sendall(_GARBAGE)
            case _:
                _send(link.sock, spoiled(fault, memoryview(answer)))
        return True

    def _received(self, link: _Link) -> bytes | None:
        """The next frame, or None at the end of the connection."""
        head = _exactly(link.sock, _LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        # On the length alone, so that a hostile one never reserves memory.
        if length > link.max_frame_bytes:
            raise ProtocolError(f"frame of {length} bytes announced, at most {link.max_frame_bytes}")
        return _exactly(link.sock, length)

    def _as_our_own(self, link: _Link, request: bytes) -> tuple[bytes, tuple[bytes, bytes] | None]:
        """A HELLO or PROVE with our identity in place of the one asked for, and what was asked for; anything else as it is."""
        try:
            header, payload = codec.decode_frame(memoryview(request))
            if header.operation == Operation.HELLO:
                hello = codec.decode_hello(payload)
                ours = codec.encode_hello(replace(hello, identity=self._identity, markov_identity=auth.NO_IDENTITY))
                return codec.encode_frame(header, ours), (hello.identity, hello.markov_identity)
            if header.operation == Operation.PROVE:
                claimed = codec.decode_proof(payload)
                proven = self._reproven(link, auth.engine_proof, claimed, self._identity, auth.NO_IDENTITY)
                return codec.encode_frame(header, codec.encode_proof(proven)), (
                    claimed.identity,
                    claimed.markov_identity,
                )
        except ProtocolError:
            pass  # the server says what is wrong with it
        return request, None

    def _as_asked(self, link: _Link, answer: bytes, identity: bytes, markov_identity: bytes) -> bytes:
        header, payload = codec.decode_frame(memoryview(answer))
        try:
            if header.operation == Operation.PROVE:
                claimed = codec.decode_proof(payload)
                proven = self._reproven(link, auth.worker_proof, claimed, identity, markov_identity)
                return codec.encode_frame(header, codec.encode_proof(proven))
            welcome = codec.decode_welcome(payload)
        except ProtocolError:
            return answer  # a refusal that is a sentence
        theirs = replace(welcome, identity=identity, markov_identity=markov_identity)
        return codec.encode_frame(header, codec.encode_welcome(theirs))

    def _reproven(
        self, link: _Link, proof_of: Callable[..., bytes], claimed: Proof, identity: bytes, markov_identity: bytes
    ) -> Proof:
        """A right proof as a right one of other identities; a wrong one as it is, and so refused."""
        if self._token is None or link.nonces is None:
            return claimed
        engine_nonce, worker_nonce = link.nonces
        make = functools.partial(proof_of, self._token, engine_nonce=engine_nonce, worker_nonce=worker_nonce)
        expected = make(identity=claimed.identity, markov_identity=claimed.markov_identity)
        if not auth.is_proof(claimed.proof, expected):
            return claimed
        proof = make(identity=identity, markov_identity=markov_identity)
        return Proof(identity=identity, markov_identity=markov_identity, proof=proof)


def _payload(frame: bytes) -> memoryview:
    return codec.decode_frame(memoryview(frame))[1]


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    """`count` bytes, or None if the connection ends in front of them. Raises TransportError if it ends among them."""
    received = bytearray(count)
    at = 0
    while at < count:
        got = sock.recv_into(memoryview(received)[at:])
        if not got:
            if at:
                raise TransportError(f"closed by the peer after {at} of {count} bytes")
            return None
        at += got
    return bytes(received)


def _send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def _shut(link: _Link) -> None:
    """Wakes the link's thread, which closes the rest."""
    with contextlib.suppress(OSError):
        link.sock.shutdown(socket.SHUT_RDWR)
    link.inside.close()


def _listening(endpoint: Endpoint) -> socket.socket:
    if endpoint.scheme != "tcp" or endpoint.bind:
        raise ConfigError(f"--listen {endpoint}: expected tcp://HOST:PORT; the mock worker has no other transport")
    try:
        family = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((endpoint.host, endpoint.port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"--listen {endpoint}: cannot listen: {reason(error)}") from error
