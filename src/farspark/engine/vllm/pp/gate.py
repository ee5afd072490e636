"""Which steps were judged, in order: nobody uses what a step brought before it has passed."""

from __future__ import annotations

import threading

from farspark.engine.vllm.pp.faults import TokenTransportError


class Gate:
    """Opened by whoever judges, waited for by the engine thread. The first failure is the one that counts, and ends all waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards what follows
        self._passed = 0
        self._failure: TokenTransportError | None = None

    def open(self, sequence: int) -> None:
        """All steps up to `sequence` have passed."""
        with self._changed:
            self._passed = sequence
            self._changed.notify_all()

    def fail(self, error: TokenTransportError) -> bool:
        """Whether this is the first failure."""
        with self._changed:
            is_first = self._failure is None
            self._failure = self._failure or error
            self._changed.notify_all()
            return is_first

    def look(self) -> None:
        """Raises the TokenTransportError that a step has failed with, without waiting for any."""
        if self._failure is not None:
            raise self._failure

    def wait(self, sequence: int) -> None:
        """Until the step has passed. Raises as `look` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._passed >= sequence or self._failure is not None)
        self.look()
