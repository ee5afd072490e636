"""A whole round in one native call, over random rounds and answers: what it does, Python's own forms find right."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.native.test_round_calls import BUILD, CONTEXT, MOST, NEED, SESSION, VOCAB, N, flipped, some_reply

from farspark.engine import replies
from farspark.engine.replies import find_fault
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.native import Status
from farspark.native.build import ROUNDCALLS, compile_library
from farspark.native.round_calls import (
    CAME,
    ENDED,
    LATE,
    UNPUBLISHED,
    OrdinaryRound,
    RoundCalls,
    Served,
    head_room,
    open_round_calls,
    pack_round,
)
from farspark.wire import codec
from farspark.wire.layout import RequestStatus
from farspark.wire.messages import Entry, EntryReply, StepReply

M, ROW_BYTES, MAX_ROWS, ROUND, SEQUENCE, STEP_ID, DEPTH = 6, 24, 20, 77, 5, 7, 2
PAGE, WON, LOST = 0xABCD, 0, 1
LAYOUT = ResultLayout(M, N)
Publish = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32)
Wait = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, *[ctypes.c_int64] * 3)
SPIN_NS, NAP_NS, UNTIL_NS = 3, 4, 1 << 40


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> RoundCalls:
    if BUILD in os.environ:
        return open_round_calls(Path(os.environ[BUILD]))
    return open_round_calls(compile_library(tmp_path_factory.mktemp("serve") / "libroundcalls.so", ROUNDCALLS))


@dataclass
class Bench:
    """One engine's memory, and its connection to a worker that answers in advance."""

    calls: RoundCalls
    ours: socket.socket
    theirs: socket.socket
    layout: ResultLayout = LAYOUT
    verdict: int = WON
    awaited: int = 0  # how the wait for the data ends
    published: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = np.frombuffer(bytearray(b"what the host has said of it"), dtype=np.uint8)
        self.shared: npt.NDArray[np.int32] = np.zeros((self.layout.max_requests, 4), dtype=np.int32)
        self.rows = np.frombuffer(random.Random(9).randbytes(len(self.shared) * CONTEXT * ROW_BYTES), dtype=np.uint8)
        self.reply: npt.NDArray[np.int32] = np.full(self.layout.size, 99, dtype=np.int32)
        self.meta: npt.NDArray[np.int32] = np.empty((0, 4), dtype=np.int32)
        self.head = bytearray()
        self.memory = bytearray(1 << 16)
        self.publish = Publish(self.take)
        self.wait = Wait(self.wait_gathered)
        self.when_gathered: Callable[[], None] = lambda: None

    def take(self, page: int, round_: int, reply: int, size: int) -> int:
        assert (page, round_, size) == (PAGE, ROUND, 4 * self.layout.size)
        self.published.append(ctypes.string_at(reply, size))
        return self.verdict

    def wait_gathered(self, *arguments: int) -> int:
        assert arguments == (PAGE, ROUND, SPIN_NS, NAP_NS, UNTIL_NS)
        self.when_gathered()
        return self.awaited

    def serve(
        self, entries: list[Entry], *, timeout_ns: int = 20_000_000, limit: int = 1 << 16, **changes: Any
    ) -> Served | int:
        """Entries as Python would send them for the metadata in `shared`."""
        n = len(entries)
        values: dict[str, Any] = {
            "session": SESSION,
            "step_id": STEP_ID,
            "at_publish": ctypes.cast(self.publish, ctypes.c_void_p).value,
            "at_wait": ctypes.cast(self.wait, ctypes.c_void_p).value,
            "at_page": PAGE,
            "at_record": self.record.ctypes.data,
            "at_meta": self.shared.ctypes.data,
            "at_rows": self.rows.ctypes.data,
            "at_reply": self.reply.ctypes.data,
            "rows_room": len(self.rows),
            "timeout_ns": timeout_ns,
            "wait_spin_ns": SPIN_NS,
            "wait_nap_ns": NAP_NS,
            "round": ROUND,
            "requests": n,
            "row_bytes": ROW_BYTES,
            "context": CONTEXT,
            "max_rows": MAX_ROWS,
            "slots": self.layout.max_requests,
            "num_drafts": self.layout.num_drafts,
            "n_out": entries[0].n_out,
            "vocab_size": VOCAB,
            "depth": DEPTH,
            "reply_bytes": 4 * self.layout.size,
            "reserved": 0,
        }
        said = changes.pop("said", bytes(self.record))
        requests = [value for one in entries for value in (one.slot, one.generation, one.first_pos, one.k_window)]
        packed = pack_round(OrdinaryRound(**(values | changes)), requests)
        self.meta, self.head = np.full((n, 4), -1, dtype=np.int32), bytearray(head_room(n))
        self.memory = bytearray(1 << 16)
        return self.calls.serve(
            packed, said, self.meta, self.head, self.memory, SEQUENCE, self.ours.fileno(), limit, 2_000, UNTIL_NS
        )

    def sent(self) -> bytes:
        """Everything that came to the worker."""
        try:
            return self.theirs.recv(1 << 20, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return b""

    def drain(self) -> None:
        """Answers that nobody took."""
        for one in (self.ours, self.theirs):
            try:
                while one.recv(1 << 20, socket.MSG_DONTWAIT):
                    pass
            except BlockingIOError:
                pass
        self.published.clear()


@pytest.fixture
def bench(calls: RoundCalls) -> Iterator[Bench]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Bench(calls, ours, theirs)


def some_entries(chance: random.Random) -> list[Entry]:
    n_out = chance.choice((0, 0, 1, 2))
    slots = chance.sample(range(M), chance.randrange(1, M + 1))
    entries = []
    for slot in slots:
        first, n_rows = chance.randrange(1 << 20), chance.choice((1, 1, 2, 3, CONTEXT))
        token = chance.choice((0, VOCAB - 1, 1 << 30))
        entries.append(
            Entry(
                slot, chance.randrange(1 << 31), first, n_rows, token, first + n_rows, NEED, chance.randrange(4), n_out
            )
        )
    return entries


def describe(bench: Bench, entries: list[Entry]) -> None:
    bench.shared[:] = 0
    for row, one in enumerate(entries):
        bench.shared[row] = one.first_pos, one.n_rows, one.anchor_token, 1


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


def answer(reply: StepReply) -> bytes:
    return b"".join(
        [codec.encode_step_reply_head(SESSION, SEQUENCE, reply), *codec.finish_step_reply(bytearray(2000), reply)[1:]]
    )


def head_of(entries: list[Entry]) -> bytes:
    rows = sum(one.n_rows for one in entries) * ROW_BYTES
    return bytes(codec.encode_step_head(SESSION, SEQUENCE, STEP_ID, entries, rows, 0))


def result_of(entries: list[Entry], reply: StepReply, layout: ResultLayout = LAYOUT) -> bytes:
    result = PackedResult.empty(layout)
    result.clear(RoundOutcome.OK, len(entries))
    result.put(reply.tokens, reply.confidences, len(entries))
    result.depths[: len(entries)] = DEPTH
    return bytes(result.buffer)


def test_random_rounds_go_as_python_has_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "ready_round_calls", lambda: None)
    chance = random.Random(11)
    seen = Counter[str]()
    for _ in range(3000):
        bench.drain()
        bench.verdict = chance.choice((WON, WON, LOST))
        entries = some_entries(chance)
        describe(bench, entries)
        is_sound = sum(one.n_rows for one in entries) <= MAX_ROWS
        if chance.random() < 0.2:
            # The device says something else.
            row, column = chance.randrange(len(entries)), chance.randrange(4)
            value = int(bench.shared[row, column])
            bench.shared[row, column] = chance.choice((0, -1, CONTEXT + 1)) if column != 2 else value
            same = int(bench.shared[row, column]) == value
            is_sound = is_sound and (same or (column == 3 and bool(bench.shared[row, 3])))
        reply = some_reply(chance, entries)
        frame = answer(reply) if chance.random() < 0.7 else flipped(chance, answer(reply))
        bench.theirs.send(framed(frame))
        served = bench.serve(entries)
        came = bench.sent()
        if not is_sound:
            assert served == 0
            assert not came
            assert not bench.published
            seen["declined"] += 1
            continue
        assert isinstance(served, tuple)
        head_bytes, gathered_ns, sent_ns, answered_ns, ended_ns, status, got = served
        head, rows = head_of(entries), sum(one.n_rows for one in entries) * ROW_BYTES
        assert bytes(bench.head[:head_bytes]) == head
        assert came == framed(head + bytes(bench.rows[:rows]))
        assert (bench.meta == bench.shared[: len(entries)]).all()
        assert type(got) is memoryview
        assert bytes(got) == frame
        if status == UNPUBLISHED:
            assert not bench.published
            seen["left to Python"] += 1
            continue
        # Whatever is published, Python finds right and packs in the same way.
        assert status == bench.verdict
        assert 0 < gathered_ns <= sent_ns <= answered_ns <= ended_ns
        read = codec.decode_answer(memoryview(frame), SESSION, SEQUENCE)
        assert read is not None
        assert not find_fault(
            read, entries, step_id=STEP_ID, num_drafts=N, vocab_size=VOCAB, context=CONTEXT, want_margins=False
        )
        assert all(one.status.has_drafts for one in read.entries)
        assert bench.published == [result_of(entries, read)]
        seen["published"] += 1
    assert seen["published"] > 150, seen
    assert seen["declined"] > 300
    assert seen["left to Python"] > 300


def sound(bench: Bench) -> tuple[list[Entry], StepReply]:
    chance = random.Random(3)
    while True:
        entries = some_entries(chance)
        reply = some_reply(chance, entries)
        if (
            sum(one.n_rows for one in entries) <= MAX_ROWS
            and reply.step_id == STEP_ID
            and reply.margins is None
            and all(one.status.has_drafts for one in reply.entries)
            and not find_fault(
                reply, entries, step_id=STEP_ID, num_drafts=N, vocab_size=VOCAB, context=CONTEXT, want_margins=False
            )
        ):
            describe(bench, entries)
            return entries, reply


def test_a_sound_answer_is_published(bench: Bench) -> None:
    entries, reply = sound(bench)
    bench.theirs.send(framed(answer(reply)))
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert served[5] == WON
    assert bench.published == [result_of(entries, reply)]


@pytest.mark.parametrize(("count", "drafts"), [(MOST, MOST), (MOST + 1, MOST), (MOST, MOST + 1)])
def test_the_greatest_round_is_served_and_a_greater_one_is_pythons(calls: RoundCalls, count: int, drafts: int) -> None:
    chance = random.Random(12)
    entries = [Entry(slot, 1, 2, 1, 7, 3, NEED, 1, 0) for slot in range(count)]
    tokens = [chance.randrange(VOCAB) for _ in range(count * drafts)]
    shares = [chance.random() for _ in tokens]
    reply = StepReply(
        STEP_ID,
        drafts,
        0,
        [EntryReply(one.slot, 1, 3, RequestStatus.OK) for one in entries],
        memoryview(struct.pack(f"<{len(tokens)}i", *tokens)).cast("i"),
        memoryview(struct.pack(f"<{len(shares)}f", *shares)).cast("f"),
        None,
        0,
    )
    layout = ResultLayout(count, drafts)
    frame = answer(reply)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        bench = Bench(calls, ours, theirs, layout)
        describe(bench, entries)
        theirs.send(framed(frame))
        served = bench.serve(entries, max_rows=count)
        if count > MOST:
            assert served == 0
            assert not bench.sent()
        else:
            assert isinstance(served, tuple)
            assert bytes(served[6]) == frame  # type: ignore[arg-type]
        assert bench.published == ([result_of(entries, reply, layout)] if max(count, drafts) <= MOST else [])


def test_what_the_device_says_is_read_once_its_data_is_there(bench: Bench) -> None:
    entries, reply = sound(bench)
    bench.theirs.send(framed(answer(reply)))
    bench.shared[:] = 0
    bench.when_gathered = functools.partial(describe, bench, entries)
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert served[5] == WON
    assert (bench.meta == bench.shared[: len(entries)]).all()


@pytest.mark.parametrize("awaited", [Status.TIMED_OUT, Status.FINISHED, Status.ENDED, Status.CLOSED, Status.INVALID])
def test_a_round_that_is_not_gathered_is_not_begun_and_the_status_comes_back(bench: Bench, awaited: Status) -> None:
    entries, reply = sound(bench)
    bench.theirs.send(framed(answer(reply)))
    bench.awaited = awaited
    assert bench.serve(entries) == awaited
    assert (bench.meta == -1).all()
    assert not bench.sent()
    assert not bench.published


@pytest.mark.parametrize(
    "change",
    [
        {"said": b"what the host has said of iT"},
        {"max_rows": 0},
        {"rows_room": 0},
        {"context": 0},
    ],
)
def test_a_round_out_of_the_ordinary_is_not_begun(bench: Bench, change: dict[str, Any]) -> None:
    entries, reply = sound(bench)
    bench.theirs.send(framed(answer(reply)))
    assert bench.serve(entries, **change) == 0
    assert not bench.sent()
    assert not bench.published


@pytest.mark.parametrize(
    "change", [{"slots": 0}, {"reply_bytes": 16}, {"num_drafts": N + 1}, {"vocab_size": 0}, {"step_id": 8}]
)
def test_an_answer_out_of_the_ordinary_is_pythons(bench: Bench, change: dict[str, Any]) -> None:
    entries, reply = sound(bench)
    bench.theirs.send(framed(answer(reply)))
    served = bench.serve(entries, **change)
    assert isinstance(served, tuple)
    assert (served[5], type(served[6])) == (UNPUBLISHED, memoryview)
    assert not bench.published


def test_an_answer_that_is_late_or_does_not_come(bench: Bench) -> None:
    entries, reply = sound(bench)
    began = time.monotonic()
    served = bench.serve(entries, timeout_ns=30_000_000)
    assert 0.03 <= time.monotonic() - began < 1
    assert isinstance(served, tuple)
    assert served[5:] == (UNPUBLISHED, LATE)
    whole = framed(answer(reply))
    bench.theirs.send(whole[:10])
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert served[5:] == (UNPUBLISHED, 4 * 10 | LATE)
    bench.theirs.send(whole + whole[:3])  # more than one frame
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert served[5:] == (UNPUBLISHED, 4 * (len(whole) + 3) | CAME)
    bench.theirs.send(whole)
    served = bench.serve(entries, limit=10)
    assert isinstance(served, tuple)
    assert served[5:] == (UNPUBLISHED, 4 * len(whole) | CAME)
    bench.theirs.shutdown(socket.SHUT_WR)
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert served[5:] == (UNPUBLISHED, ENDED)
    assert not bench.published


def test_a_peer_that_is_gone_is_an_error_that_python_raises(bench: Bench) -> None:
    entries, _ = sound(bench)
    bench.theirs.close()
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert isinstance(served[6], BrokenPipeError)
    assert served[5] == UNPUBLISHED


def test_what_does_not_fit_is_pythons_to_send(bench: Bench) -> None:
    bench.ours.setblocking(False)
    try:
        while True:
            bench.ours.send(bytes(4096))
    except BlockingIOError:
        pass
    entries, _ = sound(bench)
    served = bench.serve(entries)
    assert isinstance(served, tuple)
    assert served[5:] == (UNPUBLISHED, -1)
    assert bytes(bench.head[: served[0]]) == head_of(entries)


def test_a_signal_is_handled_in_the_middle_of_a_round(bench: Bench) -> None:
    entries, reply = sound(bench)
    handled: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: handled.append(number))
    main = threading.get_ident()

    def disturb() -> None:
        for _ in range(5):
            time.sleep(0.01)
            signal.pthread_kill(main, signal.SIGUSR1)
        bench.theirs.send(framed(answer(reply)))

    thread = threading.Thread(target=disturb)
    try:
        thread.start()
        served = bench.serve(entries, timeout_ns=5_000_000_000)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(served, tuple)
    assert served[5] == WON
    assert len(bench.published) == 1
    assert handled
    head, rows = head_of(entries), sum(one.n_rows for one in entries) * ROW_BYTES
    assert bench.sent() == framed(head + bytes(bench.rows[:rows]))  # once


@pytest.mark.parametrize("place", ["round", "meta"])
def test_memory_of_another_size_is_refused(bench: Bench, place: str) -> None:
    entries, _ = sound(bench)
    packed = pack_round(OrdinaryRound._make([*[1] * 14, len(entries), *[1] * 10]), [0] * 4 * len(entries))
    meta: npt.NDArray[np.int32] = np.zeros((len(entries), 4), dtype=np.int32)
    with pytest.raises(ValueError, match="not a round"):
        bench.calls.serve(
            packed[:-4] if place == "round" else packed,
            b"",
            meta[:0].copy() if place == "meta" else meta,
            bytearray(4096),
            bytearray(4096),
            1,
            bench.ours.fileno(),
            4096,
            0,
            0,
        )
