"""What the worker counts: its own numbers, and each session's for as long as that lasts."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from farspark.stats import Stats
from farspark.transport.base import Piece
from farspark.wire.messages import StepReply
from farspark.worker.connection import Connection
from farspark.worker.session import Plan, Session

logger = logging.getLogger(__name__)


class Drafted(NamedTuple):
    """The reply to a STEP, and what is counted of it."""

    frame: Sequence[Piece]
    session: Session
    plan: Plan
    reply: StepReply
    waited_us: int  # for its turn
    companions: int  # steps that were drafted for together with it


class Tally:
    """Used by every thread of the worker. Its lock is held for the counting alone, and nobody asks for another one then."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._counting = threading.Lock()  # guards all that follows, and the counters of the sessions
        self._stats = Stats()
        self._failures_seen: set[str] = set()  # kinds of drafter failures that are in the log already
        self._auth_failures = 0

    @property
    def auth_failures(self) -> int:
        """Proofs of the token that were none."""
        return self._auth_failures

    def count(self, name: str, amount: int = 1) -> None:
        with self._counting:
            self._stats.add(name, amount)

    def count_auth_failure(self) -> None:
        with self._counting:
            self._auth_failures += 1

    def note_failure(self, error: Exception) -> None:
        """A failed step is an answer (INTERNAL for its entries), not the end of the worker."""
        kind = type(error).__name__
        with self._counting:
            self._stats.add("draft_failures")
            is_new = kind not in self._failures_seen
            self._failures_seen.add(kind)
        if is_new:
            logger.error("the drafter failed; further %s are only counted", kind, exc_info=error)

    def count_step(self, drafted: Drafted, frame_bytes: int) -> None:
        """Once the reply is out: the engine does not wait for it."""
        frame, session, plan, reply, waited_us, companions = drafted
        sent_bytes = sum([piece.nbytes if type(piece) is memoryview else len(piece) for piece in frame])
        with self._counting:
            self._stats.record_us("step_us", reply.worker_us)
            self._stats.record_us("wait_us", waited_us)
            # What comes after the end of a session is not lost: then the worker's own counters have the rest already.
            stats = self._stats if session.is_closed else session.stats
            session.count(plan, reply, stats)
            stats.add("steps")
            stats.add("rows", len(plan.step.rows) // self._row_bytes)
            stats.add("bytes_received", frame_bytes)
            stats.add("bytes_sent", sent_bytes)
            if companions:
                stats.add("steps_joined")
                stats.add("companions", companions)
            if stats is not self._stats:
                stats.record_us("worker_us", reply.worker_us)
                stats.record_us("wait_us", waited_us)

    def take_over(self, connection: Connection, session: Session) -> Mapping[str, int]:
        """The connection has no session from here on, and what `session`, which is closed, has counted is the worker's.

        At once, so that no snapshot lacks the counters or has them twice. Requires the sessions' lock.
        """
        with self._counting:
            connection.session, connection.session_id, connection.instance = None, 0, 0
            counters = session.stats.counters()
            for name, count in counters.items():
                self._stats.add(name, count)
        return counters

    def snapshot(self, connections: Iterable[Connection], now: float) -> dict[str, Any]:
        """What STATS says of rounds: of the sessions, in the order of their connections, and of the worker with them.

        `now`: in seconds, of the clock that `heard_s` is read from.
        """
        with self._counting:
            counters = Counter(self._stats.counters())
            stats = self._stats.snapshot()
            sessions = {}
            for connection in connections:
                session = connection.session
                if session is not None:
                    counters.update(session.stats.counters())
                    sessions[f"{connection.session_id:016x}"] = _session_snapshot(connection, session, now)
        stats["counters"] = dict(sorted(counters.items()))
        return {"sessions": sessions, "acceptance": _acceptance(counters), **stats}


def _session_snapshot(connection: Connection, session: Session, now: float) -> dict[str, Any]:
    """One engine's share. Requires the counters' lock."""
    counters = session.stats.counters()
    latency = session.stats.snapshot()["latency"]
    steps = counters.get("steps", 0)

    def share(name: str, rank: str) -> float:
        return float(latency[name][rank]) if name in latency else 0.0

    return {
        "engine": connection.engine,
        "lane": connection.channel.lane,
        "silent_s": round(max(0.0, now - connection.heard_s), 1),
        "slots_in_use": session.slots_in_use,
        "rounds": steps,
        "rows": counters.get("rows", 0),
        "drafts": counters.get("drafts", 0),
        "accepted": counters.get("drafts_accepted", 0),
        "acceptance": _acceptance(counters),
        "bytes_received": counters.get("bytes_received", 0),
        "bytes_sent": counters.get("bytes_sent", 0),
        "batched_with": round(counters.get("companions", 0) / steps, 2) if steps else 0.0,
        **{f"{name}_{rank}": share(name, rank) for name in ("worker_us", "wait_us") for rank in ("p50", "p99")},
    }


def _acceptance(counters: Mapping[str, int]) -> float | None:
    verified = counters.get("drafts_verified", 0)
    return round(counters.get("drafts_accepted", 0) / verified, 4) if verified else None
