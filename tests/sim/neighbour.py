"""A second engine on the simulator's worker: it decodes as fast as it may, whatever happens to the first one, and every draft of
its own must be right. What the first one's faults may cost it is a connection or a request that starts again, never a draft.
"""

from __future__ import annotations

import contextlib
import random
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field, replace
from types import TracebackType

from tests.fakes.drafters import ArithmeticDrafter, expected
from tests.fakes.engine_world import CONTEXT, INFO, SLOTS, World

from farspark.clock import Deadline
from farspark.errors import TransportError
from farspark.transport import Channel, connect, exchange
from farspark.wire import codec
from farspark.wire.layout import EntryFlag, FrameStatus, Operation, RequestStatus
from farspark.wire.messages import Entry, Header
from farspark.worker.batch import DraftBatch, DraftResult

NEIGHBOURS_SLOTS = 2
# Of its positions: what tells the drafter's entries apart.
BASE = 100_000
_STEP_WITHIN_S = 10.0


class SharedDrafter(ArithmeticDrafter):
    """Told to fail, it fails for the first engine until it is healed, in a joint call and alone, and never for the neighbour."""

    def __init__(self) -> None:
        super().__init__(replace(INFO, slots=SLOTS + NEIGHBOURS_SLOTS))
        self.joint_calls = 0
        self.is_told_to_fail = False

    def _draft(self, batch: DraftBatch) -> DraftResult:
        # Long enough for the other one to come meanwhile.
        time.sleep(0.0005)
        is_neighbours = [entry.anchor_pos >= BASE for entry in batch.entries]
        self.joint_calls += len(set(is_neighbours)) > 1
        if self.is_told_to_fail and not all(is_neighbours):
            raise RuntimeError("the drafter was told to fail")
        return super()._draft(batch)


@dataclass
class _Request:
    slot: int
    generation: int = 0
    end: int = BASE
    rows: dict[int, bytes] = field(default_factory=dict)
    is_new: bool = True


class Neighbour:
    """`with Neighbour(world)`: a thread of its own from then on. `wrong` says what was not as it must be."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._rng = random.Random(~seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")
        self._sequence = 0
        self.checked = 0
        self.wrong: deque[str] = deque(maxlen=1)

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join(2 * _STEP_WITHIN_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                # The worker may have been restarted at another port, and may not be there at the moment.
                with contextlib.closing(connect(str(self._world.endpoint), Deadline.after(1))) as channel:
                    self._decode(channel)
            except (TransportError, TimeoutError):
                time.sleep(0.001)
            except AssertionError as error:
                self.wrong.append(f"the neighbour: {error}")
                return

    def _decode(self, channel: Channel) -> None:
        session = self._rng.getrandbits(64) or 1
        hello = self._world.shape.hello(
            engine="neighbour", identity=INFO.identity, markov_identity=bytes(32), want_margin=False
        )
        frame = codec.encode_frame(
            Header(Operation.HELLO, session, 0, 0), codec.encode_hello(replace(hello, slots=NEIGHBOURS_SLOTS))
        )
        header, _ = codec.decode_frame(exchange(channel, [frame], Deadline.after(_STEP_WITHIN_S)))
        assert header.status == FrameStatus.OK, header
        requests = [_Request(slot) for slot in range(NEIGHBOURS_SLOTS)]
        while not self._is_over.is_set():
            self._step(channel, session, requests)
            time.sleep(self._rng.random() / 1000)

    def _step(self, channel: Channel, session: int, requests: list[_Request]) -> None:
        self._sequence += 1
        entries, rows = [], b""
        for request in requests:
            if request.is_new or self._rng.random() < 0.05:
                request.generation, request.end, request.rows, request.is_new = request.generation + 1, BASE, {}, True
            flags = EntryFlag.NEED_DRAFT | (EntryFlag.NEW_GEN if request.is_new else 0)
            first, count = request.end, self._rng.randint(1, 3)
            request.end += count
            for position in range(first, request.end):
                request.rows[position] = struct.pack("<QQ", self._rng.getrandbits(64), position)
                rows += request.rows[position]
            token = self._rng.randrange(INFO.vocab_size)
            entries.append(Entry(request.slot, request.generation, first, count, token, request.end, flags))
        head = codec.encode_step_head(session, self._sequence, self._sequence, entries, len(rows))
        frame = exchange(channel, [head, rows], Deadline.after(_STEP_WITHIN_S))
        reply = codec.decode_answer(frame, session, self._sequence)
        assert reply is not None, codec.decode_frame(frame)[0]
        n = INFO.num_drafts
        for index, (request, entry) in enumerate(zip(requests, entries, strict=True)):
            tokens = reply.tokens[index * n : (index + 1) * n].tolist()
            self._check(request, entry, reply.entries[index].status, tokens)

    def _check(self, request: _Request, entry: Entry, status: RequestStatus, tokens: list[int]) -> None:
        request.is_new = not status.is_usable
        if not status.has_drafts:
            # The first engine's faults name slots of the drafter, which may be ours.
            assert status is RequestStatus.INTERNAL, status.name
            return
        for position in [old for old in request.rows if old < request.end - CONTEXT]:
            del request.rows[position]
        right = expected(
            request.rows,
            entry.anchor_token,
            entry.anchor_pos,
            num_drafts=INFO.num_drafts,
            vocab_size=INFO.vocab_size,
            n_out=INFO.num_drafts,
        )[0]
        assert tokens == right, f"slot {request.slot} at {request.end}: {tokens}, expected {right}"
        self.checked += 1
