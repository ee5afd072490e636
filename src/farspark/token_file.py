"""The shared secret of engine and worker: one file on each side, readable by its owner only."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from farspark.errors import ConfigError

# A shorter one can be guessed from one recorded exchange.
MIN_BYTES: Final = 16
MAX_BYTES: Final = 4096


def read_token(path: Path | None, setting: str) -> bytes | None:
    """The token in `path`, without white space around it; None where there is no path.

    Raises ConfigError that begins with `setting`, the name of the option or variable.
    """
    if path is None:
        return None
    where = f"{setting}={str(path)!r}"
    try:
        with open(path, "rb") as file:
            # Of the open file: what is judged is what is read.
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{where}: not a file")
            if status.st_mode & 0o077:
                raise ConfigError(
                    f"{where}: others may read or change it (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it, and make "
                    "a new token if others had the time to read this one"
                )
            token = file.read(MAX_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror})") from error
    if not MIN_BYTES <= len(token) <= MAX_BYTES:
        size = f"more than {MAX_BYTES}" if len(token) > MAX_BYTES else str(len(token))
        raise ConfigError(
            f"{where}: a token of {size} bytes, expected {MIN_BYTES} to {MAX_BYTES}; `openssl rand -hex 32 > FILE` makes one"
        )
    return token
