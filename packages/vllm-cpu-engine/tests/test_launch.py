"""Which launches go to native code and which to the interpreter."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from farspark_vllm_cpu_engine.launch import Grid, Launcher


def kernel(*parameters: str) -> Any:
    def interpreted_kernel() -> None: ...

    return SimpleNamespace(fn=interpreted_kernel, arg_names=list(parameters))


def launcher_for(a_kernel: Any, native: Any) -> Launcher:
    return Launcher({f"{__name__}.{a_kernel.fn.__qualname__}": native})


def test_a_native_function_gets_the_grid_and_the_kernels_own_parameters() -> None:
    seen: list[Any] = []

    def native(grid: Grid, x: int, BLOCK: int) -> None:
        seen.append((grid, x, BLOCK))

    a_kernel = kernel("x", "BLOCK")
    assert launcher_for(a_kernel, native).launch(a_kernel, (2, 3), (7,), {"BLOCK": 8, "num_warps": 1}) is None
    assert seen == [((2, 3), 7, 8)]


def test_a_kernel_without_a_native_function_is_interpreted() -> None:
    assert Launcher({}).launch(kernel("x"), (1,), (7,), {}) is NotImplemented


def test_a_native_function_may_hand_a_case_back() -> None:
    a_kernel = kernel("x")
    launcher = launcher_for(a_kernel, lambda grid, x: NotImplemented)
    assert launcher.launch(a_kernel, (1,), (7,), {}) is NotImplemented


def test_a_kernel_with_other_parameters_is_interpreted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def native(grid: Grid, x: int) -> None:
        raise AssertionError

    a_kernel = kernel("x", "y")
    launcher = launcher_for(a_kernel, native)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert launcher.launch(a_kernel, (1,), (7, 8), {}) is NotImplemented
    assert [record.message for record in caplog.records if "stays interpreted" in record.message] == [
        f"kernel {__name__}.{a_kernel.fn.__qualname__} has the parameters ('x', 'y'), not ('x',): it stays interpreted"
    ]


def test_a_grid_that_is_computed_is_left_to_the_interpreter() -> None:
    a_kernel = kernel("x")
    launcher = launcher_for(a_kernel, lambda grid, x: None)
    assert launcher.launch(a_kernel, lambda meta: (1,), (7,), {}) is NotImplemented


def test_everything_is_interpreted_where_that_is_asked_for() -> None:
    a_kernel = kernel("x")
    launcher = launcher_for(a_kernel, lambda grid, x: None)
    with launcher.interpreted():
        assert launcher.launch(a_kernel, (1,), (7,), {}) is NotImplemented
    assert launcher.launch(a_kernel, (1,), (7,), {}) is None
