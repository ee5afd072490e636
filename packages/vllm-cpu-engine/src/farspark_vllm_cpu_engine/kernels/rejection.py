"""Verification of drafts: the kernels of vLLM's rejection sampler, for greedy and for sampled requests."""

from typing import Any

import numpy as np
import torch

from ..launch import Grid
from . import noise
from .memory import Array, float32_row, view
from .sampling import block_maxima, with_noise

_MINUS_INF = np.float32(-np.inf)


def flatten_sampled(
    grid: Grid,
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
) -> None:
    """Put each request's sampled tokens next to each other, from its first row of logits on."""
    flat, sampled = view(flat_sampled_ptr), view(sampled_ptr)
    counts, starts = view(num_sampled_ptr).tolist(), view(cu_num_logits_ptr).tolist()
    for row in range(grid[0]):
        flat[starts[row] : starts[row] + counts[row]] = sampled[row, : counts[row]]


def gather_draft_sampled(
    grid: Grid,
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
    BLOCK_SIZE: int,
) -> None:
    """Token and position of every row of logits; -1 for a draft of a request that has not sampled yet."""
    rows = view(logits_indices_ptr)[:num_logits]
    positions = view(positions_ptr)[rows]
    local_pos = view(expanded_local_pos_ptr)[:num_logits]
    prefill_lens = view(prefill_len_ptr)[view(expanded_idx_mapping_ptr)[:num_logits]]
    is_placeholder = (local_pos > 0) & (positions - local_pos < prefill_lens)
    view(draft_sampled_ptr)[:num_logits] = np.where(is_placeholder, -1, view(input_ids_ptr)[rows])
    view(pos_ptr)[:num_logits] = positions


def local_logits_stats(
    grid: Grid,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    num_speculative_steps: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
) -> Any:
    """Per block of the vocabulary, for rows that verify a draft: the largest logit, or for sampled requests its sum of exp.

    The draft's own logits, where they are given, are summed up in the same way.
    """
    if bool(torch.isnan(target_logits_ptr.sum())):
        return NotImplemented
    requests, local_pos = view(expanded_idx_mapping_ptr).tolist(), view(expanded_local_pos_ptr).tolist()
    temperatures = view(temp_ptr)
    target_argmax, target_max = view(target_local_argmax_ptr), view(target_local_max_ptr)
    target_sumexp = view(target_local_sumexp_ptr)
    draft_max, draft_sumexp = view(draft_local_max_ptr), view(draft_local_sumexp_ptr)
    for row in range(grid[0]):
        if local_pos[row] >= num_speculative_steps:
            continue
        divisor = temperatures[requests[row]]
        values = float32_row(target_logits_ptr[row, :vocab_size], BLOCK_SIZE)
        if divisor == 0.0:
            target_argmax[row], target_max[row] = block_maxima(values)
            continue
        target_max[row], target_sumexp[row] = _max_and_sumexp(values)
        if HAS_DRAFT_LOGITS:
            assert draft_logits_ptr is not None
            drafted = draft_logits_ptr[requests[row], local_pos[row], :vocab_size]
            draft_max[row], draft_sumexp[row] = _max_and_sumexp(float32_row(drafted, BLOCK_SIZE) / divisor)
    return None


def rejection(
    grid: Grid,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    vocab_num_blocks: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
) -> Any:
    """How many drafts of each request hold, and the tokens up to there.

    A greedy draft holds if it is the target's choice; a sampled one if its probability ratio exceeds a uniform number.
    """
    if SYNTHETIC_MODE or USE_BLOCK_VERIFICATION:
        return NotImplemented
    sampled, accepted_counts = view(sampled_ptr), view(rejected_steps_ptr)
    target_argmax, target_max = view(target_local_argmax_ptr), view(target_local_max_ptr)
    target_sumexp = view(target_local_sumexp_ptr)
    draft_max, draft_sumexp = view(draft_local_max_ptr), view(draft_local_sumexp_ptr)
    drafts, positions, starts = (
        view(draft_sampled_ptr).tolist(),
        view(pos_ptr).tolist(),
        view(cu_num_logits_ptr).tolist(),
    )
    requests, temperatures, seeds = view(idx_mapping_ptr).tolist(), view(temp_ptr), view(seed_ptr)
    target_lses, draft_lses = view(target_rejected_logsumexp_ptr), view(draft_rejected_logsumexp_ptr)
    for row in range(grid[0]):
        request, start = requests[row], starts[row]
        num_drafts = starts[row + 1] - start - 1
        divisor, seed = temperatures[request], int(seeds[request])
        target_lse = draft_lse = np.float32(0.0)
        accepted = 0
        for step in range(num_drafts):
            at, draft = start + step, drafts[start + step + 1]
            if divisor == 0.0:
                choice = int(target_argmax[at, int(target_max[at].argmax())])
                sampled[row, step] = choice
                holds = choice == draft
            elif draft < 0:
                break
            else:
                sampled[row, step] = draft
                target_lse = _logsumexp(target_max[at], target_sumexp[at], PADDED_VOCAB_NUM_BLOCKS)
                target_log_p = _float32(target_logits_ptr[at, draft]) - target_lse
                draft_log_p = np.float32(0.0)
                if HAS_DRAFT_LOGITS:
                    assert draft_logits_ptr is not None
                    draft_lse = _logsumexp(draft_max[at], draft_sumexp[at], PADDED_VOCAB_NUM_BLOCKS)
                    draft_log_p = _float32(draft_logits_ptr[request, step, draft]) / divisor - draft_lse
                uniform = noise.philox_uniform(seed, positions[at])
                holds = bool(target_log_p > np.log(uniform) + draft_log_p)
            if not holds:
                break
            accepted += 1
        accepted_counts[row] = accepted
        target_lses[row], draft_lses[row] = target_lse, draft_lse
    return None


def resample(
    grid: Grid,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    contexts_ptr: torch.Tensor | None,
    contexts_stride: int,
    watermarking_ptr: torch.Tensor | None,
    watermarking_skip_mask_ptr: torch.Tensor | None,
    watermark_key_0: int,
    watermark_key_1: int,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    CONTEXT_WIDTH: int,
    WATERMARK: bool,
    DEDUPLICATE_CONTEXTS: bool,
) -> Any:
    """The largest of each block at the first row that no draft settles, from what the rejected draft left over.

    A greedy request whose draft was rejected has its token already and is passed over.
    """
    if USE_FP64 or USE_BLOCK_VERIFICATION or WATERMARK or bool(torch.isnan(target_logits_ptr.sum())):
        return NotImplemented
    local_argmax, local_max = view(resampled_local_argmax_ptr), view(resampled_local_max_ptr)
    requests, starts = view(expanded_idx_mapping_ptr).tolist(), view(cu_num_logits_ptr).tolist()
    steps, drafts, positions = view(rejected_step_ptr), view(draft_sampled_ptr), view(pos_ptr)
    temperatures, seeds = view(temp_ptr), view(seed_ptr)
    target_lses, draft_lses = view(target_rejected_logsumexp_ptr), view(draft_rejected_logsumexp_ptr)
    for row in range(grid[0]):
        step = int(steps[row])
        at = starts[row] + step
        is_bonus = at == starts[row + 1] - 1
        request = requests[at]
        divisor = temperatures[request]
        if divisor == 0.0 and not is_bonus:
            continue
        values = float32_row(target_logits_ptr[at, :vocab_size], BLOCK_SIZE)
        rejected = 0 if is_bonus else int(drafts[at + 1])
        if not is_bonus and rejected >= 0:
            if HAS_DRAFT_LOGITS:
                assert draft_logits_ptr is not None
                drafted = float32_row(draft_logits_ptr[request, step, :vocab_size], BLOCK_SIZE) / divisor
                values = _log_of_difference(values - target_lses[row], drafted - draft_lses[row])
            else:
                # The draft counts as certain, so the rest is the target without that token.
                values = values.copy()
                values.reshape(-1)[rejected] = _MINUS_INF
        if divisor != 0.0:
            values = with_noise(values, int(seeds[request]), int(positions[at]))
        local_argmax[row], local_max[row] = block_maxima(values)
    return None


def insert_resampled(
    grid: Grid,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_RESAMPLE_NUM_BLOCKS: int,
) -> None:
    """Append the resampled token after the accepted drafts and count it."""
    sampled, counts = view(sampled_ptr), view(num_sampled_ptr)
    local_argmax, local_max = view(resampled_local_argmax_ptr), view(resampled_local_max_ptr)
    requests, starts, temperatures = (
        view(expanded_idx_mapping_ptr).tolist(),
        view(cu_num_logits_ptr).tolist(),
        view(temp_ptr),
    )
    for row in range(grid[0]):
        count = int(counts[row])
        at = starts[row] + count
        counts[row] = count + 1
        if temperatures[requests[at]] == 0.0 and at != starts[row + 1] - 1:
            continue
        maxima = local_max[row, :resample_num_blocks]
        best = int(np.where(np.isnan(maxima), _MINUS_INF, maxima).argmax())
        sampled[row, count] = local_argmax[row, best]


def _max_and_sumexp(values: Array) -> tuple[Array, Array]:
    """Largest value and sum of exp(value - largest) of each block of [blocks, block_size], float32 [blocks] both."""
    maxima = values.max(axis=1)
    # Block by block, so that NumPy adds in the order in which it adds for the kernel.
    sums = [
        np.exp(block - largest).sum() if largest > _MINUS_INF else 0.0
        for block, largest in zip(values, maxima, strict=True)
    ]
    return maxima, np.array(sums, dtype=np.float32)


def _logsumexp(maxima: Array, sums: Array, padded_blocks: int) -> np.float32:
    """The log of the sum of exp over all blocks, from each block's largest value and sum [blocks]."""
    padded_maxima = np.full(padded_blocks, _MINUS_INF, dtype=np.float32)
    padded_sums = np.zeros(padded_blocks, dtype=np.float32)
    padded_maxima[: maxima.shape[0]], padded_sums[: sums.shape[0]] = maxima, sums
    largest = padded_maxima.max()
    return np.float32(largest + np.log((padded_sums * np.exp(padded_maxima - largest)).sum()))


def _log_of_difference(target: Array, draft: Array) -> Array:
    """log(exp(target) - exp(draft)) where that is above 0, else -inf; [blocks, block_size]."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        ratio = np.exp(draft - target)
        return np.where(ratio < 1.0, target + np.log1p(-ratio), _MINUS_INF).astype(np.float32)


def _float32(scalar: torch.Tensor) -> np.float32:
    return np.float32(scalar.item())
