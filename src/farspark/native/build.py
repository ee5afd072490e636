"""Compiles the helper with the system's C compiler: `python -m farspark.native [FILE]`.

A build carries the SHA-256 of its sources, so that one that does not belong to the sources beside it is noticed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from farspark.errors import FarsparkError

HERE: Final = Path(__file__).parent
SOURCE: Final = HERE / "hostflag.c"
HEADER: Final = HERE / "hostflag.h"
PACKAGED: Final = HERE / "libhostflag.so"  # where `make native` puts it

COMPILERS: Final = ("cc", "gcc", "clang")
FLAGS: Final = ("-std=c11", "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
TIMEOUT_S: Final = 60


class NativeUnavailable(FarsparkError):
    """No usable build of the native helper. The message says what was tried, why each try failed, and what to do."""


def source_digest() -> str:
    """64 hex digits over header, source and flags. Raises NativeUnavailable if they are not there."""
    digest = hashlib.sha256()
    try:
        for part in (HEADER.read_bytes(), SOURCE.read_bytes(), " ".join(FLAGS).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
    except OSError as error:
        raise NativeUnavailable(f"the helper's sources cannot be read: {error}") from error
    return digest.hexdigest()


def compile_library(output: Path) -> Path:
    """Compile into the file `output`, which appears whole or not at all. Raises NativeUnavailable with the compiler's words."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeUnavailable(f"no C compiler on the PATH ({', '.join(COMPILERS)})")
    build = f'-DHOSTFLAG_BUILD="{source_digest()}"'
    try:
        # Beside the output: a rename within one file system is atomic, and two ranks may compile at the same time.
        with tempfile.TemporaryDirectory(prefix=".build-", dir=output.parent) as directory:
            built = Path(directory) / output.name
            _run([compiler, *FLAGS, build, str(SOURCE), "-o", str(built)])
            built.chmod(0o755)
            os.replace(built, output)
    except OSError as error:
        raise NativeUnavailable(f"cannot build in {output.parent}: {error}") from error
    return output


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took more than {TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed with exit code {done.returncode}: {done.stderr.strip()[-2000:]}")


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print("usage: python -m farspark.native [FILE]   (default: beside the package's sources)", file=sys.stderr)
        return 2
    try:
        print(compile_library(Path(arguments[0]) if arguments else PACKAGED))
    except NativeUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
