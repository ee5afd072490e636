"""Switches the transport's parts on in this process, whichever of the engine's it is."""

from __future__ import annotations

import functools
import sys
from typing import Any

from farspark.engine.config import PpConfig


def install(config: PpConfig) -> None:
    """To be called once, before anything of the engine is built. Touches only what `config` asks for."""
    from farspark.engine.vllm.pp.scheduling import cap_batches_in_flight, repair_synchronous_scheduling
    from farspark.engine.vllm.pp.signals import stacks_on_signal

    stacks_on_signal()
    if config.cap:
        cap_batches_in_flight()
    if config.eager_draft:
        draft_eagerly()
    if config.transport:
        repair_synchronous_scheduling()
        _replace_handler(config)


def _replace_handler(config: PpConfig) -> None:
    from vllm.v1.worker.gpu import pp_utils

    from farspark.engine.vllm.pp.handler import handler_factory

    factory = handler_factory(config)
    pp_utils.PPHandler = factory
    # The runner imported the class by name, perhaps before this plugin was loaded.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.PPHandler = factory  # type: ignore[attr-defined]


def draft_eagerly() -> None:
    """No CUDA graphs for the draft in a pipeline; the target keeps its own."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    from farspark.engine.vllm.pp.scheduling import is_dspark_pipeline

    original = DSparkSpeculator.init_cudagraph_manager

    @functools.wraps(original)
    def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> None:
        original(self, CUDAGraphMode.NONE if is_dspark_pipeline(self.vllm_config) else cudagraph_mode)

    DSparkSpeculator.init_cudagraph_manager = init_cudagraph_manager
