"""The driver's calls: what one lacks or refuses is an error with the call's name, and no import opens it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.libcuda import has_driver, run_over

from farspark.engine.cuda_driver import CudaDriver, DriverError

FUNCTION = 0x7F00F00DF00D


def said(directory: Path, flags: list[str], work: str) -> list[str]:
    """What `work` prints, and the error that ends it."""
    program = f"""
from pathlib import Path
from farspark.engine.cuda_driver import CudaDriver, DriverError
from farspark.engine.gather.direct import kernel_driver
from farspark.engine.handoff import cuda_stream
assert "libcuda" not in Path("/proc/self/maps").read_text(), "opened by an import"
try:
    {work}
    assert "libcuda" in Path("/proc/self/maps").read_text()
except DriverError as error:
    print(error)
"""
    return run_over(directory, ["-DPTX=0", *flags], "-c", program)


@pytest.mark.skipif(has_driver(), reason="there is a CUDA driver here")
def test_no_driver_is_a_reason() -> None:
    with pytest.raises(DriverError, match=r"the CUDA driver cannot be used: libcuda\.so\.1: cannot open"):
        CudaDriver()


def test_the_parameters_of_a_kernel_are_asked_for_until_the_driver_knows_no_more(tmp_path: Path) -> None:
    work = f"print(kernel_driver().layout({FUNCTION}))"
    assert said(tmp_path, ["-DLAYOUT=1"], work) == ["[(0, 8), (8, 4), (16, 8)]"]
    assert said(tmp_path, ["-DLAYOUT=801"], work) == ["cuFuncGetParamInfo: operation not supported (801)"]


def test_a_driver_without_what_is_new_serves_and_one_without_what_is_needed_does_not(tmp_path: Path) -> None:
    assert said(tmp_path, [], "CudaDriver()") == []
    for flags, work, lacks in (
        ([], "kernel_driver()", "cuFuncGetParamInfo"),
        ([], "CudaDriver().address('cuStreamBatchMemOp_v2')", "cuStreamBatchMemOp_v2"),
        (["-DOLD"], "CudaDriver()", "cuStreamQuery"),
    ):
        assert said(tmp_path, flags, work) == [f"the CUDA driver has no {lacks}"]


def test_a_launch_is_what_the_driver_takes_and_a_refused_one_has_its_words(tmp_path: Path) -> None:
    work = f"""
    from farspark.native import Launch
    import ctypes
    to, source = (ctypes.c_uint32 * 2)(), (ctypes.c_uint32 * 2)(7, 9)
    word, driver = ctypes.c_uint32(), CudaDriver()
    for function in {FUNCTION}, {FUNCTION + 1}:
        launch = Launch(function, 32, 0, 5)
        launch.fill(1, 1, ctypes.addressof(source), ctypes.addressof(to), 2, ctypes.addressof(word), 3)
        driver.launch(launch, 0)
        print(*to, word.value)
"""
    assert said(tmp_path, [], work) == ["kernel on 2 words", "7 9 3", "cuLaunchKernel: planted (1)"]
