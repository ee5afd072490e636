"""What adaptive verification does in a real runner: what it is given, and how many drafts of each request it admits."""

from __future__ import annotations

from typing import Any

import numpy as np


class BudgetRecorder:
    """Every step with drafts: how many of each request were scheduled and admitted; and the confidences that came of each step.

    Requests go by their index in the phase. `given`: by "index position", drafts and confidences that stand in for those of the
    speculator, so that two engines verify the same.
    """

    def __init__(self, runner: Any) -> None:
        self.step = 0
        self.budgets: list[dict[str, Any]] = []
        self.confidences: list[dict[str, Any]] = []
        self.given: dict[str, dict[str, Any]] = {}
        self._speculator = runner.speculator
        manager = runner.adaptive_verification
        reallocate, record, propose = manager.reallocate_drafts, manager.record_confidences, self._speculator.propose

        def recording_reallocate(req_ids: list[str], idx_mapping: Any) -> Any:
            scheduled, _, budget = manager._batch_budget
            found = reallocate(req_ids, idx_mapping)
            admitted = found[0].diff() - manager.num_bonus_tokens
            self.budgets.append(
                {
                    "step": self.step,
                    "budget": budget,
                    "scheduled": {index_of(req_id): scheduled[req_id] for req_id in req_ids},
                    "admitted": {index_of(req_id): int(n) for req_id, n in zip(req_ids, admitted, strict=True)},
                    "tokens": int(found[1][len(req_ids)]),
                }
            )
            return found

        def recording_confidences(confidences: Any, input_batch: Any) -> None:
            record(confidences, input_batch)
            rows = {index_of(req_id): confidences[row].tolist() for row, req_id in enumerate(input_batch.req_ids)}
            self.confidences.append({"step": self.step, "requests": rows})

        def giving_propose(input_batch: Any, *rest: Any, **more: Any) -> Any:
            drafts = propose(input_batch, *rest, **more)
            for row, place in enumerate(places(input_batch, rest[4], rest[5])):
                one = None if place is None else self.given.get(f"{index_of(place[0])} {place[1]}")
                if one is not None:
                    drafts[row] = drafts.new_tensor(one["drafts"])
                    confidences = self._speculator.draft_token_confidence_probs
                    confidences[row] = confidences.new_tensor(one["confidences"])
            return drafts

        manager.reallocate_drafts = recording_reallocate
        manager.record_confidences = recording_confidences
        self._speculator.propose = giving_propose

    def begin(self, given: dict[str, dict[str, Any]]) -> None:
        self.budgets, self.confidences, self.given = [], [], given


class BudgetExtension:
    """What vLLM mixes into the worker class (`worker_extension_cls`), to record in each rank's process."""

    model_runner: Any

    def begin_budgets(self, costs: dict[str, Any]) -> None:
        set_costs(self.model_runner.adaptive_verification, **costs)
        self._budgets = BudgetRecorder(self.model_runner)

    def take_budgets(self) -> list[dict[str, Any]]:
        return self._budgets.budgets


def places(input_batch: Any, num_sampled: Any, num_rejected: Any) -> list[tuple[str, int] | None]:
    """The request and the anchor's position of each row; None for a row that sampled nothing.

    From the device's own query lengths: where adaptive verification trims, the host's are upper bounds.
    """
    starts = input_batch.query_start_loc[: len(input_batch.req_ids) + 1].tolist()
    return [
        (
            request_of(req_id),
            int(input_batch.positions[starts[row]]) + starts[row + 1] - starts[row] - int(num_rejected[row]),
        )
        if int(num_sampled[row])
        else None
        for row, req_id in enumerate(input_batch.req_ids)
    ]


def request_of(req_id: str) -> str:
    """vLLM appends a random part to the id that it was given."""
    return req_id.rsplit("-", 1)[0] if req_id.count("-") > 1 else req_id


def index_of(req_id: str) -> str:
    return request_of(req_id).rpartition("-")[2]


def set_costs(manager: Any, verify_ms: list[tuple[int, float]], draft_ms: float | None) -> None:
    """Prices in place of those that were measured at start; without `draft_ms` a draft's stays."""
    if draft_ms is None:
        draft_ms = float(manager.cost_tables[0][-1])
    manager.set_cost_curves([(1, draft_ms)], verify_ms)


def tables(manager: Any) -> dict[str, list[float]]:
    draft, verify = manager.cost_tables
    return {"draft_ms": np.asarray(draft).tolist(), "verify_ms": np.asarray(verify).tolist()}
