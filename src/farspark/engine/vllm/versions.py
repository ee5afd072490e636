"""What Farspark relies on inside vLLM, by version, and the check that it is still so.

The check parses sources and imports nothing of vLLM, so the same code judges the installed vLLM at start, a source tree and
a wheel: `python -m farspark.engine.vllm.versions [WHEEL | FOLDER]`.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from farspark.engine.vllm.mtp_uses import MTP_GETTER, BufferUse, buffer_uses
from farspark.errors import ConfigError

RUNNER: Final = "v1/worker/gpu/model_runner.py"
_SPEC_DECODE: Final = "v1/worker/gpu/spec_decode"
_INPUT_BATCH: Final = "v1/worker/gpu/input_batch.py"
# What the runner calls last on a loaded target, before it notes how much memory loading took.
LAST_TOUCH: Final = "set_eagle3_aux_hidden_state_layers"
_LAST_TOUCH: Final = f"{_SPEC_DECODE}/eagle/eagle3_utils.py::{LAST_TOUCH}"
_SCHEDULER_OUTPUT: Final = "v1/core/sched/output.py"
_VERSION_FILE: Final = "_version.py"

_PROPOSE_HEAD: Final = (
    "self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled, num_rejected, "
    "last_sampled, next_prefill_tokens, temperature, seeds"
)
_PROPOSE_0_25: Final = (
    f"{_PROPOSE_HEAD}, num_tokens_across_dp=None, dummy_run=False, skip_attn_for_dummy_run=False, mm_inputs=None, "
    "is_profile=False"
)
_PROPOSE_0_32: Final = (
    f"{_PROPOSE_HEAD}, dp_sync_state=None, dummy_run=False, skip_attn_for_dummy_run=False, mm_inputs=None, "
    "is_profile=False, num_speculative_tokens=None"
)
_EXECUTE_0_25: Final = (
    "self, scheduler_output, intermediate_tensors=None, dummy_run=False, skip_attn_for_dummy_run=False, "
    "is_profile=False"
)
_EXECUTE_0_32: Final = f"{_EXECUTE_0_25}, context_len=0, valid_dummy_state_slots=False, randomize_inputs=False"
_ADD_REQUEST: Final = "self, req_id, prompt_len, all_token_ids, num_computed_tokens, max_tokens"

# Tests of the method's name, or of something that follows from it, outside the models. `method` stays "dspark" with
# Farspark, so every one of them sees what it sees for the local drafter; what matters is that none is new.
_GATES_EVERYWHERE: Final = frozenset(
    {
        "config/speculative.py::SpeculativeConfig.__post_init__",
        "config/speculative.py::SpeculativeConfig.compute_hash",
        "config/speculative.py::SpeculativeConfig.use_dspark",
        "config/speculative.py::SpeculativeConfig.use_eagle",
        "config/vllm.py::VllmConfig.__post_init__",
        "config/vllm.py::VllmConfig._get_v2_model_runner_unsupported_features",
        "distributed/kv_transfer/kv_connector/v1/lmcache_integration/vllm_v1_adapter.py::_calculate_mtp_layers",
        "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py::SchedulerOffloadConfig.from_spec",
        "v1/attention/backends/mla/sparse_swa.py::DeepseekSparseSWAMetadataBuilder.__init__",
        "v1/core/sched/scheduler.py::Scheduler.__init__",
        "v1/worker/cpu_model_runner.py::CPUModelRunner.initialize_kv_cache",
        "v1/worker/gpu/model_runner.py::GPUModelRunner.__init__",
        "v1/worker/gpu/spec_decode/__init__.py::init_speculator",
        "v1/worker/gpu_model_runner.py::GPUModelRunner.__init__",
        "v1/worker/gpu_model_runner.py::GPUModelRunner._check_and_update_cudagraph_mode",
        "v1/worker/gpu_model_runner.py::GPUModelRunner._dummy_run",
        "v1/worker/gpu_model_runner.py::GPUModelRunner.initialize_metadata_builders",
        "v1/worker/gpu_model_runner.py::GPUModelRunner.propose_draft_token_ids",
        "v1/worker/gpu_model_runner.py::GPUModelRunner.sample_tokens",
    }
)
_GATES_SINCE_0_32: Final = frozenset(
    {
        "config/speculative.py::SpeculativeConfig.use_eagle_block_drop",
        "config/speculative.py::SpeculativeConfig.uses_draft_kv_cache",
        "config/vllm.py::VllmConfig._check_supports_watermarking",
        "config/vllm.py::VllmConfig._get_v1_model_runner_unsupported_features",
        "config/vllm.py::VllmConfig.num_lookahead_tokens",
        "config/vllm.py::VllmConfig.num_prefill_lookahead_tokens",
        "distributed/kv_transfer/kv_connector/v1/mooncake/store/coordinator.py::"
        "MooncakeStoreCoordinator.from_kv_cache_config",
        "distributed/kv_transfer/kv_connector/v1/moriio/moriio_connector.py::_validate_hybrid_speculation",
        "distributed/kv_transfer/kv_connector/v1/nixl/metadata.py::_get_speculative_compatibility_factors",
        "model_executor/layers/attention/mla_attention.py::MLACommonMetadataBuilder._validate_dspark_dcp_support",
        "v1/simple_kv_offload/manager.py::SimpleCPUOffloadScheduler.__init__",
        "v1/worker/gpu/eplb_utils.py::draft_model_supports_eplb",
        "v1/worker/gpu/pcp_manager.py::PCPManager.validate_config",
        "v1/worker/gpu_worker.py::_num_workspace_lanes",
    }
)

# What the runner reads from a speculator; `load_model`, `set_attn`, `observe_verification`, `dcp_size` and
# `draft_attn_layer_names` only from one that has a draft model.
_ATTRIBUTES_0_25: Final = frozenset(
    {
        "capture",
        "draft_logits",
        "init_cudagraph_manager",
        "load_model",
        "model",
        "propose",
        "set_attn",
        "supports_mm_inputs",
    }
)
_ATTRIBUTES_0_32: Final = _ATTRIBUTES_0_25 | {
    "attn_groups",
    "dcp_size",
    "draft_attn_layer_names",
    "draft_token_confidence_probs",
    "enable_adaptive_verification",
    "num_extra_query_per_req",
    "num_query_per_req",
    "observe_verification",
    "pcp_manager",
    "prepare_watermarking",
}


class CachedBlockDrop(enum.Enum):
    """How a version drops the last block of a prefix-cache hit under DSpark."""

    NONE = "not at all"
    BY_CONFIG = "whoever drops asks SpeculativeConfig.use_eagle_block_drop"
    BY_SCHEDULER = "the scheduler tells the cache manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class HookPoints:
    """One version of vLLM as Farspark needs it."""

    version: str
    signatures: Mapping[str, str]  # "path::qualified name" -> parameters with defaults, without annotations
    speculator_attributes: frozenset[str]  # read from the speculator by the runner
    gates: frozenset[str]  # "path::qualified name" of every test on the method
    cached_block_drop: CachedBlockDrop
    mtp_buffer: Mapping[str, BufferUse]  # "path::qualified name" of every function that touches the MTP buffer
    pp_signatures: Mapping[str, str]  # as `signatures`: what the token transport of a pipeline wraps or stands for
    pp_handler_attributes: frozenset[str]  # read from the runner's PPHandler
    # What the rejection sampler takes for a drafter's logits: those before the temperature, by which it divides them, or those
    # after it. Where it is the latter the local drafter draws by the very noise that the target resamples by.
    divides_draft_logits: bool

    @property
    def drafts_in_pipeline(self) -> bool:
        """Whether this version takes a drafter in a pipeline, and brings the tapped hidden states to its last stage."""
        return "relay_aux_hidden_states" in self.pp_handler_attributes

    @property
    def mtp_buffer_may_be_none(self) -> bool:
        """Whether this version can do without the buffer; else something must stand where it was."""
        return BufferUse.READS not in self.mtp_buffer.values()


def _mtp_models(
    family: str, model: str, language_model: str, platforms: Sequence[str], forward: BufferUse = BufferUse.ASKS
) -> dict[str, BufferUse]:
    """A family's model files that have the buffer, one to a platform."""
    return {
        f"models/{family}/{platform}/model.py::{name}": use
        for platform in platforms
        for name, use in (
            (f"{model}.__init__", BufferUse.SETS),
            (f"{model}.forward", forward),
            (f"{language_model}.{MTP_GETTER}", BufferUse.RETURNS),
        )
    }


_MTP_BUFFER_0_25: Final = _mtp_models(
    "deepseek_v4", "DeepseekV4Model", "DeepseekV4ForCausalLM", ("amd", "nvidia", "xpu"), BufferUse.READS
) | {
    f"{RUNNER}::GPUModelRunner._dummy_run": BufferUse.READS,
    f"{RUNNER}::GPUModelRunner.sample_tokens": BufferUse.READS,
}
_MTP_BUFFER_0_32: Final = (
    _mtp_models("deepseek_v4", "DeepseekV4Model", "DeepseekV4ForCausalLM", ("amd", "cpu", "nvidia", "xpu"))
    | _mtp_models("deepseek_v41", "DeepseekV4Model", "DeepseekV41LLMForCausalLM", ("amd", "nvidia"))
    | _mtp_models("qwen4_exp", "Qwen4ExpModel", "Qwen4ExpForCausalLM", ("amd", "nvidia"))
    | {
        f"models/{path}.{MTP_GETTER}": BufferUse.RETURNS
        for path in (
            "deepseek_v4/common/vl_model.py::DeepseekV4ForConditionalGeneration",
            "deepseek_v41/amd/vl_model.py::DeepseekV41ForCausalLM",
            "deepseek_v41/nvidia/vl_model.py::DeepseekV41ForCausalLM",
            "qwen4_exp/amd/model.py::Qwen4ExpForConditionalGeneration",
            "qwen4_exp/nvidia/model.py::Qwen4ExpForConditionalGeneration",
        )
    }
    | {
        f"{_SPEC_DECODE}/speculator.py::_target_feeds_hc_residual": BufferUse.ASKS,
        f"{_SPEC_DECODE}/utils.py::get_drafter_hidden_states": BufferUse.ASKS,
    }
)
_MTP_BUFFER_0_33: Final = _MTP_BUFFER_0_32 | {
    "models/deepseek_v41/nvidia/specialized_decode/runtime/decode.py::SpecializedDecode._head": BufferUse.ASKS
}

_GUMBEL: Final = "v1/worker/gpu/sample/gumbel.py::gumbel_sample"
_GUMBEL_HEAD: Final = "logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature"
_REJECTION: Final = f"{_SPEC_DECODE}/rejection_sampler_utils.py::rejection_sample"
_REJECTION_0_25: Final = (
    "target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping, expanded_local_pos, "
    "temperature, seed, num_speculative_steps, synthetic_conditional_rates=None, use_fp64=False, use_block_verification=False"
)
_REJECTION_0_32: Final = (
    f"{_REJECTION_0_25}, contexts=None, watermarking=None, watermarking_skip_mask=None, watermark_key=None"
)

_COMMON: Final = {
    f"{RUNNER}::GPUModelRunner.sample_tokens": "self, grammar_output",
    f"{RUNNER}::GPUModelRunner.take_draft_token_ids": "self",
    "v1/core/sched/scheduler.py::Scheduler.update_draft_token_ids": "self, draft_token_ids",
    "v1/spec_decode/dynamic/utils.py::build_dynamic_sd_schedule_lookup": (
        "num_speculative_tokens_per_batch_size, vllm_max_batch_size, vllm_num_speculative_tokens"
    ),
    "v1/worker/gpu/states.py::RequestState.remove_request": "self, req_id",
    "v1/worker/gpu/states.py::RequestState.add_request": _ADD_REQUEST,
    f"{_SPEC_DECODE}/dspark/speculator.py::DSparkSpeculator.__init__": "self, vllm_config, device",
    f"{_SPEC_DECODE}/speculator.py::BaseSpeculator.init_cudagraph_manager": "self, cudagraph_mode",
    "v1/worker/worker_base.py::WorkerBase.__init__": (
        "self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False"
    ),
    "v1/worker/worker_base.py::WorkerBase.compile_or_warm_up_model": "self",
    "distributed/parallel_state.py::GroupCoordinator.broadcast": "self, input_, src=0",
}
_SINCE_0_32: Final = {
    _GUMBEL: f"{_GUMBEL_HEAD}, is_drafting, logits_cache=None, logits_cache_col=None, use_fp64=False, logits_cache_source=None",
    f"{RUNNER}::GPUModelRunner.execute_model": _EXECUTE_0_32,
    f"{_SPEC_DECODE}/adaptive_verification.py::AdaptiveVerificationManager.record_confidences": (
        "self, confidence_probs, input_batch"
    ),
    f"{_SPEC_DECODE}/adaptive_verification.py::AdaptiveVerificationManager.get_num_tokens": (
        "self, num_tokens_per_req, draft_tokens"
    ),
    f"{_SPEC_DECODE}/__init__.py::init_speculator": "vllm_config, device, req_states",
    f"{_SPEC_DECODE}/speculator.py::BaseSpeculator.propose": _PROPOSE_0_32,
    f"{_SPEC_DECODE}/dflash/speculator.py::DFlashSpeculator.propose": _PROPOSE_0_32,
    f"{_SPEC_DECODE}/speculator.py::BaseSpeculator.capture": "self",
    f"{_SPEC_DECODE}/speculator.py::DraftModelSpeculator.set_attn": (
        "self, model_state, kv_cache_config, block_tables, target_input_buffers, target_attn_groups"
    ),
    f"{_SPEC_DECODE}/eagle/eagle3_utils.py::get_eagle3_aux_layers_from_config": "spec_config",
    "config/speculative.py::SpeculativeConfig.use_eagle_block_drop": "self",
}

_HANDLER: Final = "v1/worker/gpu/pp_utils.py::PPHandler"
_PP_COMMON: Final = {
    "v1/worker/gpu/pp_utils.py::compute_need_sampled_mask": "input_batch",
    f"{_HANDLER}.__init__": "self, max_num_reqs, num_speculative_steps, device",
    f"{_HANDLER}.broadcast": "self, sampled_token_ids, num_sampled, num_rejected, input_batch",
    f"{_HANDLER}.on_req_idx_freed": "self, req_idx",
    f"{RUNNER}::GPUModelRunner.sample_tokens": "self, grammar_output",
    f"{RUNNER}::GPUModelRunner.update_pp_decode_requests": "self",
    "config/vllm.py::VllmConfig.max_concurrent_batches": "self",
    "v1/engine/core.py::EngineCore.post_step": "self, model_executed",
    "v1/core/sched/scheduler.py::Scheduler._update_after_schedule": "self, scheduler_output",
    "v1/core/sched/scheduler.py::Scheduler.update_from_output": "self, scheduler_output, model_runner_output",
    "v1/engine/input_processor.py::InputProcessor._validate_params": "self, params, supported_tasks",
    "v1/worker/gpu_worker.py::Worker.execute_model": "self, scheduler_output",
    "v1/worker/gpu_worker.py::Worker.sample_tokens": "self, grammar_output",
    "v1/worker/worker_base.py::WorkerBase.compile_or_warm_up_model": "self",
    f"{_SPEC_DECODE}/dflash/speculator.py::DFlashSpeculator.init_cudagraph_manager": "self, cudagraph_mode",
    "distributed/parallel_state.py::GroupCoordinator.make_sibling_device_group": "self, group_desc=None",
}
_POSTPROCESS: Final = f"{RUNNER}::GPUModelRunner.postprocess_sampled"
_POSTPROCESS_0_25: Final = "self, idx_mapping, sampled_tokens, num_sampled, num_rejected, query_start_loc=None"
_PP_0_25: Final = _PP_COMMON | {
    f"{_HANDLER}.receive": "self, input_batch",
    f"{_HANDLER}.get_prev_sampled_outputs": "self",
    _POSTPROCESS: _POSTPROCESS_0_25,
}
_PP_RELAY: Final = {
    f"{_HANDLER}.configure_aux_hidden_state_relay": "self, model",
    f"{_HANDLER}.relay_aux_hidden_states": "self, intermediate_tensors, output_intermediate_tensors",
}
_PP_0_32: Final = (
    _PP_COMMON
    | _PP_RELAY
    | {
        f"{_HANDLER}.receive": "self, input_batch",
        f"{_HANDLER}.broadcast_drafts": "self, draft_tokens, input_batch",
        f"{_HANDLER}.get_prev_sampled_outputs": "self, draft_tokens_to_update=None",
        _POSTPROCESS: _POSTPROCESS_0_25,
    }
)
_PP_0_33: Final = (
    _PP_COMMON
    | _PP_RELAY
    | {
        f"{_HANDLER}.receive": "self, input_batch, recv_drafts",
        f"{_HANDLER}.broadcast_drafts": "self, draft_tokens",
        f"{_HANDLER}.get_prev_sampled_outputs": "self",
        _POSTPROCESS: f"{_POSTPROCESS_0_25}, draft_tokens=None",
    }
)
_PP_ATTRIBUTES_0_25: Final = frozenset({"broadcast", "get_prev_sampled_outputs", "on_req_idx_freed", "receive"})
_PP_ATTRIBUTES_0_32: Final = _PP_ATTRIBUTES_0_25 | {
    "broadcast_drafts",
    "configure_aux_hidden_state_relay",
    "relay_aux_hidden_states",
}

RECORDS: Final[tuple[HookPoints, ...]] = (
    HookPoints(
        version="0.25.1",
        signatures=_COMMON
        | {
            f"{RUNNER}::GPUModelRunner.execute_model": _EXECUTE_0_25,
            f"{_SPEC_DECODE}/__init__.py::init_speculator": "vllm_config, device",
            f"{_SPEC_DECODE}/speculator.py::BaseSpeculator.propose": _PROPOSE_0_25,
            f"{_SPEC_DECODE}/dflash/speculator.py::DFlashSpeculator.propose": _PROPOSE_0_25,
            f"{_SPEC_DECODE}/speculator.py::BaseSpeculator.capture": "self, attn_states",
            f"{_SPEC_DECODE}/speculator.py::DraftModelSpeculator.set_attn": (
                "self, model_state, kv_cache_config, block_tables"
            ),
            "v1/core/kv_cache_utils.py::_annotate_eagle_groups_deepseek_v4": (
                "vllm_config, kv_cache_spec, kv_cache_groups"
            ),
            "v1/core/kv_cache_manager.py::KVCacheManager.__init__": (
                "self, kv_cache_config, max_model_len, scheduler_block_size, hash_block_size, max_num_batched_tokens=None, "
                "enable_caching=True, use_eagle=False, log_stats=False, enable_kv_cache_events=False, dcp_world_size=1, "
                "pcp_world_size=1, metrics_collector=None, watermark=0.0"
            ),
            f"{_SPEC_DECODE}/eagle/eagle3_utils.py::get_eagle3_aux_layers_from_config": "spec_config",
            _LAST_TOUCH: "model, spec_config",
            _REJECTION: _REJECTION_0_25,
            _GUMBEL: f"{_GUMBEL_HEAD}, output_processed_logits=None, output_processed_logits_col=None, use_fp64=False",
        },
        speculator_attributes=_ATTRIBUTES_0_25,
        gates=_GATES_EVERYWHERE
        | {
            "config/vllm.py::VllmConfig.use_v2_model_runner",
            "distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py::MooncakeStoreWorker.__init__",
            "v1/core/kv_cache_utils.py::_annotate_eagle_groups_deepseek_v4",
        },
        cached_block_drop=CachedBlockDrop.BY_SCHEDULER,
        mtp_buffer=_MTP_BUFFER_0_25,
        pp_signatures=_PP_0_25,
        pp_handler_attributes=_PP_ATTRIBUTES_0_25,
        divides_draft_logits=False,
    ),
    HookPoints(
        version="0.32.0",
        signatures=_COMMON | _SINCE_0_32 | {_LAST_TOUCH: "model, spec_config", _REJECTION: _REJECTION_0_32},
        speculator_attributes=_ATTRIBUTES_0_32,
        gates=_GATES_EVERYWHERE
        | _GATES_SINCE_0_32
        | {
            "model_executor/layers/mamba/checkpoint.py::MambaPrefillCheckpointBuilder.build",
            "v1/core/kv_cache_utils.py::_annotate_eagle_groups",
            "v1/core/kv_cache_utils.py::_uses_trailing_mtp_layers",
            "v1/core/kv_cache_utils.py::_warn_if_unannotated_eagle_mamba",
        },
        cached_block_drop=CachedBlockDrop.BY_CONFIG,
        mtp_buffer=_MTP_BUFFER_0_32,
        pp_signatures=_PP_0_32,
        pp_handler_attributes=_PP_ATTRIBUTES_0_32,
        divides_draft_logits=True,
    ),
    HookPoints(
        version="0.33.0",
        signatures=_COMMON
        | _SINCE_0_32
        | {
            _LAST_TOUCH: "model, spec_config, use_pp=False",
            _REJECTION: f"{_REJECTION_0_32}, fly_window_size=0, fly_entropy_threshold=0.3, fly_entropy_top_k=3",
        },
        speculator_attributes=_ATTRIBUTES_0_32,
        gates=_GATES_EVERYWHERE
        | _GATES_SINCE_0_32
        | {
            "config/speculative.py::SpeculativeConfig.max_num_new_slots_for_drafting",
            "config/speculative.py::SpeculativeConfig.needs_eagle_block_drop",
            "config/vllm.py::VllmConfig._set_max_num_scheduled_tokens",
            "config/vllm.py::VllmConfig.num_hash_lookahead_tokens",
            "distributed/kv_transfer/kv_connector/v1/umbp/scheduler.py::UMBPStoreConnectorScheduler.__init__",
            "model_executor/layers/mamba/checkpoint.py::MambaPrefillCheckpointBuilder.__init__",
            "v1/core/kv_cache_planning.py::get_global_kv_cache_groups",
            "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py::requires_aux_hidden_states",
        },
        cached_block_drop=CachedBlockDrop.NONE,
        mtp_buffer=_MTP_BUFFER_0_33,
        pp_signatures=_PP_0_33,
        pp_handler_attributes=_PP_ATTRIBUTES_0_32,
        divides_draft_logits=True,
    ),
)

# Fields of the runner's batch that the speculator reads, in every version.
INPUT_BATCH_FIELDS: Final = frozenset(
    {
        "idx_mapping",
        "idx_mapping_np",
        "num_draft_tokens_per_req",
        "num_reqs",
        "num_scheduled_tokens",
        "positions",
        "query_start_loc",
        "req_ids",
    }
)

# Fields of the scheduler's output that decide how many drafts are verified, in every version.
SCHEDULER_OUTPUT_FIELDS: Final = frozenset(
    {
        "has_structured_output_requests",
        "num_invalid_spec_tokens",
        "num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "total_num_scheduled_tokens",
    }
)

SUPPORTED: Final = ", ".join(record.version for record in RECORDS)


class Sources(Protocol):
    """The Python files of one vLLM, by path inside the package."""

    def read(self, path: str) -> str | None: ...

    def paths(self) -> Iterator[str]: ...


class Folder:
    """A package folder: installed, or unpacked."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, path: str) -> str | None:
        try:
            return (self._root / path).read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def paths(self) -> Iterator[str]:
        for file in sorted(self._root.rglob("*.py")):
            yield file.relative_to(self._root).as_posix()


class Wheel:
    """The package folder `vllm` inside a wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)

    def read(self, path: str) -> str | None:
        try:
            return self._zip.read(f"vllm/{path}").decode()
        except KeyError:
            return None

    def paths(self) -> Iterator[str]:
        for name in sorted(self._zip.namelist()):
            if name.startswith("vllm/") and name.endswith(".py"):
                yield name.removeprefix("vllm/")


def installed_sources() -> Folder | None:
    """The vLLM that this interpreter would import; None where there is none. Imports nothing."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Folder(Path(next(iter(spec.submodule_search_locations))))


def version_of(sources: Sources) -> str | None:
    """The version that the package itself states, without the build's local part."""
    text = sources.read(_VERSION_FILE) or ""
    found = re.search(r"^__version__\s*=\s*(?:version\s*=\s*)?['\"]([^'\"+]+)", text, re.MULTILINE)
    return found[1] if found else None


def record_for(version: str | None) -> HookPoints:
    """Raises ConfigError for a version that is not recorded."""
    for record in RECORDS:
        if record.version == version:
            return record
    raise ConfigError(
        f"vLLM {version or 'of an unknown version'} is not one that this Farspark knows ({SUPPORTED}); install one of "
        "those, or a Farspark that knows it, or start without VLLM_DSPARK_REMOTE"
    )


def check_hook_points(sources: Sources) -> HookPoints:
    """The record that `sources` fulfil, signatures and attributes. Raises ConfigError naming what differs."""
    record = record_for(version_of(sources))
    _refuse_if_any(
        [*_signature_differences(sources, record.signatures), *_attribute_differences(sources, record)],
        record,
        "start without VLLM_DSPARK_REMOTE",
    )
    return record


def check_pp_hook_points(sources: Sources) -> HookPoints:
    """The record whose pipeline is as `sources` have it. Raises ConfigError naming what differs."""
    record = record_for(version_of(sources))
    found = _attributes_of(ast.parse(sources.read(RUNNER) or ""), "pp_handler")
    differences = [
        f"{RUNNER} {'reads' if name in found else 'does not read'} `pp_handler.{name}`"
        for name in sorted(found ^ record.pp_handler_attributes)
    ]
    _refuse_if_any(
        [*_signature_differences(sources, record.pp_signatures), *differences],
        record,
        "unset every VLLM_DSPARK_PP_ setting",
    )
    return record


def refuse_no_drafts_in_pipeline(record: HookPoints) -> None:
    """Raises ConfigError for a version in which the token transport has nothing to carry."""
    if not record.drafts_in_pipeline:
        able = ", ".join(one.version for one in RECORDS if one.drafts_in_pipeline)
        raise ConfigError(
            f"vLLM {record.version} takes no drafter in a pipeline (it brings neither the tapped hidden states to the last "
            f"stage nor the drafts back), so the token transport has nothing to carry; use vLLM {able}, or unset every "
            "VLLM_DSPARK_PP_ and VLLM_WEDGE_AB_ setting"
        )


def _refuse_if_any(differences: Sequence[str], record: HookPoints, remedy: str) -> None:
    if differences:
        raise ConfigError(
            f"this vLLM says it is {record.version} but is not the {record.version} that Farspark knows: "
            f"{'; '.join(differences)}. Install an unchanged vLLM ({SUPPORTED}) or {remedy}"
        )


def check_everything(sources: Sources) -> HookPoints:
    """`check_hook_points`, and that vLLM tests the method's name in no place but the recorded ones, and touches the MTP buffer in
    no other way (reads every file); the pipeline's hook points too."""
    check_pp_hook_points(sources)
    record = check_hook_points(sources)
    found = frozenset(find_gates(sources))
    problems = [f"a test on the method at {gate} is not recorded" for gate in sorted(found - record.gates)]
    problems += [f"the recorded test on the method at {gate} is not there" for gate in sorted(record.gates - found)]
    problems += mtp_buffer_differences(sources, record)
    if problems:
        raise ConfigError(f"vLLM {record.version}: {'; '.join(problems)}")
    return record


def _signature_differences(sources: Sources, signatures: Mapping[str, str]) -> Iterator[str]:
    trees: dict[str, ast.Module | None] = {}
    for name, expected in signatures.items():
        path, qualified = name.split("::")
        if path not in trees:
            text = sources.read(path)
            trees[path] = None if text is None else ast.parse(text)
        tree = trees[path]
        function = None if tree is None else _find(tree, qualified.split("."))
        if function is None:
            yield f"{name} does not exist"
        elif (found := parameters(function)) != expected:
            yield f"{name}({found}), expected ({expected})"


def _attribute_differences(sources: Sources, record: HookPoints) -> Iterator[str]:
    found = speculator_attributes(ast.parse(sources.read(RUNNER) or ""))
    for name in sorted(found ^ record.speculator_attributes):
        yield f"{RUNNER} {'reads' if name in found else 'does not read'} `speculator.{name}`"
    for path, class_name, needed in (
        (_INPUT_BATCH, "InputBatch", INPUT_BATCH_FIELDS),
        (_SCHEDULER_OUTPUT, "SchedulerOutput", SCHEDULER_OUTPUT_FIELDS),
    ):
        fields = _annotated_fields(ast.parse(sources.read(path) or ""), class_name)
        for name in sorted(needed - fields):
            yield f"{path}::{class_name} has no field {name}"


def _find(tree: ast.AST, qualified: Sequence[str]) -> ast.FunctionDef | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == qualified[0]:
            if len(qualified) > 1:
                return _find(node, qualified[1:])
            return node if isinstance(node, ast.FunctionDef) else None
    return None


def _annotated_fields(tree: ast.Module, class_name: str) -> frozenset[str]:
    return frozenset(
        statement.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == class_name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    )


def parameters(function: ast.FunctionDef) -> str:
    """The parameter list as it is written, annotations left out."""
    bare = ast.parse(ast.unparse(function.args).join(("def f(", "): pass"))).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in [*bare.args.posonlyargs, *bare.args.args, *bare.args.kwonlyargs, bare.args.vararg, bare.args.kwarg]:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(bare.args)


def speculator_attributes(tree: ast.AST) -> frozenset[str]:
    """What a runner reads or calls on `self.speculator`, or on a local of that name."""
    return _attributes_of(tree, "speculator")


def _attributes_of(tree: ast.AST, name: str) -> frozenset[str]:
    def is_it(node: ast.AST) -> bool:
        return (isinstance(node, ast.Attribute) and node.attr == name) or (
            isinstance(node, ast.Name) and node.id == name
        )

    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_it(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            subject, *rest = node.args
            if is_it(subject) and isinstance(rest[0], ast.Constant):
                names.add(str(rest[0].value))
    return frozenset(names)


_METHOD_TESTS: Final = frozenset(
    {"use_dspark", "use_eagle", "use_eagle_block_drop", "needs_eagle_block_drop", "uses_draft_kv_cache"}
)
# Models may look at their own drafter; benchmarks serve nobody.
_NOT_LOOKED_AT: Final = ("models/", "model_executor/models/", "benchmarks/")


def find_gates(sources: Sources) -> Iterator[str]:
    """Every function that compares something with "dspark" or asks a `SpeculativeConfig` whether it is of that kind."""
    for path in sources.paths():
        if path.startswith(_NOT_LOOKED_AT):
            continue
        text = sources.read(path) or ""
        if "dspark" in text or "use_eagle" in text:
            yield from (f"{path}::{name}" for name in _gates_in(ast.parse(text), ()))


def _gates_in(node: ast.AST, scope: tuple[str, ...]) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Compare):
            if any(isinstance(part, ast.Constant) and part.value == "dspark" for part in ast.walk(child)):
                yield ".".join(scope)
        elif isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in _METHOD_TESTS:
            yield ".".join(scope)
        is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _gates_in(child, (*scope, child.name) if is_scope else scope)  # type: ignore[attr-defined]


def mtp_buffer_differences(sources: Sources, record: HookPoints) -> Iterator[str]:
    """What is not as recorded about the MTP buffer, as sentences (reads every file)."""
    found = dict(find_mtp_buffer_uses(sources))
    for name in sorted(found.keys() | record.mtp_buffer.keys()):
        was, now = record.mtp_buffer.get(name), found.get(name)
        if was is not now:
            yield (
                f"{name} {now.value if now else 'does not touch'} the MTP buffer, recorded is "
                f"that it {was.value if was else 'does not touch'} it"
            )


def find_mtp_buffer_uses(sources: Sources) -> Iterator[tuple[str, BufferUse]]:
    """Every function of the models and of the V2 runner that touches the MTP buffer."""
    for path in sources.paths():
        if path.startswith(("models/", "model_executor/models/", "v1/worker/gpu/")):
            yield from ((f"{path}::{name}", use) for name, use in buffer_uses(sources.read(path) or ""))


def main(arguments: Sequence[str]) -> int:
    """Check the vLLM named on the command line, or the installed one, and say what was found."""
    if arguments and Path(arguments[0]).is_file():
        sources: Sources = Wheel(Path(arguments[0]))
    elif arguments:
        sources = Folder(Path(arguments[0]))
    else:
        installed = installed_sources()
        if installed is None:
            print("no vLLM is installed here; name a wheel or a package folder", file=sys.stderr)
            return os.EX_USAGE
        sources = installed
    try:
        record = check_everything(sources)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(
        f"vLLM {record.version}: {len({**record.signatures, **record.pp_signatures})} signatures, "
        f"{len(record.speculator_attributes | record.pp_handler_attributes)} attributes, "
        f"{len(record.gates)} tests on the method, {len(record.mtp_buffer)} users of the MTP buffer, all as recorded"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
