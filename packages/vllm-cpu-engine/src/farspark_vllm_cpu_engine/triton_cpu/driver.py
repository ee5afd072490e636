"""The half of the backend that names the device: always the CPU, always active where this package is installed."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):  # type: ignore[misc]
    """Answers Triton's questions about the device with "the CPU"."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError(f"no launcher is generated for the CPU, so {ty!r} has no C++ type")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return _milliseconds


def _milliseconds(kernel_call: Callable[[], Any], *, quantiles: Sequence[float], **_: Any) -> list[float]:
    """Time one call. An autotuner then picks among interpreted kernels, where more repetitions buy nothing."""
    start = time.perf_counter()
    kernel_call()
    return [(time.perf_counter() - start) * 1e3] * len(quantiles)
