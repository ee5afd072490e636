"""A kernel that Triton has compiled, launched without Triton's launcher, whose Python costs more than the kernel takes.

How the kernel wants its parameters is never guessed: the driver is asked, and what it says must be what Triton's launcher passes,
the arguments of the kernel in order and then the pointers to two scratch memories that this kernel does not use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from farspark.engine.cuda_driver import CudaDriver, DriverError
from farspark.errors import FarsparkError
from farspark.native import Launch

_WARP: Final = 32
# Global and profile scratch, null where a kernel has none.
_SCRATCH: Final = ("*scratch", "*scratch")
_SIZES: Final = {"i32": 4, "u32": 4, "i64": 8, "u64": 8}

Layout = list[tuple[int, int]]
"""Offset and size in bytes of each parameter."""


class DirectLaunchError(FarsparkError):
    """This kernel is not launched directly; the message says why."""


class KernelDriver(Protocol):
    def layout(self, function: int) -> Layout:
        """Of the parameters of `function`, in order. Raises DriverError."""
        ...

    def launch(self, launch: Launch, stream: int) -> None:
        """Enqueue it. Raises DriverError."""
        ...


def kernel_driver() -> KernelDriver:
    """CUDA's. Raises DriverError where there is none, or one that cannot say how a kernel takes its parameters."""
    driver = CudaDriver()
    driver.function("cuFuncGetParamInfo")
    return driver


def make_launch(kernel: Any, driver: KernelDriver, arguments: int) -> Launch:
    """For a kernel of `arguments` arguments as Triton returns it from a launch. `fill` takes those, then two zeros.

    Raises DirectLaunchError with the reason where anything about it is not as expected.
    """
    if kernel is None:
        raise DirectLaunchError("Triton interprets the kernel")
    try:
        metadata, function = kernel.metadata, int(kernel.function)
        signature: Mapping[str, str] = kernel.src.signature
        wanted = (metadata.num_ctas, metadata.launch_cooperative_grid, metadata.launch_pdl)
        scratch = metadata.global_scratch_size, metadata.profile_scratch_size
        threads, shared = _WARP * int(metadata.num_warps), int(metadata.shared)
    except (AttributeError, TypeError) as error:
        raise DirectLaunchError(f"this Triton describes a kernel otherwise: {error}") from error
    if wanted != (1, False, False):
        raise DirectLaunchError(f"a launch with attributes: ctas, cooperative, dependent: {wanted}")
    if any(scratch):
        raise DirectLaunchError(f"the kernel uses scratch memory: {scratch} bytes")
    types = [kind for kind in signature.values() if kind != "constexpr"]
    if len(types) != arguments:
        raise DirectLaunchError(f"the kernel has {len(types)} arguments, expected {arguments}")
    expected = _natural_layout([*types, *_SCRATCH])
    try:
        found = driver.layout(function)
    except DriverError as error:
        raise DirectLaunchError(str(error)) from error
    if found != expected:
        raise DirectLaunchError(f"the kernel's parameters lie at {found}, expected {expected}")
    return Launch(function, threads, shared, len(expected))


def _natural_layout(types: Sequence[str]) -> Layout:
    """Each parameter behind the one before, at a multiple of its size."""
    layout: Layout = []
    end = 0
    for kind in types:
        size = 8 if kind.startswith("*") else _SIZES.get(kind)
        if size is None:
            raise DirectLaunchError(f"an argument of type {kind}")
        at = -(-end // size) * size
        layout.append((at, size))
        end = at + size
    return layout
