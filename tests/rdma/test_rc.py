"""Inside the machine that `make rdma-test` starts: everything over RDMA's reliable connection, with the lane asserted.

Two cards on one wire. What the drills send goes from one to the other and so over the wire, where it can be cut.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.sim.program import Tally, random_program, run
from tests.transport.contract import LIMIT, PATIENCE_S, ChannelContract, Elsewhere, send_on, soon

from farspark.errors import ConfigError, TransportError
from farspark.probe.peer import Peer
from farspark.transport import Channel, Listener, connect, listen, parse_endpoint, ucx

DEVICES = Path("/sys/class/infiniband")
OURS, THEIRS = "10.88.0.1", "10.88.0.2"
ADDRESS = f"o1rdma://{THEIRS}:0"
# Both cards are in one machine: left to itself UCX takes the same one at both ends, and nothing goes over the wire.
FIRST_CARD, SECOND_CARD = "rxe0:1", "rxe1:1"

pytestmark = pytest.mark.skipif(
    not (DEVICES / "rxe1").exists(), reason="no Soft-RoCE devices here; make rdma-test runs this in a virtual machine"
)


class TestReliableConnection(ChannelContract):
    def address(self) -> str:
        return ADDRESS

    def test_the_lane_is_rdma_at_both_ends(self, pair: tuple[Channel, Channel]) -> None:
        for channel in pair:
            assert channel.lane.startswith("ucx rc_verbs/rxe"), channel.lane
            assert "tcp" not in channel.lane


def test_without_a_pin_rdma_is_taken_and_a_client_pinned_to_tcp_is_served_too() -> None:
    with listen(f"ucx://{THEIRS}:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        assert "rc_verbs/rxe1:1" in listener.lanes
        assert "tcp/eth1" in listener.lanes
        port = listener.endpoint.rpartition(":")[2]
        for endpoint, lane in (
            (f"ucx://{THEIRS}:{port}", "ucx rc_verbs/rxe"),
            (f"o1tcp://{THEIRS}:{port}", "ucx tcp/"),
        ):
            ours = connect(endpoint, soon(), max_frame_bytes=LIMIT)
            theirs = listener.accept(soon())
            assert ours.lane.startswith(lane), ours.lane
            assert theirs.lane.startswith(lane), theirs.lane
            ours.send([b"over ", lane.encode()], soon())
            assert bytes(theirs.recv(soon())) == b"over " + lane.encode()
            ours.close()
            theirs.close()


def test_a_pinned_lane_that_the_peer_does_not_have_is_an_error_UCX_LANE() -> None:
    with listen(f"o1tcp://{THEIRS}:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        port = listener.endpoint.rpartition(":")[2]
        with pytest.raises((TransportError, ConfigError, TimeoutError)) as caught:
            connect(f"o1rdma://{THEIRS}:{port}", soon())
        assert "o1rdma" in str(caught.value)


def test_an_address_without_an_rdma_device_is_an_error_UCX_LANE() -> None:
    with listen("ucx://127.0.0.1:0", max_frame_bytes=LIMIT) as listener:  # type: ignore[attr-defined]
        port = listener.endpoint.rpartition(":")[2]
        with pytest.raises((TransportError, ConfigError, TimeoutError)):
            connect(f"o1rdma://127.0.0.1:{port}", soon())


def test_random_engine_programs_draft_what_the_reference_drafts_over_rdma() -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    tally = Tally()
    run(list(random_program(random.Random(seed), 120)), tally, seed=seed, listen=ADDRESS)
    print(tally)
    assert tally.checked > 50
    assert tally.hangs == 0


@pytest.fixture(scope="session", autouse=True)
def patient_listeners() -> None:
    """The first connection may take longer than a listener waits for it elsewhere, while another process starts."""
    ucx.ESTABLISH_NS = int(PATIENCE_S * 1e9)  # type: ignore[misc]


# Peers that die, at the far end of the wire.


@pytest.fixture(scope="session", autouse=True)
def nursery() -> Iterator[subprocess.Popen[str]]:
    """Starts workers. From the first test on, because it takes a while to start itself."""
    command = [sys.executable, "-m", "tests.rdma.peer", ADDRESS]
    environment = os.environ | {"UCX_NET_DEVICES": SECOND_CARD}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@contextmanager
def worker(nursery: subprocess.Popen[str]) -> Iterator[tuple[int, str]]:
    """A worker on the second card: its process, and its endpoint with the first card as this side."""
    assert nursery.stdin is not None
    assert nursery.stdout is not None
    nursery.stdin.write("one more\n")
    nursery.stdin.flush()
    pid, endpoint = json.loads(nursery.stdout.readline())
    try:
        yield pid, f"{endpoint}?bind={OURS}"
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def cut(card: str) -> None:
    """Nothing leaves this card any more, without a word to anybody."""
    subprocess.run(["tc", "qdisc", "add", "dev", card, "root", "netem", "loss", "100%"], check=True)


def mend(card: str) -> None:
    subprocess.run(["tc", "qdisc", "del", "dev", card, "root"], check=True)


def received(card: str) -> int:
    return int(Path(f"/sys/class/net/{card}/statistics/rx_packets").read_text())


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP", "black hole"])
def test_a_peer_that_dies_never_outlasts_the_deadline_HALF_OPEN(
    nursery: subprocess.Popen[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", FIRST_CARD)
    with worker(nursery) as (pid, address):
        endpoint = parse_endpoint(address)
        with Peer(endpoint, PATIENCE_S) as peer:
            assert peer.lane.startswith("ucx rc_verbs/rxe0:1 10.88.0.1:"), peer.lane
            before = received("eth1")
            for _ in range(3):
                peer.ping(b"alive")
            assert received("eth1") > before, "the drill does not use the wire"
            peer._timeout_s = 0.5
            if how == "black hole":
                cut("eth0")
                cut("eth1")
            else:
                os.kill(pid, signal.Signals[how])
            try:
                waits = [waited(peer) for _ in range(3)]
                dead_within_s = until_gone(peer, 20) if how != "SIGSTOP" else None
            finally:
                if how == "black hole":
                    mend("eth0")
                    mend("eth1")
        print(json.dumps({"drill": how, "waits_s": waits, "gone_after_s": dead_within_s}))
        assert max(waits) < 2.0
        if how == "SIGSTOP":
            os.kill(pid, signal.SIGCONT)
        if how != "SIGKILL":
            # Once the fault is over, the same worker serves a new connection.
            with Peer(endpoint, PATIENCE_S) as peer:
                peer.ping(b"again")


def waited(peer: Peer) -> float:
    began = time.monotonic()
    with pytest.raises((TimeoutError, TransportError)):
        peer.ping(b"anybody?")
    return round(time.monotonic() - began, 3)


def until_gone(peer: Peer, seconds: float) -> float:
    """How long until the transport knows it by itself, a fast path beside the deadline."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            peer.ping(b"anybody?")
        except TransportError:
            return round(time.monotonic() - began, 3)
        except TimeoutError:
            continue
    raise AssertionError(f"not noticed within {seconds} s")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Listener, Channel, Channel]]:
    monkeypatch.setenv("UCX_NET_DEVICES", SECOND_CARD)
    listener = listen(ADDRESS, max_frame_bytes=LIMIT)
    monkeypatch.setenv("UCX_NET_DEVICES", FIRST_CARD)
    ours = connect(f"{listener.endpoint}?bind={OURS}", soon(), max_frame_bytes=LIMIT)
    theirs = listener.accept(soon())
    assert f"rc_verbs/{FIRST_CARD}" in ours.lane
    assert f"rc_verbs/{SECOND_CARD}" in theirs.lane
    yield listener, ours, theirs
    for one in (ours, theirs, listener):
        one.close()


def test_a_send_into_a_black_hole_is_given_up_and_the_channel_closed_SEND_GC(
    wire: tuple[Listener, Channel, Channel],
) -> None:
    listener, ours, _ = wire
    cut("eth0")
    cut("eth1")
    try:
        began = time.monotonic()
        with pytest.raises((TimeoutError, TransportError)):
            send_on(ours, bytes(LIMIT), soon(0.5))
        assert time.monotonic() - began < 3
        assert ours.is_closed
    finally:
        mend("eth0")
        mend("eth1")
    again = connect(f"{listener.endpoint}?bind={OURS}", soon(), max_frame_bytes=LIMIT)
    other = listener.accept(soon())
    receiving = Elsewhere(lambda: bytes(other.recv(soon())))
    again.send([b"again"], soon())
    assert receiving.result() == b"again"
    again.close()
    other.close()
