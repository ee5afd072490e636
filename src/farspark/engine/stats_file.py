"""The stats file: JSON that is either the old snapshot or the new one, never half of either."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

logger = logging.getLogger(__name__)

# A disk that takes longer for a few kilobytes holds the engine's end up no further.
_LAST_WRITE_S: Final = 5.0


class StatsFile:
    """Owned by the engine thread, which puts snapshots into words; a writer thread has the disk, so that a slow one holds no
    round up. A disk that is full or read-only is said once and costs nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_failed = False
        self._changed = threading.Condition()  # guards the next two
        self._waiting: str | None = None
        self._is_closed = False
        self._writer: threading.Thread | None = None

    def write_soon(self, snapshot: Mapping[str, Any]) -> None:
        """In place of a snapshot that still waits. Nothing of `snapshot` is kept."""
        text = _text(snapshot)
        with self._changed:
            self._waiting = text
            self._changed.notify()
        if self._writer is None:
            self._writer = threading.Thread(target=self._run, name="farspark-stats", daemon=True)
            self._writer.start()

    def close(self, snapshot: Mapping[str, Any]) -> None:
        """The last snapshot, written when this returns. A second call writes once more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._writer is not None:
            self._writer.join(_LAST_WRITE_S)
            if self._writer.is_alive():
                logger.warning(
                    "stats file %s: the disk does not answer; the last statistics are not written", self.path
                )
                return
        self._write(_text(snapshot))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._waiting is not None)
                if self._is_closed:
                    return
                text, self._waiting = self._waiting, None
            assert text is not None
            self._write(text)

    def _write(self, text: str) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            if not self._has_failed:
                logger.warning("stats file %s cannot be written (%s); statistics stay in memory", self.path, error)
            self._has_failed = True
        else:
            self._has_failed = False


def _text(snapshot: Mapping[str, Any]) -> str:
    return json.dumps(snapshot, indent=1) + "\n"
