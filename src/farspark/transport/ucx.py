"""Frames over UCX active messages: RDMA where both ends have a device for it, else UCX's TCP.

`native/ucx_channel` does the waiting, one call of it per send, receive or whole round, without the GIL. Here are the policy
(which lanes, which settings, how long), Python's side of the memory, and who may still use a channel that is being closed.

`ucx://` takes the best lane that both ends have; `o1rdma://` and `o1tcp://` pin it. What is really used is read from the
endpoint.
"""

from __future__ import annotations

import ctypes
import enum
import math
import os
import re
import resource
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NoReturn, cast

from farspark.clock import Deadline
from farspark.errors import ConfigError, ProtocolError, TransportError
from farspark.native.build import NativeUnavailable
from farspark.native.round_calls import Outcome, RoundCalls, UcxCalls, ready_round_calls
from farspark.native.ucx import Address, UcxLibrary, UcxPiece, load_ucx
from farspark.transport.addresses import SocketAddress, connect_to_any, listen_on_any, show
from farspark.transport.base import Memory, Piece
from farspark.transport.endpoint import DEFAULT_CONNECT_SPIN_US, DEFAULT_LISTEN_SPIN_US, Endpoint
from farspark.transport.ends import (
    NEVER_NS,
    GuardedChannelEnd,
    ListenerEnd,
    WatchedChannelEnd,
    at_ns,
    at_s,
    memory_of,
)

# How long a client may take between its first packet and the answer to our greeting.
ESTABLISH_NS: Final = 5_000_000_000
# How long a closed channel waits, on a thread of its own, until the peer has taken what was sent before the end. The peer
# answers as soon as it looks; one that never looks loses the last frames.
LINGER_NS: Final = 1_000_000_000
CLOSE_WITHIN_S: Final = 5.0
# Connections that nobody accepted yet.
_BACKLOG: Final = 128
# Beside one frame of the largest size: what a peer may send ahead while this side sends.
_UNREAD_SLACK_BYTES: Final = 4 * 1024 * 1024
# Up to what size a frame gets memory of its own: below the 128 KiB from which on C's library asks the system for it each time.
_SMALL_BYTES: Final = 96 * 1024
_TEXT_BYTES: Final = 64 * 1024
# RDMA registers the memory that it uses; less than this is not enough for the queues of a few connections.
_LITTLE_MEMLOCK_BYTES: Final = 64 * 1024 * 1024

# What UCX may travel over. `rc` is InfiniBand's and RoCE's reliable connection, whoever makes the card.
TRANSPORTS: Final = {"ucx": "rc,tcp", "o1rdma": "rc", "o1tcp": "tcp"}
# Taken unless the environment has UCX_<name>. A dead or silent peer is noticed within seconds by these, with UCX's own
# defaults within half a minute or never; a round's deadline does not depend on either.
SETTINGS: Final = (
    ("KEEPALIVE_INTERVAL", "1s"),
    ("TCP_KEEPIDLE", "1s"),
    ("TCP_KEEPINTVL", "1s"),
    # UCX 1.13 knows them by the first two names only.
    ("RC_TIMEOUT", "50ms"),
    ("RC_RETRY_COUNT", "5"),
    ("RC_VERBS_TIMEOUT", "50ms"),
    ("RC_VERBS_RETRY_COUNT", "5"),
    ("RC_MLX5_TIMEOUT", "50ms"),
    ("RC_MLX5_RETRY_COUNT", "5"),
    # Lanes for what is never asked for, remote access to memory, on whatever other card there is.
    ("MAX_RNDV_LANES", "1"),
    # A round of some 100 KB is one segment; in segments of 8 KB it takes twice as long.
    ("TCP_TX_SEG_SIZE", "128k"),
    ("TCP_RX_SEG_SIZE", "128k"),
)
# UCX 1.13 knows a setting of TCP by its own name only, later ones by the name with the transport's. Not so of RC's: TIMEOUT
# alone would be that of connecting.
_PREFIXES: Final = ("TCP_",)
# Before, UCX's TCP writes an IPv6 address over the end of an IPv4 one where a device has both.
_FIRST_WITH_TCP_OVER_IPV6: Final = (1, 14)

# "lane[1]:  1:tcp/lo.0 md[0] -> md[0]/tcp/sysdev[255] rma_bw#0 am am_bw#0 wireup": the transport, its device, what it is for.
_LANE = re.compile(r"lane\[\d+\]:\s+\d+:([a-z0-9_]+)/(\S+?)\.\d+\s(.*)")
# "resource 1  :  md 0  dev 1  flags -- tcp/lo"
_RESOURCE = re.compile(r"resource\s+\d+\s+:.*\s([a-z0-9_]+/\S+)\s*$", re.MULTILINE)


class _Status(enum.IntEnum):
    OK = 0
    TIMED_OUT = 1
    INTERRUPTED = 2
    CLOSED = 3
    GONE = 4
    ABANDONED = 5
    HELD = 6

    INVALID = -1
    NO_MEMORY = -2
    SYSTEM = -3
    UCX = -4
    REFUSED = -5
    UNREACHABLE = -6
    IN_USE = -7
    FOREIGN = -8


class _PyBuffer(ctypes.Structure):
    """Py_buffer, of Python's stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes, _release_buffer.restype = (ctypes.POINTER(_PyBuffer),), None


class _Held:
    """The memory of a frame's pieces, where it is, and held there until `release`: nobody can free or resize it."""

    __slots__ = ("_buffers", "_count", "pieces")

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = (UcxPiece * len(pieces))()
        self._buffers = (_PyBuffer * len(pieces))()
        self._count = 0
        try:
            for piece, buffer, place in zip(pieces, self._buffers, self.pieces, strict=True):
                _get_buffer(piece, buffer, 0)
                self._count += 1
                place.data, place.bytes = buffer.buf, buffer.len
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        for buffer in self._buffers[: self._count]:
            _release_buffer(buffer)
        self._count = 0

    def unless_late(self, status: int) -> _Held | None:
        """Release it, unless UCX still has it."""
        if status == _Status.HELD:
            return self
        self.release()
        return None


class _PlainCalls:
    """`UcxCalls` through ctypes, which needs no more than the shim."""

    def __init__(self, calls: ctypes.CDLL, handle: ctypes.c_void_p, spin_ns: int) -> None:
        self._calls = calls
        self._handle = handle
        self._spin_ns = spin_ns
        self._length = ctypes.c_size_t()

    def send(self, pieces: Sequence[Piece], until_s: float) -> Outcome | None:
        held = _Held(pieces)
        status = self._calls.ucxchannel_send(self._handle, held.pieces, len(pieces), _to_ns(until_s))
        late = held.unless_late(status)
        return (status, False, 0, late) if status else None

    def receive(self, limit: int, until_s: float) -> memoryview | Outcome:
        status = self._calls.ucxchannel_receive(
            self._handle, self._spin_ns, _to_ns(until_s), ctypes.byref(self._length)
        )
        length = self._length.value
        return (status, False, length, None) if status or length > limit else self._take(length)

    def exchange(self, pieces: Sequence[Piece], limit: int, until_s: float) -> memoryview | Outcome:
        held, is_sent = _Held(pieces), ctypes.c_int()
        status = self._calls.ucxchannel_exchange(
            self._handle,
            held.pieces,
            len(pieces),
            self._spin_ns,
            _to_ns(until_s),
            ctypes.byref(is_sent),
            ctypes.byref(self._length),
        )
        late = held.unless_late(status)
        length = self._length.value
        return (status, bool(is_sent.value), length, late) if status or length > limit else self._take(length)

    def _take(self, length: int) -> memoryview:
        memory = bytearray(length)
        self._calls.ucxchannel_take(self._handle, _address_of(memory) if memory else None)
        return memoryview(memory)


def _quick_calls(quick: RoundCalls, calls: ctypes.CDLL, handle: ctypes.c_void_p, spin_ns: int) -> UcxCalls:
    """The same through `native.round_calls`, which takes microseconds less."""
    assert handle.value is not None
    send, receive, exchange, take = (
        ctypes.cast(calls[f"ucxchannel_{name}"], ctypes.c_void_p).value or 0
        for name in ("send", "receive", "exchange", "take")
    )
    return cast(UcxCalls, SimpleNamespace(**quick.ucx_calls(send, receive, exchange, take, handle.value, spin_ns)))


class UcxChannel(GuardedChannelEnd, WatchedChannelEnd):
    """A `Channel` over one UCX endpoint, which it owns."""

    def __init__(
        self, library: UcxLibrary, handle: ctypes.c_void_p, lane: str, *, max_frame_bytes: int, spin_us: int
    ) -> None:
        self._calls = library.calls
        self._handle = handle
        quick, spin_ns = ready_round_calls(), spin_us * 1000
        waiting: UcxCalls = (
            _PlainCalls(self._calls, handle, spin_ns)
            if quick is None
            else _quick_calls(quick, self._calls, handle, spin_ns)
        )
        self._send, self._receive, self._exchange = waiting.send, waiting.receive, waiting.exchange
        self._lane = lane
        self._is_closed = self._is_busy = False
        self.max_frame_bytes = max_frame_bytes
        self._retiring = threading.Lock()  # guards the one below
        self._is_retired = False
        self._late: object = None  # what UCX did not let go of
        self._begun: memoryview | None = None  # a frame that `recv_head` has shown
        self._memory = bytearray()  # of the last large frame
        self._limit = -1  # what `max_frame_bytes` was when it was last looked at
        self._most = 0  # what of it `_receive` takes by itself

    # What a round passes is written out in these three, `_begin` and `_end` included: a call of Python's own costs it as much as
    # the rest of the line.

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        self._is_busy = True
        try:
            if self._is_closed or self._limit != self.max_frame_bytes:
                self._prepare()
            failed = self._send(pieces, at_s(deadline))
            if failed is not None:
                self._failed_to_send(failed)
        finally:
            self._is_busy = False
            if self._is_closed:
                self._let_go()

    def recv(self, deadline: Deadline) -> memoryview:
        self._is_busy = True
        try:
            if self._is_closed or self._limit != self.max_frame_bytes:
                self._prepare()
            if self._begun is not None:
                frame, self._begun = self._begun, None
                return frame
            got = self._receive(self._most, at_s(deadline))
            return got if type(got) is memoryview else self._received(got, deadline)
        finally:
            self._is_busy = False
            if self._is_closed:
                self._let_go()

    def recv_head(self, head_bytes: int, deadline: Deadline) -> tuple[memoryview, int]:
        """As `Channel.recv_head`; UCX hands frames out whole."""
        if self._begun is None:
            self._begun = self.recv(deadline)
        return self._begun, len(self._begun)

    def exchange(self, pieces: Sequence[Piece], deadline: Deadline) -> memoryview:
        """`send`, then `recv`, in one call without the GIL. Raises as they do."""
        self._is_busy = True
        try:
            if self._is_closed or self._limit != self.max_frame_bytes:
                self._prepare()
            got = self._exchange(pieces, self._most, at_s(deadline))
            if type(got) is memoryview:
                return got
            if not got[1]:
                self._failed_to_send(got)
            return self._received(got, deadline)
        finally:
            self._is_busy = False
            if self._is_closed:
                self._let_go()

    def _wake(self) -> None:
        with self._retiring:
            if not self._is_retired:
                self._calls.ucxchannel_wake(self._handle)

    def _let_go(self) -> None:
        """Close in the background, once: it may wait for the peer, and whoever closes has no time for that."""
        with self._retiring:
            if self._is_retired:
                return
            self._is_retired = True
        calls, handle, late = self._calls, self._handle, [self._late]
        self._late = None

        def retire() -> None:
            calls.ucxchannel_close(handle, time.monotonic_ns() + LINGER_NS)
            calls.ucxchannel_destroy(handle)
            # Not before, and then at once.
            if isinstance(late[0], _Held):
                late[0].release()
            late.clear()

        try:
            # No daemon: a process that ends meanwhile waits for it, and so what was sent last arrives.
            threading.Thread(target=retire, name="farspark-ucx-close").start()
        except RuntimeError:
            retire()  # the interpreter is ending and starts no thread any more

    def _prepare(self) -> None:
        """Make `max_frame_bytes` hold. Raises TransportError if the channel is closed."""
        if self._is_closed:
            raise TransportError(f"{self._lane}: closed")
        self._limit = self.max_frame_bytes
        self._most = min(self._limit, _SMALL_BYTES)
        self._calls.ucxchannel_set_max_unread(self._handle, self._limit + _UNREAD_SLACK_BYTES)

    def _failed_to_send(self, outcome: Outcome) -> NoReturn:
        status, _, _, self._late = outcome
        if status in (_Status.ABANDONED, _Status.HELD):
            self._is_closed = True
            raise TimeoutError(
                f"{self._lane}: deadline passed while sending a frame; closed, because a part of the frame may be sent"
            )
        self._fail(status)

    def _received(self, outcome: Outcome, deadline: Deadline) -> memoryview:
        """The frame that comes at last, where a first call has had another outcome than a frame."""
        got: memoryview | Outcome = outcome
        while type(got) is not memoryview:
            status, _, length, _ = got
            if status == _Status.OK:
                return self._take(length)
            if status == _Status.TIMED_OUT:
                raise TimeoutError(f"{self._lane}: deadline passed while waiting for a frame")
            if status != _Status.INTERRUPTED:
                self._fail(status)
            # Python has run its signal handlers meanwhile, which may raise.
            got = self._receive(self._most, at_s(deadline))
        return got

    def _take(self, length: int) -> memoryview:
        """A large frame, in the memory of the last one if nobody looks at that any more: fresh memory costs more than to copy."""
        if length > self._limit:
            self._is_closed = True
            raise ProtocolError(f"{self._lane}: frame of {length} bytes announced, at most {self._limit}")
        memory: Memory = self._memory
        if len(memory) < length or _is_looked_at(self._memory):
            memory = memory_of(length)
            if isinstance(memory, bytearray):
                self._memory = memory
        self._calls.ucxchannel_take(self._handle, _address_of(memory))
        return memoryview(memory)[:length]

    def _fail(self, status: int) -> NoReturn:
        closed_here = self._is_closed
        why = _said(self._calls)
        self._is_closed = True
        if status == _Status.FOREIGN:
            raise ProtocolError(f"{self._lane}: {why}")
        raise TransportError(f"{self._lane}: {'closed' if closed_here else why}")


class UcxListener(ListenerEnd):
    """A `Listener` over one UCX listener. Connections are established on a thread of its own, all at once, so that a client
    that is slow, or an owner that is not here to accept, keeps nobody waiting.
    """

    def __init__(
        self, library: UcxLibrary, handle: ctypes.c_void_p, endpoint: Endpoint, lanes: str, *, max_frame_bytes: int
    ) -> None:
        self._library = library
        self._handle = handle
        self._asked = endpoint
        self._lanes = lanes
        self._max_frame_bytes = max_frame_bytes
        address = Address()
        _check(library, library.calls.ucxchannel_listener_address(handle, ctypes.byref(address)), endpoint)
        self._endpoint = str(Endpoint(endpoint.scheme, _host_of(address), address.port))
        self._changed = threading.Condition()  # guards the three below
        self._waiting: deque[UcxChannel] = deque()
        self._is_closed = False
        self._why_ended = ""
        self._thread = threading.Thread(target=self._establish, name="farspark-ucx-listener", daemon=True)
        self._thread.start()

    def accept(self, deadline: Deadline) -> UcxChannel:
        with self._changed:
            while True:
                if self._is_closed or self._why_ended:
                    raise TransportError(f"{self._endpoint}: {self._why_ended or 'closed'}")
                if self._waiting:
                    return self._waiting.popleft()
                if deadline.has_passed():
                    raise TimeoutError(f"{self._endpoint}: deadline passed while waiting for a connection")
                left_s = deadline.left_s()
                self._changed.wait(None if left_s == math.inf else left_s)

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
            if not self._why_ended:
                self._library.calls.ucxchannel_listener_wake(self._handle)
        for channel in waiting:
            channel.close()
        # The port is free once this returns. A UCX that is stuck may not take its owner with it.
        self._thread.join(CLOSE_WITHIN_S)

    # The listener's own thread from here on.

    def _establish(self) -> None:
        calls = self._library.calls
        while True:
            handle = ctypes.c_void_p()
            status = calls.ucxchannel_accept(self._handle, ESTABLISH_NS, NEVER_NS, ctypes.byref(handle))
            if status:
                break
            self._hand_over(handle)
        with self._changed:
            if not self._is_closed:
                self._why_ended = _said(calls)
            self._changed.notify_all()
        calls.ucxchannel_listener_destroy(self._handle)

    def _hand_over(self, handle: ctypes.c_void_p) -> None:
        spin_us = DEFAULT_LISTEN_SPIN_US if self._asked.spin_us is None else self._asked.spin_us
        try:
            lane, _ = _lane_of(self._library, handle)
        except TransportError:
            self._library.calls.ucxchannel_destroy(handle)  # gone again
            return
        channel = UcxChannel(self._library, handle, lane, max_frame_bytes=self._max_frame_bytes, spin_us=spin_us)
        with self._changed:
            if not self._is_closed and len(self._waiting) < _BACKLOG:
                self._waiting.append(channel)
                self._changed.notify()
                return
        channel.close()


def connect(endpoint: Endpoint, deadline: Deadline, *, max_frame_bytes: int) -> UcxChannel:
    """Try every address of the host in turn. As `farspark.transport.connect`."""
    library = _library(endpoint)

    def connect_to(family: int, address: SocketAddress, own: Deadline) -> UcxChannel:
        context = _open_context(library, endpoint, family)
        try:
            return _connect_one(library, context, endpoint, address, own, max_frame_bytes)
        finally:
            library.calls.ucxchannel_context_release(context)

    return connect_to_any(endpoint, deadline, connect_to)


def _connect_one(
    library: UcxLibrary,
    context: ctypes.c_void_p,
    endpoint: Endpoint,
    address: SocketAddress,
    deadline: Deadline,
    max_frame_bytes: int,
) -> UcxChannel:
    handle = ctypes.c_void_p()
    status = library.calls.ucxchannel_connect(
        context,
        ctypes.byref(_numeric(address)),
        ctypes.byref(_own_address(endpoint)) if endpoint.bind else None,
        at_ns(deadline),
        ctypes.byref(handle),
    )
    if status == _Status.TIMED_OUT:
        raise TimeoutError("no answer in time")
    if status == _Status.REFUSED:
        raise TransportError(
            f"connection refused: nothing listens there, or a UCX that {library.version} does not understand "
            f"({_said(library.calls)})"
        )
    if status == _Status.UNREACHABLE:
        raise TransportError(
            f"no {_wanted(endpoint)} lane to it, or a UCX that {library.version} does not understand: "
            f"{_said(library.calls)}{_hint(library, endpoint)}"
        )
    if status == _Status.FOREIGN:
        raise ProtocolError(f"{show(address)}: {_said(library.calls)}; is it a Farspark worker of this version?")
    _check(library, status, endpoint)
    try:
        lane, transports = _lane_of(library, handle)
        if not all(_is_wanted(endpoint, transport) for transport in transports):
            raise ConfigError(f"endpoint {endpoint}: {_wanted(endpoint)} is pinned, and UCX uses {lane}")
    except BaseException:
        library.calls.ucxchannel_destroy(handle)
        raise
    spin_us = DEFAULT_CONNECT_SPIN_US if endpoint.spin_us is None else endpoint.spin_us
    return UcxChannel(library, handle, lane, max_frame_bytes=max_frame_bytes, spin_us=spin_us)


def listen(endpoint: Endpoint, *, max_frame_bytes: int) -> UcxListener:
    """Listen on the first address of the host that can be bound. As `farspark.transport.listen`."""
    library = _library(endpoint)

    def listen_on(family: int, address: SocketAddress) -> UcxListener:
        context, handle = _open_context(library, endpoint, family), ctypes.c_void_p()
        try:
            if library.calls.ucxchannel_listen(context, ctypes.byref(_numeric(address)), ctypes.byref(handle)):
                said = _said(library.calls)
                _try_to_listen(family, address)
                raise TransportError(said)
            found = _RESOURCE.findall(_described(library.calls.ucxchannel_context_describe, context))
            return UcxListener(library, handle, endpoint, f"ucx {' '.join(found)}", max_frame_bytes=max_frame_bytes)
        finally:
            library.calls.ucxchannel_context_release(context)

    return listen_on_any(endpoint, listen_on)


def _library(endpoint: Endpoint) -> UcxLibrary:
    try:
        return load_ucx(endpoint.ucx_dir)
    except NativeUnavailable as error:
        raise ConfigError(f"endpoint {endpoint}: {error}") from error


def _open_context(library: UcxLibrary, endpoint: Endpoint, family: int) -> ctypes.c_void_p:
    """Raises ConfigError, which says what is missing where the lane is not to be had."""
    if family == socket.AF_INET6 and library.release < _FIRST_WITH_TCP_OVER_IPV6 and endpoint.scheme != "o1rdma":
        raise ConfigError(
            f"endpoint {endpoint}: the TCP of {library} damages memory over IPv6; use UCX 1.14 or later (?ucx_dir=), an IPv4 "
            f"address, tcp://{endpoint.address}, or o1rdma://{endpoint.address}"
        )
    chosen = _settings(library, endpoint, family)
    texts = [text.encode() for pair in chosen for text in pair]
    settings = (ctypes.c_char_p * (len(texts) + 1))(*texts, None)
    context = ctypes.c_void_p()
    status = library.calls.ucxchannel_context_create(settings, ctypes.byref(context))
    if status:
        raise ConfigError(
            f"endpoint {endpoint}: {_wanted(endpoint)} is not to be had with {library}: "
            f"{_said(library.calls)}{_hint(library, endpoint)}"
        )
    return context


def _settings(library: UcxLibrary, endpoint: Endpoint, family: int) -> list[tuple[str, str]]:
    is_pinned = endpoint.scheme != "ucx"
    # Of a device that has addresses of both families UCX's TCP takes the first of this list, whatever the connection is of.
    order = "inet6,inet" if family == socket.AF_INET6 else "inet,inet6"
    chosen = [("?TCP_AF_PRIO", order), ("?AF_PRIO", order)]
    if endpoint.scheme == "o1tcp":
        # Also to connect by: UCX 1.13 never lets go of a client that came by RDMA's way and finds no RDMA here.
        chosen.append(("SOCKADDR_TLS_PRIORITY", "tcp"))
    if library.has_rdmacm or not library.has_verbs:
        # Only the device that the connection is made over: what an end tells of its others is told differently by every few
        # versions of UCX, and not understood by the rest. Both ends must have it, so the environment is not asked. Where a
        # connection to an RDMA device can only be made over TCP, the others are all there is.
        chosen.append(("?CM_USE_ALL_DEVICES", "n"))
    if is_pinned or "UCX_TLS" not in os.environ:
        chosen.append(("TLS", TRANSPORTS[endpoint.scheme]))
    for name, value in SETTINGS:
        if f"UCX_{name}" in os.environ:
            continue
        chosen.append((f"?{name}", value))
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                chosen.append((f"?{name.removeprefix(prefix)}", value))
    return chosen


def _wanted(endpoint: Endpoint) -> str:
    return {"ucx": "RDMA or TCP", "o1rdma": "RDMA (rc)", "o1tcp": "TCP"}[endpoint.scheme]


def _is_wanted(endpoint: Endpoint, transport: str) -> bool:
    if endpoint.scheme == "o1rdma":
        return transport.startswith("rc_")
    return endpoint.scheme != "o1tcp" or transport == "tcp"


def _hint(library: UcxLibrary, endpoint: Endpoint) -> str:
    """What is missing for RDMA on this machine, as far as one can see."""
    if endpoint.scheme != "o1rdma":
        return ""
    hints = []
    if not library.has_verbs:
        hints.append("this UCX was built without verbs; install libucx0, or name one that has them (?ucx_dir=)")
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        hints.append("this machine has no RDMA device (none in /sys/class/infiniband)")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < _LITTLE_MEMLOCK_BYTES:
        hints.append(f"this process may lock {locked // 1024} KiB of memory only; raise it (ulimit -l unlimited)")
    if not hints:
        hints.append("does the address belong to an RDMA device, at both ends?")
    return "; " + "; ".join(hints)


def _lane_of(library: UcxLibrary, handle: ctypes.c_void_p) -> tuple[str, list[str]]:
    """What frames travel over, as UCX describes the endpoint: a line for people, and the transports in it."""
    ours, theirs = Address(), Address()
    if library.calls.ucxchannel_addresses(handle, ctypes.byref(ours), ctypes.byref(theirs)):
        raise TransportError(_said(library.calls))
    text = _described(library.calls.ucxchannel_describe, handle)
    # A lane that is no use for active messages (remote memory access only) carries none of ours.
    lanes = [(transport, device) for transport, device, uses in _LANE.findall(text) if re.search(r"\bam\b", uses)]
    if not lanes:
        raise TransportError(f"UCX says of no lane that frames travel over it: {text!r}")
    names = " ".join(f"{transport}/{device}" for transport, device in lanes)
    return f"ucx {names} {_shown(ours)} -> {_shown(theirs)}", [transport for transport, _ in lanes]


def _described(describe: Callable[..., int], handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    return text.value.decode(errors="replace") if describe(handle, text, _TEXT_BYTES) == _Status.OK else ""


def _check(library: UcxLibrary, status: int, endpoint: Endpoint) -> None:
    if status:
        raise TransportError(_said(library.calls) or f"{endpoint}: status {status}")


def _said(calls: ctypes.CDLL) -> str:
    """Of this thread's last call that failed."""
    return str(calls.ucxchannel_error().decode(errors="replace"))


def _numeric(address: SocketAddress) -> Address:
    host, port, *more = address
    return Address(str(host).partition("%")[0].encode(), more[1] if len(more) > 1 else 0, port)


def _own_address(endpoint: Endpoint) -> Address:
    """`bind` as an address. Raises ConfigError where it is none of this machine's."""
    try:
        ((family, _, _, _, address),) = socket.getaddrinfo(
            endpoint.bind, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[:1]
    except OSError as error:
        raise ConfigError(f"endpoint {endpoint}: bind={endpoint.bind}: {error.strerror}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"endpoint {endpoint}: cannot bind to {endpoint.bind}: {error.strerror}; is it an address of this machine?"
            ) from error
    return _numeric(address)


def _try_to_listen(family: int, address: SocketAddress) -> None:
    """UCX says little of why it cannot listen; what a socket raises says more."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _host_of(address: Address) -> str:
    host = address.host.decode()
    if not address.scope:
        return host
    try:
        return f"{host}%{socket.if_indextoname(address.scope)}"
    except OSError:
        return f"{host}%{address.scope}"


def _shown(address: Address) -> str:
    host = _host_of(address)
    return f"[{host}]:{address.port}" if ":" in host else f"{host}:{address.port}"


def _is_looked_at(memory: bytearray) -> bool:
    try:
        # A bytearray refuses to change its length as long as a view of it lives anywhere.
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def _address_of(memory: Memory) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _to_ns(until_s: float) -> int:
    return NEVER_NS if until_s == math.inf else int(until_s * 1e9)
