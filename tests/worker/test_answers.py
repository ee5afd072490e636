"""What a worker answers to each frame, over one connection or two."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter, expected, info
from tests.worker.peer import DRAFT, HELLO, NEW, N, Peer, entry, ids, make_rows, serving, soon

from farspark.errors import TransportError
from farspark.mock.drafter import MockDrafter
from farspark.wire import codec
from farspark.wire.layout import SUPPORT_IDS, FrameStatus, HeaderFlag, HelloFlag, Operation, RequestStatus, StepFlag
from farspark.wire.messages import Entry, Freed, Judge, Sampling
from farspark.worker import answers
from farspark.worker.batch import DraftBatch, DraftResult
from farspark.worker.server import Server
from farspark.worker.session import Session


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
    assert peer.ask(Operation.PING, bytes(4096))[1] == bytes(4096)
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


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.5])
def test_sampled_drafts_are_granted_and_drawn_entry_by_entry(wrong: float) -> None:
    with serving(drawing()) as server, Peer(server) as peer:
        reply, payload = peer.hello(replace(HELLO, flags=HelloFlag.SAMPLED))
        assert reply.status == FrameStatus.OK
        assert codec.decode_welcome(payload).flags == HelloFlag.SAMPLED
        entries = [entry(slot, 0, 1, DRAFT | NEW) for slot in range(3)]
        # The second one's is no temperature: that entry alone is refused.
        sampling = [Sampling(5, 0.7), Sampling(5, wrong), Sampling(5, 0.0)]
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


def test_a_worker_without_the_quick_calls_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "load_round_calls", lambda: None)
    with serving() as server, Peer(server) as peer:
        peer.hello()
        assert peer.step(entry(0, 0, 2, DRAFT | NEW)).tokens.tolist() == ids(0, 0, 2)
        assert peer.step(entry(0, 2, 1)).tokens.tolist() == ids(0, 0, 3)


def test_more_slots_than_a_sampled_reply_has_room_for_are_refused_HELLO_LIMITS() -> None:
    with serving(drawing(slots=4096), slots=4096) as server, Peer(server) as peer:
        status, message = peer.refused(replace(HELLO, flags=HelloFlag.SAMPLED, slots=4000))
        assert status == FrameStatus.CONFIG
        assert re.search(r"a reply for 4000 slots of 5 drafts has \d+ bytes, at most 4194304", message)
        assert peer.hello(replace(HELLO, slots=4000))[0].status == FrameStatus.OK


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


def test_HALF_OPEN_only_what_an_engine_process_left_behind_is_superseded() -> None:
    with serving() as server, Peer(server, session=1) as moved, Peer(server, session=2) as ended, Peer(server) as other:
        ended.hello(replace(HELLO, instance=7))
        ended.ask(Operation.BYE)
        for instance in (7, 8, 8):
            moved.hello(replace(HELLO, instance=instance))
        other.hello(replace(HELLO, instance=7))
        for peer in (moved, ended, other):
            assert peer.ask(Operation.PING)[0].status == FrameStatus.OK
        assert server.sessions == 2
