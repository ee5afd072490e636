"""Counters and latencies that cost little to record and are read as one snapshot.

One owner writes (the thread that runs rounds); `snapshot()` may be called from any thread: reading a dict of ints under
the GIL gives a value that was true at some moment of the call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

# A sample window large enough for a p99 and small enough that a slow start is forgotten within minutes of traffic.
WINDOW = 4096


class Latency:
    """Microseconds of the newest `WINDOW` samples; count and maximum of all of them."""

    def __init__(self) -> None:
        self.count = 0
        self.max_us = 0.0
        self._newest: list[float] = []

    def record(self, us: float) -> None:
        if self.count < WINDOW:
            self._newest.append(us)
        else:
            self._newest[self.count % WINDOW] = us
        self.count += 1
        self.max_us = max(self.max_us, us)

    def snapshot(self) -> dict[str, float | int]:
        """p50, p90, p99 (nearest rank, over the window), max and count (over everything)."""
        ordered = sorted(self._newest)

        def rank(share: float) -> float:
            return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0

        return {
            "p50": rank(0.50),
            "p90": rank(0.90),
            "p99": rank(0.99),
            "max": round(self.max_us, 1),
            "count": self.count,
        }


class Stats:
    """Named counters and named latencies."""

    def __init__(self) -> None:
        self._counters: Counter[str] = Counter()
        self._latencies: dict[str, Latency] = {}

    def add(self, name: str, amount: int = 1) -> None:
        self._counters[name] += amount

    def count(self, name: str) -> int:
        return self._counters[name]

    def record_us(self, name: str, us: float) -> None:
        latency = self._latencies.get(name)
        if latency is None:
            latency = self._latencies[name] = Latency()
        latency.record(us)

    def counters(self) -> Mapping[str, int]:
        return dict(sorted(self._counters.items()))

    def snapshot(self) -> dict[str, Any]:
        """`{"counters": {name: n}, "latency": {name: {p50, p90, p99, max, count}}}`, names sorted."""
        return {
            "counters": dict(self.counters()),
            "latency": {name: self._latencies[name].snapshot() for name in sorted(self._latencies)},
        }
