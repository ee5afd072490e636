"""`farspark mock-worker`: a worker without a model that can fail in every way that an engine must survive.

A real `Server` with a drafter that makes ids up listens inside this process. In front of it, on the public port, a relay
passes frames on one by one and spoils the answers that it is told to spoil; what must break a frame itself (half of one,
bytes that are none) is written to the socket as it is.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import secrets
import signal
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, cast

from farspark.clock import Deadline
from farspark.errors import ConfigError, FarsparkError, ProtocolError, TransportError
from farspark.transport import Channel, Endpoint, connect, parse_endpoint
from farspark.wire import codec, layout
from farspark.wire.layout import FrameStatus, Operation, StepFlag
from farspark.wire.messages import EntryReply, StepReply
from farspark.worker.batch import DraftBatch, DrafterInfo, DraftResult, Progress
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_NO_IDENTITY = bytes(layout.IDENTITY_BYTES)
# Longer than any round: what takes longer inside is a fault of ours, and the peer is let go.
_INSIDE_S = 30.0
_GARBAGE = bytes.fromhex("deadbeef") * 16


class MockDrafter:
    """Drafts the anchor's successors, each with confidence a half, whatever the rows are."""

    def __init__(self, info: DrafterInfo) -> None:
        self._info = info

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def warm_up(self, progress: Progress) -> None:
        progress("nothing to warm up", 1, 1)

    def draft(self, batch: DraftBatch) -> DraftResult:
        tokens: list[int] = []
        confidences: list[float] = []
        for entry in batch.entries:
            for depth in range(self._info.num_drafts):
                is_wanted = entry.need_draft and depth < entry.n_out
                tokens.append((entry.anchor_token + 1 + depth) % self._info.vocab_size if is_wanted else 0)
                confidences.append(0.5 if is_wanted else 0.0)
        floats = _array("f", confidences)
        return DraftResult(
            [True] * len(batch.entries), _array("i", tokens), floats, floats if batch.want_margins else None
        )


def mock_info(
    *,
    num_drafts: int,
    vocab_size: int,
    hidden_size: int,
    taps: int,
    slots: int,
    context: int,
    identity: bytes,
) -> DrafterInfo:
    """A drafter of this shape that holds nothing."""
    return DrafterInfo(
        kind="MockDrafter",
        num_drafts=num_drafts,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        taps=taps,
        row_bytes=2 * taps * hidden_size,
        slots=slots,
        context=context,
        window=0,
        max_position=layout.MAX_POSITION,
        identity=identity,
        markov_identity=_NO_IDENTITY,
        device="none",
        dtype="bfloat16",
        context_bytes=0,
    )


def _array(kind: str, values: list[int] | list[float]) -> memoryview:
    return cast(memoryview, memoryview(struct.pack(f"<{len(values)}{kind}", *values)).cast(kind))  # type: ignore[call-overload]


# Faults.


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to fail. `argument` names what follows the colon; empty: nothing does."""

    name: str
    argument: str
    sentence: str
    default: str = ""  # the argument where none is given; empty: it must be


KINDS: Final = (
    Kind("delay", "MS", "the answer comes MS milliseconds later"),
    Kind("silence", "", "no answer, now or later"),
    Kind("late", "", "the answer comes only after the next request"),
    Kind("half", "", "half of the frame comes, then nothing more on this connection"),
    Kind("close", "BYTES", "the connection is closed after BYTES bytes of the answer, its length included", "0"),
    Kind("garbage", "", "bytes that are no frame, with a length above every limit"),
    Kind("magic", "", "a whole frame that does not start with the magic"),
    Kind("lengths", "", "the header announces one payload byte too many"),
    Kind("frame-status", "STATUS", "a frame status and a sentence in place of the answer; wire.md has the numbers"),
    Kind("version", "N", "the answer is of protocol version N", "99"),
    Kind("session", "", "the answer is of another session"),
    Kind("sequence", "", "the answer is to a request that was never sent"),
    Kind("operation", "", "the answer is to another operation"),
    Kind("step-id", "", "the answer is to the step before"),
    Kind("counts", "", "the answer has one request too many"),
    Kind("drafts", "", "the answer has one draft per request too few"),
    Kind("slot", "", "the first answer is for another slot"),
    Kind("generation", "", "the first answer is for another generation of its slot"),
    Kind("window", "ROWS", "the first answer reports a window of ROWS rows", str(2**32 - 1)),
    Kind("request-status", "STATUS", "every request has this status, its drafts stay; wire.md has the numbers"),
    Kind("id", "ID", "the first draft is ID: a number, V for the vocabulary's size, or V+1"),
    Kind("confidence", "VALUE", "the first confidence is VALUE", "nan"),
)
_KINDS = {kind.name: kind for kind in KINDS}
# These spoil what only the answer to a STEP has.
_STEP_ONLY = frozenset(
    ("step-id", "counts", "drafts", "slot", "generation", "window", "request-status", "id", "confidence")
)


@dataclass(frozen=True, slots=True)
class Fault:
    """A parsed `--fault`. `number` is the argument; 0 where the kind has none."""

    kind: str
    number: float = 0

    @classmethod
    def parse(cls, text: str, vocab_size: int) -> Fault:
        """Raises ConfigError with the kinds there are, or what the argument must be."""
        name, colon, argument = text.partition(":")
        kind = _KINDS.get(name)
        if kind is None:
            raise ConfigError(f"--fault {text!r}: unknown; expected one of {', '.join(_KINDS)}")
        if not kind.argument:
            if colon:
                raise ConfigError(f"--fault {text!r}: {name} takes no argument")
            return cls(name)
        argument = argument or kind.default
        if not argument:
            raise ConfigError(f"--fault {text!r}: expected {name}:{kind.argument}")
        return cls(name, _argument(text, name, argument, vocab_size))


def _argument(text: str, name: str, argument: str, vocab_size: int) -> float:
    if name == "confidence":
        try:
            value = float(argument)
            # As the wire holds it; a finite number that float32 does not reach is an OverflowError.
            struct.pack("<f", value)
        except (ValueError, OverflowError):
            raise ConfigError(f"--fault {text!r}: expected a number, nan or inf") from None
        return value
    named = {"V": vocab_size, "V+1": vocab_size + 1} if name == "id" else {}
    low, high = {
        "delay": (0, 3_600_000),
        "close": (0, layout.MAX_REPLY_BYTES),
        "id": (-(2**31), 2**31 - 1),
        "window": (0, 2**32 - 1),
    }.get(name, (0, 2**16 - 1))
    try:
        number = named[argument] if argument in named else int(argument)
    except ValueError:
        number = high + 1
    if not low <= number <= high:
        raise ConfigError(f"--fault {text!r}: expected {name}:{_KINDS[name].argument} of {low} to {high}")
    return number


def _spoiled(fault: Fault, frame: memoryview) -> bytes:
    """The answer `frame` with `fault` in it: a frame of its own, to be sent whole."""
    header, payload = codec.decode_frame(frame)
    number = int(fault.number) if math.isfinite(fault.number) else 0
    match fault.kind:
        case "magic":
            return b"HTTP" + frame[4:]
        case "lengths":
            return bytes(frame[:28]) + _LENGTH.pack(len(payload) + 1) + payload
        case "frame-status":
            header = header._replace(status=number)
            return codec.encode_frame(header, codec.encode_message("the mock worker was told to refuse"))
        case "version":
            header = header._replace(version=number)
        case "session":
            header = header._replace(session=header.session ^ 1)
        case "sequence":
            header = header._replace(sequence=header.sequence + 1000)
        case "operation":
            header = header._replace(
                operation=Operation.PING if header.operation != Operation.PING else Operation.STATS
            )
        case _:
            if header.operation != Operation.STEP or header.status != FrameStatus.OK:
                return bytes(frame)  # a refusal has nothing that could be spoiled so
            reply = _spoiled_step(fault, number, codec.decode_step_reply(payload))
            return codec.encode_frame(header, codec.encode_step_reply(reply))
    return codec.encode_frame(header, bytes(payload))


def _spoiled_step(fault: Fault, number: int, reply: StepReply) -> StepReply:
    match fault.kind:
        case "step-id":
            return replace(reply, step_id=(reply.step_id - 1) % 2**64)
        case "counts":
            return _resized(
                reply, [*reply.entries, EntryReply(0xFFFF, 1, 0, layout.RequestStatus.NOT_NEEDED)], reply.num_drafts
            )
        case "drafts":
            return _resized(reply, reply.entries, reply.num_drafts - 1)
        case "request-status":
            # A status that is none of ours is what a worker of another build would send.
            status = cast(layout.RequestStatus, number)
            return replace(reply, entries=[entry._replace(status=status) for entry in reply.entries])
        case "id":
            return replace(reply, tokens=_with_first(reply.tokens, "i", number))
        case "confidence":
            return replace(reply, confidences=_with_first(reply.confidences, "f", fault.number))
    if not reply.entries:
        return reply
    first = reply.entries[0]
    changed = {
        "slot": first._replace(slot=first.slot ^ 1),
        "generation": first._replace(generation=first.generation ^ 1),
        "window": first._replace(window_rows=number),
    }[fault.kind]
    return replace(reply, entries=[changed, *reply.entries[1:]])


def _resized(reply: StepReply, entries: Sequence[EntryReply], num_drafts: int) -> StepReply:
    """The reply with other counts, zeros in its arrays; in itself a reply as it should be."""
    return replace(
        reply,
        entries=entries,
        num_drafts=num_drafts,
        tokens=_array("i", [0] * (len(entries) * num_drafts)),
        confidences=_array("f", [0.0] * (len(entries) * num_drafts)),
        margins=None,
        flags=StepFlag(0),
    )


def _with_first(array: memoryview, kind: str, value: float) -> memoryview:
    changed = bytearray(array.cast("B"))
    if changed:
        struct.pack_into(f"<{kind}", changed, 0, value)
    return cast(memoryview, memoryview(changed).cast(kind))  # type: ignore[call-overload]


# The relay.


@dataclass(eq=False, slots=True)
class _Link:
    """One peer, served by a thread of its own."""

    sock: socket.socket
    inside: Channel
    thread: threading.Thread | None = None
    held: bytes | None = None  # an answer that waits for the next request


class MockWorker:
    """Listens from construction to `stop`; `with` stops it. `fault` hits the answers to `operation`, every `every`-th of them."""

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
        config = WorkerConfig(checkpoint=Path(), listen=inside, max_rows=max_rows, name="farspark mock", drain_s=1.0)
        self._max_frame_bytes = config.frame_bytes(info.row_bytes)
        self._server = Server(MockDrafter(info), config)
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
        request = self._received(link.sock)
        if request is None:
            return False
        asked = None
        if self._any_identity:
            request, asked = self._as_our_own(request)
        link.inside.send([request], Deadline.after(_INSIDE_S))
        # The server answers every request once, so that the next frame is the answer to this one.
        answer = bytes(link.inside.recv(Deadline.after(_INSIDE_S)))
        if asked is not None:
            answer = _as_asked(answer, *asked)
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
                _send(link.sock, _spoiled(fault, memoryview(answer)))
        return True

    def _received(self, sock: socket.socket) -> bytes | None:
        """The next frame, or None at the end of the connection."""
        head = _exactly(sock, _LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        # On the length alone, so that a hostile one never reserves memory.
        if length > self._max_frame_bytes:
            raise ProtocolError(f"frame of {length} bytes announced, at most {self._max_frame_bytes}")
        return _exactly(sock, length)

    def _as_our_own(self, request: bytes) -> tuple[bytes, tuple[bytes, bytes] | None]:
        """A HELLO with our identity in place of the one asked for, and what was asked for; anything else as it is."""
        try:
            header, payload = codec.decode_frame(memoryview(request))
            if header.operation != Operation.HELLO:
                return request, None
            hello = codec.decode_hello(payload)
        except ProtocolError:
            return request, None  # the server says what is wrong with it
        ours = replace(hello, identity=self._identity, markov_identity=_NO_IDENTITY)
        return codec.encode_frame(header, codec.encode_hello(ours)), (hello.identity, hello.markov_identity)


def _as_asked(answer: bytes, identity: bytes, markov_identity: bytes) -> bytes:
    header, payload = codec.decode_frame(memoryview(answer))
    try:
        welcome = codec.decode_welcome(payload)
    except ProtocolError:
        return answer  # a refusal that is a sentence
    theirs = replace(welcome, identity=identity, markov_identity=markov_identity)
    return codec.encode_frame(header, codec.encode_welcome(theirs))


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
        raise ConfigError(f"--listen {endpoint}: cannot listen: {error.strerror or error}") from error


# The command.


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    width = max(len(_spelling(kind)) for kind in KINDS)
    kinds = "\n".join(f"  {_spelling(kind):{width}}  {kind.sentence}" for kind in KINDS)
    parser = subparsers.add_parser(
        "mock-worker",
        help="stand in for the worker without a model, and fail on demand",
        description="A worker without a model: its drafts are made up, so an engine should use it in shadow only. With\n"
        "--fault every K-th answer goes wrong in one way. Ctrl-C or SIGTERM ends it.",
        epilog=f"kinds of faults:\n{kinds}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--listen", metavar="ENDPOINT", default="tcp://127.0.0.1:18620", help="where to listen; default %(default)s"
    )
    parser.add_argument("--drafts", metavar="N", type=int, required=True, help="the engine's num_speculative_tokens")
    parser.add_argument("--vocab", metavar="V", type=int, required=True, help="the target's vocabulary")
    parser.add_argument("--hidden", metavar="H", type=int, required=True, help="the target's hidden size")
    parser.add_argument("--taps", metavar="T", type=int, required=True, help="tapped layers of the target")
    parser.add_argument("--slots", metavar="S", type=int, default=8, help="requests at a time; default %(default)s")
    parser.add_argument(
        "--context", metavar="C", type=int, default=4096, help="positions per request; default %(default)s"
    )
    parser.add_argument(
        "--max-rows", metavar="COUNT", type=int, default=4096, help="rows of a step; default %(default)s"
    )
    parser.add_argument(
        "--identity",
        metavar="HEX|any",
        default="any",
        help="what to prove to be: 64 hex digits, or any: whatever the engine demands; default %(default)s",
    )
    parser.add_argument("--fault", metavar="KIND[:ARG]", help="how to fail, see below; left out: not at all")
    parser.add_argument(
        "--every", metavar="K", type=int, default=1, help="fail on every K-th answer; default %(default)s"
    )
    parser.add_argument(
        "--on",
        metavar="OPERATION",
        choices=[operation.name.lower() for operation in Operation],
        default="step",
        help="whose answers fail: hello, step, ping, stats, free or bye; default %(default)s",
    )
    parser.add_argument(
        "--allow-unauthenticated-network",
        action="store_true",
        help="listen on an address that other machines reach",
    )
    parser.set_defaults(run=run)


def _spelling(kind: Kind) -> str:
    if not kind.argument:
        return kind.name
    return f"{kind.name}[:{kind.argument}]" if kind.default else f"{kind.name}:{kind.argument}"


def run(options: argparse.Namespace) -> int:
    for option, value, low, high in (
        ("--drafts", options.drafts, 1, layout.MAX_DRAFTS),
        ("--vocab", options.vocab, 2, layout.MAX_TOKEN),
        ("--hidden", options.hidden, 1, 1 << 20),
        ("--taps", options.taps, 1, 0xFFFF),
        ("--every", options.every, 1, 1 << 31),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} {value}: expected {low} to {high}")
    endpoint = parse_endpoint(options.listen)
    # The rules for slots, context, rows and addresses are the worker's own.
    WorkerConfig(
        checkpoint=Path(),
        listen=endpoint,
        slots=options.slots,
        context=options.context,
        max_rows=options.max_rows,
        allow_unauthenticated_network=options.allow_unauthenticated_network,
    )
    fault = None if options.fault is None else Fault.parse(options.fault, options.vocab)
    operation = Operation[options.on.upper()]
    if fault is not None and fault.kind in _STEP_ONLY and operation is not Operation.STEP:
        raise ConfigError(f"--fault {options.fault} --on {options.on}: only the answer to a STEP can fail so")
    info = mock_info(
        num_drafts=options.drafts,
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        taps=options.taps,
        slots=options.slots,
        context=options.context,
        identity=_identity(options.identity),
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    with (
        _signals_blocked(),
        MockWorker(
            info,
            endpoint,
            fault=fault,
            every=options.every,
            operation=operation,
            any_identity=options.identity == "any",
            max_rows=options.max_rows,
        ) as worker,
    ):
        how = "no faults" if fault is None else f"{options.fault} on every {options.every}. answer to {operation.name}"
        print(f"mock drafts (for shadow only), {how}", flush=True)
        print(f"ready on {worker.endpoint}", flush=True)
        signal.sigwait(_ENDS)
    print(f"stopped after {worker.faults} faults", flush=True)
    return 0


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Around the first thread's start, so that every thread inherits it and only `sigwait` takes the signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_ENDS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


def _identity(text: str) -> bytes:
    if text == "any":
        return _NO_IDENTITY
    try:
        identity = bytes.fromhex(text)
    except ValueError:
        identity = b""
    if len(identity) != layout.IDENTITY_BYTES:
        raise ConfigError(f"--identity {text!r}: expected 64 hex digits or any")
    return identity
