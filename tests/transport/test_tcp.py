from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.transport.contract import LIMIT, ChannelContract, Elsewhere, recv_on, soon

from farspark.clock import Deadline
from farspark.errors import ConfigError, ProtocolError, TransportError
from farspark.native.round_calls import load_round_calls
from farspark.transport import Channel, Endpoint, Listener, Piece, connect, listen, tcp
from farspark.transport.tcp import TcpChannel


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


class TestTcp(ChannelContract):
    def address(self) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpInPlainPython(ChannelContract):
    """As where the quick calls are not to be had."""

    @pytest.fixture(autouse=True)
    def without_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tcp, "ready_round_calls", lambda: None)

    def address(self) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpInPlainPythonThatSpins(TestTcpInPlainPython):
    def address(self) -> str:
        return "tcp://127.0.0.1:0?spin_us=100"


class TestTcpThatSpins(ChannelContract):
    def address(self) -> str:
        return "tcp://127.0.0.1:0?spin_us=100"


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
class TestTcpOverIpv6(ChannelContract):
    def address(self) -> str:
        return "tcp://[::1]:0"


FORMS = {"plain": None, "quick": load_round_calls()}


def test_the_quick_calls_are_used_where_they_are_to_be_had() -> None:
    assert FORMS["quick"] is not None, "these tests need a C compiler and the headers of Python"
    with listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        for channel in (connect(listener.endpoint, soon()), listener.accept(soon())):
            assert isinstance(channel, TcpChannel)
            assert channel._calls is FORMS["quick"]
            channel.close()


def bare_pair(max_frame_bytes: int, form: str = "plain") -> tuple[socket.socket, TcpChannel]:
    """A bare socket, and the channel at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    bare.settimeout(5)
    return bare, TcpChannel(accepted, max_frame_bytes=max_frame_bytes, spin_us=0, calls=FORMS[form])


@pytest.fixture(params=FORMS)
def raw(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, TcpChannel]]:
    """As `bare_pair`, with frames of up to 1,000 bytes."""
    bare, channel = bare_pair(1000, request.param)
    with bare, channel:
        yield bare, channel


def test_a_frame_is_a_little_endian_length_and_the_bytes(raw: tuple[socket.socket, TcpChannel]) -> None:
    bare, channel = raw
    channel.send([b"ab", b"c"], soon())
    assert bare.recv(100) == b"\x03\x00\x00\x00abc"
    bare.sendall(b"\x02\x00\x00\x00xy")
    assert bytes(channel.recv(soon())) == b"xy"


def test_a_length_above_a_lowered_limit_is_refused_on_the_length_alone(raw: tuple[socket.socket, TcpChannel]) -> None:
    bare, channel = raw
    channel.max_frame_bytes = 100
    bare.sendall(b"\x64\x00\x00\x00" + bytes(100))
    assert len(channel.recv(soon())) == 100
    bare.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(ProtocolError, match="4294967295 bytes announced, at most 100"):
        channel.recv(soon())
    assert channel.is_closed


FRAMES = b"\x05\x00\x00\x00hello\x00\x00\x00\x00\x02\x00\x00\x00yo"


def received(channel: TcpChannel, deadline_s: float = 5) -> list[bytes]:
    return [bytes(channel.recv(soon(deadline_s))) for _ in range(3)]


def test_frames_that_come_one_byte_at_a_time_FRAMING(raw: tuple[socket.socket, TcpChannel]) -> None:
    bare, channel = raw
    bare.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def trickle() -> None:
        for byte in FRAMES:
            bare.sendall(bytes([byte]))
            time.sleep(0.001)

    sending = Elsewhere(trickle)
    assert received(channel) == [b"hello", b"", b"yo"]
    sending.result()


@pytest.mark.parametrize("at", range(len(FRAMES) + 1))
def test_frames_split_at_each_offset_survive_a_timeout_between_FRAMING(
    raw: tuple[socket.socket, TcpChannel], at: int
) -> None:
    bare, channel = raw
    bare.sendall(FRAMES[:at])
    got: list[bytes] = []
    with pytest.raises(TimeoutError):
        recv_on(channel, got, 0.005)
    bare.sendall(FRAMES[at:])
    while len(got) < 3:
        got.append(bytes(channel.recv(soon())))
    assert got == [b"hello", b"", b"yo"]


@pytest.mark.parametrize("at", range(len(FRAMES)))
def test_a_close_at_each_offset_gives_the_whole_frames_and_then_the_error_FRAMING(
    raw: tuple[socket.socket, TcpChannel], at: int
) -> None:
    bare, channel = raw
    bare.sendall(FRAMES[:at])
    bare.close()
    got: list[bytes] = []
    with pytest.raises(TransportError, match="closed by the peer") as caught:
        recv_on(channel, got)
    whole = [end for end in (9, 13, 19) if end <= at]
    assert got == [b"hello", b"", b"yo"][: len(whole)]
    rest = at - (whole[-1] if whole else 0)
    if not rest:
        assert "after" not in str(caught.value)
    elif rest < 4:
        assert f"after {rest} bytes of a frame's length" in str(caught.value)
    else:
        assert f"after {rest - 4} of " in str(caught.value)
    assert channel.is_closed


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_head_is_there_before_the_rest_and_the_rest_comes_behind_it_FRAMING(is_bounded: bool) -> None:
    deadline = soon() if is_bounded else Deadline.never()
    bare, channel = bare_pair(max_frame_bytes=200_000)
    body = bytes(range(250)) * 400
    framed = struct.pack("<I", len(body)) + body
    with bare, channel:
        # In one piece with the frame before it, in the memory that this one lies in.
        bare.sendall(struct.pack("<I", 3) + b"one" + framed[:7])
        first = channel.recv(deadline)
        taken: list[tuple[memoryview, int]] = []
        waiting = Elsewhere(lambda: taken.append(channel.recv_head(48, deadline)))
        time.sleep(0.02)
        assert not taken
        bare.sendall(framed[7:60])
        waiting.result()
        head, arrived = taken[0]
        assert (len(head), arrived) == (len(body), 56)
        assert bytes(head[:arrived]) == body[:56]
        assert bytes(first) == b"one"
        sending = Elsewhere(lambda: bare.sendall(framed[60:] + framed))
        whole = channel.recv(deadline)
        assert whole.obj is head.obj
        assert head == body
        del whole
        assert bytes(channel.recv(deadline)) == body
        assert head == body
        sending.result()


def test_a_head_of_a_frame_that_never_ends_is_a_timeout_and_then_a_transport_error_FRAMING() -> None:
    bare, channel = bare_pair(max_frame_bytes=1000)
    with channel:
        bare.sendall(struct.pack("<I", 900) + bytes(100))
        assert channel.recv_head(100, soon())[1] == 100
        with pytest.raises(TimeoutError):
            channel.recv(soon(0.01))
        assert channel.recv_head(100, soon(0))[1] == 100
        bare.close()
        with pytest.raises(TransportError, match="after 100 of 900 bytes of a frame"):
            channel.recv(soon())


@pytest.mark.parametrize("length", [1001, 2**31, 2**32 - 1])
def test_an_absurd_length_is_refused_on_the_length_alone_FRAMING(
    raw: tuple[socket.socket, TcpChannel], length: int
) -> None:
    bare, channel = raw
    bare.sendall(struct.pack("<I", length))
    with pytest.raises(ProtocolError, match=f"frame of {length} bytes announced, at most 1000"):
        channel.recv(soon())
    assert channel.is_closed
    assert bare.recv(1) == b""


def test_a_reset_is_a_transport_error(raw: tuple[socket.socket, TcpChannel]) -> None:
    bare, channel = raw
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bare.close()
    with pytest.raises(TransportError, match="reset"):
        channel.recv(soon())


class Counting(TcpChannel):
    """Counts how often it asked the socket, and how often it slept."""

    asked = slept = 0

    def _read_some(self, flags: int) -> bool:
        self.asked += 1
        return super()._read_some(flags)

    def _wait(self, interest: int, deadline: Deadline, what: str) -> int:
        self.slept += 1
        return super()._wait(interest, deadline, what)


def counting(spin_us: int) -> tuple[socket.socket, Counting]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        bare = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
    return bare, Counting(accepted, max_frame_bytes=1000, spin_us=spin_us)


@pytest.mark.parametrize("is_bounded", [True, False])
def test_a_wait_spins_as_long_as_it_is_told_and_then_sleeps(is_bounded: bool) -> None:
    bare, channel = counting(spin_us=20_000)
    with bare, channel:
        waiting = Elsewhere(lambda: bytes(channel.recv(soon() if is_bounded else Deadline.never())))
        time.sleep(0.3)
        asked, slept = channel.asked, channel.slept
        assert asked > 3
        assert slept == 1
        time.sleep(0.1)
        assert channel.asked == asked, "it goes on asking instead of sleeping"
        bare.sendall(b"\x02\x00\x00\x00hi")
        assert waiting.result() == b"hi"


def test_a_wait_that_may_not_spin_sleeps_at_once() -> None:
    bare, channel = counting(spin_us=0)
    with bare, channel:
        with pytest.raises(TimeoutError):
            channel.recv(soon(0.05))
        assert (channel.asked, channel.slept) == (1, 1)


def test_spinning_never_outlasts_the_deadline_HALF_OPEN() -> None:
    bare, channel = counting(spin_us=1_000_000)
    with bare, channel:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            channel.recv(soon(0.05))
        assert time.monotonic() - started < 0.5


def test_each_side_has_its_own_time_to_spin() -> None:
    for ours, theirs in (("", ""), ("?spin_us=70", ""), ("", "?spin_us=90"), ("?spin_us=0", "?spin_us=5")):
        with listen(f"tcp://127.0.0.1:0{theirs}", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
            channel = connect(f"{listener.endpoint}{ours}", soon())
            accepted = listener.accept(soon())
            assert isinstance(channel, TcpChannel)
            assert isinstance(accepted, TcpChannel)
            expected = [int(one.rpartition("=")[2] or default) for one, default in ((ours, 200), (theirs, 0))]
            assert [round(one._spin_s * 1e6) for one in (channel, accepted)] == expected
            channel.close()
            accepted.close()


def tiny_pair(spin_us: int = 0, form: str = "plain") -> tuple[TcpChannel, TcpChannel]:
    """Two channels whose sockets hold a few kilobytes."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        bare = socket.socket()
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        bare.connect(server.getsockname())
        accepted, _ = server.accept()
    for sock in (bare, accepted):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    return (
        TcpChannel(bare, max_frame_bytes=LIMIT, spin_us=spin_us, calls=FORMS[form]),
        TcpChannel(accepted, max_frame_bytes=LIMIT, spin_us=spin_us, calls=FORMS[form]),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spin_us", [0, 200])
def test_large_frames_both_ways_through_tiny_buffers_do_not_deadlock_SLOW_PEER(spin_us: int, form: str) -> None:
    ours, theirs = tiny_pair(spin_us, form)
    size = 300_000

    def exchange(channel: TcpChannel, byte: int) -> bytes:
        channel.send([bytes([byte]) * size, b"end"], soon())
        return bytes(channel.recv(soon()))

    with ours, theirs:
        other = Elsewhere(lambda: exchange(theirs, 2))
        assert exchange(ours, 1) == b"\x02" * size + b"end"
        assert other.result() == b"\x01" * size + b"end"


@pytest.mark.parametrize("form", FORMS)
def test_a_send_that_times_out_halfway_closes_the_channel(form: str) -> None:
    for send in (TcpChannel.send, TcpChannel.exchange):
        ours, theirs = tiny_pair(form=form)
        with ours, theirs:
            with pytest.raises(TimeoutError, match="a part of the frame was sent"):
                send(ours, [bytes(LIMIT)], soon(0.05))
            assert ours.is_closed


def test_a_send_that_times_out_before_its_first_byte_leaves_the_channel_open() -> None:
    ours, theirs = tiny_pair()
    with ours, theirs:
        # A buffer that ends exactly between two frames cannot be had from the kernel on request.
        ours._send_some = lambda buffers: 0  # type: ignore[method-assign]
        with pytest.raises(TimeoutError) as caught:
            ours.send([b"x"], soon(0.02))
        assert "part" not in str(caught.value)
        del ours._send_some
        ours.send([b"y"], soon())
        assert bytes(theirs.recv(soon())) == b"y"


def test_a_peer_that_sends_a_byte_now_and_then_does_not_outlast_the_deadline_HALF_OPEN(
    raw: tuple[socket.socket, TcpChannel],
) -> None:
    bare, channel = raw
    bare.sendall(struct.pack("<I", 900))
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.002):
            bare.sendall(b"x")

    sending = Elsewhere(trickle)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.recv(soon(0.1))
    assert time.monotonic() - started < 0.5
    stop.set()
    sending.result()
    assert not channel.is_closed


def test_bytes_that_never_pause_do_not_outlast_the_deadline_HALF_OPEN() -> None:
    bare, channel = bare_pair(1000)
    # Always something read and never a whole frame, as from a peer that is faster than we are.
    bound = soon()

    def read_some(flags: int) -> bool:
        assert not bound.has_passed(), "would go on for ever"
        return True

    channel._read_some = read_some  # type: ignore[method-assign]
    with bare, channel, pytest.raises(TimeoutError):
        channel.recv(soon(0.02))


def test_a_peer_that_reads_a_byte_now_and_then_does_not_outlast_the_deadline_SLOW_PEER() -> None:
    ours, theirs = tiny_pair()
    stop = threading.Event()

    def sip() -> None:
        while not stop.wait(0.002):
            theirs._socket.recv(500)

    with ours, theirs:
        reading = Elsewhere(sip)
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            ours.send([bytes(LIMIT)], soon(0.1))
        assert time.monotonic() - started < 0.5
        stop.set()
        reading.result()


def test_memory_is_reused_once_a_frame_is_let_go_and_not_before() -> None:
    ours, theirs = tiny_pair()
    with ours, theirs:
        ours.send([b"one"], soon())
        first = theirs.recv(soon())
        ours.send([b"two"], soon())
        second = theirs.recv(soon())
        assert first.obj is not second.obj
        held = second.obj
        del first, second
        ours.send([b"three"], soon())
        third = theirs.recv(soon())
        assert third.obj is held


def test_huge_memory_is_not_kept() -> None:
    ours, theirs = tiny_pair()
    with ours, theirs:
        sending = Elsewhere(lambda: ours.send([bytes(5 * 1024 * 1024)], soon()))
        assert len(theirs.recv(soon())) == 5 * 1024 * 1024
        sending.result()
        ours.send([b"small"], soon())
        frame = theirs.recv(soon())
        assert isinstance(frame.obj, bytearray)
        assert len(frame.obj) <= 64 * 1024


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("form", FORMS)
def test_a_long_frame_takes_memory_as_it_comes_and_not_for_its_length_alone(form: str) -> None:
    announced = 256 << 20
    ours, theirs = tiny_pair(form=form)
    with ours, theirs:
        theirs.max_frame_bytes = announced
        before = resident_bytes()
        ours._socket.sendall(struct.pack("<I", announced) + b"only the head")
        frame, arrived = theirs.recv_head(8, soon())
        assert (len(frame), bytes(frame[:arrived])) == (announced, b"only the head")
        assert resident_bytes() - before < 32 << 20


# A server that says when it has accepted, and then does nothing at all.
SILENT = """
import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
print("accepted", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("sent", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_stops_or_dies_never_outlasts_the_deadline_HALF_OPEN(sent: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", SILENT], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        channel = connect(f"tcp://127.0.0.1:{process.stdout.readline().strip()}", soon())
        with channel:  # type: ignore[attr-defined]
            assert process.stdout.readline() == "accepted\n"
            os.kill(process.pid, sent)
            started = time.monotonic()
            channel.send([b"hello"], soon(0.2))
            with pytest.raises((TimeoutError, TransportError)):
                channel.recv(soon(0.2))
            assert time.monotonic() - started < 2
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_listener_that_never_accepts_bounds_connect_HALF_OPEN() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        endpoint = Endpoint("tcp", "127.0.0.1", server.getsockname()[1])
        waiting: list[Channel] = []

        def fill() -> None:
            while True:
                waiting.append(connect(endpoint, soon(0.1)))

        with pytest.raises(TimeoutError, match="no answer in time"):
            fill()
        for channel in waiting:
            channel.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_nobody_listening_is_said_ADDR() -> None:
    port = free_port()
    with pytest.raises(TransportError, match=rf"127\.0\.0\.1:{port}: connection refused: nothing listens there"):
        connect(f"tcp://127.0.0.1:{port}", soon())


def test_an_unknown_name_is_said_ADDR() -> None:
    with pytest.raises((TransportError, TimeoutError), match=r"no-such-host\.invalid"):
        connect("tcp://no-such-host.invalid:1", soon(2))
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        listen("tcp://no-such-host.invalid:1", max_frame_bytes=LIMIT)


def test_every_address_of_a_name_is_tried_in_turn_ADDR(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        port = int(listener.endpoint.rpartition(":")[2])
        real = socket.getaddrinfo

        def two(host: str, *args: object, **kwargs: object) -> object:
            if host != "twofold.test":
                return real(host, *args, **kwargs)  # type: ignore[arg-type]
            if kwargs.get("flags"):
                raise socket.gaierror(socket.EAI_NONAME, "not a literal")
            return [
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.2", free_port())),
                (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
            ]

        monkeypatch.setattr(socket, "getaddrinfo", two)
        channel = connect("tcp://twofold.test:1", soon())
        assert channel.lane.endswith(f"-> 127.0.0.1:{port}")
        channel.close()
        listener.close()
        with pytest.raises(TransportError, match=r"127\.0\.0\.2:.*; 127\.0\.0\.1:") as caught:
            connect("tcp://twofold.test:1", soon())
        assert "twofold.test" in str(caught.value)


def test_a_look_up_that_hangs_ends_at_the_deadline_HALF_OPEN(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(host: str, *args: object, **kwargs: object) -> object:
        if kwargs.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "not a literal")
        time.sleep(0.3)
        raise socket.gaierror(socket.EAI_AGAIN, "no server")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"looking up the name 'slow\.test'"):
        connect("tcp://slow.test:1", soon(0.05))
    assert time.monotonic() - started < 0.25
    time.sleep(0.3)


def test_binding_to_an_own_address_and_to_a_foreign_one_ADDR() -> None:
    with listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        channel = connect(f"{listener.endpoint}?bind=127.0.0.3", soon())
        assert channel.lane.startswith("tcp 127.0.0.3:")
        channel.close()
        with pytest.raises(ConfigError, match=r"cannot bind to 192\.0\.2\.1.*address of this machine"):
            connect(f"{listener.endpoint}?bind=192.0.2.1", soon())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0: not an address of this machine"):
        listen("tcp://192.0.2.1:0", max_frame_bytes=LIMIT)
    with pytest.raises(ConfigError, match="bind= is for connecting"):
        listen("tcp://127.0.0.1:0?bind=127.0.0.1", max_frame_bytes=LIMIT)
    with pytest.raises(ConfigError, match="port 0 is for listening"):
        connect("tcp://127.0.0.1:0", soon())


def test_rows_are_not_paced_within_one_machine() -> None:
    with listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        for channel in (connect(listener.endpoint, soon()), listener.accept(soon())):
            assert isinstance(channel, TcpChannel)
            kept = channel._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert kept.rstrip(b"\0") == b"reno"
            channel.close()


def test_a_frame_is_read_ahead_while_a_frame_is_sent_and_the_reply_to_an_exchange_comes_behind_it() -> None:
    ours, theirs = tiny_pair(form="quick")
    with ours, theirs:
        large = bytes(300_000)
        theirs.send([b"ahead"], soon())
        theirs.send([b"reply"], soon())
        taking = Elsewhere(lambda: bytes(theirs.recv(soon())))
        assert bytes(ours.exchange([large], soon())) == b"ahead"
        assert taking.result() == large
        theirs.send([b"last"], soon())
        taking = Elsewhere(lambda: bytes(theirs.recv(soon())))
        assert bytes(ours.exchange([b"more"], soon())) == b"reply"
        assert taking.result() == b"more"
        assert bytes(ours.recv(soon())) == b"last"


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("begun", [b"", b"\x03\x00\x00\x00a"])
def test_a_signal_that_raises_leaves_whole_frames_or_none(begun: bytes) -> None:
    bare, channel = bare_pair(1000, "quick")

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with bare, channel:
            bare.sendall(begun)
            waker = threading.Timer(
                0.1, lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            )
            waker.start()
            with pytest.raises(Interrupted):
                channel.recv(soon())
            waker.join()
            if begun:
                with pytest.raises(TransportError, match="closed by the peer"):
                    channel.recv(soon())
                assert channel.is_closed
            else:
                bare.sendall(b"\x03\x00\x00\x00abc")
                assert bytes(channel.recv(soon())) == b"abc"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_sockets_carry_the_options_that_bound_a_dead_peer_HALF_OPEN() -> None:
    with listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        ours: Channel = connect(listener.endpoint, soon())
        theirs = listener.accept(soon())
        for channel in (ours, theirs):
            assert isinstance(channel, TcpChannel)
            sock = channel._socket
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
            channel.close()


def test_a_peer_gone_before_accept_does_not_end_the_listener() -> None:
    with listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        port = int(listener.endpoint.rpartition(":")[2])
        gone = socket.create_connection(("127.0.0.1", port))
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
        ours = connect(listener.endpoint, soon())
        accepted: list[Channel] = []
        try:
            ours.send([b"alive"], soon())
            # Whether the dead one is still handed out depends on the kernel.
            accepted.append(listener.accept(soon()))
            if accepted[0].lane.rpartition(":")[2] != ours.lane.split(" -> ")[0].rpartition(":")[2]:
                accepted.append(listener.accept(soon()))
            assert bytes(accepted[-1].recv(soon())) == b"alive"
        finally:
            ours.close()
            for channel in accepted:
                channel.close()


def test_a_wait_without_a_deadline_takes_a_frame_larger_than_the_buffers() -> None:
    listener: Listener = listen("tcp://127.0.0.1:0", max_frame_bytes=LIMIT)
    ours = connect(listener.endpoint, soon())
    theirs = listener.accept(soon())
    waiting = Elsewhere(lambda: bytes(theirs.recv(Deadline.never())))
    time.sleep(0.02)
    ours.send([bytes(2_000_000)], soon())
    assert waiting.result() == bytes(2_000_000)
    for end in (ours, theirs, listener):
        end.close()


class ClosedInBetween(TcpChannel):
    """Is closed, as by another thread, just before it says that it is used, or just before it says that it is not any more."""

    at: bool | None = None
    used_after_close = False

    @property
    def _is_busy(self) -> bool:
        return self._busy

    @_is_busy.setter
    def _is_busy(self, value: bool) -> None:
        if value == self.at:
            self.close()
        self._busy = value

    def _send_some(self, buffers: Sequence[Piece]) -> int:
        self.used_after_close |= self._is_closed
        return super()._send_some(buffers)


@pytest.mark.parametrize("at", [True, False])
def test_a_close_between_two_looks_leaves_no_descriptor_open_and_none_in_use(at: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        channel = ClosedInBetween(ours, max_frame_bytes=LIMIT, spin_us=0)
        channel.at = at
        with contextlib.suppress(TransportError):
            channel.send([b"frame"], soon())
        assert ours.fileno() == -1
        assert not channel.used_after_close
        with pytest.raises(TransportError, match="closed"):
            channel.send([b"frame"], soon())
