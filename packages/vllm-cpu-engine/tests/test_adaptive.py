"""Adaptive verification without graphs: what of vLLM's refusals goes, what stays, and that another vLLM is refused."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import vllm.v1.worker.cpu.shm  # prepares torch for the runner's modules
from vllm.config import CUDAGraphMode, VllmConfig

from farspark_vllm_cpu_engine import adaptive, plugin

VALIDATE = "vllm.config.vllm:VllmConfig._validate_adaptive_verification"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    validate = VllmConfig._validate_adaptive_verification
    monkeypatch.setattr(VllmConfig, "_validate_adaptive_verification", getattr(validate, "__wrapped__", validate))
    plugin.register()
    # A second time, as in a process that loads plugins twice.
    plugin.register()


def config(*, is_on: bool = True, lora: object = None, stages: int = 1) -> Any:
    """What the check reads of a configuration."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(enable_adaptive_verification=is_on),
        lora_config=lora,
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.NONE),
    )


def test_graphs_are_not_asked_for_and_everything_else_is() -> None:
    VllmConfig._validate_adaptive_verification(config())
    VllmConfig._validate_adaptive_verification(config(is_on=False, lora=object(), stages=2))
    with pytest.raises(ValueError, match="LoRA"):
        VllmConfig._validate_adaptive_verification(config(lora=object()))
    with pytest.raises(ValueError, match="pipeline parallelism"):
        VllmConfig._validate_adaptive_verification(config(stages=2))


def test_what_is_replaced_is_what_this_vllm_has() -> None:
    assert vllm.v1.worker.cpu.shm
    adaptive.refuse_unknown(adaptive.KNOWN_CONFIG)
    adaptive.refuse_unknown(adaptive.KNOWN_RUNNER)


def test_another_vllm_is_refused_where_it_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "KNOWN_CONFIG", {VALIDATE: "0" * 16})
    VllmConfig._validate_adaptive_verification(config(is_on=False))
    with pytest.raises(
        ValueError, match=f"whose {VALIDATE} is another: SHA-256 0000000000000000 expected, [0-9a-f]{{16}} found"
    ):
        VllmConfig._validate_adaptive_verification(config())


def test_steps_of_a_runner_price_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own collector and tables around steps that take a millisecond a token, and drafts that take two."""
    from vllm.v1.worker.gpu import async_utils
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

    adaptive._verify_without_graphs()
    clock = itertools.count()
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.s)
    monkeypatch.setattr(
        "vllm.v1.worker.gpu.spec_decode.adaptive_verification.get_tp_group",
        lambda: SimpleNamespace(broadcast_object=lambda curves, src: curves),
    )
    manager = object.__new__(AdaptiveVerificationManager)
    manager.req_states = SimpleNamespace(max_num_reqs=4, max_num_batched_tokens=64)
    timing = async_utils.StepTimingCollector()
    sizes = []

    def step(num_tokens: int, context_len: int) -> None:
        sizes.append(num_tokens)
        slow = 1.0 if next(clock) % 3 == 0 else 0.0  # one of three is not what a step costs
        timing.record_batch(SimpleNamespace(num_tokens=num_tokens, num_reqs=min(num_tokens, 4)), False)
        timing.forward_start()
        now.s += num_tokens / 1000 + slow
        timing.forward_end()
        timing.drafter_start()
        now.s += 0.002
        timing.drafter_end()

    adaptive.measure(
        SimpleNamespace(
            adaptive_verification=manager,
            max_num_tokens=64,
            max_num_reqs=4,
            decode_query_len=6,
            step_timing=timing,
            _dummy_run=step,
        )
    )
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24]
    draft_ms, verify_ms = manager.cost_tables
    assert draft_ms.tolist() == pytest.approx([2.0] * 5)
    # What was not measured lies on the line, beyond the last too.
    assert verify_ms[1:].tolist() == pytest.approx(list(range(1, 65)))
