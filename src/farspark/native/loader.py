"""Finds a build of a native library, or makes one, and refuses every other version.

In this order: the file that the caller names, and then nothing else; the build beside the sources; one that was compiled
before, in the user's cache directory; a compilation into that directory; a compilation into a temporary one, which is gone
as soon as the library is loaded. Code is loaded from directories only that nobody else can write to.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farspark.native.build import HOSTFLAG, Library, NativeUnavailable, compile_library, source_digest

# Of the header of a little-endian 64-bit ELF file: where its table of sections is, the size of an entry, and their number.
_ELF64: Final = struct.Struct("<40xQ10xHH2x")


@dataclass(frozen=True, slots=True)
class Build:
    """A loaded build of `library`. Every call through `calls` leaves the GIL; argument types are the caller's to declare."""

    library: Library
    calls: ctypes.CDLL
    path: Path
    origin: str  # "given", "packaged", "cached", "compiled"
    digest: str  # SHA-256 of the sources in hex, "" for a build that does not say


def open_build(
    library: Library, path: str | Path | None = None, *, cache: Path | None = None, include: Sequence[Path] = ()
) -> Build:
    """`library` from `path`, else from wherever it can be had.

    `cache` replaces the user's cache directory, `include` are directories of foreign headers, for a compilation. Raises
    NativeUnavailable: no build is to be had, or the one at `path` cannot be loaded or is of another version.
    """
    if path is not None:
        return _open(library, Path(path), "given")
    reasons = []
    for attempt in _attempts(library, cache, include):
        try:
            return attempt()
        except NativeUnavailable as error:
            reasons.append(str(error))
    needs = f" and {library.foreign}" if library.foreign else ""
    raise NativeUnavailable(
        f"{library.title} is not available: {'; '.join(reasons)}. Install a C compiler{needs}, or build it on a machine like "
        f"this one (python -m farspark.native {library.name} FILE) and name the file"
    )


def _attempts(library: Library, cache: Path | None, include: Sequence[Path]) -> Iterator[Callable[[], Build]]:
    yield lambda: _open_ours(library, library.packaged, "packaged")
    yield lambda: _from_cache(library, _private(cache or _user_cache()), include)
    yield lambda: _from_temporary(library, include)


def _from_cache(library: Library, directory: Path, include: Sequence[Path]) -> Build:
    digest = source_digest(library)[:32]
    path = directory / f"lib{library.name}-{library.version}-{digest}-{platform.machine()}.so"
    if path.exists():
        try:
            _refuse_unless_ours(path)
            return _open_ours(library, path, "cached")
        except NativeUnavailable:
            pass  # cut short, or made against another C library: made anew
    return _open_ours(library, compile_library(path, library, include=include), "compiled")


def _from_temporary(library: Library, include: Sequence[Path]) -> Build:
    try:
        with tempfile.TemporaryDirectory(prefix="farspark-native-") as directory:
            path = compile_library(Path(directory) / f"lib{library.name}.so", library, include=include)
            return _open_ours(library, path, "compiled")
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


def _open_ours(library: Library, path: Path, origin: str) -> Build:
    """A build made from the sources that are here."""
    if not path.exists():
        raise NativeUnavailable(f"{path} does not exist")
    build = _open(library, path, origin)
    if build.digest != source_digest(library):
        raise NativeUnavailable(
            f"{path} was built from other sources ({build.digest[:12] or 'unknown'}); run make native"
        )
    return build


def _refuse_if_cut_short(path: Path) -> None:
    """The system's loader maps what the file says it has, and the process dies of a page that is not there. What comes last in a
    file is the table of its sections. Raises NativeUnavailable, OSError."""
    with path.open("rb") as file:
        head, size = file.read(_ELF64.size), os.fstat(file.fileno()).st_size
    if len(head) < _ELF64.size or not head.startswith(b"\x7fELF\x02\x01"):
        return  # it says itself what that is
    table_at, entry_size, entries = _ELF64.unpack(head)
    if size < table_at + entry_size * entries:
        raise NativeUnavailable(f"{path} is cut short: it has {size} of {table_at + entry_size * entries} bytes")


def _open(library: Library, path: Path, origin: str) -> Build:
    # Absolute: dlopen looks for a bare name in the system's directories.
    path = path.absolute()
    try:
        _refuse_if_cut_short(path)
        calls = ctypes.CDLL(str(path), use_errno=True)
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
    try:
        version_of, build_of = calls[f"{library.name}_version"], calls[f"{library.name}_build"]
    except AttributeError as error:
        raise NativeUnavailable(f"{path} is no build of {library.title}: {error}") from error
    version_of.restype, build_of.restype = ctypes.c_uint32, ctypes.c_char_p
    version = int(version_of())
    if version != library.version:
        raise NativeUnavailable(
            f"{path} is version {version} of {library.title}; this Farspark needs version {library.version}"
        )
    return Build(library, calls, path, origin, build_of().decode())


# What hostflag.h declares.

VERSION: Final = HOSTFLAG.version


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
    """The helper of asynchronous rounds. As `open_build`."""
    build = open_build(HOSTFLAG, path, cache=cache)
    _declare(build.calls)
    return HostflagLibrary(build.calls, build.path, build.origin, build.digest)


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
    "hostflag_submit": (_POINTER, _POINTER, _POINTER),
    "hostflag_gather": (_POINTER, _U32),
    "hostflag_wait_released": (_POINTER, _U32, _I64, _I64, _I64),
    "hostflag_read_reply": (_POINTER, _POINTER, _U32),
    "hostflag_consume": (_POINTER, _U32),
}


def _declare(calls: ctypes.CDLL) -> None:
    calls.hostflag_status_text.argtypes = (ctypes.c_int,)
    calls.hostflag_status_text.restype = ctypes.c_char_p
    calls.hostflag_page_bytes.argtypes = (_U32,)
    calls.hostflag_page_bytes.restype = _SIZE
    for name, arguments in _STATUS_CALLS.items():
        function = getattr(calls, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int
