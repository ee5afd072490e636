"""The remote drafter with asynchronous rounds: a real worker, a thread in place of a stream, a proxy of either kind."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fakes.async_worker import WorkerProcess
from tests.fakes.drafters import expected
from tests.fakes.host_stream import HostStream
from tests.fakes.two_requests import INFO, QUERY, N, TwoRequests

from farspark.engine.handoff.stream import SelfTestError, StreamStuckError
from farspark.engine.result import RoundOutcome
from farspark.engine.vllm import depths
from farspark.engine.vllm.remote import RemoteDrafts
from farspark.errors import ConfigError


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(INFO) as worker:
        yield worker


class Engine(TwoRequests):
    """With asynchronous rounds; the drafts are asked of the stream's end."""

    def __init__(self, endpoint: str, tmp_path: Path, make_stream: Any, size: int = 1, **settings: str) -> None:
        values = {"REMOTE_ASYNC": "1", "REMOTE_ASYNC_NAP_US": "20", "REMOTE_TIMEOUT_MS": "1000"}
        values |= {f"REMOTE_{name}": value for name, value in settings.items()}
        super().__init__(endpoint, tmp_path / "stats.json", values, ranks=size, make_stream=make_stream)

    def hidden(self, position: int, request: int, tap: int) -> torch.Tensor:
        return torch.full((INFO.hidden_size,), float(position % 100 + 128 * request + tap), dtype=torch.bfloat16)

    def step(self) -> RemoteDrafts:
        positions = range(self.end, self.end + QUERY)
        hidden = [
            torch.stack([self.hidden(position, request, tap) for request in range(2) for position in positions])
            for tap in range(INFO.taps)
        ]
        return self.take_step(hidden)

    def reference(self, request: int) -> list[int]:
        rows = {
            position: b"".join(
                self.hidden(position, request, tap).view(torch.int16).numpy().tobytes() for tap in range(INFO.taps)
            )
            for position in range(max(0, self.end - 16), self.end)
        }
        tokens, _, _ = expected(rows, 7, self.end, num_drafts=N, vocab_size=INFO.vocab_size, n_out=N)
        return tokens


@pytest.fixture
def make_engine(worker: WorkerProcess, tmp_path: Path) -> Iterator[Any]:
    made: list[Engine] = []

    def make(make_stream: Any = lambda region, page: HostStream(page), **settings: Any) -> Engine:
        made.append(Engine(settings.pop("endpoint", worker.endpoint), tmp_path, make_stream, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.drafter.close()


@pytest.mark.parametrize("proxy", ["thread", "process"])
def test_drafts_come_by_the_stream_and_equal_the_references(make_engine: Any, proxy: str) -> None:
    engine = make_engine(ASYNC_PROXY=proxy)
    for _ in range(12):
        drafts = engine.step()
        engine.drain()
        assert drafts.tokens.tolist() == [engine.reference(0), engine.reference(1)]
        assert depths.worth_verifying(drafts).tolist() == drafts.confidences.tolist()
    assert engine.drafter.outcome() is RoundOutcome.OK


def test_every_step_is_broadcast_once_and_waits_for_nothing(make_engine: Any, worker: WorkerProcess) -> None:
    engine = make_engine(size=2, TIMEOUT_MS="300")
    engine.step()
    engine.drain()
    worker.tell("late 200")
    began = time.monotonic()
    for _ in range(3):
        engine.step()
    assert time.monotonic() - began < 0.15
    engine.drain()
    assert len(engine.sent) == 4
    assert len({tensor.shape for tensor in engine.sent}) == 1


@pytest.mark.parametrize("proxy", ["thread", "process"])
def test_the_stats_file_has_all_of_it_and_closing_is_in_time(make_engine: Any, proxy: str) -> None:
    engine = make_engine(ASYNC_PROXY=proxy)
    for _ in range(5):
        engine.step()
    engine.drain()
    began = time.monotonic()
    engine.drafter.close()
    assert time.monotonic() - began < 5
    stats = json.loads(engine.stats_file.read_text())
    assert stats["counters"]["rounds_ok"] == 5 == stats["rounds"]
    assert stats["async"]["is_on"]
    assert stats["async"]["fallback_reason"] is None
    assert stats["async_watchdog"]["preempted"] == 0
    assert stats["async_dead"] is None
    assert stats["latency"]["rank0_submit_us"]["count"] == 5
    assert stats["rank0_buffers"]["pinned_bytes"] == stats["async"]["region_bytes"]
    assert set(stats) >= {"watchdog_events", "worker", "breaker", "depth", "endpoint", "lane", "rank0_buffers"}


def test_a_device_without_such_streams_is_refused_with_a_warning_and_rounds_are_synchronous(
    make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = make_engine(None)
    assert "asynchronous rounds refused, they are synchronous: the device is cpu" in caplog.text
    drafts = engine.step()
    assert drafts.tokens.tolist() == [engine.reference(0), engine.reference(1)]
    assert engine.drafter.snapshot()["async"] == {
        "is_on": False,
        "fallback_reason": "the device is cpu, whose streams cannot wait for a word in memory",
    }


class Mute(HostStream):
    def write_gathered(self, round_: int) -> None:
        pass


def test_a_failed_self_test_is_the_reason_in_the_log_and_in_the_stats(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from farspark.engine.handoff import stream

    monkeypatch.setattr(stream, "_TEST_S", 0.2)
    engine = make_engine(lambda region, page: Mute(page))
    assert "did not see `gathered`" in engine.drafter.snapshot()["async"]["fallback_reason"]
    engine.step()
    assert engine.drafter.outcome() is RoundOutcome.OK


def test_a_stuck_stream_stops_the_start(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from farspark.engine.handoff import handoff

    def stuck(*arguments: Any) -> int:
        raise StreamStuckError("parked for good")

    monkeypatch.setattr(handoff, "self_test", stuck)
    with pytest.raises(StreamStuckError):
        make_engine()
    assert not issubclass(StreamStuckError, SelfTestError)


def test_lazy_load_a_missing_eager_loading_is_said_once(make_engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_engine()
    assert caplog.text.count("CUDA_MODULE_LOADING=EAGER is not set") == 1
    assert "asynchronous rounds on (self-test passed): proxy thread, watchdog 4000 ms" in caplog.text


def test_a_bug_on_the_engine_thread_releases_the_stream_and_the_engine_lives(make_engine: Any) -> None:
    engine = make_engine(size=2)
    engine.step()
    engine.drain()
    handoff = engine.drafter.rank0.handoff

    def fail(*arguments: Any) -> None:
        raise RuntimeError("planted")

    handoff.stream.write_consumed = fail
    for _ in range(3):
        drafts = engine.step()
    engine.drain()
    assert len(engine.sent) == 4
    assert not drafts.tokens.any()
    snapshot = engine.drafter.snapshot()
    assert snapshot["off_because"] == "internal_error"
    assert snapshot["counters"]["fallback_internal_error"] == 3


def test_a_strict_start_without_a_worker_is_refused_and_leaves_nothing_behind(make_engine: Any) -> None:
    with pytest.raises(ConfigError, match="STRICT_START is set and the worker cannot be used"):
        make_engine(endpoint="tcp://127.0.0.1:1", CONNECT_TIMEOUT_MS="100")


def test_a_capture_records_asynchronous_rounds(make_engine: Any, tmp_path: Path) -> None:
    from farspark.engine.capture import CaptureReader

    engine = make_engine(CAPTURE=str(tmp_path / "rounds"))
    for _ in range(4):
        engine.step()
    engine.drain()
    engine.drafter.close()
    with CaptureReader(tmp_path / "rounds") as reader:
        assert [one.outcome for one in reader.rounds()] == [RoundOutcome.OK] * 4


@pytest.mark.parametrize("is_async", [True, False])
def test_no_rank_looks_for_the_depths_of_an_asynchronous_round(make_engine: Any, is_async: bool) -> None:
    from types import SimpleNamespace

    from farspark.engine.vllm.plugin import _act_on_depths

    engine = make_engine(ASYNC="1" if is_async else "0")

    def execute_model(*arguments: Any) -> None: ...

    runner = SimpleNamespace(
        vllm_config=SimpleNamespace(
            scheduler_config=SimpleNamespace(async_scheduling=True),
            parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        ),
        execute_model=execute_model,
    )
    _act_on_depths(runner, engine.drafter)
    assert (runner.execute_model is execute_model) is is_async
