"""hostflag.h with types: one method for each call, and no policy. The contract, threads and orders are in that header.

Rounds are cyclic 32-bit numbers; any integer is taken modulo 2^32. Times are nanoseconds, deadlines on the clock of
`time.monotonic_ns`. Outcomes are returned as a `Status`; what can only be a mistake of the caller's raises.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple

from farspark.errors import FarsparkError
from farspark.native.loader import HostflagLibrary
from farspark.native.round_calls import load_round_calls

FAR: Final = 1 << 26  # HOSTFLAG_FAR
EVENTS: Final = 64  # HOSTFLAG_EVENTS
DEFAULT_PATIENCE_NS: Final = 100_000_000


class Status(enum.IntEnum):
    OK = 0
    LOST = 1  # somebody else settled this round
    LATE = 2  # released had already reached this round
    FINISHED = 3  # gathered, and settled by somebody else: keep the books, send nothing
    ENDED = 4  # everything was failed ahead and this round was not gathered
    TIMED_OUT = 5
    FORCED = 6  # done, without waiting any longer for those who may still use the reply
    CLOSED = 7
    BUSY = 8  # calls on the page have not returned yet

    INVALID = -1
    NOT_GATHERED = -2
    NOT_OWNER = -3
    RUNNING = -4
    PENDING = -5
    OTHER_VERSION = -6
    SYSTEM = -7
    REFUSED = -8  # the device's driver refused a call of `Submitter.submit`


class Call(enum.IntEnum):
    """What a submission asks of the device's driver."""

    NONE = 0
    LAUNCH = 1
    COPY = 2
    WRITE_GATHERED = 3
    WAIT_RELEASED = 4
    COPY_REPLY = 5
    WRITE_CONSUMED = 6
    GATHERED_AND_WAIT = 7  # in one batch
    TAKE_REPLY = 8


class How(enum.IntEnum):
    """What an event of the watchdog's ended."""

    PREEMPTED = 1
    FAILED_ALL = 2
    PROXY_DEAD = 3
    PROXY_KILLED = 4


class HostflagError(FarsparkError):
    """A call that makes no sense in this state; `status` is below 0."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class PageInfo:
    """Where things are. Offsets are bytes from `address`; errnos are 0 where all is well."""

    address: int
    bytes: int
    gathered_offset: int
    claimed_offset: int
    released_offset: int
    consumed_offset: int
    reply_offset: int
    reply_bytes: int
    lock_errno: int
    dontfork_errno: int
    is_owner: bool

    @property
    def why_not_locked(self) -> str | None:
        """None if the memory is locked; else a sentence for the log."""
        if self.lock_errno == 0:
            return None
        return f"{self.bytes} bytes could not be locked in memory: {os.strerror(self.lock_errno)} (see ulimit -l)"


@dataclass(frozen=True, slots=True)
class Words:
    gathered: int
    claimed: int
    claimant: int  # 0: the owner's process, else a process id
    released: int
    consumed: int


@dataclass(frozen=True, slots=True)
class Event:
    round: int
    how: How
    wall_ns: int  # since the epoch
    wait_ns: int


@dataclass(frozen=True, slots=True)
class WatchdogStats:
    rounds_watched: int
    preempted: int
    failed_all: int
    proxies_dead: int
    proxies_killed: int
    events_total: int
    longest_wait_ns: int
    deadline_ns: int  # 0 before the first start
    is_running: bool
    events: tuple[Event, ...]  # the newest 64, oldest first


class _Info(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("gathered_offset", ctypes.c_uint32),
        ("claimed_offset", ctypes.c_uint32),
        ("released_offset", ctypes.c_uint32),
        ("consumed_offset", ctypes.c_uint32),
        ("reply_offset", ctypes.c_uint32),
        ("reply_bytes", ctypes.c_uint32),
        ("lock_errno", ctypes.c_int32),
        ("dontfork_errno", ctypes.c_int32),
        ("is_owner", ctypes.c_uint32),
    )


class _Words(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint32) for name in ("gathered", "claimed", "claimant", "released", "consumed"))


class _Event(ctypes.Structure):
    _fields_ = (
        ("round", ctypes.c_uint32),
        ("how", ctypes.c_uint32),
        ("wall_ns", ctypes.c_int64),
        ("wait_ns", ctypes.c_int64),
    )


class _Stats(ctypes.Structure):
    _fields_ = (
        ("rounds_watched", ctypes.c_uint64),
        ("preempted", ctypes.c_uint64),
        ("failed_all", ctypes.c_uint64),
        ("proxies_dead", ctypes.c_uint64),
        ("proxies_killed", ctypes.c_uint64),
        ("events_total", ctypes.c_uint64),
        ("longest_wait_ns", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
        ("is_running", ctypes.c_uint32),
        ("events_kept", ctypes.c_uint32),
        ("events", _Event * EVENTS),
    )


class _Device(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("launch", "to_host", "to_device", "write_value", "wait_value", "batch", "take_reply", "page")
    )


WRITE_VALUE: Final = 2  # HOSTFLAG_WRITE_VALUE
WAIT_VALUE: Final = 1  # HOSTFLAG_WAIT_VALUE
TAKE_REPLY_THREADS: Final = 512  # HOSTFLAG_TAKE_REPLY_THREADS


class Operation(ctypes.Structure):
    """On a word, one of a batch."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("reserved0", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved1", ctypes.c_uint32),
        ("reserved2", ctypes.c_uint64 * 2),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_uint64),
        ("parameters", ctypes.c_uint64),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
    )


class Launch:
    """A kernel's launch in prepared memory; `fill` sets what changes from one to the next."""

    def __init__(self, function: int, threads: int, shared_bytes: int, parameters: int) -> None:
        """`function` is the driver's handle; it takes `parameters` values of at most eight bytes each."""
        self._values = (ctypes.c_uint64 * parameters)()
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_uint64 * parameters)(*range(first, first + 8 * parameters, 8))
        self._launch = _Launch(function, ctypes.addressof(self._pointers), (1, 1, 1), (threads, 1, 1), shared_bytes)
        self._grid = self._launch.grid
        # Little-endian, as every machine is that hostflag.h knows: a shorter value lies in the first bytes of its eight.
        self._pack: Final = struct.Struct(f"<{parameters}Q").pack_into
        self.function: Final = function
        self.threads: Final = threads
        self.shared_bytes: Final = shared_bytes
        self.address: Final = ctypes.addressof(self._launch)
        self.parameters: Final = ctypes.addressof(self._pointers)
        # For whoever fills it without `fill`: u64 [parameters], u32 [3].
        self.values_address: Final = first
        self.grid_address: Final = ctypes.addressof(self._grid)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self._grid[0], self._grid[1], self._grid[2]

    def arguments(self, stream: int) -> tuple[int | None, ...]:
        """What `cuLaunchKernel` takes."""
        return self.function, *self.grid, self.threads, 1, 1, self.shared_bytes, stream, self.parameters, None

    def fill(self, grid_x: int, grid_y: int, *values: int) -> None:
        """For the next launch; none may be on its way into the driver. Values are 0 or above."""
        self._grid[0], self._grid[1] = grid_x, grid_y
        self._pack(self._values, 0, *values)


class DeviceCalls(NamedTuple):
    """Addresses of the driver's functions, and the handle of a kernel, as hostflag.h has them."""

    launch: int  # 0: nothing is ever launched
    to_host: int
    to_device: int
    write_value: int
    wait_value: int
    batch: int = 0  # 0: there is none
    take_reply: int = 0  # 0: the reply is copied


_ROUND: Final = struct.Struct("<QQQIIIi")


class Submitter:
    """Hands rounds to a device's driver, each in one call without the GIL. Used by the thread that enqueues on the stream."""

    def __init__(self, page: HostPage, calls: DeviceCalls, *, device_page: int, max_copies: int) -> None:
        """`device_page` is the page's address as the device has it."""
        self._submit = page.library.calls.hostflag_submit
        self._page = page
        quick = load_round_calls()
        self._submit_round = None if quick is None else quick.submit_round
        self._device = _Device(*calls, device_page)
        self._round = ctypes.create_string_buffer(_ROUND.size + 24 * max_copies)
        self._addresses = ctypes.addressof(self._device), ctypes.addressof(self._round)
        at_submit = ctypes.cast(self._submit, ctypes.c_void_p).value or 0
        self._submitted = at_submit, page._handle.value or 0, *self._addresses
        self._packs = [struct.Struct(f"<QQQIIIi{3 * copies}Q").pack_into for copies in range(max_copies + 1)]

    def submit(self, stream: int, round_: int, copies: Sequence[int], reply_to: int, launch: int = 0) -> Status:
        """Enqueue a round. `copies`: to, from, bytes, one after the other; `launch`: the address of a `Launch`, 0 for none.

        OK, REFUSED (`refusal` says what), CLOSED. Raises HostflagError: not the owner, a launch that the device has no call for.
        """
        if self._submit_round is not None and not copies:
            status = self._submit_round(*self._submitted, stream, launch, reply_to, round_)
        else:
            number = len(copies) // 3
            self._packs[number](self._round, 0, stream, launch, reply_to, round_, number, 0, 0, *copies)
            status = self._submit(self._page._handle, *self._addresses)
        if status == 0:
            return Status.OK
        return self._page._outcome(status, "submit") if status != Status.REFUSED else Status.REFUSED

    def refusal(self) -> tuple[Call, int]:
        """Of the newest submission: which call was refused, and the driver's number for why."""
        *_, failed, result = _ROUND.unpack_from(self._round)
        return Call(failed), result


class Reply:
    """A private buffer of a page's reply size at a fixed address, so that publishing it converts nothing."""

    def __init__(self, size: int) -> None:
        self._buffer = (ctypes.c_char * size)()
        self.address: Final = ctypes.addressof(self._buffer)
        self.size: Final = size
        self.memory: Final = memoryview(self._buffer).cast("B")  # writable, `size` bytes


class HostPage:
    """One page, made by one of the three class methods and ended by `close`; every other method may be called from any thread.

    Outcomes of a call after `close`, or in a forked child, are Status.CLOSED; where there is no status to return it raises
    HostflagError with that status.
    """

    def __init__(self, library: HostflagLibrary, handle: ctypes.c_void_p, memory: object) -> None:
        self.library: Final = library
        self._calls: Final = library.calls
        self._handle: Final = handle
        self._memory = memory  # keeps the caller's mapping from being closed under the page
        self._is_closed = False
        self.info: Final = self._read_info()

    # ---- making and ending

    @classmethod
    def create(cls, library: HostflagLibrary, reply_bytes: int, *, start: int = 0) -> HostPage:
        """A private page whose words stand at `start`; the first round is start + 1. Raises ValueError, OSError."""
        handle = ctypes.c_void_p()
        _check_reply_bytes(library, reply_bytes)
        status = library.calls.hostflag_page_create(reply_bytes, start, ctypes.byref(handle))
        _raise_if_wrong(library, status, "create")
        return cls(library, handle, None)

    @classmethod
    def format(
        cls, library: HostflagLibrary, memory: mmap.mmap, offset: int, reply_bytes: int, *, start: int = 0
    ) -> HostPage:
        """A page at `offset` of a shared mapping, owned by this process; see `bytes_needed`. `memory` cannot be closed before
        the page. Raises ValueError, OSError, HostflagError (no room, or the address is no multiple of 128)."""
        handle = ctypes.c_void_p()
        _check_reply_bytes(library, reply_bytes)
        view, size = _view(memory, offset)
        status = library.calls.hostflag_page_format(view, size, reply_bytes, start, ctypes.byref(handle))
        _raise_if_wrong(library, status, "format")
        return cls(library, handle, view)

    @classmethod
    def attach(cls, library: HostflagLibrary, memory: mmap.mmap, offset: int) -> HostPage:
        """The page that another process formatted there. Raises HostflagError (another version, no page), OSError."""
        handle = ctypes.c_void_p()
        view, size = _view(memory, offset)
        _raise_if_wrong(library, library.calls.hostflag_page_attach(view, size, ctypes.byref(handle)), "attach")
        return cls(library, handle, view)

    @staticmethod
    def bytes_needed(library: HostflagLibrary, reply_bytes: int) -> int:
        """Room that `format` needs. Raises ValueError."""
        _check_reply_bytes(library, reply_bytes)
        return int(library.calls.hostflag_page_bytes(reply_bytes))

    def close(self, *, patience_ns: int = DEFAULT_PATIENCE_NS) -> Status:
        """Give the memory back; from any thread, twice is fine. Waits that are in a call return CLOSED.

        BUSY: they did not within `patience_ns`; the memory stays and `close` may be called again. Raises HostflagError
        (PENDING) while a stream is parked on the page: fail the round first.
        """
        status = self._outcome(self._calls.hostflag_page_destroy(self._handle, patience_ns), "close")
        if status is Status.OK:
            self._is_closed = True
            self._memory = None
        return status

    def __enter__(self) -> HostPage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Fails what is pending, then closes."""
        if not self._is_closed:
            if self.info.is_owner:
                self.fail_all(self.words().gathered, patience_ns=DEFAULT_PATIENCE_NS)
            self.close()

    def __del__(self) -> None:
        # The memory is kept: a stream may be parked on it.
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)

    def __repr__(self) -> str:
        if self._is_closed:
            return "<HostPage closed>"
        words = _Words()
        self._calls.hostflag_page_words(self._handle, ctypes.byref(words))
        values = " ".join(f"{name} {getattr(words, name)}" for name, *_ in words._fields_)
        return f"<HostPage {'owner' if self.info.is_owner else 'attached'} {values}>"

    # ---- the proxy

    def make_reply(self) -> Reply:
        return Reply(self.info.reply_bytes)

    def wait_gathered(self, round_: int, *, spin_ns: int, nap_ns: int, deadline_ns: int) -> Status:
        """OK, FINISHED, ENDED, TIMED_OUT, CLOSED. `nap_ns` 0 spins to the end."""
        status = self._calls.hostflag_wait_gathered(self._handle, round_, spin_ns, nap_ns, deadline_ns)
        return self._outcome(status, "wait_gathered")

    def publish(self, round_: int, reply: Reply) -> Status:
        """Claim, copy, release. OK, LOST, LATE, CLOSED. Raises HostflagError: not gathered yet, a reply of another size."""
        status = self._calls.hostflag_publish(self._handle, round_, reply.address, reply.size)
        return self._outcome(status, "publish")

    def native_calls(self) -> tuple[int, int, int]:
        """The addresses of `hostflag_publish` and `hostflag_wait_gathered`, and the page as they take it: for native code that
        serves rounds by itself."""
        calls = self._calls.hostflag_publish, self._calls.hostflag_wait_gathered
        publish, wait = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in calls)
        return publish, wait, self._handle.value or 0

    def fail(self, round_: int) -> Status:
        """The same with zeros. OK, LOST, LATE, CLOSED. Raises HostflagError: not gathered yet."""
        return self._outcome(self._calls.hostflag_fail(self._handle, round_), "fail")

    def claim(self, round_: int) -> Status:
        """OK: the caller writes the reply and must call `release`. LOST, CLOSED. Raises HostflagError: not gathered yet."""
        return self._outcome(self._calls.hostflag_claim(self._handle, round_), "claim")

    def release(self, round_: int) -> Status:
        """OK, LATE, CLOSED."""
        return self._outcome(self._calls.hostflag_release(self._handle, round_), "release")

    # ---- the owner

    def fail_all(self, newest: int, *, patience_ns: int = DEFAULT_PATIENCE_NS) -> tuple[Status, int]:
        """Fail everything that is pending or may come, at least to `newest`. (OK, FORCED or CLOSED; the round at which the
        words stand). The next round is that plus 1. Raises HostflagError: not the owner."""
        far = ctypes.c_uint32()
        status = self._calls.hostflag_fail_all(self._handle, newest, patience_ns, ctypes.byref(far))
        return self._outcome(status, "fail_all"), far.value

    def follow(self, pidfd: int | None) -> Status:
        """The process that serves the page; None for none. `pidfd` stays the caller's. Raises HostflagError, OSError."""
        return self._outcome(self._calls.hostflag_follow(self._handle, -1 if pidfd is None else pidfd), "follow")

    def start_watchdog(self, deadline_ns: int) -> Status:
        """Raises HostflagError (runs already, not the owner, a deadline of 0 or less), OSError."""
        return self._outcome(self._calls.hostflag_watchdog_start(self._handle, deadline_ns), "start_watchdog")

    def stop_watchdog(self) -> Status:
        return self._outcome(self._calls.hostflag_watchdog_stop(self._handle), "stop_watchdog")

    def set_watchdog_deadline(self, deadline_ns: int) -> Status:
        status = self._calls.hostflag_watchdog_set_deadline(self._handle, deadline_ns)
        return self._outcome(status, "set_watchdog_deadline")

    def watchdog_stats(self) -> WatchdogStats:
        """Raises HostflagError (CLOSED)."""
        stats = _Stats()
        self._demand(self._calls.hostflag_watchdog_get_stats(self._handle, ctypes.byref(stats)), "watchdog_stats")
        events = tuple(
            Event(round=event.round, how=How(event.how), wall_ns=event.wall_ns, wait_ns=event.wait_ns)
            for event in stats.events[: stats.events_kept]
        )
        return WatchdogStats(
            rounds_watched=stats.rounds_watched,
            preempted=stats.preempted,
            failed_all=stats.failed_all,
            proxies_dead=stats.proxies_dead,
            proxies_killed=stats.proxies_killed,
            events_total=stats.events_total,
            longest_wait_ns=stats.longest_wait_ns,
            deadline_ns=stats.deadline_ns,
            is_running=bool(stats.is_running),
            events=events,
        )

    def words(self) -> Words:
        """Raises HostflagError (CLOSED)."""
        words = _Words()
        self._demand(self._calls.hostflag_page_words(self._handle, ctypes.byref(words)), "words")
        return Words(words.gathered, words.claimed, words.claimant, words.released, words.consumed)

    # ---- in place of a stream

    def gather(self, round_: int) -> Status:
        return self._outcome(self._calls.hostflag_gather(self._handle, round_), "gather")

    def wait_released(self, round_: int, *, spin_ns: int, nap_ns: int, deadline_ns: int) -> Status:
        """OK, TIMED_OUT, CLOSED."""
        status = self._calls.hostflag_wait_released(self._handle, round_, spin_ns, nap_ns, deadline_ns)
        return self._outcome(status, "wait_released")

    def read_reply(self, reply: Reply) -> Status:
        status = self._calls.hostflag_read_reply(self._handle, reply.address, reply.size)
        return self._outcome(status, "read_reply")

    def consume(self, round_: int) -> Status:
        return self._outcome(self._calls.hostflag_consume(self._handle, round_), "consume")

    # ---- helpers

    def _outcome(self, status: int, what: str) -> Status:
        if status < 0:
            _raise_if_wrong(self.library, status, what)
        return Status(status)

    def _demand(self, status: int, what: str) -> None:
        if self._outcome(status, what) is not Status.OK:
            raise HostflagError(Status(status), f"{what}: {_text(self.library, status)}")

    def _read_info(self) -> PageInfo:
        info = _Info()
        self._demand(self._calls.hostflag_page_info(self._handle, ctypes.byref(info)), "info")
        values = {name: getattr(info, name) for name, *_ in info._fields_}
        return PageInfo(**{**values, "is_owner": bool(info.is_owner)})


def _view(memory: mmap.mmap, offset: int) -> tuple[ctypes.Array[ctypes.c_char], int]:
    """All of `memory` from `offset` on. As long as it lives, `memory.close()` raises BufferError."""
    size = len(memory) - offset
    if offset < 0 or size <= 0:
        raise ValueError(f"offset {offset} in a mapping of {len(memory)} bytes")
    return (ctypes.c_char * size).from_buffer(memory, offset), size


def _check_reply_bytes(library: HostflagLibrary, reply_bytes: int) -> None:
    # The C side takes it modulo 2^32.
    if not 0 < reply_bytes < 1 << 32 or library.calls.hostflag_page_bytes(reply_bytes) == 0:
        raise ValueError(f"a reply of {reply_bytes} bytes, expected 1 to {1 << 26}")


def _text(library: HostflagLibrary, status: int) -> str:
    return str(library.calls.hostflag_status_text(status).decode())


def _raise_if_wrong(library: HostflagLibrary, status: int, what: str) -> None:
    if status == Status.SYSTEM:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    if status < 0:
        raise HostflagError(Status(status), f"{what}: {_text(library, status)}")
