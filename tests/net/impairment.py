"""What a bad link does to one packet: decided here, without sockets and without a clock, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Impairment:
    """One direction of a link. Chances are 0 to 1, for each packet on its own."""

    delay_ms: float = 0.0
    jitter_ms: float = (
        0.0  # uniform, so much more or less than the delay; packets stay in order, as in a router's queue
    )
    loss: float = 0.0
    duplicate: float = 0.0  # the packet arrives twice
    reorder: float = 0.0  # the packet is held back by `reorder_ms`: those sent in that time overtake it
    reorder_ms: float = 3.0
    rate_mbit: float = 0.0  # megabits a second; 0: without limit
    queue_bytes: int = 262_144  # what may wait for the rate; what comes on top is lost
    cut: bool = False  # nothing passes, what is under way included


CLEAN = Impairment()
CUT = Impairment(cut=True)


@dataclass(slots=True)
class Counts:
    """Packets of one direction."""

    offered: int = 0
    lost: int = 0
    overflowed: int = 0
    cut: int = 0
    duplicated: int = 0
    held_back: int = 0


class Lane:
    """One direction of a link. The same seed, packets and times give the same fate."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.impairment = CLEAN
        self.counts = Counts()
        self._sent_s = 0.0  # when the last packet has left the rate limiter
        self._newest_s = 0.0  # when the last packet that was not held back is due

    def offer(self, n_bytes: int, now_s: float) -> tuple[float, ...]:
        """When copies of a packet that comes at `now_s` are due at the other end; empty: it is lost."""
        bad, counts, draw = self.impairment, self.counts, self._rng.random
        counts.offered += 1
        if bad.cut:
            counts.cut += 1
            return ()
        # Every packet draws the same numbers, so that switching one fault on does not move the others.
        lost, twice, back, spread = (draw() for _ in range(4))
        if lost < bad.loss:
            counts.lost += 1
            return ()
        left_s = now_s
        if bad.rate_mbit:
            bytes_per_s = bad.rate_mbit * 1e6 / 8
            left_s = max(now_s, self._sent_s)
            if (left_s - now_s) * bytes_per_s + n_bytes > bad.queue_bytes:
                counts.overflowed += 1
                return ()
            left_s += n_bytes / bytes_per_s
            self._sent_s = left_s
        due_s = left_s + max(0.0, bad.delay_ms + bad.jitter_ms * (2 * spread - 1)) / 1000
        if back < bad.reorder:
            counts.held_back += 1
            due_s += bad.reorder_ms / 1000
        else:
            due_s = self._newest_s = max(due_s, self._newest_s)
        if twice < bad.duplicate:
            counts.duplicated += 1
            return (due_s, due_s)
        return (due_s,)
