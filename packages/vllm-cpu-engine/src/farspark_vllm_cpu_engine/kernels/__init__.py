"""Native code for the kernels that a step of vLLM's V2 runner launches, under the names that vLLM gives them.

Each function takes the grid and the kernel's parameters and leaves the same bytes behind as the interpreted kernel.
"""

from collections.abc import Mapping

from ..launch import NativeKernel
from . import batch, dflash, rejection, sampling

_GPU = "vllm.v1.worker.gpu"

NATIVE_KERNELS: Mapping[str, NativeKernel] = {
    f"{_GPU}.buffer_utils._apply_write_kernel": batch.apply_write,
    f"{_GPU}.block_table._gather_block_tables_kernel": batch.gather_block_tables,
    f"{_GPU}.block_table._compute_slot_mappings_kernel": batch.compute_slot_mappings,
    f"{_GPU}.input_batch._prepare_prefill_inputs_kernel": batch.prepare_prefill_inputs,
    f"{_GPU}.input_batch._prepare_pos_seq_lens_kernel": batch.prepare_pos_seq_lens,
    f"{_GPU}.input_batch._combine_sampled_and_draft_tokens_kernel": batch.combine_sampled_and_draft_tokens,
    f"{_GPU}.input_batch._get_num_sampled_and_rejected_kernel": batch.get_num_sampled_and_rejected,
    f"{_GPU}.input_batch._post_update_kernel": batch.post_update,
    f"{_GPU}.input_batch._post_update_num_computed_tokens_kernel": batch.post_update_num_computed_tokens,
    f"{_GPU}.input_batch._expand_idx_mapping_kernel": batch.expand_idx_mapping,
    f"{_GPU}.sample.gumbel._temperature_kernel": sampling.temperature,
    f"{_GPU}.sample.gumbel._gumbel_sample_kernel": sampling.gumbel_sample,
    f"{_GPU}.spec_decode.dflash.speculator._prepare_dflash_inputs_kernel": dflash.prepare_dflash_inputs,
    f"{_GPU}.spec_decode.rejection_sampler._gather_draft_sampled_kernel": rejection.gather_draft_sampled,
    f"{_GPU}.spec_decode.rejection_sampler._flatten_sampled_kernel": rejection.flatten_sampled,
    f"{_GPU}.spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel": rejection.local_logits_stats,
    f"{_GPU}.spec_decode.rejection_sampler_utils._rejection_kernel": rejection.rejection,
    f"{_GPU}.spec_decode.rejection_sampler_utils._resample_kernel": rejection.resample,
    f"{_GPU}.spec_decode.rejection_sampler_utils._insert_resampled_kernel": rejection.insert_resampled,
}
