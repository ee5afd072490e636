from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.transport.contract import LIMIT, ChannelContract, Elsewhere, send_on, soon
from tests.transport.test_tcp import has_ipv6
from tests.transport.ucx import is_older_than, needs_ucx

from farspark.errors import ConfigError, TransportError
from farspark.native.round_calls import load_round_calls
from farspark.native.ucx import load_ucx
from farspark.transport import Channel, connect, exchange, listen, ucx
from farspark.transport.ucx import _SMALL_BYTES, UcxChannel, _Held

pytestmark = needs_ucx
load_round_calls()


class TestUcx(ChannelContract):
    def address(self) -> str:
        return "ucx://127.0.0.1:0"


class TestUcxThroughCtypes(ChannelContract):
    """As where the quick calls are not to be had."""

    @pytest.fixture(autouse=True)
    def without_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ucx, "ready_round_calls", lambda: None)

    def address(self) -> str:
        return "ucx://127.0.0.1:0"


class TestUcxPinnedToTcpThatSpins(ChannelContract):
    def address(self) -> str:
        return "o1tcp://127.0.0.1:0?spin_us=100"


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
@pytest.mark.skipif(is_older_than(1, 14), reason="the TCP of UCX before 1.14 damages memory over IPv6")
class TestUcxOverIpv6(ChannelContract):
    def address(self) -> str:
        return "ucx://[::1]:0"


@contextmanager
def ends(address: str = "ucx://127.0.0.1:0") -> Iterator[tuple[UcxChannel, UcxChannel]]:
    listener = listen(address, max_frame_bytes=LIMIT)
    ours = connect(listener.endpoint, soon(), max_frame_bytes=LIMIT)
    theirs = listener.accept(soon())
    assert isinstance(ours, UcxChannel)
    assert isinstance(theirs, UcxChannel)
    try:
        yield ours, theirs
    finally:
        for one in (ours, theirs, listener):
            one.close()


@pytest.mark.skipif(not is_older_than(1, 14), reason="this UCX can")
def test_ipv6_over_a_tcp_that_would_damage_memory_is_refused_ADDR() -> None:
    with pytest.raises(ConfigError, match=r"damages memory over IPv6; use UCX 1\.14 or later"):
        listen("ucx://[::1]:0", max_frame_bytes=LIMIT)
    with pytest.raises(ConfigError, match=r"tcp://\[::1\]:1, or o1rdma://"):
        connect("o1tcp://[::1]:1", soon())


def test_the_lane_in_use_is_read_from_the_endpoint_UCX_LANE() -> None:
    with ends("o1tcp://127.0.0.1:0") as (ours, theirs):
        ours_port, theirs_port = (one.lane.split(" -> ")[0].rpartition(":")[2] for one in (ours, theirs))
        assert ours.lane == f"ucx tcp/lo 127.0.0.1:{ours_port} -> 127.0.0.1:{theirs_port}"
        assert theirs.lane == f"ucx tcp/lo 127.0.0.1:{theirs_port} -> 127.0.0.1:{ours_port}"


def test_what_a_listener_offers_is_told_UCX_LANE() -> None:
    with listen("o1tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        offered = listener.lanes.split()
        assert offered[0] == "ucx"
        assert "tcp/lo" in offered[1:]
        assert all(lane.startswith("tcp/") for lane in offered[1:])


@pytest.mark.skipif(Path("/sys/class/infiniband").is_dir(), reason="this machine has RDMA devices")
def test_a_pinned_lane_that_is_not_to_be_had_names_what_is_missing_UCX_LANE() -> None:
    wanted = r"RDMA \(rc\) is not to be had with UCX .*no RDMA device"
    with pytest.raises(ConfigError, match=wanted):
        connect("o1rdma://127.0.0.1:1", soon())
    with pytest.raises(ConfigError, match=wanted):
        listen("o1rdma://127.0.0.1:0", max_frame_bytes=1)


def test_a_directory_without_ucx_is_named(tmp_path: Path) -> None:
    endpoint = f"ucx://127.0.0.1:1?ucx_dir={tmp_path}"
    ask = f"from farspark.transport import listen; listen({endpoint!r}, max_frame_bytes=1)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert f"ConfigError: endpoint {endpoint}: no UCX in {tmp_path}" in done.stderr


def test_a_second_ucx_in_one_process_is_refused(tmp_path: Path) -> None:
    library = load_ucx()
    (tmp_path / "libucp.so.0").write_bytes(library.path.read_bytes())
    with pytest.raises(ConfigError, match=rf"{library.version} .*is loaded in this process already"):
        connect(f"ucx://127.0.0.1:1?ucx_dir={tmp_path}", soon())
    # The directory of the one that is loaded is no contradiction.
    with pytest.raises(TransportError, match="refused"):
        connect(f"ucx://127.0.0.1:{free_port()}?ucx_dir={library.path.parent}", soon())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_nobody_listening_and_a_foreign_bind_are_said_ADDR() -> None:
    port = free_port()
    with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{port}: connection refused: nothing listens there"):
        connect(f"ucx://127.0.0.1:{port}", soon())
    with pytest.raises(ConfigError, match=r"cannot bind to 192\.0\.2\.99.*address of this machine"):
        connect(f"ucx://127.0.0.1:{port}?bind=192.0.2.99", soon())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.99:0: not an address of this machine"):
        listen("ucx://192.0.2.99:0", max_frame_bytes=LIMIT)
    with pytest.raises(ConfigError, match="bind= is for connecting"):
        listen("ucx://127.0.0.1:0?bind=127.0.0.1", max_frame_bytes=LIMIT)
    with pytest.raises(ConfigError, match="port 0 is for listening"):
        connect("ucx://127.0.0.1:0", soon())


def test_binding_to_an_own_address_ADDR() -> None:
    with listen("ucx://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        channel = connect(f"{listener.endpoint}?bind=127.0.0.1", soon())
        assert channel.lane.startswith("ucx tcp/lo 127.0.0.1:")
        channel.close()


def test_a_listener_that_is_closed_can_be_opened_again_at_once() -> None:
    with listen("ucx://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        endpoint = listener.endpoint
        ours = connect(endpoint, soon())
        theirs = listener.accept(soon())
    with listen(endpoint, max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        again = connect(endpoint, soon())
        for channel in (again, listener.accept(soon()), ours, theirs):
            channel.close()


def test_many_clients_on_one_listener_each_get_their_own_answers() -> None:
    with listen("ucx://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]

        def serve(channel: Channel) -> None:
            for _ in range(20):
                channel.send([channel.recv(soon(20))], soon(20))
            channel.close()

        def ask(number: int) -> None:
            channel = connect(listener.endpoint, soon(20), max_frame_bytes=LIMIT)
            for round_ in range(20):
                frame = b"%d:%d" % (number, round_) * 1000
                assert bytes(exchange(channel, [frame], soon(20))) == frame
            channel.close()

        asking = [Elsewhere(functools.partial(ask, number)) for number in range(6)]
        serving = [Elsewhere(functools.partial(serve, listener.accept(soon(20)))) for _ in asking]
        for one in asking + serving:
            one.result()


def test_a_client_that_never_finishes_its_greeting_keeps_nobody_waiting_SLOW_PEER() -> None:
    with listen("ucx://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        host, port = "127.0.0.1", int(listener.endpoint.rpartition(":")[2])
        mute = [socket.create_connection((host, port)) for _ in range(3)]
        began = time.monotonic()
        ours = connect(listener.endpoint, soon())
        theirs = listener.accept(soon())
        assert time.monotonic() - began < 2
        for one in (*mute, ours, theirs):
            one.close()


def test_the_memory_of_a_send_cannot_be_freed_or_resized_while_ucx_has_it_SEND_GC() -> None:
    class Rows(bytearray):
        pass

    rows = Rows(b"rows" * 100)
    seen = weakref.ref(rows)
    held = _Held([b"head", rows, memoryview(rows)[4:8]])
    assert [piece.bytes for piece in held.pieces] == [4, 400, 4]
    assert held.pieces[2].data == held.pieces[1].data + 4
    with pytest.raises(BufferError):
        rows.append(0)
    place = held.pieces[1].data
    del rows
    gc.collect()
    assert seen() is not None
    assert ctypes.string_at(place, 400) == b"rows" * 100
    held.release()
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("is_quick", [True, False])
def test_a_late_send_is_given_up_its_memory_free_and_a_new_connection_works_SEND_GC(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_quick:
        monkeypatch.setattr(ucx, "ready_round_calls", lambda: None)

    class Rows(bytearray):
        pass

    listener = listen("ucx://127.0.0.1:0", max_frame_bytes=LIMIT)
    ours = connect(listener.endpoint, soon(), max_frame_bytes=LIMIT)
    theirs = listener.accept(soon())
    rows = Rows(8 * LIMIT)  # more than sockets hold
    seen = weakref.ref(rows)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="closed, because a part of the frame may be sent"):
        ours.send([rows], soon(0.1))
    assert time.monotonic() - began < 1
    assert ours.is_closed
    del rows
    gc.collect()
    assert seen() is None
    with pytest.raises(TransportError, match="closed"):
        ours.send([b"x"], soon())
    theirs.close()
    again = connect(listener.endpoint, soon(), max_frame_bytes=LIMIT)
    other = listener.accept(soon())
    again.send([b"again"], soon())
    assert bytes(other.recv(soon())) == b"again"
    for one in (again, other, listener):
        one.close()


def test_a_frame_whose_pieces_are_no_buffers_sends_nothing() -> None:
    with ends() as (ours, theirs):
        with pytest.raises(TypeError):
            ours.send([b"head", "text"], soon())  # type: ignore[list-item]
        with pytest.raises(BufferError):
            ours.send([memoryview(b"abcdef")[::2]], soon())
        ours.send([b"fine"], soon())
        assert bytes(theirs.recv(soon())) == b"fine"


@pytest.mark.parametrize("is_quick", [True, False])
def test_the_memory_of_a_large_frame_is_used_again_once_it_is_let_go_and_not_before(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_quick:
        monkeypatch.setattr(ucx, "ready_round_calls", lambda: None)
    with ends() as (ours, theirs):

        def carry(byte: bytes, length: int) -> memoryview:
            sending = Elsewhere(lambda: ours.send([byte * length], soon()))
            frame = theirs.recv(soon())
            sending.result()
            return frame

        first, second = carry(b"1", 100_000), carry(b"2", 100_000)
        assert bytes(first) == b"1" * 100_000
        assert bytes(second) == b"2" * 100_000
        held = second.obj
        del first, second
        third = carry(b"3", 99_000)
        assert third.obj is held
        assert bytes(third) == b"3" * 99_000
        # A part of it is a look, too.
        part = third[:1]
        del third
        assert carry(b"4", 99_000).obj is not held
        assert bytes(part) == b"3"
        del part, held
        # Too large to be kept.
        assert carry(b"5", 5 << 20).obj is not carry(b"6", 5 << 20).obj
        assert len(theirs._memory) < 5 << 20


@pytest.mark.parametrize("is_quick", [True, False])
def test_every_small_frame_has_memory_of_its_own_that_can_be_written(
    is_quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_quick:
        monkeypatch.setattr(ucx, "ready_round_calls", lambda: None)
    with ends() as (ours, theirs):
        sizes = (0, 1, 64, _SMALL_BYTES, _SMALL_BYTES + 1)
        for size in sizes:
            ours.send([b"a" * size], soon())
        frames = [theirs.recv(soon()) for _ in sizes]
        for frame in frames[1:]:
            frame[0] = ord("b")
        assert [bytes(frame) for frame in frames] == [b"", *(b"b" + b"a" * (size - 1) for size in sizes[1:])]


def test_an_idle_channel_costs_no_processor_time() -> None:
    with ends() as (ours, _):
        waiting = Elsewhere(lambda: ours.recv(soon(1.0)))
        before = time.process_time()
        time.sleep(0.8)
        assert time.process_time() - before < 0.2
        with pytest.raises(TimeoutError):
            waiting.result()


# What passes through each of the methods that wait, until it fails.
WAITS: dict[str, Callable[[UcxChannel], object]] = {
    "send": lambda channel: send_on(channel, bytes(LIMIT), soon()),
    "recv": lambda channel: channel.recv(soon()),
    "exchange": lambda channel: channel.exchange([b"hello"], soon()),
    "recv_head": lambda channel: channel.recv_head(1, soon()),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_channel_that_is_closed_is_not_touched_any_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ends() as (ours, _):
        ours.send([b"used before"], soon())
        ours.close()
        for call in ("_send", "_receive", "_exchange"):
            monkeypatch.setattr(ours, call, lambda *_: pytest.fail("used after it was closed"))
        with pytest.raises(TransportError, match=": closed"):
            WAITS[name](ours)


@pytest.mark.parametrize("name", WAITS)
def test_whoever_is_inside_a_channel_lets_go_of_it_when_it_is_closed(name: str) -> None:
    with ends() as (ours, _):
        waiting = Elsewhere(lambda: WAITS[name](ours))
        time.sleep(0.1)
        ours.close()
        with pytest.raises(TransportError, match=": closed"):
            waiting.result()
        assert ours._is_retired


def test_closing_does_not_wait_for_a_peer_that_never_looks() -> None:
    with ends() as (ours, _):
        began = time.monotonic()
        ours.close()
        assert time.monotonic() - began < 0.2
        assert any(thread.name == "farspark-ucx-close" for thread in threading.enumerate())


# A peer that says its endpoint, accepts, and then does nothing at all.
SILENT = """
import sys, time
from farspark.clock import Deadline
from farspark.transport import listen
listener = listen("o1tcp://127.0.0.1:0", max_frame_bytes=1 << 24)
print(listener.endpoint, flush=True)
channel = listener.accept(Deadline.after(30))
print("accepted", flush=True)
time.sleep(60)
"""


@contextmanager
def silent_peer() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and where it listens."""
    process = subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


FULL = """
import os, resource, threading
from farspark.clock import Deadline
from farspark.transport import listen
listener = listen("ucx://127.0.0.1:0", max_frame_bytes=1 << 20)
threading.Thread(target=lambda: [listener.accept(Deadline.never()) for _ in range(9)], daemon=True).start()
print(listener.endpoint, flush=True)
while limit := input():
    open_now = len(os.listdir("/proc/self/fd")) - 1
    # Enough for the connection itself, not for what it takes to serve it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + int(limit), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print(open_now, flush=True)
"""


def test_a_peer_that_cannot_serve_another_connection_refuses_it_and_keeps_nothing_of_it() -> None:
    command = [sys.executable, "-c", FULL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        try:
            endpoint = peer.stdout.readline().strip()
            peer.stdin.write("4\n")
            before = int(peer.stdout.readline())
            for _ in range(3):
                with pytest.raises(TransportError, match="refused"):
                    connect(endpoint, soon(), max_frame_bytes=LIMIT)
            deadline, open_now = soon(), -1
            while open_now != before and not deadline.has_passed():
                peer.stdin.write("1000\n")
                open_now = int(peer.stdout.readline())
            assert open_now == before
            connect(endpoint, soon(), max_frame_bytes=LIMIT).close()
        finally:
            peer.kill()


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_or_dies_never_outlasts_the_deadline_HALF_OPEN(sent: signal.Signals) -> None:
    with silent_peer() as (process, endpoint):
        channel = connect(endpoint, soon(20), max_frame_bytes=LIMIT)
        assert process.stdout is not None
        assert process.stdout.readline() == "accepted\n"
        os.kill(process.pid, sent)
        began = time.monotonic()
        with pytest.raises((TimeoutError, TransportError)):
            exchange(channel, [b"hello"], soon(0.2))
        assert time.monotonic() - began < 1
        with pytest.raises((TimeoutError, TransportError)):
            send_on(channel, bytes(LIMIT), soon(0.2))
        assert time.monotonic() - began < 2
        assert channel.is_closed
        channel.close()


def test_a_peer_that_is_killed_is_noticed_long_before_the_deadline_HALF_OPEN() -> None:
    with silent_peer() as (process, endpoint):
        channel = connect(endpoint, soon(20), max_frame_bytes=LIMIT)
        process.kill()
        began = time.monotonic()
        with pytest.raises(TransportError):
            channel.recv(soon(30))
        assert time.monotonic() - began < 5


def test_a_listener_that_is_stopped_bounds_connect_HALF_OPEN() -> None:
    with silent_peer() as (process, endpoint):
        os.kill(process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="no answer in time"):
            connect(endpoint, soon(0.3))
        assert time.monotonic() - began < 1.5
