"""What every transport promises: whole frames between two ends, and a bound on every wait."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

from farspark.clock import Deadline

Piece = bytes | bytearray | memoryview
Memory = bytearray | mmap.mmap


class Channel(Protocol):
    """One connection, owned by one thread at a time; only `close` may be called from another.

    Frames arrive whole, in order, once. After any error but TimeoutError the channel is closed.
    """

    max_frame_bytes: int
    """What `recv` takes at most. May be changed, by the channel's owner; holds for every frame that is not begun yet."""

    @property
    def lane(self) -> str:
        """What the bytes really travel over, as read from the connection: "tcp 10.0.0.1:4711 -> 10.0.0.2:18620"."""
        ...

    @property
    def is_closed(self) -> bool: ...

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        """Send one frame made of `pieces`, without joining them.

        When this returns, the pieces are no longer needed. Raises TimeoutError if the frame could not be handed over in
        time: the channel is then closed if a part of it was (the peer would read the next frame as the rest of this one).
        Raises TransportError if the connection is gone.
        """
        ...

    def recv(self, deadline: Deadline) -> memoryview:
        """The next frame; the caller owns its memory.

        Raises TimeoutError at the deadline: nothing is lost, a later call goes on where this one stopped. Raises
        TransportError if the connection is gone, ProtocolError if the peer announces a frame above the limit.
        """
        ...

    def recv_head(self, head_bytes: int, deadline: Deadline) -> tuple[memoryview, int]:
        """The memory of the next frame, and how many of its first bytes are there: at least `head_bytes`, or all of it.

        What stands behind them is not the frame's yet, until `recv` has returned this same frame. Raises as `recv`.
        """
        ...

    def close(self) -> None:
        """Idempotent, from any thread; wakes whoever waits in `send` or `recv`, with TransportError."""
        ...


class Listener(Protocol):
    """Accepts channels; owned by one thread, `close` from any."""

    @property
    def endpoint(self) -> str:
        """The address in use, with the real port where 0 was asked for."""
        ...

    @property
    def lanes(self) -> str:
        """What its channels may travel over: "tcp", "ucx rc_mlx5/mlx5_0:1 tcp/eth0"."""
        ...

    def accept(self, deadline: Deadline) -> Channel:
        """The next connection. Raises TimeoutError at the deadline, TransportError after `close`."""
        ...

    def close(self) -> None: ...
