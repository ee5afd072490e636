"""Which round numbers are given to the stream, or that none are."""

from __future__ import annotations

import threading

from farspark.engine.handoff.region import next_round


class Gate:
    """Used by any thread. Shut at first; the number that `shut` returns is the newest that anybody was given."""

    def __init__(self, newest: int) -> None:
        self._lock = threading.Lock()
        self._newest = newest
        self._is_open = False
        self._why: str | None = None
        self._is_final = False

    @property
    def is_open(self) -> bool:
        return self._is_open

    @property
    def newest(self) -> int:
        return self._newest

    @property
    def why_shut(self) -> str | None:
        """None while it is open, and before it first was."""
        return self._why

    @property
    def is_final(self) -> bool:
        """It will not be opened again."""
        return self._is_final

    def take(self) -> int | None:
        """The next number; None while the gate is shut."""
        with self._lock:
            if not self._is_open:
                return None
            self._newest = next_round(self._newest)
            return self._newest

    def open(self, newest: int) -> None:
        """Numbers go on behind `newest`. Does nothing once it was shut for good."""
        with self._lock:
            if not self._is_final:
                self._newest = newest
                self._is_open = True
                self._why = None

    def shut(self, why: str, *, for_good: bool) -> int:
        """The first reason stands."""
        with self._lock:
            self._is_open = False
            self._why = self._why or why
            self._is_final = self._is_final or for_good
            return self._newest

    def __repr__(self) -> str:
        return f"<Gate {'open' if self._is_open else f'shut: {self._why}'}, newest round {self._newest}>"
