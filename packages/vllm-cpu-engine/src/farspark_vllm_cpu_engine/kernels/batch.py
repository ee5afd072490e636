"""Kernels that lay out a batch: token ids, positions, block tables, slots and the counters after a step.

They move a few integers per request, so plain loops over requests with one array operation each are fast enough.
"""

from typing import Any

import numpy as np
import torch

from ..launch import Grid
from .memory import int32_at, view


def apply_write(
    grid: Grid,
    output_ptr: torch.Tensor,
    output_stride: Any,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    BLOCK_SIZE: int,
    MULTI_GROUP: bool,
) -> None:
    """Copy each staged piece of ``write_contents`` to its row and start; with groups, into the group's own table."""
    rows, starts = view(write_indices_ptr), view(write_starts_ptr)
    contents, ends = view(write_contents_ptr), view(write_cu_lens_ptr)
    begin = 0
    for write in range(grid[0]):
        end = int(ends[write])
        count = end - begin
        if MULTI_GROUP:
            assert write_group_ids_ptr is not None
            group = int(write_group_ids_ptr[write])
            offset = int(rows[write]) * int(output_stride[group]) + int(starts[write])
            int32_at(int(output_ptr[group]) + 4 * offset, count)[:] = contents[begin:end]
        else:
            # The rows of one tensor, addressed as the kernel does: from its first element, by its stride.
            offset = int(rows[write]) * output_stride + int(starts[write])
            view(output_ptr).reshape(-1)[offset : offset + count] = contents[begin:end]
        begin = end


def gather_block_tables(
    grid: Grid,
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Row b of a group's input table becomes the row of the request in place b; rows of padding become zero."""
    groups, num_rows = grid[0], grid[1]
    requests = view(batch_idx_to_req_idx).tolist()
    num_blocks = view(num_blocks_ptr)
    for group in range(groups):
        stride = int(block_table_strides[group])
        source, target = int(src_block_table_ptrs[group]), int(dst_block_table_ptrs[group])
        for row in range(num_rows):
            to = target + 4 * stride * row
            if row >= num_reqs:
                int32_at(to, stride)[:] = 0
            elif count := int(num_blocks[group, requests[row]]):
                int32_at(to, count)[:] = int32_at(source + 4 * stride * requests[row], count)


def compute_slot_mappings(
    grid: Grid,
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
    TRITON_BLOCK_SIZE: int,
) -> Any:
    """The cache slot of every token of the step, per group; ``PAD_ID`` for what is not a token of a real request."""
    if CP_SIZE != 1:
        return NotImplemented
    groups, num_reqs = grid[0], grid[1] - 1
    requests, starts = view(idx_mapping).tolist(), view(query_start_loc).tolist()
    positions, slots = view(pos), view(slot_mappings_ptr)
    for group in range(groups):
        table, stride = int(block_table_ptrs[group]), int(block_table_strides[group])
        block_size, is_enabled = int(block_sizes[group]), bool(slot_mapping_enabled[group])
        for row in range(num_reqs):
            span = slice(starts[row], starts[row + 1])
            if not is_enabled or requests[row] < 0:
                slots[group, span] = PAD_ID
                continue
            blocks = int32_at(table + 4 * stride * requests[row], stride)
            at = positions[span]
            slots[group, span] = blocks[at // block_size].astype(np.int64) * block_size + at % block_size
        slots[group, starts[num_reqs] : max_num_tokens] = PAD_ID
    return None


def prepare_prefill_inputs(
    grid: Grid,
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    LOOKAHEAD_BLOCK: int,
) -> None:
    """The next chunk of each prompt goes into the step's input ids, and the few tokens after it are kept aside."""
    input_ids, lookahead = view(input_ids_ptr), view(next_prefill_tokens_ptr)
    requests, starts = view(idx_mapping_ptr).tolist(), view(query_start_loc_ptr).tolist()
    tokens, prefill_lens, computed_lens = view(all_token_ids_ptr), view(prefill_lens_ptr), view(num_computed_tokens_ptr)
    for row in range(grid[0]):
        request = requests[row]
        prefill_len, computed = int(prefill_lens[request]), int(computed_lens[request])
        if computed >= prefill_len:
            continue
        start, end = starts[row], starts[row + 1]
        after = computed + end - start
        input_ids[start:end] = tokens[request, computed:after]
        for ahead in range(num_lookahead):
            lookahead[ahead, request] = tokens[request, after + ahead] if after + ahead < prefill_len else 0


def prepare_pos_seq_lens(
    grid: Grid,
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
    BLOCK_SIZE: int,
) -> None:
    """Positions of the step's tokens, and each request's length once they are computed."""
    num_reqs = grid[0] - 1
    positions, seq_lens = view(pos_ptr), view(seq_lens_ptr)
    requests, starts = view(idx_mapping_ptr).tolist(), view(query_start_loc_ptr).tolist()
    computed_lens = view(num_computed_tokens_ptr)
    for row in range(num_reqs):
        start, end = starts[row], starts[row + 1]
        computed = int(computed_lens[requests[row]])
        seq_lens[row] = computed + end - start
        positions[start:end] = np.arange(computed, computed + end - start)
    seq_lens[num_reqs:max_num_reqs] = 0


def combine_sampled_and_draft_tokens(
    grid: Grid,
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    BLOCK_SIZE: int,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Which rows need logits; past the prompt, the last sampled token and the drafts become input ids."""
    input_ids, logits_indices = view(input_ids_ptr), view(logits_indices_ptr)
    requests, starts = view(idx_mapping_ptr).tolist(), view(query_start_loc_ptr).tolist()
    cu_num_logits, seq_lens = view(cu_num_logits_ptr).tolist(), view(seq_lens_ptr)
    last_sampled, prefill_lens, drafts = view(last_sampled_tokens_ptr), view(prefill_len_ptr), view(draft_tokens_ptr)
    for row in range(grid[0]):
        request, query_end = requests[row], starts[row + 1]
        num_logits = cu_num_logits[row + 1] - cu_num_logits[row]
        first = query_end - num_logits
        logits_indices[cu_num_logits[row] : cu_num_logits[row + 1]] = np.arange(first, query_end)
        seq_len, prefill_len = int(seq_lens[row]), int(prefill_lens[request])
        if seq_len <= prefill_len:
            continue
        if NUM_NEW_SAMPLED_TOKENS > 0 and seq_len - num_logits >= prefill_len:
            input_ids[first] = last_sampled[request].item()
        num_drafts = num_logits - NUM_NEW_SAMPLED_TOKENS
        if num_drafts > 0:
            input_ids[query_end - num_drafts : query_end] = drafts[request, :num_drafts]


def get_num_sampled_and_rejected(
    grid: Grid,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """How many tokens a request keeps of the step and how many drafts it lost; none of either inside a prompt."""
    rows = slice(0, grid[0])
    num_sampled, num_rejected = view(num_sampled_ptr), view(num_rejected_ptr)
    cu_num_logits = view(cu_num_logits_ptr)
    in_prompt = view(seq_lens_ptr)[rows] < view(prefill_len_ptr)[view(idx_mapping_ptr)[rows]]
    kept = np.where(in_prompt, 0, num_sampled[rows])
    num_logits = cu_num_logits[1 : grid[0] + 1] - cu_num_logits[rows]
    num_sampled[rows] = kept
    num_rejected[rows] = np.where(in_prompt, 0, num_logits - kept)


def post_update(
    grid: Grid,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
) -> None:
    """Book the step's tokens: append them, count them, advance what is computed by all but the rejected rows."""
    requests = view(idx_mapping_ptr).tolist()
    computed_lens, last_sampled, total_lens = (
        view(num_computed_tokens_ptr),
        view(last_sampled_tokens_ptr),
        view(total_len_ptr),
    )
    sampled, tokens = view(sampled_tokens_ptr), view(all_token_ids_ptr)
    num_sampled, num_rejected = view(num_sampled_ptr), view(num_rejected_ptr)
    counts = None if output_bin_counts_ptr is None else view(output_bin_counts_ptr)
    starts = None if query_start_loc_ptr is None else view(query_start_loc_ptr).tolist()
    for row in range(grid[0]):
        request = requests[row]
        if request < 0:
            continue
        count = int(num_sampled[row])
        if count > 0:
            kept = sampled[row, :count]
            total = int(total_lens[request])
            last_sampled[request] = kept[-1]
            total_lens[request] = total + count
            tokens[request, total : total + count] = kept
            if counts is not None:
                np.add.at(counts[request], kept, 1)
        query_len = 0 if starts is None else starts[row + 1] - starts[row]
        computed_lens[request] += query_len - int(num_rejected[row])


def post_update_num_computed_tokens(
    grid: Grid, idx_mapping_ptr: torch.Tensor, num_computed_tokens_ptr: torch.Tensor, query_start_loc_ptr: torch.Tensor
) -> None:
    """Advance what is computed by the whole query of each request."""
    starts = view(query_start_loc_ptr)[: grid[0] + 1]
    view(num_computed_tokens_ptr)[view(idx_mapping_ptr)[: grid[0]]] += starts[1:] - starts[:-1]


def expand_idx_mapping(
    grid: Grid,
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    BLOCK_SIZE: int,
) -> None:
    """Say for every row of logits whose it is and which of that request's rows."""
    requests, ends = view(idx_mapping_ptr).tolist(), view(cu_num_logits_ptr).tolist()
    expanded, local_pos = view(expanded_idx_mapping_ptr), view(expanded_local_pos_ptr)
    for row in range(grid[0]):
        start, end = ends[row], ends[row + 1]
        expanded[start:end] = requests[row]
        local_pos[start:end] = np.arange(end - start)
