"""The memory that the engine, its stream and the proxy share: one memfd, registered with the driver, mapped by both sides.

What lies in it, in this order: the page of the native helper; words of the proxy's (ready, heartbeat, the round it is at,
the windows that it asks for); the proxy's statistics; for each of the last 64 rounds what the host knows of it (a
descriptor, the engine thread's) and what the device knows of it (metadata, the stream's); the windows that a resync needs,
and the staging of the rows (the stream's, refilled by every round). The proxy only reads what is not its own.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from farspark.engine.result import ResultLayout
from farspark.engine.round import Phase, meta_columns
from farspark.engine.shape import ModelShape

# Rounds whose descriptors and metadata are kept. The native helper's far jumps are a multiple of it.
KEPT: Final = 64
ROUNDS: Final = 1 << 32  # round numbers are cyclic

_PHASES: Final = (Phase.DECODE, Phase.PREFILL)
_HEAD_BYTES: Final = 16  # of a descriptor: round, requests, phase, windows
_STATS_BYTES: Final = 1 << 16

DescribeRound = Callable[[int, int, list[int], list[int], list[int] | int, bool], bool]


def next_round(round_: int) -> int:
    return (round_ + 1) % ROUNDS


def distance(later: int, earlier: int) -> int:
    """How many rounds `later` is behind `earlier` in the cycle; negative if it comes first."""
    return (later - earlier + ROUNDS // 2) % ROUNDS - ROUNDS // 2


@dataclass(frozen=True, slots=True)
class RegionShape:
    """What the region is sized by, the same in both processes."""

    model: ModelShape
    max_rows: int  # rows that one step can pack
    page_bytes: int  # of the native page

    @property
    def result(self) -> ResultLayout:
        return ResultLayout(self.model.slots, self.model.num_drafts, self.model.support)

    @property
    def meta_columns(self) -> int:
        return meta_columns(is_sampled=self.model.support > 0)


class Area:
    """A JSON document that one process writes and another reads whole, or not at all: two copies, written in turn."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._half = len(memory) // 2
        self._turn = 0

    def write(self, document: Mapping[str, Any]) -> None:
        """What does not fit is left out, and the older document stays."""
        data = json.dumps(document, separators=(",", ":")).encode()
        if len(data) + 12 > self._half:
            return
        self._turn += 1
        at = (self._turn % 2) * self._half
        head = self._turn.to_bytes(4, "little") + len(data).to_bytes(4, "little")
        self._memory[at : at + 4] = bytes(4)  # nobody takes the copy for whole while it is written
        self._memory[at + 12 : at + 12 + len(data)] = data
        self._memory[at + 8 : at + 12] = zlib.crc32(data, zlib.crc32(head)).to_bytes(4, "little")
        self._memory[at + 4 : at + 8] = head[4:]
        self._memory[at : at + 4] = head[:4]

    def read(self) -> dict[str, Any]:
        """The newest whole document; {} before the first."""
        newest, found = 0, b"{}"
        for at in (0, self._half):
            copy = bytes(self._memory[at : at + self._half])
            turn, size = int.from_bytes(copy[:4], "little"), int.from_bytes(copy[4:8], "little")
            data = copy[12 : 12 + size]
            is_whole = int.from_bytes(copy[8:12], "little") == zlib.crc32(data, zlib.crc32(copy[:8]))
            if turn > newest and is_whole:
                newest, found = turn, data
        document: dict[str, Any] = json.loads(found)
        return document

    def clear(self) -> None:
        self._memory[:] = bytes(len(self._memory))
        self._turn = 0


class Submission(NamedTuple):
    """One step as the host knows it when it enqueues the round, in batch order."""

    slots: list[int]  # [n]
    owners: list[int]  # [n], the number of each request's admission, different for every one
    k_windows: list[int] | int  # [n], drafts that the target verified; 0: nobody had any
    phase: Phase
    row_bound: int  # rows that the gather packs at most


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What of it the proxy is told, in lists `[n]`."""

    slots: list[int]
    owners: list[int]
    k_windows: list[int]
    phase: Phase
    windows: list[int]  # slots whose whole windows the stream stages with this round


class Region:
    """One mapping. `with` or `close` ends it; the file descriptor is for a child to inherit."""

    def __init__(self, shape: RegionShape, fd: int | None = None, describe_round: DescribeRound | None = None) -> None:
        """Makes the memory, or maps that of `fd`, which then is the region's to close. Raises OSError.

        `describe_round` is the quick form of `describe`, without windows: False, with nothing changed, where it leaves a round to
        the other. It is given the address of the record, the round, slots, owners, k_windows, and whether the phase is prefill.
        """
        self.shape = shape
        self._describe = describe_round
        model, kept = shape.model, KEPT
        self._end = 0
        page = self._take(shape.page_bytes)
        words = self._take(4 * 8)
        wanted = self._take(4 * model.slots)
        areas = [self._take(2 * _STATS_BYTES) for _ in range(2)]
        # Head, owners, slots, k_windows, windows.
        self._record_bytes: Final = -(-(_HEAD_BYTES + 20 * model.slots) // 64) * 64
        records = self._take(self._record_bytes * kept)
        columns = shape.meta_columns
        meta = self._take(4 * columns * kept * model.slots)
        ring = self._take(model.slots * model.ring * model.row_bytes)
        rows = self._take(shape.max_rows * model.row_bytes)
        self.page_offset: Final = page
        self._records_offset: Final = records
        self.meta_offset: Final = meta
        self.windows_offset: Final = ring
        self.rows_offset: Final = rows
        self.size: Final = self._take(0)
        self.fd = os.memfd_create("farspark-rounds") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.size)
        self.memory: Final = mmap.mmap(self.fd, self.size)
        view = memoryview(self.memory)
        self._views = [view]

        def array(at: int, kind: type[np.generic], *dimensions: int) -> npt.NDArray[Any]:
            count = int(np.prod(dimensions))
            return np.frombuffer(self.memory, dtype=kind, count=count, offset=at).reshape(dimensions)

        self.words: npt.NDArray[np.uint32] = array(words, np.uint32, 8)
        self.wanted: npt.NDArray[np.uint32] = array(wanted, np.uint32, model.slots)
        self._records = view[records : records + self._record_bytes * kept]
        # What stands behind a record's number, by requests: owners, slots, k_windows. The windows come last.
        self._bodies = [struct.Struct(f"<III{n}Q{2 * n}i") for n in range(model.slots + 1)]
        self._meta: npt.NDArray[np.int32] = array(meta, np.int32, kept, model.slots, columns)
        # For single numbers: an array of numpy's takes several times as long to be written to.
        self._word_view = self.words.data
        self._head_words = self._records.cast("I")
        self.address: Final = int(array(0, np.uint8, 1).ctypes.data)
        self.counters: Final = Area(view[areas[0] : areas[0] + 2 * _STATS_BYTES])
        self.details: Final = Area(view[areas[1] : areas[1] + 2 * _STATS_BYTES])
        self.meta_row_bytes: Final = 4 * columns  # of a request's metadata
        self._meta_bytes: Final = self.meta_row_bytes * model.slots
        self._window_bytes: Final = model.ring * model.row_bytes
        self._ring_view = view[ring : ring + model.slots * self._window_bytes]
        self.rows: Final = view[rows : rows + shape.max_rows * model.row_bytes]

    def _take(self, size: int) -> int:
        """Room for `size` bytes, on pages of its own."""
        at = self._end
        self._end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        return at

    # The engine thread.

    def describe(self, round_: int, submission: Submission, windows: Sequence[int]) -> None:
        """Replaces the descriptor of the round 64 before. Its number goes first and the new one comes last, so that a reader in
        between takes it for neither."""
        slots, owners, k_windows, phase, _ = submission
        is_prefill = phase is not Phase.DECODE
        if (
            self._describe is not None
            and not windows
            and self._describe(self.record_address(round_), round_, slots, owners, k_windows, is_prefill)
        ):
            return
        at, n = round_ % KEPT, len(slots)
        head = at * self._record_bytes // 4
        words = self._head_words
        words[head] = (round_ + 1) % ROUNDS  # never found in this place
        self._bodies[n].pack_into(
            self._records,
            4 * (head + 1),
            n,
            is_prefill,
            len(windows),
            *owners,
            *slots,
            *([k_windows] * n if isinstance(k_windows, int) else k_windows),
        )
        if windows:
            place = head + (_HEAD_BYTES + 16 * n) // 4
            for slot in windows:
                words[place] = slot
                place += 1
        words[head] = round_

    def meta_address(self, round_: int) -> int:
        """Where the stream puts the metadata of `round_`, int32 `[n, columns]`."""
        return self.address + self.meta_offset + (round_ % KEPT) * self._meta_bytes

    def window_address(self, slot: int) -> int:
        """Where the stream puts the ring rows of `slot`, all of them, in the ring's own order."""
        return self.address + self.windows_offset + slot * self._window_bytes

    @property
    def max_copies(self) -> int:
        """That a round's stream makes to here: metadata, rows, a window of every slot."""
        return 2 + self.shape.model.slots

    @property
    def rows_address(self) -> int:
        return self.address + self.rows_offset

    @property
    def window_bytes(self) -> int:
        return self._window_bytes

    # The proxy.

    def record(self, round_: int) -> bytes | None:
        """A copy of the descriptor for `describe`d rounds; None if it is not there yet, or not any more.

        Only a copy that was made after the round was gathered is certain to be whole: before that, a store of the engine's
        thread may be seen before an earlier one.
        """
        at = (round_ % KEPT) * self._record_bytes
        if self._head_words[at // 4] != round_:
            return None
        copy = bytes(self._records[at : at + self._record_bytes])
        return copy if self._head_words[at // 4] == round_ else None

    def record_address(self, round_: int) -> int:
        """Where the descriptor of `round_` is, if it is there, as long as a copy of it."""
        return self.address + self._records_offset + (round_ % KEPT) * self._record_bytes

    def decode(self, record: bytes) -> Descriptor:
        n = int.from_bytes(record[4:8], "little")
        _, phase, windows, *values = self._bodies[n].unpack_from(record, 4)
        at = (_HEAD_BYTES + 16 * n) // 4
        asked = memoryview(record).cast("i")[at : at + windows].tolist() if windows else []
        return Descriptor(values[n : 2 * n], values[:n], values[2 * n :], _PHASES[phase], asked)

    def meta(self, round_: int, n: int) -> npt.NDArray[np.int32]:
        """A copy, int32 `[n, columns]`. Only what `gathered` says afterwards tells whether it still was that round's."""
        return self._meta[round_ % KEPT, :n].copy()

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        """A private copy of rows `first_pos .. first_pos + n_rows - 1` of the staged window of `slot`, in order."""
        row_bytes, ring = self.shape.model.row_bytes, self.shape.model.ring
        begin = first_pos % ring
        head = min(n_rows, ring - begin)
        base = slot * self._window_bytes
        rows = bytearray(n_rows * row_bytes)
        rows[: head * row_bytes] = self._ring_view[base + begin * row_bytes : base + (begin + head) * row_bytes]
        rows[head * row_bytes :] = self._ring_view[base : base + (n_rows - head) * row_bytes]
        return memoryview(rows)

    # Words: one writer each.

    @property
    def ready_pid(self) -> int:
        return int(self.words[0])

    def say_ready(self, pid: int) -> None:
        self.words[0] = pid

    @property
    def heartbeat(self) -> int:
        return int(self.words[1])

    def beat(self) -> None:
        self.words[1] = (int(self.words[1]) + 1) % ROUNDS

    @property
    def noted(self) -> int:
        """The newest round that the proxy is done with."""
        return int(self.words[2])

    def note(self, round_: int) -> None:
        self.words[2] = round_

    def ask(self, slot: int) -> None:
        """Have the window of `slot` staged with a later round of its."""
        self.wanted[slot] = (int(self.wanted[slot]) + 1) % ROUNDS
        self._word_view[3] = (self._word_view[3] + 1) % ROUNDS

    @property
    def asks(self) -> int:
        """How often the proxy has asked."""
        return self._word_view[3]

    def renew(self, noted: int) -> None:
        """Make room for another proxy process: none may be running."""
        self.words[:3] = (0, 0, noted)
        self.counters.clear()
        self.details.clear()

    # The end.

    def close(self) -> None:
        """Idempotent. The mapping itself goes with its last view."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Region:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Region {self.size} bytes, proxy {self.ready_pid} at round {self.noted}>"
