from __future__ import annotations

import itertools
import json
import logging
import math
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter, expected, info
from tests.fakes.shape import shape_for

from farspark.clock import Deadline
from farspark.errors import TransportError
from farspark.mock.drafter import MockDrafter
from farspark.native.round_calls import load_round_calls
from farspark.transport import Channel, connect, parse_endpoint
from farspark.wire import codec, layout
from farspark.wire.layout import (
    SUPPORT_IDS,
    EntryFlag,
    FrameStatus,
    HeaderFlag,
    HelloFlag,
    Operation,
    RequestStatus,
    StepFlag,
)
from farspark.wire.messages import Entry, Freed, Header, Hello, Judge, Sampling, StepReply
from farspark.worker.batch import DraftBatch, Drafter, DraftResult
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server
from farspark.worker.session import Plan, Session

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
    with Server(drafter or ArithmeticDrafter(), config(**changes)) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.stop()
            thread.join(10)
            assert not thread.is_alive()


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

    def step(self, *entries: Entry, rows: bytes | None = None, flags: StepFlag = StepFlag(0)) -> StepReply:
        reply, payload = self.raw_step(*entries, rows=rows, flags=flags)
        assert reply.status == FrameStatus.OK, codec.decode_message(payload)
        return codec.decode_step_reply(payload)

    def raw_step(
        self, *entries: Entry, rows: bytes | None = None, flags: StepFlag = StepFlag(0)
    ) -> tuple[Header, memoryview]:
        packed = make_rows(entries) if rows is None else rows
        self.sequence += 1
        head = codec.encode_step_head(self.session, self.sequence, 77, entries, len(packed), flags)
        self.channel.send([head, packed], soon())
        reply, payload = codec.decode_frame(self.channel.recv(soon()))
        assert reply.sequence == self.sequence
        return reply, payload


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


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    with Peer(server) as peer:
        yield peer


@pytest.fixture
def engine(peer: Peer) -> Peer:
    reply, _ = peer.hello()
    assert reply.status == FrameStatus.OK
    return peer


def test_hello_says_what_the_worker_is(peer: Peer) -> None:
    reply, payload = peer.hello(replace(HELLO, flags=HelloFlag.MARGINS))
    welcome = codec.decode_welcome(payload)
    assert reply.status == FrameStatus.OK
    assert (welcome.worker, welcome.kind) == ("farspark", "ArithmeticDrafter")
    assert (welcome.identity, welcome.markov_identity) == (INFO.identity, INFO.markov_identity)
    assert (welcome.slots, welcome.context, welcome.num_drafts, welcome.window) == (4, 8, 5, 0)
    assert (welcome.vocab_size, welcome.max_rows) == (1000, 4096)
    assert welcome.flags == HelloFlag.MARGINS
    assert welcome.message == ""


@pytest.mark.parametrize(
    ("has_router", "said"), [(True, HelloFlag.ROUTING | HelloFlag.ROUTER), (False, HelloFlag.ROUTING)]
)
def test_a_worker_says_whether_it_has_a_router_to_who_asks_and_then_how_close_its_choices_were(
    has_router: bool, said: HelloFlag
) -> None:
    drafter = ArithmeticDrafter(replace(INFO, has_router=has_router))
    with serving(drafter) as server:
        for asked, flags in ((HelloFlag.MARGINS, HelloFlag.MARGINS), (HelloFlag.ROUTING, said)):
            with Peer(server) as peer:
                _, payload = peer.hello(replace(HELLO, flags=asked))
                welcome = codec.decode_welcome(payload)
                assert welcome.flags == flags
                assert welcome.has_router is (has_router if asked & HelloFlag.ROUTING else None)
                peer.step(entry(0, 0, 1, DRAFT | NEW), flags=StepFlag.MARGINS)
                chain = memoryview(bytes(4 * N)).cast("i")
                reply, payload = peer.ask(Operation.JUDGE, codec.encode_judge(Judge(77, N, [0], chain)))
                assert reply.status == FrameStatus.OK
                assert (codec.decode_judgement(payload).routing is not None) == (
                    has_router and asked == HelloFlag.ROUTING
                )


ONES = b"\x01" * 32


@pytest.mark.parametrize(
    ("change", "status", "parts"),
    [
        ({"identity": ONES}, FrameStatus.IDENTITY, ["drafter identity", ONES.hex(), INFO.identity.hex()]),
        (
            {"markov_identity": ONES},
            FrameStatus.MARKOV_IDENTITY,
            ["Markov identity", ONES.hex(), INFO.markov_identity.hex()],
        ),
        ({"row_bytes": 18}, FrameStatus.CONFIG, ["row bytes: engine 18, worker 16"]),
        ({"taps": 3}, FrameStatus.CONFIG, ["taps: engine 3, worker 2"]),
        ({"hidden_size": 8}, FrameStatus.CONFIG, ["hidden size: engine 8, worker 4"]),
        ({"dtype": 9}, FrameStatus.CONFIG, ["dtype: engine 9, worker 1"]),
        ({"vocab_size": 1001}, FrameStatus.CONFIG, ["vocabulary: engine 1001, worker 1000"]),
        ({"num_drafts": 4}, FrameStatus.CONFIG, ["N: engine 4, worker 5", "--drafts 4"]),
        ({"slots": 5}, FrameStatus.CONFIG, ["slots: engine 5, worker 4", "--slots 5"]),
        ({"slots": 0}, FrameStatus.CONFIG, ["slots: engine 0"]),
        ({"context": 0}, FrameStatus.CONFIG, ["context: engine 0"]),
        ({"taps": 3, "vocab_size": 7}, FrameStatus.CONFIG, ["taps: engine 3", "vocabulary: engine 7"]),
    ],
)
def test_what_differs_at_hello_is_said_with_both_values_HELLO_LIMITS(
    peer: Peer, change: dict[str, Any], status: FrameStatus, parts: list[str]
) -> None:
    got, message = peer.refused(replace(HELLO, **change))
    assert got == status
    for part in parts:
        assert part in message
    # Refused is refused: there is no session.
    assert peer.raw_step(entry(0, 0, 1, DRAFT | NEW))[0].status == FrameStatus.NO_SESSION


def test_the_smaller_context_is_used_and_said_HELLO_LIMITS(peer: Peer) -> None:
    _, payload = peer.hello(replace(HELLO, context=100))
    assert codec.decode_welcome(payload).context == 8
    assert "context: engine 100, worker 8" in codec.decode_welcome(payload).message
    _, payload = peer.hello(replace(HELLO, context=3))
    assert codec.decode_welcome(payload).context == 3
    reply = peer.step(entry(0, 0, 5, DRAFT | NEW))
    assert reply.entries[0].window_rows == 3
    assert reply.tokens.tolist() == ids(0, 2, 5)


def test_a_markov_identity_of_zeros_is_not_checked(peer: Peer) -> None:
    assert peer.hello(replace(HELLO, markov_identity=bytes(32)))[0].status == FrameStatus.OK


def test_session_zero_is_no_session(peer: Peer) -> None:
    peer.session = 0
    status, message = peer.refused(HELLO)
    assert status == FrameStatus.CONFIG
    assert "session 0" in message


def test_a_step_is_answered_with_the_drafts_of_a_reference(engine: Peer) -> None:
    reply = engine.step(entry(0, 0, 3, DRAFT | NEW), entry(3, 0, 2, NEW), flags=StepFlag.MARGINS)
    assert reply.step_id == 77
    assert reply.num_drafts == N
    assert [one.status for one in reply.entries] == [RequestStatus.OK, RequestStatus.NOT_NEEDED]
    assert reply.tokens.tolist() == ids(0, 0, 3) + [0] * N
    assert reply.margins is not None
    assert reply.worker_us < 5_000_000
    reply = engine.step(entry(3, 2, 1), entry(0, 3, 9))
    assert reply.tokens.tolist() == ids(3, 0, 3) + ids(0, 4, 12)


def test_a_step_without_entries_is_answered(engine: Peer) -> None:
    assert list(engine.step().entries) == []


@pytest.mark.parametrize("operation", [Operation.STEP, Operation.FREE, Operation.BYE])
def test_without_a_session_there_is_no_session(peer: Peer, operation: Operation) -> None:
    payload = {
        Operation.STEP: struct.pack("<QHHI", 1, 0, 0, 0),
        Operation.FREE: codec.encode_free([Freed(0, 1)]),
        Operation.BYE: b"",
    }[operation]
    assert peer.ask(operation, payload)[0].status == FrameStatus.NO_SESSION
    peer.hello()
    reply, answer = peer.ask(operation, payload, session=0xDEF)
    assert reply.status == FrameStatus.NO_SESSION
    assert "0000000000000def" in codec.decode_message(answer)
    assert peer.ask(operation, payload)[0].status == FrameStatus.OK


def test_a_new_hello_drops_the_windows_of_the_session_before(server: Server, engine: Peer) -> None:
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    old, engine.session = engine.session, 0x999
    engine.hello()
    assert server.slots_in_use == 0
    assert engine.step(entry(0, 2, 1)).entries[0].status == RequestStatus.NO_WINDOW
    engine.session = old
    assert engine.raw_step(entry(0, 0, 1, DRAFT | NEW))[0].status == FrameStatus.NO_SESSION


def test_bye_ends_the_session_and_frees_its_slots(server: Server, engine: Peer) -> None:
    engine.step(entry(0, 0, 2, DRAFT | NEW), entry(1, 0, 2, DRAFT | NEW))
    assert server.slots_in_use == 2
    assert engine.ask(Operation.BYE)[0].status == FrameStatus.OK
    assert server.slots_in_use == 0
    assert engine.raw_step(entry(0, 2, 1))[0].status == FrameStatus.NO_SESSION


def test_free_gives_the_slot_back(server: Server, engine: Peer) -> None:
    engine.step(entry(0, 0, 2, DRAFT | NEW), entry(1, 0, 2, DRAFT | NEW))
    assert engine.ask(Operation.FREE, codec.encode_free([Freed(0, 1)]))[0].status == FrameStatus.OK
    assert server.slots_in_use == 1


def test_ping_needs_no_session_and_echoes(peer: Peer) -> None:
    reply, payload = peer.ask(Operation.PING, b"12345678", session=0)
    assert (reply.status, bytes(payload)) == (FrameStatus.OK, b"12345678")
    assert peer.ask(Operation.PING, bytes(4097))[0].status == FrameStatus.BAD_FRAME


def test_stats_are_one_json_snapshot(engine: Peer, server: Server) -> None:
    engine.step(entry(0, 0, 2, DRAFT | NEW))
    engine.step(Entry(0, 1, 2, 3, 5, 5, DRAFT, 5))
    with Peer(server) as probe:
        stats = json.loads(bytes(probe.ask(Operation.STATS, session=0)[1]))
    assert stats["worker"] == "farspark"
    assert stats["endpoint"] == server.endpoint
    assert stats["drafter"]["identity"] == INFO.identity.hex()
    assert stats["slots"] == {"total": 4, "in_use": 1}
    assert stats["connections"]["open"] == 2
    (session,) = stats["sessions"].values()
    assert (session["engine"], session["rounds"], session["slots_in_use"]) == ("engine-a", 2, 1)
    assert stats["acceptance"] == 0.4
    assert stats["counters"]["steps"] == 2
    assert stats["counters"]["rows"] == 5
    assert stats["latency"]["step_us"]["count"] == 2


def test_stats_before_any_step_divide_by_nothing_METRICS(peer: Peer) -> None:
    stats = json.loads(bytes(peer.ask(Operation.STATS)[1]))
    assert stats["acceptance"] is None
    assert stats["sessions"] == {}


def test_another_version_is_told_ours(peer: Peer) -> None:
    reply, payload = peer.ask(Operation.HELLO, b"whatever", version=7)
    assert reply.status == FrameStatus.VERSION
    assert "engine 7, worker 1" in codec.decode_refusal(Operation.HELLO, payload)


def test_an_unknown_operation_is_told_so_and_the_connection_goes_on(peer: Peer) -> None:
    reply, payload = peer.ask(200)
    assert reply.status == FrameStatus.BAD_FRAME
    assert "operation 200" in codec.decode_message(payload)
    assert peer.hello()[0].status == FrameStatus.OK


def test_a_reply_where_a_request_is_due_is_a_bad_frame(peer: Peer) -> None:
    assert peer.ask(Operation.PING, flags=HeaderFlag.REPLY)[0].status == FrameStatus.BAD_FRAME


@pytest.mark.parametrize(
    ("operation", "payload"),
    [
        (Operation.HELLO, b""),
        (Operation.HELLO, codec.encode_hello(HELLO)[:-1]),
        (Operation.HELLO, codec.encode_hello(HELLO) + b"x"),
        (Operation.STEP, b""),
        (Operation.STEP, struct.pack("<QHHI", 1, 1, 0, 0)),
        (Operation.STEP, struct.pack("<QHHI", 1, 65535, 0, 0)),
        (Operation.FREE, b"\x05\x00\x00\x00"),
    ],
)
def test_a_payload_that_is_not_the_operations_is_a_bad_frame(
    engine: Peer, operation: Operation, payload: bytes
) -> None:
    assert engine.ask(operation, payload)[0].status == FrameStatus.BAD_FRAME
    assert engine.step(entry(0, 0, 1, DRAFT | NEW)).entries[0].status == RequestStatus.OK


@pytest.mark.parametrize("frame", [b"", b"FSPK", b"NOPE" + bytes(28), b"FSPK" + bytes(28) + b"tail"])
def test_a_frame_without_a_readable_header_gets_a_word_not_a_closed_socket(peer: Peer, frame: bytes) -> None:
    peer.channel.send([frame], soon())
    reply, payload = codec.decode_frame(peer.channel.recv(soon()))
    assert reply.status == FrameStatus.BAD_FRAME
    assert len(codec.decode_message(payload)) > 10
    with pytest.raises(TransportError):
        peer.channel.recv(soon())


def test_more_rows_than_the_worker_takes_is_a_bad_frame_with_both_numbers() -> None:
    with serving(max_rows=4) as server, Peer(server) as peer:
        _, payload = peer.hello()
        assert codec.decode_welcome(payload).max_rows == 4
        reply, payload = peer.raw_step(entry(0, 0, 5, DRAFT | NEW))
        assert reply.status == FrameStatus.BAD_FRAME
        assert "5 rows, at most 4" in codec.decode_message(payload)
        assert peer.step(entry(0, 0, 4, DRAFT | NEW)).tokens.tolist() == ids(0, 0, 4)


def sampled_step(session: int, sampling: list[Sampling], *entries: Entry) -> bytes:
    rows = make_rows(entries)
    return codec.encode_step_head(session, 1, 1, entries, len(rows), 0, sampling)[32:] + rows


def test_sampled_drafts_that_were_not_asked_for_at_hello_are_a_bad_frame(engine: Peer) -> None:
    reply, payload = engine.ask(Operation.STEP, sampled_step(1, [Sampling(1, 1.0)], entry(0, 0, 1, DRAFT | NEW)))
    assert reply.status == FrameStatus.BAD_FRAME
    assert "its HELLO did not ask" in codec.decode_message(payload)
    assert engine.step(entry(0, 0, 1, DRAFT | NEW)).entries[0].status == RequestStatus.OK


def test_a_drafter_that_draws_nothing_refuses_sampled_drafts_at_hello_HELLO_LIMITS(peer: Peer) -> None:
    status, message = peer.refused(replace(HELLO, flags=HelloFlag.SAMPLED))
    assert status == FrameStatus.CONFIG
    assert "drawn from 32 ids, and this drafter (ArithmeticDrafter, 1000 ids) does not draw" in message


def drawing(**changes: Any) -> MockDrafter:
    return MockDrafter(replace(INFO, support=SUPPORT_IDS, **changes))


def test_sampled_drafts_are_granted_and_drawn_entry_by_entry() -> None:
    with serving(drawing()) as server, Peer(server) as peer:
        reply, payload = peer.hello(replace(HELLO, flags=HelloFlag.SAMPLED))
        assert reply.status == FrameStatus.OK
        assert codec.decode_welcome(payload).flags == HelloFlag.SAMPLED
        entries = [entry(slot, 0, 1, DRAFT | NEW) for slot in range(3)]
        # The second one's is no temperature: that entry alone is refused.
        sampling = [Sampling(5, 0.7), Sampling(5, math.nan), Sampling(5, 0.0)]
        reply, payload = peer.ask(Operation.STEP, sampled_step(1, sampling, *entries))
        assert reply.status == FrameStatus.OK
        answer = codec.decode_step_reply(payload)
        assert [one.status for one in answer.entries] == [RequestStatus.OK, RequestStatus.BAD_ENTRY, RequestStatus.OK]
        assert answer.sampled is not None
        assert answer.sampled.mask.tolist() == [1, 0, 0]
        width = 5 * SUPPORT_IDS
        assert sum(answer.sampled.q.tolist()[:width]) == 5
        assert not any(answer.sampled.q.tolist()[width:])
        assert answer.sampled.support.tolist()[:width:SUPPORT_IDS] == answer.tokens.tolist()[:5]
        # Without sampling the same session is answered as any other.
        assert peer.step(entry(0, 1, 1)).sampled is None


def test_a_drafter_that_fails_answers_a_sampled_step_with_nothing_drawn() -> None:
    class Failing(MockDrafter):
        def draft(self, batch: DraftBatch) -> DraftResult:
            raise RuntimeError("told to fail")

    with serving(Failing(replace(INFO, support=SUPPORT_IDS))) as server, Peer(server) as peer:
        peer.hello(replace(HELLO, flags=HelloFlag.SAMPLED))
        _, payload = peer.ask(Operation.STEP, sampled_step(1, [Sampling(5, 0.7)], entry(0, 0, 1, DRAFT | NEW)))
        answer = codec.decode_step_reply(payload)
        assert answer.entries[0].status == RequestStatus.INTERNAL
        assert answer.sampled is not None
        assert not any(answer.sampled.mask.tolist() + answer.sampled.q.tolist())


def test_more_slots_than_a_sampled_reply_has_room_for_are_refused_HELLO_LIMITS() -> None:
    with serving(drawing(slots=4096), slots=4096) as server, Peer(server) as peer:
        status, message = peer.refused(replace(HELLO, flags=HelloFlag.SAMPLED, slots=4000))
        assert status == FrameStatus.CONFIG
        assert re.search(r"a reply for 4000 slots of 5 drafts has \d+ bytes, at most 4194304", message)
        assert peer.hello(replace(HELLO, slots=4000))[0].status == FrameStatus.OK


def test_a_frame_above_the_limit_closes_that_link_only_FRAMING() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, Peer(server) as bad, Peer(server) as good:
        good.hello()
        with pytest.raises(TransportError):
            bad.ask(Operation.PING, bytes(1024 * 1024))
        assert good.step(entry(0, 0, 1, DRAFT | NEW)).entries[0].status == RequestStatus.OK


def test_a_drafter_that_fails_costs_that_step_and_nothing_else_FAIL_LIFETIME(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = ArithmeticDrafter()
    with serving(drafter) as server, Peer(server) as peer:
        peer.hello()
        peer.step(entry(0, 0, 2, DRAFT | NEW))
        drafter.fail_next = 2
        for at in (2, 3):
            reply = peer.step(entry(0, at, 1, DRAFT | NEW, generation=at))
            assert [one.status for one in reply.entries] == [RequestStatus.INTERNAL]
            assert reply.tokens.tolist() == [0] * N
        assert peer.step(entry(0, 4, 1, generation=3)).entries[0].status == RequestStatus.NO_WINDOW
        assert peer.step(entry(0, 0, 5, DRAFT | NEW, generation=3)).tokens.tolist() == ids(0, 0, 5)
        assert server.snapshot()["counters"]["draft_failures"] == 2
    assert len([one for one in caplog.records if "the drafter failed" in one.message]) == 1


def test_a_bug_of_ours_is_an_internal_frame_and_the_worker_lives(
    server: Server, engine: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise KeyError("a bug")

    engine.step(entry(0, 0, 1, DRAFT | NEW))
    with monkeypatch.context() as patch:
        patch.setattr(Session, "complete", broken)
        reply, payload = engine.raw_step(entry(0, 1, 1))
    assert reply.status == FrameStatus.INTERNAL
    assert "a bug" in codec.decode_message(payload)
    assert "Traceback" in caplog.text
    # What the worker holds is unknown now: the session is void.
    assert server.slots_in_use == 0
    assert engine.raw_step(entry(0, 2, 1))[0].status == FrameStatus.NO_SESSION
    engine.hello()
    assert engine.step(entry(0, 0, 1, DRAFT | NEW)).entries[0].status == RequestStatus.OK


def test_several_engines_and_probes_at_once_each_get_their_own_answers(server: Server) -> None:
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            with Peer(server, session=100 + number) as peer:
                peer.hello(replace(HELLO, engine=f"engine-{number}", slots=1))
                for at in range(30):
                    reply = peer.step(entry(0, at, 1, DRAFT | NEW if not at else DRAFT), rows=row(number, at))
                    rows = {past: row(number, past) for past in range(max(0, at - 7), at + 1)}
                    wanted = expected(rows, 5, at + 1, num_drafts=N, vocab_size=INFO.vocab_size, n_out=N)[0]
                    assert reply.tokens.tolist() == wanted
                    peer.ask(Operation.PING, b"x")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failures == []
    until(lambda: server.slots_in_use == 0)


def test_a_client_that_never_reads_does_not_hold_up_the_others_SLOW_PEER() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, Peer(server) as deaf, Peer(server, session=5) as good:
        request = codec.encode_frame(Header(Operation.PING, 0, 1, 0), bytes(4096))
        sock = deaf.channel._socket  # type: ignore[attr-defined]
        sock.settimeout(0.05)

        def fill() -> None:
            # Straight to the socket's buffer: `send` would read the replies while it waits.
            while True:
                sock.sendall(struct.pack("<I", len(request)) + request)

        with pytest.raises(TimeoutError):
            fill()
        good.hello()
        started = time.monotonic()
        for at in range(20):
            good.step(entry(0, at, 1, DRAFT | NEW if not at else DRAFT))
        assert time.monotonic() - started < 2


def test_a_client_gone_in_mid_draft_frees_its_slots_ABORT_RACE() -> None:
    drafter = ArithmeticDrafter()
    with serving(drafter) as server:
        for _ in range(100):
            with Peer(server) as peer:
                peer.hello()
                packed = make_rows((entry(0, 0, 1),))
                head = codec.encode_step_head(peer.session, 9, 1, [entry(0, 0, 1, DRAFT | NEW)], len(packed))
                peer.channel.send([head, packed], soon())
        until(lambda: server.snapshot()["connections"]["open"] == 0)
        assert server.slots_in_use == 0


def test_only_one_thread_at_a_time_is_inside_the_drafter_and_pings_pass_it() -> None:
    drafter = ArithmeticDrafter()
    drafter.pause = threading.Event()
    with serving(drafter) as server, Peer(server) as slow, Peer(server, session=5) as queued, Peer(server) as probe:
        slow.hello()
        queued.hello()
        for peer in (slow, queued):
            packed = row(0, 0)
            head = codec.encode_step_head(peer.session, 2, 1, [entry(0, 0, 1, DRAFT | NEW)], len(packed))
            peer.channel.send([head, packed], soon())
            assert drafter.entered.wait(5)
        assert probe.ask(Operation.PING, b"x")[0].status == FrameStatus.OK
        assert probe.ask(Operation.STATS)[0].status == FrameStatus.OK
        with pytest.raises(TimeoutError):
            queued.channel.recv(soon(0.05))
        drafter.pause.set()
        for peer in (slow, queued):
            _, payload = codec.decode_frame(peer.channel.recv(soon()))
            assert codec.decode_step_reply(payload).tokens.tolist() == ids(0, 0, 1)


def test_stop_finishes_the_round_in_hand_and_closes_the_idle() -> None:
    drafter = ArithmeticDrafter()
    drafter.pause = threading.Event()
    with serving(drafter) as server, Peer(server) as busy, Peer(server) as idle:
        busy.hello()
        idle.ask(Operation.PING)
        packed = row(0, 0)
        head = codec.encode_step_head(busy.session, 2, 1, [entry(0, 0, 1, DRAFT | NEW)], len(packed))
        busy.channel.send([head, packed], soon())
        assert drafter.entered.wait(5)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(TransportError):
            idle.channel.recv(soon())
        assert stopping.is_alive()
        drafter.pause.set()
        _, payload = codec.decode_frame(busy.channel.recv(soon()))
        assert codec.decode_step_reply(payload).tokens.tolist() == ids(0, 0, 1)
        with pytest.raises(TransportError):
            busy.channel.recv(soon())
        stopping.join(5)
        assert not stopping.is_alive()
        server.stop()
        with pytest.raises(TransportError):
            connect(server.endpoint, soon())
    assert server.slots_in_use == 0


def test_stop_does_not_wait_for_ever_for_a_draft_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    drafter = ArithmeticDrafter()
    drafter.pause = threading.Event()
    with serving(drafter, drain_s=0.05) as server, Peer(server) as peer:
        peer.hello()
        packed = row(0, 0)
        head = codec.encode_step_head(peer.session, 2, 1, [entry(0, 0, 1, DRAFT | NEW)], len(packed))
        peer.channel.send([head, packed], soon())
        assert drafter.entered.wait(5)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2
        drafter.pause.set()
        until(lambda: server.snapshot()["connections"]["open"] == 0)
    assert "in the middle of a round" in caplog.text


def test_a_connection_beyond_the_limit_is_told_busy() -> None:
    with serving(max_connections=1) as server, Peer(server) as first:
        first.ask(Operation.PING)
        with Peer(server) as second:
            reply, payload = second.ask(Operation.PING)
            assert reply.status == FrameStatus.BUSY
            assert "--max-connections" in codec.decode_message(payload)
        first.channel.close()
        until(lambda: server.snapshot()["connections"]["open"] == 0)
        with Peer(server) as third:
            assert third.ask(Operation.PING)[0].status == FrameStatus.OK


def test_connections_and_sessions_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server, Peer(server) as peer:
        peer.hello()
        for at in range(20):
            peer.step(entry(0, at, 1, DRAFT | NEW if not at else DRAFT))
    assert len(caplog.records) == 3  # connected, session, gone


def test_rows_of_another_width_are_taken_as_the_drafter_says() -> None:
    wide = info(hidden_size=64)
    with serving(ArithmeticDrafter(wide)) as server, Peer(server) as peer:
        peer.hello(replace(HELLO, hidden_size=64, row_bytes=256))
        rows = bytes(range(256))
        reply = peer.step(entry(0, 0, 1, DRAFT | NEW), rows=rows)
        wanted = expected({0: rows}, 5, 1, num_drafts=N, vocab_size=1000, n_out=N)[0]
        assert reply.tokens.tolist() == wanted


def test_HALF_OPEN_a_newer_session_of_the_same_engine_takes_the_slots_of_a_connection_that_never_died() -> None:
    with (
        serving() as server,
        Peer(server, session=1) as vanished,
        Peer(server, session=2) as again,
        Peer(server) as other,
    ):
        everything = [entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)]
        vanished.hello(replace(HELLO, instance=7))
        vanished.step(*everything)
        other.hello(replace(HELLO, instance=8))
        assert {one.status for one in other.step(*everything).entries} == {RequestStatus.NO_CAPACITY}
        again.hello(replace(HELLO, instance=7))
        assert {one.status for one in again.step(*everything).entries} == {RequestStatus.OK}
        assert server.slots_in_use == INFO.slots
        with pytest.raises(TransportError):
            vanished.step(entry(0, 1, 1))


def test_sessions_without_an_instance_leave_each_other_alone() -> None:
    with serving() as server, Peer(server, session=1) as one, Peer(server, session=2) as two:
        one.hello()
        one.step(entry(0, 0, 1, DRAFT | NEW))
        two.hello()
        assert one.step(entry(0, 1, 1)).entries[0].status is RequestStatus.OK


class SlowPeer(AbstractContextManager["SlowPeer"]):
    """An engine whose frames arrive as this test sends them, over a bare TCP socket."""

    def __init__(self, server: Server, session: int, hello: Hello = HELLO) -> None:
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(5)
        self.session = session
        self.send(codec.encode_frame(Header(Operation.HELLO, session, 1, 0), codec.encode_hello(hello)))
        assert self.reply()[0].status == FrameStatus.OK

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack("<I", len(frame)) + frame)

    def frame(self, *entries: Entry) -> tuple[bytes, bytes]:
        """A STEP with its length in front: all that stands before its rows, and its rows."""
        rows = make_rows(entries)
        head = codec.encode_step_head(self.session, 2, 77, entries, len(rows))
        return struct.pack("<I", len(head) + len(rows)) + head, rows

    def exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            some = self.socket.recv(size - len(got))
            if not some:
                raise TransportError("closed by the worker")
            got += some
        return got

    def reply(self) -> tuple[Header, memoryview]:
        (length,) = struct.unpack("<I", self.exactly(4))
        return codec.decode_frame(memoryview(self.exactly(length)))

    def drafts(self) -> StepReply:
        header, payload = self.reply()
        assert header.status == FrameStatus.OK, codec.decode_message(payload)
        return codec.decode_step_reply(payload)


def test_a_step_that_arrives_in_two_parts_drafts_as_a_whole_one_FRAMING() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 1) as peer:
        at = cut = 0
        while True:
            # The refused entry between the others: their rows must be joined, once they are there.
            entries = entry(0, at, 2, DRAFT if at else DRAFT | NEW), entry(3, 9, 1), entry(1, 0, 1, DRAFT | NEW)
            head, rows = peer.frame(*entries)
            framed = head + rows
            if cut > len(framed):
                break
            peer.socket.sendall(framed[:cut])
            time.sleep(0.002)
            peer.socket.sendall(framed[cut:])
            reply = peer.drafts()
            assert [one.status.name for one in reply.entries] == ["OK", "NO_WINDOW", "OK"]
            start = max(0, at + 2 - INFO.context)
            assert reply.tokens.tolist() == ids(0, start, at + 2) + [0] * N + ids(1, 0, 1), f"cut at {cut}"
            at, cut = at + 2, cut + 1
        until(lambda: server.snapshot()["counters"].get("steps") == cut)
        counters = server.snapshot()["counters"]
        assert (counters["entries_ok"], counters["rows"]) == (2 * cut, 4 * cut)


def test_a_step_is_judged_while_its_rows_are_on_their_way() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 1) as peer:
        head, rows = peer.frame(entry(0, 0, 1, DRAFT | NEW), entry(1, 0, 2, DRAFT | NEW))
        peer.socket.sendall(head + rows[:1])
        until(lambda: server.slots_in_use == 2)
        assert "steps" not in server.snapshot()["counters"]
        peer.socket.sendall(rows[1:])
        assert peer.drafts().tokens.tolist() == ids(0, 0, 1) + ids(1, 0, 2)


def test_a_connection_that_dies_with_a_step_half_sent_gives_its_slots_back_FRAMING() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 2) as other:
        with SlowPeer(server, 1) as peer:
            head, rows = peer.frame(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)])
            peer.socket.sendall(head + rows[:-1])
            until(lambda: server.slots_in_use == INFO.slots)
        until(lambda: server.snapshot()["connections"]["open"] == 1)
        assert server.slots_in_use == 0
        other.socket.sendall(b"".join(other.frame(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)])))
        assert {one.status for one in other.drafts().entries} == {RequestStatus.OK}
        until(lambda: server.snapshot()["counters"].get("steps") == 1)


def test_a_step_is_received_whole_while_another_engine_drafts() -> None:
    wide = info(hidden_size=1 << 18)
    hello = replace(HELLO, hidden_size=wide.hidden_size, row_bytes=wide.row_bytes)
    drafter = ArithmeticDrafter(wide)
    drafter.pause = threading.Event()
    with (
        serving(drafter, listen="tcp://127.0.0.1:0") as server,
        SlowPeer(server, 1, hello) as slow,
        SlowPeer(server, 2, hello) as queued,
    ):
        # More than sockets hold: sending it ends only if the worker reads.
        rows = bytes(12 * wide.row_bytes)
        for peer in (slow, queued):
            asked = entry(0, 0, 12, DRAFT | NEW)
            peer.send(codec.encode_step_head(peer.session, 2, 1, [asked], len(rows)) + rows)
            assert drafter.entered.wait(5)
        until(lambda: server.slots_in_use == 2)  # the second one is judged meanwhile
        drafter.pause.set()
        assert slow.drafts().tokens.tolist() == queued.drafts().tokens.tolist()


def test_HALF_OPEN_a_step_half_sent_of_a_superseded_session_drafts_nothing() -> None:
    hello = replace(HELLO, instance=7)
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 1, hello) as vanished:
        head, rows = vanished.frame(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)])
        vanished.socket.sendall(head + rows[:-1])
        until(lambda: server.slots_in_use == INFO.slots)
        with SlowPeer(server, 2, hello) as again:
            assert server.slots_in_use == 0
            again.socket.sendall(b"".join(again.frame(entry(0, 0, 1, DRAFT | NEW))))
            assert again.drafts().tokens.tolist() == ids(0, 0, 1)
            with pytest.raises((TransportError, OSError)):
                vanished.reply()
            assert server.slots_in_use == 1


@pytest.mark.parametrize("judging", ["plan", "begin"])
def test_a_bug_while_a_step_is_judged_costs_that_session_only(
    judging: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if judging == "begin" and load_round_calls() is None:
        pytest.skip("no quick calls here")
    with (
        serving(listen="tcp://127.0.0.1:0") as server,
        SlowPeer(server, 1) as peer,
        SlowPeer(server, 2) as other,
    ):

        def fail(session: Session, *_: object) -> Plan:
            raise ZeroDivisionError("planted")

        head, rows = peer.frame(entry(0, 0, 1, DRAFT | NEW))
        with monkeypatch.context() as patched:
            patched.setattr(Session, judging, fail)
            peer.socket.sendall(head)
            until(lambda: "could not be judged" in caplog.text)
        peer.socket.sendall(rows)
        assert peer.reply()[0].status == FrameStatus.NO_SESSION
        other.socket.sendall(b"".join(other.frame(entry(0, 0, 1, DRAFT | NEW))))
        assert other.drafts().tokens.tolist() == ids(0, 0, 1)
