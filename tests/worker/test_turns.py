"""Whose turn it is at the drafter: the queue by itself, without a socket or a session's frames."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter, expected

from farspark.stats import Stats
from farspark.worker.batch import DraftBatch, DraftEntry, DraftResult, Drawn, Judged
from farspark.worker.session import Session, SlotPool
from farspark.worker.turns import MOST_ROWS, Turn, Turns, joined, part_of

N = INFO.num_drafts
WIDE = replace(INFO, slots=16, context=1024)
PATIENCE_S = 10.0


def session() -> Session:
    return Session(WIDE, SlotPool(WIDE.slots), slots=4, context=WIDE.context, stats=Stats())


def row(slot: int, position: int) -> bytes:
    return struct.pack("<IIII", slot, position, 1, 2)


def batch(slot: int, n_rows: int = 1, *, want_margins: bool = False, temperature: float = 0.0) -> DraftBatch:
    rows = b"".join(row(slot, at) for at in range(n_rows))
    entry = DraftEntry(slot, True, 0, n_rows, 0, 5, True, N, 1, temperature)
    return DraftBatch([entry], memoryview(rows), want_margins)


def ids(slot: int, n_rows: int = 1) -> list[int]:
    rows = {at: row(slot, at) for at in range(n_rows)}
    return expected(rows, 5, n_rows, num_drafts=N, vocab_size=WIDE.vocab_size, n_out=N)[0]


class Gated(ArithmeticDrafter):
    """Each call of it waits to be let go, and is written down: the slots of its entries."""

    def __init__(self) -> None:
        super().__init__(WIDE)
        self.batches: list[list[int]] = []
        self.let_go = threading.Semaphore(0)
        self.inside = threading.Semaphore(0)
        self.poison: set[int] = set()

    def draft(self, batch: DraftBatch) -> DraftResult:
        self.batches.append([entry.slot for entry in batch.entries])
        self.inside.release()
        assert self.let_go.acquire(timeout=PATIENCE_S)
        if self.poison & {entry.slot for entry in batch.entries}:
            raise RuntimeError("poisoned")
        return super().draft(batch)


@dataclass(eq=False)
class Asking:
    """One thread that asks for one draft."""

    turns: Turns
    asked: DraftBatch
    session: Session = field(default_factory=session)
    turn: Turn | None = None
    drafted_here: int = 0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.turn = self.turns.draft(self.session, self.asked)

    def done(self) -> Turn:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        assert self.turn is not None
        return self.turn

    def tokens(self) -> list[int]:
        result = self.done().result
        assert result is not None
        return result.tokens.tolist()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def queued(turns: Turns, count: int) -> None:
    until(lambda: f"{count} wait" in repr(turns))


def called(drafter: Gated, times: int) -> None:
    until(lambda: len(drafter.batches) == times)


@dataclass
class Scene:
    """The drafter is busy with slot 0, for a caller of its own."""

    drafter: Gated = field(default_factory=Gated)
    waiting: list[Asking] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.turns = Turns(self.drafter)
        self.first = Asking(self.turns, batch(0))
        assert self.drafter.inside.acquire(timeout=PATIENCE_S)

    def ask(self, asked: DraftBatch, owner: Session | None = None) -> Asking:
        asking = Asking(self.turns, asked, owner or session())
        self.waiting.append(asking)
        queued(self.turns, len(self.waiting))
        return asking

    def finish(self) -> list[list[int]]:
        """Let every call go; the calls there were."""
        for _ in range(2 * len(self.waiting) + 2):
            self.drafter.let_go.release()
        for asking in [self.first, *self.waiting]:
            asking.done()
        assert repr(self.turns) == "<Turns free, 0 wait>"
        return self.drafter.batches


def test_a_lone_step_is_drafted_for_at_once_on_its_own_thread() -> None:
    drafter = ArithmeticDrafter(WIDE)
    turns = Turns(drafter)
    turn = turns.draft(session(), batch(3, 2))
    assert drafter.threads == {threading.current_thread().name}
    assert turn.result is not None
    assert turn.result.tokens.tolist() == ids(3, 2)
    assert (turn.companions, turn.errors, turn.is_void) == (0, [], False)
    assert turn.asked_ns <= turn.began_ns <= turn.ended_ns


def test_steps_that_wait_at_the_same_time_are_drafted_for_in_one_call() -> None:
    scene = Scene()
    for slot, n_rows in ((1, 2), (2, 1), (3, 3)):
        scene.ask(batch(slot, n_rows))
    assert scene.finish() == [[0], [1, 2, 3]]
    assert scene.first.tokens() == ids(0)
    assert [asking.tokens() for asking in scene.waiting] == [ids(1, 2), ids(2, 1), ids(3, 3)]
    assert [asking.done().companions for asking in [scene.first, *scene.waiting]] == [0, 2, 2, 2]


def test_the_first_that_waits_drafts_for_all_on_its_own_thread() -> None:
    scene = Scene()
    for slot in (1, 2):
        scene.ask(batch(slot))
    scene.finish()
    assert scene.drafter.threads == {scene.first.thread.name, scene.waiting[0].thread.name}


def test_a_long_prefill_goes_alone_and_the_short_ones_behind_it_together() -> None:
    scene = Scene()
    scene.ask(batch(1, MOST_ROWS))
    scene.ask(batch(2))
    scene.ask(batch(3))
    assert scene.finish() == [[0], [1], [2, 3]]
    scene = Scene()
    scene.ask(batch(1))
    scene.ask(batch(2, MOST_ROWS))
    scene.ask(batch(3))
    assert scene.finish() == [[0], [1, 3], [2]]


def test_what_a_call_does_for_all_or_none_keeps_steps_apart() -> None:
    """Alone they would get the same numbers."""
    scene = Scene()
    scene.ask(batch(1))
    scene.ask(batch(2, want_margins=True))
    scene.ask(batch(3))
    scene.ask(batch(4, want_margins=True))
    assert scene.finish() == [[0], [1, 3], [2, 4]]
    margins = [asking.done().result for asking in scene.waiting]
    assert [one is not None and one.margins is not None for one in margins] == [False, True, False, True]


def test_the_wait_is_bounded_by_the_draft_in_progress_and_one_for_each_step_in_front() -> None:
    """One engine that asks again as fast as it can, each time alone: another one waits for two of its drafts at most."""
    drafter = Gated()
    turns = Turns(drafter)
    over = threading.Event()

    def be_busy(slot: int) -> None:
        owner = session()
        while not over.is_set():
            turns.draft(owner, batch(slot, MOST_ROWS))

    busy = [threading.Thread(target=be_busy, args=(slot,)) for slot in (0, 1, 2)]
    for thread in busy:
        thread.start()
    calls = 1  # begun, of which the newest is in progress
    try:
        for _ in range(5):
            queued(turns, 2)
            called(drafter, calls)
            modest = Asking(turns, batch(9, MOST_ROWS))
            queued(turns, 3)
            for _ in range(3):
                drafter.let_go.release()
                calls += 1
                called(drafter, calls)
            # Two were in front of it.
            assert drafter.batches[-3:].index([9]) == 2
            drafter.let_go.release()
            calls += 1
            modest.done()
    finally:
        over.set()
        for thread in busy:
            while thread.is_alive():
                drafter.let_go.release()
                thread.join(0.01)


def test_a_step_whose_session_has_ended_while_it_waited_is_not_drafted_for() -> None:
    """Its slots may be another's by then, who waits as well."""
    scene = Scene()
    ended = session()
    gone = scene.ask(batch(1), ended)
    ended.close()
    heir = scene.ask(batch(1, 3))
    assert scene.finish() == [[0], [1]]
    assert (gone.done().is_void, gone.done().result) == (True, None)
    assert heir.tokens() == ids(1, 3)


def test_one_step_that_makes_the_drafter_fail_costs_the_others_nothing() -> None:
    scene = Scene()
    scene.drafter.poison = {2}
    for slot in (1, 2, 3):
        scene.ask(batch(slot))
    assert scene.finish() == [[0], [1, 2, 3], [1], [2], [3]]
    one, two, three = scene.waiting
    assert (one.tokens(), three.tokens()) == (ids(1), ids(3))
    assert two.done().result is None
    assert [len(asking.done().errors) for asking in scene.waiting] == [1, 1, 0]  # the joint call's error, then its own


def test_work_alone_waits_for_its_turn_and_nobody_drafts_meanwhile() -> None:
    scene = Scene()
    order: list[str] = []

    def alone() -> None:
        with scene.turns.alone():
            order.append(f"alone after {len(scene.drafter.batches)}")
            time.sleep(0.02)
            order.append(f"still after {len(scene.drafter.batches)}")

    thread = threading.Thread(target=alone)
    thread.start()
    queued(scene.turns, 1)
    asking = Asking(scene.turns, batch(4))
    queued(scene.turns, 2)
    scene.drafter.let_go.release(2)
    thread.join(PATIENCE_S)
    assert asking.tokens() == ids(4)
    assert order == ["alone after 1", "still after 1"]


def test_work_alone_that_fails_passes_the_drafter_on() -> None:
    turns = Turns(ArithmeticDrafter(WIDE))

    def fail() -> None:
        with turns.alone():
            raise ValueError("planted")

    with pytest.raises(ValueError, match="planted"):
        fail()
    assert turns.draft(session(), batch(1)).result is not None


def test_a_step_that_cannot_even_be_joined_passes_the_drafter_on() -> None:
    """A bug of ours; the thread that it is met on says so, and the others go on."""
    scene = Scene()
    raised: list[Exception] = []

    def ask() -> None:
        try:
            scene.turns.draft(session(), batch(1)._replace(rows=cast(memoryview, None)))
        except AttributeError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    queued(scene.turns, 1)
    other = Asking(scene.turns, batch(2))
    queued(scene.turns, 2)
    scene.drafter.let_go.release(3)
    thread.join(PATIENCE_S)
    assert len(raised) == 1
    assert other.tokens() == ids(2)
    assert repr(scene.turns) == "<Turns free, 0 wait>"


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_at_random_each_get_what_they_would_get_alone(seed: int) -> None:
    class Slow(ArithmeticDrafter):
        def draft(self, batch: DraftBatch) -> DraftResult:
            time.sleep(0.001)  # others come meanwhile
            return super().draft(batch)

    drafter = Slow(WIDE)
    turns = Turns(drafter)
    wrong: list[str] = []

    def run(slot: int) -> None:
        owner, rng = session(), random.Random(seed * 100 + slot)
        for _ in range(60):
            n_rows = rng.choice((1, 1, 1, 4, 300))
            turn = turns.draft(owner, batch(slot, n_rows, want_margins=rng.random() < 0.3))
            if turn.result is None or turn.result.tokens.tolist() != ids(slot, n_rows):
                wrong.append(f"slot {slot}: {turn.errors}")
            if rng.random() < 0.5:
                time.sleep(rng.random() / 2000)

    threads = [threading.Thread(target=run, args=(slot,)) for slot in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert drafter.calls < 8 * 60  # some were joined


def numbers(kind: str, values: Sequence[float]) -> memoryview:
    packed = struct.pack(f"<{len(values)}{kind}", *values)
    return cast(memoryview, memoryview(packed).cast(kind))  # type: ignore[call-overload]


def test_a_part_of_a_joint_result_is_the_steps_own() -> None:
    asked: list[tuple[list[int], list[int]]] = []

    def judge(entries: Sequence[int], tokens: memoryview) -> Judged:
        asked.append((list(entries), tokens.tolist()))
        return Judged(tokens, tokens, tokens, tokens)

    drawn = Drawn(numbers("i", [1, 0, 1]), numbers("i", range(12)), numbers("f", range(12)))
    values = numbers("i", range(6)), numbers("f", range(6)), numbers("f", range(10, 16))
    result = DraftResult([True, False, True], *values, judge, drawn)
    part = part_of(result, 1, 2, num_drafts=2, support=2)
    assert part.ok == [False, True]
    assert part.tokens.tolist() == [2, 3, 4, 5]
    assert part.confidences.tolist() == [2, 3, 4, 5]
    assert part.margins is not None
    assert part.margins.tolist() == [12, 13, 14, 15]
    assert part.drawn is not None
    assert [one.tolist() for one in part.drawn] == [[0, 1], [4, 5, 6, 7, 8, 9, 10, 11], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert part.judge is not None
    part.judge([1], numbers("i", [7, 8]))
    assert asked == [([2], [7, 8])]


def test_a_joint_batch_has_all_rows_in_the_order_of_its_entries() -> None:
    whole = joined([batch(1, 2), batch(2, 1)])
    assert [entry.slot for entry in whole.entries] == [1, 2]
    assert bytes(whole.rows) == row(1, 0) + row(1, 1) + row(2, 0)
    assert not whole.want_margins
