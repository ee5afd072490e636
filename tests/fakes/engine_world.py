"""A small engine around the real client and round: requests with rows, a ring, and a real worker with `ArithmeticDrafter`.

The world keeps its own idea, from first principles, of which rows the worker must hold; `expected` then says what the
drafts must be. Faults are put between client and worker by `FaultyChannel`.
"""

from __future__ import annotations

import os
import random
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from tests.fakes.channel import WrappedChannel
from tests.fakes.drafters import ArithmeticDrafter, expected, info
from tests.fakes.shape import shape_for

from farspark.clock import Deadline
from farspark.engine.breaker import Breaker
from farspark.engine.client import Client
from farspark.engine.depth import NOut
from farspark.engine.depth_control import DepthControl
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import Phase, RemoteRound, RoundInput, RoundRequest, meta_columns
from farspark.errors import TransportError
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, connect, parse_endpoint
from farspark.wire import codec
from farspark.wire.layout import MAX_REPLY_BYTES
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server

# What is allowed for connecting: more on a machine that is emulated.
PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "5"))
RING = 6
CONTEXT = 10
SLOTS = 4
INFO = info(context=CONTEXT, slots=SLOTS)


def row_of(request: int, position: int) -> bytes:
    return struct.pack("<QQ", request, position)


class FaultyChannel(WrappedChannel):
    """A channel whose next exchange goes wrong as told: once."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.late = False  # the next reply comes after the deadline
        self._waiting: memoryview | None = None
        self.cut = False  # the connection dies instead of the next reply
        self.status: int | None = None  # frame status of the next reply
        self.corrupt: tuple[int, bytes] | None = None  # offset from the end of the next reply, bytes to put there

    def recv(self, deadline: Deadline) -> memoryview:
        if self.late:
            # The worker is done with the step by then, so that the next fault hits the next step.
            self.late = False
            self._waiting = super().recv(deadline)
            raise TimeoutError("told to be late")
        if self._waiting is not None:
            frame, self._waiting = self._waiting, None
            return frame
        frame = super().recv(deadline)
        if self.cut:
            self.cut = False
            self.close()
            raise TransportError("told to be cut")
        if self.status is not None:
            # A worker that answers so has changed nothing: its sentence is the whole payload.
            header, _ = codec.decode_frame(frame)
            status, self.status = self.status, None
            return memoryview(codec.encode_frame(header._replace(status=status), b"told to fail"))
        if self.corrupt is not None:
            offset, put = self.corrupt
            self.corrupt = None
            changed = bytearray(frame)
            at = len(changed) - offset
            changed[at : at + len(put)] = put
            return memoryview(changed)
        return frame


@dataclass(slots=True)
class WorldRequest:
    number: int
    slot: int
    start: int  # first position that has a row: 0, or behind a prefix-cache hit
    end: int  # the anchor's position
    held_from: int  # the worker must hold rows from here on, once it is clean
    clean: bool = False  # the worker holds it
    admission: int = 0
    token: int = 0


@dataclass(slots=True)
class Row:
    """One batch row of a step."""

    request: WorldRequest
    n_rows: int
    sampled: bool
    k_window: int = 0
    temperature: float = 0.0
    seed: int = 0


@dataclass
class World:
    """`with World() as world`, then `step` rounds of rows."""

    seed: int = 0
    listen: str = ""  # where the worker listens; empty: in memory
    others: tuple[Endpoint, ...] = ()  # of other workers; the world's own is preferred
    lease_s: float = 60.0
    backoff_s: float = 0.001
    backoff_max_s: float = 0.002
    timeout_s: float = 5.0
    want_margin: bool = False
    trip: int = 0  # off
    cooldown: int = 4
    depth: DepthControl | None = None
    n_out: NOut | None = None
    name: str = ""
    support: int = 0  # of sampled drafts
    ring: int = RING
    max_rows: int = 4096  # per STEP, the worker's
    most: int = 4096  # rows of a window that find room in a STEP
    drafter: ArithmeticDrafter = field(default_factory=lambda: ArithmeticDrafter(INFO))
    stats: Stats = field(default_factory=Stats)
    channel: FaultyChannel | None = None
    numbers: int = 0
    epoch: int = 0
    stale_epoch: int = -1  # the worker is another one than that of connections up to this one

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.info = self.drafter.info
        self.endpoint = parse_endpoint(self.listen or f"memory://world-{id(self)}{self.name}")
        self.shape = shape_for(self.info, ring=self.ring, slots=SLOTS, support=self.support)
        self.result = PackedResult.empty(ResultLayout(SLOTS, self.info.num_drafts, self.support))
        self.by_slot: dict[int, WorldRequest] = {}
        self.start_worker()
        hello = self.shape.hello(
            engine="world", identity=self.info.identity, markov_identity=bytes(32), want_margin=self.want_margin
        )
        self.client = Client(
            hello,
            [self.endpoint, *self.others],
            connect_timeout_s=PATIENCE_S,
            backoff_s=self.backoff_s,
            backoff_max_s=self.backoff_max_s,
            stats=self.stats,
            connect=self._connect,
        )
        self.round = RemoteRound(
            client=self.client,
            shape=self.shape,
            ring=self,
            breaker=Breaker(trip=self.trip, cooldown=self.cooldown),
            stats=self.stats,
            timeout_s=self.timeout_s,
            want_margin=self.want_margin,
            depth=self.depth,
            n_out=self.n_out,
        )
        self.client.start()

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.stop_worker()

    def start_worker(self) -> None:
        config = WorkerConfig(
            checkpoint=Path("none"),
            listen=self.endpoint,
            slots=SLOTS,
            context=self.info.context,
            max_rows=self.max_rows,
            lease_s=self.lease_s,
            allow_unauthenticated_network=True,
        )
        self.server = Server(self.drafter, config)
        # Where it listens again once it is restarted.
        self.endpoint = parse_endpoint(self.server.endpoint)
        self._serving = threading.Thread(target=self.server.serve)
        self._serving.start()

    def stop_worker(self) -> None:
        self.server.stop()
        self._serving.join()

    def wait_ready(self) -> None:
        assert self.client.wait_ready(Deadline.after(2 * PATIENCE_S)), self.client.last_failure

    def _connect(self, endpoint: Endpoint, deadline: Deadline) -> Channel:
        self.channel = FaultyChannel(connect(endpoint, deadline, max_frame_bytes=MAX_REPLY_BYTES))
        return self.channel

    # The ring, as the device would hold it.

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        request = self.by_slot[slot]
        assert first_pos >= max(request.start, request.end - self.ring)
        assert first_pos + n_rows == request.end
        return memoryview(b"".join(row_of(request.number, position) for position in range(first_pos, request.end)))

    # Programs.

    def admit(self, slot: int, start: int = 0) -> WorldRequest:
        self.numbers += 1
        request = WorldRequest(self.numbers, slot, start, start, start)
        self.by_slot[slot] = request
        return request

    def preempt(self, slot: int, lost: int) -> None:
        """The request loses its slot and comes back into it, its newest `lost` positions to be computed again."""
        request = self.by_slot.get(slot)
        if request is None:
            return
        request.admission += 1
        request.end = max(request.start, request.end - lost)
        request.start = request.end
        request.clean = False

    def reconnected(self) -> bool:
        """Whether the connection is another one than at the last call: what the worker holds is then void."""
        connection = self.client.connection()
        epoch = connection.epoch if connection else self.epoch
        changed, self.epoch = epoch != self.epoch, epoch
        return changed

    def client_notices(self) -> None:
        """Wait until the client has seen that the worker went away, if it had a connection to it."""
        connection = self.client.connection()
        if connection is not None:
            self.client.drop(connection, "the worker was restarted")

    def step(self, *rows: Row) -> RoundOutcome:
        """One round; the result stands in `result`."""
        meta = np.zeros((len(rows), meta_columns(is_sampled=self.support > 0)), dtype=np.int32)
        packed = b""
        for index, row in enumerate(rows):
            request = row.request
            request.token = self.rng.randrange(self.info.vocab_size)
            meta[index, :4] = [request.end, row.n_rows, request.token, row.sampled]
            if self.support:
                meta[index, 4:] = struct.unpack("<3i", struct.pack("<fq", row.temperature, row.seed))
            end = request.end + row.n_rows
            packed += b"".join(row_of(request.number, p) for p in range(max(request.end, end - self.info.context), end))
            request.end = end
        requests = [
            RoundRequest(row.request.slot, (row.request.number, row.request.admission), row.k_window) for row in rows
        ]
        step = RoundInput(requests, meta, memoryview(packed), Phase.DECODE)
        return self.round.run(step, self.result)

    def lose(self, *rows: Row) -> None:
        """The round failed: what the worker holds for these is unknown, so their whole windows come from the ring."""
        for row in rows:
            row.request.clean = False

    def keep(self, *rows: Row) -> None:
        """The round reached the worker: from here on it holds what the contract says."""
        for row in rows:
            request = row.request
            if not request.clean:
                increment = min(row.n_rows, self.info.context)
                request.held_from = request.end - max(increment, min(request.end - request.start, self.ring, self.most))
                request.clean = True

    def check(self, index: int, row: Row) -> None:
        """The drafts of batch row `index` are those of a drafter that saw exactly the rows that the worker must hold."""
        request = row.request
        visible = range(max(request.held_from, request.end - self.info.context), request.end)
        n_out = (
            self.info.num_drafts
            if self.n_out is None
            else self.n_out.of(self.result.num_requests, self.info.num_drafts)
        )
        tokens, confidences, margins = expected(
            {position: row_of(request.number, position) for position in visible},
            request.token,
            request.end,
            num_drafts=self.info.num_drafts,
            vocab_size=self.info.vocab_size,
            n_out=n_out,
        )
        assert self.result.ok[index] == 1
        assert self.result.tokens[index].tolist() == tokens
        assert self.result.confidences[index].tolist() == confidences
        if self.want_margin:
            assert self.round.last_drafts.margins is not None
            assert self.round.last_drafts.margins[index].tolist() == margins
