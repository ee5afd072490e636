"""Standard output that cannot take everything: another alphabet, a pipe that nobody reads any more, a full disk."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

# As a shell reports a program that SIGPIPE ended.
READER_GONE = 141


def escape_what_cannot_be_shown() -> None:
    """A letter that a stream's encoding has not got is written as its number, and is no error."""
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
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        let_go()
        raise SystemExit(READER_GONE) from None
    except OSError as error:
        # An error with a name is of a file that the command opened.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        let_go()
        print(f"farspark: cannot write: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from None


def let_go() -> None:
    """From here on standard output takes everything and keeps nothing; what waits in its buffer would fail once more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
