"""The overlay: one file plus one branch, provably nothing else, and that branch does what the plugin does."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from farspark.engine.config import EngineConfig, read_config
from farspark.engine.vllm.overlay import BRANCH, OVERLAID, difference, make_overlay
from farspark.engine.vllm.plugin import check_cached_blocks
from farspark.engine.vllm.versions import record_for
from farspark.errors import ConfigError

# The two signatures there are, small enough to be executed without vLLM.
TWO_PARAMETERS = b"""\
class DSparkSpeculator:
    def __init__(self, vllm_config, device):
        self.device = device


def init_speculator(vllm_config: "VllmConfig", device: "torch.device"):
    speculative_config = vllm_config.speculative_config
    assert speculative_config is not None
    if speculative_config.method == "dflash":
        return "dflash"
    elif speculative_config.method == "dspark":
        return DSparkSpeculator(vllm_config, device)
    else:
        raise NotImplementedError(f"{speculative_config.method} is not supported yet.")
"""
THREE_PARAMETERS = TWO_PARAMETERS.replace(
    b'def init_speculator(vllm_config: "VllmConfig", device: "torch.device"):\n',
    b"def init_speculator(\n"
    b'    vllm_config: "VllmConfig",\n'
    b'    device: "torch.device",\n'
    b'    req_states: "RequestState",\n'
    b"):\n"
    b'    """Build the speculator for this config."""\n',
)
BASES = [TWO_PARAMETERS, THREE_PARAMETERS, TWO_PARAMETERS.rstrip(b"\n")]


def installed() -> bytes | None:
    """The file of the vLLM that is installed here, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    return (Path(spec.origin).parent.parent / OVERLAID).read_bytes()


@pytest.mark.parametrize("base", BASES)
def test_an_overlay_without_its_record_and_its_branch_is_the_base_byte_for_byte(base: bytes) -> None:
    overlay = make_overlay(base)
    first, _, body = overlay.partition(b"\n")
    assert first.decode().endswith(f" {hashlib.sha256(base).hexdigest()}")
    assert body.count(BRANCH) == 1
    assert body.replace(BRANCH, b"") == base
    assert difference(overlay, base) is None


def test_the_installed_vllms_own_file_takes_the_branch() -> None:
    base = installed()
    if base is None:
        pytest.skip("no vLLM is installed here")
    overlay = make_overlay(base)
    assert difference(overlay, base) is None
    compile(overlay, "overlay", "exec")


@pytest.mark.parametrize("base", BASES)
def test_the_branch_stands_before_the_choice_of_a_speculator(base: bytes) -> None:
    before, _, after = make_overlay(base).partition(BRANCH)
    assert before.endswith(b"    assert speculative_config is not None\n")
    assert after.startswith(b'    if speculative_config.method == "dflash":\n')


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (lambda overlay: overlay.partition(b"\n")[2], "no record of its base"),
        (lambda overlay: make_overlay(THREE_PARAMETERS), "generate it for this image"),
        (lambda overlay: overlay.replace(BRANCH, b""), "0 times"),
        (lambda overlay: overlay.replace(BRANCH, BRANCH * 2), "2 times"),
        (lambda overlay: overlay.replace(b".strip():\n            from", b'or "1":\n            from'), "0 times"),
        (lambda overlay: overlay + b"import os\n", "differs from the base in line 15"),
        (lambda overlay: overlay.replace(b'return "dflash"', b'return "DFLASH"'), "differs from the base in line 10"),
        (lambda overlay: overlay.replace(BRANCH, b"") + BRANCH, "does not stand before the choice"),
    ],
)
def test_whatever_else_is_in_an_overlay_is_found(changed: Any, sentence: str) -> None:
    found = difference(changed(make_overlay(TWO_PARAMETERS)), TWO_PARAMETERS)
    assert found is not None
    assert sentence in found


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        (b"", "defines init_speculator 0 times"),
        (b"def init_speculator(:", "is not Python"),
        (b"\xff", "is not Python"),
        (b"x = '\0'", "is not Python"),
        (b"\xef\xbb\xbf" + TWO_PARAMETERS, "byte order mark"),
        (TWO_PARAMETERS.replace(b"\n", b"\r\n"), "carriage returns"),
        (TWO_PARAMETERS * 2, "defines init_speculator 2 times"),
        (
            TWO_PARAMETERS.replace(b'device: "torch.device"', b"device, stream"),
            r"takes \(vllm_config, device, stream\)",
        ),
        (TWO_PARAMETERS.replace(b"    assert speculative_config is not None\n", b""), "does not begin with"),
        (TWO_PARAMETERS.replace(b"DSparkSpeculator(vllm_config, device)", b"None"), "does not choose DSparkSpeculator"),
        (b"\n".join(TWO_PARAMETERS.split(b"\n")[:8]), "does not choose DSparkSpeculator"),
        (TWO_PARAMETERS.replace(b"\n    ", b"\n      "), "indented by 6 columns"),
        (make_overlay(TWO_PARAMETERS), "is an overlay already"),
    ],
)
def test_a_file_that_does_not_look_like_the_expected_one_is_refused(base: bytes, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"^this is not the {OVERLAID} that Farspark knows: .*{sentence}"):
        make_overlay(base)


# Builds a speculator from the overlay, and says what came of it and what of ours was loaded.
PROGRAM = """
import sys
from types import SimpleNamespace
overlay, method = sys.argv[1:]
space = {}
exec(compile(open(overlay, encoding="utf-8").read(), overlay, "exec"), space)
config = SimpleNamespace(speculative_config=SimpleNamespace(method=method), parallel_config=SimpleNamespace())
states = (None,) * (space["init_speculator"].__code__.co_argcount - 2)
try:
    print(getattr(space["init_speculator"](config, "device", *states), "device", "another"))
except Exception as error:
    print(type(error).__name__, error)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("farspark", "torch", "vllm")))
"""


def build(tmp_path: Path, base: bytes, method: str, **environment: str) -> list[str]:
    overlay = tmp_path / "overlay.py"
    overlay.write_bytes(make_overlay(base))
    arguments = [sys.executable, "-c", PROGRAM, str(overlay), method]
    done = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


@pytest.mark.parametrize("base", [TWO_PARAMETERS, THREE_PARAMETERS])
@pytest.mark.parametrize("value", [None, "", "   "])
def test_unset_or_blank_the_files_own_speculator_is_built_and_nothing_of_ours_is_imported(
    value: str | None, base: bytes, tmp_path: Path
) -> None:
    environment = {} if value is None else {"VLLM_DSPARK_REMOTE": value}
    assert build(tmp_path, base, "dspark", **environment) == ["device", "[]"]


def test_another_method_is_left_alone_although_the_remote_is_set(tmp_path: Path) -> None:
    assert build(tmp_path, TWO_PARAMETERS, "dflash", VLLM_DSPARK_REMOTE="tcp://127.0.0.1:1") == ["another", "[]"]


@pytest.mark.parametrize("base", [TWO_PARAMETERS, THREE_PARAMETERS])
def test_PLUGIN_LOAD_set_the_branch_reads_the_settings_and_a_wrong_one_stops_the_start(
    base: bytes, tmp_path: Path
) -> None:
    said, _ = build(tmp_path, base, "dspark", VLLM_DSPARK_REMOTE="tcp://127.0.0.1:1", VLLM_DSPARK_REMOTE_IDENTITY="12")
    assert said.startswith("ConfigError VLLM_DSPARK_REMOTE_IDENTITY='12'")


@pytest.mark.parametrize(
    ("policy", "version", "executor", "is_said"),
    [
        ("capacity", "0.32.0", "mp", True),
        ("capacity", "0.25.1", "ray", True),
        ("capacity", "0.32.0", "uni", False),
        ("capacity", "0.33.0", "mp", False),
        ("shadow", "0.32.0", "mp", False),
    ],
)
def test_APC_LOSS_what_an_overlay_cannot_reach_is_said_and_only_where_something_is_lost(
    policy: str, version: str, executor: str, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    check_cached_blocks(engine_config(policy), record_for(version), vllm_config(executor))
    assert [f"executor {executor}" in line for line in caplog.messages] == [True] * is_said


@pytest.mark.parametrize(
    ("version", "remedy"), [("0.25.1", "use the plugin"), ("0.32.0", '"disable_eagle_block_drop"')]
)
def test_APC_LOSS_an_overlay_that_must_keep_cached_blocks_and_cannot_does_not_start(version: str, remedy: str) -> None:
    config = engine_config("capacity", _KEEP_CACHED_BLOCKS="1")
    with pytest.raises(
        ConfigError, match=f"^VLLM_DSPARK_REMOTE_KEEP_CACHED_BLOCKS=1: an overlay .*executor mp.*{remedy}"
    ):
        check_cached_blocks(config, record_for(version), vllm_config("mp"))
    check_cached_blocks(config, record_for(version), vllm_config("uni"))
    check_cached_blocks(config, record_for("0.33.0"), vllm_config("mp"))


def test_APC_LOSS_where_vllm_or_the_settings_decided_an_overlay_has_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept_by_vllm = vllm_config("mp", disable_eagle_block_drop=True)
    check_cached_blocks(engine_config("capacity", _KEEP_CACHED_BLOCKS="1"), record_for("0.32.0"), kept_by_vllm)
    check_cached_blocks(engine_config("capacity", _KEEP_CACHED_BLOCKS="0"), record_for("0.32.0"), vllm_config("mp"))
    assert not caplog.messages


def engine_config(policy: str, **more: str) -> EngineConfig:
    settings = {"": "tcp://127.0.0.1:1", "_IDENTITY": "11" * 32, "_POLICY": policy} | more
    config = read_config({f"VLLM_DSPARK_REMOTE{suffix}": value for suffix, value in settings.items()})
    assert config is not None
    return config


def vllm_config(executor: str, **speculative: object) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=executor),
        speculative_config=SimpleNamespace(**speculative),
    )


# Stands for Docker's mount: the overlay is found where vLLM's own file would be.
MOUNT = """
import importlib.util, sys

class Mount:
    def find_spec(self, name, path=None, target=None):
        if name == "vllm.v1.worker.gpu.spec_decode":
            return importlib.util.spec_from_file_location(name, {overlay!r}, submodule_search_locations=[{folder!r}])

sys.meta_path.insert(0, Mount())
"""


@pytest.mark.vllm
def test_PLUGIN_LOAD_with_the_overlay_and_without_the_plugin_a_real_engine_drafts_remotely_and_keeps_cached_blocks(
    tmp_path: Path,
) -> None:
    base = installed()
    if base is None:
        pytest.skip("no vLLM is installed here")
    from tests.vllm import test_end_to_end as end_to_end
    from tests.vllm import tiny_pair
    from tests.vllm.processes import ROOT, Worker, run_engine

    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    overlay, mount = tmp_path / "overlay.py", tmp_path / "mount"
    overlay.write_bytes(make_overlay(base))
    mount.mkdir()
    folder = str((Path(spec.origin).parent.parent / OVERLAID).parent)
    (mount / "sitecustomize.py").write_text(MOUNT.format(overlay=str(overlay), folder=folder))

    pair = tiny_pair.make_tiny_pair(tmp_path / "pair", 0, agreeable=True)
    worker = Worker(pair.drafter, pair.target, tmp_path)
    worker.start()
    try:
        identity = end_to_end.identity_of(pair)
        settings = end_to_end.remote("capacity", worker.endpoint, identity, tmp_path / "stats.json")
        again = end_to_end.CACHED_FIRST | {"name": "cachedagain"}
        job = end_to_end.job(pair, end_to_end.CACHED_FIRST, again)
        run = run_engine(job, settings | {"VLLM_PLUGINS": "", "PYTHONPATH": f"{mount}:{ROOT}"})
    finally:
        worker.kill()
    assert run["facts"]["speculator_module"] == "farspark.engine.vllm.speculator"
    assert end_to_end.stats_of(tmp_path / "stats.json")["counters"]["rounds_ok"] > 0
    # 150 tokens of prompt in blocks of 32: four whole ones; dropping one would leave 96.
    assert run["phases"]["cachedagain"]["cached"]["0"] == 128
