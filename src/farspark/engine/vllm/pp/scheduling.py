"""The engine core's side: how many batches are in flight, and what pipelined speculation needs without asynchronous scheduling.

There the draft ids never pass through the scheduler: as under asynchronous scheduling it schedules placeholders, and every
stage finds the ids in its own table, where the transport has put them. vLLM instead asks for the ids right after it has
scheduled a batch, gets those of a batch whose sampled tokens are still queued, and schedules N tokens where N + 1 are due.
"""

from __future__ import annotations

import functools
from typing import Any

from farspark.errors import ConfigError

METHOD = "dspark"


def is_dspark_pipeline(vllm_config: Any) -> bool:
    """Whether this engine is what the settings are about: the V2 runner, several stages, DSpark."""
    speculative = vllm_config.speculative_config
    return bool(
        vllm_config.parallel_config.pipeline_parallel_size > 1
        and speculative is not None
        and speculative.method == METHOD
        and vllm_config.use_v2_model_runner
    )


def refuse_trimming(vllm_config: Any) -> None:
    """Raises ConfigError where the last stage would verify fewer tokens than the others compute."""
    if getattr(vllm_config.speculative_config, "enable_adaptive_verification", False):
        raise ConfigError(
            "enable_adaptive_verification leaves drafts out on the last stage alone, and a pipeline's stages must agree on "
            'every step\'s tokens; pass "enable_adaptive_verification": false in the speculative config'
        )


def needs_placeholders(vllm_config: Any) -> bool:
    return is_dspark_pipeline(vllm_config) and not vllm_config.scheduler_config.async_scheduling


def cap_batches_in_flight() -> None:
    """As many batches as stages. vLLM allows one more under asynchronous scheduling, which lets the early stages run a step
    ahead of the last."""
    from vllm.config import VllmConfig

    original: Any = VllmConfig.max_concurrent_batches

    def max_concurrent_batches(self: Any) -> int:
        batches: int = original.__get__(self)
        return min(batches, self.parallel_config.pipeline_parallel_size) if is_dspark_pipeline(self) else batches

    VllmConfig.max_concurrent_batches = property(max_concurrent_batches)


def repair_synchronous_scheduling() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.input_processor import InputProcessor

    post_step = EngineCore.post_step

    @functools.wraps(post_step)
    def post_step_without_drafts(self: Any, model_executed: bool) -> None:
        if self.batch_queue is None or not needs_placeholders(self.vllm_config):
            post_step(self, model_executed)

    EngineCore.post_step = post_step_without_drafts

    after_schedule = Scheduler._update_after_schedule

    @functools.wraps(after_schedule)
    def after_schedule_in_turn(self: Any, scheduler_output: Any) -> None:
        after_schedule(self, scheduler_output)
        if needs_placeholders(self.vllm_config):
            stagger(self.requests, scheduler_output, self.current_step + _stages(self))

    Scheduler._update_after_schedule = after_schedule_in_turn

    update = Scheduler.update_from_output

    @functools.wraps(update)
    def update_with_placeholders(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        result = update(self, scheduler_output, model_runner_output)
        if needs_placeholders(self.vllm_config):
            place_drafts(self.requests, scheduler_output, self.num_spec_tokens)
        return result

    Scheduler.update_from_output = update_with_placeholders

    validate = InputProcessor._validate_params

    @functools.wraps(validate)
    def validate_without_structure(self: Any, params: Any, *rest: Any, **more: Any) -> Any:
        if needs_placeholders(self.vllm_config):
            refuse_structured_output(params)
        return validate(self, params, *rest, **more)

    InputProcessor._validate_params = validate_without_structure


def _stages(scheduler: Any) -> int:
    return int(scheduler.parallel_config.pipeline_parallel_size)


def stagger(requests: Any, scheduler_output: Any, eligible_step: int) -> None:
    """A request decodes again once the stages have consumed what its last step sampled."""
    for req_id in scheduler_output.num_scheduled_tokens:
        request = requests[req_id]
        if not request.is_prefill_chunk:
            request.next_decode_eligible_step = eligible_step


def place_drafts(requests: Any, scheduler_output: Any, num_drafts: int) -> None:
    """N placeholders for every request of the step that has one token left to compute: the one just sampled.

    Not in the middle of a prompt, where that one token is the prompt's, and not after a preemption.
    """
    num_drafts = getattr(scheduler_output, "num_spec_tokens_to_schedule", num_drafts)
    for req_id in scheduler_output.num_scheduled_tokens:
        request = requests.get(req_id)
        if (
            request is not None
            and request.status.name == "RUNNING"
            and not request.is_prefill_chunk
            and request.num_computed_tokens == request.num_tokens - 1
        ):
            request.spec_token_ids = [-1] * num_drafts


def refuse_structured_output(params: Any) -> None:
    """Raises ValueError, which the server answers with status 400."""
    if getattr(params, "structured_outputs", None) is not None:
        raise ValueError(
            "structured output with DSpark in a pipeline needs asynchronous scheduling: without it drafts reach the stages "
            "unvalidated. Start the server with --async-scheduling, without DSpark, or send the request without "
            "structured output"
        )
