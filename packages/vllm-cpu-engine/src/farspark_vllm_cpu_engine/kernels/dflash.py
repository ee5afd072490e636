"""The kernel that prepares a block draft: context slots of the verified rows, ids and slots of the block's queries."""

from typing import Any

import numpy as np
import torch

from ..launch import Grid
from .memory import Array, view


def prepare_dflash_inputs(
    grid: Grid,
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    BLOCK_SIZE: int,
) -> Any:
    """Fill every output for each request of the batch, and the padding after the last one."""
    if CP_SIZE != 1:
        return NotImplemented
    num_reqs = grid[0]
    input_ids, query_positions = view(out_input_ids_ptr), view(out_query_positions_ptr)
    query_starts, seq_lens = view(out_query_start_loc_ptr), view(out_seq_lens_ptr)
    query_slots = view(out_query_slot_mapping_ptr)
    context_positions, context_slots = view(out_context_positions_ptr), view(out_context_slot_mapping_ptr)
    sample_indices, sample_pos = view(out_sample_indices_ptr), view(out_sample_pos_ptr)
    sample_requests = view(out_sample_idx_mapping_ptr)
    out_temperature, out_seeds = view(out_temperature_ptr), view(out_seeds_ptr)
    temperatures, seeds = view(temperature_ptr), view(seeds_ptr)
    positions, starts = view(target_positions_ptr), view(target_query_start_loc_ptr).tolist()
    requests = view(idx_mapping_ptr).tolist()
    last_sampled, next_prefill = view(last_sampled_ptr).reshape(-1), view(next_prefill_tokens_ptr).reshape(-1)
    num_sampled, num_rejected = view(num_sampled_ptr), view(num_rejected_ptr)
    block_table = view(block_table_ptr)

    first_sample = 0 if SAMPLE_FROM_ANCHOR else 1
    for row in range(num_reqs):
        request, start, end = requests[row], starts[row], starts[row + 1]
        valid_end = end - int(num_rejected[row])

        # Rejected rows keep position 0 and no slot: nothing may be stored for them.
        context_positions[start:valid_end] = positions[start:valid_end]
        context_positions[valid_end:end] = 0
        context_slots[start:valid_end] = _slots(block_table[row], positions[start:valid_end], block_size, PAD_SLOT_ID)
        context_slots[valid_end:end] = PAD_SLOT_ID

        anchor_pos = int(positions[valid_end - 1]) + 1
        first, last = row * num_query_per_req, (row + 1) * num_query_per_req
        at = np.arange(anchor_pos, anchor_pos + num_query_per_req)
        input_ids[first:last] = parallel_drafting_token_id
        # Between chunks of a prompt the next prompt token stands where the sampled one will be.
        input_ids[first] = (last_sampled if num_sampled[row] > 0 else next_prefill)[request]
        query_positions[first:last] = np.minimum(at, max_model_len - 1)
        query_slots[first:last] = _slots(block_table[row], at, block_size, PAD_SLOT_ID)

        samples = slice(row * num_speculative_steps, row * num_speculative_steps + num_query_per_req - first_sample)
        sample_indices[samples] = np.arange(first + first_sample, last)
        sample_pos[samples] = at[first_sample:] + (1 if SAMPLE_FROM_ANCHOR else 0)
        sample_requests[samples] = request

        query_starts[row] = first
        seq_lens[row] = min(anchor_pos + num_query_per_req, max_model_len)
        out_temperature[request] = temperatures[request]
        out_seeds[request] = seeds[request]

    num_queries, num_samples = num_reqs * num_query_per_req, num_reqs * num_speculative_steps
    query_starts[num_reqs : max_num_reqs + 1] = num_queries
    seq_lens[num_reqs:max_num_reqs] = 0
    query_slots[num_queries:max_num_tokens] = PAD_SLOT_ID
    padding = slice(num_samples, max_num_reqs * num_speculative_steps)
    sample_indices[padding] = 0
    sample_pos[padding] = 0
    sample_requests[padding] = -1
    return None


def _slots(blocks: Array, positions: Array, block_size: int, pad: int) -> Array:
    """Cache slots of positions [n] under one row of a block table; block 0 is nobody's and is never written."""
    numbers = blocks[np.minimum(positions // block_size, blocks.shape[0] - 1)].astype(np.int64)
    return np.where(numbers != 0, numbers * block_size + positions % block_size, pad)
