"""Whether there is a CUDA driver; and programs in a process that finds `libcuda.c` as one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def run_over(directory: Path, flags: Sequence[str], *program: str) -> list[str]:
    """The lines that Python prints for the arguments `program`; `flags` are the compiler's, the library lies in `directory`."""
    library = directory / "libcuda.so.1"
    source = Path(__file__).with_name("libcuda.c")
    subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", *flags, source, "-o", library], check=True)
    done = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(directory)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
