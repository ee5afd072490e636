"""Addresses: `tcp://host:port?bind=ip`, `ucx://`, `o1rdma://`, `o1tcp://` (names for ucx with the lane pinned), `memory://name`.

An IPv6 literal stands in brackets and may carry a scope: `tcp://[fe80::1%eth0]:18620`. Options follow a `?`, joined by `&`:
`bind` (this side's own address), `spin_us` (how long a wait spins before it sleeps) and, of ucx, `ucx_dir` (the directory of the
UCX libraries to use).
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from dataclasses import dataclass
from typing import Final

from farspark.errors import ConfigError

SCHEMES: Final = ("tcp", "ucx", "o1rdma", "o1tcp", "memory")
UCX_SCHEMES: Final = ("ucx", "o1rdma", "o1tcp")
OPTIONS: Final = ("bind", "spin_us", "ucx_dir")
# Spinning longer than this takes a core away for nothing: a sleeping wait costs some 50 us.
MAX_SPIN_US: Final = 1_000_000
DEFAULT_CONNECT_SPIN_US: Final = 200
# A worker waits for the engine's next step, milliseconds away: spinning would only take a core from the drafter.
DEFAULT_LISTEN_SPIN_US: Final = 0

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_DIGITS_AND_DOTS = re.compile(r"[0-9.]+")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to connect or listen. `str()` gives the text that parses to the same endpoint."""

    scheme: str
    host: str  # a name or a literal without brackets; the name alone for memory
    port: int = 0  # 0 when listening: any free port; always 0 for memory
    bind: str = ""  # this side's address, without brackets; empty: the system chooses
    spin_us: int | None = None  # microseconds; None: the transport's default
    ucx_dir: str = ""  # of the UCX libraries; empty: searched

    @property
    def address(self) -> str:
        """`host:port`, with an IPv6 literal in brackets."""
        if self.scheme == "memory":
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True where no other machine can be at the far end: the name localhost, a loopback literal, or memory."""
        if self.scheme == "memory" or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        options = []
        if self.bind:
            options.append(f"bind={self.bind}")
        if self.spin_us is not None:
            options.append(f"spin_us={self.spin_us}")
        if self.ucx_dir:
            options.append(f"ucx_dir={self.ucx_dir}")
        query = "?" + "&".join(options) if options else ""
        return f"{self.scheme}://{self.address}{query}"


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Endpoints separated by commas, to be tried in that order. Raises ConfigError on an empty or malformed one."""
    return tuple(parse_endpoint(part) for part in text.split(","))


def parse_endpoint(text: str) -> Endpoint:
    """Raises ConfigError, which names the text, what is wrong with it and what was expected."""
    stripped = text.strip()
    scheme, separator, rest = stripped.partition("://")
    if not separator:
        raise _wrong(text, "it has no scheme; expected something like tcp://10.0.0.2:18620")
    if scheme not in SCHEMES:
        raise _wrong(
            text, f"unknown scheme {scheme!r}; expected one of {', '.join(SCHEMES)}{_nearest(scheme, SCHEMES)}"
        )
    address, has_options, query = rest.partition("?")
    if "," in address:
        raise _wrong(text, "one endpoint is expected here, not several")
    options = _options(text, query) if has_options else {}
    bind = _bind(text, options["bind"]) if "bind" in options else ""
    spin_us = _spin_us(text, options["spin_us"]) if "spin_us" in options else None
    ucx_dir = _ucx_dir(text, scheme, options["ucx_dir"]) if "ucx_dir" in options else ""
    if scheme == "memory":
        if not address:
            raise _wrong(text, "empty name; expected memory://name")
        if not _NAME.fullmatch(address) or bind:
            raise _wrong(text, "expected memory://name, of letters, digits, '.', '_' and '-', without bind")
        return Endpoint(scheme, address, spin_us=spin_us)
    host, port = _host_and_port(text, address)
    if bind and _literal_version(host) not in (None, _literal_version(bind)):
        raise _wrong(text, f"bind={bind} and {host} are not of the same address family")
    return Endpoint(scheme, host, port, bind, spin_us, ucx_dir)


def _host_and_port(text: str, address: str) -> tuple[str, int]:
    if address.startswith("["):
        host, bracket, after = address[1:].partition("]")
        if not bracket:
            raise _wrong(text, "'[' without ']'")
        if not host:
            raise _wrong(text, "empty host")
        host = host.replace("%25", "%")
        if _literal_version(host) != 6:
            raise _wrong(text, f"{host!r} in brackets is not an IPv6 address")
        colon, port = after[:1], after[1:]
        if after and colon != ":":
            raise _wrong(text, f"{after!r} after ']'; expected ':' and a port")
    else:
        if address.count(":") > 1:
            raise _wrong(text, "an IPv6 address stands in brackets, as in tcp://[::1]:18620")
        host, colon, port = address.partition(":")
        if not host:
            raise _wrong(text, "empty host")
        if not _NAME.fullmatch(host):
            raise _wrong(text, f"{host!r} is neither a name nor an address")
        if _DIGITS_AND_DOTS.fullmatch(host) and _literal_version(host) != 4:
            raise _wrong(text, f"{host!r} is not an IPv4 address")
    if not colon or not port:
        raise _wrong(text, f"missing port; expected something like {address.rstrip(':')}:18620")
    if not (port.isascii() and port.isdigit()):
        raise _wrong(text, f"port {port!r} is not a number")
    if len(port) > 5 or int(port) > 65535:
        raise _wrong(text, f"port {port} is out of range 0 to 65535")
    return host, int(port)


def _options(text: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in query.split("&"):
        name, equals, value = item.partition("=")
        if name not in OPTIONS:
            raise _wrong(text, f"unknown option {name!r}; expected {', '.join(OPTIONS)}{_nearest(name, OPTIONS)}")
        if not equals or not value:
            raise _wrong(text, f"option {name!r} has no value")
        if name in options:
            raise _wrong(text, f"option {name!r} is given twice")
        options[name] = value
    return options


def _bind(text: str, value: str) -> str:
    bare = value.removeprefix("[").removesuffix("]").replace("%25", "%")
    if _literal_version(bare) is None:
        raise _wrong(text, f"bind={value}: expected an IP address of this machine")
    return bare


def _spin_us(text: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()) or len(value) > 7 or int(value) > MAX_SPIN_US:
        raise _wrong(text, f"spin_us={value}: expected whole microseconds, 0 to {MAX_SPIN_US}")
    return int(value)


def _ucx_dir(text: str, scheme: str, value: str) -> str:
    if scheme not in UCX_SCHEMES:
        raise _wrong(text, f"option 'ucx_dir' is for {', '.join(UCX_SCHEMES)} only")
    if not value.startswith("/"):
        raise _wrong(text, f"ucx_dir={value}: expected an absolute path, of the directory that has libucp.so.0")
    return value


def _literal_version(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None


def _nearest(name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _wrong(text: str, reason: str) -> ConfigError:
    return ConfigError(f"endpoint {text.strip()!r}: {reason}")
