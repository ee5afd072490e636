"""The bare socket that rounds and transports are measured against."""

from __future__ import annotations

import socket
import time

now_ns = time.monotonic_ns  # one clock for all processes of a machine


def read_exactly(sock: socket.socket, into: memoryview, spin_us: int) -> bool:
    """Fill `into` with blocking calls, each after up to `spin_us` of asking without sleeping; False at the end."""
    got = 0
    while got < len(into):
        count = (spin(sock, into[got:], spin_us) if spin_us else None) or sock.recv_into(into[got:])
        if not count:
            return False
        got += count
    return True


def spin(sock: socket.socket, into: memoryview, spin_us: int) -> int | None:
    until = now_ns() + spin_us * 1000
    while now_ns() < until:
        try:
            return sock.recv_into(into, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
    return None
