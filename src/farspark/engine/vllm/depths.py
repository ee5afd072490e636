"""Verifying fewer drafts than vLLM would: what is not worth it is not scheduled.

Where vLLM schedules a step after the one before it is over, the runner tells the scheduler how many drafts each request has,
and is made to tell fewer. Where it schedules ahead (asynchronous scheduling) it counts on all of them; there the runner
executes the step without the rest, which the scheduler then takes for rejected. Neither touches a draft id: vLLM's lists
hold placeholders, the ids stay on the device.

Imports nothing of vLLM.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from farspark.engine.vllm.remote import RemoteDrafter, RemoteDrafts

DepthOf = Callable[[int], int]  # slot -> drafts to verify


def verify_fewer(runner: Any, remote: RemoteDrafter, *, is_async: bool) -> None:
    """Make `runner` verify `remote.depth_of` drafts of each request."""
    if is_async:
        _execute_less(runner, remote.depth_of)
    elif remote.rank0 is not None:
        # The scheduler hears rank 0.
        _offer_fewer(runner, remote.depth_of)


def _offer_fewer(runner: Any, depth_of: DepthOf) -> None:
    take = runner.take_draft_token_ids

    @functools.wraps(take)
    def take_draft_token_ids() -> Any:
        offered = take()
        if offered is None:
            return None
        slots = runner.req_states.req_id_to_index
        lists = [
            ids[: depth_of(slots[req_id])] if req_id in slots else ids
            for req_id, ids in zip(offered.req_ids, offered.draft_token_ids, strict=True)
        ]
        return type(offered)(offered.req_ids, lists)

    runner.take_draft_token_ids = take_draft_token_ids


def _execute_less(runner: Any, depth_of: DepthOf) -> None:
    execute = runner.execute_model

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *rest: Any, dummy_run: bool = False, **more: Any) -> Any:
        if not dummy_run:
            scheduler_output = cut(scheduler_output, runner.req_states.req_id_to_index, depth_of)
        return execute(scheduler_output, *rest, dummy_run=dummy_run, **more)

    runner.execute_model = execute_model


def cut(scheduler_output: Any, slots: Mapping[str, int], depth_of: DepthOf) -> Any:
    """A step with no more drafts than are worth verifying. `scheduler_output` may be the scheduler's own and stays as it is,
    but for the field by which vLLM leaves drafts out of its count of drafted tokens; it is read where both share a process.

    A step with structured outputs stays whole: the rows of its grammar bitmask are laid out for the drafts as scheduled.
    """
    scheduled = scheduler_output.scheduled_spec_decode_tokens
    if not scheduled or scheduler_output.has_structured_output_requests:
        return scheduler_output
    kept = {req_id: ids[: depth_of(slots[req_id])] if req_id in slots else ids for req_id, ids in scheduled.items()}
    dropped = {req_id: len(ids) - len(kept[req_id]) for req_id, ids in scheduled.items()}
    if not any(dropped.values()):
        return scheduler_output
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    scheduler_output.num_invalid_spec_tokens = invalid | {req_id: n for req_id, n in dropped.items() if n}
    less = copy.copy(scheduler_output)
    # A request without drafts is not in it.
    less.scheduled_spec_decode_tokens = {req_id: ids for req_id, ids in kept.items() if ids}
    less.num_scheduled_tokens = {
        req_id: tokens - dropped.get(req_id, 0) for req_id, tokens in scheduler_output.num_scheduled_tokens.items()
    }
    less.total_num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens - sum(dropped.values())
    return less


def worth_verifying(remote: RemoteDrafts) -> torch.Tensor:
    """[n, N]: the worker's confidences, 0 from each row's depth on, so that adaptive verification spends nothing there."""
    positions = torch.arange(remote.confidences.shape[1], device=remote.confidences.device)
    return remote.confidences.masked_fill(positions >= remote.depths[:, None], 0.0)


def price_remote_round(manager: Any, draft_ms: float) -> None:
    """Adaptive verification measured a draft at start, when no worker was asked; here is what one costs."""
    draft_table, verify_table = manager.cost_tables
    manager.cost_tables = (draft_table * 0 + draft_ms, verify_table)
