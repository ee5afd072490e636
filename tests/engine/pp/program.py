"""A random engine program that every rank works out alike from its seed: chunked prefill, decoding, empty steps, aborts, ends."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

MAX_REQS = 6
NUM_DRAFTS = 5
VOCAB = 1 << 40  # tokens are int64 all the way


@dataclass
class Request:
    slot: int
    prompt: int
    end: int  # total length at which it is finished
    computed: int = 0
    eligible_at: int = 0


@dataclass
class Batch:
    """The fields of vLLM's InputBatch that the handler reads."""

    idx_mapping_np: npt.NDArray[np.int64]
    num_computed_tokens_np: npt.NDArray[np.int32]
    num_scheduled_tokens: npt.NDArray[np.int32]
    prefill_len_np: npt.NDArray[np.int32]
    idx_mapping: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.idx_mapping = torch.from_numpy(self.idx_mapping_np)

    @property
    def num_reqs(self) -> int:
        return len(self.idx_mapping_np)


@dataclass
class Step:
    freed: list[int]
    batch: Batch | None  # None: nothing is scheduled, nothing is exchanged


def need_mask(batch: Any) -> npt.NDArray[np.bool_] | None:
    """Rows that sample; None where there is none, as vLLM says it."""
    need: npt.NDArray[np.bool_] = batch.num_computed_tokens_np + batch.num_scheduled_tokens >= batch.prefill_len_np
    return need if need.any() else None


class Program:
    def __init__(self, seed: int, depth: int) -> None:
        self._random = random.Random(seed)
        self._depth = depth
        self._live: list[Request] = []
        self._free = list(range(MAX_REQS))
        self._step = 0

    def next(self) -> Step:
        rng = self._random
        self._step += 1
        freed = [one for one in self._live if one.computed >= one.end or rng.random() < 0.01]
        for request in freed:
            self._live.remove(request)
            self._free.append(request.slot)  # reused at once, last in first out
        while self._free and rng.random() < 0.4:
            prompt = rng.randrange(1, 60)
            self._live.append(Request(self._free.pop(), prompt, prompt + rng.randrange(1, 40)))
        rows = [one for one in self._live if one.eligible_at <= self._step and rng.random() < 0.9]
        if not rows or rng.random() < 0.05:
            return Step([one.slot for one in freed], None)
        rng.shuffle(rows)
        scheduled = []
        for one in rows:
            left = one.prompt - one.computed
            scheduled.append(min(left, rng.randrange(1, 24)) if left > 0 else NUM_DRAFTS + 1)
        batch = Batch(
            np.array([one.slot for one in rows], dtype=np.int64),
            np.array([one.computed for one in rows], dtype=np.int32),
            np.array(scheduled, dtype=np.int32),
            np.array([one.prompt for one in rows], dtype=np.int32),
        )
        for one, tokens in zip(rows, scheduled, strict=True):
            decodes = one.computed + tokens >= one.prompt
            one.computed += rng.randrange(1, tokens + 1) if one.computed >= one.prompt else tokens
            if decodes:
                one.eligible_at = self._step + self._depth
        return Step([one.slot for one in freed], batch)


def sampled(step: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the last stage samples and drafts in `step`: tokens [n, 1 or N + 1], counts [n] each, drafts [n, N]."""
    n = batch.num_reqs
    width = NUM_DRAFTS + 1 if step % 3 else 1
    base = (step * 1_000_003 + batch.idx_mapping * 7919)[:, None] % VOCAB
    tokens = base + torch.arange(width)
    drafts = -base - torch.arange(NUM_DRAFTS) - 2
    num_sampled = ((batch.idx_mapping + step) % width + 1).to(torch.int32)
    return tokens, num_sampled, (width - num_sampled).to(torch.int32), drafts.expand(n, -1).contiguous()
