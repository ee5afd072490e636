"""Several engines on one worker: apart from each other, drafted for together, freed when they die, let go when it stops."""

from __future__ import annotations

import contextlib
import logging
import re
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.drafters import INFO, ArithmeticDrafter, expected
from tests.fakes.shape import shape_for
from tests.fakes.tiny_checkpoint import write_tiny
from tests.transport.ucx import needs_ucx
from tests.worker.peer import DRAFT, HELLO, NEW, Peer, config, entry, ids, serving, soon, until

from farspark.errors import ConfigError, TransportError
from farspark.transport import connect
from farspark.wire import codec
from farspark.wire.layout import FrameStatus, Operation, RequestStatus, StepFlag
from farspark.wire.messages import Entry
from farspark.worker.batch import DraftBatch, Drafter, DraftResult
from farspark.worker.drafter import open_drafter
from farspark.worker.server import Server

N = INFO.num_drafts
pytestmark = pytest.mark.usefixtures("one_thread")


class Gate:
    """A drafter whose calls wait until they are let go, and are kept in mind."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.batches: list[DraftBatch] = []
        self.is_open = threading.Event()
        self.is_open.set()

    @property
    def info(self) -> Any:
        return self.inner.info

    def warm_up(self, progress: Any) -> None:
        self.inner.warm_up(progress)

    def draft(self, batch: DraftBatch) -> DraftResult:
        self.batches.append(batch)
        assert self.is_open.wait(10)
        return self.inner.draft(batch)


def row(owner: int, position: int) -> bytes:
    return struct.pack("<IIII", owner, position, 3, 4)


def wanted(owner: int, start: int, end: int) -> list[int]:
    rows = {at: row(owner, at) for at in range(start, end)}
    return expected(rows, 5, end, num_drafts=N, vocab_size=INFO.vocab_size, n_out=N)[0]


@contextlib.contextmanager
def joined_after(server: Server, gate: Gate, blocker: Peer, waiting: int) -> Iterator[None]:
    """What is sent inside waits while the blocker's step is drafted for, and is then drafted for together."""
    gate.is_open.clear()
    calls = len(gate.batches)
    blocker.send_step(entry(0, 0, 1, DRAFT | NEW), rows=row(99, 0))
    until(lambda: len(gate.batches) == calls + 1)
    yield
    until(lambda: f"{waiting} wait" in repr(server))
    gate.is_open.set()
    blocker.drafts()


def test_engines_with_equal_slots_and_requests_are_drafted_for_together_each_from_its_own_rows() -> None:
    gate = Gate(ArithmeticDrafter())
    with serving(gate) as server, Peer(server, 9) as blocker, contextlib.ExitStack() as stack:
        blocker.hello(replace(HELLO, engine="blocker", slots=1))
        engines = [stack.enter_context(Peer(server, 10 + number)) for number in range(3)]
        for engine in engines:
            engine.hello(replace(HELLO, slots=1))
        for at in range(12):
            with joined_after(server, gate, blocker, 3):
                for owner, engine in enumerate(engines):
                    engine.send_step(entry(0, at, 1, DRAFT if at else DRAFT | NEW), rows=row(owner, at))
            for owner, engine in enumerate(engines):
                assert engine.drafts().tokens.tolist() == wanted(owner, max(0, at - 7), at + 1)
            assert len(gate.batches[-1].entries) == 3
        until(lambda: server.snapshot()["counters"]["steps"] == 48)
        stats = server.snapshot()
    by_engine = {one["engine"]: one for one in stats["sessions"].values()}
    assert by_engine["engine-a"]["batched_with"] == 2
    assert by_engine["blocker"]["batched_with"] == 0
    assert stats["counters"]["steps_joined"] == 36


def test_a_session_with_margins_and_one_that_verifies_less_get_what_they_would_get_alone() -> None:
    gate = Gate(ArithmeticDrafter())
    with (
        serving(gate) as server,
        Peer(server, 9) as blocker,
        Peer(server, 1) as plain,
        Peer(server, 2) as few,
        Peer(server, 3) as shadow,
    ):
        for peer in (blocker, plain, few, shadow):
            peer.hello(replace(HELLO, slots=1))
        with joined_after(server, gate, blocker, 3):
            plain.send_step(entry(0, 0, 2, DRAFT | NEW), rows=row(1, 0) + row(1, 1))
            few.send_step(entry(0, 0, 1, DRAFT | NEW)._replace(n_out=2), rows=row(2, 0))
            shadow.send_step(entry(0, 0, 1, DRAFT | NEW), rows=row(3, 0), flags=StepFlag.MARGINS)
        assert plain.drafts().tokens.tolist() == wanted(1, 0, 2)
        assert few.drafts().tokens.tolist() == wanted(2, 0, 1)[:2] + [0] * (N - 2)
        reply = shadow.drafts()
        assert reply.tokens.tolist() == wanted(3, 0, 1)
        assert reply.margins is not None
        assert sorted(len(batch.entries) for batch in gate.batches) == [1, 1, 2]


def test_an_engine_whose_step_makes_the_drafter_fail_costs_the_others_nothing() -> None:
    class Poisoned(ArithmeticDrafter):
        def draft(self, batch: DraftBatch) -> DraftResult:
            if any(entry.anchor_token == 13 for entry in batch.entries):
                raise RuntimeError("poisoned")
            return super().draft(batch)

    gate = Gate(Poisoned())
    with (
        serving(gate) as server,
        Peer(server, 9) as blocker,
        Peer(server, 1) as good,
        Peer(server, 2) as bad,
        Peer(server, 3) as other,
    ):
        for peer in (blocker, good, bad, other):
            peer.hello(replace(HELLO, slots=1))
        with joined_after(server, gate, blocker, 3):
            good.send_step(entry(0, 0, 1, DRAFT | NEW), rows=row(1, 0))
            bad.send_step(entry(0, 0, 1, DRAFT | NEW)._replace(anchor_token=13), rows=row(2, 0))
            other.send_step(entry(0, 0, 1, DRAFT | NEW), rows=row(3, 0))
        assert good.drafts().tokens.tolist() == wanted(1, 0, 1)
        assert other.drafts().tokens.tolist() == wanted(3, 0, 1)
        assert bad.drafts().entries[0].status is RequestStatus.INTERNAL
        assert bad.step(entry(0, 1, 1), rows=row(2, 1)).entries[0].status is RequestStatus.NO_WINDOW
        assert good.step(entry(0, 1, 1), rows=row(1, 1)).tokens.tolist() == wanted(1, 0, 2)


def test_ABORT_RACE_an_engine_that_dies_while_its_step_waits_leaves_the_others_their_drafts() -> None:
    gate = Gate(ArithmeticDrafter())
    with serving(gate, listen="tcp://127.0.0.1:0") as server, Peer(server, 9) as blocker, Peer(server, 1) as good:
        for peer in (blocker, good):
            peer.hello(replace(HELLO, slots=1))
        for at in range(50):
            with Peer(server, 100 + at) as dying:
                dying.hello(replace(HELLO, slots=2))
                with joined_after(server, gate, blocker, 2):
                    twice = entry(0, 0, 1, DRAFT | NEW), entry(1, 0, 1, DRAFT | NEW)
                    dying.send_step(*twice, rows=row(7, 0) * 2)
                    good.send_step(entry(0, at, 1, DRAFT if at else DRAFT | NEW), rows=row(1, at))
                    dying.channel.close()
                assert good.drafts().tokens.tolist() == wanted(1, max(0, at - 7), at + 1)
            until(lambda: server.slots_in_use == 2)


def test_HALF_OPEN_a_session_superseded_while_its_step_waits_is_told_so_and_its_slots_serve_the_next() -> None:
    gate = Gate(ArithmeticDrafter())
    with (
        serving(gate) as server,
        Peer(server, 9) as blocker,
        Peer(server, 1) as old,
        Peer(server, 2) as new,
    ):
        blocker.hello(replace(HELLO, slots=1))
        old.hello(replace(HELLO, slots=3, instance=7))
        all_three = [entry(slot, 0, 1, DRAFT | NEW) for slot in range(3)]
        with joined_after(server, gate, blocker, 2):
            old.send_step(*all_three, rows=b"".join(row(1, 0) for _ in range(3)))
            until(lambda: "1 wait" in repr(server))
            new.hello(replace(HELLO, slots=3, instance=7))
            new.send_step(*all_three, rows=b"".join(row(2, 0) for _ in range(3)))
        assert new.drafts().tokens.tolist() == wanted(2, 0, 1) * 3
        with pytest.raises(TransportError):
            old.channel.recv(soon())
        assert [len(batch.entries) for batch in gate.batches] == [1, 3]
        until(lambda: server.snapshot()["connections"]["open"] == 2)
        assert "entries_internal" not in server.snapshot()["counters"]


def test_METRICS_a_step_whose_session_ends_while_it_is_drafted_for_is_counted_once() -> None:
    gate = Gate(ArithmeticDrafter())
    with serving(gate) as server, Peer(server, 1) as old, Peer(server, 2) as new:
        old.hello(replace(HELLO, instance=7))
        gate.is_open.clear()
        old.send_step(entry(0, 0, 1, DRAFT | NEW), rows=row(1, 0))
        until(lambda: len(gate.batches) == 1)
        new.hello(replace(HELLO, instance=7))
        assert new.step().entries == []
        gate.is_open.set()
        until(lambda: server.snapshot()["connections"]["open"] == 1)
        counters = server.snapshot()["counters"]
        assert (counters["sessions"], counters["steps"], counters["entries_ok"]) == (2, 2, 1)


def test_hello_ping_and_bye_do_not_wait_for_the_draft_of_another_engine() -> None:
    gate = Gate(ArithmeticDrafter())
    with serving(gate) as server, Peer(server, 9) as blocker, Peer(server, 1) as other:
        blocker.hello(replace(HELLO, slots=1))
        with joined_after(server, gate, blocker, 0):
            assert other.hello(replace(HELLO, slots=1))[0].status == FrameStatus.OK
            assert other.ask(Operation.PING)[0].status == FrameStatus.OK
            assert other.ask(Operation.BYE)[0].status == FrameStatus.OK


def test_SLOW_PEER_a_busy_engine_does_not_starve_a_modest_one() -> None:
    """Three engines ask as fast as they can; the fourth still gets a draft for one, at most, of each of theirs."""

    class Slow(ArithmeticDrafter):
        def draft(self, batch: DraftBatch) -> DraftResult:
            time.sleep(0.002)
            return super().draft(batch)

    over = threading.Event()
    failures: list[BaseException] = []

    def be_busy(server: Server, number: int) -> None:
        try:
            with Peer(server, 50 + number) as peer:
                peer.hello(replace(HELLO, engine=f"busy-{number}", slots=1))
                at = 0
                while not over.is_set():
                    reply = peer.step(entry(0, at, 1, DRAFT if at else DRAFT | NEW), rows=row(number, at))
                    assert reply.tokens.tolist() == wanted(number, max(0, at - 7), at + 1)
                    at += 1
        except BaseException as error:
            failures.append(error)

    with serving(Slow()) as server, Peer(server, 1) as modest:
        modest.hello(replace(HELLO, engine="modest", slots=1))
        threads = [threading.Thread(target=be_busy, args=(server, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: server.snapshot()["counters"].get("steps", 0) > 20)
        others = 0
        for at in range(30):
            before = server.snapshot()["counters"]["steps"]
            modest.step(entry(0, at, 1, DRAFT if at else DRAFT | NEW), rows=row(9, at))
            others += server.snapshot()["counters"]["steps"] - before
        over.set()
        for thread in threads:
            thread.join(10)
    assert failures == []
    # What is in progress, what is joined, and what is counted around it; without a bound they run away.
    assert others / 30 < 12


# Numbers: the real drafter.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("drafter"))


NAN = b"\xff\x7f"


def bf16_rows(count: int, seed: int, width: int) -> bytes:
    values = torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return values.view(torch.int16).numpy().astype(np.int16).tobytes()


def test_with_the_real_drafter_joint_drafts_equal_those_alone_and_nan_of_one_engine_stays_its_own(
    checkpoint: Path,
) -> None:
    """Ids are equal, and confidences to float32's rounding in sums of another shape."""
    alone = open_drafter(checkpoint, dtype="float32", slots=4, context=16)
    gate = Gate(open_drafter(checkpoint, dtype="float32", slots=4, context=16))
    info = alone.info
    width = info.row_bytes // 2
    hello = shape_for(info, ring=16, slots=1).hello(
        engine="real", identity=info.identity, markov_identity=info.markov_identity, want_margin=False
    )
    lengths = (3, 1, 7)
    with serving(gate) as server, contextlib.ExitStack() as stack:
        blocker, *engines = [stack.enter_context(Peer(server, 10 + number)) for number in range(4)]
        for peer in (blocker, *engines):
            assert peer.hello(hello)[0].status == FrameStatus.OK
        ends = [0, 0]
        for at in range(8):
            gate.is_open.clear()
            calls = len(gate.batches)
            blocker.send_step(entry(0, 0, 1, DRAFT | NEW, generation=at + 1), rows=bf16_rows(1, 77, width))
            until(lambda calls=calls: len(gate.batches) == calls + 1)  # type: ignore[misc]
            sent = []
            for owner, engine in enumerate(engines):
                count = lengths[(owner + at) % 3]
                if owner < 2:
                    first, ends[owner] = ends[owner], ends[owner] + count
                    one = Entry(0, 1, first, count, 5, ends[owner], DRAFT if at else DRAFT | NEW)
                    rows = bf16_rows(count, 1000 * owner + at, width)
                else:
                    one = Entry(0, at + 1, 0, count, 5, count, DRAFT | NEW)
                    rows = NAN * (count * width)
                sent.append(rows)
                engine.send_step(one, rows=rows)
                until(lambda waiting=owner + 1: f"{waiting} wait" in repr(server))  # type: ignore[misc]
            gate.is_open.set()
            blocker.drafts()
            replies = [engine.drafts() for engine in engines]
            assert len(gate.batches[-1].entries) == 3
            for owner in (0, 1):
                asked = gate.batches[-1].entries[owner]._replace(slot=owner)
                result = alone.draft(DraftBatch([asked], memoryview(sent[owner])))
                assert replies[owner].tokens.tolist() == result.tokens.tolist()
                assert replies[owner].confidences.tolist() == pytest.approx(result.confidences.tolist(), abs=1e-5)
            assert replies[2].entries[0].status is RequestStatus.INTERNAL


# The lease.


def test_HALF_OPEN_a_session_that_is_silent_for_its_lease_is_ended_and_its_slots_serve_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    everything = [entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)]
    with serving(lease_s=0.4) as server, Peer(server, 1) as silent, Peer(server, 2) as alive, Peer(server, 3) as probe:
        _, payload = silent.hello(replace(HELLO, engine="silent"))
        assert codec.decode_welcome(payload).lease_s == 0.4
        silent.step(*everything)
        alive.hello(replace(HELLO, engine="alive"))
        started = time.monotonic()
        while server.slots_in_use:
            # PING alone renews a lease.
            assert alive.ask(Operation.PING)[0].status == FrameStatus.OK
            assert time.monotonic() - started < 5
            time.sleep(0.02)
        assert time.monotonic() - started > 0.3
        with pytest.raises(TransportError):
            silent.channel.recv(soon())
        assert {one.status for one in alive.step(*everything).entries} == {RequestStatus.OK}
        # A connection without a session has no lease.
        assert probe.ask(Operation.PING)[0].status == FrameStatus.OK
    (said,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert re.search(
        r"session 0{15}1 of engine 'silent', 1 rounds, 20 drafts, 4 slots freed: silent for 0\.\d s, its lease", said
    )


def test_a_step_that_waits_or_is_drafted_for_does_not_run_out() -> None:
    gate = Gate(ArithmeticDrafter())
    with serving(gate, lease_s=0.1) as server, Peer(server, 9) as blocker, Peer(server, 1) as waiting:
        for peer in (blocker, waiting):
            peer.hello(replace(HELLO, slots=1))
        with joined_after(server, gate, blocker, 1):
            waiting.send_step(entry(0, 0, 1, DRAFT | NEW), rows=row(1, 0))
            time.sleep(0.4)
        assert waiting.drafts().tokens.tolist() == wanted(1, 0, 1)


def test_without_a_lease_silence_ends_nothing() -> None:
    with serving(lease_s=0) as server, Peer(server, 1) as silent:
        _, payload = silent.hello()
        assert codec.decode_welcome(payload).lease_s == 0
        server._end_silent_sessions()
        assert silent.ask(Operation.PING)[0].status == FrameStatus.OK
        assert server.sessions == 1


@pytest.mark.parametrize("lease_s", [-1.0, 0.05, 6554.0, float("nan"), float("inf")])
def test_HALF_OPEN_a_lease_that_is_none_is_refused_at_start(lease_s: float) -> None:
    with pytest.raises(ConfigError, match=r"--lease-s .*: expected seconds, 0\.1 to 6553"):
        config(lease_s=lease_s)


# Draining.


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", pytest.param("o1tcp://127.0.0.1:0", marks=needs_ucx)])
def test_draining_tells_everybody_serves_on_and_ends_once_they_are_gone(listen: str) -> None:
    with (
        serving(listen=listen) as server,
        Peer(server, 1) as engine,
        Peer(server, 2) as late,
        Peer(server, 3) as probe,
    ):
        engine.hello(replace(HELLO, slots=1))
        late.ask(Operation.PING)
        assert not engine.ask(Operation.PING)[0].is_draining
        ended: list[bool] = []
        draining = threading.Thread(target=lambda: ended.append(server.drain()))
        draining.start()
        until(lambda: bool(server.snapshot()["draining"]))
        # Nobody is in a session there.
        with pytest.raises(TransportError):
            probe.channel.recv(soon())
        with pytest.raises(TransportError):
            connect(server.endpoint, soon())
        for at in range(20):
            header, payload = engine.raw_step(entry(0, at, 1, DRAFT if at else DRAFT | NEW))
            assert (header.status, header.is_draining) == (FrameStatus.OK, True)
            assert codec.decode_step_reply(payload).tokens.tolist() == ids(0, max(0, at - 7), at + 1)
        header, payload = engine.hello()
        assert (header.status, header.is_draining) == (FrameStatus.BUSY, True)
        assert "about to stop" in codec.decode_refusal(Operation.HELLO, payload)
        assert draining.is_alive()
        assert engine.ask(Operation.BYE)[0].is_draining
        draining.join(5)
        assert ended == [True]


def test_draining_closes_an_engine_that_is_idle_and_gives_up_on_one_that_stays() -> None:
    with serving(drain_s=2.0) as server, Peer(server, 1) as idle, Peer(server, 2) as stays:
        for peer in (idle, stays):
            peer.hello(replace(HELLO, slots=1))
        over = threading.Event()

        def go_on() -> None:
            at = 0
            with contextlib.suppress(TransportError):
                while not over.is_set():
                    stays.step(entry(0, at, 1, DRAFT if at else DRAFT | NEW))
                    at += 1
                    time.sleep(0.05)

        thread = threading.Thread(target=go_on)
        thread.start()
        started = time.monotonic()
        gone = threading.Thread(target=lambda: idle_ends(idle, started))
        gone.start()
        assert server.drain() is False
        assert 1.9 < time.monotonic() - started < 4
        gone.join(5)
        over.set()
        thread.join(5)


def idle_ends(idle: Peer, started: float) -> None:
    with pytest.raises(TransportError):
        idle.channel.recv(soon())
    assert 0.5 < time.monotonic() - started < 1.9


def test_a_drain_without_anybody_is_over_at_once() -> None:
    with serving() as server:
        started = time.monotonic()
        assert server.drain() is True
        assert time.monotonic() - started < 1
