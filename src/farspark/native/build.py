"""The native libraries, and how the system's C compiler makes them: `python -m farspark.native [NAME [FILE]]`.

A build carries the SHA-256 of its sources, so that one that does not belong to the sources beside it is noticed. Every
library NAME has the functions NAME_version() and NAME_build(), and gets its digest as the macro NAME_BUILD.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from farspark.errors import FarsparkError

HERE: Final = Path(__file__).parent
COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
TIMEOUT_S: Final = 60


class NativeUnavailable(FarsparkError):
    """No usable build of a native library. The message says what was tried, why each try failed, and what to do."""


@dataclass(frozen=True, slots=True)
class Library:
    """A native library of ours and what it is made of."""

    name: str  # of its functions, and of its file: libNAME.so
    title: str  # what messages call it
    version: int  # NAME_VERSION of its header; a build of another version is refused
    header: str
    sources: tuple[str, ...]
    other_headers: tuple[str, ...] = ()  # of ours
    flags: tuple[str, ...] = FLAGS
    foreign: str = ""  # what is needed beside a C compiler, and where it comes from
    include: tuple[Path, ...] = ()  # directories of foreign headers that are always looked in

    @property
    def packaged(self) -> Path:
        """Where `make native` puts it."""
        return HERE / f"lib{self.name}.so"


HOSTFLAG: Final = Library("hostflag", "the native helper", 3, "hostflag.h", ("hostflag.c",))
UCXCHANNEL: Final = Library(
    "ucxchannel",
    "the UCX channel",
    2,
    "ucx_channel.h",
    ("ucx_channel.c",),
    # glibc's own interfaces (eventfd, ppoll) beside C11.
    flags=(*FLAGS, "-D_GNU_SOURCE"),
    foreign="the headers of UCX 1.13 or later (Debian and Ubuntu: libucx-dev)",
)
ROUNDCALLS: Final = Library(
    "roundcalls",
    "the quick calls of a round",
    6,
    "round_calls.h",
    ("round_calls.c", "step_calls.c", "submit_calls.c"),
    other_headers=("ucx_channel.h", "hostflag.h"),
    flags=(*FLAGS, "-D_GNU_SOURCE"),
    foreign="the headers of Python (Debian and Ubuntu: python3-dev)",
    include=(Path(sysconfig.get_path("include")),),
)
LIBRARIES: Final = (HOSTFLAG, UCXCHANNEL, ROUNDCALLS)


def source_digest(library: Library = HOSTFLAG) -> str:
    """64 hex digits over header, sources and flags. Raises NativeUnavailable if they are not there."""
    digest = hashlib.sha256()
    try:
        texts = [(HERE / name).read_bytes() for name in (library.header, *library.other_headers, *library.sources)]
    except OSError as error:
        raise NativeUnavailable(f"the sources of {library.title} cannot be read: {error}") from error
    for part in (*texts, " ".join(library.flags).encode()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def compile_library(output: Path, library: Library = HOSTFLAG, *, include: Sequence[Path] = ()) -> Path:
    """Compile into the file `output`, which appears whole or not at all; `include` are directories of foreign headers.

    Raises NativeUnavailable with the compiler's words.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable(f"no C compiler on the PATH ({', '.join(COMPILERS)})")
    build = f'-D{library.name.upper()}_BUILD="{source_digest(library)}"'
    # System headers: their warnings are not ours.
    foreign = [argument for directory in (*library.include, *include) for argument in ("-isystem", str(directory))]
    sources = [str(HERE / name) for name in library.sources]
    try:
        # Beside the output: a rename within one file system is atomic, and two ranks may compile at the same time.
        with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as directory:
            built = Path(directory) / output.name
            _run([compiler, *library.flags, build, *foreign, *sources, "-o", str(built)])
            built.chmod(0o755)
            os.replace(built, output)
    except OSError as error:
        raise NativeUnavailable(f"cannot build in {output.parent}: {error}") from error
    return output


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took more than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")


def main(arguments: list[str]) -> int:
    names = {library.name: library for library in LIBRARIES}
    if len(arguments) > 2 or (arguments and arguments[0] not in names):
        print(
            "usage: python -m farspark.native [NAME [FILE]]   (default: all, beside the package's sources)",
            file=sys.stderr,
        )
        print(f"names: {', '.join(names)}", file=sys.stderr)
        return 2
    outcome = 0
    for library in [names[arguments[0]]] if arguments else LIBRARIES:
        try:
            print(compile_library(Path(arguments[1]) if len(arguments) == 2 else library.packaged, library))
        except NativeUnavailable as error:
            print(f"error: {error}", file=sys.stderr)
            if library.foreign:
                print(f"{library.title} needs {library.foreign}", file=sys.stderr)
            # One that needs what this machine may well lack does not spoil the others, unless it was asked for.
            outcome = outcome if library.foreign and not arguments else 1
    return outcome
