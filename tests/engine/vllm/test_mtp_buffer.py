"""Giving back the MTP hidden-state buffer, on stand-ins for the models that have one, and the records against real sources."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from farspark.engine.vllm import versions
from farspark.engine.vllm.mtp_buffer import reclaim, reclaim_after_load
from farspark.engine.vllm.mtp_uses import MTP_BUFFER, BufferUse, buffer_uses
from farspark.engine.vllm.versions import RECORDS, HookPoints, record_for

ROWS, WIDTH = 64, 8
BYTES = ROWS * WIDTH * 2


class DeepseekV4Model(torch.nn.Module):
    """As in vLLM: allocates the buffer, and copies every step into it. `asks`: since 0.32, only if there is one."""

    def __init__(self, *, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.copied: list[Any] = []
        self._mtp_hidden_buffer: Any = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.asks or self._mtp_hidden_buffer is not None:
            self.copied.append(self._mtp_hidden_buffer[: len(hidden)].copy_(hidden))
        return hidden * 2


# A class belongs to the file of its module.
DeepseekV4Model.__module__ = "vllm.models.deepseek_v4.nvidia.model"


class DeepseekV4ForCausalLM(torch.nn.Module):
    model: DeepseekV4Model

    def __init__(self, model: DeepseekV4Model) -> None:
        super().__init__()
        self.model = model

    def get_mtp_target_hidden_states(self) -> Any:
        return getattr(self.model, "_mtp_hidden_buffer", None)


def target(version: str) -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM(DeepseekV4Model(asks=record_for(version).mtp_buffer_may_be_none))


class Text:
    """Sources held in memory."""

    def __init__(self, **files: str) -> None:
        self.files = files

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def paths(self) -> Iterator[str]:
        yield from self.files


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_a_target_that_asks_first_has_no_buffer_and_copies_nothing(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = target(version)
    with caplog.at_level(logging.INFO, "farspark"):
        assert reclaim(model, record_for(version), None) == {"reclaimed_bytes": BYTES, "kept_because": None}
    hidden = torch.ones(5, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(model.model(hidden), hidden * 2)
    assert model.model.copied == []
    assert model.get_mtp_target_hidden_states() is None
    assert ["0.0 MiB reclaimed on this rank" in line for line in caplog.messages] == [True]


def test_a_target_that_does_not_ask_copies_into_nothing() -> None:
    model = target("0.25.1")
    assert reclaim(model, record_for("0.25.1"), None)["reclaimed_bytes"] == BYTES
    hidden = torch.ones(5, WIDTH, dtype=torch.bfloat16)
    assert torch.equal(model.model(hidden), hidden * 2)
    assert not any(isinstance(one, torch.Tensor) for one in model.model.copied)
    # The runner hands a slice of it to the speculator.
    assert not isinstance(model.get_mtp_target_hidden_states()[:5], torch.Tensor)
    assert not any(isinstance(one, torch.Tensor) for one in vars(model.model).values())


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.version)
def test_the_stand_in_for_the_model_without_reclaiming_does_copy(record: HookPoints) -> None:
    model = target(record.version)
    model.model(torch.ones(5, WIDTH, dtype=torch.bfloat16))
    assert int(model.get_mtp_target_hidden_states().count_nonzero()) == 5 * WIDTH


def test_a_target_without_the_buffer_is_left_alone_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "farspark"):
        found = reclaim(torch.nn.Linear(2, 2), record_for("0.32.0"), None)
    assert found == {"reclaimed_bytes": 0, "kept_because": None}
    assert not caplog.messages


def test_a_model_that_is_not_recorded_keeps_its_buffer_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Newer(DeepseekV4Model):
        pass

    Newer.__module__ = "vllm.models.deepseek_v5.nvidia.model"
    Newer.__qualname__ = "Newer"
    model = Newer(asks=True)
    found = reclaim(model, record_for("0.32.0"), None)
    assert found["reclaimed_bytes"] == 0
    assert "models/deepseek_v5/nvidia/model.py::Newer.__init__" in found["kept_because"]
    assert model._mtp_hidden_buffer is not None
    assert found["kept_because"] in caplog.messages[0]


def test_a_changed_vllm_keeps_the_buffer_with_a_warning_that_names_what_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = record_for("0.32.0")
    changed = "models/deepseek_v4/nvidia/model.py"
    sources = Text(
        **{changed: "class DeepseekV4Model:\n    def forward(self):\n        return self._mtp_hidden_buffer[:3]\n"}
    )
    model = target("0.32.0")
    found = reclaim(model, record, sources)
    assert found["reclaimed_bytes"] == 0
    assert isinstance(model.get_mtp_target_hidden_states(), torch.Tensor)
    assert (
        f"{changed}::DeepseekV4Model.forward reads the MTP buffer, recorded is that it asks for it"
        in caplog.messages[0]
    )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """vLLM's runner as far as loading goes: touch the model last, then measure."""

    def set_eagle3_aux_hidden_state_layers(model: Any, spec_config: object, use_pp: bool = False) -> str:
        return f"layers of {type(model).__name__}"

    def load_model(model: Any) -> tuple[str, int]:
        said = module.set_eagle3_aux_hidden_state_layers(model, None, use_pp=False)
        held = sum(one.nbytes for m in model.modules() for one in vars(m).values() if isinstance(one, torch.Tensor))
        return said, held

    name = "vllm.v1.worker.gpu.model_runner"
    module: Any = ModuleType(name)
    module.set_eagle3_aux_hidden_state_layers = set_eagle3_aux_hidden_state_layers
    module.load_model = load_model
    for depth in range(1, name.count(".") + 1):
        parent = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, module)
    # No vLLM is imported here, so none is installed as far as this test goes.
    monkeypatch.setattr("farspark.engine.vllm.mtp_buffer.installed_sources", lambda: None)
    found: ModuleType = module
    return found


def test_the_memory_is_back_before_the_runner_measures_what_loading_took(runner: Any) -> None:
    untouched = runner.set_eagle3_aux_hidden_state_layers
    assert runner.load_model(target("0.32.0")) == ("layers of DeepseekV4ForCausalLM", BYTES)
    notes: list[dict[str, Any]] = []
    reclaim_after_load(record_for("0.32.0"), notes.append)
    assert notes.pop() == {"reclaimed_bytes": 0, "kept_because": "no target was loaded yet"}
    assert runner.load_model(target("0.32.0")) == ("layers of DeepseekV4ForCausalLM", 0)
    assert notes == [{"reclaimed_bytes": BYTES, "kept_because": None}]
    # The target of this engine and no other.
    assert runner.set_eagle3_aux_hidden_state_layers is untouched
    assert runner.load_model(target("0.32.0"))[1] == BYTES


def test_the_installed_vllm_touches_the_buffer_as_recorded_and_nowhere_else() -> None:
    sources = versions.installed_sources()
    if sources is None:
        pytest.skip("no vLLM is installed here")
    record = record_for(versions.version_of(sources))
    assert list(versions.mtp_buffer_differences(sources, record)) == []
    assert BufferUse.SETS in record.mtp_buffer.values()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.version)
def test_only_the_version_that_never_asks_needs_something_in_the_buffers_place(record: HookPoints) -> None:
    assert record.mtp_buffer_may_be_none is (record.version != "0.25.1")


@pytest.mark.parametrize(
    ("body", "use"),
    [
        (f"self.{MTP_BUFFER} = torch.empty(3)", "sets"),
        (f"self.{MTP_BUFFER}[:n].copy_(x)", "reads"),
        (f"if self.{MTP_BUFFER} is not None:\n        self.{MTP_BUFFER}[:n].copy_(x)", "asks for"),
        (f"if self.{MTP_BUFFER} is not None:\n        pass\n    self.{MTP_BUFFER}[:n].copy_(x)", "reads"),
        (f"if self.{MTP_BUFFER} is None:\n        self.{MTP_BUFFER}[:n].copy_(x)", "reads"),
        (f"return getattr(self.model, '{MTP_BUFFER}', None)", "returns"),
        (f"return self.model.{MTP_BUFFER}", "returns"),
        ("return self.language_model.get_mtp_target_hidden_states()", "returns"),
        ("return hasattr(cls, 'get_mtp_target_hidden_states')", "asks for"),
        ("h = self.get_mtp_target_hidden_states()\n    return h[:3]", "reads"),
        ("h = self.get_mtp_target_hidden_states()\n    if h is None:\n        return x\n    return h[:3]", "asks for"),
        ("h = self.get_mtp_target_hidden_states()\n    if x is None:\n        return x\n    return h[:3]", "reads"),
        ("g = getattr(m, 'get_mtp_target_hidden_states', None)\n    h = g()\n    return h[:3]", "reads"),
        ("return x", None),
    ],
)
def test_what_a_function_does_with_the_buffer_is_read_from_its_source(body: str, use: str | None) -> None:
    source = f"class M:\n  def f(self, x, n):\n    {body}\n  # {MTP_BUFFER}\n"
    assert [(name, found.value) for name, found in buffer_uses(source)] == ([("M.f", use)] if use else [])
