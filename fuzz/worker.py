"""Anything that peers may do to a worker, in any order and cut anywhere: several connections, bytes that are no frames, frames
that are no messages, messages at the wrong time, a drafter that fails, peers that go or do not read.

Every frame that arrives gets one reply, or its connection is closed; a reply to a STEP is one that an engine accepts; the
drafter is never asked for what its slots do not hold; at the end nothing is held any more.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.fakes.drafters import INFO, ArithmeticDrafter

from farspark.clock import Deadline
from farspark.engine.replies import find_fault, find_fault_of_judgement
from farspark.errors import ProtocolError, Refused, TransportError
from farspark.transport import Endpoint, Piece
from farspark.transport.tcp import TcpChannel
from farspark.wire import auth, codec, layout
from farspark.wire.layout import FrameStatus, Operation
from farspark.wire.messages import Entry, Freed, Header, Hello, Judge, Proof, Step, StepReply
from farspark.worker.batch import DraftBatch, DraftResult
from farspark.worker.config import WorkerConfig
from farspark.worker.connection import Connection
from farspark.worker.server import Server
from farspark.worker.session import SlotPool
from fuzz.driver import reproduce
from fuzz.faults_of_ours import FaultsOfOurs
from fuzz.feed import Feed
from fuzz.sockets import Wire, framed, frames_of, make_ready

TOKEN: Final = b"a token that both of them hold"
NONCE: Final = bytes(range(32))
N_PEERS: Final = 3
MAX_OPERATIONS: Final = 48
_HEADS: Final = layout.HEADER.size + layout.STEP.size


class _Paused(BaseException):
    """Internal: the connection waits for its peer between two frames."""


class Drafter(ArithmeticDrafter):
    """Keeps in mind that it was asked for what must not be asked: the server takes any exception for a failed step."""

    def __init__(self) -> None:
        super().__init__(replace(INFO, has_router=True))
        self.fault: AssertionError | None = None

    def draft(self, batch: DraftBatch) -> DraftResult:
        try:
            return super().draft(batch)
        except AssertionError as error:
            self.fault = error
            raise


class Worker(Server):
    REFUSED_KEEPS_PLACE_S = 0.0

    def __init__(self, token: bytes | None) -> None:
        self.fuzzed = Drafter()
        name = f"memory://fuzz-{'open' if token is None else 'closed'}"
        listen = Endpoint("memory", name.removeprefix("memory://"))
        super().__init__(self.fuzzed, WorkerConfig(checkpoint=Path(), listen=listen, max_rows=40, token=token))

    def reset(self) -> None:
        self.fuzzed.fault = None
        self.fuzzed.fail_next = 0
        self.fuzzed.not_finite.clear()
        self._answers._pool = SlotPool(INFO.slots)
        for rows in self.fuzzed.rows:
            rows.clear()


class PausingChannel(TcpChannel):
    """Where the server would wait for its peer it pauses between two frames; within a frame the others go on meanwhile."""

    is_within_frame = False
    is_sending = False

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        self.is_sending = True
        try:
            super().send(pieces, deadline)
        finally:
            self.is_sending = False

    def recv(self, deadline: Deadline) -> memoryview:
        self.is_within_frame = deadline.at_s == float("inf")
        try:
            return super().recv(deadline)
        finally:
            self.is_within_frame = False

    def recv_head(self, head_bytes: int, deadline: Deadline) -> tuple[memoryview, int]:
        self.is_within_frame = head_bytes != _HEADS
        try:
            return super().recv_head(head_bytes, deadline)
        finally:
            self.is_within_frame = False


class Peer:
    """One connection, from the peer's side; made on first use and after every end."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.wire = Wire(self._starved, self._room)
        self.stream = bytearray()  # all that was sent
        self.room: list[int] = []  # what the next sends of the server find
        self.session = 0
        self.sequence = 0
        self.is_running = False
        self.channel = PausingChannel(self.wire.as_socket(), max_frame_bytes=layout.MAX_GREETING_BYTES, spin_us=0)
        make_ready(self.channel)
        worker = program.worker
        proof = auth.WorkerSide(program.token, identity=INFO.identity, markov_identity=INFO.markov_identity)
        self.connection = Connection(self.channel, next(program.numbers), proof)
        worker._connections.add(self.connection)

    def put(self, data: bytes) -> None:
        self.wire.incoming += data
        self.stream += data

    def ask(self, operation: int, payload: bytes, **header: int) -> bytes:
        self.sequence += 1
        session = header.pop("session", self.session)
        return framed(codec.encode_frame(Header(operation, session, self.sequence, 0, **header), payload))

    def _room(self) -> int | None:
        if not self.room:
            return None
        room = self.room.pop()
        if room == 255:
            raise ConnectionResetError(104, "Connection reset by peer")
        return room

    def _starved(self) -> None:
        if self.channel.is_sending:
            return
        if not self.channel.is_within_frame:
            raise _Paused
        while not self.wire.incoming and not self.wire.is_ended and self.program.operation():
            pass
        if not self.wire.incoming:
            self.wire.is_ended = True

    def go_on(self) -> None:
        """Let the server serve this connection until it waits for us."""
        if self.is_running or self.channel.is_closed:
            return
        worker, connection = self.program.worker, self.connection
        self.is_running = True
        try:
            worker._await_proof(connection)
            worker._answer_all(connection)
        except _Paused:
            return
        except (TransportError, ProtocolError, TimeoutError, Refused):
            self.end()
        finally:
            self.is_running = False

    def end(self) -> None:
        """The connection's thread ends, as it does once the channel is closed."""
        self.channel.close()
        self.program.worker._serve_one(self.connection)

    def check(self) -> None:
        """One reply for each frame, each the right one."""
        requests, replies = frames_of(self.stream), frames_of(self.wire.outgoing)
        assert len(replies) <= len(requests)
        if self.program.token is not None:
            check_proof(replies)
        for request, reply in zip(requests, replies, strict=False):
            check_reply(request, reply)
        if not self.channel.is_closed:
            assert len(replies) == len(requests), f"{len(requests)} frames, {len(replies)} replies"


def check_proof(replies: Sequence[bytes]) -> None:
    """Nothing but the challenge is answered before the peer has proven itself."""
    for reply in replies:
        header, _ = codec.decode_frame(memoryview(reply))
        if (header.operation, header.status) == (Operation.PROVE, FrameStatus.OK):
            return
        assert header.operation == Operation.CHALLENGE or header.status in (FrameStatus.AUTH, FrameStatus.BAD_FRAME)


def check_reply(request: bytes, reply: bytes) -> None:
    header, payload = codec.decode_frame(memoryview(reply))
    assert header.is_reply
    assert header.version == layout.VERSION
    assert isinstance(header.status, FrameStatus)
    try:
        asked, body = codec.decode_frame(memoryview(request))
    except ProtocolError:
        assert header.status is FrameStatus.BAD_FRAME
        assert (header.operation, header.session, header.sequence) == (0, 0, 0)
        return
    assert (header.operation, header.session, header.sequence) == (asked.operation, asked.session, asked.sequence)
    assert header.status is not FrameStatus.INTERNAL or asked.operation == Operation.JUDGE
    if header.status is not FrameStatus.OK:
        assert codec.decode_refusal(header.operation, payload)
        return
    match header.operation:
        case Operation.STEP:
            check_step(codec.decode_step(body, INFO.row_bytes), codec.decode_step_reply(payload))
        case Operation.HELLO:
            codec.decode_welcome(payload)
        case Operation.JUDGE:
            judgement = codec.decode_judgement(payload)
            assert (
                find_fault_of_judgement(
                    judgement, codec.decode_judge(body), INFO.vocab_size, has_router=judgement.routing is not None
                )
                is None
            )
        case Operation.PING:
            assert payload == body


def check_step(step: Step, reply: StepReply) -> None:
    if step.entries:
        fault = find_fault(
            reply,
            step.entries,
            step_id=step.step_id,
            num_drafts=INFO.num_drafts,
            vocab_size=INFO.vocab_size,
            context=INFO.context,
            want_margins=bool(step.flags & layout.StepFlag.MARGINS),
        )
        assert fault is None, fault


class Program:
    """One input."""

    def __init__(self, data: bytes) -> None:
        self.feed = Feed(data)
        self.token = TOKEN if self.feed.byte() % 4 == 0 else None
        self.worker = WORKERS[self.token]
        self.worker.reset()
        self.numbers = itertools.count()
        self.peers: list[Peer | None] = [None] * N_PEERS
        self.all: list[Peer] = []
        self.held_back: list[tuple[Peer, bytes]] = []
        self.operations = 0

    def run(self) -> None:
        while self.operation():
            pass
        for peer in self.all:
            peer.go_on()
        for peer in self.all:
            peer.check()
            assert len(peer.channel._memory) <= layout.MAX_GREETING_BYTES + 256 * 1024
            assert peer.wire.calls < 100 * MAX_OPERATIONS + len(peer.stream)
            peer.end()
        assert self.worker.slots_in_use == 0
        assert not self.worker._connections
        if self.worker.fuzzed.fault is not None:
            raise self.worker.fuzzed.fault
        FAULTS.check()

    def operation(self) -> bool:
        """Do what the input says next; False at its end."""
        self.operations += 1
        if self.feed.is_empty or self.operations > MAX_OPERATIONS:
            return False
        what = self.feed.byte()
        peer = self._peer(what >> 6)
        match what & 15:
            case 0:
                self._say(peer, self.feed.take(self.feed.byte()))
            case 1:
                self._say(peer, framed(self.feed.take(self.feed.byte())))
            case 2:
                operation, flags = self.feed.byte(), self.feed.byte()
                payload = self.feed.take(self.feed.byte())
                self._say(peer, peer.ask(operation, payload, flags=flags & 1, version=1 + (flags >> 6 == 3)))
            case 3:
                peer.session = 1 + (self.feed.byte() & 3)
                self._say(peer, peer.ask(Operation.HELLO, codec.encode_hello(self._hello())))
            case 4 | 5 | 6:
                self._say(peer, self._step(peer))
            case 7:
                freed = [Freed(self.feed.byte() & 7, self.feed.byte()) for _ in range(self.feed.byte() & 3)]
                self._say(peer, peer.ask(Operation.FREE, codec.encode_free(freed)))
            case 8:
                self._say(peer, peer.ask(Operation.JUDGE, self._judge()))
            case 9:
                operation = self.feed.pick((Operation.BYE, Operation.PING, Operation.STATS))
                self._say(peer, peer.ask(operation, b"", session=self.feed.pick((peer.session, 0, 1, 2))))
            case 10:
                self._say(peer, peer.ask(Operation.CHALLENGE, codec.encode_challenge(NONCE)))
            case 11:
                self._say(peer, peer.ask(Operation.PROVE, self._proof(peer)))
            case 12:
                peer.wire.is_ended = True
                peer.go_on()
            case 13:
                peer.room = list(self.feed.take(self.feed.byte() & 3))
            case 14:
                drafter = self.worker.fuzzed
                drafter.fail_next = self.feed.byte() & 1
                drafter.not_finite = {slot for slot in range(INFO.slots) if self.feed.byte() & 1}
            case _:
                peer.wire.chunk = self.feed.byte()
        return True

    def _peer(self, index: int) -> Peer:
        peer = self.peers[index % N_PEERS]
        if peer is None or peer.channel.is_closed or peer.wire.is_ended:
            peer = self.peers[index % N_PEERS] = Peer(self)
            self.all.append(peer)
        return peer

    def _say(self, peer: Peer, data: bytes) -> None:
        """All of it, or only its beginning: then its rest comes with what this peer says next."""
        cut = self.feed.byte()
        rests = [rest for who, rest in self.held_back if who is peer]
        self.held_back = [(who, rest) for who, rest in self.held_back if who is not peer]
        data = b"".join([*rests, data])
        if cut >= 192:
            at = min(len(data), (cut - 192) * 4)
            self.held_back.append((peer, data[at:]))
            data = data[:at]
        peer.put(data)
        peer.go_on()

    def _hello(self) -> Hello:
        kind = self.feed.byte()
        return Hello(
            engine="engine" if kind & 1 else "",
            identity=INFO.identity if kind < 240 else NONCE,
            markov_identity=bytes(32) if kind & 2 else INFO.markov_identity,
            row_bytes=INFO.row_bytes,
            taps=INFO.taps,
            hidden_size=INFO.hidden_size,
            dtype=1,
            ring=4,
            context=self.feed.pick((INFO.context, 3, 1, 100)),
            num_drafts=INFO.num_drafts,
            slots=self.feed.pick((INFO.slots, 1, 2, 3)),
            vocab_size=INFO.vocab_size,
            flags=layout.HelloFlag(kind >> 2 & 7),
            instance=kind >> 4 & 3,
        )

    def _step(self, peer: Peer) -> bytes:
        shape = self.feed.byte()
        entries = [self._entry() for _ in range(shape & 3)]
        n_rows = sum(entry.n_rows for entry in entries)
        rows = bytes([shape]) * min(n_rows * INFO.row_bytes, 4096)
        peer.sequence += 1
        head = codec.encode_step_head(peer.session, peer.sequence, shape >> 4, entries, len(rows), shape >> 2 & 1)
        return framed(head + rows)

    def _entry(self) -> Entry:
        where, first, size, token = self.feed.take(4).ljust(4, b"\0")
        n_rows = size & 15
        first_pos = first if first < 250 else layout.MAX_POSITION - 256 + first
        return Entry(
            slot=where & 7,
            generation=where >> 3 & 3,
            first_pos=first_pos,
            n_rows=n_rows,
            anchor_token=token if token < 250 else token * 10_000_000 - 2_520_000_000,
            anchor_pos=first_pos + n_rows + (where >> 7),
            flags=(size >> 4 & 3 ^ 3) | (4 if where & 64 else 0),
            k_window=size >> 6,
            n_out=token & 7 if where & 32 else 0,
        )

    def _judge(self) -> bytes:
        shape = self.feed.byte()
        places = [self.feed.byte() & 3 for _ in range(shape & 3)]
        num_drafts = INFO.num_drafts if shape < 200 else shape & 7
        tokens = [self.feed.number(2) % 1100 for _ in range(len(places) * num_drafts)]
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        return codec.encode_judge(Judge(shape >> 4 & 7, num_drafts, places, memoryview(packed).cast("i")))

    def _proof(self, peer: Peer) -> bytes:
        """The right one, if the newest reply was one to CHALLENGE."""
        kind = self.feed.byte()
        replies = frames_of(peer.wire.outgoing)
        worker_nonce = replies[-1][layout.HEADER.size :][:32].ljust(32, b"\0") if replies else NONCE
        identity = INFO.identity if kind & 1 else auth.NO_IDENTITY
        proof = auth.engine_proof(
            TOKEN if kind < 200 else b"another token",
            engine_nonce=NONCE,
            worker_nonce=worker_nonce,
            identity=identity,
            markov_identity=INFO.markov_identity,
        )
        return codec.encode_proof(Proof(identity=identity, markov_identity=INFO.markov_identity, proof=proof))


FAULTS: Final = FaultsOfOurs(ignored="the drafter failed")
WORKERS: Final = {token: Worker(token) for token in (None, TOKEN)}


def run(data: bytes) -> None:
    Program(data).run()


if __name__ == "__main__":
    sys.exit(reproduce(run))
