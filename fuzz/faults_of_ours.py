"""Exceptions that Farspark catches in order to live on: for a person an entry in the log with a traceback, here a find."""

from __future__ import annotations

import logging


class FaultsOfOurs(logging.Handler):
    """Attached to Farspark's own log from construction on. Every line is formatted, as a real handler would.

    `ignored` begins the lines about faults that the target plants itself.
    """

    def __init__(self, *, ignored: str | None = None) -> None:
        super().__init__()
        self._ignored = ignored
        self._faults: list[str] = []
        log = logging.getLogger("farspark")
        log.addHandler(self)
        log.propagate = False
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        assert "\n" not in line, f"a peer can forge lines of the log: {line!r}"
        if record.exc_info and not (self._ignored and line.startswith(self._ignored)):
            self._faults.append(self._formatter.format(record))

    def check(self) -> None:
        """Raises AssertionError if there was one since the last call."""
        faults, self._faults = self._faults, []
        assert not faults, "\n".join(faults)
