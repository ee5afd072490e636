"""The recorded hook points against real vLLM sources, and against changed ones."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from farspark.engine.vllm import versions
from farspark.engine.vllm.versions import RECORDS, HookPoints, Wheel
from farspark.errors import ConfigError


class Text:
    """Sources held in memory."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def paths(self) -> Iterator[str]:
        yield from sorted(self.files)


def written_as(record: HookPoints) -> Text:
    """The smallest sources that `record` describes."""
    bodies: dict[str, dict[str, list[str]]] = {}
    for name, parameters in {**record.signatures, **record.pp_signatures}.items():
        path, qualified = name.split("::")
        scope, _, function = qualified.rpartition(".")
        bodies.setdefault(path, {}).setdefault(scope, []).append(f"def {function}({parameters}): pass")
    attributes = "".join(f"    x = self.speculator.{name}\n" for name in sorted(record.speculator_attributes))
    attributes += "".join(f"    x = self.pp_handler.{name}\n" for name in sorted(record.pp_handler_attributes))
    runner = bodies[versions.RUNNER].setdefault("", [])
    runner.append(f"def reads(self):\n{attributes}")
    files = {}
    for path, scopes in bodies.items():
        text = ""
        for scope, functions in scopes.items():
            text += f"class {scope}:\n    " + "\n    ".join(functions) + "\n" if scope else "\n".join(functions) + "\n"
        files[path] = text
    fields = "\n".join(f"    {name}: object" for name in sorted(versions.INPUT_BATCH_FIELDS))
    files["v1/worker/gpu/input_batch.py"] = f"class InputBatch:\n{fields}\n"
    fields = "\n".join(f"    {name}: object" for name in sorted(versions.SCHEDULER_OUTPUT_FIELDS))
    files["v1/core/sched/output.py"] = f"class SchedulerOutput:\n{fields}\n"
    files["_version.py"] = f"__version__ = version = '{record.version}+cpu'\n"
    return Text(files)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.version)
def test_sources_as_recorded_pass(record: HookPoints) -> None:
    assert versions.check_hook_points(written_as(record)) is record


def test_the_installed_vllm_is_as_recorded_in_every_place() -> None:
    sources = versions.installed_sources()
    if sources is None:
        pytest.skip("no vLLM is installed here")
    assert versions.check_everything(sources).version == versions.version_of(sources)


def test_another_version_is_refused_with_both_named() -> None:
    sources = written_as(RECORDS[-1])
    sources.files["_version.py"] = "__version__ = version = '0.34.0'"
    with pytest.raises(
        ConfigError, match=r"vLLM 0\.34\.0 is not one that this Farspark knows \(0\.25\.1, 0\.32\.0, 0\.33\.0\)"
    ):
        versions.check_hook_points(sources)


def test_sources_without_a_version_are_refused() -> None:
    with pytest.raises(ConfigError, match="vLLM of an unknown version"):
        versions.check_hook_points(Text({}))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.version)
def test_every_changed_signature_is_named(record: HookPoints) -> None:
    for name in record.signatures:
        path, qualified = name.split("::")
        sources = written_as(record)
        function = qualified.rpartition(".")[2]
        sources.files[path] = sources.files[path].replace(f"def {function}(", f"def {function}(surprise, ")
        with pytest.raises(ConfigError, match=rf"(?s){function}\(surprise.*expected"):
            versions.check_hook_points(sources)


def test_a_missing_function_is_named() -> None:
    sources = written_as(RECORDS[1])
    sources.files["v1/worker/gpu/states.py"] = "class RequestState:\n    pass\n"
    with pytest.raises(ConfigError, match=r"RequestState\.add_request does not exist"):
        versions.check_hook_points(sources)


def test_a_runner_that_reads_something_else_from_its_speculator_is_refused() -> None:
    sources = written_as(RECORDS[1])
    sources.files[versions.RUNNER] += "def more(self):\n    return getattr(self.speculator, 'surprise', None)\n"
    with pytest.raises(ConfigError, match=r"reads `speculator\.surprise`"):
        versions.check_hook_points(sources)


def test_a_batch_that_lost_a_field_is_refused() -> None:
    sources = written_as(RECORDS[1])
    sources.files["v1/worker/gpu/input_batch.py"] = "class InputBatch:\n    idx_mapping: object\n"
    with pytest.raises(ConfigError, match="InputBatch has no field positions"):
        versions.check_hook_points(sources)


def test_gates_every_comparison_with_the_method_and_every_question_is_found() -> None:
    sources = Text(
        {
            "config/vllm.py": "class VllmConfig:\n    def f(self, c):\n        return c.method in ('eagle', 'dspark')\n",
            "v1/scheduler.py": "def g(config):\n    def inner():\n        return config.use_eagle()\n    return inner\n",
            "v1/quiet.py": "NAME = 'dspark'\n",
            "models/own.py": "def h(c):\n    return c.method == 'dspark'\n",
        }
    )
    assert set(versions.find_gates(sources)) == {"config/vllm.py::VllmConfig.f", "v1/scheduler.py::g.inner"}


def test_gates_a_new_test_on_the_method_is_refused() -> None:
    sources = written_as(RECORDS[1])
    for gate in RECORDS[1].gates:
        path, qualified = gate.split("::")
        *scopes, function = qualified.split(".")
        indent = "    " * len(scopes)
        text = "".join(f"{'    ' * depth}class {name}:\n" for depth, name in enumerate(scopes))
        sources.files[path] = (
            sources.files.get(path, "") + f"{text}{indent}def {function}(c):\n{indent}    return c == 'dspark'\n"
        )
    assert frozenset(versions.find_gates(sources)) == RECORDS[1].gates
    sources.files["v1/new.py"] = "def f(c):\n    return c.method == 'dspark'\n"
    with pytest.raises(ConfigError, match=r"a test on the method at v1/new\.py::f is not recorded"):
        versions.check_everything(sources)


def test_parameters_keep_defaults_and_leave_annotations_out() -> None:
    function = ast.parse("def f(self, a: int, *, b: str | None = None, **more: object) -> None: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert versions.parameters(function) == "self, a, *, b=None, **more"


def test_a_wheel_is_read_like_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in written_as(RECORDS[2]).files.items():
            wheel.writestr(f"vllm/{name}", text)
        wheel.writestr("vllm-0.33.0.dist-info/METADATA", "Name: vllm\n")
    assert versions.check_hook_points(Wheel(path)).version == "0.33.0"
    assert "_version.py" in set(Wheel(path).paths())


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "_version.py").write_text("__version__ = '9.9.9'\n")
    assert versions.main([str(tmp_path)]) == 1
    assert "vLLM 9.9.9 is not one" in capsys.readouterr().err


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.version)
def test_a_pipelines_hook_points_as_recorded_pass_and_changed_ones_are_named(record: HookPoints) -> None:
    sources = written_as(record)
    assert versions.check_pp_hook_points(sources) is record
    path = "v1/engine/core.py"
    sources.files[path] = sources.files[path].replace("model_executed", "was_executed")
    with pytest.raises(ConfigError, match=r"EngineCore.post_step\(self, was_executed\), expected .*VLLM_DSPARK_PP_"):
        versions.check_pp_hook_points(sources)


def test_a_use_of_the_pipelines_handler_that_is_not_recorded_is_named() -> None:
    sources = written_as(RECORDS[-1])
    sources.files[versions.RUNNER] += "def more(self):\n    self.pp_handler.drain()\n"
    with pytest.raises(ConfigError, match=r"reads `pp_handler\.drain`"):
        versions.check_pp_hook_points(sources)


def test_a_version_without_drafters_in_pipelines_is_refused_with_those_that_have_them() -> None:
    for record in RECORDS[1:]:
        versions.refuse_no_drafts_in_pipeline(record)
    with pytest.raises(ConfigError, match=r"vLLM 0\.25\.1 takes no drafter .* use vLLM 0\.32\.0, 0\.33\.0, or unset"):
        versions.refuse_no_drafts_in_pipeline(RECORDS[0])
