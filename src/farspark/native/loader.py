"""Finds a build of the native helper, or makes one, and refuses every other version.

In this order: the file that the caller names, and then nothing else; the build beside the sources; one that was compiled
before, in the user's cache directory; a compilation into that directory; a compilation into a temporary one, which is gone
as soon as the library is loaded. Code is loaded from directories only that nobody else can write to.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farspark.native.build import PACKAGED, NativeUnavailable, compile_library, source_digest

VERSION: Final = 1  # HOSTFLAG_VERSION of hostflag.h


@dataclass(frozen=True, slots=True)
class HostflagLibrary:
    """A loaded build. `calls` has the functions of hostflag.h with their argument types; every call leaves the GIL."""

    calls: ctypes.CDLL
    path: Path
    origin: str  # "given", "packaged", "cached", "compiled"
    build: str  # SHA-256 of the sources in hex, "" for a build that does not say

    def __repr__(self) -> str:
        return f"<HostflagLibrary {self.origin} {self.path} version {VERSION} build {self.build[:12] or 'unknown'}>"


def load(path: str | Path | None = None, *, cache: Path | None = None) -> HostflagLibrary:
    """The helper from `path`, else from wherever it can be had; `cache` replaces the user's cache directory.

    Raises NativeUnavailable: no build is to be had, or the one at `path` cannot be loaded or is of another version.
    """
    if path is not None:
        return _open(Path(path), "given")
    reasons = []
    for attempt in _attempts(cache):
        try:
            return attempt()
        except NativeUnavailable as error:
            reasons.append(str(error))
    raise NativeUnavailable(
        f"the native helper is not available: {'; '.join(reasons)}. Install a C compiler, or build it on a machine like this one "
        "(python -m farspark.native FILE) and name the file"
    )


def _attempts(cache: Path | None) -> Iterator[Callable[[], HostflagLibrary]]:
    yield lambda: _open_ours(PACKAGED, "packaged")
    yield lambda: _from_cache(_private(cache or _user_cache()))
    yield _from_temporary


def _from_cache(directory: Path) -> HostflagLibrary:
    path = directory / f"libhostflag-{VERSION}-{source_digest()[:32]}-{platform.machine()}.so"
    if path.exists():
        try:
            _refuse_unless_ours(path)
            return _open_ours(path, "cached")
        except NativeUnavailable:
            pass  # cut short, or made against another C library: made anew
    return _open_ours(compile_library(path), "compiled")


def _from_temporary() -> HostflagLibrary:
    try:
        with tempfile.TemporaryDirectory(prefix="farspark-native-") as directory:
            return _open_ours(compile_library(Path(directory) / "libhostflag.so"), "compiled")
    except OSError as error:
        raise NativeUnavailable(f"no temporary directory: {error}") from error


def _user_cache() -> Path:
    """Not a setting of Farspark's: where this user's programs keep such things."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise NativeUnavailable(f"no cache directory: {error}") from error
    return base / "farspark" / "native"


def _private(directory: Path) -> Path:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NativeUnavailable(f"no cache directory: {error}") from error
    _refuse_unless_ours(directory, others=0o077)
    return directory


def _refuse_unless_ours(path: Path, others: int = 0o022) -> None:
    """Others have none of the permissions `others` on it, and it is no link to something else."""
    there = path.lstat()
    if stat.S_ISLNK(there.st_mode) or there.st_uid != os.geteuid() or there.st_mode & others:
        raise NativeUnavailable(
            f"{path} is not private to this user (owner {there.st_uid}, mode {stat.filemode(there.st_mode)}); remove it"
        )


def _open_ours(path: Path, origin: str) -> HostflagLibrary:
    """A build made from the sources that are here."""
    if not path.exists():
        raise NativeUnavailable(f"{path} does not exist")
    library = _open(path, origin)
    if library.build != source_digest():
        raise NativeUnavailable(
            f"{path} was built from other sources ({library.build[:12] or 'unknown'}); run make native"
        )
    return library


def _open(path: Path, origin: str) -> HostflagLibrary:
    # Absolute: dlopen looks for a bare name in the system's directories.
    path = path.absolute()
    try:
        calls = ctypes.CDLL(str(path), use_errno=True)
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
    try:
        version = int(calls.hostflag_version())
    except AttributeError as error:
        raise NativeUnavailable(f"{path} is no build of the native helper: {error}") from error
    if version != VERSION:
        raise NativeUnavailable(
            f"{path} is version {version} of the native helper; this Farspark needs version {VERSION}"
        )
    _declare(calls)
    return HostflagLibrary(calls, path, origin, calls.hostflag_build().decode())


_U32, _I64, _SIZE = ctypes.c_uint32, ctypes.c_int64, ctypes.c_size_t
_POINTER = ctypes.c_void_p
# Arguments of the functions that return a status. A round is taken modulo 2^32.
_STATUS_CALLS: Final[dict[str, tuple[type[ctypes._SimpleCData[int]] | type[ctypes.c_void_p], ...]]] = {
    "hostflag_page_create": (_U32, _U32, _POINTER),
    "hostflag_page_format": (_POINTER, _SIZE, _U32, _U32, _POINTER),
    "hostflag_page_attach": (_POINTER, _SIZE, _POINTER),
    "hostflag_page_destroy": (_POINTER, _I64),
    "hostflag_page_info": (_POINTER, _POINTER),
    "hostflag_page_words": (_POINTER, _POINTER),
    "hostflag_wait_gathered": (_POINTER, _U32, _I64, _I64, _I64),
    "hostflag_publish": (_POINTER, _U32, _POINTER, _U32),
    "hostflag_fail": (_POINTER, _U32),
    "hostflag_claim": (_POINTER, _U32),
    "hostflag_release": (_POINTER, _U32),
    "hostflag_fail_all": (_POINTER, _U32, _I64, _POINTER),
    "hostflag_follow": (_POINTER, ctypes.c_int),
    "hostflag_watchdog_start": (_POINTER, _I64),
    "hostflag_watchdog_stop": (_POINTER,),
    "hostflag_watchdog_set_deadline": (_POINTER, _I64),
    "hostflag_watchdog_get_stats": (_POINTER, _POINTER),
    "hostflag_gather": (_POINTER, _U32),
    "hostflag_wait_released": (_POINTER, _U32, _I64, _I64, _I64),
    "hostflag_read_reply": (_POINTER, _POINTER, _U32),
    "hostflag_consume": (_POINTER, _U32),
}


def _declare(calls: ctypes.CDLL) -> None:
    calls.hostflag_version.restype = _U32
    calls.hostflag_build.restype = ctypes.c_char_p
    calls.hostflag_status_text.argtypes = (ctypes.c_int,)
    calls.hostflag_status_text.restype = ctypes.c_char_p
    calls.hostflag_page_bytes.argtypes = (_U32,)
    calls.hostflag_page_bytes.restype = _SIZE
    for name, arguments in _STATUS_CALLS.items():
        function = getattr(calls, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
