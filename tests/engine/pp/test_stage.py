"""What vLLM's runner calls in each step, over a transport that only notes what it is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from tests.engine.pp.program import MAX_REQS, NUM_DRAFTS, Batch, need_mask, sampled

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.stage import StageHandler

BATCH = Batch(
    np.array([4, 1]), np.array([10, 0]), np.array([6, 8]), np.array([10, 60])
)  # one decodes, one is in its prompt
TABLE = torch.zeros(MAX_REQS, NUM_DRAFTS, dtype=torch.int64)


class Notes:
    """In the place of a TokenTransport."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.calls.append(name)


def stage(*, is_last: bool) -> tuple[StageHandler, list[str]]:
    handler, notes = StageHandler(), Notes()
    handler.set_up(notes, is_last=is_last, depth=2, max_num_reqs=MAX_REQS, need_mask=need_mask)  # type: ignore[arg-type]
    return handler, notes.calls


def step(handler: StageHandler) -> Any:
    """A step as the runner makes it; what it used of an earlier one."""
    outputs = handler.get_prev_sampled_outputs(TABLE)
    if handler.is_last_rank:
        tokens, num_sampled, num_rejected, _ = sampled(1, BATCH)
        handler.broadcast(tokens, num_sampled, num_rejected, BATCH)
        handler.broadcast_drafts()
        handler.finish_step(TABLE)
    else:
        handler.receive(BATCH)
    return outputs


@pytest.mark.parametrize("is_last", [False, True])
def test_warm_up_exchanges_nothing_and_leaves_nothing_for_the_first_step(is_last: bool) -> None:
    handler, calls = stage(is_last=is_last)
    for _ in range(3):
        assert step(handler) is None
    assert calls == []
    handler.start_exchange()
    assert calls == ["rehearse"]  # what a step runs on the device, without a message
    assert step(handler) is None
    assert calls[1:] == (["send_sampled", "send_drafts"] if is_last else ["receive"])


def test_a_batch_is_not_sampled_inside_another_step() -> None:
    handler, _ = stage(is_last=True)
    handler.start_exchange()
    tokens, num_sampled, num_rejected, _ = sampled(1, BATCH)
    handler.broadcast(tokens, num_sampled, num_rejected, BATCH)
    with pytest.raises(TokenTransportError, match="before the first one's drafts were sent"):
        handler.broadcast(tokens, num_sampled, num_rejected, BATCH)
