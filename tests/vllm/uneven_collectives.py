"""Two collectives that vLLM's CPU communicator lacks, by way of others: experts over data-parallel ranks need them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def add_uneven_collectives() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """The rows of every rank, one rank's after the other's; `sizes`: how many each has."""
    assert dim == 0
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    assert sizes is not None
    whole = input_.clone()
    dist.all_reduce(whole, group=self.device_group)
    first = sum(sizes[: self.rank_in_group])
    return whole[first : first + sizes[self.rank_in_group]]
