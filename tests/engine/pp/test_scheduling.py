"""What the engine core is made to do, on requests as the scheduler holds them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from farspark.engine.vllm.pp.scheduling import (
    is_dspark_pipeline,
    needs_placeholders,
    place_drafts,
    refuse_structured_output,
    refuse_trimming,
    stagger,
)
from farspark.errors import ConfigError


class Status(enum.Enum):
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_ABORTED = 3


@dataclass
class Request:
    num_tokens: int
    num_computed_tokens: int
    is_prefill_chunk: bool = False
    status: Status = Status.RUNNING
    next_decode_eligible_step: int = 0
    spec_token_ids: list[int] = field(default_factory=list)


def output(*req_ids: str, num_drafts: int = 5) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(req_ids, 1), num_spec_tokens_to_schedule=num_drafts)


def test_a_request_with_one_token_left_gets_a_placeholder_for_every_draft() -> None:
    requests = {"a": Request(11, 10), "b": Request(11, 10)}
    place_drafts(requests, output("a"), 5)
    assert requests["a"].spec_token_ids == [-1] * 5
    assert requests["b"].spec_token_ids == []  # not of this step


@pytest.mark.parametrize(
    "request_",
    [
        Request(11, 9),  # more chunks to come
        Request(11, 10, is_prefill_chunk=True),  # the one token left is the prompt's
        Request(11, 11),  # a later chunk is in flight
        Request(1, 0, status=Status.PREEMPTED),
        Request(11, 10, status=Status.FINISHED_ABORTED),
    ],
)
def test_no_other_request_gets_any(request_: Request) -> None:
    place_drafts({"a": request_}, output("a"), 5)
    assert request_.spec_token_ids == []


def test_a_request_that_is_gone_is_passed_over() -> None:
    place_drafts({}, output("a"), 5)


def test_as_many_placeholders_as_the_step_asked_the_drafter_for() -> None:
    request = Request(11, 10)
    place_drafts({"a": request}, output("a", num_drafts=2), 5)
    assert request.spec_token_ids == [-1, -1]
    # An older scheduler's output does not say: then all.
    place_drafts({"a": request}, SimpleNamespace(num_scheduled_tokens={"a": 1}), 5)
    assert request.spec_token_ids == [-1] * 5


def test_a_decoding_request_waits_for_the_stages_and_a_prompts_next_chunk_does_not() -> None:
    requests = {"a": Request(11, 11), "b": Request(90, 64, is_prefill_chunk=True)}
    stagger(requests, output("a", "b"), 12)
    assert requests["a"].next_decode_eligible_step == 12
    assert requests["b"].next_decode_eligible_step == 0


def config(*, stages: int = 2, method: str | None = "dspark", v2: bool = True, ahead: bool = False) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=None if method is None else SimpleNamespace(method=method),
        use_v2_model_runner=v2,
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
    )


def test_only_a_dspark_pipeline_of_the_v2_runner_is_touched() -> None:
    assert is_dspark_pipeline(config())
    assert not is_dspark_pipeline(config(stages=1))
    assert not is_dspark_pipeline(config(method="eagle3"))
    assert not is_dspark_pipeline(config(method=None))
    assert not is_dspark_pipeline(config(v2=False))


def test_asynchronous_scheduling_has_its_own_placeholders() -> None:
    assert needs_placeholders(config())
    assert not needs_placeholders(config(ahead=True))


def test_structured_output_is_refused_with_what_to_do() -> None:
    refuse_structured_output(SimpleNamespace(structured_outputs=None))
    refuse_structured_output(SimpleNamespace())  # pooling parameters
    with pytest.raises(ValueError, match=r"needs asynchronous scheduling: .* --async-scheduling"):
        refuse_structured_output(SimpleNamespace(structured_outputs=object()))


def test_a_last_stage_that_would_trim_drafts_alone_is_refused() -> None:
    refuse_trimming(config())
    trims = config()
    trims.speculative_config.enable_adaptive_verification = True
    with pytest.raises(ConfigError, match='pass "enable_adaptive_verification": false'):
        refuse_trimming(trims)
