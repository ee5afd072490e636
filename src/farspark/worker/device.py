"""The device that a drafter runs on, and what is used to run on it well."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from farspark.errors import ConfigError
from farspark.worker.context import RingAttention
from farspark.worker.graphs import DeviceCalls, DirectCalls, GraphCalls
from farspark.worker.models.base import Arithmetic

logger = logging.getLogger(__name__)


class DeviceWork(NamedTuple):
    """How work gets done on a device."""

    arithmetic: Arithmetic
    calls: DeviceCalls
    attention: RingAttention | None  # None: that of the models


def open_device(name: str) -> torch.device:
    """The torch device called `name`, with its index. Raises ConfigError if it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"a device of {name!r}; expected cpu, cuda or cuda:INDEX") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"a device of {name!r}; supported: cpu, cuda, cuda:INDEX")
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(f"a device of {name!r}, but torch finds no GPU (torch {torch.__version__} {built})")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"a device of {name!r}, but there are {torch.cuda.device_count()} GPUs (from cuda:0)")
    return torch.device("cuda", index)


def work_on(device: torch.device, dtype: torch.dtype) -> DeviceWork:
    """The best that there is for `device`; on a GPU where Triton does not work, plain operations, with a warning."""
    if device.type == "cpu":
        return DeviceWork(cpu_arithmetic(dtype), DirectCalls(device), None)
    torch.cuda.set_device(device)
    try:
        from farspark.worker.models.fused import FusedArithmetic
        from farspark.worker.ring_attention import attend_ring

        fused = FusedArithmetic(dtype, dtype)
        ones = torch.ones(2, 64, dtype=dtype, device=device)
        if not torch.allclose(fused.rms_norm(ones, ones[0], 0.0), ones):
            raise RuntimeError("a norm of ones is not ones")
    except Exception as error:  # whatever a compiler that is not there, or not for this GPU, raises
        logger.warning("farspark: no Triton kernels (%s: %s); drafts take longer", type(error).__name__, error)
        return DeviceWork(Arithmetic(dtype, dtype), GraphCalls(device), None)
    return DeviceWork(fused, GraphCalls(device), attend_ring)


@contextlib.contextmanager
def at_work(device: torch.device) -> Iterator[None]:
    """Inference on `device`, from any thread: which device is current is each thread's own, and kernels launch on that one."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext(), torch.inference_mode():
        yield


def cpu_arithmetic(dtype: torch.dtype, cpuinfo: str = "/proc/cpuinfo") -> Arithmetic:
    """bfloat16 is kept in float32 on a CPU without bf16 instructions: its own product is several times slower there."""
    if dtype == torch.bfloat16 and not _has_bf16_instructions(cpuinfo):
        return Arithmetic(dtype, torch.float32)
    return Arithmetic(dtype, dtype)


def _has_bf16_instructions(cpuinfo: str) -> bool:
    try:
        text = Path(cpuinfo).read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = set(text.split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
