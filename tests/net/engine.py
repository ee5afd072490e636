"""`python -m tests.net.engine SETTINGS`: an engine without a model, in a process of its own.

The real client, round and breaker run a random program of requests at a steady pace; every draft is compared with the one
that rows and positions give. SETTINGS is `EngineSettings` as JSON. A line with `"report"` is answered with everything since the
last one, `"pause"` and `"go"` stop and start the rounds. Ends with its input.
"""

from __future__ import annotations

import json
import logging
import os
import random
import select
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tests.fakes.channel import WrappedChannel
from tests.fakes.shape import shape_for
from tests.net.reference import Arithmetic, Checkpoint, Reference
from tests.net.world import CONTEXT, RING, SLOTS, drafter_info, row_of

from farspark.clock import Deadline
from farspark.engine.breaker import Breaker
from farspark.engine.client import Client
from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.round import Phase, RemoteRound, RoundInput, RoundRequest
from farspark.stats import Stats
from farspark.transport import Channel, Endpoint, Piece, connect, parse_endpoints
from farspark.wire.layout import MAX_REPLY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Times in milliseconds. The defaults are the engine's own, at a step of 20 ms."""

    endpoints: str
    pace_ms: float = 20.0  # from the begin of a round to the begin of the next
    timeout_ms: float = 50.0
    connect_timeout_ms: float = 1000.0
    backoff_ms: float = 1000.0
    backoff_max_ms: float = 30_000.0
    trip: int = 3
    cooldown: int = 256
    hidden_size: int = 4
    identity: int = 1
    checkpoint: str = ""  # what the worker serves; then the two above mean nothing
    max_rows: int = 6  # of a request in a round
    seed: int = 0


class Record(NamedTuple):
    """One round. Times in milliseconds but for `at_s`, which is on the machine's monotonic clock."""

    at_s: float  # when it began
    took_ms: float
    queued_ms: float  # of these: ready to run, but both cores had something else to do
    send_ms: float  # of these: handing the request over
    outcome: str
    reason: str  # why it failed, as the counter says
    breaker: str  # after the round
    epoch: int  # of the connection that a STEP went to; 0: none went out
    wrong: int  # drafts that the reference does not draft

    @property
    def own_ms(self) -> float:
        """What the round took, less the time without a core: what is left is ours, the worker's or the network's."""
        return max(0.0, self.took_ms - self.queued_ms)


class TimedChannel(WrappedChannel):
    """A channel that adds up what sending took."""

    def __init__(self, inner: Channel, engine: Engine) -> None:
        super().__init__(inner)
        self._engine = engine

    def send(self, pieces: Sequence[Piece], deadline: Deadline) -> None:
        started = time.monotonic()
        try:
            super().send(pieces, deadline)
        finally:
            # The connector sends too: HELLO.
            if threading.current_thread() is threading.main_thread():
                self._engine.send_s += time.monotonic() - started


class WitnessedClient(Client):
    """Remembers which connection the last STEP went to."""

    asked_epoch = 0

    def step(self, connection: Any, *arguments: Any, **named: Any) -> Any:
        self.asked_epoch = connection.epoch
        return super().step(connection, *arguments, **named)


@dataclass(slots=True)
class Request:
    number: int
    start: int  # first position that has a row
    end: int  # position of the anchor
    token: int = 0


class Engine:
    """Owned by the main thread. The ring (`window`) is made of thin air: every row is known from its name."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._reference: Reference
        if settings.checkpoint:
            self._reference = Checkpoint(Path(settings.checkpoint), slots=SLOTS, context=CONTEXT)
        else:
            self._reference = Arithmetic(drafter_info(settings.hidden_size, settings.identity))
        self._info = self._reference.info
        self._rng = random.Random(settings.seed)
        self._stats = Stats()
        self._numbers = 0
        self._requests = [self._new_request() for _ in range(SLOTS)]
        self.send_s = 0.0
        shape = shape_for(self._info, slots=SLOTS, context=CONTEXT, ring=RING)
        self._client = WitnessedClient(
            shape.hello(engine="drill", identity=self._info.identity, markov_identity=bytes(32), want_margin=False),
            parse_endpoints(settings.endpoints),
            connect_timeout_s=settings.connect_timeout_ms / 1000,
            backoff_s=settings.backoff_ms / 1000,
            backoff_max_s=settings.backoff_max_ms / 1000,
            stats=self._stats,
            connect=self._connect,
        )
        self._round = RemoteRound(
            client=self._client,
            shape=shape,
            ring=self,
            breaker=Breaker(trip=settings.trip, cooldown=settings.cooldown),
            stats=self._stats,
            timeout_s=settings.timeout_ms / 1000,
            want_margin=False,
        )
        self._result = PackedResult.empty(ResultLayout(SLOTS, self._info.num_drafts))
        self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._reported: Counter[str] = Counter()

    def _connect(self, endpoint: Endpoint, deadline: Deadline) -> Channel:
        return TimedChannel(connect(endpoint, deadline, max_frame_bytes=MAX_REPLY_BYTES), self)

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        return self._rows(self._requests[slot], first_pos, first_pos + n_rows)

    def _rows(self, request: Request, first: int, end: int) -> memoryview:
        row_bytes = self._info.row_bytes
        return memoryview(b"".join(row_of(request.number, position, row_bytes) for position in range(first, end)))

    def _new_request(self) -> Request:
        self._numbers += 1
        start = self._rng.choice((0, 0, 0, 7, 64))
        return Request(self._numbers, start, start)

    def round(self) -> Record:
        """The next round of the program."""
        rng = self._rng
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        meta = np.zeros((len(slots), 4), dtype=np.int32)
        packed = []
        for row, slot in enumerate(slots):
            if rng.random() < 0.02:
                self._requests[slot] = self._new_request()
            request = self._requests[slot]
            n_rows, request.token = rng.randint(1, self._settings.max_rows), rng.randrange(self._info.vocab_size)
            meta[row] = [request.end, n_rows, request.token, 1]
            packed.append(self._rows(request, max(request.end, request.end + n_rows - CONTEXT), request.end + n_rows))
            request.end += n_rows
        step = RoundInput(
            [RoundRequest(slot, self._requests[slot].number, 0) for slot in slots],
            meta,
            memoryview(b"".join(packed)),
            Phase.DECODE,
        )
        return self._run(step)

    def _run(self, step: RoundInput) -> Record:
        before = Counter(self._stats.counters())
        self._client.asked_epoch, self.send_s = 0, 0.0
        queued_ns = self._queued_ns()
        started = time.monotonic()
        outcome = self._round.run(step, self._result)
        took_s = time.monotonic() - started
        queued_ms = (self._queued_ns() - queued_ns) / 1e6
        reasons = [name for name in Counter(self._stats.counters()) - before if name.startswith("fallback_")]
        return Record(
            started,
            took_s * 1000,
            queued_ms,
            self.send_s * 1000,
            outcome.name,
            ",".join(reason.removeprefix("fallback_") for reason in reasons),
            self._round.breaker.state.value,
            self._client.asked_epoch,
            self._count_wrong(step, outcome),
        )

    def _queued_ns(self) -> int:
        """How long this thread has stood in a run queue so far: ready, but on no core."""
        return int(os.pread(self._schedstat, 100, 0).split()[1])

    def _count_wrong(self, step: RoundInput, outcome: RoundOutcome) -> int:
        wrong = 0
        for row, asked in enumerate(step.requests):
            drafted = (self._result.tokens[row].tolist(), self._result.confidences[row].tolist())
            if self._result.ok[row]:
                request = self._requests[asked.slot]
                first = max(request.start, request.end - CONTEXT)
                wrong += not self._reference.agrees(
                    self._rows(request, first, request.end), first, request.token, *drafted
                )
            else:
                # A row without drafts holds legal ids and says that it is sure of none.
                wrong += any(drafted[0]) or any(drafted[1])
        if outcome is RoundOutcome.OK:
            wrong += int(np.count_nonzero(self._result.ok[: len(step.requests)] != 1))
        return wrong

    def report(self, records: list[Record]) -> dict[str, Any]:
        counters = Counter(self._stats.counters())
        since, self._reported = counters - self._reported, counters
        return {
            "records": records,
            "counters": since,
            "breaker": self._round.breaker.snapshot(),
            "state": self._client.state.value,
            "why": self._client.last_failure,
            "connected_to": str(connection.endpoint) if (connection := self._client.connection()) else None,
        }

    def serve(self) -> None:
        """Rounds at the pace, and between them what the input says."""
        self._client.start()
        pace_s, next_s, runs = self._settings.pace_ms / 1000, time.monotonic(), True
        records: list[Record] = []
        while True:
            wait_s = max(0.0, next_s - time.monotonic()) if runs else None
            if select.select([0], [], [], wait_s)[0]:
                line = os.read(0, 4096)
                if not line:
                    break
                match json.loads(line):
                    case "report":
                        print(json.dumps(self.report(records)), flush=True)
                        records = []
                    case "pause":
                        runs = False
                        print("true", flush=True)
                    case "go":
                        runs, next_s = True, time.monotonic()
                        print("true", flush=True)
                continue
            if time.monotonic() < next_s:
                continue
            records.append(self.round())
            # A step lasts as long as it does: a round that came late moves those after it.
            next_s = max(next_s + pace_s, time.monotonic())
        self._client.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    Engine(EngineSettings(**json.loads(sys.argv[1]))).serve()
