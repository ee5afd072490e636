"""What is counted where: by a session while it lasts, by the worker from then on, and all of it in every snapshot."""

from __future__ import annotations

import itertools
import logging
import threading
from typing import Any

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter
from tests.worker.peer import DRAFT, NEW, entry, make_rows, soon

from farspark.stats import Stats
from farspark.transport import connect, listen, parse_endpoint
from farspark.wire.auth import WorkerSide
from farspark.wire.layout import StepFlag
from farspark.wire.messages import Step
from farspark.worker.connection import Connection
from farspark.worker.session import Session, SlotPool
from farspark.worker.tally import Drafted, Tally

_names = itertools.count()


class Engine:
    """A connection with a session, whose steps are counted in `tally`."""

    def __init__(self, tally: Tally, number: int = 1) -> None:
        self.tally = tally
        self.drafter = ArithmeticDrafter()
        self.session = Session(INFO, SlotPool(INFO.slots), slots=INFO.slots, context=INFO.context, stats=Stats())
        endpoint = parse_endpoint(f"memory://tally-{next(_names)}")
        self.listener = listen(endpoint, max_frame_bytes=64)
        proof = WorkerSide(None, identity=INFO.identity, markov_identity=INFO.markov_identity)
        self.connection = Connection(connect(self.listener.endpoint, soon()), number, proof, engine=f"engine-{number}")
        self.connection.session, self.connection.session_id = self.session, number
        self.at = 0

    def step(self, companions: int = 0) -> Drafted:
        """Of two rows, the second one of which the target accepted; to be counted by who asked."""
        asked = entry(0, self.at, 2, DRAFT if self.at else DRAFT | NEW)._replace(k_window=4 if self.at else 0)
        self.at += 2
        plan = self.session.plan(Step(1, [asked], memoryview(make_rows((asked,))), StepFlag(0)))
        batch = self.session.batch(plan)
        assert batch is not None
        reply = self.session.complete(plan, self.drafter.draft(batch), 12)
        return Drafted([b"four", memoryview(bytes(8)).cast("i")], self.session, plan, reply, 3, companions)

    def end(self) -> None:
        self.session.close()
        self.tally.take_over(self.connection, self.session)

    def close(self) -> None:
        self.connection.channel.close()
        self.listener.close()


@pytest.fixture
def tally() -> Tally:
    return Tally(INFO.row_bytes)


def counters(tally: Tally, *engines: Engine) -> Any:
    return tally.snapshot([engine.connection for engine in engines], 0.0)["counters"]


def test_a_step_is_counted_for_its_engine_and_for_the_worker(tally: Tally) -> None:
    engine, other = Engine(tally, 1), Engine(tally, 2)
    tally.count_step(engine.step(), 100)
    tally.count_step(engine.step(companions=2), 50)
    said = tally.snapshot([engine.connection, other.connection], 0.0)
    assert said["counters"] == {
        "bytes_received": 150,
        "bytes_sent": 24,
        "companions": 2,
        "drafts": 10,
        "drafts_accepted": 1,
        "drafts_verified": 4,
        "entries_ok": 2,
        "rows": 4,
        "steps": 2,
        "steps_joined": 1,
    }
    assert list(said["sessions"]) == ["0" * 15 + "1", "0" * 15 + "2"]
    first, second = said["sessions"].values()
    assert (first["engine"], first["rounds"], first["rows"], first["drafts"]) == ("engine-1", 2, 4, 10)
    assert (first["batched_with"], first["acceptance"], first["worker_us_p50"], first["wait_us_p50"]) == (
        1,
        0.25,
        12,
        3,
    )
    assert (second["rounds"], second["acceptance"], second["worker_us_p50"], second["batched_with"]) == (0, None, 0, 0)
    assert said["acceptance"] == 0.25
    assert said["latency"]["step_us"]["count"] == said["latency"]["wait_us"]["count"] == 2
    engine.close()
    other.close()


@pytest.mark.parametrize(("now", "silent_s"), [(107.26, 7.3), (100.0, 0.0), (99.9, 0.0)])
def test_an_engine_is_silent_since_it_was_last_heard(tally: Tally, now: float, silent_s: float) -> None:
    engine = Engine(tally)
    engine.connection.heard_s = 100.0
    assert tally.snapshot([engine.connection], now)["sessions"]["0" * 15 + "1"]["silent_s"] == silent_s
    engine.close()


def test_what_a_session_has_counted_stays_with_the_worker(tally: Tally) -> None:
    engine = Engine(tally)
    tally.count_step(engine.step(), 100)
    late = engine.step()
    before = counters(tally, engine)
    engine.end()
    assert (engine.connection.session, engine.connection.session_id) == (None, 0)
    assert counters(tally, engine) == counters(tally) == before
    # Its reply went out as the session ended.
    tally.count_step(late, 50)
    assert counters(tally)["steps"] == 2
    assert counters(tally)["bytes_received"] == 150
    engine.close()


def test_no_snapshot_lacks_a_step_or_has_it_twice_while_its_session_ends(tally: Tally) -> None:
    seen: list[int] = []
    looking: list[threading.Thread] = []

    def look() -> None:
        looking.append(threading.Thread(target=lambda: seen.append(counters(tally, engine)["steps"])))
        looking[-1].start()
        looking[-1].join(0.1)  # where it is kept out, it goes on after us

    class Watched(Connection):
        def __setattr__(self, name: str, value: object) -> None:
            is_end = name == "session" and value is None and self is engine.connection
            if is_end:
                look()
            super().__setattr__(name, value)
            if is_end:
                look()

    engine = Engine(tally)
    tally.count_step(engine.step(), 100)
    plain = engine.connection
    engine.connection = Watched(plain.channel, 1, plain.proof)
    engine.connection.session, engine.connection.session_id = engine.session, 1
    engine.end()
    for one in looking:
        one.join(10)
    assert seen == [1, 1]
    engine.close()


def test_failures_are_counted_and_the_first_of_each_kind_is_logged(
    tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    for error in (ValueError("one"), ValueError("two"), KeyError("three")):
        tally.note_failure(error)
    assert counters(tally) == {"draft_failures": 3}
    assert [(one.levelno, one.getMessage()) for one in caplog.records] == [
        (logging.ERROR, "the drafter failed; further ValueError are only counted"),
        (logging.ERROR, "the drafter failed; further KeyError are only counted"),
    ]
    assert "one" in caplog.text
    assert "two" not in caplog.text


def test_a_failed_proof_is_no_counter_of_rounds(tally: Tally) -> None:
    tally.count_auth_failure()
    assert tally.auth_failures == 1
    assert counters(tally) == {}
