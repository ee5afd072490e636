"""Sampling without speculation: temperature, and the largest of the logits after Gumbel noise."""

from typing import Any

import numpy as np
import torch

from ..launch import Grid
from . import noise
from .memory import Array, float32_row, view


def temperature(
    grid: Grid,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
) -> Any:
    """Divide each row of logits [rows, V] by its request's temperature, unless that is 0 or 1."""
    if logits_ptr.dtype is not torch.float32:
        # The interpreter rounds to narrower types in its own way.
        return NotImplemented
    requests, temperatures = view(expanded_idx_mapping_ptr).tolist(), view(temperature_ptr)
    logits = view(logits_ptr)
    for row in range(grid[0]):
        divisor = temperatures[requests[row]]
        if divisor not in (0.0, 1.0):
            logits[row, :vocab_size] /= divisor
    return None


def gumbel_sample(
    grid: Grid,
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
) -> Any:
    """The largest of each block of each row [rows, blocks], with noise where the request's temperature is not 0.

    With a cache, the logits before temperature are also stored at the request's row and the given column of it.
    """
    if USE_FP64 or not _all_numbers(logits_ptr):
        return NotImplemented
    requests, positions = view(expanded_idx_mapping_ptr).tolist(), view(pos_ptr).tolist()
    seeds, temperatures = view(seeds_ptr), view(temp_ptr)
    local_argmax, local_max = view(local_argmax_ptr), view(local_max_ptr)
    for row in range(grid[0]):
        request = requests[row]
        if logits_cache_ptr is not None and request >= 0:
            assert logits_cache_col_ptr is not None
            assert logits_cache_source_ptr is not None
            column = int(logits_cache_col_ptr[row] if PER_TOKEN_COL else logits_cache_col_ptr)
            logits_cache_ptr[request, column, :vocab_size] = logits_cache_source_ptr[row, :vocab_size]
        divisor = temperatures[request] if request >= 0 else np.float32(0.0)
        values = float32_row(logits_ptr[row, :vocab_size], BLOCK_SIZE)
        if divisor != 0.0:
            if APPLY_TEMPERATURE:
                values = values / divisor
            place = positions[row] + (noise.DRAFT_SALT if IS_DRAFTING else 0)
            values = with_noise(values, int(seeds[request]), place)
        local_argmax[row], local_max[row] = block_maxima(values)
    return None


def with_noise(values: Array, seed: int, position: int) -> Array:
    """Logits [blocks, block_size] plus the noise of their tokens; what is -inf stays so."""
    noisy: Array = values + noise.gumbel(seed, position, 0, values.size).reshape(values.shape)
    return noisy


def block_maxima(values: Array) -> tuple[Array, Array]:
    """Of values [blocks, block_size]: where each block's first largest is, counted over all blocks, and the value."""
    within = values.argmax(axis=1)
    blocks = np.arange(values.shape[0])
    return blocks * values.shape[1] + within, values[blocks, within]


def _all_numbers(logits: torch.Tensor) -> bool:
    # A kernel passes over NaN where argmax would stop at it. A sum is NaN if any of its terms is, or for infinities of
    # both signs, which merely takes the slow way.
    return not bool(torch.isnan(logits.sum()))
