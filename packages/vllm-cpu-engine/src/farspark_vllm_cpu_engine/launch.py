"""Sends the launches of chosen Triton kernels to native functions instead of the interpreter.

vLLM has a registry for kernel overrides (``vllm.triton_utils.dispatcher.register_kernels``), but what it calls is not told
the launch grid: padded rows could not be seen, and a native function could not hand a case that it does not cover back
to the kernel. Registering also imports the kernels' modules, before ``vllm.v1.worker.cpu.shm`` has prepared torch for them.
So the launch itself is caught, one class further down: every interpreted kernel starts in ``InterpretedFunction.run``,
and one look-up by name there needs no import and sees every holder of the kernel.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

Grid = tuple[int, ...]
# Takes the grid and then exactly the kernel's parameters, by their names. Returns NotImplemented, before it has written
# anything, for a case that the interpreter must run.
NativeKernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Route:
    native: NativeKernel
    parameters: frozenset[str]


class Launcher:
    """Decides per launch between a native function and the interpreter. Used by the thread that runs the model."""

    def __init__(self, natives: Mapping[str, NativeKernel]) -> None:
        self._natives = natives
        # Keyed by the kernel's function; None: the interpreter runs it.
        self._routes: dict[Callable[..., Any], _Route | None] = {}
        self.is_on = True

    def launch(self, kernel: Any, grid: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``kernel`` natively and return None, or return NotImplemented."""
        if not self.is_on:
            return NotImplemented
        try:
            route = self._routes[kernel.fn]
        except KeyError:
            route = self._routes[kernel.fn] = self._find_route(kernel)
        if route is None or not isinstance(grid, tuple):
            return NotImplemented
        # num_warps and the like are for a compiler.
        parameters = {name: value for name, value in kwargs.items() if name in route.parameters}
        return route.native(grid, *args, **parameters)

    def _find_route(self, kernel: Any) -> _Route | None:
        name = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
        native = self._natives.get(name)
        if native is None:
            return None
        expected = tuple(inspect.signature(native).parameters)[1:]
        found = tuple(kernel.arg_names)
        if expected != found:
            # Another vLLM: the interpreter is slow but always right.
            logger.warning("kernel %s has the parameters %s, not %s: it stays interpreted", name, found, expected)
            return None
        return _Route(native, frozenset(expected))

    @contextmanager
    def interpreted(self) -> Iterator[None]:
        """Inside, every kernel is interpreted."""
        before, self.is_on = self.is_on, False
        try:
            yield
        finally:
            self.is_on = before


_installed: Launcher | None = None


def install(natives: Mapping[str, NativeKernel]) -> Launcher:
    """Catch the launches of this process from here on; a second call returns what the first one made."""
    global _installed
    if _installed is not None:
        return _installed
    # Only with TRITON_INTERPRET=1 does triton.jit make these objects; without it nothing would ever be caught.
    from triton.runtime.interpreter import InterpretedFunction

    launcher = Launcher(natives)
    interpret = InterpretedFunction.run

    @functools.wraps(interpret)
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or launcher.launch(self, grid, args, kwargs) is NotImplemented:
            return interpret(self, *args, grid=grid, warmup=warmup, **kwargs)
        return None

    InterpretedFunction.run = run
    _installed = launcher
    return launcher
