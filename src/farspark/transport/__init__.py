"""Moves whole frames between two ends and knows no message. The endpoint's scheme picks the transport, imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from farspark.clock import Deadline
from farspark.transport.base import Channel, Listener, Piece
from farspark.transport.endpoint import Endpoint, parse_endpoint, parse_endpoints

# What an engine or a probe accepts: replies are small but for STATS. A worker's limit follows from its rows per step.
DEFAULT_MAX_FRAME_BYTES: Final = 4 * 1024 * 1024

__all__ = [
    "DEFAULT_MAX_FRAME_BYTES",
    "Channel",
    "Endpoint",
    "Listener",
    "Piece",
    "connect",
    "exchange",
    "listen",
    "parse_endpoint",
    "parse_endpoints",
]


def connect(endpoint: Endpoint | str, deadline: Deadline, *, max_frame_bytes: int = DEFAULT_MAX_FRAME_BYTES) -> Channel:
    """A connected channel that accepts frames of up to `max_frame_bytes`.

    Raises TimeoutError at the deadline, TransportError where nobody answers (refused, no route, name not found), ConfigError
    where trying again cannot help (a malformed address, a bind address that is not this machine's, a transport that this
    build lacks).
    """
    if isinstance(endpoint, str):
        endpoint = parse_endpoint(endpoint)
    if endpoint.scheme == "tcp":
        from farspark.transport import tcp

        return tcp.connect(endpoint, deadline, max_frame_bytes=max_frame_bytes)
    if endpoint.scheme == "memory":
        from farspark.transport import memory

        return memory.connect(endpoint, deadline, max_frame_bytes=max_frame_bytes)
    from farspark.transport import ucx

    return ucx.connect(endpoint, deadline, max_frame_bytes=max_frame_bytes)


def exchange(channel: Channel, pieces: Sequence[Piece], deadline: Deadline) -> memoryview:
    """Send one frame and take the one that comes next, in one call where the transport has it. Raises as the two do."""
    at_once = getattr(channel, "exchange", None)
    if at_once is not None:
        return at_once(pieces, deadline)  # type: ignore[no-any-return]
    channel.send(pieces, deadline)
    return channel.recv(deadline)


def listen(endpoint: Endpoint | str, *, max_frame_bytes: int) -> Listener:
    """A listener whose channels accept frames of up to `max_frame_bytes`; port 0 takes any free port.

    Raises ConfigError where a person must act: the port is taken or reserved, the address is not this machine's.
    """
    if isinstance(endpoint, str):
        endpoint = parse_endpoint(endpoint)
    if endpoint.scheme == "tcp":
        from farspark.transport import tcp

        return tcp.listen(endpoint, max_frame_bytes=max_frame_bytes)
    if endpoint.scheme == "memory":
        from farspark.transport import memory

        return memory.listen(endpoint, max_frame_bytes=max_frame_bytes)
    from farspark.transport import ucx

    return ucx.listen(endpoint, max_frame_bytes=max_frame_bytes)
