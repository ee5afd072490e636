"""Device work whose shapes are known beforehand: run as it is, or captured once into a CUDA graph and replayed.

A draft is some hundred launches; replayed as one graph it takes the host one call, and the device no pauses between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class DeviceCalls(Protocol):
    """Runs functions of host tensors on a device. Used by one thread at a time.

    A `key` names one function with fixed shapes, dtypes and everything else that the function does.
    """

    def staging(self, key: Hashable, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Host tensors like those of `make`, to be filled with the inputs of the next `run(key)`; their values are left over."""
        ...

    def run(self, key: Hashable, function: Callable[..., Result]) -> Result:
        """`function(*inputs on the device)`. What comes back may be overwritten by the next call."""
        ...


class DirectCalls:
    """Every call is made anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._staged: dict[Hashable, Sequence[Tensor]] = {}

    def staging(self, key: Hashable, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        staged = self._staged.get(key)
        if staged is None:
            staged = self._staged[key] = make()
        return staged

    def run(self, key: Hashable, function: Callable[..., Result]) -> Result:
        return function(*(one.to(self._device) for one in self._staged[key]))


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]  # on the device
    result: Any


class GraphCalls:
    """The first run of a key captures it; later ones replay. All graphs share one pool of memory, so a result is valid until
    the next run of any key."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One for all captures, because memory is used again on its own stream only. Torch's own stream for captures is of the
        # device that was current at the process's first one.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._staged: dict[Hashable, Sequence[Tensor]] = {}
        self._captured: dict[Hashable, _Captured] = {}
        self._copied: dict[Hashable, Any] = {}

    def staging(self, key: Hashable, make: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        staged = self._staged.get(key)
        if staged is None:
            # Page-locked, so that the copy to the device makes nobody wait.
            staged = self._staged[key] = [torch.empty_like(one, pin_memory=True).copy_(one) for one in make()]
        elif key in self._copied:
            # Their last copy may still be under way.
            self._copied[key].synchronize()
        return staged

    def run(self, key: Hashable, function: Callable[..., Result]) -> Result:
        staged, found = self._staged[key], self._captured.get(key)
        if found is None:
            found = self._captured[key] = self._capture(function, staged)
            self._copied[key] = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for host, target in zip(staged, found.inputs, strict=True):
            target.copy_(host, non_blocking=True)
        self._copied[key].record()
        found.graph.replay()
        result: Result = found.result
        return result

    def _capture(self, function: Callable[..., Any], staged: Sequence[Tensor]) -> _Captured:
        inputs = [one.to(self._device) for one in staged]
        # Compiles kernels and takes workspaces, which a capture must not.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                function(*inputs)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = function(*inputs)
        return _Captured(graph, inputs, result)
