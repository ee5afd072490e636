"""Standard streams that cannot take everything: closed ones, another alphabet, a pipe that nobody reads any more, a full disk.

What a command is asked for goes to standard output, and where it cannot be written the command has failed. What is merely said
meanwhile goes through `say`: the work goes on whether anybody reads it or not.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from typing import Literal, TextIO

# As a shell reports a program that SIGPIPE ended.
READER_GONE = 141


def open_streams() -> None:
    """A stream that was closed takes everything and keeps nothing. A letter that a stream's encoding has not got is written as
    its number, and is no error."""
    # In the order of their descriptors, so that each gets its own back, and no file or socket does.
    sys.stdin = sys.stdin or _nothing("r")
    sys.stdout = sys.stdout or _nothing("w")
    sys.stderr = sys.stderr or _nothing("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """What was printed inside is written at the end. Raises SystemExit(READER_GONE) where nobody reads it any more, and
    SystemExit(1), with a sentence, where there is no room for it."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _let_go(sys.stdout)
        raise SystemExit(READER_GONE) from None
    except OSError as error:
        # An error with a name is of a file that the command opened.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        _let_go(sys.stdout)
        say(f"farspark: cannot write: {error.strerror}", sys.stderr)
        raise SystemExit(1) from None


def say(line: str, stream: TextIO) -> None:
    try:
        print(line, file=stream, flush=True)
    except OSError:
        _let_go(stream)


def _nothing(mode: Literal["r", "w"]) -> TextIO:
    return open(os.devnull, mode)


def _let_go(stream: TextIO) -> None:
    """From here on it takes everything and keeps nothing; what waits in its buffer would fail once more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
