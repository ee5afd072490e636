"""A worker with many peers over real sockets: what one does or leaves undone no other feels; who does nothing costs nothing."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.fakes.drafters import INFO, NoopDrafter
from tests.fakes.served import served
from tests.fakes.shape import shape_for
from tests.transport.contract import Elsewhere, soon

from farspark.engine.client import Client, Connection
from farspark.stats import Stats
from farspark.transport import parse_endpoint, parse_endpoints
from farspark.wire import codec
from farspark.wire.layout import EntryFlag, StepFlag
from farspark.wire.messages import Entry
from farspark.worker.answers import SEND_TIMEOUT_S
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

# Whoever waits for a peer that does not read waits at least this long; nobody else may come near it.
FELT_S = SEND_TIMEOUT_S / 2
SHAPE = shape_for(INFO, ring=INFO.context, slots=1)


class Engine:
    """A real client; `step` is one round of one row for its only slot."""

    def __init__(self, endpoint: str) -> None:
        hello = SHAPE.hello(engine="engine", identity=INFO.identity, markov_identity=bytes(32), want_margin=False)
        self.client = Client(
            hello, parse_endpoints(endpoint), connect_timeout_s=5, backoff_s=1, backoff_max_s=1, stats=Stats()
        )
        self.client.start()
        assert self.client.wait_ready(soon(10)), self.client.last_failure
        self.steps = 0

    @property
    def connection(self) -> Connection:
        connection = self.client.connection()
        assert connection is not None
        return connection

    @property
    def socket(self) -> socket.socket:
        return self.connection.channel._socket  # type: ignore[attr-defined, no-any-return]

    def entry(self) -> Entry:
        self.steps += 1
        flags = EntryFlag.NEED_DRAFT | (EntryFlag.NEW_GEN if self.steps == 1 else 0)
        return Entry(0, 1, self.steps - 1, 1, 7, self.steps, flags)

    def framed_step(self, refused: int = 0) -> bytes:
        """The next round's bytes, for those who do not send them as they should; `refused` entries make its reply large."""
        self.connection.sequence += 1
        entries = [self.entry(), *[Entry(9, 1, 0, 0, 0, 0, 0)] * refused]
        head = codec.encode_step_head(
            self.connection.session, self.connection.sequence, self.steps, entries, INFO.row_bytes
        )
        return struct.pack("<I", len(head) + INFO.row_bytes) + head + bytes(INFO.row_bytes)

    def step(self) -> float:
        """Its seconds."""
        started = time.monotonic()
        reply = self.client.step(
            self.connection, self.steps, [self.entry()], [bytes(INFO.row_bytes)], StepFlag(0), soon(30)
        )
        assert reply.entries[0].status.is_usable
        return time.monotonic() - started


@contextmanager
def serving() -> Iterator[Server]:
    config = WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint("tcp://127.0.0.1:0"), slots=4, drain_s=0.2)
    with served(Server(NoopDrafter(), config)) as server:
        yield server


def is_deaf(engine: Engine) -> None:
    """Asks for drafts until nothing more fits, and reads none."""
    engine.socket.settimeout(0.3)

    def fill() -> None:
        while True:
            engine.socket.sendall(engine.framed_step(refused=4000))

    with pytest.raises(TimeoutError):
        fill()


def stops_within_a_frame(engine: Engine) -> None:
    engine.socket.sendall(engine.framed_step()[:-1])


def stops_within_a_head(engine: Engine) -> None:
    engine.socket.sendall(engine.framed_step()[:30])


def stops_within_a_length(engine: Engine) -> None:
    engine.socket.sendall(engine.framed_step()[:3])


@pytest.mark.parametrize("misbehaves", [is_deaf, stops_within_a_frame, stops_within_a_head, stops_within_a_length])
def test_one_slow_client_never_delays_another_SLOW_PEER(misbehaves: Callable[[Engine], None]) -> None:
    with serving() as server:
        bad, good = Engine(server.endpoint), Engine(server.endpoint)
        misbehaves(bad)
        took = [good.step() for _ in range(50)]
        late = Engine(server.endpoint)
        took.append(late.step())
        assert max(took) < FELT_S
        for engine in (bad, good, late):
            engine.client.close()


def test_a_client_that_sends_far_ahead_gets_every_reply_in_order_and_delays_nobody_SLOW_PEER() -> None:
    with serving() as server:
        hasty, good = Engine(server.endpoint), Engine(server.endpoint)
        count = 2_000

        def sends() -> None:
            for _ in range(count):
                hasty.socket.sendall(hasty.framed_step())

        hasty.socket.settimeout(30)
        channel, before = hasty.connection.channel, hasty.connection.sequence
        sending = Elsewhere(sends)
        took, got = [], []
        for _ in range(count):
            header, _ = codec.decode_frame(channel.recv(soon(30)))
            got.append(header.sequence)
            if len(got) % 40 == 0:
                took.append(good.step())
        sending.result()
        assert got == [before + at + 1 for at in range(count)]
        assert max(took) < FELT_S
        for engine in (hasty, good):
            engine.client.close()


def cpu_s(pid: int) -> float:
    """User and system time of all threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(role: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.transport.test_slow_peers", role, *arguments], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("spin_us", [0, 1000])
def test_a_connection_costs_nothing_while_idle(spin_us: int) -> None:
    with start("worker", f"tcp://127.0.0.1:0?spin_us={spin_us}") as worker:
        try:
            assert worker.stdout is not None
            endpoint = worker.stdout.readline().strip()
            with start("engine", f"{endpoint}?spin_us={spin_us}") as engine:
                try:
                    assert engine.stdout is not None
                    assert engine.stdout.readline() == "idle\n"
                    time.sleep(0.2)
                    before = [cpu_s(one.pid) for one in (worker, engine)]
                    time.sleep(1.5)
                    spent = [cpu_s(one.pid) - was for one, was in zip((worker, engine), before, strict=True)]
                    # The clock's own step is 10 ms.
                    assert max(spent) <= 0.02, f"worker {spent[0]:.2f} s, engine {spent[1]:.2f} s of CPU in 1.5 s"
                finally:
                    engine.kill()
        finally:
            worker.kill()


def idle_engine(endpoint: str) -> None:
    """Four engines in one process, each after its first rounds."""
    engines = [Engine(endpoint) for _ in range(4)]
    for engine in engines:
        for _ in range(3):
            engine.step()
    print("idle", flush=True)
    time.sleep(60)


def worker(endpoint: str) -> None:
    config = WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint(endpoint), slots=4)
    with Server(NoopDrafter(), config) as server:
        print(server.endpoint, flush=True)
        server.serve()


if __name__ == "__main__":
    {"worker": worker, "engine": idle_engine}[sys.argv[1]](sys.argv[2])
