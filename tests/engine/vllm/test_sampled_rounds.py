"""Sampled drafts through the engine's side whole: gather, round, result, broadcast; over TCP to a worker, synchronous and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.two_requests import INFO, QUERY, SLOTS, N, TwoRequests

from farspark.engine.result import PackedResult, ResultLayout, RoundOutcome
from farspark.engine.vllm.remote import Batch
from farspark.mock.drafter import mock_info
from farspark.mock.faults import Fault
from farspark.mock.relay import MockWorker
from farspark.transport import parse_endpoint
from farspark.wire.layout import SUPPORT_IDS

HOW = {
    "synchronous": {},
    "thread": {"ASYNC": "1", "ASYNC_NAP_US": "20"},
    "process": {"ASYNC": "1", "ASYNC_NAP_US": "20", "ASYNC_PROXY": "process"},
}


class Engine(TwoRequests):
    """The first request with a temperature, the second without."""

    def __init__(self, endpoint: str, stats: Path, **settings: str) -> None:
        values = {"REMOTE_TIMEOUT_MS": "5000", "SAMPLED_TOP32": "1"}
        values |= {f"REMOTE_{name}": value for name, value in settings.items()}
        super().__init__(endpoint, stats, values, slots=(2, 0), ranks=2, support=SUPPORT_IDS)

    def step(self) -> PackedResult:
        """What stands in the device's buffer once the stream has come to its end."""
        self.take_step(
            list(torch.ones(INFO.taps, 2 * QUERY, INFO.hidden_size, dtype=torch.bfloat16)),
            temperature=torch.tensor([0.0, 0.9, 0.7, 0.9]),
            seeds=torch.tensor([1, 2, -(2**63) + 3, 4]),
        )
        self.drain()
        return PackedResult(ResultLayout(SLOTS, N, SUPPORT_IDS), self.drafter._result_device.numpy())

    def counters(self) -> dict[str, int]:
        assert self.drafter.rank0 is not None
        return self.drafter.rank0.counters()


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Any] = []

    def make(how: str, fault: str | None = None) -> Engine:
        shape = mock_info(
            num_drafts=N,
            vocab_size=INFO.vocab_size,
            hidden_size=INFO.hidden_size,
            taps=INFO.taps,
            slots=SLOTS,
            context=16,
            identity=INFO.identity,
        )
        parsed = None if fault is None else Fault.parse(fault, INFO.vocab_size)
        worker = MockWorker(shape, parse_endpoint("tcp://127.0.0.1:0"), fault=parsed)
        made.append(worker.stop)
        engine = Engine(str(worker.endpoint), tmp_path / "stats.json", **HOW[how])
        made.append(engine.drafter.close)
        return engine

    yield make
    for end in reversed(made):
        end()


@pytest.mark.parametrize("how", HOW)
def test_drafts_come_with_what_they_were_drawn_from_on_every_rank(make_engine: Any, how: str) -> None:
    engine = make_engine(how)
    for count in range(1, 4):
        drafts = engine.step()
        assert engine.drafter.outcome() is RoundOutcome.OK
        assert drafts.ok[:2].tolist() == [1, 1]
        assert drafts.tokens[0].tolist() == [8, 9, 10, 11, 12]
        assert drafts.sampled[:2].tolist() == [1, 0]
        assert drafts.support_ids[0, :, 0].tolist() == drafts.tokens[0].tolist()
        assert drafts.q[0].sum(axis=-1).tolist() == [1.0] * N
        assert not drafts.q[1].any()
        assert len(engine.sent) == count
    if how == "synchronous":
        # An asynchronous one is enqueued before the round is over.
        assert torch.equal(engine.sent[-1], engine.sent[-2])
    assert {tensor.numel() for tensor in engine.sent} == {2 + SLOTS * (2 + 2 * N + 1 + 2 * N * SUPPORT_IDS)}


@pytest.mark.parametrize("how", HOW)
def test_a_request_whose_q_is_refused_has_no_drafts_and_the_other_one_has(make_engine: Any, how: str) -> None:
    engine = make_engine(how, fault="q")
    drafts = engine.step()
    assert engine.drafter.outcome() is RoundOutcome.SOME_FAILED
    assert drafts.ok[:2].tolist() == [0, 1]
    assert drafts.tokens[0].tolist() == [0] * N
    assert drafts.sampled[:2].tolist() == [0, 0]
    assert drafts.depths[:2].tolist() == [0, N]
    assert not drafts.q.any()


def test_they_are_counted(make_engine: Any) -> None:
    engine = make_engine("synchronous")
    for _ in range(3):
        engine.step()
    counters = engine.counters()
    assert (counters["rounds_sampled"], counters["sampled_requests"]) == (3, 3)
    assert "sampled_refused" not in counters


def test_a_rank_finds_them_in_its_buffer_as_the_speculator_takes_them(make_engine: Any) -> None:
    engine = make_engine("synchronous")
    engine.step()
    drafts = engine.drafter.finish(Batch([2, 0], [QUERY] * 2, None))
    assert drafts.sampled.tolist() == [True, False]
    assert drafts.support.shape == drafts.q.shape == (2, N, SUPPORT_IDS)
    assert drafts.support[0, :, 0].tolist() == drafts.tokens[0].tolist()
    assert drafts.q[0, :, 0].tolist() == [1.0] * N
