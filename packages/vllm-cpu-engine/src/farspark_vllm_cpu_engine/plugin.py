"""The vLLM plugin: repairs and native kernels for every vLLM process that interprets Triton on a CPU."""

import logging
import os

logger = logging.getLogger(__name__)

# "interpreted" leaves every kernel to Triton's interpreter: the reference to measure and to compare against.
KERNELS_VARIABLE = "FARSPARK_CPU_KERNELS"
KERNEL_CHOICES = ("native", "interpreted")


def register() -> None:
    """vLLM calls this once in each of its processes. Does nothing unless vLLM is on the CPU with TRITON_INTERPRET=1."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get("TRITON_INTERPRET") != "1":
        return
    choice = os.environ.get(KERNELS_VARIABLE, "native")
    if choice not in KERNEL_CHOICES:
        raise ValueError(f"{KERNELS_VARIABLE}={choice!r}: expected one of {', '.join(KERNEL_CHOICES)}")

    from . import adaptive, launch, linear, norm

    # Without it vLLM's own drafter is wrong, whatever runs the kernels.
    norm.install()
    adaptive.install()
    if choice == "interpreted":
        return

    from .kernels import NATIVE_KERNELS

    launch.install(NATIVE_KERNELS)
    linear.install()
    logger.info("native CPU code stands in for %d Triton kernels", len(NATIVE_KERNELS))
