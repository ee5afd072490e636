"""The bad link is as bad as it was told to be: what is tested with it is only worth as much."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.net.hosts import ROOT, Host, Link, Process, why_not
from tests.net.impairment import CLEAN, CUT, Impairment, Lane

PACKETS = 250


def fates(impairment: Impairment, *, seed: int = 7, packets: int = 10_000, gap_s: float = 0.001) -> list[list[float]]:
    """The delays, in milliseconds, of the copies of each packet of 1,000 bytes."""
    lane = Lane(seed)
    lane.impairment = impairment
    return [
        [(due_s - number * gap_s) * 1000 for due_s in lane.offer(1000, number * gap_s)] for number in range(packets)
    ]


def test_a_clean_lane_passes_everything_at_once() -> None:
    assert fates(CLEAN) == [[0.0]] * 10_000


def test_a_cut_lane_passes_nothing() -> None:
    assert fates(CUT) == [[]] * 10_000


def test_the_same_seed_gives_the_same_fate_and_another_one_another() -> None:
    bad = Impairment(delay_ms=5, jitter_ms=3, loss=0.1, duplicate=0.1, reorder=0.1)
    assert fates(bad) == fates(bad)
    assert fates(bad) != fates(bad, seed=8)


@pytest.mark.parametrize("loss", [0.01, 0.1, 0.3])
def test_as_many_packets_are_lost_as_was_said(loss: float) -> None:
    lost = sum(not copies for copies in fates(Impairment(loss=loss)))
    assert lost / 10_000 == pytest.approx(loss, abs=0.015)


def test_jitter_spreads_the_delay_and_keeps_the_order() -> None:
    delays = [copies[0] for copies in fates(Impairment(delay_ms=20, jitter_ms=4))]
    assert min(delays) == pytest.approx(16, abs=0.5)
    assert max(delays) == pytest.approx(24, abs=0.5)
    arrivals = [round(number + delay, 6) for number, delay in enumerate(delays)]
    assert arrivals == sorted(arrivals)


def test_a_packet_that_is_held_back_is_overtaken() -> None:
    delays = [copies[0] for copies in fates(Impairment(reorder=0.1, reorder_ms=3))]
    held_back = [delay for delay in delays if delay > 2.9]
    assert len(held_back) == pytest.approx(1000, abs=150)
    assert sorted(set(map(round, delays))) == [0, 3]


def test_a_duplicate_arrives_twice() -> None:
    assert sum(len(copies) == 2 for copies in fates(Impairment(duplicate=0.2))) == pytest.approx(2000, abs=200)


def test_a_narrow_lane_queues_and_loses_what_its_queue_cannot_hold() -> None:
    # 1,000 bytes a millisecond come, 125 a millisecond leave: the queue of ten packets is full after about ten.
    copies = fates(Impairment(rate_mbit=1, queue_bytes=10_000), packets=1000)
    passed = [delays[0] for delays in copies if delays]
    assert passed[0] == pytest.approx(8)
    assert max(passed) == pytest.approx(80, abs=8)
    assert len(passed) == pytest.approx(1000 / 8, abs=12)


# With real packets from here on.


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host, Link]]:
    with Host() as first, Host() as second, Link(first, second, seed=3) as link:
        yield first, second, link


ECHO = """
import socket, sys
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.bind((sys.argv[1], 4000))
print("ready", flush=True)
while True:
    packet, peer = sock.recvfrom(2048)
    sock.sendto(packet, peer)
"""
# One packet every 2 ms; for each that comes back its round trip in milliseconds.
PING = """
import json, socket, sys, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], 4000))
packets, got = int(sys.argv[2]), []
for number in range(packets):
    sock.send(f"{number} {time.monotonic()}".encode().ljust(200))
    until = time.monotonic() + (0.002 if number < packets - 1 else 0.2)
    while (left := until - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            name, sent = sock.recv(2048).split()
        except TimeoutError:
            break
        got.append((int(name), (time.monotonic() - float(sent)) * 1000))
print(json.dumps(got))
"""


@pytest.fixture
def echo(hosts: tuple[Host, Host, Link]) -> Iterator[None]:
    _, second, link = hosts
    command = [*second.enter, sys.executable, "-c", ECHO, link.addresses[1]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.kill()
    link.heal()


def ping(hosts: tuple[Host, Host, Link], packets: int = PACKETS) -> list[tuple[int, float]]:
    first, _, link = hosts
    answers = json.loads(first.run(sys.executable, "-c", PING, link.addresses[1], str(packets)))
    return [(int(number), float(trip_ms)) for number, trip_ms in answers]


@pytest.mark.net
@pytest.mark.usefixtures("echo")
@pytest.mark.parametrize("delay_ms", [0, 5, 60])
def test_the_delay_is_measured_in_the_round_trip(hosts: tuple[Host, Host, Link], delay_ms: float) -> None:
    hosts[2].impair(Impairment(delay_ms=delay_ms))
    trips = [trip_ms for _, trip_ms in ping(hosts)]
    assert len(trips) == PACKETS
    assert min(trips) >= 2 * delay_ms
    # The middle one: single packets may wait for a core.
    assert statistics.median(trips) < 2 * delay_ms + 2


@pytest.mark.net
@pytest.mark.usefixtures("echo")
def test_the_loss_is_measured_in_what_comes_back(hosts: tuple[Host, Host, Link]) -> None:
    hosts[2].impair(Impairment(loss=0.3), CLEAN)
    came_back = len(ping(hosts)) / PACKETS
    assert came_back == pytest.approx(0.7, abs=0.1)


@pytest.mark.net
@pytest.mark.usefixtures("echo")
def test_reordered_and_doubled_packets_arrive_so(hosts: tuple[Host, Host, Link]) -> None:
    hosts[2].impair(CLEAN, Impairment(reorder=0.2, reorder_ms=10, duplicate=0.2))
    numbers = [number for number, _ in ping(hosts)]
    assert set(numbers) == set(range(PACKETS))
    assert len(numbers) - PACKETS == pytest.approx(0.2 * PACKETS, abs=0.1 * PACKETS)
    assert sum(later < earlier for earlier, later in itertools.pairwise(numbers)) > 0.05 * PACKETS


@pytest.mark.net
@pytest.mark.usefixtures("echo")
def test_one_direction_can_be_cut(hosts: tuple[Host, Host, Link]) -> None:
    link = hosts[2]
    before = link.counts()
    link.impair(CLEAN, CUT)
    assert ping(hosts, 50) == []
    there, back = link.counts()
    assert there.cut == before[0].cut
    assert back.cut - before[1].cut == 50


@pytest.mark.net
def test_a_host_that_takes_anothers_place_has_its_address(hosts: tuple[Host, Host, Link]) -> None:
    first, _, _ = hosts
    with Link(first, hosts[1], number=9) as link, Host() as newcomer:
        link.plug(1, newcomer)
        assert "10.77.9.2/24" in newcomer.run("ip", "-4", "address", "show")
        assert first.run("ip", "neighbour") == ""
        probe = "import socket, sys; socket.create_connection((sys.argv[1], 1), timeout=5)"
        with pytest.raises(subprocess.CalledProcessError) as refused:
            first.run(sys.executable, "-c", probe, link.addresses[1])
        assert "ConnectionRefusedError" in refused.value.stderr


@pytest.mark.net
def test_a_run_that_is_killed_leaves_no_process_and_so_no_namespace() -> None:
    program = (
        "import sys, time\n"
        "from tests.net.hosts import Host, Link\n"
        "first, second = Host(), Host()\n"
        "link = Link(first, second)\n"
        "worker = second.start('tests.net.relay', '0')\n"
        "print(first.pid, second.pid, link._relay.pid, worker.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as run:
        assert run.stdout is not None
        pids = run.stdout.readline().split()
        assert len(pids) == 4
        run.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.01)


def is_alive(pid: str) -> bool:
    """Whether the process runs: not one that has ended and that nobody has asked about yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_machine_without_namespaces_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "network namespaces need root"


@pytest.mark.net
def test_a_process_that_ends_is_said() -> None:
    process = Process("tests.net.relay", "not a seed", log=None)
    try:
        with pytest.raises(RuntimeError, match=r"tests\.net\.relay ended with 1"):
            process.answer()
    finally:
        process.kill()
