"""A socket without a network: what the peer sent lies in it, what is sent is kept, and the target decides what happens next.

Only what `TcpChannel` uses. It says that it is ready whenever it is asked, so that a wait is a call and never a pause.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Callable, Sequence
from typing import Final, cast

from farspark.transport.base import Piece
from farspark.transport.tcp import TcpChannel

_DONT_WAIT: Final = int(socket.MSG_DONTWAIT)


class _AlwaysReady:
    """As a `select.poll`, without the system call."""

    def register(self, wire: Wire, interest: int) -> None:
        self._ready = [(0, interest & (select.POLLIN | select.POLLOUT))]

    def poll(self, _milliseconds: int | None) -> list[tuple[int, int]]:
        return self._ready


class Wire:
    """One end of a connection, as a `socket.socket`.

    `starved` is called where a read finds nothing: it may put bytes into `incoming`, set `is_ended`, or raise. `room` is asked
    before every send how many bytes fit; None: all.
    """

    def __init__(self, starved: Callable[[], None], room: Callable[[], int | None] = lambda: None) -> None:
        self.incoming = bytearray()
        self.chunk = 0  # bytes that one read returns at most; 0: all
        self.outgoing = bytearray()
        self.is_ended = False  # no more will come
        self.is_closed = False
        self.calls = 0
        self._starved = starved
        self._room = room

    def as_socket(self) -> socket.socket:
        return cast(socket.socket, self)

    def channel(self, max_frame_bytes: int) -> TcpChannel:
        channel = TcpChannel(self.as_socket(), max_frame_bytes=max_frame_bytes, spin_us=0)
        make_ready(channel)
        return channel

    def recv_into(self, buffer: memoryview | bytearray, n_bytes: int = 0, flags: int = 0) -> int:
        self.calls += 1
        if not self.incoming and not self.is_ended:
            self._starved()
        if not self.incoming:
            if self.is_ended:
                return 0
            if flags & _DONT_WAIT:
                raise BlockingIOError
            raise AssertionError("a read without a deadline has nothing to wait for")
        size = min(len(buffer), n_bytes or len(buffer), self.chunk or len(buffer), len(self.incoming))
        assert size, "a read into no memory"
        memoryview(buffer)[:size] = self.incoming[:size]
        del self.incoming[:size]
        return size

    def sendmsg(self, buffers: Sequence[Piece], ancillary: Sequence[object] = (), flags: int = 0) -> int:
        self.calls += 1
        if self.is_closed or self.is_ended:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        room = self._room()
        before = len(self.outgoing)
        for buffer in buffers:
            self.outgoing += buffer
        if room is not None and len(self.outgoing) - before > room:
            del self.outgoing[before + room :]
            if not room:
                raise BlockingIOError
        return len(self.outgoing) - before

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 2

    def setblocking(self, _: bool) -> None: ...

    def setsockopt(self, *_: int) -> None: ...

    def shutdown(self, _: int) -> None:
        self.is_ended = True

    def close(self) -> None:
        self.is_closed = True


def make_ready(channel: TcpChannel) -> None:
    """Let the waits of a channel over a `Wire` end at once."""
    channel._poll = cast(select.poll, _AlwaysReady())


def framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "little") + frame


def frames_of(stream: bytes | bytearray) -> list[bytes]:
    """The whole frames of a stream."""
    frames = []
    at = 0
    while len(stream) - at >= 4:
        end = at + 4 + int.from_bytes(stream[at : at + 4], "little")
        if end > len(stream):
            break
        frames.append(bytes(stream[at + 4 : end]))
        at = end
    return frames
