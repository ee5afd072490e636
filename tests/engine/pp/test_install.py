"""What is changed in a real vLLM, asked in a process of its own: nothing of it outlasts the test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

PROGRAM = """
import json
from types import SimpleNamespace
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
from farspark.engine.vllm.pp.install import draft_eagerly
from farspark.engine.vllm.pp.scheduling import cap_batches_in_flight

def config(stages, method="dspark", v2=True, ahead=True):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=method and SimpleNamespace(method=method),
        use_v2_model_runner=v2,
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
    )

engines = {
    "one stage": config(1), "two": config(2), "eight": config(8), "two, synchronous": config(2, ahead=False),
    "two, eagle3": config(2, "eagle3"), "two, none": config(2, None),
    "two, v1": config(2, v2=False), "one, v1": config(1, v2=False),
}
batches = lambda: {name: VllmConfig.max_concurrent_batches.fget(one) for name, one in engines.items()}
before = batches()
cap_batches_in_flight()
modes = {}
def note(self, cudagraph_mode):
    modes[self.name] = cudagraph_mode.name
DSparkSpeculator.init_cudagraph_manager = note
draft_eagerly()
for name, one in engines.items():
    DSparkSpeculator.init_cudagraph_manager(SimpleNamespace(name=name, vllm_config=one), CUDAGraphMode.FULL_DECODE_ONLY)
print("answer " + json.dumps([before, batches(), modes]))
"""


def test_the_cap_and_eager_drafting_touch_a_dspark_pipeline_of_the_v2_runner_and_nothing_else() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("answer "))
    before, after, modes = json.loads(line.removeprefix("answer "))
    stock: dict[str, Any] = {
        "one stage": 2,
        "two": 3,
        "eight": 9,
        "two, synchronous": 2,
        "two, eagle3": 3,
        "two, none": 3,
        "two, v1": 2,
        "one, v1": 2,
    }
    assert before == stock
    assert after == stock | {"two": 2, "eight": 8}
    eager = {"two", "eight", "two, synchronous"}
    assert modes == {name: "NONE" if name in eager else "FULL_DECODE_ONLY" for name in stock}
