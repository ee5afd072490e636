"""Which stream is the current one, as the driver has it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def current_stream(device: torch.device) -> Callable[[], int]:
    """Says at each call which stream of `device`, a GPU, is the current one of the calling thread. A device without an index is
    the one that is the current device here.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    return functools.partial(torch._C._cuda_getCurrentRawStream, index)
