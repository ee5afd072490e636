"""Rounds of a live engine in a file: what the gather packed, what was drafted from it, and by whom.

Written by rank 0 while it serves, read by `farspark capture --show` and `farspark replay`. No torch.

A capture is 16 bytes of magic and then records, each whole or not there: a record's head has its kind, its length and a
CRC-32 over both and the payload. The first record, `HEAD`, is JSON: the format's version, the shape, the identities. Every
`ROND` is one round in the layout of `_ROUND` and `ENTRY`, little-endian. `TAIL`, JSON, says why the capture ended; a file
without it is still being written, or its engine was killed. What follows the last whole record is a torn tail; everything
in front of it is good.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from farspark.engine.result import RoundOutcome
from farspark.engine.round import MetaColumn, Phase, RoundInput, RoundRequest
from farspark.engine.shape import ModelShape
from farspark.errors import ConfigError
from farspark.stats import Stats
from farspark.wire.layout import RequestStatus

logger = logging.getLogger(__name__)

MAGIC: Final = b"FARSPARK-CAPTURE"
FORMAT: Final = 1

_HEAD: Final = struct.Struct("<4sQI")  # kind, bytes of payload, CRC-32 over kind, length and payload
_KIND_AND_LENGTH: Final = struct.Struct("<4sQ")
_KIND_HEAD: Final = b"HEAD"
_KIND_ROUND: Final = b"ROND"
_KIND_TAIL: Final = b"TAIL"

# round, phase, outcome, parts, batch rows, rows of hidden states
_ROUND: Final = struct.Struct("<QBBHII")
_PHASES: Final = (Phase.DECODE, Phase.PREFILL)
NO_STATUS: Final = 0xFF

ENTRY: Final = np.dtype(
    [
        ("slot", "<u4"),
        ("owner", "<u8"),  # counts the owners that the capture has seen: another number, another request
        ("start_pos", "<i4"),  # of the first valid row, untrimmed
        ("valid_rows", "<i4"),
        ("anchor_token", "<i4"),
        ("k_window", "<u2"),  # drafts that the target verified in this step
        ("sampled", "u1"),  # 1: a draft was wanted
        ("status", "u1"),  # the worker's for this entry; NO_STATUS: it gave none
        ("has_drafts", "u1"),  # 1: the remote drafts were usable
    ]
)

# More than this waits for the disk, and rounds are left out instead of taking the engine's memory.
QUEUE_BYTES: Final = 64 << 20
# For the tail, so that a capture that reached its limit still says so.
_TAIL_ROOM: Final = 512
_JOIN_S: Final = 10.0


class CaptureError(ConfigError):
    """A file that is no capture, or one whose records contradict each other."""


class _Part(enum.IntFlag):
    """Which arrays a round has, in this order in the file: each [n, N] of 4-byte values."""

    LOCAL = 1  # int32
    LOCAL_CONFIDENCES = 2  # float32
    REMOTE = 4  # int32
    REMOTE_CONFIDENCES = 8  # float32
    MARGINS = 16  # float32, the worker's


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureHeader:
    """What the rounds of a file have in common."""

    shape: ModelShape
    identity: bytes  # the drafter's, 32 bytes
    markov_identity: bytes  # zeros: not checked
    policy: str
    engine: str
    farspark: str  # the version that wrote the file
    created_s: float = field(default_factory=time.time)  # Unix time

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "format": FORMAT,
            "identity": self.identity.hex(),
            "markov_identity": self.markov_identity.hex(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaptureHeader:
        """Raises CaptureError where something is missing or of another kind."""
        if data.get("format") != FORMAT:
            raise CaptureError(f"of format {data.get('format')}, this version reads format {FORMAT}")
        try:
            return cls(
                shape=ModelShape(**{name: int(value) for name, value in data["shape"].items()}),
                identity=bytes.fromhex(data["identity"]),
                markov_identity=bytes.fromhex(data["markov_identity"]),
                policy=str(data["policy"]),
                engine=str(data["engine"]),
                farspark=str(data["farspark"]),
                created_s=float(data["created_s"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CaptureError(f"its header is not one of ours: {error!r}") from error


@dataclass(slots=True, eq=False)
class CapturedRound:
    """One round. n batch rows, N drafts; an array is None where nobody drafted."""

    number: int  # rank 0's count of rounds: one that is missing was left out
    phase: Phase
    outcome: RoundOutcome
    entries: npt.NDArray[np.void]  # [n] of ENTRY
    rows: memoryview  # packed bf16 rows, request after request, the newest min(valid_rows, context) each
    local: npt.NDArray[np.int32] | None = None
    local_confidences: npt.NDArray[np.float32] | None = None
    remote: npt.NDArray[np.int32] | None = None
    remote_confidences: npt.NDArray[np.float32] | None = None
    margins: npt.NDArray[np.float32] | None = None

    def step(self) -> RoundInput:
        """The round as rank 0 was given it; its owners are the capture's numbers."""
        entries = self.entries
        meta = np.empty((len(entries), len(MetaColumn)), dtype=np.int32)
        meta[:, MetaColumn.START_POS] = entries["start_pos"]
        meta[:, MetaColumn.VALID_ROWS] = entries["valid_rows"]
        meta[:, MetaColumn.ANCHOR_TOKEN] = entries["anchor_token"]
        meta[:, MetaColumn.SAMPLED] = entries["sampled"]
        requests = [
            RoundRequest(int(slot), int(owner), int(k_window))
            for slot, owner, k_window in zip(entries["slot"], entries["owner"], entries["k_window"], strict=True)
        ]
        return RoundInput(requests, meta, self.rows, self.phase)

    def encode(self) -> list[bytes | memoryview]:
        """The payload, in pieces."""
        parts = _Part(0)
        arrays: list[bytes | memoryview] = []
        for part, array in self._arrays():
            if array is not None:
                parts |= part
                arrays.append(np.ascontiguousarray(array).tobytes())
        head = _ROUND.pack(
            self.number,
            _PHASES.index(self.phase),
            self.outcome,
            int(parts),
            len(self.entries),
            self.rows.nbytes,
        )
        return [head, self.entries.tobytes(), *arrays, self.rows]

    def _arrays(self) -> Iterator[tuple[_Part, npt.NDArray[Any] | None]]:
        yield _Part.LOCAL, self.local
        yield _Part.LOCAL_CONFIDENCES, self.local_confidences
        yield _Part.REMOTE, self.remote
        yield _Part.REMOTE_CONFIDENCES, self.remote_confidences
        yield _Part.MARGINS, self.margins

    @classmethod
    def decode(cls, payload: memoryview, shape: ModelShape) -> CapturedRound:
        """Raises CaptureError where the record contradicts itself or the shape."""
        try:
            number, phase, outcome, parts, n, rows_bytes = _ROUND.unpack_from(payload)
            at = _ROUND.size
            entries = np.frombuffer(payload, dtype=ENTRY, count=n, offset=at)
            at += entries.nbytes
            arrays: dict[_Part, npt.NDArray[Any]] = {}
            for part in _Part:
                if parts & part:
                    kind = np.int32 if part in (_Part.LOCAL, _Part.REMOTE) else np.float32
                    array = np.frombuffer(payload, dtype=kind, count=n * shape.num_drafts, offset=at)
                    # A copy: in the file nothing is aligned.
                    arrays[part] = array.reshape(n, shape.num_drafts).copy()
                    at += array.nbytes
            found = cls(
                number=number,
                phase=_PHASES[phase],
                outcome=RoundOutcome(outcome),
                entries=entries,
                rows=payload[at:],
                local=arrays.get(_Part.LOCAL),
                local_confidences=arrays.get(_Part.LOCAL_CONFIDENCES),
                remote=arrays.get(_Part.REMOTE),
                remote_confidences=arrays.get(_Part.REMOTE_CONFIDENCES),
                margins=arrays.get(_Part.MARGINS),
            )
        except (struct.error, ValueError, IndexError) as error:
            raise CaptureError(f"a round cannot be read: {error}") from error
        rows = np.minimum(entries["valid_rows"], shape.context).sum() * shape.row_bytes
        if len(found.rows) != rows_bytes or rows != rows_bytes:
            raise CaptureError(f"round {number}: {len(found.rows)} bytes of rows, its entries have {rows}")
        if n and not (entries["slot"] < shape.slots).all():
            raise CaptureError(f"round {number}: slot {entries['slot'].max()}, the engine had {shape.slots}")
        return found


def encode_record(kind: bytes, pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """`pieces` as one record, head first."""
    length = sum(memoryview(piece).nbytes for piece in pieces)
    checksum = zlib.crc32(_KIND_AND_LENGTH.pack(kind, length))
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return [_HEAD.pack(kind, length, checksum), *pieces]


# Writing.


class CaptureWriter:
    """Rounds go in on the engine thread, which only copies them; one thread of its own writes.

    What goes wrong ends the capture, never the engine: one warning, one `capture_stopped` in the counters. Rounds that would
    wait for a slow disk beyond QUEUE_BYTES are left out and counted as `capture_dropped`.
    """

    def __init__(self, path: Path, header: CaptureHeader, *, limit_bytes: int, stats: Stats) -> None:
        self.path = path
        self._stats = stats
        self._limit_bytes = limit_bytes
        self._owners: dict[int, tuple[Hashable, int]] = {}
        self._owner_count = 0
        self._pending: CapturedRound | None = None  # the newest round, which waits for its local drafts
        self._queue: deque[CapturedRound | None] = deque()  # None: the end; guarded by _wake
        self._queued_bytes = 0  # guarded by _wake
        self._wake = threading.Condition()
        self._is_closed = False
        self._dropped = 0
        self._rounds = 0  # written; the writing thread's
        self._bytes = 0  # in the file, all of them whole records; the writing thread's
        self._ended: str | None = None  # why nothing more is written; set once, by whoever ends it
        self._failed = False
        self._is_counted = False
        self._thread = threading.Thread(target=self._run, args=(header,), name="farspark-capture", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<CaptureWriter {self.path} {self._rounds} rounds, {self._ended or 'writing'}>"

    def round(
        self,
        number: int,
        step: RoundInput,
        outcome: RoundOutcome,
        *,
        ok: npt.NDArray[np.integer[Any]],  # [n]
        tokens: npt.NDArray[np.int32],  # [n, N], the worker's
        confidences: npt.NDArray[np.float32],  # [n, N]
        margins: npt.NDArray[np.float32] | None,  # [n, N]
        statuses: Mapping[int, RequestStatus],  # by batch row
    ) -> None:
        """Take note of a round that is over. Everything is copied: the buffers may be filled again. Engine thread."""
        self._flush()
        if not self._is_going_on():
            return
        n = len(step.requests)
        entries = np.empty(n, dtype=ENTRY)
        entries["slot"] = [request.slot for request in step.requests]
        entries["owner"] = [self._owner(request.slot, request.owner) for request in step.requests]
        entries["start_pos"] = step.meta[:, MetaColumn.START_POS]
        entries["valid_rows"] = step.meta[:, MetaColumn.VALID_ROWS]
        entries["anchor_token"] = step.meta[:, MetaColumn.ANCHOR_TOKEN]
        entries["k_window"] = [request.k_window for request in step.requests]
        entries["sampled"] = step.meta[:, MetaColumn.SAMPLED]
        entries["status"] = [statuses.get(row, NO_STATUS) for row in range(n)]
        entries["has_drafts"] = ok
        self._pending = CapturedRound(
            number=number,
            phase=step.phase,
            outcome=outcome,
            entries=entries,
            rows=memoryview(bytes(step.rows)),
            remote=tokens.copy() if statuses else None,
            remote_confidences=confidences.copy() if statuses else None,
            margins=None if margins is None or not statuses else margins.copy(),
        )

    def local(self, tokens: npt.NDArray[np.integer[Any]], confidences: npt.NDArray[np.floating[Any]] | None) -> None:
        """The local drafts [n, N] of the round that came last. Engine thread."""
        if self._pending is not None:
            self._pending.local = tokens.astype(np.int32)
            self._pending.local_confidences = None if confidences is None else confidences.astype(np.float32)

    def snapshot(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "state": self._ended or "writing",
            "rounds": self._rounds,
            "bytes": self._bytes,
            "dropped": self._dropped,
        }

    def close(self) -> None:
        """Write what is left, and the tail. Waits for the disk, at most some seconds. Idempotent; engine thread."""
        if self._is_closed:
            return
        self._flush()
        self._is_closed = True
        with self._wake:
            self._queue.append(None)
            self._wake.notify()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            logger.warning(
                "farspark: the capture %s did not end within %g s; its last rounds are missing", self.path, _JOIN_S
            )
        self._is_going_on()

    def _owner(self, slot: int, owner: Hashable) -> int:
        known = self._owners.get(slot)
        if known is None or known[0] != owner:
            self._owner_count += 1
            known = self._owners[slot] = (owner, self._owner_count)
        return known[1]

    def _is_going_on(self) -> bool:
        if self._failed and not self._is_counted:
            self._is_counted = True
            self._stats.add("capture_stopped")
        return self._ended is None

    def _flush(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None or self._ended is not None:
            return
        size = pending.rows.nbytes
        with self._wake:
            # A single round above the bound passes when nothing else waits.
            if self._queue and self._queued_bytes + size > QUEUE_BYTES:
                self._dropped += 1
                self._stats.add("capture_dropped")
                return
            self._queue.append(pending)
            self._queued_bytes += size
            self._wake.notify()

    # The writing thread from here on.

    def _run(self, header: CaptureHeader) -> None:
        try:
            # A capture that is there is somebody's evidence; it is not overwritten.
            with open(self.path, "xb", buffering=0, opener=_for_the_owner) as file:
                self._write(file, [MAGIC], self._limit_bytes)
                self._record(file, _KIND_HEAD, [json.dumps(header.as_json()).encode()], self._limit_bytes)
                self._write_rounds(file)
        except (OSError, ValueError, MemoryError) as error:
            self._fail(str(error) or type(error).__name__)
        except Exception:
            # A thread that dies leaves nobody to tell.
            logger.exception("farspark: the capture's thread failed")
            self._fail("internal error, see the log")

    def _write_rounds(self, file: BinaryIO) -> None:
        while (captured := self._next()) is not None:
            if not self._record(file, _KIND_ROUND, captured.encode(), self._limit_bytes - _TAIL_ROOM):
                self._ended = f"limit of {self._limit_bytes / 2**20:g} MiB reached"
                logger.info("farspark: capture %s: %s after %d rounds", self.path, self._ended, self._rounds)
                break
            self._rounds += 1
        self._ended = self._ended or "closed"
        self._forget_queue()
        tail = {"why": self._ended, "rounds": self._rounds, "dropped": self._dropped}
        self._record(file, _KIND_TAIL, [json.dumps(tail).encode()], self._limit_bytes)

    def _next(self) -> CapturedRound | None:
        with self._wake:
            while not self._queue:
                self._wake.wait()
            captured = self._queue.popleft()
            if captured is not None:
                self._queued_bytes -= captured.rows.nbytes
            return captured

    def _record(self, file: BinaryIO, kind: bytes, pieces: Sequence[bytes | memoryview], limit_bytes: int) -> bool:
        """False where it does not fit any more."""
        return self._write(file, encode_record(kind, pieces), limit_bytes)

    def _write(self, file: BinaryIO, pieces: Sequence[bytes | memoryview], limit_bytes: int) -> bool:
        size = sum(memoryview(piece).nbytes for piece in pieces)
        if self._bytes + size > limit_bytes:
            return False
        try:
            for piece in pieces:
                left = memoryview(piece).cast("B")
                while left:
                    left = left[file.write(left) :]
        except OSError:
            # Half a record would only be a torn tail; a device that cannot be cut keeps it.
            try:
                os.ftruncate(file.fileno(), self._bytes)
            except OSError:
                pass
            raise
        self._bytes += size
        return True

    def _fail(self, why: str) -> None:
        self._failed = True
        self._ended = f"failed: {why}"
        logger.warning(
            "farspark: capture %s has stopped after %d rounds (%s); the engine goes on without it",
            self.path,
            self._rounds,
            why,
        )
        self._forget_queue()

    def _forget_queue(self) -> None:
        with self._wake:
            self._queue.clear()
            self._queued_bytes = 0


def _for_the_owner(path: str, flags: int) -> int:
    """Rows are hidden states of users' texts: nobody else's to read."""
    return os.open(path, flags, 0o600)


# Reading.


class CaptureReader:
    """Reads a capture from the front, one round in memory at a time. `with` closes the file.

    `offset`, `torn_bytes` and `tail` are complete once `rounds` has ended.
    """

    def __init__(self, path: Path) -> None:
        """Raises CaptureError where the file cannot be opened or its header cannot be read."""
        self.path = path
        self.torn_bytes = 0  # behind the last whole record
        self.tail: dict[str, Any] | None = None  # None: the capture was not ended
        try:
            self._file = open(path, "rb")  # noqa: SIM115 - closed by __exit__
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise CaptureError(f"capture {path}: {error.strerror}") from error
        try:
            self.offset = len(MAGIC)
            if self._read(len(MAGIC)) != MAGIC:
                raise CaptureError("it does not begin as a capture does")
            record = self._record()
            if record is None or record[0] != _KIND_HEAD:
                raise CaptureError("its header is not there")
            self.header = CaptureHeader.from_json(_json(record[1]))
        except CaptureError as error:
            self._file.close()
            raise CaptureError(f"capture {path}: {error}") from error

    def __enter__(self) -> CaptureReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def rounds(self) -> Iterator[CapturedRound]:
        """Every whole round. Raises CaptureError where a record is whole and yet makes no sense."""
        try:
            while (record := self._record()) is not None:
                kind, payload = record
                if kind == _KIND_TAIL:
                    self.tail = _json(payload)
                    break
                if kind != _KIND_ROUND:
                    raise CaptureError(f"a record of kind {kind!r}, this version knows none such")
                yield CapturedRound.decode(payload, self.header.shape)
        except CaptureError as error:
            raise CaptureError(f"capture {self.path}, before byte {self.offset}: {error}") from error
        self.torn_bytes = self.size - self.offset

    def _record(self) -> tuple[bytes, memoryview] | None:
        """The next record, or None where none is whole."""
        head = self._read(_HEAD.size)
        if len(head) < _HEAD.size:
            return None
        kind, length, checksum = _HEAD.unpack(head)
        # On the length alone, so that a torn head never reserves memory.
        if length > self.size - self.offset - _HEAD.size:
            return None
        payload = self._read(length)
        if len(payload) < length or zlib.crc32(payload, zlib.crc32(_KIND_AND_LENGTH.pack(kind, length))) != checksum:
            return None
        self.offset += _HEAD.size + length
        return kind, memoryview(payload)

    def _read(self, count: int) -> bytes:
        try:
            return self._file.read(count)
        except OSError as error:
            raise CaptureError(str(error.strerror)) from error


def _json(payload: memoryview) -> dict[str, Any]:
    try:
        data = json.loads(bytes(payload))
    except ValueError as error:
        raise CaptureError(f"a record is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CaptureError(f"a record is a JSON {type(data).__name__}, expected an object")
    return data


def summary(reader: CaptureReader, watch: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """What a capture holds; reads it to its end, and tells `watch` the bytes read so far.

    Raises CaptureError as `CaptureReader.rounds` does.
    """
    shape, header = reader.header.shape, reader.header
    counts: Counter[str] = Counter()
    owners: set[int] = set()
    first = last = None
    for captured in reader.rounds():
        first = captured.number if first is None else first
        last = captured.number
        owners.update(captured.entries["owner"].tolist())
        watch(reader.offset)
        counts["rounds"] += 1
        counts[f"rounds_{captured.phase.value}"] += 1
        counts["rounds_with_local_drafts"] += captured.local is not None
        counts["rounds_with_remote_drafts"] += bool(captured.entries["has_drafts"].any())
        counts["rows"] += captured.rows.nbytes // shape.row_bytes
    # Those after the last round that is there are known to the tail only.
    missing = 0 if first is None or last is None else last - first + 1 - counts["rounds"]
    return {
        "file": str(reader.path),
        "bytes": reader.size,
        "header": header.as_json(),
        "rounds": counts["rounds"],
        **{
            name: counts[name]
            for name in (
                "rounds_prefill",
                "rounds_decode",
                "rounds_with_local_drafts",
                "rounds_with_remote_drafts",
                "rows",
            )
        },
        "requests": len(owners),
        "left_out_rounds": missing if reader.tail is None else reader.tail.get("dropped", missing),
        "ended": None if reader.tail is None else reader.tail.get("why"),
        "torn_bytes": reader.torn_bytes,
    }
