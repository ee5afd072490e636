"""Monotonic time. A Deadline is made once at the edge and handed down; below it nobody owns a timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]
"""Seconds on a monotonic clock; tests pass a fake."""


# Not frozen: one is made in every round, and a frozen dataclass takes four times as long to make.
@dataclass(slots=True)
class Deadline:
    """A point in monotonic time after which waiting ends. Nobody changes one.

    `at_s` is on `clock`'s scale; infinity never passes.
    """

    at_s: float
    clock: Clock = field(default=time.monotonic, repr=False, compare=False)

    @classmethod
    def after(cls, timeout_s: float, clock: Clock = time.monotonic) -> Deadline:
        """The deadline `timeout_s` seconds from now. Raises ValueError on a timeout that is NaN or negative."""
        if not timeout_s >= 0:
            raise ValueError(f"a timeout of {timeout_s} s; expected a number of seconds, 0 or more")
        return cls(clock() + timeout_s, clock)

    @classmethod
    def never(cls) -> Deadline:
        return cls(math.inf)

    def left_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self.at_s - self.clock())

    def has_passed(self) -> bool:
        return self.clock() >= self.at_s

    def check(self, what: str) -> None:
        """Raise TimeoutError naming `what` if the deadline has passed."""
        if self.has_passed():
            raise TimeoutError(f"deadline passed while {what}")
