"""Whose turn it is at the drafter. Steps that wait at the same time are drafted for together, in one call of the drafter.

Nobody waits in order to be joined by others: whoever finds the drafter free begins at once, on its own thread. Those who come
meanwhile queue; when the draft is done the first of them takes the turn, on its own thread, and takes along whoever else
waits and fits. So a step waits for the draft in progress, and for at most one more for each step in front of it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from farspark.worker.batch import DraftBatch, Drafter, DraftResult, Drawn, Judged, Judging, make_draft_batch
from farspark.worker.session import Session

# Of steps that are drafted for together: what one pass of the drafter projects. A long prefill goes alone, or the decode
# steps that were taken along would pay for it.
MOST_ROWS: Final = 512


class Turn:
    """One step's turn: asked for by its own thread, filled in by whoever drafts."""

    __slots__ = (
        "_woken",
        "asked_ns",
        "batch",
        "began_ns",
        "companions",
        "ended_ns",
        "errors",
        "is_done",
        "is_void",
        "result",
        "session",
    )

    def __init__(self, session: Session | None, batch: DraftBatch | None) -> None:
        self.session = session
        self.batch = batch  # None: the drafter is wanted for something else, alone
        self.result: DraftResult | None = None  # of this step's entries alone; None where the drafter failed
        self.errors: list[Exception] = []  # of failed calls of the drafter; of a joint one with the first step only
        self.is_void = False  # the session ended while the step waited: nothing was drafted
        self.is_done = False
        self.companions = 0  # other steps that were drafted for in the same call
        self.asked_ns = self.began_ns = self.ended_ns = 0
        self._woken: threading.Lock | None = None  # held until there is something to wake for; None: never queued

    def wait(self) -> None:
        """Until it is done, or its turn to do it."""
        assert self._woken is not None
        self._woken.acquire()

    def wake(self) -> None:
        assert self._woken is not None
        self._woken.release()

    def queue(self) -> None:
        self._woken = threading.Lock()
        self._woken.acquire()


class Turns:
    """Hands the drafter from thread to thread. Any thread may ask; within `draft` the caller may be the one who drafts, for
    itself and for others.
    """

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._num_drafts = drafter.info.num_drafts
        self._support = drafter.info.support
        self._row_bytes = drafter.info.row_bytes
        self._gate = threading.Lock()  # guards the two below
        self._is_taken = False
        self._queue: deque[Turn] = deque()

    def __repr__(self) -> str:
        return f"<Turns {'taken' if self._is_taken else 'free'}, {len(self._queue)} wait>"

    def draft(self, session: Session, batch: DraftBatch) -> Turn:
        """Draft for `batch`, a step of `session`; waits for its turn. Never raises what the drafter raises."""
        turn = Turn(session, batch)
        if self._begin(turn):
            self._take(turn)
        return turn

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The drafter for something else than drafts, once it is this caller's turn."""
        self._begin(Turn(None, None))
        try:
            yield
        finally:
            self._pass_on()

    def _begin(self, turn: Turn) -> bool:
        """Wait until the turn is done, or the caller's to do: True."""
        turn.asked_ns = time.perf_counter_ns()
        with self._gate:
            if not self._is_taken:
                self._is_taken = True
                return True
            turn.queue()
            self._queue.append(turn)
        turn.wait()
        return not turn.is_done

    def _take(self, first: Turn) -> None:
        if not self._queue:
            self._take_alone(first)
            return
        together = [first]
        try:
            together += self._take_along(first)
            self._draft([turn for turn in together if not _is_void(turn)])
        finally:
            # The next one first: what is left to do here needs no drafter.
            self._pass_on()
            for turn in together:
                turn.is_done = True
            for turn in together[1:]:
                turn.wake()

    def _take_alone(self, turn: Turn) -> None:
        try:
            if not _is_void(turn):
                self._draft_alone(turn)
        finally:
            self._pass_on()
            turn.is_done = True

    def _pass_on(self) -> None:
        with self._gate:
            if not self._queue:
                self._is_taken = False
                return
            successor = self._queue.popleft()
        successor.wake()

    def _take_along(self, first: Turn) -> Sequence[Turn]:
        """Those who wait and fit, in their order; the others stay where they are."""
        assert first.batch is not None
        n_rows, kind = self._rows(first.batch), _kind(first.batch)
        found: list[Turn] = []
        with self._gate:
            for turn in self._queue:
                if turn.batch is not None and _kind(turn.batch) == kind:
                    more = self._rows(turn.batch)
                    if n_rows + more <= MOST_ROWS:
                        n_rows += more
                        found.append(turn)
            for turn in found:
                self._queue.remove(turn)
        return found

    def _rows(self, batch: DraftBatch) -> int:
        return batch.rows.nbytes // self._row_bytes

    def _draft(self, turns: Sequence[Turn]) -> None:
        if len(turns) > 1 and self._draft_together(turns):
            return
        # One of them alone may be at fault, and the others should not pay for it. What a failed call has appended is
        # appended once more, to the same positions.
        for turn in turns:
            self._draft_alone(turn)

    def _draft_alone(self, turn: Turn) -> None:
        assert turn.batch is not None
        turn.began_ns = time.perf_counter_ns()
        try:
            turn.result = self._drafter.draft(turn.batch)
        except Exception as error:
            turn.errors.append(error)
        turn.ended_ns = time.perf_counter_ns()

    def _draft_together(self, turns: Sequence[Turn]) -> bool:
        """False where the drafter failed."""
        batches = [turn.batch for turn in turns if turn.batch is not None]
        began_ns = time.perf_counter_ns()
        try:
            result = self._drafter.draft(joined(batches))
        except Exception as error:
            turns[0].errors.append(error)
            return False
        ended_ns = time.perf_counter_ns()
        first = 0
        for turn, batch in zip(turns, batches, strict=True):
            count = len(batch.entries)
            turn.result = part_of(result, first, count, self._num_drafts, self._support)
            turn.began_ns, turn.ended_ns = began_ns, ended_ns
            turn.companions = len(turns) - 1
            first += count
        return True


def _is_void(turn: Turn) -> bool:
    """Note that the session has ended: its slots may be another's by now."""
    assert turn.session is not None
    turn.is_void = turn.session.is_closed
    return turn.is_void


def _kind(batch: DraftBatch) -> tuple[bool, bool]:
    """What a call of the drafter does for all of its entries or for none: those alone would not get the same numbers."""
    return batch.want_margins, any(entry.temperature > 0 for entry in batch.entries)


def joined(batches: Sequence[DraftBatch]) -> DraftBatch:
    """One batch of the entries of all, in their order."""
    entries = [entry for batch in batches for entry in batch.entries]
    rows = memoryview(b"".join([batch.rows for batch in batches]))
    return make_draft_batch((entries, rows, batches[0].want_margins))


def part_of(result: DraftResult, first: int, count: int, num_drafts: int, support: int) -> DraftResult:
    """Of a joint result what is about the entries `first .. first + count - 1`, as if they had been alone."""
    end = first + count

    def cut(array: memoryview, width: int) -> memoryview:
        return array[first * width : end * width]

    judge = None if result.judge is None else _judging_part(result.judge, first)
    drawn = None
    if result.drawn is not None:
        mask, ids, q = result.drawn
        drawn = Drawn(cut(mask, 1), cut(ids, num_drafts * support), cut(q, num_drafts * support))
    return DraftResult(
        result.ok[first:end],
        cut(result.tokens, num_drafts),
        cut(result.confidences, num_drafts),
        None if result.margins is None else cut(result.margins, num_drafts),
        judge,
        drawn,
    )


def _judging_part(judging: Judging, first: int) -> Judging:
    def judge(entries: Sequence[int], tokens: memoryview) -> Judged:
        return judging([first + entry for entry in entries], tokens)

    return judge
