"""Depths around the remote drafter: every rank decides from what was broadcast, and the statistics say what was verified."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.vllm.test_remote import NOBODY, SHAPE, SLOTS, N, batch, fail_with, step

from farspark.engine.config import read_config
from farspark.engine.result import RoundOutcome
from farspark.engine.vllm.depths import worth_verifying
from farspark.engine.vllm.remote import Admissions, RemoteDrafter, TpGroup, verification
from farspark.errors import ConfigError

COSTS = {"REMOTE_DRAFT_MS": "1", "REMOTE_ROUND_MS": "8,8,8,8"}


class Ranks:
    """TP ranks in one process: what rank 0 broadcasts is what the others receive."""

    def __init__(self, folder: Path, size: int, policy: str, caps: list[int] | None = None, **settings: str) -> None:
        environ = {
            "VLLM_DSPARK_REMOTE": NOBODY,
            "VLLM_DSPARK_REMOTE_IDENTITY": "11" * 32,
            "VLLM_DSPARK_REMOTE_POLICY": policy,
            "VLLM_DSPARK_REMOTE_STATS_FILE": str(folder / "stats.json"),
        } | {f"VLLM_DSPARK_{name}": value for name, value in settings.items()}
        config = read_config(environ)
        assert config is not None
        self.sent = torch.zeros(0)
        self.admissions = Admissions()
        for slot in range(SLOTS):
            self.admissions.admit(slot, f"request-{slot}")

        def send(tensor: torch.Tensor) -> None:
            self.sent = tensor.clone()

        def receive(tensor: torch.Tensor) -> None:
            tensor.copy_(self.sent)

        self.drafters = [
            RemoteDrafter(
                config,
                SHAPE,
                max_tokens=32,
                device=torch.device("cpu"),
                tp=TpGroup(rank, size, receive if rank else send),
                admissions=self.admissions,
                engine="test",
                facts={},
                caps=caps,
            )
            for rank in range(size)
        ]
        for drafter in self.drafters:
            drafter.start_serving()

    def answer(self, confidences: list[list[float] | None]) -> None:
        """What the worker says from here on, request by request; None: it failed that one."""
        rank0 = self.drafters[0].rank0
        assert rank0 is not None

        def run(step: Any, result: Any, deliver: Any = None) -> RoundOutcome:
            result.clear(RoundOutcome.OK, len(step.requests))
            for row, known in enumerate(confidences):
                if known is not None:
                    result.ok[row] = 1
                    result.tokens[row] = 7
                    result.confidences[row] = known
            rank0.round._choose_depths(result, len(step.requests), N)
            return RoundOutcome.OK

        rank0.round.run = run  # type: ignore[method-assign]

    def step(self) -> list[list[int]]:
        """The depths of slots 0 and 1 as each rank decides them."""
        for drafter in self.drafters:
            drafter.begin(step())
            assert drafter.finish(batch()).tokens.min() >= 0
        return [[drafter.depth_of(slot) for slot in (0, 1)] for drafter in self.drafters]

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()


@pytest.fixture
def make_ranks(tmp_path: Path) -> Any:
    made: list[Ranks] = []

    def make(*arguments: Any, **settings: Any) -> Ranks:
        made.append(Ranks(tmp_path, *arguments, **settings))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def test_TP_AGREE_every_rank_verifies_what_rank_0_decided(make_ranks: Any) -> None:
    ranks = make_ranks(3, "capacity", DEPTH_POLICY="confb", **COSTS)
    ranks.answer([[1, 0.5, 0], [0.5, 0.5, 0.5]])
    assert ranks.step() == [[2, 3]] * 3
    ranks.answer([None, [1, 1, 0]])
    assert ranks.step() == [[0, 2]] * 3


@pytest.mark.parametrize(
    ("policy", "depth", "expected"),
    [("capacity", "off", 0), ("capacity", "fixed:2", 0), ("resilience", "off", N), ("resilience", "fixed:2", 2)],
)
def test_what_the_worker_failed_is_verified_only_where_a_local_draft_stands_in(
    policy: str, depth: str, expected: int, make_ranks: Any
) -> None:
    ranks = make_ranks(2, policy, DEPTH_POLICY=depth)
    # Nobody listens.
    assert ranks.step() == [[expected] * 2] * 2
    ranks.answer([[1, 1, 1], None])
    assert ranks.step() == [[N if depth == "off" else 2, expected]] * 2


@pytest.mark.parametrize(("policy", "expected"), [("capacity", 0), ("resilience", N)])
def test_after_an_internal_error_capacity_verifies_nothing(policy: str, expected: int, make_ranks: Any) -> None:
    ranks = make_ranks(2, policy)
    ranks.answer([[1, 1, 1]] * 2)
    assert ranks.step() == [[N, N]] * 2
    ranks.drafters[0].rank0.round.run = fail_with(RuntimeError("planted"))
    assert ranks.step() == [[expected] * 2] * 2


def test_SLOT_BEGIN_a_depth_belongs_to_a_request_not_to_its_slot(make_ranks: Any) -> None:
    ranks = make_ranks(2, "capacity", DEPTH_POLICY="fixed:1")
    ranks.answer([[1, 1, 1]] * 2)
    assert ranks.step() == [[1, 1]] * 2
    ranks.admissions.admit(1, "another")
    assert [drafter.depth_of(1) for drafter in ranks.drafters] == [N, N]
    assert [drafter.depth_of(3) for drafter in ranks.drafters] == [N, N]
    assert [drafter.depth_of(0) for drafter in ranks.drafters] == [1, 1]


def test_a_request_that_sits_out_a_round_keeps_its_depth(make_ranks: Any) -> None:
    ranks = make_ranks(1, "capacity", DEPTH_POLICY="confb", **COSTS)
    ranks.answer([[1, 0, 0], [1, 1, 0]])
    assert ranks.step() == [[1, 2]]
    drafter = ranks.drafters[0]
    ranks.answer([[1, 1, 1]])
    drafter.begin(step(n=1))
    drafter.finish(batch(n=1))
    assert [drafter.depth_of(slot) for slot in (0, 1)] == [3, 2]


def test_a_table_that_does_not_fit_the_drafts_refuses_the_start(make_ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"^VLLM_DSPARK_REMOTE_ROUND_MS=8,8: 2 values, but the engine drafts 3"):
        make_ranks(1, "capacity", DEPTH_POLICY="conf", REMOTE_DRAFT_MS="1", REMOTE_ROUND_MS="8,8")


def test_shadow_changes_no_schedule_and_says_that_the_policy_has_no_effect(
    make_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ranks = make_ranks(1, "shadow", caps=[0, 3, 1], DEPTH_POLICY="conf")
    assert "VLLM_DSPARK_DEPTH_POLICY=conf has no effect in shadow" in caplog.text
    ranks.answer([[1, 0, 0], None])
    assert ranks.step() == [[N, N]]
    snapshot = ranks.drafters[0].snapshot()
    assert (snapshot["n_out_by_reqs"], snapshot["n_out_reason"]) == (None, "shadow compares every position")
    assert snapshot["depth"]["policy"] == "off"


def test_the_positions_to_ask_for_and_the_reason_are_logged_and_in_the_statistics(
    make_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ranks = make_ranks(1, "capacity", caps=[0, 3, 3, 2, 2], DEPTH_POLICY="conf", **COSTS)
    snapshot = ranks.drafters[0].snapshot()
    assert snapshot["n_out_by_reqs"] == [0, 3, 3, 2, 2]
    assert "schedule's cap" in snapshot["n_out_reason"]
    assert "positions to draft by number of requests: [0, 3, 3, 2, 2]; conf verifies nothing past" in caplog.text
    assert snapshot["depth"]["ms_by_depth"] == [9, 9, 9, 9]


def test_METRICS_nothing_is_divided_by_zero(make_ranks: Any) -> None:
    snapshot = make_ranks(1, "capacity").drafters[0].snapshot()
    assert snapshot["drafted_tokens"] == snapshot["accepted_drafts"] == 0
    assert snapshot["acceptance_rate"] is None
    assert snapshot["bytes_per_accepted_token"] is None
    counters = {"drafted_tokens": 20, "accepted_drafts": 5, "bytes_sent": 900, "bytes_received": 100}
    assert verification(counters) == {
        "drafted_tokens": 20,
        "accepted_drafts": 5,
        "acceptance_rate": 0.25,
        "bytes_per_accepted_token": 200,
    }
    assert verification({"drafted_tokens": 4})["acceptance_rate"] == 0


def test_the_depths_of_a_round_are_on_the_device_for_adaptive_verification(make_ranks: Any) -> None:
    ranks = make_ranks(2, "capacity", DEPTH_POLICY="fixed:2")
    ranks.answer([[1, 1, 1], None])
    for drafter in ranks.drafters:
        drafter.begin(step())
        remote = drafter.finish(batch())
        assert np.array_equal(remote.depths, [2, 0])
        assert worth_verifying(remote).tolist() == [[1, 1, 0], [0, 0, 0]]
        # The round's own confidences stay whole, for the comparison and the capture.
        assert remote.confidences.tolist() == [[1, 1, 1], [0, 0, 0]]
