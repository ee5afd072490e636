"""The quick calls of a round against their Python forms, over the same random inputs: what they answer, Python answers, too."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.drafters import info

from farspark.engine import replies
from farspark.engine.replies import find_fault
from farspark.errors import ProtocolError
from farspark.native import round_calls
from farspark.native.build import ROUNDCALLS, NativeUnavailable, compile_library
from farspark.native.round_calls import ALL, CAME, ENDED, LATE, RoundCalls, open_round_calls
from farspark.stats import Stats
from farspark.transport.ends import NEVER_NS
from farspark.wire import codec
from farspark.wire.layout import EntryFlag, RequestStatus, StepFlag
from farspark.wire.messages import Entry, EntryReply, Step, StepReply
from farspark.worker.batch import DraftEntry
from farspark.worker.session import Session, SlotPool

N, VOCAB, CONTEXT, SLOTS, SESSION, MAX_ROWS = 3, 50, 8, 4, 0xFEED, 20
INFO = info(num_drafts=N, vocab_size=VOCAB, context=CONTEXT, slots=SLOTS, max_position=200)
WHOLE = 0xFFFFFFFF
STATUSES = tuple(RequestStatus)
MARGINS = int(StepFlag.MARGINS)
NEED, NEW = int(EntryFlag.NEED_DRAFT), int(EntryFlag.NEW_GEN)


# A build that is to be tested instead of one of the sources.
BUILD = "TEST_ROUND_CALLS"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> RoundCalls:
    if BUILD in os.environ:
        return open_round_calls(Path(os.environ[BUILD]))
    return open_round_calls(compile_library(tmp_path_factory.mktemp("calls") / "libroundcalls.so", ROUNDCALLS))


def flipped(chance: random.Random, frame: bytes) -> bytes:
    """The frame, or the same with a few bits or bytes wrong, or cut short or longer."""
    changed = bytearray(frame)
    kind = chance.randrange(4)
    for _ in range(chance.randrange(1, 3) if kind else 0):
        at = chance.randrange(min(len(changed), 120))
        changed[at] = changed[at] ^ 1 << chance.randrange(8) if kind == 1 else chance.choice((0, 1, 255))
    if kind == 3 and chance.random() < 0.3:
        return bytes(changed) + b"x" if chance.random() < 0.5 else bytes(changed[:-1])
    return bytes(changed)


# The worker's side.


class Engine:
    """Makes STEPs for a few slots, most of them ordinary: it looks up what the worker holds."""

    def __init__(self, chance: random.Random, worker: Session) -> None:
        self.chance = chance
        self.worker = worker
        self.steps = 0

    def entry(self, slot: int) -> Entry:
        chance, held = self.chance, self.worker._held.get(slot)
        generation, first_pos, flags = (held.generation, held.end, NEED) if held and not held.is_void else (1, 0, NEED)
        if held is None or held.is_void or held.end > 210 or chance.random() < 0.05:
            generation, first_pos, flags = generation + 1, chance.choice((0, 5)), NEED | NEW
        n_rows = chance.randrange(1, N + 2) if chance.random() < 0.9 else chance.randrange(CONTEXT - 1, CONTEXT + 3)
        if chance.random() < 0.03:
            first_pos = max(0, first_pos + chance.choice((-1, 1)))
        fields = [slot, generation, first_pos, n_rows, chance.randrange(VOCAB), first_pos + n_rows, flags]
        fields += [chance.randrange(N + 1), chance.choice((0, 1, N))]
        if chance.random() < 0.05:
            field = chance.randrange(9)
            fields[field] = max(0, fields[field] + chance.choice((-1, 1, 1000)))
        if chance.random() < 0.03:
            fields[6] = chance.choice((0, NEED, 7, 15))
        return Entry(*fields)

    def frame(self) -> bytes:
        chance = self.chance
        self.steps += 1
        slots = chance.sample(range(SLOTS), chance.randrange(1, SLOTS + 1))
        if chance.random() < 0.03:
            slots[-1] = slots[0]
        entries = [self.entry(slot) for slot in slots]
        n_rows = min(2 * MAX_ROWS, sum(entry.n_rows for entry in entries)) + (chance.random() < 0.03)
        flags = chance.choice((0, 0, MARGINS))
        head = bytearray(
            codec.encode_step_head(SESSION, self.steps, self.steps, entries, n_rows * INFO.row_bytes, flags)
        )
        head[44:48] = n_rows.to_bytes(4, "little")  # what is announced: not always what the entries have
        return bytes(head) + chance.randbytes(n_rows * INFO.row_bytes)


def plainly(session: Session, frame: memoryview) -> tuple[int, Any, bytes] | None:
    """What `Session.begin` finds, as the server does it otherwise."""
    found = codec.peek_step(frame, SESSION)
    if found is None:
        return None
    try:
        step = codec.decode_step(frame[32:], INFO.row_bytes)
    except ProtocolError:
        return None
    if len(step.rows) > MAX_ROWS * INFO.row_bytes or int(step.flags) & StepFlag.SAMPLED:
        return None
    plan = session.plan(step)
    expected = StepReply(step.step_id, N, 0, plan.replies, memoryview(b""), memoryview(b""), None, step.flags)
    return found[0].sequence, plan, bytes(codec.encode_step_reply_head(SESSION, found[0].sequence, expected))


@pytest.mark.parametrize("seed", range(2))
def test_a_step_is_begun_as_python_begins_it(calls: RoundCalls, seed: int) -> None:
    chance = random.Random(seed)
    sessions = [Session(INFO, SlotPool(SLOTS), slots=SLOTS, context=CONTEXT, stats=Stats()) for _ in range(2)]
    engine = Engine(chance, sessions[1])
    ordinary = 0
    for _ in range(1500):
        frame = memoryview(flipped(chance, engine.frame()))
        arrived = len(frame) if chance.random() < 0.7 else chance.randrange(len(frame) + 1)
        before = copy.deepcopy(sessions[0]._held)
        quick = sessions[0].begin(calls, frame, arrived, SESSION, MAX_ROWS)
        expected = plainly(sessions[1], frame)
        if quick is None:
            assert sessions[0]._held == before
            plainly(sessions[0], frame)
        else:
            ordinary += 1
            assert expected is not None
            sequence, plan, head = quick
            assert (sequence, plan, bytes(head)) == expected
            assert {type(one) for one in plan.step.entries} == {Entry}
            assert {type(one) for one in plan.replies} == {EntryReply}
            assert {type(one) for one in plan.drafts} == {DraftEntry}
            assert all(type(one.status) is RequestStatus for one in plan.replies)
            assert arrived >= 48 + 32 * len(plan.replies)
        assert sessions[0]._held == sessions[1]._held
    assert ordinary > 60, ordinary


def test_an_ordinary_step_is_begun_once_its_entries_are_there(calls: RoundCalls) -> None:
    session = Session(INFO, SlotPool(SLOTS), slots=SLOTS, context=CONTEXT, stats=Stats())
    new = [Entry(slot, 1, 0, 2, 7, 2, NEED | NEW) for slot in range(SLOTS)]
    session.plan(Step(1, new, memoryview(bytes(SLOTS * 2 * INFO.row_bytes))))
    entries = [Entry(slot, 1, 2, 4, 7, 6, NEED, N) for slot in range(SLOTS)]
    rows = bytes(SLOTS * 4 * INFO.row_bytes)
    frame = memoryview(codec.encode_step_head(SESSION, 2, 2, entries, len(rows)) + rows)
    assert session.begin(calls, frame, 48 + 32 * SLOTS - 1, SESSION, MAX_ROWS) is None
    assert session.begin(calls, frame, 48 + 32 * SLOTS, SESSION + 1, MAX_ROWS) is None
    assert session.begin(calls, frame, 48 + 32 * SLOTS, SESSION, 15) is None
    begun = session.begin(calls, frame, 48 + 32 * SLOTS, SESSION, 16)
    assert begun is not None
    assert begun[1].step.rows == rows
    assert (begun[1].verified, begun[1].accepted) == (4 * N, 4 * N)


# The client's side.


def some_entries(chance: random.Random, count: int) -> list[Entry]:
    entries = []
    for slot in range(count):
        fields = [
            slot,
            chance.randrange(3),
            chance.randrange(9),
            1,
            chance.randrange(-2, 9),
            9,
            chance.choice((0, 1, 3)),
        ]
        fields += [chance.randrange(4), chance.choice((0, 1, N))]
        if chance.random() < 0.05:
            fields[chance.randrange(9)] = chance.choice((-1, 1 << 16, 1 << 31, 1 << 32, 1 << 70))
        entries.append(Entry(*fields))
    return entries


def test_the_head_of_a_step_is_what_python_makes_of_it(calls: RoundCalls) -> None:
    chance = random.Random(1)
    quick = 0
    for _ in range(1500):
        arguments = (
            chance.choice((0, SESSION, (1 << 64) - 1, 1 << 64)),
            chance.randrange(9),
            chance.choice((1, (1 << 64) - 1)),
            some_entries(chance, chance.randrange(6)),
            chance.choice((0, 64, 1 << 31, 1 << 32)),
            chance.choice((0, MARGINS)),
        )
        head = calls.step_head(*arguments)
        try:
            expected = codec.encode_step_head(*arguments)
        except ValueError:
            assert head is None
        else:
            assert head in (None, expected)
            quick += head is not None
    assert quick > 400
    assert calls.step_head(1, 1, 1, [Entry(0, 1, 0, 1, 7, 1, NEED, N)] * 65, 0, 0) is None


def some_reply(chance: random.Random, entries: list[Entry]) -> StepReply:
    """Most are right."""
    replies, tokens, confidences = [], [], []
    for one in entries:
        status = RequestStatus(chance.choice((0, 1)) if one.flags & NEED else 2)
        if chance.random() < 0.05:
            status = chance.choice(STATUSES)
        wanted = (one.n_out or N) if status.has_drafts else 0
        replies.append(EntryReply(one.slot, one.generation, chance.randrange(CONTEXT + 1), status))
        tokens += [chance.randrange(VOCAB) if place < wanted else 0 for place in range(N)]
        confidences += [chance.random() if place < wanted else 0.0 for place in range(N)]
    if replies and chance.random() < 0.3:
        at, value = chance.randrange(len(tokens)), chance.random()
        if value < 0.3:
            tokens[at] = chance.choice((-1, VOCAB - 1, VOCAB, 1, 1 << 30))
        elif value < 0.6:
            confidences[at] = chance.choice((-0.5, -0.0, 1.0, 1.5, float("nan"), float("inf"), 0.25))
        else:
            index = chance.randrange(len(replies))
            numbers = list(replies[index][:3])
            numbers[chance.randrange(3)] = chance.choice((0, 1, CONTEXT, CONTEXT + 1))
            replies[index] = EntryReply(numbers[0], numbers[1], numbers[2], replies[index].status)
    margins = None
    if chance.random() < 0.4:
        values = [chance.choice((0.0, 2.5)) for _ in tokens]
        if values and chance.random() < 0.2:
            values[-1] = chance.choice((-1.0, -0.0, float("nan"), float("inf")))
        margins = memoryview(struct.pack(f"<{len(values)}f", *values)).cast("f")
    return StepReply(
        chance.choice((7, 7, 7, 8)),
        N,
        chance.choice((0, 12, 1 << 33)),
        replies,
        memoryview(struct.pack(f"<{len(tokens)}i", *tokens)).cast("i"),
        memoryview(struct.pack(f"<{len(confidences)}f", *confidences)).cast("f"),
        margins,
        0 if margins is None else MARGINS,
    )


def sane_entries(chance: random.Random) -> list[Entry]:
    return [
        Entry(slot, 1, 3, 2, 7, 5, chance.choice((NEED, NEED, 0)), 0, chance.choice((0, 1, 2, N)))
        for slot in range(chance.randrange(1, 6))
    ]


def test_a_reply_is_faultless_only_where_python_finds_no_fault(
    calls: RoundCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(2)
    faultless = faulty = missed = 0
    for _ in range(2000):
        entries = sane_entries(chance)
        reply = some_reply(chance, entries)
        want_margins = chance.random() < 0.5 if chance.random() < 0.1 else reply.margins is not None
        with monkeypatch.context() as patch:
            patch.setattr(replies, "ready_round_calls", lambda: None)
            fault = find_fault(
                reply, entries, step_id=7, num_drafts=N, vocab_size=VOCAB, context=CONTEXT, want_margins=want_margins
            )
        if calls.is_faultless(reply, entries, 7, N, VOCAB, CONTEXT, want_margins):
            assert fault is None
            faultless += 1
        elif fault is None:
            missed += 1  # -0.0 is left to Python
            assert any(
                "-0.0" in str(array.tolist()) for array in (reply.confidences, reply.margins) if array is not None
            )
        else:
            faulty += 1
    assert faultless > 600
    assert faulty > 300
    assert missed < 100


def test_an_answer_is_read_as_python_reads_it(calls: RoundCalls) -> None:
    chance = random.Random(3)
    read = 0
    for _ in range(1500):
        reply = some_reply(chance, sane_entries(chance))
        whole = b"".join(
            [codec.encode_step_reply_head(SESSION, 5, reply), *codec.finish_step_reply(bytearray(200), reply)[1:]]
        )
        frame = memoryview(flipped(chance, whole))
        got = calls.read_answer(frame, SESSION, 5, StepReply, EntryReply, STATUSES)
        if got is None:
            continue
        read += 1
        expected = codec.decode_answer(frame, SESSION, 5)
        assert expected is not None
        assert bytes(got.tokens) == bytes(expected.tokens)
        assert bytes(got.confidences) == bytes(expected.confidences)
        assert (got.tokens.format, got.confidences.format) == ("i", "f")
        assert (got.margins is None) == (expected.margins is None)
        assert got.margins is None or bytes(got.margins) == bytes(expected.margins or b"")
        assert got[:4] == expected[:4]
        assert got[7:] == expected[7:]
        assert type(got) is StepReply
        assert {type(one) for one in got.entries} == {EntryReply}
    assert read > 500


def test_a_reply_is_finished_as_python_finishes_it(calls: RoundCalls) -> None:
    chance = random.Random(4)
    for _ in range(800):
        reply = some_reply(chance, sane_entries(chance))
        if chance.random() < 0.2:
            wrong = chance.choice((reply.tokens.cast("B"), reply.confidences, memoryview(b"")))
            reply = reply._replace(tokens=wrong)
        heads = [codec.encode_step_reply_head(SESSION, 5, reply) for _ in range(2)]
        got = calls.finish_reply(heads[0], reply)
        try:
            expected = codec.finish_step_reply(heads[1], reply)
        except ValueError:
            assert got is None
            continue
        assert got is not None
        assert got[0] is heads[0]
        assert [bytes(piece) for piece in got] == [bytes(piece) for piece in expected]
    assert calls.finish_reply(bytearray(3), reply) is None


MOST = 64  # requests, and drafts of each, beyond which nothing is ordinary


@pytest.mark.parametrize(("count", "drafts"), [(MOST, MOST), (MOST + 1, MOST), (MOST, MOST + 1)])
def test_the_greatest_step_and_answer_are_what_python_makes_of_them_and_greater_ones_are_pythons(
    calls: RoundCalls, count: int, drafts: int
) -> None:
    is_ordinary = max(count, drafts) <= MOST
    chance = random.Random(8)
    entries = [Entry(slot, 1, 2, 1, 7, 3, NEED, 1, 0) for slot in range(count)]
    rows = bytes(count * INFO.row_bytes)
    head = codec.encode_step_head(SESSION, 2, 7, entries, len(rows), MARGINS)
    assert calls.step_head(SESSION, 2, 7, entries, len(rows), MARGINS) == (head if count <= MOST else None)

    tokens = [chance.randrange(VOCAB) for _ in range(count * drafts)]
    shares = [chance.random() for _ in tokens]
    floats = memoryview(struct.pack(f"<{len(shares)}f", *shares)).cast("f")
    reply = StepReply(
        7,
        drafts,
        0,
        [EntryReply(slot, 1, 3, RequestStatus.OK) for slot in range(count)],
        memoryview(struct.pack(f"<{len(tokens)}i", *tokens)).cast("i"),
        floats,
        floats,
        MARGINS,
    )
    of_reply = bytes(codec.encode_step_reply_head(SESSION, 2, reply))
    drafter = info(num_drafts=drafts, vocab_size=VOCAB, context=CONTEXT, slots=count, max_position=200)
    new = Step(1, [Entry(slot, 1, 0, 2, 7, 2, NEED | NEW) for slot in range(count)], memoryview(rows * 2))
    sessions = [Session(drafter, SlotPool(count), slots=count, context=CONTEXT, stats=Stats()) for _ in range(2)]
    for session in sessions:
        session.plan(new)
    frame = memoryview(head + rows)
    begun = sessions[0].begin(calls, frame, len(frame), SESSION, count)
    if is_ordinary:
        assert begun is not None
        assert begun[:2] == (2, sessions[1].plan(codec.decode_step(frame[32:], INFO.row_bytes)))
        assert bytes(begun[2]) == of_reply
    else:
        assert begun is None

    pieces = calls.finish_reply(bytearray(of_reply), reply)
    expected = codec.finish_step_reply(bytearray(of_reply), reply)
    assert pieces == (expected if is_ordinary else None)
    whole = memoryview(b"".join(expected))
    read = calls.read_answer(whole, SESSION, 2, StepReply, EntryReply, STATUSES)
    assert read == (codec.decode_answer(whole, SESSION, 2) if is_ordinary else None)
    assert calls.is_faultless(reply, entries, 7, drafts, VOCAB, CONTEXT, True) == is_ordinary


def test_what_is_no_tuple_or_no_list_is_left_to_python(calls: RoundCalls) -> None:
    reply = some_reply(random.Random(5), [])
    assert calls.step_head(1, 1, 1, (), 0, 0) is None
    assert calls.step_head(1, 1, 1, ["entry"], 0, 0) is None
    assert not calls.is_faultless("reply", [], 7, N, VOCAB, CONTEXT, False)
    assert not calls.is_faultless(reply._replace(entries=()), [], 7, N, VOCAB, CONTEXT, False)
    with pytest.raises(TypeError, match="types of tuples"):
        calls.read_answer(memoryview(b"frame"), 1, 1, dict, EntryReply, STATUSES)
    with pytest.raises(TypeError, match="arguments, expected"):
        calls.begin_step()  # type: ignore[call-arg]


# Frames.


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def at(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_a_read_stops_where_something_is_to_be_decided(
    calls: RoundCalls, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    memory = bytearray(64)

    def receive(to: int, wanted: int = WHOLE, limit: int = 60, until_ns: int | None = None) -> memoryview | int:
        return calls.receive(ours.fileno(), memory, to, wanted, limit, 0, at(5) if until_ns is None else until_ns)

    assert receive(0, until_ns=0) == LATE
    theirs.sendall(b"\x06\0")
    assert receive(0, until_ns=at(0.01)) == 4 * 2 + LATE
    theirs.sendall(b"\0\0abc")
    assert receive(2, 3) == 4 * 7 + CAME
    theirs.sendall(b"def\x02\0\0\0hi")
    assert receive(7, until_ns=0) == memoryview(b"abcdef")
    assert receive(0) == memoryview(b"hi")
    theirs.sendall(b"\x01\0\0\0a\x01")
    assert receive(0) == 4 * 6 + CAME  # a frame, and the begin of another
    theirs.sendall(b"\x3d\0\0\0")
    assert receive(0) == 4 * 4 + CAME  # above the limit, and above the memory
    theirs.sendall(b"\x02\0\0\0a")
    theirs.close()
    assert receive(0, until_ns=NEVER_NS) == 4 * 5 + ENDED
    with pytest.raises(ValueError, match="more is there"):
        receive(65)


def test_a_send_says_how_much_is_out(calls: RoundCalls, pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    assert calls.send(ours.fileno(), [b"ab", memoryview(bytearray(b"cd")), b""]) == ALL
    assert theirs.recv(100) == b"\x04\0\0\0abcd"
    assert calls.send(ours.fileno(), [b"x"] * 33) == 0  # left to Python
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    large = bytes(10_000_000)
    sent = calls.send(ours.fileno(), [large])
    assert 0 < sent < len(large)
    assert calls.send(ours.fileno(), [large]) == 0
    with pytest.raises(BufferError):
        calls.send(ours.fileno(), [memoryview(b"abcd")[::2]])
    with pytest.raises(TypeError):
        calls.send(ours.fileno(), ["text"])  # type: ignore[list-item]
    theirs.close()
    with pytest.raises(BrokenPipeError):
        calls.send(ours.fileno(), [b"x"])
    with pytest.raises(OSError, match="Bad file descriptor"):
        calls.send(-1, [b"x"])


def test_an_exchange_of_which_not_all_fits_says_how_much_is_out(
    calls: RoundCalls, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    memory = bytearray(100)
    answering = threading.Thread(target=lambda: theirs.sendall(b"\x02\0\0\0" + theirs.recv(6)[4:]))
    answering.start()
    assert calls.exchange(ours.fileno(), [b"hi"], memory, 100, 0, at(5)) == memoryview(b"hi")
    answering.join()
    assert calls.exchange(ours.fileno(), [b"hi"], memory, 100, 1000, at(0.01)) == LATE
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    sent = calls.exchange(ours.fileno(), [bytes(10_000_000)], memory, 100, 0, at(5))
    assert type(sent) is int
    assert -10_000_000 < sent < -1


def test_memory_cannot_be_resized_while_a_frame_is_read_into_it(
    calls: RoundCalls, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    memory = bytearray(100)
    outcome: list[memoryview | int] = []

    def receive() -> None:
        outcome.append(calls.receive(ours.fileno(), memory, 0, WHOLE, 60, 0, at(5)))

    reading = threading.Thread(target=receive)
    reading.start()
    time.sleep(0.05)
    with pytest.raises(BufferError):
        memory.append(0)
    theirs.sendall(b"\x01\0\0\0x")
    reading.join()
    assert outcome == [memoryview(b"x")]


def test_calls_of_many_threads_do_not_disturb_each_other(calls: RoundCalls) -> None:
    def ask(sock: socket.socket, name: bytes) -> None:
        memory = bytearray(100)
        for number in range(100):
            question = b"%s %d" % (name, number)
            answer = calls.exchange(sock.fileno(), [b"to ", question], memory, 100, 1000 * (number % 2), at(20))
            right.append(answer == memoryview(b"re to " + question))
            del answer

    def answer(sock: socket.socket) -> None:
        memory = bytearray(100)
        for _ in range(100):
            question = calls.receive(sock.fileno(), memory, 0, WHOLE, 100, 0, at(20))
            assert isinstance(question, memoryview)
            assert calls.send(sock.fileno(), [b"re ", question]) == ALL
            del question

    right: list[bool] = []
    pairs = [socket.socketpair() for _ in range(3)]
    threads = [threading.Thread(target=answer, args=(theirs,)) for _, theirs in pairs]
    threads += [threading.Thread(target=ask, args=(ours, b"of %d" % number)) for number, (ours, _) in enumerate(pairs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in (sock for both in pairs for sock in both):
        one.close()
    assert right == [True] * 300


class Tensor:
    """What is looked at of one, each time a new object, so that one that is kept is found."""

    def __init__(self, address: int, dtype: object = "int32", stride: object = (1,), shape: object = (2,)) -> None:
        self.address, self.dtype, self._stride, self.shape = address, dtype, stride, shape

    def data_ptr(self) -> int:
        return self.address ^ 0

    def stride(self) -> object:
        return (*self._stride,) if isinstance(self._stride, tuple) else self._stride

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.address} {self.dtype} {self._stride} {self.shape}"


class Gone(Tensor):
    def data_ptr(self) -> int:
        raise RuntimeError("planted")


def tap(address: int, **other: Any) -> Tensor:
    return Tensor(address, **{"dtype": "bf16", "stride": (64, 1), "shape": (9, 60), **other})


KEPT = Tensor(0), Tensor(0)
STEP = {
    "hidden": [tap(0x100), tap(0x200)],
    "positions": Tensor(1, "int64"),
    "query_start_loc": Tensor(2),
    "slots": Tensor(3),
    "num_sampled": Tensor(4),
    "num_rejected": Tensor(5),
    "last_sampled": KEPT[0],
    "next_prefill_tokens": KEPT[1],
    "row_bound": 7,
    "wants_drafts": True,
    "temperature": Tensor(9, "float32"),
    "seeds": Tensor(10, "int64"),
}


class Filled:
    """A launch that nobody makes."""

    def __init__(self, calls: RoundCalls) -> None:
        self.values = (ctypes.c_uint64 * 29)(*range(500, 529))
        self.grid = (ctypes.c_uint32 * 3)(9, 4, 1)
        self.calls = calls

    def refill(self, rows: int = 0x1000, meta: int = 6, *, is_sampled: bool = True, **change: Any) -> int:
        dtypes = ("int64", *["int32"] * 4, "bf16", *(("float32", "int64") if is_sampled else (None, None)))
        known = (ctypes.addressof(self.values), ctypes.addressof(self.grid), 20, 4, KEPT, dtypes, (64, 1), 2, 60)
        return self.calls.refill_gather(known, tuple((STEP | change).values()), rows, meta)


def test_a_gathers_launch_is_filled_for_a_step_of_a_known_kind(calls: RoundCalls) -> None:
    filled = Filled(calls)
    assert filled.refill() == 2
    first = [0x100, 0x200, *[0x100] * 6]
    assert filled.values[:] == [
        *first,
        508,
        1,
        2,
        3,
        4,
        5,
        *range(514, 517),
        9,
        10,
        0x1000,
        520,
        6,
        2,
        523,
        524,
        1,
        526,
        527,
        528,
    ]
    assert filled.grid[:] == [7, 4, 1]
    assert (
        filled.refill(wants_drafts=False, row_bound=20, slots=Tensor(8, shape=(4,)), hidden=(tap(0x300), tap(0x10)))
        == 4
    )
    assert (filled.values[25], filled.grid[0], filled.values[11], filled.values[22]) == (0, 20, 8, 4)
    assert filled.values[:3] == [0x300, 0x10, 0x300]


def test_where_drafts_are_not_sampled_nobody_looks_at_what_they_would_be_sampled_with(calls: RoundCalls) -> None:
    filled = Filled(calls)
    assert filled.refill(is_sampled=False, temperature=None, seeds=object()) == 2
    assert filled.values[17:19] == [517, 518]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": [tap(0x100)]},
        {"hidden": [tap(0x100), tap(0x208)]},
        {"hidden": [tap(0x100), tap(0x200, dtype="float32")]},
        {"hidden": [tap(0x100), tap(0x200, stride=(128, 1))]},
        {"hidden": [tap(0x100), tap(0x200, stride=None)]},
        {"hidden": [tap(0x100), tap(0x200, shape=(9, 59))]},
        {"hidden": [tap(0x100, shape=(9, 61)), tap(0x200)]},
        {"hidden": [tap(0x100), tap(0x200, shape=(60,))]},
        {"hidden": [tap(0x100), tap(0x200, shape=[9, 60])]},
        {"hidden": [tap(0x100), Gone(0x200, "bf16", (64, 1), (9, 60))]},
        {"hidden": [tap(0x100), "no tensor"]},
        {"hidden": [tap(0x100) for _ in range(9)]},
        {"hidden": 5},
        {"positions": Tensor(1)},
        {"num_rejected": Tensor(5, "int64")},
        {"num_rejected": Tensor(-5)},
        {"query_start_loc": Gone(2)},
        {"slots": Tensor(3, shape=(5,))},
        {"slots": Tensor(3, shape=(0,))},
        {"slots": Tensor(3, shape=())},
        {"slots": None},
        {"last_sampled": Tensor(0)},
        {"next_prefill_tokens": Tensor(0)},
        {"temperature": None},
        {"seeds": Tensor(10)},
        {"row_bound": 0},
        {"row_bound": 21},
        {"row_bound": 1 << 70},
        {"row_bound": "7"},
        {"rows": 0x1008},
        {"meta": -1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_step_of_another_kind_leaves_the_launch_as_it_was(change: dict[str, Any], calls: RoundCalls) -> None:
    filled = Filled(calls)
    assert filled.refill(**change) == 0
    assert (filled.values[:], filled.grid[:]) == ([*range(500, 529)], [9, 4, 1])


def test_a_round_is_described_whole_or_not_at_all(calls: RoundCalls) -> None:
    record = bytearray(b"\xee" * 80)
    address = ctypes.addressof((ctypes.c_char * 80).from_buffer(record))
    for wrong in ([1 << 31, 0], [1], [1, 2, 3], [1, "2"], (1, 2), None, [-1, 0]):
        assert not calls.describe_round(address, 9, wrong, [7, 1 << 63], [3, 2], True)  # type: ignore[arg-type]
        assert not calls.describe_round(address, 9, [1, 2], [7, 1 << 63], wrong, True)  # type: ignore[arg-type]
    for wrong in ([7], [7, 1 << 64], [-1, 7], None):
        assert not calls.describe_round(address, 9, [1, 2], wrong, 0, True)  # type: ignore[arg-type]
    assert not calls.describe_round(address, 9, [], [], 0, True)
    assert not calls.describe_round(address, 9, [0] * 65, [0] * 65, 0, True)
    assert record == b"\xee" * 80
    assert calls.describe_round(address, 9, [1, 2], [7, 1 << 63], [3, 2], True)
    assert record == struct.pack("<IIII2Q4i", 9, 2, 1, 0, 7, 1 << 63, 1, 2, 3, 2) + b"\xee" * 32
    assert calls.describe_round(address, WHOLE, [3], [4], 5, False)
    assert record[:32] == struct.pack("<IIIIQ2i", WHOLE, 1, 0, 0, 4, 3, 5)
    with pytest.raises(TypeError, match="1 arguments, expected 6"):
        calls.describe_round(address)  # type: ignore[call-arg]


def test_a_round_is_handed_over_without_the_gil_and_what_the_page_says_comes_back(calls: RoundCalls) -> None:
    round_ = bytearray(b"\xee" * 64)
    address = ctypes.addressof((ctypes.c_char * 64).from_buffer(round_))
    seen: list[tuple[int, int, bytes]] = []

    def submit(page: int, device: int, round_at: int) -> int:
        seen.append((page, device, ctypes.string_at(round_at, 40)))
        return 7

    callback = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 3)(submit)
    at_submit = ctypes.cast(callback, ctypes.c_void_p).value or 0
    assert calls.submit_round(at_submit, 11, 1 << 63, address, 13, 14, 15, WHOLE) == 7
    assert seen == [(11, 1 << 63, struct.pack("<QQQIIIi", 13, 14, 15, WHOLE, 0, 0, 0))]
    assert round_[40:] == b"\xee" * 24
    with pytest.raises(OverflowError):
        calls.submit_round(at_submit, -1, 12, address, 13, 14, 15, 16)
    assert len(seen) == 1


def test_the_functions_are_those_that_python_declares(calls: RoundCalls) -> None:
    declared = {name for name, value in vars(RoundCalls).items() if callable(value) and not name.startswith("_")}
    assert set(vars(calls)) == declared


@pytest.mark.slow
@pytest.mark.parametrize(("sanitizer", "runtime"), [("address,undefined", "libasan.so"), ("thread", "libtsan.so")])
def test_all_of_this_passes_under_a_sanitizer(sanitizer: str, runtime: str, sources: Path, tmp_path: Path) -> None:
    built = tmp_path / "libroundcalls.so"
    flags = [flag for flag in ROUNDCALLS.flags if flag != "-O2"]
    files = [str(sources / name) for name in ROUNDCALLS.sources]
    include = [f"-I{directory}" for directory in ROUNDCALLS.include]
    instrument = ["-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["cc", *flags, *instrument, *include, *files, "-o", str(built)], check=True)
    found = subprocess.run(["cc", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True)
    environment = {
        **os.environ,
        BUILD: str(built),
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own, at its end
    }
    tests = [__file__, str(Path(__file__).with_name("test_serve.py"))]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_calls_keep_no_memory(calls: RoundCalls) -> None:
    session = Session(INFO, SlotPool(SLOTS), slots=SLOTS, context=CONTEXT, stats=Stats())
    chance = random.Random(6)
    engine = Engine(chance, session)
    ours, theirs = socket.socketpair()
    memory = bytearray(4096)

    def round_trip() -> None:
        frame = memoryview(engine.frame())
        if session.begin(calls, frame, len(frame), SESSION, MAX_ROWS) is None:
            plainly(session, frame)
        entries = sane_entries(chance)
        reply = some_reply(chance, entries)
        calls.step_head(SESSION, 1, 1, entries, 64, 0)
        calls.is_faultless(reply, entries, 7, N, VOCAB, CONTEXT, False)
        head = codec.encode_step_reply_head(SESSION, 5, reply)
        pieces = calls.finish_reply(head, reply)
        assert pieces is not None
        calls.read_answer(memoryview(b"".join(pieces)), SESSION, 5, StepReply, EntryReply, STATUSES)
        assert calls.send(ours.fileno(), pieces) == ALL
        calls.receive(theirs.fileno(), memory, 0, WHOLE, 4000, 0, at(5))
        for change in ({}, {"positions": Tensor(1)}, {"hidden": [tap(1 << 70), tap(0x200)]}, {"row_bound": "7"}):
            assert (filled.refill(1 << 60, 1 << 60, **change) == 0) == bool(change)
        assert calls.describe_round(address, 1 << 31, [1 << 30], [1 << 62], 1 << 29, False)
        assert not calls.describe_round(address, 1 << 31, [1 << 30], [1 << 62], "7", False)  # type: ignore[arg-type]

    filled = Filled(calls)
    record = (ctypes.c_char * 64)()
    address = ctypes.addressof(record)
    with ours, theirs:
        for _ in range(200):
            round_trip()
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(500):
                round_trip()
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    # One object of each call kept would be 500 times 28 bytes at least.
    assert grown < 10_000


def test_nobody_compiles_who_has_no_time_for_it() -> None:
    program = (
        "from farspark.native.round_calls import load_round_calls, ready_round_calls\n"
        "import farspark.native.round_calls as module\n"
        "module.open_round_calls = lambda: 'calls'\n"
        "print(ready_round_calls(), load_round_calls(), ready_round_calls())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "None calls calls\n"


def test_without_a_build_the_log_says_so_once_and_rounds_go_on(caplog: pytest.LogCaptureFixture) -> None:
    def none() -> RoundCalls:
        raise NativeUnavailable("no compiler")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(round_calls, "open_round_calls", none)
        assert round_calls.load_round_calls.__wrapped__() is None
    assert caplog.messages == ["rounds go without the quick calls of a round, some 50 us slower: no compiler"]


def test_python_and_the_sources_agree(sources: Path) -> None:
    header = (sources / "round_calls.h").read_text()
    assert f"#define ROUNDCALLS_VERSION {ROUNDCALLS.version}u" in header
    assert "#define ROUNDCALLS_NEVER INT64_MAX" in header
    assert NEVER_NS == 2**63 - 1
