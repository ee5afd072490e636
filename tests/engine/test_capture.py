"""The capture's file and its writer: every tail that can be torn, every way that a disk fails, the limit, the bound."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import stat
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from farspark.engine import capture
from farspark.engine.capture import (
    ENTRY,
    MAGIC,
    NO_STATUS,
    CapturedRound,
    CaptureError,
    CaptureHeader,
    CaptureReader,
    CaptureWriter,
    encode_record,
    summary,
)
from farspark.engine.result import RoundOutcome
from farspark.engine.round import MetaColumn, Phase, RoundInput, RoundRequest
from farspark.engine.shape import ModelShape
from farspark.stats import Stats
from farspark.wire.layout import RequestStatus

N, SLOTS, CONTEXT = 3, 4, 8
SHAPE = ModelShape(
    num_drafts=N, vocab_size=100, hidden_size=4, taps=2, slots=SLOTS, context=CONTEXT, ring=6, max_position=99
)
HEADER = CaptureHeader(
    shape=SHAPE, identity=b"\1" * 32, markov_identity=bytes(32), policy="shadow", engine="an engine", farspark="0"
)
MIB = 1 << 20


def round_input(*turns: tuple[int, str, int, int]) -> RoundInput:
    """Each turn: slot, owner, first position, valid rows. Rows hold their own number."""
    meta = np.zeros((len(turns), len(MetaColumn)), dtype=np.int32)
    for row, (_, _, start, valid) in enumerate(turns):
        meta[row] = [start, valid, 10 + row, 1]
    count = sum(min(valid, CONTEXT) for _, _, _, valid in turns)
    rows = np.arange(count, dtype=np.uint8).repeat(SHAPE.row_bytes)
    requests = [RoundRequest(slot, owner, 2) for slot, owner, _, _ in turns]
    return RoundInput(requests, meta, memoryview(rows.tobytes()), Phase.DECODE)


def put(writer: CaptureWriter, number: int, step: RoundInput, *, answered: bool = True) -> None:
    n = len(step.requests)
    writer.round(
        number,
        step,
        RoundOutcome.OK if answered else RoundOutcome.FAILED,
        ok=np.full(n, int(answered)),
        tokens=np.full((n, N), number, dtype=np.int32),
        confidences=np.full((n, N), 0.5, dtype=np.float32),
        margins=np.full((n, N), 2, dtype=np.float32) if answered else None,
        statuses=dict.fromkeys(range(n), RequestStatus.OK) if answered else {},
    )


def read(path: Path) -> tuple[list[CapturedRound], CaptureReader]:
    with CaptureReader(path) as reader:
        return list(reader.rounds()), reader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rounds.capture"


def write_three(path: Path) -> Stats:
    stats = Stats()
    writer = CaptureWriter(path, HEADER, limit_bytes=MIB, stats=stats)
    put(writer, 5, round_input((0, "a", 0, 4), (3, "b", 7, 2)))
    writer.local(np.array([[1, 2, 3], [4, 5, 6]]), np.full((2, N), 0.25))
    put(writer, 6, round_input((3, "b", 9, 20)), answered=False)
    put(writer, 8, round_input((0, "c", 0, 1)))
    writer.close()
    return stats


def test_what_was_given_is_what_is_read(path: Path) -> None:
    assert write_three(path).counters() == {}
    (first, second, third), reader = read(path)
    assert reader.header == HEADER
    assert reader.tail == {"why": "closed", "rounds": 3, "dropped": 0}
    assert reader.torn_bytes == 0
    assert (first.number, second.number, third.number) == (5, 6, 8)
    step, given = first.step(), round_input((0, "a", 0, 4), (3, "b", 7, 2))
    assert step.meta.tolist() == given.meta.tolist()
    assert bytes(step.rows) == bytes(given.rows)
    assert [(one.slot, one.k_window) for one in step.requests] == [(0, 2), (3, 2)]
    assert first.local is not None
    assert first.local.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert first.local_confidences is not None
    assert first.local_confidences.tolist() == [[0.25] * N] * 2
    assert first.remote is not None
    assert first.remote.tolist() == [[5] * N] * 2
    assert first.margins is not None
    assert first.entries["status"].tolist() == [RequestStatus.OK] * 2
    assert (second.remote, second.local, second.margins) == (None, None, None)
    assert second.outcome is RoundOutcome.FAILED
    assert second.entries["status"].tolist() == [NO_STATUS]
    # The step's 20 rows were trimmed to the context.
    assert second.rows.nbytes == CONTEXT * SHAPE.row_bytes


def test_SLOT_BEGIN_another_owner_of_a_slot_is_another_number(path: Path) -> None:
    write_three(path)
    (first, second, third), _ = read(path)
    assert first.entries["owner"].tolist() == [1, 2]
    assert second.entries["owner"].tolist() == [2]
    assert third.entries["owner"].tolist() == [3]


def test_the_summary_counts_what_is_there(path: Path) -> None:
    write_three(path)
    seen: list[int] = []
    with CaptureReader(path) as reader:
        found = summary(reader, seen.append)
    assert (found["rounds"], found["requests"], found["rows"]) == (3, 3, 4 + 2 + CONTEXT + 1)
    assert (found["rounds_with_local_drafts"], found["rounds_with_remote_drafts"]) == (1, 2)
    assert (found["left_out_rounds"], found["ended"], found["torn_bytes"]) == (0, "closed", 0)
    assert seen == sorted(seen)
    assert json.loads(json.dumps(found))["header"]["identity"] == "01" * 32


def test_only_the_owner_may_read_it(path: Path) -> None:
    before = os.umask(0)
    try:
        write_three(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def last_two_records(path: Path) -> tuple[int, int]:
    """Where the last round and the tail begin."""
    with CaptureReader(path) as reader:
        offsets = []
        for _ in reader.rounds():
            offsets.append(reader.offset)
        return offsets[-2], offsets[-1]


def test_a_file_torn_at_any_byte_of_its_last_records_is_read_up_to_there(path: Path, tmp_path: Path) -> None:
    write_three(path)
    whole = path.read_bytes()
    last_round, tail = last_two_records(path)
    torn = tmp_path / "torn"
    for length in range(last_round, len(whole)):
        torn.write_bytes(whole[:length])
        rounds, reader = read(torn)
        assert len(rounds) == (3 if length >= tail else 2)
        assert reader.tail is None
        assert reader.torn_bytes == length - (tail if length >= tail else last_round)


def test_a_changed_byte_anywhere_in_the_last_record_is_found(path: Path, tmp_path: Path) -> None:
    write_three(path)
    whole = path.read_bytes()
    last_round, tail = last_two_records(path)
    torn = tmp_path / "torn"
    for at in range(last_round, tail):
        torn.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        rounds, reader = read(torn)
        assert len(rounds) == 2, at
        assert reader.torn_bytes == len(whole) - last_round


@pytest.mark.parametrize("length", [0, 1, len(MAGIC), len(MAGIC) + 5, len(MAGIC) + 60])
def test_a_file_without_a_whole_header_is_no_capture(path: Path, length: int) -> None:
    write_three(path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CaptureError, match=r"rounds\.capture: (it does not begin|its header is not there)"):
        CaptureReader(path)


def with_records(path: Path, *records: tuple[bytes, bytes]) -> None:
    path.write_bytes(MAGIC + b"".join(b"".join(map(bytes, encode_record(kind, [data]))) for kind, data in records))


def test_another_format_and_another_file_are_refused_with_a_sentence(path: Path, tmp_path: Path) -> None:
    header = HEADER.as_json()
    for changes, said in (
        ({"format": 2}, "of format 2, this version reads format 1"),
        ({"shape": {"num_drafts": 3}}, "its header is not one of ours"),
        ({"identity": "xyz"}, "its header is not one of ours"),
    ):
        with_records(path, (b"HEAD", json.dumps(header | changes).encode()))
        with pytest.raises(CaptureError, match=said):
            CaptureReader(path)
    with_records(path, (b"HEAD", b"[]"))
    with pytest.raises(CaptureError, match="a JSON list, expected an object"):
        CaptureReader(path)
    with pytest.raises(CaptureError, match="No such file"):
        CaptureReader(tmp_path / "nothing")
    with pytest.raises(CaptureError, match="Is a directory"):
        CaptureReader(tmp_path)


@pytest.mark.parametrize(
    ("kind", "payload", "said"),
    [
        (b"ROND", b"short", "a round cannot be read"),
        (b"NEWS", b"", "a record of kind b'NEWS'"),
        (b"TAIL", b"{", "a record is not JSON"),
    ],
)
def test_a_whole_record_that_makes_no_sense_is_an_error_and_no_torn_tail(
    path: Path, kind: bytes, payload: bytes, said: str
) -> None:
    with_records(path, (b"HEAD", json.dumps(HEADER.as_json()).encode()), (kind, payload))
    with pytest.raises(CaptureError, match=said):
        read(path)


@pytest.mark.parametrize(
    ("column", "value", "said"), [("slot", 4, "slot 4, the engine had 4"), ("valid_rows", 3, "bytes of rows")]
)
def test_a_round_that_contradicts_itself_is_an_error(path: Path, column: str, value: int, said: str) -> None:
    entries = np.zeros(1, dtype=ENTRY)
    entries["valid_rows"] = 2
    entries[column] = value
    rows = memoryview(bytes(2 * SHAPE.row_bytes))
    payload = b"".join(map(bytes, CapturedRound(1, Phase.DECODE, RoundOutcome.OK, entries, rows).encode()))
    with_records(path, (b"HEAD", json.dumps(HEADER.as_json()).encode()), (b"ROND", payload))
    with pytest.raises(CaptureError, match=said):
        read(path)


def test_the_checksum_covers_kind_and_length() -> None:
    head = bytes(encode_record(b"ROND", [b"ab", b"c"])[0])
    assert head[:12] == b"ROND" + (3).to_bytes(8, "little")
    assert int.from_bytes(head[12:], "little") == zlib.crc32(b"ROND" + (3).to_bytes(8, "little") + b"abc")


# What ends a capture.


def said_once(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return sum(text in record.getMessage() for record in caplog.records) == 1


def fill(writer: CaptureWriter, rounds: int = 200) -> None:
    for number in range(1, rounds + 1):
        put(writer, number, round_input((0, "a", number * CONTEXT, CONTEXT)))


def test_it_stops_by_itself_at_its_limit_and_says_so_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stats = Stats()
    with caplog.at_level(logging.INFO):
        writer = CaptureWriter(path, HEADER, limit_bytes=16 * 1024, stats=stats)
        fill(writer)
        writer.close()
        fill(writer)
    assert 15 * 1024 - 512 < path.stat().st_size <= 16 * 1024
    rounds, reader = read(path)
    assert 10 < len(rounds) < 200
    assert reader.tail == {"why": "limit of 0.015625 MiB reached", "rounds": len(rounds), "dropped": 0}
    assert said_once(caplog, "limit of")
    assert writer.snapshot()["state"] == "limit of 0.015625 MiB reached"
    # Reaching the limit is what was asked for.
    assert stats.count("capture_stopped") == 0


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Files of this process end at 8 KiB: the kernel takes the first part of a write that crosses it and refuses the next.

    Within a test's own body only: pytest's own output may be a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_stopped(writer: CaptureWriter, stats: Stats, caplog: pytest.LogCaptureFixture, why: str) -> None:
    assert said_once(caplog, "has stopped after")
    assert stats.count("capture_stopped") == 1
    assert why in writer.snapshot()["state"]
    # The engine goes on and nothing piles up.
    fill(writer, 50)
    assert writer._queued_bytes == 0
    assert stats.count("capture_stopped") == 1


def test_a_write_that_fails_half_way_ends_it_and_leaves_whole_records(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stats = Stats()
    writer = CaptureWriter(path, HEADER, limit_bytes=MIB, stats=stats)
    with small_files():
        fill(writer)
        writer.close()
    check_stopped(writer, stats, caplog, "File too large")
    rounds, reader = read(path)
    assert len(rounds) > 10
    assert reader.torn_bytes == 0
    assert reader.tail is None


def test_a_full_disk_ends_it_and_leaves_whole_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("a file system of its own needs the right to mount")
    try:
        stats = Stats()
        writer = CaptureWriter(disk / "rounds", HEADER, limit_bytes=MIB, stats=stats)
        fill(writer, 2000)
        writer.close()
        check_stopped(writer, stats, caplog, "No space left on device")
        rounds, reader = read(disk / "rounds")
        assert len(rounds) > 100
        assert reader.torn_bytes == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_device_that_is_always_full_ends_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A device exists already, so it is opened as it is.
    monkeypatch.setattr(capture, "_for_the_owner", lambda path, flags: os.open(path, os.O_WRONLY))
    stats = Stats()
    writer = CaptureWriter(Path("/dev/full"), HEADER, limit_bytes=MIB, stats=stats)
    fill(writer, 3)
    writer.close()
    check_stopped(writer, stats, caplog, "No space left on device")


def test_a_file_that_is_there_is_not_overwritten_and_the_engine_goes_on(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("evidence")
    stats = Stats()
    writer = CaptureWriter(path, HEADER, limit_bytes=MIB, stats=stats)
    fill(writer, 3)
    writer.close()
    check_stopped(writer, stats, caplog, "File exists")
    assert path.read_text() == "evidence"


def test_rounds_that_a_slow_disk_cannot_take_are_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pipe that nobody empties is as slow as a disk can be.
    reading, writing = os.pipe()
    monkeypatch.setattr(capture, "_for_the_owner", lambda path, flags: writing)
    monkeypatch.setattr(capture, "QUEUE_BYTES", 4 * CONTEXT * SHAPE.row_bytes)
    stats = Stats()
    writer = CaptureWriter(tmp_path / "pipe", HEADER, limit_bytes=MIB, stats=stats)
    began = time.monotonic()
    fill(writer, 1000)
    assert time.monotonic() - began < 5
    dropped = stats.count("capture_dropped")
    assert dropped > 100
    collected = bytearray()

    def empty() -> None:
        while more := os.read(reading, 1 << 16):
            collected.extend(more)

    emptying = threading.Thread(target=empty)
    emptying.start()
    writer.close()
    emptying.join(10)
    os.close(reading)
    path = tmp_path / "collected"
    path.write_bytes(collected)
    rounds, reader = read(path)
    assert reader.tail is not None
    assert reader.tail["dropped"] == stats.count("capture_dropped") >= dropped
    assert reader.tail["rounds"] == len(rounds)
    assert len(rounds) + reader.tail["dropped"] == 1000
    with CaptureReader(path) as again:
        assert summary(again)["left_out_rounds"] == reader.tail["dropped"]


def test_close_may_come_twice_and_without_a_round(path: Path) -> None:
    writer = CaptureWriter(path, HEADER, limit_bytes=MIB, stats=Stats())
    writer.close()
    writer.close()
    rounds, reader = read(path)
    assert rounds == []
    assert reader.tail == {"why": "closed", "rounds": 0, "dropped": 0}
    assert "closed" in repr(writer)
