"""A worker's server, and peers that say to it what an engine or a probe may say."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tests.fakes.drafters import INFO, ArithmeticDrafter, expected
from tests.fakes.served import served
from tests.fakes.shape import shape_for

from farspark.clock import Deadline
from farspark.transport import Channel, connect, parse_endpoint
from farspark.wire import codec, layout
from farspark.wire.layout import EntryFlag, FrameStatus, Operation, StepFlag
from farspark.wire.messages import Entry, Header, Hello, StepReply
from farspark.worker.batch import Drafter
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

DRAFT, NEW = EntryFlag.NEED_DRAFT, EntryFlag.NEW_GEN
N = INFO.num_drafts
_names = itertools.count()

HELLO = shape_for(INFO).hello(
    engine="engine-a", identity=INFO.identity, markov_identity=INFO.markov_identity, want_margin=False
)


def config(**changes: Any) -> WorkerConfig:
    address = changes.pop("listen", f"memory://server-{next(_names)}")
    return WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint(address), **changes)


@contextmanager
def serving(drafter: Drafter | None = None, **changes: Any) -> Iterator[Server]:
    with served(Server(drafter or ArithmeticDrafter(), config(**changes))) as server:
        yield server


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds)


class Peer(AbstractContextManager["Peer"]):
    """One connection, as an engine or a probe would make it."""

    def __init__(self, server: Server, session: int = 0xABC) -> None:
        self.channel: Channel = connect(server.endpoint, soon())
        self.session = session
        self.sequence = 0

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    def ask(self, operation: int, payload: bytes = b"", **header: Any) -> tuple[Header, memoryview]:
        self.sequence += 1
        request = Header(operation, header.pop("session", self.session), self.sequence, 0, **header)
        self.channel.send([codec.encode_frame(request, payload)], soon())
        reply, answer = codec.decode_frame(self.channel.recv(soon()))
        assert (reply.operation, reply.session, reply.sequence) == (operation, request.session, self.sequence)
        assert reply.is_reply
        assert reply.version == layout.VERSION
        return reply, answer

    def hello(self, hello: Hello = HELLO) -> tuple[Header, memoryview]:
        return self.ask(Operation.HELLO, codec.encode_hello(hello))

    def refused(self, hello: Hello) -> tuple[int, str]:
        reply, payload = self.hello(hello)
        welcome = codec.decode_welcome(payload)
        assert (welcome.identity, welcome.num_drafts) == (INFO.identity, N)
        return reply.status, welcome.message

    def send_step(self, *entries: Entry, rows: bytes | None = None, flags: StepFlag = StepFlag(0)) -> None:
        """`rows`: those of `make_rows` if None."""
        packed = make_rows(entries) if rows is None else rows
        self.sequence += 1
        head = codec.encode_step_head(self.session, self.sequence, 77, entries, len(packed), flags)
        self.channel.send([head, packed], soon())

    def received(self) -> tuple[Header, memoryview]:
        """The reply to the newest STEP."""
        reply, payload = codec.decode_frame(self.channel.recv(soon()))
        assert reply.sequence == self.sequence
        return reply, payload

    def drafts(self) -> StepReply:
        reply, payload = self.received()
        assert reply.status == FrameStatus.OK, codec.decode_message(payload)
        return codec.decode_step_reply(payload)

    def raw_step(self, *entries: Entry, rows: bytes | None = None) -> tuple[Header, memoryview]:
        self.send_step(*entries, rows=rows)
        return self.received()

    def step(self, *entries: Entry, rows: bytes | None = None, flags: StepFlag = StepFlag(0)) -> StepReply:
        self.send_step(*entries, rows=rows, flags=flags)
        return self.drafts()


def row(slot: int, position: int) -> bytes:
    return struct.pack("<IIII", slot, position, 1, 2)


def make_rows(entries: tuple[Entry, ...]) -> bytes:
    return b"".join(row(one.slot, one.first_pos + at) for one in entries for at in range(one.n_rows))


def entry(slot: int, first: int, rows: int, flags: EntryFlag = DRAFT, generation: int = 1) -> Entry:
    return Entry(slot, generation, first, rows, 5, first + rows, flags)


def ids(slot: int, start: int, end: int) -> list[int]:
    rows = {at: row(slot, at) for at in range(start, end)}
    return expected(rows, 5, end, num_drafts=N, vocab_size=INFO.vocab_size, n_out=N)[0]


def until(holds: Callable[[], bool]) -> None:
    deadline = soon()
    while not holds():
        deadline.check("waiting for a condition")
        time.sleep(0.002)
