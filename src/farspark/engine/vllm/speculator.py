"""vLLM's speculators with the drafter elsewhere: one class per policy, thin around `RemoteDrafter`.

`propose` differs between versions only in what follows `seeds`; what Farspark reads of that comes by keyword in all of them.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from farspark.engine.config import EngineConfig, Policy, ShadowUse
from farspark.engine.gather.torch_gather import StepTensors
from farspark.engine.result import RoundOutcome
from farspark.engine.shape import ModelShape
from farspark.engine.vllm.depths import worth_verifying
from farspark.engine.vllm.proposal import Proposal
from farspark.engine.vllm.remote import Admissions, Batch, RemoteDrafter, RemoteDrafts, TpGroup
from farspark.errors import ConfigError
from farspark.wire.layout import SUPPORT_IDS

logger = logging.getLogger(__name__)


def make_speculator(
    config: EngineConfig,
    vllm_config: VllmConfig,
    device: torch.device,
    admissions: Admissions,
    *,
    divides_draft_logits: bool,
) -> _WithLocalDrafter | CapacitySpeculator:
    """The speculator of the policy that `config` names; `divides_draft_logits` as this vLLM's record has it."""
    kinds = {
        Policy.SHADOW: ShadowSpeculator,
        Policy.RESILIENCE: ResilienceSpeculator,
        Policy.CAPACITY: CapacitySpeculator,
    }
    speculator = kinds[config.policy](vllm_config, device)
    speculator.remote = make_remote(config, vllm_config, device, admissions)
    if config.sampled:
        proposal = Proposal(
            speculator.remote.shape,
            device,
            is_shared=config.policy is not Policy.CAPACITY,
            is_divided=divides_draft_logits,
        )
        speculator.sample(proposal)
    return speculator


def make_remote(
    config: EngineConfig, vllm_config: VllmConfig, device: torch.device, admissions: Admissions
) -> RemoteDrafter:
    group = get_tp_group()
    shape = model_shape(config, vllm_config)
    logger.info(
        "farspark: remote drafter chosen: policy %s, TP rank %d of %d, DP rank %d, endpoint %s, context %d, ring %d",
        config.policy.value,
        group.rank_in_group,
        group.world_size,
        vllm_config.parallel_config.data_parallel_index,
        ",".join(map(str, config.endpoints)),
        shape.context,
        shape.ring,
    )
    return RemoteDrafter(
        config,
        shape,
        max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        device=device,
        tp=TpGroup(group.rank_in_group, group.world_size, lambda tensor: group.broadcast(tensor, src=0)),
        admissions=admissions,
        engine=engine_name(vllm_config),
        facts={"not_allocated": not_allocated(vllm_config)} if config.policy is Policy.CAPACITY else {},
        caps=schedule_caps(vllm_config),
    )


def engine_name(vllm_config: VllmConfig) -> str:
    """What the worker's log and statistics call this engine."""
    rank = vllm_config.parallel_config.data_parallel_index
    name = f"vllm {vllm_config.model_config.model}"[-200:]
    return f"{name}, DP rank {rank}" if rank else name


def schedule_caps(vllm_config: VllmConfig) -> list[int] | None:
    """The dynamic speculation schedule's cap by number of requests, index 0 unused; None where none is configured."""
    speculative = vllm_config.speculative_config
    if speculative.num_speculative_tokens_per_batch_size is None:
        return None
    caps: list[int] = build_dynamic_sd_schedule_lookup(
        speculative.num_speculative_tokens_per_batch_size,
        vllm_max_batch_size=vllm_config.scheduler_config.max_num_seqs,
        vllm_num_speculative_tokens=speculative.num_speculative_tokens,
    )
    return caps


def model_shape(config: EngineConfig, vllm_config: VllmConfig) -> ModelShape:
    """What both sides must agree on, from the two models' own configs. Raises ConfigError where no taps are named."""
    speculative = vllm_config.speculative_config
    taps = get_eagle3_aux_layers_from_config(speculative)
    if not taps:
        raise ConfigError(
            f"the drafter {speculative.draft_model_config.model} names no target layers to tap (target_layer_ids, "
            "dspark_target_layer_ids or aux_hidden_state_layer_ids in its config.json); the remote drafter needs them"
        )
    max_model_len = vllm_config.model_config.max_model_len
    context, ring = config.context_and_ring(sliding_window(speculative.draft_model_config.hf_config), max_model_len)
    return ModelShape(
        num_drafts=speculative.num_speculative_tokens,
        # The target's true vocabulary: a drafter's head may be padded past it, and such an id must never reach an embedding.
        vocab_size=vllm_config.model_config.get_vocab_size(),
        hidden_size=vllm_config.model_config.get_hidden_size(),
        taps=len(set(taps)),  # vLLM taps each layer once, in ascending order
        slots=vllm_config.scheduler_config.max_num_seqs,
        context=context,
        ring=ring,
        max_position=max_model_len,
        support=SUPPORT_IDS if config.sampled else 0,
    )


def sliding_window(hf_config: Any) -> int | None:
    """The window of a drafter all of whose layers slide; None for one that sees everything."""
    if getattr(hf_config, "model_type", None) in ("deepseek_v4", "deepseek_v41"):
        return int(hf_config.sliding_window)
    block = getattr(hf_config, "dflash_config", None) or {}
    window = block.get("swa_window_size") or getattr(hf_config, "sliding_window", None)
    kinds = set(getattr(hf_config, "layer_types", None) or ["full_attention"])
    slides = block.get("use_swa") or kinds == {"sliding_attention"}
    return int(window) if window and slides else None


def not_allocated(vllm_config: VllmConfig) -> dict[str, int | None]:
    """What a local drafter would take and capacity does not, as far as the configs and the checkpoint say."""
    draft = vllm_config.speculative_config.draft_model_config
    parallel = vllm_config.parallel_config
    hf_config = draft.hf_config
    layers = getattr(hf_config, "num_hidden_layers", None)
    kv_bytes = None
    if layers and not draft.use_mla:
        values = 2 * draft.get_num_kv_heads(parallel) * draft.get_head_size()
        kv_bytes = layers * values * torch.empty(0, dtype=draft.dtype).element_size()
    return {
        "draft_weight_bytes_all_ranks": None
        if draft.model == vllm_config.model_config.model
        else weight_bytes(draft.model),
        "draft_kv_bytes_per_token_per_rank": kv_bytes,
    }


def weight_bytes(model: str) -> int | None:
    """Bytes of a checkpoint folder's tensors; None where `model` is not a local folder with safetensors."""
    folder = Path(model)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    return sum(file.stat().st_size for file in files) or None


LocalDraft = Callable[[int | None], torch.Tensor]


class _Remote:
    """What all policies have in common: the remote drafter around `propose`. In front of vLLM's class in the order of bases."""

    remote: RemoteDrafter
    proposal: Proposal | None = None  # None: drafts are not sampled
    draft_logits: (
        torch.Tensor | None
    )  # what the rejection sampler takes drafts to be drawn from; None: they are certain

    def sample(self, proposal: Proposal) -> None:
        """Drafts are sampled, from now on. A local drafter that finds `draft_logits` draws its own from what it writes there."""
        self.proposal = proposal
        self.draft_logits = proposal.logits
        self.remote.note(sampled={"support": proposal.support, "device_bytes_per_rank": proposal.nbytes})

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *rest: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **more: Any,
    ) -> torch.Tensor:
        n, context = input_batch.num_reqs, self.remote.shape.context
        query_lengths = input_batch.num_scheduled_tokens[:n].tolist()
        step = StepTensors(
            hidden=aux_hidden_states or (),
            positions=input_batch.positions,
            query_start_loc=input_batch.query_start_loc[: n + 1],
            slots=input_batch.idx_mapping[:n],
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            last_sampled=last_sampled,
            next_prefill_tokens=next_prefill_tokens,
            row_bound=sum([min(length, context) for length in query_lengths]),
            # The rows of a round that wants no drafts are needed all the same: the next block reads them.
            wants_drafts=num_speculative_tokens is None or num_speculative_tokens > 0,
            temperature=temperature,
            seeds=seeds,
        )

        def local(num_drafts: int | None) -> torch.Tensor:
            known = {} if num_drafts is None or not _TAKES_NUM_DRAFTS else {"num_speculative_tokens": num_drafts}
            drafts: torch.Tensor = super(_Remote, self).propose(  # type: ignore[misc]
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                *rest,
                dummy_run=dummy_run,
                **more,
                **known,
            )
            return drafts

        if dummy_run or not self.remote.is_serving:
            self.remote.rehearse(step)
            return self._rehearsed(local, n, num_speculative_tokens)
        # Ahead of a local draft on the stream, so that the worker drafts while the device does.
        self.remote.begin(step)
        num_drafts = input_batch.num_draft_tokens_per_req
        batch = Batch(
            input_batch.idx_mapping_np[:n].tolist(),
            query_lengths,
            None if num_drafts is None else num_drafts[:n].tolist(),
        )
        return self._drafts(local, batch, step, num_speculative_tokens)

    def _note_draws(self, step: StepTensors, remote: RemoteDrafts) -> None:
        """Once all that verifies drafts of a step before has been enqueued."""
        if self.proposal is not None:
            assert step.temperature is not None
            self.proposal.put(step.slots, remote, step.temperature)

    def _rehearsed(self, local: LocalDraft, n: int, num_drafts: int | None) -> torch.Tensor:
        """The drafts [n, N] of a step that is no user's."""
        raise NotImplementedError

    def _drafts(self, local: LocalDraft, batch: Batch, step: StepTensors, num_drafts: int | None) -> torch.Tensor:
        """The drafts to verify, [n, N]. `local(k)` runs the local drafter: k = 0 keeps its context current and drafts nothing."""
        raise NotImplementedError


class CapacitySpeculator(_Remote, BaseSpeculator):  # type: ignore[misc]
    """No draft model, no draft attention layer, no graphs: what is verified comes from the worker, or is nothing.

    Not a DraftModelSpeculator, so the runner never asks it to load a model or to set up attention.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        speculative = vllm_config.speculative_config
        max_requests = vllm_config.scheduler_config.max_num_seqs
        shape = (max_requests, speculative.num_speculative_tokens)
        self.draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros(shape, dtype=torch.float32, device=device)
        self.draft_logits = None
        self.supports_mm_inputs = False
        self.enable_adaptive_verification = getattr(speculative, "enable_adaptive_verification", False)
        # Where the runner looks for a draft model it finds one without parameters.
        self.model = torch.nn.Module()

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing of a remote draft is captured."""

    def capture(self, *captured: Any) -> None:
        """Nothing of a remote draft is captured."""

    def _rehearsed(self, local: LocalDraft, n: int, num_drafts: int | None) -> torch.Tensor:
        # The runner writes -1 past the drafts that it schedules.
        if self.enable_adaptive_verification:
            self.draft_token_confidence_probs[:n].zero_()
        return self.draft_tokens[:n].zero_()

    def _drafts(self, local: LocalDraft, batch: Batch, step: StepTensors, num_drafts: int | None) -> torch.Tensor:
        remote = self.remote.finish(batch)
        self._note_draws(step, remote)
        n = len(batch.slots)
        if self.enable_adaptive_verification:  # nobody else reads them
            self.draft_token_confidence_probs[:n].copy_(worth_verifying(remote))
        return self.draft_tokens[:n].copy_(remote.tokens)


class _WithLocalDrafter(_Remote, DSparkSpeculator):  # type: ignore[misc]
    """vLLM's own drafter as it is, and the remote one beside it. What becomes of the two is the policy's."""

    def _rehearsed(self, local: LocalDraft, n: int, num_drafts: int | None) -> torch.Tensor:
        return local(num_drafts)

    def _local_confidences(self, n: int) -> torch.Tensor | None:
        """[n, N], where this vLLM computes them."""
        return self.draft_token_confidence_probs[:n] if getattr(self, "use_confidence_head", False) else None

    def _take_remote(self, drafts: torch.Tensor, remote: RemoteDrafts) -> None:
        """Put the worker's drafts, where there are any, into the places of `drafts` [n, N]."""
        usable = remote.ok[:, None] != 0
        drafts.copy_(torch.where(usable, remote.tokens.to(drafts.dtype), drafts))
        confidences = getattr(self, "draft_token_confidence_probs", None)
        if confidences is not None:
            mine = confidences[: len(drafts)]
            mine.copy_(torch.where(usable, worth_verifying(remote), mine))


class ShadowSpeculator(_WithLocalDrafter):
    """The local drafter runs every round and both are compared. Outputs and schedules are the local drafter's, unless the
    settings ask for the remote drafts."""

    def _drafts(self, local: LocalDraft, batch: Batch, step: StepTensors, num_drafts: int | None) -> torch.Tensor:
        clock = _LocalClock(self.device)
        drafts: torch.Tensor = local(num_drafts)
        clock.stop()
        remote = self.remote.finish(batch)
        self.remote.compare(drafts, self._local_confidences(len(batch.slots)))
        if self.remote.rank0 is not None:
            self.remote.rank0.stats.record_us("local_propose_us", clock.us())
        if self.remote.config.shadow_use is ShadowUse.REMOTE:
            self._take_remote(drafts, remote)
        return drafts


class ResilienceSpeculator(_WithLocalDrafter):
    """Remote drafts are verified. The local drafter's context is kept current every round, so that it can stand in at once,
    exactly, for what the worker did not bring; where vLLM allows it, it drafts only then."""

    def _drafts(self, local: LocalDraft, batch: Batch, step: StepTensors, num_drafts: int | None) -> torch.Tensor:
        # Ranks that run in step run the local drafter, whose layers may talk to the others', equally often: as often as in a
        # step without work, once and whole.
        may_skip = _TAKES_NUM_DRAFTS and self.vllm_config.parallel_config.data_parallel_size == 1
        drafts: torch.Tensor = local(0 if may_skip else num_drafts)  # some cannot skip the draft, and have drafted here
        remote = self.remote.finish(batch)
        # Decided by what was broadcast, so every rank runs the local draft or none does.
        if self.remote.outcome() in (RoundOutcome.FAILED, RoundOutcome.SOME_FAILED) and num_drafts != 0:
            if may_skip:
                drafts = local(num_drafts)
            self.remote.note_local_fallback(drafts, self._local_confidences(len(batch.slots)))
        self._take_remote(drafts, remote)
        self._note_draws(step, remote)
        return drafts


_TAKES_NUM_DRAFTS = "num_speculative_tokens" in inspect.signature(DSparkSpeculator.propose).parameters


class _LocalClock:
    """Time of the local draft: the device's own on CUDA, the host's elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[Any, Any] | None = None
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            self._events = event(enable_timing=True), event(enable_timing=True)
            self._events[0].record()
        self._began = time.perf_counter()
        self._took_us = 0.0

    def stop(self) -> None:
        self._took_us = (time.perf_counter() - self._began) * 1e6
        if self._events is not None:
            self._events[1].record()

    def us(self) -> float:
        """Waits for the device."""
        if self._events is None:
            return self._took_us
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]) * 1000)
