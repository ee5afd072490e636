"""The fused gather under Triton's interpreter, and which form an engine gets."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from farspark.engine.config import FusedGather
from farspark.engine.gather import forms
from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.torch_gather import TorchGather
from farspark.errors import ConfigError

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
SHAPE = GatherShape(max_requests=2, max_tokens=16, taps=2, hidden_size=4, context=8, ring=4)


def compare(*arguments: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "tests.engine.gather.compare_forms", device, *arguments],
        cwd=ROOT,
        env=environment | ({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_both_forms_make_the_same_rows_ring_and_metadata() -> None:
    found = compare("10")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("10 steps equal; the check at start says equal") == 4


@pytest.mark.gpu
def test_both_forms_make_the_same_rows_ring_and_metadata_on_a_gpu() -> None:
    """With and without the three columns of sampled drafts; launched by Triton and, where that can be, directly."""
    found = compare("50", device="cuda")
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count("50 steps equal; the check at start says equal") == 8
    # Rows of one shape are aligned in some steps at most.
    assert found.stdout.count("launched by the driver") >= 3


def test_a_difference_is_seen_and_named() -> None:
    found = compare("1", "plant")
    assert found.returncode == 1
    assert "ring row 0" in found.stdout
    found = compare("1", "plant-seed")
    assert found.returncode == 1
    assert "metadata row 0" in found.stdout


def test_the_torch_form_serves_where_the_fused_one_is_off_or_has_no_gpu() -> None:
    for wanted, reason in ((FusedGather.OFF, "FUSED_GATHER=0"), (FusedGather.AUTO, "the device is cpu")):
        form = forms.make_gather(wanted, SHAPE, CPU)
        assert type(form.gather) is TorchGather
        assert not form.is_fused
        assert reason in form.reason


@pytest.mark.parametrize("how", ["differs", "raises"])
def test_a_fused_form_that_differs_or_fails_is_switched_off_with_a_warning(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def difference(*_: Any) -> str:
        if how == "raises":
            raise RuntimeError("no such instruction")
        return "ring row 3"

    monkeypatch.setattr(forms, "first_difference", difference)
    monkeypatch.setitem(sys.modules, "farspark.engine.gather.triton_gather", _Stand())
    why = forms.check_fused(SHAPE, CPU)
    assert why == {"differs": "step 0: ring row 3", "raises": "RuntimeError: no such instruction"}[how]

    class Gpu:
        type = "cuda"

    monkeypatch.setattr(forms, "check_fused", lambda *_: why)
    monkeypatch.setattr(forms, "TorchGather", lambda *_, **__: "torch form")
    with caplog.at_level(logging.WARNING):
        form = forms.make_gather(FusedGather.AUTO, SHAPE, Gpu())  # type: ignore[arg-type]
    assert (str(form.gather), form.is_fused, form.reason) == ("torch form", False, why)
    assert why in caplog.text
    with pytest.raises(ConfigError, match=r"cannot be used: .*Unset it"):
        forms.make_gather(FusedGather.ON, SHAPE, CPU)


class _Stand:
    """In place of the module that imports Triton."""

    @staticmethod
    def TritonGather(*arguments: Any, driver: object, **options: Any) -> TorchGather:
        return TorchGather(*arguments, **options)
