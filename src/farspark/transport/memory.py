"""Both ends in one process. Can delay, cut and drop, so that tests meet every fault without a network."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from farspark.clock import Deadline
from farspark.errors import ConfigError, ProtocolError, TransportError
from farspark.transport.base import Piece
from farspark.transport.endpoint import Endpoint
from farspark.transport.ends import ListenerEnd, WatchedChannelEnd

# A sender waits once this much lies unread, as it would behind a socket's buffer; a single frame always fits.
CAPACITY_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong in one direction."""

    delay_s: float = 0.0  # a frame becomes readable this long after it was sent
    cut_at: int | None = None  # the connection dies when this many bytes of frames have passed; the frame in it is lost
    drop: frozenset[int] = frozenset()  # frames that vanish, counted from 0


NO_FAULTS: Final = Faults()


class _Direction:
    """Frames on their way from one end to the other. Guarded by the link's condition."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.frames: deque[tuple[float, bytes]] = deque()  # (readable at, monotonic seconds; frame)
        self.unread_bytes = 0
        self.sent_bytes = 0
        self.sent_frames = 0


class _Link:
    """One connection: two directions and who hung up, under one condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closed = False


class MemoryChannel(WatchedChannelEnd):
    """A `Channel` to another object of this class."""

    def __init__(self, link: _Link, out: _Direction, into: _Direction, max_frame_bytes: int, name: str) -> None:
        self._link = link
        self._out = out
        self._into = into
        self.max_frame_bytes = max_frame_bytes
        self._lane = f"memory {name}"
        self._is_closed = False
        self._begun: memoryview | None = None  # a frame that `recv_head` has shown

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        frame = b"".join(pieces)
        out, link = self._out, self._link
        with link.changed:
            self._check_open()
            while out.frames and out.unread_bytes + len(frame) > CAPACITY_BYTES:
                self._wait(deadline.left_s(), deadline, "sending a frame")
                self._check_open()
            number = out.sent_frames
            out.sent_frames += 1
            out.sent_bytes += len(frame)
            if out.faults.cut_at is not None and out.sent_bytes > out.faults.cut_at:
                link.is_closed = True
            elif number not in out.faults.drop:
                out.frames.append((time.monotonic() + out.faults.delay_s, frame))
                out.unread_bytes += len(frame)
            link.changed.notify_all()

    def recv_head(self, head_bytes: int, deadline: Deadline) -> tuple[memoryview, int]:
        self._begun = self.recv(deadline)
        return self._begun, len(self._begun)

    def recv(self, deadline: Deadline) -> memoryview:
        if self._begun is not None and not self._is_closed:
            frame, self._begun = self._begun, None
            return frame
        return self._next(deadline)

    def _next(self, deadline: Deadline) -> memoryview:
        into, link = self._into, self._link
        with link.changed:
            while True:
                if self._is_closed:
                    raise TransportError(f"{self._lane}: closed")
                # What was sent before the end is still delivered, as by a socket.
                wait_s = into.frames[0][0] - time.monotonic() if into.frames else math.inf
                if wait_s <= 0:
                    break
                if not into.frames:
                    self._check_open()
                self._wait(min(wait_s, deadline.left_s()), deadline, "waiting for a frame")
            _, frame = into.frames.popleft()
            into.unread_bytes -= len(frame)
            link.changed.notify_all()
        if len(frame) > self.max_frame_bytes:
            self.close()
            raise ProtocolError(f"{self._lane}: frame of {len(frame)} bytes announced, at most {self.max_frame_bytes}")
        return memoryview(bytearray(frame))

    def close(self) -> None:
        with self._link.changed:
            self._is_closed = True
            self._link.is_closed = True
            self._link.changed.notify_all()

    def _check_open(self) -> None:
        """Requires the link's condition."""
        if self._is_closed or self._link.is_closed:
            by_peer = not self._is_closed
            self._is_closed = True
            raise TransportError(f"{self._lane}: closed{' by the peer' if by_peer else ''}")

    def _wait(self, wait_s: float, deadline: Deadline, what: str) -> None:
        """Wait for a change or `wait_s`. Requires the link's condition."""
        if deadline.has_passed():
            raise TimeoutError(f"{self._lane}: deadline passed while {what}")
        self._link.changed.wait(None if wait_s == math.inf else wait_s)


def pair(
    *, max_frame_bytes: int, ours: Faults = NO_FAULTS, theirs: Faults = NO_FAULTS, name: str = "pair"
) -> tuple[MemoryChannel, MemoryChannel]:
    """Two connected channels; `ours` befalls what the first one sends, `theirs` what the second one sends."""
    link, there, back = _Link(), _Direction(ours), _Direction(theirs)
    return (
        MemoryChannel(link, there, back, max_frame_bytes, name),
        MemoryChannel(link, back, there, max_frame_bytes, name),
    )


class MemoryListener(ListenerEnd):
    """A `Listener` under a name of this process."""

    def __init__(self, name: str, max_frame_bytes: int) -> None:
        self._name = name
        self._endpoint = f"memory://{name}"
        self._lanes = "memory"
        self._max_frame_bytes = max_frame_bytes
        self._changed = threading.Condition()
        self._waiting: deque[MemoryChannel] = deque()
        self._is_closed = False

    def accept(self, deadline: Deadline) -> MemoryChannel:
        with self._changed:
            while True:
                if self._is_closed:
                    raise TransportError(f"{self.endpoint}: closed")
                if self._waiting:
                    return self._waiting.popleft()
                if deadline.has_passed():
                    raise TimeoutError(f"{self.endpoint}: deadline passed while waiting for a connection")
                left_s = deadline.left_s()
                self._changed.wait(None if left_s == math.inf else left_s)

    def close(self) -> None:
        with _listeners_lock:
            if _listeners.get(self._name) is self:
                del _listeners[self._name]
        with self._changed:
            self._is_closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for channel in waiting:
            channel.close()

    def meet(self, max_frame_bytes: int) -> MemoryChannel:
        """The other end of a connection that `accept` will return."""
        link, there, back = _Link(), _Direction(NO_FAULTS), _Direction(NO_FAULTS)
        with self._changed:
            if self._is_closed:
                raise TransportError(f"endpoint {self.endpoint}: connection refused: nothing listens there")
            self._waiting.append(MemoryChannel(link, back, there, self._max_frame_bytes, self._name))
            self._changed.notify_all()
        return MemoryChannel(link, there, back, max_frame_bytes, self._name)


# One name, one listener, in the whole process: this is what the name's being an address means.
_listeners: dict[str, MemoryListener] = {}
_listeners_lock = threading.Lock()


def connect(endpoint: Endpoint, deadline: Deadline, *, max_frame_bytes: int) -> MemoryChannel:
    deadline.check(f"connecting to {endpoint}")
    with _listeners_lock:
        listener = _listeners.get(endpoint.host)
    if listener is None:
        raise TransportError(f"endpoint {endpoint}: connection refused: nothing listens there")
    return listener.meet(max_frame_bytes)


def listen(endpoint: Endpoint, *, max_frame_bytes: int) -> MemoryListener:
    with _listeners_lock:
        if endpoint.host in _listeners:
            raise ConfigError(f"endpoint {endpoint}: cannot listen: the name is in use")
        listener = _listeners[endpoint.host] = MemoryListener(endpoint.host, max_frame_bytes)
    return listener
