"""Which form of the gather an engine uses: the fused one only where it makes the same bytes as the torch form, seen at start."""

from __future__ import annotations

import logging
import random
from typing import NamedTuple

import torch

from farspark.engine.config import FusedGather
from farspark.engine.cuda_driver import DriverError
from farspark.engine.gather.direct import KernelDriver, kernel_driver
from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.torch_gather import StepTensors, TorchGather
from farspark.errors import ConfigError

logger = logging.getLogger(__name__)

_CHECK_STEPS = 8


class Form(NamedTuple):
    gather: TorchGather
    is_fused: bool
    reason: str  # for or against


def make_gather(
    wanted: FusedGather, shape: GatherShape, device: torch.device, *, has_host_buffers: bool = True
) -> Form:
    """Raises ConfigError where the fused form is demanded and cannot be had."""

    def in_torch(reason: str) -> Form:
        return Form(TorchGather(shape, device, has_host_buffers=has_host_buffers), False, reason)

    if wanted is FusedGather.OFF:
        return in_torch("VLLM_DSPARK_REMOTE_FUSED_GATHER=0")
    if wanted is FusedGather.AUTO and device.type != "cuda":
        return in_torch(f"auto, and the device is {device.type}")
    driver, why_not_direct = _driver_of(device)
    why = check_fused(shape, device, driver)
    if why is not None and driver is not None:
        # Perhaps it is only the launch that Triton has no part in.
        driver, why_not_direct = None, why
        why = check_fused(shape, device)
    if why is None:
        from farspark.engine.gather.triton_gather import TritonGather

        gather = TritonGather(
            shape, device, driver=driver, why_not_direct=why_not_direct, has_host_buffers=has_host_buffers
        )
        return Form(gather, True, f"{_CHECK_STEPS} steps equal the torch form's, bit for bit")
    if wanted is FusedGather.ON:
        raise ConfigError(
            f"VLLM_DSPARK_REMOTE_FUSED_GATHER=1, but the fused gather cannot be used: {why}. Unset it to use the torch form then"
        )
    logger.warning("farspark: the fused gather is off, the torch form serves: %s", why)
    return in_torch(why)


def _driver_of(device: torch.device) -> tuple[KernelDriver | None, str]:
    """What launches kernels without Triton; else None and why not."""
    if device.type != "cuda":
        return None, f"the device is {device.type}"
    try:
        return kernel_driver(), ""
    except DriverError as error:
        return None, str(error)


def check_fused(shape: GatherShape, device: torch.device, driver: KernelDriver | None = None) -> str | None:
    """Why the fused form cannot be used on `device`; None if it makes the same bytes. Compiles the kernel.

    With a `driver` it launches the kernel as often as it can; without one all launches are Triton's.
    """
    # The same kernel, on buffers that cost nothing.
    small = GatherShape(
        max_requests=shape.max_requests,
        max_tokens=64,
        taps=shape.taps,
        hidden_size=shape.hidden_size,
        context=min(shape.context, 12),
        ring=min(shape.ring, 5),
        is_sampled=shape.is_sampled,
    )
    try:
        from farspark.engine.gather.triton_gather import TritonGather

        reference, fused = TorchGather(small, device), TritonGather(small, device, driver=driver)
        for seed in range(_CHECK_STEPS):
            step = random_step(small, device, seed, torch.bfloat16)
            for one in (reference, fused):
                if seed % 4 == 3:
                    one.rehearse(step)
                else:
                    one.run(step)
            if driver is not None and seed % 4 != 3:
                fused.run(step)  # a step like the one before is launched in another way
            difference = first_difference(reference, fused)
            if difference is not None:
                return f"step {seed}: {difference}"
    except Exception as error:  # whatever a compiler or a driver throws: the torch form needs neither
        return f"{type(error).__name__}: {error}"
    return None


def random_step(shape: GatherShape, device: torch.device, seed: int, dtype: torch.dtype) -> StepTensors:
    """Some requests with some rows each, some of them rejected, as a runner would hand them over."""
    rng = random.Random(seed)
    n = rng.randint(1, min(shape.max_requests, 6))
    queries = [rng.randint(1, shape.max_tokens // n) for _ in range(n)]
    first = [rng.randint(0, 1000) for _ in range(n)]
    total = sum(queries)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(shape.taps, total + 3, shape.hidden_size, generator=generator).to(device, dtype)

    def ints(values: list[int], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    slots = rng.sample(range(shape.max_requests), n)
    return StepTensors(
        hidden=list(hidden.unbind()),
        positions=ints(
            [start + i for start, query in zip(first, queries, strict=True) for i in range(query)], torch.int64
        ),
        query_start_loc=ints([sum(queries[:i]) for i in range(n + 1)]),
        slots=ints(slots),
        num_sampled=ints([rng.randint(0, 3) for _ in range(n)]),
        num_rejected=ints([rng.randint(0, query - 1) for query in queries]),
        last_sampled=ints([rng.randint(0, 99) for _ in range(shape.max_requests)], torch.int64).unsqueeze(1),
        next_prefill_tokens=ints([rng.randint(100, 199) for _ in range(2 * shape.max_requests)]).view(2, -1),
        row_bound=sum(min(query, shape.context) for query in queries),
        wants_drafts=rng.random() < 0.8,
        temperature=torch.tensor([rng.choice((0.0, rng.random())) for _ in range(shape.max_requests)], device=device),
        seeds=ints([rng.randrange(-(2**63), 2**63) for _ in range(shape.max_requests)], torch.int64),
    )


def first_difference(reference: TorchGather, other: TorchGather) -> str | None:
    """Where what was made of the same steps differs; None if nowhere. Waits for the device."""
    theirs, ours = other.buffers(), reference.buffers()
    for name, right in ours.items():
        left = theirs[name].to(right.device)
        differs = (right.view(torch.int16) != left.view(torch.int16)).nonzero()
        if len(differs):
            row = int(differs[0][0])
            return f"{name} row {row}: {left[row, :8].tolist()}..., expected {right[row, :8].tolist()}..."
    return None
