"""What every transport must do, as one suite: a test module inherits it and says how to make a connected pair."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import pytest

from farspark.clock import Deadline
from farspark.errors import ConfigError, ProtocolError, TransportError
from farspark.transport import Channel, Listener, connect, exchange, listen

LIMIT = 8 * 1024 * 1024


# What is allowed for a thing that takes no time: more on a machine that is emulated.
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "5"))


def soon(seconds: float = PATIENCE_S) -> Deadline:
    return Deadline.after(seconds)


def send_on(channel: Channel, frame: bytes, deadline: Deadline) -> None:
    """Send until it fails."""
    while True:
        channel.send([frame], deadline)


def recv_on(channel: Channel, received: list[bytes], deadline_s: float = PATIENCE_S) -> None:
    """Receive until it fails."""
    while True:
        received.append(bytes(channel.recv(soon(deadline_s))))


class Elsewhere:
    """Runs something on a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._outcome: list[object] = []
        self._error: list[BaseException] = []
        self._work = work
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work())
        except BaseException as error:
            self._error.append(error)

    def result(self) -> object:
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive(), f"still waiting after {2 * PATIENCE_S:g} s"
        if self._error:
            raise self._error[0]
        return self._outcome[0]


class ChannelContract(ABC):
    @abstractmethod
    def address(self) -> str:
        """Where a listener can listen."""

    @pytest.fixture
    def listener(self) -> Iterator[Listener]:
        listener = listen(self.address(), max_frame_bytes=LIMIT)
        yield listener
        listener.close()

    @pytest.fixture
    def pair(self, listener: Listener) -> Iterator[tuple[Channel, Channel]]:
        ours = connect(listener.endpoint, soon(), max_frame_bytes=LIMIT)
        theirs = listener.accept(soon())
        yield ours, theirs
        ours.close()
        theirs.close()

    def test_frames_arrive_whole_in_order_and_once(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        for frame in (b"a", b"", b"bc" * 1000, b"d"):
            ours.send([frame], soon())
        assert [bytes(theirs.recv(soon())) for _ in range(4)] == [b"a", b"", b"bc" * 1000, b"d"]
        theirs.send([b"back"], soon())
        assert bytes(ours.recv(soon())) == b"back"
        with pytest.raises(TimeoutError):
            theirs.recv(soon(0))

    def test_pieces_of_every_kind_become_one_frame(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        ints = memoryview(bytearray(range(8))).cast("i")
        ours.send([b"ab", bytearray(b"cd"), memoryview(b"xxefyy")[2:4], b"", ints], soon())
        assert bytes(theirs.recv(soon())) == b"abcdef" + bytes(range(8))

    def test_a_frame_of_very_many_pieces(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        ours.send([b"%04d" % number for number in range(5000)], soon())
        assert bytes(theirs.recv(soon())) == b"".join(b"%04d" % number for number in range(5000))

    def test_the_receiver_owns_the_memory_of_a_frame(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        kept = []
        for number in range(50):
            ours.send([bytes([number]) * 3000], soon())
            frame = theirs.recv(soon())
            frame[0] = 255  # writable, and nobody else's
            kept.append(frame[1:])
        assert [set(frame) for frame in kept] == [{number} for number in range(50)]

    def test_a_head_shows_the_frame_that_recv_returns(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        frames = [b"first", bytes(range(256)) * 4000, b"", b"last"]

        def send_all() -> None:
            for frame in frames:
                ours.send([frame], soon())

        sending = Elsewhere(send_all)
        for frame in frames:
            head, arrived = theirs.recv_head(3, soon())
            assert len(head) == len(frame)
            assert min(3, len(frame)) <= arrived <= len(frame)
            assert bytes(head[:arrived]) == frame[:arrived]
            whole = theirs.recv(soon())
            assert whole.obj is head.obj
            assert head == whole == frame
        sending.result()

    def test_a_head_may_be_asked_for_twice(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        ours.send([b"once"], soon())
        for _ in range(2):
            assert bytes(theirs.recv_head(4, soon())[0]) == b"once"
        assert bytes(theirs.recv(soon())) == b"once"
        with pytest.raises(TimeoutError):
            theirs.recv_head(4, soon(0.01))

    def test_an_exchange_is_a_send_and_the_frame_that_comes_next(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair

        def answer() -> None:
            for _ in range(3):
                theirs.send([b"to ", theirs.recv(soon())], soon())

        answering = Elsewhere(answer)
        for size in (1, 75_000, 600_000):
            assert bytes(exchange(ours, [b"head", bytes(size)], soon())) == b"to head" + bytes(size)
        answering.result()
        with pytest.raises(TimeoutError):
            exchange(ours, [b"nobody answers"], soon(0.02))
        assert not ours.is_closed
        assert bytes(theirs.recv(soon())) == b"nobody answers"
        theirs.send([b"late"], soon())
        assert bytes(ours.recv(soon())) == b"late"

    def test_the_pieces_may_be_changed_once_send_returns(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        piece = bytearray(b"first")
        ours.send([piece], soon())
        piece[:] = b"later"
        assert bytes(theirs.recv(soon())) == b"first"

    def test_a_wait_ends_at_its_deadline_and_leaves_the_channel_open(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            ours.recv(soon(0.05))
        assert 0.05 <= time.monotonic() - started < 1
        assert not ours.is_closed
        theirs.send([b"late"], soon())
        assert bytes(ours.recv(soon())) == b"late"

    def test_a_passed_deadline_still_takes_a_frame_that_is_there(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        theirs.send([b"there"], soon())
        time.sleep(0.02)
        assert bytes(ours.recv(soon(0))) == b"there"

    def test_large_frames_both_ways_at_once_do_not_deadlock_SLOW_PEER(self, pair: tuple[Channel, Channel]) -> None:
        frame = bytes(LIMIT)

        def exchange(channel: Channel) -> int:
            channel.send([frame], soon())
            return len(channel.recv(soon()))

        other = Elsewhere(lambda: exchange(pair[1]))
        assert exchange(pair[0]) == LIMIT
        assert other.result() == LIMIT

    def test_sending_to_a_peer_that_never_reads_ends_at_the_deadline_SLOW_PEER(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        ours, _ = pair
        deadline = soon(0.2)
        with pytest.raises(TimeoutError):
            send_on(ours, bytes(LIMIT), deadline)

    def test_a_closed_peer_is_a_transport_error_after_what_it_sent(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        theirs.send([b"last words"], soon())
        theirs.close()
        assert bytes(ours.recv(soon())) == b"last words"
        with pytest.raises(TransportError, match="closed"):
            ours.recv(soon())
        assert ours.is_closed

    def test_sending_to_a_closed_peer_ends_in_a_transport_error(self, pair: tuple[Channel, Channel]) -> None:
        ours, theirs = pair
        theirs.close()
        with pytest.raises(TransportError):
            send_on(ours, bytes(100_000), soon())
        assert ours.is_closed

    @pytest.mark.parametrize("is_bounded", [True, False])
    def test_close_wakes_whoever_waits_for_a_frame(self, pair: tuple[Channel, Channel], is_bounded: bool) -> None:
        ours, _ = pair
        waiting = Elsewhere(lambda: ours.recv(soon(30) if is_bounded else Deadline.never()))
        time.sleep(0.05)
        ours.close()
        ours.close()
        with pytest.raises(TransportError, match="closed"):
            waiting.result()

    def test_close_wakes_whoever_waits_to_send(self, pair: tuple[Channel, Channel]) -> None:
        ours, _ = pair

        waiting = Elsewhere(lambda: send_on(ours, bytes(LIMIT), soon(30)))
        time.sleep(0.05)
        ours.close()
        with pytest.raises(TransportError):
            waiting.result()

    def test_a_closed_channel_refuses_to_work(self, pair: tuple[Channel, Channel]) -> None:
        ours, _ = pair
        ours.close()
        assert ours.is_closed
        with pytest.raises(TransportError, match="closed"):
            ours.send([b"x"], soon())
        with pytest.raises(TransportError, match="closed"):
            ours.recv(soon())

    def test_a_frame_above_the_limit_closes_that_channel_only_FRAMING(self, listener: Listener) -> None:
        small = connect(listener.endpoint, soon(), max_frame_bytes=10)
        theirs = listener.accept(soon())
        theirs.send([bytes(10)], soon())
        assert len(small.recv(soon())) == 10
        theirs.send([bytes(11)], soon())
        with pytest.raises(ProtocolError, match="11 bytes announced, at most 10"):
            small.recv(soon())
        assert small.is_closed
        theirs.close()
        with (
            connect(listener.endpoint, soon(), max_frame_bytes=10) as ours,  # type: ignore[attr-defined]
            listener.accept(soon()) as other,  # type: ignore[attr-defined]
        ):
            other.send([b"fine"], soon())
            assert bytes(ours.recv(soon())) == b"fine"

    def test_a_limit_that_is_raised_holds_for_the_next_frame_even_one_that_is_there(
        self, pair: tuple[Channel, Channel]
    ) -> None:
        ours, theirs = pair
        ours.max_frame_bytes = 10
        for size in (10, 11, 100_000):
            theirs.send([bytes(size)], soon())
        assert len(ours.recv(soon())) == 10
        ours.max_frame_bytes = LIMIT
        assert [len(ours.recv(soon())) for _ in range(2)] == [11, 100_000]
        ours.max_frame_bytes = 10
        theirs.send([bytes(11)], soon())
        with pytest.raises(ProtocolError, match="11 bytes announced, at most 10"):
            ours.recv_head(4, soon())
        assert ours.is_closed

    def test_an_unclosed_channel_warns(self, listener: Listener) -> None:
        with pytest.warns(ResourceWarning, match="unclosed"):
            connect(listener.endpoint, soon())
        listener.accept(soon()).close()

    def test_accept_ends_at_its_deadline(self, listener: Listener) -> None:
        with pytest.raises(TimeoutError):
            listener.accept(soon(0.02))

    @pytest.mark.parametrize("is_bounded", [True, False])
    def test_closing_a_listener_wakes_accept(self, listener: Listener, is_bounded: bool) -> None:
        waiting = Elsewhere(lambda: listener.accept(soon(30) if is_bounded else Deadline.never()))
        time.sleep(0.05)
        listener.close()
        listener.close()
        with pytest.raises(TransportError, match="closed"):
            waiting.result()
        with pytest.raises(TransportError, match="refused"):
            connect(listener.endpoint, soon())

    def test_an_address_that_is_taken_is_a_clear_error_ADDR(self, listener: Listener) -> None:
        with pytest.raises(ConfigError, match="in use"):
            listen(listener.endpoint, max_frame_bytes=LIMIT)

    def test_the_lane_says_what_the_bytes_travel_over(self, pair: tuple[Channel, Channel]) -> None:
        assert pair[0].lane.split()[0] in repr(pair[0]).lower()
        assert " " in pair[0].lane
