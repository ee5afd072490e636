"""Verifying fewer drafts: what the scheduler is told, what a step loses, on a runner that only notes what it was given."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farspark.engine.vllm.depths import cut, price_remote_round, verify_fewer

SLOTS = {"a": 0, "b": 1, "c": 2}
DEPTHS = {0: 2, 1: 0, 2: 5}


@dataclass
class Offered:
    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass
class Step:
    """What a scheduler hands to a runner, as far as drafts are concerned."""

    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    has_structured_output_requests: bool = False
    total_num_scheduled_tokens: int = 0
    num_invalid_spec_tokens: dict[str, int] | None = None

    def __post_init__(self) -> None:
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())


@dataclass
class Runner:
    executed: list[Any] = field(default_factory=list)
    offered: Offered | None = None
    req_states: Any = field(default_factory=lambda: SimpleNamespace(req_id_to_index=dict(SLOTS)))

    def execute_model(self, scheduler_output: Any, rest: Any = None, dummy_run: bool = False) -> str:
        self.executed.append((scheduler_output, rest, dummy_run))
        return "done"

    def take_draft_token_ids(self) -> Offered | None:
        return self.offered


def remote(rank: int = 0) -> Any:
    return SimpleNamespace(depth_of=DEPTHS.__getitem__, rank0=object() if rank == 0 else None)


def step(**how: Any) -> Step:
    return Step({"a": 6, "b": 6, "c": 6, "d": 9}, {"a": [-1] * 5, "b": [-1] * 5, "c": [-1] * 5}, **how)


def test_the_scheduler_is_offered_no_more_drafts_than_are_worth_it() -> None:
    runner = Runner(offered=Offered(["b", "a", "gone"], [[7, 8, 9], [-1] * 5, [-1] * 5]))
    verify_fewer(runner, remote(), is_async=False)
    assert runner.take_draft_token_ids() == Offered(["b", "a", "gone"], [[], [-1, -1], [-1] * 5])
    runner.offered = None
    assert runner.take_draft_token_ids() is None
    runner.execute_model(step())
    assert runner.executed[0][0] == step()


def test_only_rank_0_is_heard_by_the_scheduler() -> None:
    runner = Runner(offered=Offered(["a"], [[-1] * 5]))
    verify_fewer(runner, remote(rank=1), is_async=False)
    assert runner.take_draft_token_ids() == Offered(["a"], [[-1] * 5])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_was_scheduled_ahead_is_executed_without_the_rest(rank: int) -> None:
    runner, scheduled = Runner(offered=Offered(["a"], [[-1] * 5])), step()
    verify_fewer(runner, remote(rank), is_async=True)
    assert runner.execute_model(scheduled, "rest") == "done"
    executed, rest, dummy_run = runner.executed[0]
    assert (rest, dummy_run) == ("rest", False)
    assert executed.scheduled_spec_decode_tokens == {"a": [-1, -1], "c": [-1] * 5}
    assert executed.num_scheduled_tokens == {"a": 3, "b": 1, "c": 6, "d": 9}
    assert executed.total_num_scheduled_tokens == 19
    # The scheduler counts what it scheduled less what was accepted as rejected, from its own object.
    assert scheduled == step(num_invalid_spec_tokens={"a": 3, "b": 5})
    assert runner.take_draft_token_ids() == Offered(["a"], [[-1] * 5])


def test_a_dummy_run_is_executed_as_it_is() -> None:
    runner, scheduled = Runner(), step()
    verify_fewer(runner, remote(), is_async=True)
    runner.execute_model(scheduled, dummy_run=True)
    assert runner.executed[0][0] is scheduled


def test_a_step_with_structured_outputs_stays_whole() -> None:
    scheduled = step(has_structured_output_requests=True)
    assert cut(scheduled, SLOTS, DEPTHS.__getitem__) is scheduled


def test_a_step_of_which_nothing_is_cut_is_the_same_object() -> None:
    scheduled = Step({"c": 6, "new": 6}, {"c": [-1] * 5, "new": [-1] * 5})
    assert cut(scheduled, SLOTS, DEPTHS.__getitem__) is scheduled
    without = Step({"a": 1}, {})
    assert cut(without, SLOTS, DEPTHS.__getitem__) is without


def test_a_step_may_be_left_without_any_draft() -> None:
    less = cut(Step({"b": 6}, {"b": [-1] * 5}), SLOTS, DEPTHS.__getitem__)
    assert (less.scheduled_spec_decode_tokens, less.num_scheduled_tokens) == ({}, {"b": 1})
    assert less.total_num_scheduled_tokens == 1


def test_adaptive_verification_is_given_the_cost_of_a_remote_round() -> None:
    tables = (np.array([0.1, 0.2, 0.3]), np.array([5.0, 6.0]))
    manager = SimpleNamespace(cost_tables=copy.deepcopy(tables))
    price_remote_round(manager, 2.5)
    assert manager.cost_tables[0].tolist() == [2.5, 2.5, 2.5]
    assert manager.cost_tables[1].tolist() == [5, 6]
