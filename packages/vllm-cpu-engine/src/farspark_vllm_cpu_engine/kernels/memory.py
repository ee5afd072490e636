"""NumPy views of what a kernel is given: tensors, and addresses of tensors."""

import ctypes
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]


def view(tensor: torch.Tensor) -> Array:
    """The tensor's own memory, same shape. A write into the view is a write into the tensor."""
    array: Array = tensor.numpy()
    return array


def int32_at(address: int, count: int) -> Array:
    """``count`` int32 values that lie at ``address``: kernels get block tables as a tensor of addresses."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))


def float32_row(row: torch.Tensor, block_size: int) -> Array:
    """A row of logits [V] as float32 [blocks, block_size], short blocks filled with -inf.

    A view of the row's memory where that is possible: not to be written to.
    """
    values: Array = row.to(torch.float32).numpy()
    if missing := -values.shape[0] % block_size:
        values = np.concatenate([values, np.full(missing, -np.inf, dtype=np.float32)])
    return values.reshape(-1, block_size)
