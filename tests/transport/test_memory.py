from __future__ import annotations

import itertools
import time

import pytest
from tests.transport.contract import LIMIT, ChannelContract, recv_on, send_on, soon

from farspark.errors import TransportError
from farspark.transport.memory import Faults, pair

_numbers = itertools.count()


class TestMemory(ChannelContract):
    def address(self) -> str:
        return f"memory://contract-{next(_numbers)}"


def test_a_delayed_frame_comes_late_but_comes() -> None:
    ours, theirs = pair(max_frame_bytes=LIMIT, ours=Faults(delay_s=0.05))
    with ours, theirs:
        started = time.monotonic()
        ours.send([b"slow"], soon())
        with pytest.raises(TimeoutError):
            theirs.recv(soon(0.01))
        assert bytes(theirs.recv(soon())) == b"slow"
        assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("cut_at", [0, 3, 7])
def test_a_cut_connection_delivers_whole_frames_only(cut_at: int) -> None:
    ours, theirs = pair(max_frame_bytes=LIMIT, ours=Faults(cut_at=cut_at))
    with ours, theirs:
        received: list[bytes] = []
        with pytest.raises(TransportError):
            send_on(ours, b"abc", soon())
        with pytest.raises(TransportError):
            recv_on(theirs, received)
        assert received == [b"abc"] * (cut_at // 3)


def test_a_dropped_frame_vanishes_and_the_others_come() -> None:
    ours, theirs = pair(max_frame_bytes=LIMIT, ours=Faults(drop=frozenset({1})))
    with ours, theirs:
        for frame in (b"0", b"1", b"2"):
            ours.send([frame], soon())
        assert [bytes(theirs.recv(soon())) for _ in range(2)] == [b"0", b"2"]
        with pytest.raises(TimeoutError):
            theirs.recv(soon(0))
