"""What `CudaStream` calls of a driver that has everything, and of drivers that lack something."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.libcuda import run_over

BATCH, KERNEL = ["batch of 2"], ["kernel on 50 words"]
SINGLE, COPY = ["write", "wait"], ["copy to device", "write"]
OLD = "without batches"


@pytest.mark.parametrize(
    ("flags", "lacks", "of_a_round"),
    [
        (["-DBATCH=0", "-DPTX=0"], [], [*BATCH, *KERNEL]),
        (["-DPTX=0"], [OLD], [*SINGLE, *KERNEL]),
        (
            ["-DBATCH=1", "-DPTX=0"],
            [f"{OLD}: cuStreamBatchMemOp_v2: operation not supported (801)"],
            [*SINGLE, *KERNEL],
        ),
        (["-DBATCH=0", "-DPTX=218"], ["replies are copied: cuModuleLoadData: planted (218)"], [*BATCH, *COPY]),
        (["-DPTX=218"], [OLD, "replies are copied"], [*SINGLE, *COPY]),
    ],
    ids=["all", "no batches", "batches refused", "no compiler", "neither"],
)
def test_what_a_driver_lacks_is_done_in_more_calls(
    flags: list[str], lacks: list[str], of_a_round: list[str], tmp_path: Path
) -> None:
    lines = run_over(tmp_path, flags, "-m", "tests.engine.handoff.cuda_rounds")
    # The probes before the first round wait for nobody.
    assert not {"wait", "copy to device"} & {*lines[: lines.index("copy to host")]}
    said = next(line for line in lines if line.startswith("stream memory operations"))
    assert said.count(";") == len(lacks)
    for lack in lacks:
        assert lack in said
    rounds = lines[lines.index(said) + 1 :]
    has_kernel = of_a_round[-1] in KERNEL
    second = "kernel on 16 words" if has_kernel else "copy to host"
    end = ["copy to device", "copy to host", *(["unload"] if has_kernel else []), "unregister"]
    assert rounds == ["copy to host", *of_a_round, second, *of_a_round, *end]
