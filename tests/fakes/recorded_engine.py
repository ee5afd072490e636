"""A small engine that records: the real `RemoteDrafter` in shadow over a real worker; its local drafter is the plain one.

The program has what a replay must get right: a prompt in chunks, one longer than the context, rejected drafts, a request
that starts behind a prefix-cache hit, a slot that is used again, rounds without drafts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from tests.fakes.plain_dspark import PlainDSpark
from tests.fakes.served import served
from tests.fakes.tiny_checkpoint import TINY

from farspark.clock import Deadline
from farspark.engine.config import Policy, read_config
from farspark.engine.gather.torch_gather import StepTensors
from farspark.engine.result import RoundOutcome
from farspark.engine.shape import ModelShape
from farspark.engine.vllm.remote import Admissions, Batch, RemoteDrafter, TpGroup
from farspark.transport import parse_endpoint
from farspark.worker.batch import Drafter
from farspark.worker.checkpoint import identities
from farspark.worker.config import WorkerConfig
from farspark.worker.drafter import open_drafter
from farspark.worker.server import Server

SLOTS, CONTEXT, RING = 3, 24, 16
TAPS, HIDDEN, VOCAB, N = 3, 32, 97, 5
assert (TINY["hidden_size"], TINY["vocab_size"], TINY["block_size"]) == (HIDDEN, VOCAB, N)
SHAPE = ModelShape(
    num_drafts=N,
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    taps=TAPS,
    slots=SLOTS,
    context=CONTEXT,
    ring=RING,
    max_position=4096,
)


@contextmanager
def serving(
    folder: Path,
    *,
    slots: int = SLOTS,
    context: int = CONTEXT,
    token: bytes | None = None,
    made: Callable[[Drafter], Drafter] = lambda drafter: drafter,
) -> Iterator[Server]:
    """A real worker with what is `made` of the drafter in `folder`, in float32, on a TCP port of its own."""
    config = WorkerConfig(
        checkpoint=folder,
        listen=parse_endpoint("tcp://127.0.0.1:0"),
        slots=slots,
        context=context,
        dtype="float32",
        token=token,
    )
    drafter = open_drafter(folder, dtype="float32", slots=slots, context=context)
    with served(Server(made(drafter), config)) as server:
        yield server


class LocalDrafter(Protocol):
    def draft(self, rows: torch.Tensor, first_pos: int, anchor: int, *, context: int) -> Any:
        """What `PlainDSpark.draft` gives, of which `tokens` and `confidences` are read."""
        ...


@dataclass
class EngineRequest:
    slot: int
    rows: torch.Tensor  # bf16 [positions, taps * hidden], of all positions, also those that the engine never ran
    end: int  # the anchor's position


@dataclass(frozen=True)
class Turn:
    """One request's part of a step: `n_rows` computed, the last `rejected` of them void."""

    request: EngineRequest
    n_rows: int
    rejected: int = 0
    sampled: bool = True


@dataclass
class RecordedEngine:
    """`with RecordedEngine(...) as engine: engine.serve()`. `planted`: the local drafts of this round are made wrong.

    `folder` is what the worker must serve, `local` the local drafter; None: the plain one of the same checkpoint.
    """

    folder: Path  # the checkpoint
    endpoint: str
    capture: Path
    settings: dict[str, str] = field(default_factory=dict)
    planted: int | None = None
    shape: ModelShape = SHAPE
    local: LocalDrafter | None = None

    def __enter__(self) -> RecordedEngine:
        found = identities(self.folder)
        prefix = "VLLM_DSPARK_REMOTE"
        settings = {
            "IDENTITY": found.identity.hex(),
            "POLICY": "shadow",
            "STATS_FILE": str(self.capture.with_suffix(".stats.json")),
            "CAPTURE": str(self.capture),
            "TIMEOUT_MS": "20000",
        } | self.settings
        config = read_config({prefix: self.endpoint} | {f"{prefix}_{name}": text for name, text in settings.items()})
        assert config is not None
        self.admissions = Admissions()
        self.drafter = RemoteDrafter(
            config,
            self.shape,
            max_tokens=256,
            device=torch.device("cpu"),
            tp=TpGroup(0, 1, lambda tensor: None),
            admissions=self.admissions,
            engine="a recorded engine",
            facts={},
        )
        self.drafter.start_serving()
        assert self.drafter.rank0 is not None
        assert self.drafter.rank0.client.wait_ready(Deadline.after(20)), self.drafter.rank0.client.last_failure
        self.plain: LocalDrafter = self.local or PlainDSpark.read(self.folder)
        self.row = self.shape.taps * self.shape.hidden_size
        self.rng = random.Random(7)
        self.generator = torch.Generator().manual_seed(7)
        self.rounds = 0
        return self

    def __exit__(self, *_: object) -> None:
        self.drafter.close()

    def admit(self, slot: int, start: int = 0) -> EngineRequest:
        """`start` > 0: behind a prefix-cache hit."""
        self.admissions.admit(slot, f"request-{slot}")
        return EngineRequest(slot, torch.randn(start, self.row, generator=self.generator).bfloat16(), start)

    def serve(self) -> None:
        first, long = self.admit(0), self.admit(2)
        self.step(Turn(first, 7, sampled=False), Turn(long, 40))
        self.step(Turn(first, 5), Turn(long, 6, rejected=2))
        hit = self.admit(1, start=20)
        self.step(Turn(hit, 4), Turn(first, 6, rejected=5), Turn(long, 6))
        for _ in range(4):
            self.step(*(Turn(one, 6, rejected=self.rng.randrange(6)) for one in (first, hit, long)))
        self.step(Turn(first, 1, sampled=False))
        again = self.admit(0)
        self.step(Turn(hit, 6, rejected=1), Turn(again, 3))
        for _ in range(4):
            self.step(*(Turn(one, 6, rejected=self.rng.randrange(3)) for one in (hit, again)))

    def step(self, *turns: Turn) -> None:
        self.rounds += 1
        anchors = [self.rng.randrange(VOCAB - 1) for _ in turns]
        hidden, positions = [], []
        for turn in turns:
            more = torch.randn(turn.n_rows, self.row, generator=self.generator).bfloat16()
            hidden.append(more)
            positions.append(torch.arange(turn.request.end, turn.request.end + turn.n_rows))
            kept = more[: turn.n_rows - turn.rejected]
            turn.request.rows = torch.cat([turn.request.rows, kept])
            turn.request.end += len(kept)
        self.drafter.begin(self._tensors(turns, hidden, positions, anchors))
        lengths = [turn.n_rows for turn in turns]
        self.drafter.finish(Batch([turn.request.slot for turn in turns], lengths, None))
        policy = self.drafter.config.policy
        if policy is Policy.SHADOW:
            began = time.perf_counter()
            local = self._local(turns, anchors)
            assert self.drafter.rank0 is not None
            self.drafter.rank0.stats.record_us("local_propose_us", (time.perf_counter() - began) * 1e6)
            self.drafter.compare(*local)
        elif policy is Policy.RESILIENCE and self.drafter.outcome() in (RoundOutcome.FAILED, RoundOutcome.SOME_FAILED):
            self.drafter.note_local_fallback(*self._local(turns, anchors))

    def _local(self, turns: Sequence[Turn], anchors: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The local drafter's ids and confidences, [n, N] each."""
        drafts = [
            self.plain.draft(turn.request.rows.float(), 0, anchor, context=CONTEXT)
            for turn, anchor in zip(turns, anchors, strict=True)
        ]
        local = torch.tensor([draft.tokens for draft in drafts])
        if self.rounds == self.planted:
            local[0, 1] = (local[0, 1] + 1) % (VOCAB - 1)
        return local, torch.tensor([draft.confidences for draft in drafts])

    def _tensors(
        self,
        turns: Sequence[Turn],
        hidden: Sequence[torch.Tensor],
        positions: Sequence[torch.Tensor],
        anchors: Sequence[int],
    ) -> StepTensors:
        whole = torch.cat(list(hidden))
        ends = np.cumsum([0, *(turn.n_rows for turn in turns)])
        last_sampled = torch.zeros(SLOTS, 1, dtype=torch.int64)
        for turn, anchor in zip(turns, anchors, strict=True):
            last_sampled[turn.request.slot] = anchor
        return StepTensors(
            hidden=list(torch.split(whole, self.shape.hidden_size, dim=1)),
            positions=torch.cat(list(positions)),
            query_start_loc=torch.tensor(ends, dtype=torch.int32),
            slots=torch.tensor([turn.request.slot for turn in turns]),
            num_sampled=torch.tensor([int(turn.sampled) for turn in turns], dtype=torch.int32),
            num_rejected=torch.tensor([turn.rejected for turn in turns], dtype=torch.int32),
            last_sampled=last_sampled,
            next_prefill_tokens=torch.full((1, SLOTS), 3, dtype=torch.int32),
            row_bound=int(np.minimum([turn.n_rows for turn in turns], CONTEXT).sum()),
            wants_drafts=True,
        )
