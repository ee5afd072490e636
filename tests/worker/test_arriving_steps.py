"""STEPs that arrive in parts, as the network brings them: judged on their heads, drafted for once they are whole."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from tests.fakes.clock import FakeClock
from tests.fakes.drafters import INFO, ArithmeticDrafter, info
from tests.fakes.served import served
from tests.worker.peer import DRAFT, HELLO, NEW, N, config, entry, ids, make_rows, serving, until

from farspark.errors import TransportError
from farspark.native.round_calls import load_round_calls
from farspark.wire import codec
from farspark.wire.layout import FrameStatus, Operation, RequestStatus
from farspark.wire.messages import Entry, Header, Hello, StepReply
from farspark.worker.server import IDLE_AFTER_S, Server
from farspark.worker.session import Plan, Session


class SlowPeer(AbstractContextManager["SlowPeer"]):
    """An engine whose frames arrive as this test sends them, over a bare TCP socket."""

    def __init__(self, server: Server, session: int, hello: Hello = HELLO) -> None:
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(5)
        self.session = session
        self.send(codec.encode_frame(Header(Operation.HELLO, session, 1, 0), codec.encode_hello(hello)))
        assert self.reply()[0].status == FrameStatus.OK

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frame: bytes) -> None:
        self.socket.sendall(struct.pack("<I", len(frame)) + frame)

    def frame(self, *entries: Entry) -> tuple[bytes, bytes]:
        """A STEP with its length in front: all that stands before its rows, and its rows."""
        rows = make_rows(entries)
        head = codec.encode_step_head(self.session, 2, 77, entries, len(rows))
        return struct.pack("<I", len(head) + len(rows)) + head, rows

    def exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            some = self.socket.recv(size - len(got))
            if not some:
                raise TransportError("closed by the worker")
            got += some
        return got

    def reply(self) -> tuple[Header, memoryview]:
        (length,) = struct.unpack("<I", self.exactly(4))
        return codec.decode_frame(memoryview(self.exactly(length)))

    def drafts(self) -> StepReply:
        header, payload = self.reply()
        assert header.status == FrameStatus.OK, codec.decode_message(payload)
        return codec.decode_step_reply(payload)


def test_a_step_that_arrives_in_two_parts_drafts_as_a_whole_one_FRAMING() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 1) as peer:
        at = cut = 0
        while True:
            # The refused entry between the others: their rows must be joined, once they are there.
            entries = entry(0, at, 2, DRAFT if at else DRAFT | NEW), entry(3, 9, 1), entry(1, 0, 1, DRAFT | NEW)
            head, rows = peer.frame(*entries)
            framed = head + rows
            if cut > len(framed):
                break
            peer.socket.sendall(framed[:cut])
            time.sleep(0.002)
            peer.socket.sendall(framed[cut:])
            reply = peer.drafts()
            assert [one.status.name for one in reply.entries] == ["OK", "NO_WINDOW", "OK"]
            start = max(0, at + 2 - INFO.context)
            assert reply.tokens.tolist() == ids(0, start, at + 2) + [0] * N + ids(1, 0, 1), f"cut at {cut}"
            at, cut = at + 2, cut + 1
        until(lambda: server.snapshot()["counters"].get("steps") == cut)
        counters = server.snapshot()["counters"]
        assert (counters["entries_ok"], counters["rows"]) == (2 * cut, 4 * cut)


def test_a_step_is_judged_while_its_rows_are_on_their_way() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 1) as peer:
        head, rows = peer.frame(entry(0, 0, 1, DRAFT | NEW), entry(1, 0, 2, DRAFT | NEW))
        peer.socket.sendall(head + rows[:1])
        until(lambda: server.slots_in_use == 2)
        assert "steps" not in server.snapshot()["counters"]
        peer.socket.sendall(rows[1:])
        assert peer.drafts().tokens.tolist() == ids(0, 0, 1) + ids(1, 0, 2)


def test_draining_waits_for_a_step_that_is_on_its_way_from_an_engine_that_was_idle() -> None:
    clock = FakeClock()
    server = Server(ArithmeticDrafter(), config(listen="tcp://127.0.0.1:0", drain_s=5.0), clock=clock)
    with served(server), SlowPeer(server, 1) as peer:
        clock.advance(10 * IDLE_AFTER_S)
        head, rows = peer.frame(entry(0, 0, 1, DRAFT | NEW))
        peer.socket.sendall(head + rows[:1])
        until(lambda: server.slots_in_use == 1)
        draining = threading.Thread(target=server.drain)
        draining.start()
        time.sleep(0.2)  # several of its looks
        peer.socket.sendall(rows[1:])
        header, _ = peer.reply()
        assert (header.status, header.is_draining) == (FrameStatus.OK, True)
        peer.socket.close()
        draining.join(5)
        assert not draining.is_alive()


def test_a_connection_that_dies_with_a_step_half_sent_gives_its_slots_back_FRAMING() -> None:
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 2) as other:
        with SlowPeer(server, 1) as peer:
            head, rows = peer.frame(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)])
            peer.socket.sendall(head + rows[:-1])
            until(lambda: server.slots_in_use == INFO.slots)
        until(lambda: server.snapshot()["connections"]["open"] == 1)
        assert server.slots_in_use == 0
        other.socket.sendall(b"".join(other.frame(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)])))
        assert {one.status for one in other.drafts().entries} == {RequestStatus.OK}
        until(lambda: server.snapshot()["counters"].get("steps") == 1)


def test_a_step_is_received_whole_while_another_engine_drafts() -> None:
    wide = info(hidden_size=1 << 18)
    hello = replace(HELLO, hidden_size=wide.hidden_size, row_bytes=wide.row_bytes)
    drafter = ArithmeticDrafter(wide)
    drafter.pause = threading.Event()
    with (
        serving(drafter, listen="tcp://127.0.0.1:0") as server,
        SlowPeer(server, 1, hello) as slow,
        SlowPeer(server, 2, hello) as queued,
    ):
        # More than sockets hold: sending it ends only if the worker reads.
        rows = bytes(12 * wide.row_bytes)
        for peer in (slow, queued):
            asked = entry(0, 0, 12, DRAFT | NEW)
            peer.send(codec.encode_step_head(peer.session, 2, 1, [asked], len(rows)) + rows)
            assert drafter.entered.wait(5)
        until(lambda: server.slots_in_use == 2)  # the second one is judged meanwhile
        drafter.pause.set()
        assert slow.drafts().tokens.tolist() == queued.drafts().tokens.tolist()


def test_HALF_OPEN_a_step_half_sent_of_a_superseded_session_drafts_nothing() -> None:
    hello = replace(HELLO, instance=7)
    with serving(listen="tcp://127.0.0.1:0") as server, SlowPeer(server, 1, hello) as vanished:
        head, rows = vanished.frame(*[entry(slot, 0, 1, DRAFT | NEW) for slot in range(INFO.slots)])
        vanished.socket.sendall(head + rows[:-1])
        until(lambda: server.slots_in_use == INFO.slots)
        with SlowPeer(server, 2, hello) as again:
            assert server.slots_in_use == 0
            again.socket.sendall(b"".join(again.frame(entry(0, 0, 1, DRAFT | NEW))))
            assert again.drafts().tokens.tolist() == ids(0, 0, 1)
            with pytest.raises((TransportError, OSError)):
                vanished.reply()
            assert server.slots_in_use == 1


@pytest.mark.parametrize("judging", ["plan", "begin"])
def test_a_bug_while_a_step_is_judged_costs_that_session_only(
    judging: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if judging == "begin" and load_round_calls() is None:
        pytest.skip("no quick calls here")
    with (
        serving(listen="tcp://127.0.0.1:0") as server,
        SlowPeer(server, 1) as peer,
        SlowPeer(server, 2) as other,
    ):

        def fail(session: Session, *_: object) -> Plan:
            raise ZeroDivisionError("planted")

        head, rows = peer.frame(entry(0, 0, 1, DRAFT | NEW))
        with monkeypatch.context() as patched:
            patched.setattr(Session, judging, fail)
            peer.socket.sendall(head)
            until(lambda: "could not be judged" in caplog.text)
        peer.socket.sendall(rows)
        assert peer.reply()[0].status == FrameStatus.NO_SESSION
        other.socket.sendall(b"".join(other.frame(entry(0, 0, 1, DRAFT | NEW))))
        assert other.drafts().tokens.tolist() == ids(0, 0, 1)
