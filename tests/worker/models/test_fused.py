"""The kernels for GPUs under Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.worker.models.compare_fused", *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_kernels_compute_what_the_plain_operations_compute() -> None:
    done = compare("cpu", "float32")
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in (
        "norm",
        "keys of a context",
        "product, add_norm",
        "product, gate",
        "queries",
        "chain",
        "full attention",
        "windowed attention",
        "codes",
        "experts",
        "comb",
        "stream",
        "head's collapse",
        "own entries",
        "attention with a sink",
        "product of groups",
        "chosen",
        "logits of a whole v4",
    ):
        assert kernel in done.stdout


def test_a_difference_is_seen() -> None:
    assert compare("cpu", "float32", "plant").returncode == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_on_a_gpu(dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.models.compare_fused", "cuda", dtype], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
