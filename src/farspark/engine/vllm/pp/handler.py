"""vLLM's PPHandler with the fixed schedule in place of its own, and where vLLM's runner and worker meet it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.worker.gpu.pp_utils import PPHandler, compute_need_sampled_mask
from vllm.v1.worker.worker_base import WorkerBase

from farspark.engine.config import PpConfig
from farspark.engine.vllm.logs import log_where_vllm_logs
from farspark.engine.vllm.pp.faults import TokenTransportError, end_process
from farspark.engine.vllm.pp.schedule import FrameShape
from farspark.engine.vllm.pp.scheduling import is_dspark_pipeline, refuse_trimming
from farspark.engine.vllm.pp.signals import print_on_signal
from farspark.engine.vllm.pp.stage import StageHandler
from farspark.engine.vllm.pp.transport import TokenTransport
from farspark.engine.vllm.warmup import after_warmup, with_subclasses

logger = logging.getLogger(__name__)


class TokenHandler(StageHandler, PPHandler):  # type: ignore[misc]
    """Relays hidden states as vLLM's does; tokens, counts and drafts go by the fixed schedule."""

    def __init__(self, config: PpConfig, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
        # Not the base's: it would make a device communicator that nobody uses.
        group = get_pp_group()
        self.last_rank = group.last_rank
        self.device = device
        self.max_sample_len = num_speculative_steps + 1
        self.num_speculative_steps = num_speculative_steps
        self.aux_hidden_state_relay_keys: tuple[str, ...] = ()
        self.label = f"PP stage {group.rank_in_group} of {group.world_size}, TP rank {get_tp_group().rank_in_group}"
        # Made by every rank of the world in the same order: each group is a collective of all.
        tokens = (
            _host_group(group) if config.on_cpu else group.make_sibling_device_group(group_desc="farspark_pp_tokens")
        )
        transport = TokenTransport(
            tokens,
            source=group.last_rank,
            is_source=group.is_last_rank,
            shape=FrameShape(max_num_reqs, num_speculative_steps),
            depth=group.world_size,
            device=device,
            wire_device=torch.device("cpu") if config.on_cpu else device,
            label=self.label,
            on_error=self._end,
        )
        transport.agree(group.cpu_group, group.world_size)
        self.set_up(
            transport,
            is_last=group.is_last_rank,
            depth=group.world_size,
            max_num_reqs=max_num_reqs,
            need_mask=compute_need_sampled_mask,
        )
        logger.info(
            "farspark: token transport on: %s, one broadcast a step of %d rows over %s",
            self.label,
            max_num_reqs,
            "the host (Gloo)" if transport.is_over_host else "the device",
        )

    def _end(self, error: TokenTransportError) -> None:
        """Found by the transport's own thread. The engine thread may never come by: it waits for a step that is held back."""
        if self.is_exchanging:
            end_process(error, where=self.label, history=str(self.transport.history))


def _host_group(pp: Any) -> Any:
    mine = None
    for ranks in pp.group_ranks:
        one = dist.new_group(ranks, backend="gloo", group_desc="farspark_pp_tokens")
        if pp.rank in ranks:
            mine = one
    assert mine is not None
    return mine


def handler_factory(config: PpConfig) -> Callable[..., Any]:
    """What stands where the runner looks for PPHandler: ours for a DSpark pipeline, vLLM's for everything else."""

    def make(max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> Any:
        vllm_config = get_current_vllm_config()
        if not is_dspark_pipeline(vllm_config):
            return PPHandler(max_num_reqs=max_num_reqs, num_speculative_steps=num_speculative_steps, device=device)
        log_where_vllm_logs()
        refuse_trimming(vllm_config)
        _wrap_runner()
        _wrap_workers()
        handler = TokenHandler(config, max_num_reqs, num_speculative_steps, device)
        print_on_signal(handler.transport.history)
        after_warmup(lambda runner: handler.start_exchange() if runner.pp_handler is handler else None)
        return handler

    return make


@functools.cache
def _wrap_runner() -> None:
    """The two places where the versions' runners differ in what they do with drafts; here they do the same."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    sample = GPUModelRunner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(self: Any, *rest: Any, **more: Any) -> Any:
        output = sample(self, *rest, **more)
        if isinstance(self.pp_handler, TokenHandler):
            self.pp_handler.finish_step(self.req_states.draft_tokens)
        return output

    update = GPUModelRunner.update_pp_decode_requests

    @functools.wraps(update)
    def update_pp_decode_requests(self: Any) -> None:
        if not isinstance(self.pp_handler, TokenHandler):
            update(self)
            return
        outputs = self.pp_handler.get_prev_sampled_outputs(self.req_states.draft_tokens)
        if outputs is not None:
            self.postprocess_sampled(**outputs)

    GPUModelRunner.sample_tokens = sample_tokens
    GPUModelRunner.update_pp_decode_requests = update_pp_decode_requests


@functools.cache
def _wrap_workers() -> None:
    """An exception in a step ends the process wherever the executor would not hear of it. During warm-up it hears every rank."""

    def wrap(worker_class: Any, name: str) -> None:
        original = worker_class.__dict__[name]

        @functools.wraps(original)
        def step(self: Any, *rest: Any, **more: Any) -> Any:
            try:
                return original(self, *rest, **more)
            except Exception as error:
                handler = getattr(self.model_runner, "pp_handler", None)
                if (
                    isinstance(handler, TokenHandler)
                    and handler.is_exchanging
                    and (isinstance(error, TokenTransportError) or not _is_output_rank())
                ):
                    end_process(error, where=handler.label, history=str(handler.transport.history))
                raise

        setattr(worker_class, name, step)

    for worker_class in with_subclasses(WorkerBase):
        for name in ("execute_model", "sample_tokens"):
            if name in worker_class.__dict__ and worker_class is not WorkerBase:
                wrap(worker_class, name)


def _is_output_rank() -> bool:
    return bool(get_pp_group().is_last_rank and get_tp_group().is_first_rank)
