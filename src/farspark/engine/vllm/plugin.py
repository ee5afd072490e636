"""The vLLM plugin: with VLLM_DSPARK_REMOTE set, DSpark's speculator is built by Farspark; unset, nothing is touched.

vLLM logs and skips a plugin whose import fails, but not one whose function raises. So this module imports only what cannot
fail, and everything that can is done, and raises, inside `register`.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farspark.engine.config import EngineConfig
    from farspark.engine.vllm.remote import RemoteDrafter
    from farspark.engine.vllm.versions import HookPoints

_SWITCH = "VLLM_DSPARK_REMOTE"
_METHOD = "dspark"
# A name that begins so asks for the pipeline's token transport, with an endpoint or without.
_PP_SWITCHES = ("VLLM_DSPARK_PP_", "VLLM_WEDGE_AB_")
_is_registered = False
_carries_tokens = False  # the token transport is in this process


def register() -> None:
    """Called by vLLM in every process: front end, engine core, workers. Raises ConfigError where Farspark was asked for
    and cannot be had."""
    global _is_registered
    if _is_registered:
        return
    if any(name.startswith(_PP_SWITCHES) for name in os.environ):
        _is_registered = _install_pp()
    if not os.environ.get(_SWITCH, "").strip():
        return
    config, record = _prepare()
    _replace_init_speculator(config, record)
    _is_registered = True


def _install_pp() -> bool:
    """Whether anything was switched on. Raises ConfigError for a bad setting and for a vLLM that is not known."""
    from farspark.engine.config import read_pp_config
    from farspark.engine.vllm.versions import (
        check_pp_hook_points,
        installed_sources,
        record_for,
        refuse_no_drafts_in_pipeline,
    )

    config = read_pp_config()
    if config is None:
        return False
    sources = installed_sources()
    refuse_no_drafts_in_pipeline(check_pp_hook_points(sources) if sources else record_for(None))

    from farspark.engine.vllm.pp.install import install

    global _carries_tokens
    install(config)
    _carries_tokens = config.transport
    return True


def speculator_for_overlay(vllm_config: Any, device: Any) -> Any:
    """What the branch of `farspark overlay` returns from vLLM's own `init_speculator`: the speculator that `register` would
    have put there, after everything else that `register` does. Raises ConfigError as that does.

    The branch runs only where a speculator is built. With more than one process to an engine, the one that schedules is
    another, and what belongs there is out of reach; that is said.
    """
    from farspark.engine.vllm.logs import log_where_vllm_logs

    config, record = _prepare()
    log_where_vllm_logs()
    check_cached_blocks(config, record, vllm_config)
    return _make_speculator(config, record, vllm_config, device)


def _prepare() -> tuple[EngineConfig, HookPoints]:
    """Read the settings, check this vLLM, and change what is changed for the whole process; once more changes nothing more."""
    from farspark.engine.config import KeepCachedBlocks, Policy, read_config
    from farspark.engine.vllm.kv_groups import keep_cached_blocks
    from farspark.engine.vllm.versions import check_hook_points, installed_sources, record_for

    config = read_config()
    assert config is not None
    sources = installed_sources()
    record = check_hook_points(sources) if sources else record_for(None)
    _refuse_old_runner()
    if config.policy is Policy.CAPACITY and config.keep_cached_blocks is not KeepCachedBlocks.NEVER:
        keep_cached_blocks(record.cached_block_drop)
    return config, record


def check_cached_blocks(config: EngineConfig, record: HookPoints, vllm_config: Any) -> None:
    """Under an overlay: whether capacity keeps the last block of a prefix-cache hit in this engine. Raises ConfigError where it
    was told to and cannot; says so where it only cannot."""
    from farspark.engine.config import PREFIX, KeepCachedBlocks, Policy
    from farspark.engine.vllm.versions import CachedBlockDrop
    from farspark.errors import ConfigError

    executor = vllm_config.parallel_config.distributed_executor_backend
    if (
        config.policy is not Policy.CAPACITY
        or config.keep_cached_blocks is KeepCachedBlocks.NEVER
        or record.cached_block_drop is CachedBlockDrop.NONE
        or executor in ("uni", "external_launcher")  # scheduled in this process
        or getattr(vllm_config.speculative_config, "disable_eagle_block_drop", False)
    ):
        return
    remedy = "use the plugin, which reaches it"
    if record.cached_block_drop is CachedBlockDrop.BY_CONFIG:
        remedy += ', or add "disable_eagle_block_drop": true to the speculative config'
    sentence = (
        f"an overlay does not reach the process that schedules (executor {executor}), so prefix-cache hits lose their last "
        f"block; {remedy}"
    )
    if config.keep_cached_blocks is KeepCachedBlocks.ALWAYS:
        raise ConfigError(f"{PREFIX}_KEEP_CACHED_BLOCKS=1: {sentence}")
    logging.getLogger(__name__).warning("farspark: %s", sentence)


def _refuse_old_runner() -> None:
    from farspark.errors import ConfigError

    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1").strip().lower() in ("0", "false"):
        raise ConfigError(
            f"VLLM_USE_V2_MODEL_RUNNER=0 selects the V1 model runner, which has no DSpark; unset it to use {_SWITCH}"
        )


def _replace_init_speculator(config: EngineConfig, record: HookPoints) -> None:
    import vllm.v1.worker.gpu.spec_decode as spec_decode

    from farspark.engine.vllm.logs import log_where_vllm_logs

    original = spec_decode.init_speculator

    @functools.wraps(original)
    def init_speculator(vllm_config: Any, device: Any, *rest: Any, **more: Any) -> Any:
        method = vllm_config.speculative_config.method
        if method != _METHOD:
            logging.getLogger(__name__).warning(
                "farspark: %s is set, but this engine drafts with method %r; nothing is remote", _SWITCH, method
            )
            return original(vllm_config, device, *rest, **more)
        log_where_vllm_logs()
        return _make_speculator(config, record, vllm_config, device)

    spec_decode.init_speculator = init_speculator
    # The runner imported the function by name, perhaps before this plugin was loaded.
    runner = sys.modules.get("vllm.v1.worker.gpu.model_runner")
    if runner is not None:
        runner.init_speculator = init_speculator  # type: ignore[attr-defined]


def _make_speculator(config: EngineConfig, record: HookPoints, vllm_config: Any, device: Any) -> Any:
    from farspark.engine.config import Policy
    from farspark.engine.vllm.mtp_buffer import reclaim_after_load
    from farspark.engine.vllm.remote import Admissions
    from farspark.engine.vllm.speculator import make_speculator

    refuse_unsupported(config, vllm_config)
    # A rank of a dense target does not even know that there are others: its size is 1, only the index tells them apart.
    config = config.for_dp_rank(vllm_config.parallel_config.data_parallel_index)
    admissions = Admissions()
    _note_admissions(admissions)
    _refuse_shared_noise(config, record)
    speculator = make_speculator(
        config, vllm_config, device, admissions, divides_draft_logits=record.divides_draft_logits
    )
    _serve_after_warmup(speculator.remote)
    if config.policy is Policy.CAPACITY and config.reclaims_mtp_buffer:
        reclaim_after_load(record, lambda found: speculator.remote.note(mtp_buffer=found))
    return speculator


def refuse_unsupported(config: EngineConfig, vllm_config: Any) -> None:
    """Raises ConfigError with what is not supported and what to do."""
    from farspark.engine.config import SAMPLED
    from farspark.errors import ConfigError

    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    draft_config = speculative.draft_model_config.hf_config
    num_drafts = speculative.num_speculative_tokens
    lookahead = getattr(vllm_config, "num_lookahead_tokens", num_drafts)
    refusals = (
        (
            max(parallel.decode_context_parallel_size, getattr(parallel, "prefill_context_parallel_size", 1)) > 1,
            "context parallelism spreads a request's hidden states over the ranks; start with "
            "--decode-context-parallel-size 1 and --prefill-context-parallel-size 1",
        ),
        *_pipeline_refusals(config, parallel.pipeline_parallel_size),
        (
            getattr(vllm_config, "watermark_config", None) is not None,
            "draft watermarking needs the drafter's own sampling; start without a watermark config",
        ),
        (
            (getattr(speculative, "dspark_draft_topk", None) or getattr(draft_config, "dspark_draft_topk", None))
            is not None,
            "dspark_draft_topk changes the drafts and the worker does not know it; leave it out of the speculative config",
        ),
        (
            speculative.draft_sample_method != "greedy" and not config.sampled,
            f"draft_sample_method={speculative.draft_sample_method!r} needs the draft logits, which stay at the worker; "
            f"set {SAMPLED}=1, which brings 32 probabilities of each draft, or use 'greedy', which is lossless too",
        ),
        (
            config.sampled and getattr(speculative, "enable_adaptive_verification", False),
            f"{SAMPLED}=1 needs a number of drafts that does not depend on what was drawn, and that enable_adaptive_verification "
            "keeps to that was never proven; leave one of them out",
        ),
        (
            not getattr(vllm_config, "use_v2_model_runner", True),
            "this engine would use the V1 model runner, which has no DSpark; remove what selects it",
        ),
        (
            lookahead < num_drafts,
            f"vLLM reserves {lookahead} lookahead tokens for {num_drafts} drafts; it does not take this method for DSpark",
        ),
    )
    for holds, sentence in refusals:
        if holds:
            raise ConfigError(f"{_SWITCH}: {sentence}, or start without {_SWITCH}")


def _refuse_shared_noise(config: EngineConfig, record: HookPoints) -> None:
    """Raises ConfigError where a local drafter that stands in would draw by the noise that the target resamples by."""
    from farspark.engine.config import PREFIX, SAMPLED, Policy
    from farspark.errors import ConfigError

    if config.sampled and config.policy is not Policy.CAPACITY and not record.divides_draft_logits:
        raise ConfigError(
            f"{SAMPLED}=1 with {PREFIX}_POLICY={config.policy.value}: the local drafter of vLLM {record.version} draws by the "
            f"very noise that the target resamples by, which is not lossless; use {PREFIX}_POLICY=capacity, or a newer vLLM, or "
            "unset it"
        )


def _pipeline_refusals(config: EngineConfig, stages: int) -> list[tuple[bool, str]]:
    """Pairs of whether it holds and what to say, for an engine of so many pipeline stages."""
    from farspark.engine.config import PP_PREFIX, PREFIX, Policy
    from farspark.engine.depth import OFF, POLICY

    if stages == 1:
        return []
    return [
        (
            not _carries_tokens,
            "vLLM's own way of bringing a pipeline's drafts to its first stages can hang or go wrong without a word; "
            f"set {PP_PREFIX}_TRANSPORT=1 and use the plugin (an overlay does not reach the other stages), or use tensor "
            "parallelism",
        ),
        (
            config.policy is not Policy.CAPACITY,
            f"{PREFIX}_POLICY={config.policy.value} keeps a local drafter, which was never tried beside a remote one in a "
            f"pipeline; set {PREFIX}_POLICY=capacity, or use tensor parallelism",
        ),
        (
            config.depth_policy != OFF or config.depth_file is not None,
            f"{POLICY}={config.depth_policy} leaves drafts out on the last stage alone, and a pipeline's stages must agree on "
            f"every step's tokens; set {POLICY}=off and no depth file",
        ),
    ]


def _note_admissions(admissions: Any) -> None:
    from vllm.v1.worker.gpu.states import RequestState

    original = RequestState.add_request

    @functools.wraps(original)
    def add_request(self: Any, req_id: str, *rest: Any, **more: Any) -> Any:
        result = original(self, req_id, *rest, **more)
        admissions.admit(self.req_id_to_index[req_id], req_id)
        return result

    RequestState.add_request = add_request


def _serve_after_warmup(remote: RemoteDrafter) -> None:
    from farspark.engine.vllm.warmup import after_warmup

    def serve(runner: Any) -> None:
        _check_gates(runner, remote)
        _act_on_depths(runner, remote)
        remote.start_serving()

    after_warmup(serve)


def _act_on_depths(runner: Any, remote: RemoteDrafter) -> None:
    from farspark.engine.config import Policy
    from farspark.engine.vllm.depths import price_remote_round, verify_fewer

    config = remote.config
    if config.policy is Policy.SHADOW or runner.vllm_config.parallel_config.pipeline_parallel_size > 1:
        return  # a pipeline's stages verify what was scheduled, all of it
    if config.asynchronous is None:
        # Asynchronous rounds are not over when the next step is scheduled, on no rank: every draft is verified, or those that
        # adaptive verification picks on the device. The settings decide, so that all ranks do the same.
        verify_fewer(runner, remote, is_async=runner.vllm_config.scheduler_config.async_scheduling)
    adaptive = getattr(runner, "adaptive_verification", None)
    is_priced = config.depth_policy.mode.masks or config.depth_file is not None
    if adaptive is not None and is_priced and config.draft_ms is not None:
        price_remote_round(adaptive, config.draft_ms)


def _check_gates(runner: Any, remote: RemoteDrafter) -> None:
    """The started engine must hand us what we live on. Raises ConfigError."""
    from farspark.errors import ConfigError

    if getattr(runner.speculator, "remote", None) is not remote:
        raise ConfigError(f"{_SWITCH}: the started runner drafts with {runner.speculator!r}, not with Farspark")
    if not runner.use_aux_hidden_state_outputs:
        raise ConfigError(f"{_SWITCH}: the started runner does not tap the target's hidden states")
