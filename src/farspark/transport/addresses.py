"""Names and numbers of addresses, as sockets have them: looking up, trying one after the other, showing, and what a socket's
errors mean to a person.
"""

from __future__ import annotations

import errno
import math
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from farspark.clock import Deadline
from farspark.errors import ConfigError, TransportError
from farspark.transport.endpoint import Endpoint

SocketAddress = tuple[Any, ...]
"""As `socket.getaddrinfo` has it: host and port, with IPv6 flow and scope too."""


def resolve(endpoint: Endpoint, deadline: Deadline) -> list[tuple[int, SocketAddress]]:
    """The host's addresses as (family, sockaddr), in the system's order of preference.

    A literal needs no look-up. A look-up cannot be given a deadline, so a name is looked up on a thread of its own, which
    is left behind if it is late.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = _look_up(endpoint, deadline)
    addresses: list[tuple[int, SocketAddress]] = []
    for family, _, _, _, address in found:
        if (family, address) not in addresses:
            addresses.append((family, address))
    return addresses


def _look_up(endpoint: Endpoint, deadline: Deadline) -> list[Any]:
    outcome: list[list[Any] | OSError] = []

    def look_up() -> None:
        try:
            outcome.append(socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM))
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=look_up, name=f"look up {endpoint.host}", daemon=True)
    thread.start()
    left_s = deadline.left_s()
    thread.join(None if left_s == math.inf else left_s)
    if not outcome:
        raise TimeoutError(f"endpoint {endpoint}: deadline passed while looking up the name {endpoint.host!r}")
    if isinstance(outcome[0], OSError):
        raise TransportError(
            f"endpoint {endpoint}: name {endpoint.host!r} not found: {outcome[0].strerror}"
        ) from outcome[0]
    return outcome[0]


T = TypeVar("T")


def connect_to_any(
    endpoint: Endpoint, deadline: Deadline, connect_to: Callable[[int, SocketAddress, Deadline], T]
) -> T:
    """What `connect_to` returns for the first of the host's addresses where it neither raises OSError nor TransportError.

    Raises TimeoutError at the deadline, TransportError with what every address said, ConfigError for port 0.
    """
    if not endpoint.port:
        raise ConfigError(f"endpoint {endpoint}: port 0 is for listening; connect to the port that the worker printed")
    addresses = resolve(endpoint, deadline)
    failures = []
    for tried, (family, address) in enumerate(addresses):
        # An address that swallows packets may not use up the time of those behind it.
        share = deadline.left_s() / (len(addresses) - tried)
        own = deadline if tried == len(addresses) - 1 else Deadline(deadline.clock() + share, deadline.clock)
        try:
            return connect_to(family, address, own)
        except TimeoutError:
            failures.append(f"{show(address)}: no answer in time")
            if deadline.has_passed():
                raise TimeoutError(f"endpoint {endpoint}: {'; '.join(failures)}") from None
        except (OSError, TransportError) as error:
            failures.append(f"{show(address)}: {reason(error)}")
    raise TransportError(f"endpoint {endpoint}: {'; '.join(failures)}")


def listen_on_any(endpoint: Endpoint, listen_on: Callable[[int, SocketAddress], T]) -> T:
    """What `listen_on` returns for the first of the host's addresses where it neither raises OSError nor TransportError.

    Raises ConfigError with what every address said.
    """
    if endpoint.bind:
        raise ConfigError(f"endpoint {endpoint}: bind= is for connecting; listening binds to its host already")
    try:
        addresses = resolve(endpoint, Deadline.never())
    except TransportError as error:
        raise ConfigError(str(error)) from error
    failures = []
    for family, address in addresses:
        try:
            return listen_on(family, address)
        except (OSError, TransportError) as error:
            failures.append(f"{show(address)}: {reason(error)}")
    raise ConfigError(f"endpoint {endpoint}: cannot listen: {'; '.join(failures)}")


_REASONS = {
    errno.ECONNREFUSED: "connection refused: nothing listens there",
    errno.EHOSTUNREACH: "no route to this host",
    errno.ENETUNREACH: "no route to this network",
    errno.ETIMEDOUT: "no answer in time",
    errno.ECONNRESET: "connection reset by the peer",
    errno.EADDRINUSE: "the port is in use; stop what listens there or choose another",
    errno.EADDRNOTAVAIL: "not an address of this machine",
    errno.EACCES: "not permitted; ports below 1024 need privileges",
}


def reason(error: OSError | TransportError) -> str:
    if isinstance(error, TransportError):
        return str(error)
    return _REASONS.get(error.errno or 0) or error.strerror or str(error)


def show(address: SocketAddress) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
