"""Finds UCX, loads it for the whole process, and then the shim `ucx_channel` on top of it; gives its calls types.

UCX is looked for in this order, and the first that can be loaded is taken: the directory that is named, and then nothing else;
one that this process has loaded already (two of them in one process mix their parts); what the dynamic linker finds
(LD_LIBRARY_PATH, then the system's); HPC-X; a copy inside NIXL's wheel; the wheel libucx, which has no verbs and so no RDMA.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farspark.native.build import UCXCHANNEL, NativeUnavailable
from farspark.native.loader import Build, open_build

HOST_BYTES: Final = 64  # UCXCHANNEL_HOST_BYTES

# What UCX reads while it is loaded, unless the environment says otherwise. Its log goes to standard output by default, where a
# command's answer goes, and repeats what the calls report; its signal handlers would take those of the process.
_QUIET: Final = {"UCX_LOG_LEVEL": "fatal", "UCX_HANDLE_ERRORS": "none"}
# Read whenever a listener is made, and by UCX 1.13 from the environment only. Without it a listener that is started again
# cannot bind for a minute.
_LASTING: Final = {"UCX_CM_REUSEADDR": "y"}
_SONAME: Final = "libucp.so.0"


class Address(ctypes.Structure):
    """ucxchannel_address."""

    _fields_ = (("host", ctypes.c_char * HOST_BYTES), ("scope", ctypes.c_uint32), ("port", ctypes.c_uint32))
    host: bytes
    scope: int
    port: int


class UcxPiece(ctypes.Structure):
    """ucxchannel_piece."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """UCX and the shim, loaded. `calls` has the functions of ucx_channel.h with their argument types."""

    calls: ctypes.CDLL
    build: Build
    path: Path  # of libucp
    version: str  # of UCX, "1.13.1"

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, to compare: (1, 13, 1)."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])

    @property
    def has_verbs(self) -> bool:
        """Whether this UCX was built with InfiniBand verbs, without which it knows no RDMA."""
        return _is_there(self.path.parent, "ib")

    @property
    def has_rdmacm(self) -> bool:
        """Whether this UCX can connect by RDMA's own way, and not only by TCP."""
        return _is_there(self.path.parent, "rdmacm")

    def __str__(self) -> str:
        return f"UCX {self.version} from {self.path}"


@functools.cache
def _is_there(directory: Path, module: str) -> bool:
    """One of UCX's modules. Looked for once: nobody adds one to the UCX that a process has loaded."""
    name = f"libuct_{module}*.so*"
    return any(directory.glob(f"ucx/{name}")) or any(directory.glob(name))


def load_ucx(directory: str = "") -> UcxLibrary:
    """The UCX of `directory` (one that has libucp.so.0), else the first that is found; once for the whole process.

    Raises NativeUnavailable: there is none, another one is loaded already, or the shim cannot be had.
    """
    library = _load(directory)
    if directory and not _is_in(library.path, Path(directory)):
        raise NativeUnavailable(f"{library} is loaded in this process already, so the one in {directory} cannot be")
    return library


@functools.cache
def _load(directory: str) -> UcxLibrary:
    path = _load_libucp(Path(directory) if directory else None)
    build = open_build(UCXCHANNEL, include=[one for one in (path.parent.parent / "include",) if (one / "ucp").is_dir()])
    _declare(build.calls)
    return UcxLibrary(build.calls, build, path, build.calls.ucxchannel_ucx_version().decode())


def _load_libucp(directory: Path | None) -> Path:
    loaded = _loaded_libucp()
    tried = []
    for attempt in _candidates(directory) if loaded is None else [loaded]:
        try:
            # Global: the shim finds UCX's functions by name. This also makes one that was loaded privately global.
            with _environment(_QUIET):
                ctypes.CDLL(str(attempt), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            tried.append(str(error))
            continue
        found = _loaded_libucp()
        if found is not None:
            for name, value in _LASTING.items():
                os.environ.setdefault(name, value)
            return found
    where = f"in {directory}" if directory else "on this machine"
    raise NativeUnavailable(
        f"no UCX {where}: {'; '.join(tried) or f'no {_SONAME}'}. Install it (Debian and Ubuntu: libucx0, which has RDMA), or "
        "name the directory of its libraries"
    )


def _candidates(directory: Path | None) -> Iterator[Path | str]:
    if directory is not None:
        yield from _libucp_in(directory)
        return
    yield _SONAME
    hpcx = os.environ.get("HPCX_UCX_DIR")
    for root in (hpcx, "/opt/hpcx/ucx"):
        if root:
            yield from _libucp_in(Path(root) / "lib")
    for pattern in ("*nixl*.libs", ".nixl*.libs", "libucx/lib"):
        for site in map(Path, sys.path):
            for one in sorted(site.glob(pattern)) if site.is_dir() else ():
                yield from _libucp_in(one)


def _libucp_in(directory: Path) -> list[Path]:
    # A wheel's copy carries a digest in its name.
    return sorted({path.resolve() for path in directory.glob("libucp*.so*")})


def _loaded_libucp() -> Path | None:
    """The file of the libucp that this process has mapped."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")
            if path[1] and Path("/" + path[2]).name.startswith("libucp"):
                return Path("/" + path[2])
    return None


def _is_in(path: Path, directory: Path) -> bool:
    return path.resolve().parent == directory.resolve()


class _environment:
    """Variables that hold inside, where nobody has set them."""

    def __init__(self, defaults: Mapping[str, str]) -> None:
        self._added = {name: value for name, value in defaults.items() if name not in os.environ}

    def __enter__(self) -> None:
        os.environ.update(self._added)

    def __exit__(self, *_: object) -> None:
        for name in self._added:
            os.environ.pop(name, None)


_I64, _SIZE, _INT, _U32 = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint32
_POINTER, _TEXT = ctypes.c_void_p, ctypes.c_char_p
_TEXTS: Final = ("ucxchannel_error", "ucxchannel_ucx_version")
# Arguments of the functions that return a status, and of those that return nothing.
_STATUS_CALLS: Final[dict[str, tuple[type, ...]]] = {
    "ucxchannel_context_create": (_POINTER, _POINTER),
    "ucxchannel_context_describe": (_POINTER, _TEXT, _SIZE),
    "ucxchannel_connect": (_POINTER, _POINTER, _POINTER, _I64, _POINTER),
    "ucxchannel_listen": (_POINTER, _POINTER, _POINTER),
    "ucxchannel_listener_address": (_POINTER, _POINTER),
    "ucxchannel_accept": (_POINTER, _I64, _I64, _POINTER),
    "ucxchannel_describe": (_POINTER, _TEXT, _SIZE),
    "ucxchannel_addresses": (_POINTER, _POINTER, _POINTER),
    "ucxchannel_send": (_POINTER, _POINTER, _SIZE, _I64),
    "ucxchannel_receive": (_POINTER, _I64, _I64, _POINTER),
    "ucxchannel_exchange": (_POINTER, _POINTER, _SIZE, _I64, _I64, _POINTER, _POINTER),
}
_VOID_CALLS: Final[dict[str, tuple[type, ...]]] = {
    "ucxchannel_context_release": (_POINTER,),
    "ucxchannel_listener_wake": (_POINTER,),
    "ucxchannel_listener_destroy": (_POINTER,),
    "ucxchannel_set_max_unread": (_POINTER, _SIZE),
    "ucxchannel_take": (_POINTER, _POINTER),
    "ucxchannel_wake": (_POINTER,),
    "ucxchannel_close": (_POINTER, _I64),
    "ucxchannel_destroy": (_POINTER,),
}


def _declare(calls: ctypes.CDLL) -> None:
    for name in _TEXTS:
        function: Callable[..., object] = getattr(calls, name)
        function.argtypes, function.restype = (), _TEXT  # type: ignore[attr-defined]
    for result, table in ((_INT, _STATUS_CALLS), (None, _VOID_CALLS)):
        for name, arguments in table.items():
            function = getattr(calls, name)
            function.argtypes, function.restype = arguments, result  # type: ignore[attr-defined]
