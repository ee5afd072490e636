"""The remote drafter around a real round and a real client, over a worker in memory: ranks, failures, comparison."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from farspark.engine.capture import CaptureReader
from farspark.engine.config import EngineConfig, OnFail, read_config
from farspark.engine.gather.torch_gather import StepTensors
from farspark.engine.result import RoundOutcome
from farspark.engine.shape import ModelShape
from farspark.engine.vllm.remote import Admissions, Batch, RemoteDrafter, RemoteDrafts, RoundFailedError, TpGroup
from farspark.errors import ConfigError

N, SLOTS, TAPS, HIDDEN = 3, 4, 2, 4
SHAPE = ModelShape(
    num_drafts=N, vocab_size=100, hidden_size=HIDDEN, taps=TAPS, slots=SLOTS, context=16, ring=16, max_position=64
)
# Nothing listens there, and connecting to it is refused at once.
NOBODY = "tcp://127.0.0.1:1"


def config(tmp_path: Path, **settings: str) -> EngineConfig:
    environ = {
        "VLLM_DSPARK_REMOTE": NOBODY,
        "VLLM_DSPARK_REMOTE_IDENTITY": "11" * 32,
        "VLLM_DSPARK_REMOTE_POLICY": "capacity",
        "VLLM_DSPARK_REMOTE_STATS_FILE": str(tmp_path / "stats.json"),
    } | {f"VLLM_DSPARK_REMOTE_{name}": value for name, value in settings.items()}
    found = read_config(environ)
    assert found is not None
    return found


def step(n: int = 2, query: int = 3, hidden: int = HIDDEN) -> StepTensors:
    tokens = n * query
    return StepTensors(
        hidden=[torch.ones(tokens, hidden, dtype=torch.bfloat16) for _ in range(TAPS)],
        positions=torch.arange(query).repeat(n),
        query_start_loc=torch.arange(n + 1, dtype=torch.int32) * query,
        slots=torch.arange(n),
        num_sampled=torch.ones(n, dtype=torch.int32),
        num_rejected=torch.zeros(n, dtype=torch.int32),
        last_sampled=torch.full((SLOTS, 1), 7),
        next_prefill_tokens=torch.zeros(1, SLOTS, dtype=torch.int32),
        row_bound=tokens,
        wants_drafts=True,
    )


def batch(n: int = 2, query: int = 3) -> Batch:
    return Batch(list(range(n)), [query] * n, None)


class Ranks:
    """TP ranks in one process: what rank 0 broadcasts is what the others receive, in order."""

    def __init__(self, tmp_path: Path, size: int, **settings: str) -> None:
        self.sent: list[torch.Tensor] = []
        self.taken = [0] * size
        self.drafters = [self._rank(tmp_path, rank, size, settings) for rank in range(size)]

    def _rank(self, tmp_path: Path, rank: int, size: int, settings: dict[str, str]) -> RemoteDrafter:
        def broadcast(tensor: torch.Tensor) -> None:
            if rank == 0:
                self.sent.append(tensor.clone())
            else:
                tensor.copy_(self.sent[self.taken[rank]])
            self.taken[rank] += 1

        admissions = Admissions()
        for slot in range(SLOTS):
            admissions.admit(slot, f"request-{slot}")
        drafter = RemoteDrafter(
            config(tmp_path, **settings),
            SHAPE,
            max_tokens=32,
            device=torch.device("cpu"),
            tp=TpGroup(rank, size, broadcast),
            admissions=admissions,
            engine="test",
            facts={},
        )
        drafter.start_serving()
        return drafter

    def step(self, **how: Any) -> list[RemoteDrafts]:
        results = []
        for drafter in self.drafters:
            drafter.begin(step(**how))
            results.append(drafter.finish(batch()))
        return results

    def close(self) -> None:
        for drafter in self.drafters:
            drafter.close()


@pytest.fixture
def make_ranks(tmp_path: Path) -> Any:
    made: list[Ranks] = []

    def make(size: int = 1, **settings: str) -> Ranks:
        made.append(Ranks(tmp_path, size, **settings))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def answer_with(drafter: RemoteDrafter, tokens: list[list[int]]) -> None:
    """A round whose worker answers `tokens` [n][N] for everybody."""
    assert drafter.rank0 is not None

    def run(step: Any, result: Any, deliver: Any = None) -> RoundOutcome:
        result.clear(RoundOutcome.OK, len(step.requests))
        for row, drafts in enumerate(tokens):
            result.ok[row] = 1
            result.tokens[row] = drafts
            result.confidences[row] = 0.5
        return RoundOutcome.OK

    drafter.rank0.round.run = run  # type: ignore[method-assign]


def fail_with(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any) -> Any:
        raise error

    return fail


def test_only_rank_0_has_a_connection_and_buffers(make_ranks: Any) -> None:
    ranks = make_ranks(3)
    assert [drafter.rank0 is not None for drafter in ranks.drafters] == [True, False, False]


def test_every_rank_gets_the_drafts_of_rank_0(make_ranks: Any) -> None:
    ranks = make_ranks(2)
    answer_with(ranks.drafters[0], [[1, 2, 3], [4, 5, 6]])
    for tokens, confidences, *_ in ranks.step():
        assert tokens.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert confidences.tolist() == [[0.5] * 3] * 2


def break_round(drafter: RemoteDrafter) -> None:
    drafter.rank0.round.run = fail_with(RuntimeError("planted"))  # type: ignore[union-attr,method-assign]


def break_gather(drafter: RemoteDrafter) -> None:
    drafter.rank0.gather.run = fail_with(RuntimeError("planted"))  # type: ignore[union-attr,method-assign]


def break_wait(drafter: RemoteDrafter) -> None:
    drafter.rank0.gather.wait = fail_with(RuntimeError("planted"))  # type: ignore[union-attr,method-assign]


def break_report(drafter: RemoteDrafter) -> None:
    drafter.snapshot = fail_with(RuntimeError("planted"))  # type: ignore[method-assign]


def break_admissions(drafter: RemoteDrafter) -> None:
    drafter._admissions = Admissions()


@pytest.mark.parametrize("plant", [break_round, break_gather, break_wait, break_report, break_admissions])
def test_tp_agree_an_exception_on_rank_0_still_broadcasts_once_per_step_and_the_engine_lives(
    plant: Callable[[RemoteDrafter], None], make_ranks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = make_ranks(2)
    answer_with(ranks.drafters[0], [[1, 2, 3], [4, 5, 6]])
    ranks.step()
    ranks.drafters[0]._written_at = float("-inf")
    whole = ranks.drafters[0].snapshot
    plant(ranks.drafters[0])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            for tokens, confidences, *_ in ranks.step():
                assert tokens.tolist() == [[0, 0, 0]] * 2
                assert confidences.tolist() == [[0, 0, 0]] * 2
    assert len(ranks.sent) == 4
    assert {tensor.shape for tensor in ranks.sent} == {ranks.sent[0].shape}
    said = [record for record in caplog.records if "internal error" in record.message and record.exc_info]
    assert len(said) == 1
    ranks.drafters[0].snapshot = whole
    snapshot = ranks.drafters[0].snapshot()
    assert snapshot["off_because"] == "internal_error"
    assert snapshot["counters"]["fallback_internal_error"] == 3
    assert snapshot["worker"]["state"] == "disabled"


def test_without_a_worker_a_round_brings_nothing_and_says_why(make_ranks: Any) -> None:
    ranks = make_ranks(2)
    for tokens, confidences, *_ in ranks.step():
        assert not tokens.any()
        assert not confidences.any()
    counters = ranks.drafters[0].snapshot()["counters"]
    assert counters["fallback_not_ready"] == 1
    assert counters["rounds_failed"] == 1


def test_warmup_rpc_a_rehearsal_takes_no_slot_sends_nothing_and_broadcasts_nothing(make_ranks: Any) -> None:
    ranks = make_ranks(2)
    for drafter in ranks.drafters:
        drafter.rehearse(step())
    assert ranks.sent == []
    rank0 = ranks.drafters[0].rank0
    assert rank0.round.slots[0].owner is None
    assert not rank0.gather.ring.rows[: rank0.gather.ring.scratch_row].any()
    assert "rounds_decode" not in rank0.stats.counters()


def test_gates_hidden_states_that_are_not_tapped_refuse_the_start(make_ranks: Any) -> None:
    drafter = make_ranks().drafters[0]
    with pytest.raises(ConfigError, match=r"hidden states of widths \[\], expected 2 taps of 4"):
        drafter.rehearse(step()._replace(hidden=()))


def test_one_rank_alone_broadcasts_nothing(make_ranks: Any) -> None:
    ranks = make_ranks(1)
    answer_with(ranks.drafters[0], [[1, 2, 3], [4, 5, 6]])
    assert ranks.step()[0][0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert ranks.sent == []


def test_ON_FAIL_raise_ends_every_rank_after_the_broadcast(make_ranks: Any) -> None:
    ranks = make_ranks(2)
    for drafter in ranks.drafters:
        drafter.config = replace(drafter.config, on_fail=OnFail.RAISE)
    for drafter in ranks.drafters:
        drafter.begin(step())
        with pytest.raises(RoundFailedError, match="ON_FAIL=raise"):
            drafter.finish(batch())
    assert ranks.taken == [1, 1]


def test_ON_FAIL_raise_demands_a_worker_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the worker cannot be used"):
        Ranks(tmp_path, 1, ON_FAIL="raise", CONNECT_TIMEOUT_MS="100")


def test_TP_AGREE_every_rank_sees_the_same_outcome_and_the_same_usable_rows(make_ranks: Any) -> None:
    ranks = make_ranks(2)
    answer_with(ranks.drafters[0], [[1, 2, 3]])
    for result, drafter in zip(ranks.step(), ranks.drafters, strict=True):
        assert result.ok.tolist() == [True, False]
        assert drafter.outcome() is RoundOutcome.OK


def test_strict_start_refuses_to_start_without_a_worker(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"STRICT_START is set and the worker cannot be used: .*refused"):
        Ranks(tmp_path, 1, STRICT_START="1", CONNECT_TIMEOUT_MS="100")


def test_the_comparison_counts_only_requests_that_the_worker_answered(make_ranks: Any) -> None:
    drafter = make_ranks(1, POLICY="shadow").drafters[0]
    answer_with(drafter, [[1, 2, 3]])
    drafter.begin(step())
    drafter.finish(batch())
    drafter.compare(torch.tensor([[1, 2, 9], [4, 5, 6]]), None)
    found = drafter.snapshot()["shadow"]
    assert found["blocks"] == 1
    assert found["first_mismatch"] == {"0": 0, "1": 0, "2": 1, "3": 0}


def test_shadow_holds_both_drafters_against_what_the_request_went_on_with(make_ranks: Any) -> None:
    drafter = make_ranks(1, POLICY="shadow").drafters[0]
    answer_with(drafter, [[7, 7, 7]])
    for decoded in range(4):
        # The anchor is 7; one token a step.
        drafter.begin(step(query=1)._replace(positions=torch.tensor([decoded, decoded])))
        drafter.finish(batch(query=1))
        drafter.compare(torch.tensor([[7, 9, 9], [7, 7, 7]]), None)
    found = drafter.snapshot()["shadow"]["accepted_lengths"]
    assert (found["blocks"], found["local"], found["remote"]) == (1, 1.0, 3.0), "the first request's first block"


def test_shadow_that_verifies_remote_drafts_holds_both_against_what_the_remote_ones_became(make_ranks: Any) -> None:
    drafter = make_ranks(1, POLICY="shadow", SHADOW_USE="remote").drafters[0]
    remote, local = [1, 2, 9], [4, 5, 6]
    answer_with(drafter, [remote, remote])
    for start, query in ((0, 1), (1, 3), (4, 1)):
        # 1 and 2 are accepted, and the target goes on with 7; then nothing is.
        drafter.begin(step(query=query)._replace(positions=torch.arange(start, start + query).repeat(2)))
        drafter.finish(batch(query=query))
        drafter.compare(torch.tensor([local, local]), None)
    found = drafter.snapshot()["shadow"]["accepted_lengths"]
    assert (found["blocks"], found["local"], found["remote"]) == (2, 0.0, 2.0)


def test_shadow_knows_the_text_behind_a_step_that_wanted_no_drafts(make_ranks: Any) -> None:
    drafter = make_ranks(1, POLICY="shadow").drafters[0]
    answer_with(drafter, [[7, 7, 7], [7, 7, 7]])
    local = torch.tensor([[1, 7, 7], [1, 7, 7]])
    for decoded in range(4):
        wants_drafts = decoded != 1
        drafter.begin(step(query=1)._replace(positions=torch.tensor([decoded, decoded]), wants_drafts=wants_drafts))
        drafter.finish(batch(query=1))
        if not wants_drafts:
            drafter._result.ok[:] = 0
        drafter.compare(local, None)
    # The anchor is 7, and no draft was accepted.
    found = drafter.snapshot()["shadow"]["accepted_lengths"]
    assert (found["blocks"], found["local"], found["remote"]) == (2, 0.0, 3.0)


def test_statistics_are_written_as_rounds_go_and_at_the_end(make_ranks: Any, tmp_path: Path) -> None:
    ranks = make_ranks()
    ranks.step()
    until = time.monotonic() + 30
    while not (tmp_path / "stats.json").exists():  # soon
        assert time.monotonic() < until
        time.sleep(0.01)
    assert json.loads((tmp_path / "stats.json").read_text())["rounds"] == 1
    ranks.step()
    ranks.close()
    written = json.loads((tmp_path / "stats.json").read_text())
    assert written["rounds"] == 2
    assert written["policy"] == "capacity"
    assert written["endpoint"] == NOBODY


def serve_and_end(folder: Path) -> None:
    """A process of an engine: steps, then the end that vLLM gives it."""
    ranks = Ranks(folder, 1, CAPTURE=str(folder / "rounds"))
    for _ in range(3):
        ranks.step()
    raise SystemExit


@pytest.mark.parametrize("started", ["fork", "spawn", "not"])
def test_an_engine_that_ends_leaves_its_last_statistics_and_a_whole_recording(started: str, tmp_path: Path) -> None:
    """vLLM forks its engine where no GPU was touched before; a child that was forked runs no atexit handler."""
    code = (
        "import multiprocessing, pathlib, sys; from tests.engine.vllm.test_remote import serve_and_end as serve\n"
        "folder, started = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
        "if started == 'not': serve(folder)\n"
        "child = multiprocessing.get_context(started).Process(target=serve, args=(folder,))\n"
        "child.start(); child.join(); sys.exit(child.exitcode)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), started], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "stats.json").read_text())["rounds"] == 3
    with CaptureReader(tmp_path / "rounds") as reader:
        assert len(list(reader.rounds())) == 3
        assert reader.tail is not None
        assert reader.tail["why"] == "closed"


def test_the_summary_line_comes_every_so_many_rounds(make_ranks: Any, caplog: pytest.LogCaptureFixture) -> None:
    ranks = make_ranks(1, LOG_EVERY="2")
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            ranks.step()
    lines = [record.message for record in caplog.records if "rows sent" in record.message]
    assert [line.split(" rounds")[0] for line in lines] == ["farspark: 2", "farspark: 4"]


def test_slot_begin_the_same_request_admitted_again_is_another_owner() -> None:
    admissions = Admissions()
    admissions.admit(3, "a")
    first = admissions.owner(3)
    admissions.admit(3, "a")
    assert admissions.owner(3) != first
    admissions.admit(3, "b")
    assert admissions.owner(3) != first
