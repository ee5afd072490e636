"""Frames over TCP: a little-endian u32 length, then the frame. Needs nothing but the standard library.

A wait first spins (the reply to a round is due within microseconds, and waking a sleeping thread takes tens of them), then
sleeps in `poll` until the deadline. While `send` waits for a full socket it reads, up to one frame ahead: two ends that send
one frame each at the same time finish, however small the socket buffers.

Where `native.round_calls` is to be had, one call of it sends what fits, spins, sleeps and reads, without the GIL. Whatever is out
of the ordinary it hands back as it is then, and what follows is decided here.
"""

from __future__ import annotations

import contextlib
import errno
import math
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

from farspark.clock import Deadline
from farspark.errors import ConfigError, ProtocolError, TransportError
from farspark.native.round_calls import ALL, ENDED, LATE, RoundCalls, ready_round_calls
from farspark.transport.addresses import SocketAddress, connect_to_any, listen_on_any, show
from farspark.transport.base import Memory, Piece
from farspark.transport.endpoint import DEFAULT_CONNECT_SPIN_US, DEFAULT_LISTEN_SPIN_US, Endpoint
from farspark.transport.ends import GuardedChannelEnd, ListenerEnd, at_ns, memory_of

# A peer that vanished without a word is noticed after 5 + 3 * 2 seconds of silence, or 10 seconds after bytes that it
# does not acknowledge. Rounds have their own, far shorter, deadline; this is what frees a dead engine's slots.
KEEPALIVE_IDLE_S: Final = 5
KEEPALIVE_INTERVAL_S: Final = 2
KEEPALIVE_PROBES: Final = 3
USER_TIMEOUT_MS: Final = 10_000

_LENGTH = struct.Struct("<I")
_MAX_LENGTH = _WHOLE = 0xFFFFFFFF
# What a channel starts to receive into; it grows to the largest frame met.
_FIRST_MEMORY_BYTES = 64 * 1024
_IOV_MAX = 1024
# Plain integers: the operators of enum.IntFlag take microseconds.
_DONT_WAIT, _WAIT_ALL = int(socket.MSG_DONTWAIT), int(socket.MSG_WAITALL)
_BACKLOG = 128


class TcpChannel(GuardedChannelEnd):
    """A `Channel` over one connected socket, which it owns."""

    def __init__(
        self, sock: socket.socket, *, max_frame_bytes: int, spin_us: int, calls: RoundCalls | None = None
    ) -> None:
        # Blocking, so that a wait without a deadline is one call; everything else says MSG_DONTWAIT.
        sock.setblocking(True)
        _set_options(sock)
        self._socket = sock
        self.max_frame_bytes = max_frame_bytes
        self._spin_s = spin_us / 1e6
        self._spin_ns = 1000 * spin_us
        self._calls = calls
        self._descriptor = sock.fileno() if calls else -1
        ours, theirs = sock.getsockname(), sock.getpeername()
        self._lane = f"tcp {show(ours)} -> {show(theirs)}"
        self._theirs = show(theirs)
        self._poll = select.poll()
        self._is_closed = self._is_busy = False

        # What was received: frames that are not taken yet start at `_from`, what came last ends at `_to`. Everything in
        # front of `_from` belongs to those who took it.
        self._memory = memory_of(_FIRST_MEMORY_BYTES)
        self._from = 0
        self._to = 0

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """As `Channel.send`. Raises ValueError for a frame above the wire's own 4 GiB."""
        self._begin()
        try:
            self._send(pieces, deadline)
        finally:
            self._end()

    def exchange(self, pieces: Sequence[Piece], deadline: Deadline) -> memoryview:
        """`send`, then `recv`, in one call without the GIL where that is to be had. Raises as they do."""
        self._begin()
        try:
            if self._calls is None or self._to > self._from:
                self._send(pieces, deadline)
                return self._take(deadline)
            if self._from:
                self._move_to_front()
            try:
                got = self._calls.exchange(
                    self._descriptor, pieces, self._memory, self.max_frame_bytes, self._spin_ns, at_ns(deadline)
                )
            except OSError as error:
                raise self._gone(error) from error
            return self._finish(got, pieces, deadline)
        finally:
            self._end()

    def lend(self) -> tuple[int, Memory, int, int] | None:
        """For an exchange by native code of the caller's: descriptor, empty memory, greatest frame, nanoseconds to spin. None
        where that cannot be had now. Raises TransportError. Everybody else keeps off until `take_back`, or `give_up`.
        """
        if self._calls is None:
            return None
        self._begin()
        if self._to > self._from:
            self._end()
            return None
        if self._from:
            self._move_to_front()
        return self._descriptor, self._memory, self.max_frame_bytes, self._spin_ns

    def take_back(self, got: memoryview | int | OSError, pieces: Sequence[Piece], deadline: Deadline) -> memoryview:
        """As `exchange`, where its native call has ended with `got`, in the memory that was lent."""
        try:
            if isinstance(got, OSError):
                raise self._gone(got) from got
            return self._finish(got, pieces, deadline)
        finally:
            self._end()

    def give_up(self) -> None:
        """What was lent was not used."""
        self._end()

    def _finish(self, got: memoryview | int, pieces: Sequence[Piece], deadline: Deadline) -> memoryview:
        if type(got) is memoryview:
            self._from = self._to = _LENGTH.size + len(got)
            return got
        if got < 0:
            self._send_from(-1 - got, pieces, deadline)
        else:
            self._note(got)
        return self._take(deadline)

    def recv(self, deadline: Deadline) -> memoryview:
        self._begin()
        try:
            return self._take(deadline)
        finally:
            self._end()

    def recv_head(self, head_bytes: int, deadline: Deadline) -> tuple[memoryview, int]:
        self._begin()
        try:
            end = self._read(head_bytes, deadline)
            if self._from and end > self._to:
                # Here and not with the rest, which must come to where the caller looks.
                end -= self._from
                self._move_to_front()
            self._reserve(end)
            start = self._from + _LENGTH.size
            return memoryview(self._memory)[start:end], min(self._to, end) - start
        finally:
            self._end()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _let_go(self) -> None:
        self._socket.close()

    def _send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        sent = 0
        if self._calls is not None:
            try:
                sent = self._calls.send(self._descriptor, pieces)
            except OSError as error:
                raise self._gone(error) from error
            if sent == ALL:
                return
        self._send_from(sent, pieces, deadline)

    def _send_from(self, sent: int, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send what follows the first `sent` bytes of the frame and its length."""
        frame_bytes = sum([piece.nbytes if type(piece) is memoryview else len(piece) for piece in pieces])
        if frame_bytes > _MAX_LENGTH:
            raise ValueError(f"frame of {frame_bytes} bytes, at most {_MAX_LENGTH}")
        buffers = [_LENGTH.pack(frame_bytes), *pieces]
        sent = sent or self._send_some(buffers)
        if sent < _LENGTH.size + frame_bytes:
            self._send_rest(buffers, sent, deadline)

    def _send_some(self, buffers: Sequence[Piece]) -> int:
        """Hand over what fits without waiting; the number of bytes."""
        try:
            return self._socket.sendmsg(buffers if len(buffers) <= _IOV_MAX else buffers[:_IOV_MAX], (), _DONT_WAIT)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._gone(error) from error

    def _send_rest(self, buffers: Sequence[Piece], sent: int, deadline: Deadline) -> None:
        rest = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        started = sent > 0
        while True:
            while rest and sent >= len(rest[0]):
                sent -= len(rest[0])
                del rest[0]
            if not rest:
                return
            if sent:
                rest[0] = rest[0][sent:]
            interest = select.POLLOUT if self._arrived(_WHOLE) else select.POLLOUT | select.POLLIN
            try:
                ready = self._wait(interest, deadline, "sending a frame")
            except TimeoutError as error:
                if started:
                    self.close()
                    raise TimeoutError(f"{error}; closed, because a part of the frame was sent") from None
                raise
            if ready & ~select.POLLOUT and not self._arrived(_WHOLE):
                self._read_some(_DONT_WAIT)
            sent = self._send_some(rest)
            started = started or sent > 0

    def _take(self, deadline: Deadline) -> memoryview:
        """The next frame, which is not in `_memory`'s care any more."""
        if self._calls is None:
            end = self._read(_WHOLE, deadline)
        else:
            while not (end := self._arrived(_WHOLE)):
                frame = self._read_quickly(self._calls, _WHOLE, deadline)
                if frame is not None:
                    return frame
        start, self._from = self._from + _LENGTH.size, end
        return memoryview(self._memory)[start:end]

    def _read(self, wanted: int, deadline: Deadline) -> int:
        """Read until the first `wanted` bytes of the next frame are there, or the whole frame; where the frame ends."""
        end = self._arrived(wanted)
        if self._calls is not None:
            while not end:
                self._read_quickly(self._calls, wanted, deadline)
                end = self._arrived(wanted)
            return end
        if deadline.at_s == math.inf and not self._spin_s:
            while not end:
                self._read_some(_WAIT_ALL if wanted == _WHOLE else 0)
                end = self._arrived(wanted)
            return end
        spin_until = 0.0
        while not end:
            if self._read_some(_DONT_WAIT):
                spin_until = 0.0
                end = self._arrived(wanted)
                if not end and deadline.has_passed():
                    # A peer that sends a byte now and then must not hold us for ever.
                    raise self._late("receiving a frame")
            elif not self._spin_s:
                self._wait(select.POLLIN, deadline, "waiting for a frame")
            elif not spin_until:
                spin_until = time.monotonic() + min(self._spin_s, deadline.left_s())
            elif time.monotonic() >= spin_until:
                self._wait(select.POLLIN, deadline, "waiting for a frame")
        return end

    def _read_quickly(self, calls: RoundCalls, wanted: int, deadline: Deadline) -> memoryview | None:
        """Read for as long as nothing is to be decided; the frame, taken, if it is wanted whole and all that is there."""
        if self._from:
            self._move_to_front()
        to = self._to
        if to >= _LENGTH.size:
            self._reserve(_LENGTH.size + self._next_length())
        try:
            got = calls.receive(
                self._descriptor, self._memory, to, wanted, self.max_frame_bytes, self._spin_ns, at_ns(deadline)
            )
        except OSError as error:
            raise self._gone(error) from error
        if type(got) is memoryview:
            self._from = self._to = _LENGTH.size + len(got)
            return got
        self._note(got)
        return None

    def _note(self, got: int) -> None:
        """Take note of how a quick read ended."""
        self._to, how = got >> 2, got & 3
        if how == LATE:
            raise self._late("waiting for a frame")
        if how == ENDED:
            raise self._ended()

    def _arrived(self, wanted: int) -> int:
        """Where the next frame ends, once its first `wanted` bytes are there, or the whole frame; 0 before."""
        have = self._to - self._from - _LENGTH.size
        if have < 0:
            return 0
        length = self._next_length()
        return self._from + _LENGTH.size + length if have >= wanted or have >= length else 0

    def _read_some(self, flags: int) -> bool:
        """One read towards the next frame; False if nothing is there and `flags` forbids to wait."""
        if self._from:
            self._move_to_front()
        to = self._to
        try:
            if to < _LENGTH.size:
                into = memoryview(self._memory)[to:] if to else self._memory
                count = self._socket.recv_into(into, 0, flags & _DONT_WAIT)
            else:
                end = _LENGTH.size + self._next_length()
                self._reserve(end)
                count = self._socket.recv_into(memoryview(self._memory)[to:end], 0, flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(error) from error
        if not count:
            raise self._ended()
        self._to = to + count
        return True

    def _next_length(self) -> int:
        """The length of the frame at `_from`, which must be there. Raises ProtocolError, and closes, above the limit."""
        (length,) = _LENGTH.unpack_from(self._memory, self._from)
        # On the length alone, so that a hostile one never reserves memory.
        if length > self.max_frame_bytes:
            self.close()
            raise ProtocolError(f"{self._lane}: frame of {length} bytes announced, at most {self.max_frame_bytes}")
        return int(length)

    def _move_to_front(self) -> None:
        """Make room: in the same memory if nobody looks at a frame in it any more, else in fresh memory."""
        start, self._from = self._from, 0
        rest = self._memory[start : self._to] if start < self._to else b""
        self._to = len(rest)
        if isinstance(self._memory, bytearray):
            try:
                # A bytearray refuses to change its length as long as a view of it lives anywhere.
                self._memory.append(0)
                self._memory.pop()
            except BufferError:
                self._memory = bytearray(len(self._memory))
        else:
            self._memory = memory_of(max(_FIRST_MEMORY_BYTES, len(rest)))
        if rest:
            self._memory[: len(rest)] = rest

    def _reserve(self, end: int) -> None:
        """Have room for a frame up to `end`; its length has been judged."""
        if end > len(self._memory):
            larger = memory_of(end)
            larger[: self._to] = self._memory[: self._to]
            self._memory = larger

    def _wait(self, interest: int, deadline: Deadline, what: str) -> int:
        """Sleep until the socket is ready for `interest`; the events. Raises TimeoutError at the deadline."""
        self._poll.register(self._socket, interest)
        while not deadline.has_passed():
            left_s = deadline.left_s()
            events = self._poll.poll(None if left_s == math.inf else math.ceil(left_s * 1000))
            if events:
                return events[0][1]
        raise self._late(what)

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(f"{self._lane}: deadline passed while {what}")

    def _ended(self) -> TransportError:
        closed_here = self._is_closed
        self.close()
        if closed_here:
            return TransportError(f"{self._lane}: closed")
        partial = self._to - self._from
        if not partial:
            return TransportError(f"{self._lane}: closed by the peer")
        if partial < _LENGTH.size:
            return TransportError(f"{self._lane}: closed by the peer after {partial} bytes of a frame's length")
        return TransportError(
            f"{self._lane}: closed by the peer after {partial - _LENGTH.size} of {self._next_length()} bytes of a frame"
        )

    def _gone(self, error: OSError) -> TransportError:
        closed_here = self._is_closed
        self.close()
        return TransportError(f"{self._lane}: {'closed' if closed_here else error.strerror or error}")


class TcpListener(ListenerEnd):
    """A `Listener` over one listening socket, which it owns."""

    def __init__(self, sock: socket.socket, *, max_frame_bytes: int, spin_us: int) -> None:
        self._socket = sock
        self._max_frame_bytes = max_frame_bytes
        self._spin_us = spin_us
        host, port = sock.getsockname()[:2]
        self._endpoint = str(Endpoint("tcp", host, port))
        self._lanes = "tcp"
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._closing = threading.Lock()  # guards the two below: the descriptor may not be closed under `accept`
        self._is_closed = False
        self._is_busy = False

    def accept(self, deadline: Deadline) -> TcpChannel:
        with self._closing:
            if self._is_closed:
                raise TransportError(f"{self._endpoint}: closed")
            self._is_busy = True
        try:
            return self._accept(deadline)
        finally:
            with self._closing:
                self._is_busy = False
                if self._is_closed:
                    self._socket.close()

    def _accept(self, deadline: Deadline) -> TcpChannel:
        while True:
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                pass
            except OSError as error:
                if self._is_closed:
                    raise TransportError(f"{self._endpoint}: closed") from None
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise TransportError(f"{self._endpoint}: {error.strerror}") from error
                # Out of descriptors or memory: the caller's deadline and its next call are the retry.
                time.sleep(min(0.05, deadline.left_s()))
            else:
                try:
                    return TcpChannel(
                        sock, max_frame_bytes=self._max_frame_bytes, spin_us=self._spin_us, calls=ready_round_calls()
                    )
                except OSError:
                    sock.close()  # the peer went away between its connect and our accept
            if self._is_closed:
                raise TransportError(f"{self._endpoint}: closed")
            if deadline.has_passed():
                raise TimeoutError(f"{self._endpoint}: deadline passed while waiting for a connection")
            left_s = deadline.left_s()
            self._poll.poll(None if left_s == math.inf else math.ceil(left_s * 1000))

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            if self._is_busy:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
            else:
                self._socket.close()


def connect(endpoint: Endpoint, deadline: Deadline, *, max_frame_bytes: int) -> TcpChannel:
    """Try every address of the host in turn. As `farspark.transport.connect`."""
    spin_us = DEFAULT_CONNECT_SPIN_US if endpoint.spin_us is None else endpoint.spin_us

    def connect_to(family: int, address: SocketAddress, own: Deadline) -> TcpChannel:
        sock = _connected(endpoint, family, address, own)
        try:
            return TcpChannel(sock, max_frame_bytes=max_frame_bytes, spin_us=spin_us, calls=ready_round_calls())
        except OSError:
            sock.close()
            raise

    return connect_to_any(endpoint, deadline, connect_to)


def _connected(endpoint: Endpoint, family: int, address: SocketAddress, deadline: Deadline) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if endpoint.bind:
            _bind(sock, endpoint, family)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            _wait_connected(sock, deadline)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "?"))
        # A connect to a free port of the ephemeral range can meet itself; then nobody listens there.
        if sock.getsockname() == sock.getpeername():
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connected to itself")
    except BaseException:
        sock.close()
        raise
    return sock


def _wait_connected(sock: socket.socket, deadline: Deadline) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    while True:
        left_s = deadline.left_s()
        if poll.poll(None if left_s == math.inf else math.ceil(left_s * 1000)):
            return
        if deadline.has_passed():
            raise TimeoutError("no answer in time")


def _bind(sock: socket.socket, endpoint: Endpoint, family: int) -> None:
    try:
        ((_, _, _, _, address),) = socket.getaddrinfo(
            endpoint.bind, 0, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[:1]
    except OSError:
        raise OSError(errno.EAFNOSUPPORT, f"bind={endpoint.bind} is of another address family") from None
    try:
        sock.bind(address)
    except OSError as error:
        raise ConfigError(
            f"endpoint {endpoint}: cannot bind to {endpoint.bind}: {error.strerror}; is it an address of this machine?"
        ) from error


def listen(endpoint: Endpoint, *, max_frame_bytes: int) -> TcpListener:
    """Listen on the first address of the host that can be bound. As `farspark.transport.listen`."""
    spin_us = DEFAULT_LISTEN_SPIN_US if endpoint.spin_us is None else endpoint.spin_us

    def listen_on(family: int, address: SocketAddress) -> TcpListener:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            # Without it a restarted worker could not bind while old connections linger in TIME_WAIT.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
        return TcpListener(sock, max_frame_bytes=max_frame_bytes, spin_us=spin_us)

    return listen_on_any(endpoint, listen_on)


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    if sock.getsockname()[0] == sock.getpeername()[0]:
        # Within one machine nothing is congested. A system's default that paces (BBR) would hold rows back by its estimate.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
