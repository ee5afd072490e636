"""Loaded into every worker of a pipeline under test (vLLM's `worker_extension_cls`): records the drafts of the last stage, and
puts others into their place, or spoils those of the first stage, as the plan in PP_TEST_PLAN says.

A plan is a JSON file: `tokens`, for each request its prompt and its known continuation; `keep`, the part of the injected drafts
that stays right (none are injected without it); `zero_first_stage`; `records`, how the names of the
requests begin whose steps are recorded, and wait for the device therefore (all, without it).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
from pathlib import Path
from typing import Any

PLAN = "PP_TEST_PLAN"
VOCAB = 500

_plan: dict[str, Any] = json.loads(Path(os.environ[PLAN]).read_text()) if os.environ.get(PLAN) else {}
_drafts: list[tuple[str, int, list[int]]] = []
_profile: Any = None


class PpExtension:
    """Its methods become the worker's, for `collective_rpc`."""

    def pp_drafts(self) -> list[tuple[str, int, list[int]]]:
        """Request, anchor position and draft ids, in order; empty on all stages but the last."""
        return _drafts

    def pp_history(self) -> str:
        handler = self.model_runner.pp_handler  # type: ignore[attr-defined]
        return type(handler).__name__ + "\n" + str(getattr(getattr(handler, "transport", None), "history", ""))

    def pp_begin_trace(self) -> None:
        import torch

        global _profile
        _profile = torch.profiler.profile()
        _profile.start()

    def pp_end_trace(self, stem: str) -> str:
        """The file, a Chrome trace."""
        path = f"{stem}-{self.rank}.json.gz"  # type: ignore[attr-defined]
        _profile.stop()
        _profile.export_chrome_trace(path)
        return path

    def pp_send_a_stale_header(self) -> int:
        """The step, soon, whose header the last stage sends with the number of the step before; 0 on the other stages."""
        handler = self.model_runner.pp_handler  # type: ignore[attr-defined]
        if not handler.is_last_rank:
            return 0
        transport = handler.transport
        stale_at: int = transport._order.sequence + 6

        def outgoing(header: Any) -> Any:
            return dataclasses.replace(header, sequence=stale_at - 1) if header.sequence == stale_at else header

        transport._outgoing = outgoing
        return stale_at


def planned_drafts(request: str, position: int, num_drafts: int) -> list[int]:
    """What `_plan` proposes after the anchor at `position`: the continuation, wrong at random places."""
    known = _plan["tokens"][request]
    rng = random.Random(f"{request} {position}")
    drafts = [known[at] if at < len(known) else 7 for at in range(position + 1, position + 1 + num_drafts)]
    return [token if rng.random() < _plan["keep"] else (token + 1) % VOCAB for token in drafts]


def _wrap_propose(speculator_class: Any) -> None:
    propose = speculator_class.propose

    @functools.wraps(propose)
    def recorded(self: Any, input_batch: Any, *rest: Any, dummy_run: bool = False, **more: Any) -> Any:
        import torch

        drafts = propose(self, input_batch, *rest, dummy_run=dummy_run, **more)
        if dummy_run or any(
            name.startswith("_") or not name.startswith(_plan.get("records", "")) for name in input_batch.req_ids
        ):
            return drafts
        if more.get("num_speculative_tokens") == 0:
            return (
                drafts  # no request of the step can use drafts: vLLM 0.33.0 makes none, and these are an earlier step's
            )
        num_sampled, num_rejected = rest[4], rest[5]
        starts = input_batch.positions[input_batch.query_start_loc[: input_batch.num_reqs].long()]
        for row, req_id in enumerate(input_batch.req_ids):
            if int(num_sampled[row]) == 0:
                continue
            # vLLM appends a random part to the id that it was given.
            request = "-".join(req_id.split("-")[:2])
            position = int(starts[row]) + int(input_batch.num_scheduled_tokens[row]) - int(num_rejected[row])
            _drafts.append((request, position, drafts[row].tolist()))
            if "keep" in _plan:
                drafts[row] = torch.tensor(planned_drafts(request, position, drafts.shape[1]))
        return drafts

    speculator_class.propose = recorded


def _install() -> None:
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    _wrap_propose(DSparkSpeculator)
    if os.environ.get("VLLM_DSPARK_REMOTE"):
        from farspark.engine.vllm.speculator import CapacitySpeculator

        _wrap_propose(CapacitySpeculator)
    if _plan.get("zero_first_stage"):
        _zero_first_stage()


def _zero_first_stage() -> None:
    from vllm.distributed.parallel_state import get_pp_group

    from farspark.engine.vllm.pp.stage import StageHandler

    take = StageHandler.get_prev_sampled_outputs

    def take_zeroed(self: Any, draft_table: Any = None) -> Any:
        outputs = take(self, draft_table)
        if get_pp_group().is_first_rank and draft_table is not None:
            draft_table.zero_()
        return outputs

    StageHandler.get_prev_sampled_outputs = take_zeroed  # type: ignore[method-assign]


_install()
