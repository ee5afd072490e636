"""Connections: many at once, slow ones, dying ones, too many; and how the worker stops."""

from __future__ import annotations

import logging
import struct
import threading
import time
from dataclasses import replace

import pytest
from tests.fakes.drafters import INFO, ArithmeticDrafter, expected
from tests.worker.peer import DRAFT, HELLO, NEW, N, Peer, entry, ids, row, serving, soon, until

from farspark.errors import TransportError
from farspark.transport import connect
from farspark.wire import codec
from farspark.wire.layout import FrameStatus, Operation, RequestStatus
from farspark.wire.messages import Header
from farspark.worker.server import Server


def test_a_frame_above_the_limit_closes_that_link_only_FRAMING() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, Peer(server) as bad, Peer(server) as good:
        good.hello()
        with pytest.raises(TransportError):
            bad.ask(Operation.PING, bytes(1024 * 1024))
        assert good.step(entry(0, 0, 1, DRAFT | NEW)).entries[0].status == RequestStatus.OK


def test_several_engines_and_probes_at_once_each_get_their_own_answers() -> None:
    failures: list[BaseException] = []

    def run(server: Server, number: int) -> None:
        try:
            with Peer(server, session=100 + number) as peer:
                peer.hello(replace(HELLO, engine=f"engine-{number}", slots=1))
                for at in range(30):
                    reply = peer.step(entry(0, at, 1, DRAFT | NEW if not at else DRAFT), rows=row(number, at))
                    rows = {past: row(number, past) for past in range(max(0, at - 7), at + 1)}
                    wanted = expected(rows, 5, at + 1, num_drafts=N, vocab_size=INFO.vocab_size, n_out=N)[0]
                    assert reply.tokens.tolist() == wanted
                    peer.ask(Operation.PING, b"x")
        except BaseException as error:
            failures.append(error)

    with serving() as server:
        threads = [threading.Thread(target=run, args=(server, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert failures == []
        until(lambda: server.slots_in_use == 0)


def test_a_client_that_never_reads_does_not_hold_up_the_others_SLOW_PEER() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, Peer(server) as deaf, Peer(server, session=5) as good:
        request = codec.encode_frame(Header(Operation.PING, 0, 1, 0), bytes(4096))
        sock = deaf.channel._socket  # type: ignore[attr-defined]
        sock.settimeout(0.05)

        def fill() -> None:
            # Straight to the socket's buffer: `send` would read the replies while it waits.
            while True:
                sock.sendall(struct.pack("<I", len(request)) + request)

        with pytest.raises(TimeoutError):
            fill()
        good.hello()
        started = time.monotonic()
        for at in range(20):
            good.step(entry(0, at, 1, DRAFT | NEW if not at else DRAFT))
        assert time.monotonic() - started < 2


def test_a_client_gone_in_mid_draft_frees_its_slots_ABORT_RACE() -> None:
    drafter = ArithmeticDrafter()
    with serving(drafter) as server:
        for _ in range(100):
            with Peer(server) as peer:
                peer.hello()
                peer.send_step(entry(0, 0, 1, DRAFT | NEW))
        until(lambda: server.snapshot()["connections"]["open"] == 0)
        assert server.slots_in_use == 0


def test_only_one_thread_at_a_time_is_inside_the_drafter_and_pings_pass_it() -> None:
    drafter = ArithmeticDrafter()
    drafter.pause = threading.Event()
    with serving(drafter) as server, Peer(server) as slow, Peer(server, session=5) as queued, Peer(server) as probe:
        slow.hello()
        queued.hello()
        for peer in (slow, queued):
            peer.send_step(entry(0, 0, 1, DRAFT | NEW))
            assert drafter.entered.wait(5)
        assert probe.ask(Operation.PING, b"x")[0].status == FrameStatus.OK
        assert probe.ask(Operation.STATS)[0].status == FrameStatus.OK
        with pytest.raises(TimeoutError):
            queued.channel.recv(soon(0.05))
        drafter.pause.set()
        for peer in (slow, queued):
            assert peer.drafts().tokens.tolist() == ids(0, 0, 1)


def test_stop_finishes_the_round_in_hand_and_closes_the_idle() -> None:
    drafter = ArithmeticDrafter()
    drafter.pause = threading.Event()
    with serving(drafter) as server, Peer(server) as busy, Peer(server) as idle:
        busy.hello()
        idle.ask(Operation.PING)
        busy.send_step(entry(0, 0, 1, DRAFT | NEW))
        assert drafter.entered.wait(5)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        with pytest.raises(TransportError):
            idle.channel.recv(soon())
        assert stopping.is_alive()
        drafter.pause.set()
        assert busy.drafts().tokens.tolist() == ids(0, 0, 1)
        with pytest.raises(TransportError):
            busy.channel.recv(soon())
        stopping.join(5)
        assert not stopping.is_alive()
        server.stop()
        with pytest.raises(TransportError):
            connect(server.endpoint, soon())
    assert server.slots_in_use == 0


def test_stop_does_not_wait_for_ever_for_a_draft_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    drafter = ArithmeticDrafter()
    drafter.pause = threading.Event()
    with serving(drafter, drain_s=0.05) as server, Peer(server) as peer:
        peer.hello()
        peer.send_step(entry(0, 0, 1, DRAFT | NEW))
        assert drafter.entered.wait(5)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2
        drafter.pause.set()
        until(lambda: server.snapshot()["connections"]["open"] == 0)
    assert "in the middle of a round" in caplog.text


def test_a_connection_beyond_the_limit_is_told_busy() -> None:
    with serving(max_connections=1) as server, Peer(server) as first:
        first.ask(Operation.PING)
        with Peer(server) as second:
            reply, payload = second.ask(Operation.PING)
            assert reply.status == FrameStatus.BUSY
            assert "--max-connections" in codec.decode_message(payload)
        first.channel.close()
        until(lambda: server.snapshot()["connections"]["open"] == 0)
        with Peer(server) as third:
            assert third.ask(Operation.PING)[0].status == FrameStatus.OK


def test_a_connection_for_which_the_system_has_no_thread_is_closed_and_the_others_are_served(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, Peer(server) as first:
        first.hello()
        # No address space holds a stack of this size, so every start fails, as it does at a limit of tasks.
        usual = threading.stack_size(1 << 48)
        try:
            with Peer(server) as second, pytest.raises(TransportError):
                second.channel.recv(soon())
        finally:
            threading.stack_size(usual)
        assert first.step(entry(0, 0, 1, DRAFT | NEW)).entries[0].status == RequestStatus.OK
        with Peer(server) as third:
            assert third.ask(Operation.PING)[0].status == FrameStatus.OK
        assert server.snapshot()["connections"]["open"] <= 2
    assert "can't start new thread" in caplog.text
    assert "pids.max" in caplog.text


def test_connections_and_sessions_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server, Peer(server) as peer:
        peer.hello()
        for at in range(20):
            peer.step(entry(0, at, 1, DRAFT | NEW if not at else DRAFT))
    assert len(caplog.records) == 3  # connected, session, gone
