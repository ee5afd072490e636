"""A capture played against a worker: parity without an engine.

The rounds go through the real client and the real round, so that the worker sees what a live engine would send it: new
generations where a request starts, increments, whole windows after a failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from farspark.clock import Deadline
from farspark.engine.breaker import Breaker
from farspark.engine.capture import CapturedRound, CaptureHeader
from farspark.engine.client import Client, ClientState
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import RemoteRound
from farspark.engine.shadow import ShadowComparison
from farspark.engine.shape import ModelShape
from farspark.errors import ConfigError
from farspark.stats import Stats
from farspark.transport import Endpoint
from farspark.wire.layout import RequestStatus

LOCAL: Final = "local"
REMOTE: Final = "remote"

# A worker that fails so many rounds in a row has nothing more to say about parity.
GIVE_UP_AFTER: Final = 3
_BACKOFF_S: Final = 0.2


class HostRing:
    """The newest `ring` rows of every slot, as rank 0's device ring holds them, in the host's memory."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        self._rows: dict[int, npt.NDArray[np.uint8]] = {}  # by slot, [ring, row_bytes]

    def keep(self, captured: CapturedRound) -> None:
        row_bytes = self._shape.row_bytes
        packed = np.frombuffer(captured.rows, dtype=np.uint8).reshape(-1, row_bytes)
        at = 0
        for entry in captured.entries:
            end = int(entry["start_pos"]) + int(entry["valid_rows"])
            n = min(int(entry["valid_rows"]), self._shape.context)
            at += n
            kept = min(n, self._shape.ring)
            places = np.arange(end - kept, end) % self._shape.ring
            self._ring(int(entry["slot"]))[places] = packed[at - kept : at]

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        places = np.arange(first_pos, first_pos + n_rows) % self._shape.ring
        return memoryview(self._ring(slot)[places].reshape(-1))

    def _ring(self, slot: int) -> npt.NDArray[np.uint8]:
        if slot not in self._rows:
            self._rows[slot] = np.zeros((self._shape.ring, self._shape.row_bytes), dtype=np.uint8)
        return self._rows[slot]


@dataclass(slots=True)
class Tally:
    """What a replay has seen so far, beside the comparison."""

    rounds: int = 0
    failed_rounds: int = 0
    left_out: int = 0  # rounds that the capture itself lacks
    partial: int = 0  # drafts from another window than the captured ones, hence not compared
    without: int = 0  # batch rows without captured drafts to compare with
    stopped: str | None = None  # why the replay ended early


class Replay:
    """Plays rounds over a session of its own; `with` opens and ends it. Owned by one thread.

    `against` is LOCAL or REMOTE: whose captured drafts the new ones are compared with. `timeout_s` is that of a round.
    """

    def __init__(
        self,
        header: CaptureHeader,
        endpoints: Sequence[Endpoint],
        *,
        against: str = LOCAL,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 5.0,
        token: bytes | None = None,
    ) -> None:
        shape = header.shape
        self.shape = shape
        self.against = against
        self.stats = Stats()
        self.tally = Tally()
        self.comparison = ShadowComparison(shape.num_drafts)
        self.worker = ""
        self.worker_context = 0
        self._connect_timeout_s = connect_timeout_s
        self._ring = HostRing(shape)
        self._result = PackedResult.empty(ResultLayout(shape.slots, shape.num_drafts))
        self._expected = 0  # the number of the next round; 0: not known yet
        self._failed_in_a_row = 0
        self._client = Client(
            shape.hello(
                engine="farspark replay",
                identity=header.identity,
                markov_identity=header.markov_identity,
                want_margin=True,
            ),
            endpoints,
            connect_timeout_s=connect_timeout_s,
            backoff_s=_BACKOFF_S,
            backoff_max_s=_BACKOFF_S,
            stats=self.stats,
            token=token,
            token_setting="--token-file",
        )
        self._round = RemoteRound(
            client=self._client,
            shape=shape,
            ring=self._ring,
            breaker=Breaker(trip=0, cooldown=1),
            stats=self.stats,
            timeout_s=timeout_s,
            want_margin=True,
        )

    def __enter__(self) -> Replay:
        """Raises ConfigError where the worker is not there or is another one."""
        self._client.start()
        try:
            self._wait_ready()
        except BaseException:
            self._client.close()
            raise
        connection = self._client.connection()
        assert connection is not None
        self.worker = f"{connection.welcome.worker} ({connection.welcome.kind})"
        self.worker_context = connection.welcome.context
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()

    def play(self, captured: CapturedRound) -> bool:
        """One round. False once the worker has failed too often for more to make sense; `tally` has the reason."""
        tally = self.tally
        if self._expected and captured.number > self._expected:
            tally.left_out += captured.number - self._expected
        self._expected = captured.number + 1
        tally.rounds += 1
        self._ring.keep(captured)
        outcome = self._round.run(captured.step(), self._result)
        if outcome in (RoundOutcome.FAILED, RoundOutcome.SOME_FAILED):
            tally.failed_rounds += 1
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= GIVE_UP_AFTER:
                tally.stopped = f"{GIVE_UP_AFTER} rounds in a row failed: {self.why()}"
                return False
            # What the worker holds now comes again from the ring, over a new session if this one is gone.
            if self._client.connection() is None and not self._client.wait_ready(
                Deadline.after(self._connect_timeout_s)
            ):
                tally.stopped = f"the worker was lost: {self.why()}"
                return False
        else:
            self._failed_in_a_row = 0
        self._compare(captured)
        return True

    def why(self) -> str:
        """The newest reason for a failure, as a sentence."""
        found = self._round.last_bad_reply or self._client.last_failure
        counted = [name for name in self.stats.counters() if name.startswith(("fallback_", "req_status_"))]
        return found or ", ".join(f"{name} {self.stats.count(name)}" for name in counted)

    def _compare(self, captured: CapturedRound) -> None:
        """The one place where captured and new drafts meet."""
        n = len(captured.entries)
        remote = self.against == REMOTE
        drafts = captured.remote if remote else captured.local
        confidences = captured.remote_confidences if remote else captured.local_confidences
        tokens, new_confidences = self._result.tokens[:n].copy(), self._result.confidences[:n].copy()
        has_drafts = self._result.ok[:n].astype(bool)
        if drafts is None:
            self.tally.without += int(has_drafts.sum())
            return
        if remote:
            assert confidences is not None
            unasked = _unasked(drafts, confidences)
            tokens[unasked], new_confidences[unasked] = 0, 0
            missing = has_drafts & ~captured.entries["has_drafts"].astype(bool)
            self.tally.without += int(missing.sum())
            has_drafts &= ~missing
        last = self._round.last_drafts
        # Fewer rows than the context allows: behind a prefix-cache hit, or where the capture starts in the middle of a
        # request. The captured drafts are then of another window by right.
        partial = np.array([last.entry_status.get(row) is RequestStatus.PARTIAL_WINDOW for row in range(n)])
        if remote:
            partial |= captured.entries["status"] == RequestStatus.PARTIAL_WINDOW
        self.tally.partial += int((has_drafts & partial).sum())
        judged = has_drafts & ~partial
        if judged.any():
            ours, theirs = drafts[judged], tokens[judged]
            rows = np.flatnonzero(judged)
            self.comparison.observe(
                ours,
                theirs,
                judge=lambda asked: self._round.judge(rows[asked].tolist(), ours[asked]),
                has_router=last.has_router,
                margins=None if last.margins is None else last.margins[:n][judged],
                local_confidences=None if confidences is None else confidences[judged],
                remote_confidences=new_confidences[judged],
            )

    def _wait_ready(self) -> None:
        if self._client.wait_ready(Deadline.after(self._connect_timeout_s)):
            return
        why = self._client.last_failure or "no answer"
        if self._client.state is ClientState.DISABLED:
            raise ConfigError(f"this worker cannot replay the capture: {why}")
        raise ConfigError(f"the worker is not there: {why}. Start it, or give its endpoint")


def _unasked(tokens: npt.NDArray[np.int32], confidences: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """[n, N]: the tail where the worker was asked for nothing, and so answered zeros."""
    is_there = (tokens != 0) | (confidences != 0)
    return ~np.logical_or.accumulate(is_there[:, ::-1], axis=1)[:, ::-1]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay came to. `is_equal`: everything that was compared is equal, or a near tie, and no round failed."""

    data: dict[str, Any]

    @property
    def is_equal(self) -> bool:
        shadow = self.data["shadow"]
        return bool(
            shadow["steps"]
            and not shadow["diverged"]
            and not shadow["unjudged"]
            and not self.data["failed_rounds"]
            and self.data["stopped"] is None
        )


def verdict_of(replay: Replay) -> Verdict:
    tally = replay.tally
    snapshot = replay.stats.snapshot()
    return Verdict(
        {
            "against": replay.against,
            "worker": replay.worker,
            "context": {"capture": replay.shape.context, "worker": replay.worker_context},
            "rounds": tally.rounds,
            "failed_rounds": tally.failed_rounds,
            "left_out_rounds": tally.left_out,
            "partial_windows": tally.partial,
            "without_captured_drafts": tally.without,
            "stopped": tally.stopped,
            "shadow": replay.comparison.snapshot(),
            "latency": {name: snapshot["latency"].get(name) for name in ("rtt_us", "worker_us")},
            "counters": snapshot["counters"],
        }
    )
