"""Any bytes in any pieces into a TCP channel, while it sends, receives and looks at heads: the frames of the stream, in order,
or the error that the stream deserves.

What the channel gives is compared with the plainest reading of the same bytes.
"""

from __future__ import annotations

import sys
from typing import Final

from farspark.clock import Deadline
from farspark.errors import ProtocolError, TransportError
from fuzz.driver import reproduce
from fuzz.feed import Feed
from fuzz.sockets import Wire, framed

LIMITS: Final = (0, 7, 300, 70_000)
# What a channel may hold beyond the largest frame: what it starts with, and what came behind a frame with it.
SLACK_BYTES: Final = 256 * 1024
MAX_OPERATIONS: Final = 64


class Program:
    """One input: a limit, then operations on the channel and bytes for it, until the input ends."""

    def __init__(self, data: bytes) -> None:
        self.feed = Feed(data)
        self.now_s = 0.0
        self.wire = Wire(self._starved, self._room)
        self.channel = self.wire.channel(self.feed.pick(LIMITS))
        self.limit = self.channel.max_frame_bytes
        self.stream = bytearray()  # all that was put on the wire, less the frames taken
        self.put_bytes = 0
        self.kept: list[tuple[memoryview, bytes]] = []  # frames that somebody still looks at, and what they held

    def _starved(self) -> None:
        # Every read that finds nothing takes time: a wait without an end would not end here either.
        self.now_s += 0.25

    def _room(self) -> int | None:
        self.now_s += 0.125
        room = self.feed.byte()
        return None if room >= 128 else room * 4

    def deadline(self) -> Deadline:
        return Deadline.after(self.feed.byte() / 64, lambda: self.now_s)

    def run(self) -> None:
        for _ in range(MAX_OPERATIONS):
            if self.feed.is_empty or self.channel.is_closed:
                break
            self._operation()
            assert len(self.channel._memory) <= self.limit + SLACK_BYTES
            for view, held in self.kept:
                assert view == held, "a frame changed under the eyes of who owns it"
        assert self.wire.calls < 100 * MAX_OPERATIONS + self.put_bytes, "too many calls"
        self.channel.close()
        assert self.wire.is_closed

    def _operation(self) -> None:
        match self.feed.byte() % 8:
            case 0:
                self._put(self.feed.take(self.feed.byte()))
            case 1:
                self._put(framed(self.feed.take(self.feed.byte())))
            case 2:
                size = self.feed.size(80_000)
                self._put(framed(bytes([size & 255]) * size))
            case 3:
                self.wire.chunk = self.feed.byte()
            case 4:
                self._receive()
            case 5:
                self._look()
            case 6:
                self._send()
            case _:
                match self.feed.byte() % 4:
                    case 0:
                        self.wire.is_ended = True
                    case 1:
                        self.channel.max_frame_bytes = self.feed.pick(LIMITS)
                        self.limit = max(self.limit, self.channel.max_frame_bytes)
                    case _:
                        self.kept.clear()

    def _put(self, data: bytes) -> None:
        if not self.wire.is_ended:
            self.wire.incoming += data
            self.stream += data
            self.put_bytes += len(data)

    def _expected_length(self) -> int | None:
        return int.from_bytes(self.stream[:4], "little") if len(self.stream) >= 4 else None

    def _judge(self, error: Exception, wanted: int) -> None:
        """Whether the channel may fail with this error where `wanted` bytes of a frame were asked for."""
        length = self._expected_length()
        if isinstance(error, ProtocolError):
            assert length is not None, error
            assert length > self.channel.max_frame_bytes, error
            assert self.channel.is_closed
        elif isinstance(error, TransportError):
            assert self.wire.is_ended or self.wire.is_closed, error
            assert self.channel.is_closed
            assert length is None or len(self.stream) - 4 < min(wanted, length), error
        else:
            assert not self.channel.is_closed
            if length is not None and len(self.stream) - len(self.wire.incoming) >= 4:
                assert length <= self.channel.max_frame_bytes, "waits for a frame that it may not take"

    def _receive(self) -> None:
        deadline = self.deadline()
        try:
            frame = self.channel.recv(deadline)
        except (ProtocolError, TransportError, TimeoutError) as error:
            self._judge(error, 1 << 32)
        else:
            length = self._expected_length()
            assert length is not None
            assert len(frame) == length <= self.channel.max_frame_bytes
            assert frame == self.stream[4 : 4 + length]
            del self.stream[: 4 + length]
            if len(self.kept) < 4:
                self.kept.append((frame, bytes(frame)))

    def _look(self) -> None:
        wanted = self.feed.byte()
        try:
            frame, arrived = self.channel.recv_head(wanted, self.deadline())
        except (ProtocolError, TransportError, TimeoutError) as error:
            self._judge(error, wanted)
        else:
            length = self._expected_length()
            assert length == len(frame) <= self.channel.max_frame_bytes
            assert min(wanted, length) <= arrived <= length
            assert frame[:arrived] == self.stream[4 : 4 + arrived]

    def _send(self) -> None:
        pieces = [bytes([n & 255]) * n for n in (self.feed.size(5_000) for _ in range(self.feed.byte() % 4))]
        was_there = len(self.wire.outgoing)
        try:
            self.channel.send(pieces, self.deadline())
        except TimeoutError:
            # A part of a frame is never followed by another frame.
            assert self.channel.is_closed == (len(self.wire.outgoing) > was_there)
        except ProtocolError as error:
            # What came meanwhile was read.
            self._judge(error, 1 << 32)
        except TransportError:
            assert self.wire.is_ended or self.wire.is_closed
            assert self.channel.is_closed
        else:
            assert self.wire.outgoing[was_there:] == framed(b"".join(pieces))


def run(data: bytes) -> None:
    Program(data).run()


if __name__ == "__main__":
    sys.exit(reproduce(run))
