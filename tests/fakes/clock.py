"""A clock that moves when it is told to."""

from __future__ import annotations


class FakeClock:
    """Seconds, as `farspark.clock.Clock`: call it to read it."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
