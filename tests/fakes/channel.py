"""A channel around another one: what a test does not override, the inner one does."""

from __future__ import annotations

from collections.abc import Sequence

from farspark.clock import Deadline
from farspark.transport import Channel, Piece


class WrappedChannel:
    def __init__(self, inner: Channel) -> None:
        self.inner = inner

    @property
    def lane(self) -> str:
        return self.inner.lane

    @property
    def is_closed(self) -> bool:
        return self.inner.is_closed

    @property
    def max_frame_bytes(self) -> int:
        return self.inner.max_frame_bytes

    @max_frame_bytes.setter
    def max_frame_bytes(self, limit: int) -> None:
        self.inner.max_frame_bytes = limit

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        self.inner.send(pieces, deadline)

    def recv(self, deadline: Deadline) -> memoryview:
        return self.inner.recv(deadline)

    def recv_head(self, head_bytes: int, deadline: Deadline) -> tuple[memoryview, int]:
        return self.inner.recv_head(head_bytes, deadline)

    def close(self) -> None:
        self.inner.close()
