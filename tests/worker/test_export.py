from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.fakes.tiny_checkpoint import write_tiny
from tests.fakes.tiny_deepseek import tiny_config, tiny_tensors, write_deepseek, write_tiny_deepseek

from farspark.errors import CheckpointError, ConfigError
from farspark.worker.checkpoint import identities
from farspark.worker.checkpoint.export import CHUNK_BYTES, ExportPlan, export, plan_export

pytestmark = pytest.mark.usefixtures("one_thread")

# So that a tiny drafter becomes several files.
FILE_BYTES = 100_000


@pytest.fixture(scope="module", params=["v4", "v41"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_deepseek(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def one_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what does not depend on the version."""
    return write_tiny_deepseek(tmp_path_factory.mktemp("one"), "v41")


def contents(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_SHARED_W_the_export_is_the_drafter_and_nothing_else_byte_for_byte(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "drafter"
    assert export(plan_export(target, FILE_BYTES), out)
    wanted = {
        name: tensor
        for name, tensor in contents(target).items()
        if (name.startswith("mtp.") or name in ("embed.weight", "head.weight")) and not name.endswith("bias_vl")
    }
    found = contents(out)
    assert found.keys() == wanted.keys()
    assert all(same_bytes(found[name], wanted[name]) for name in wanted)
    assert (out / "config.json").read_bytes() == (target / "config.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted)
    assert set(index["weight_map"].values()) == {path.name for path in out.glob("*.safetensors")}
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in wanted.values())
    assert not list(tmp_path.glob("*.partial"))
    assert not list(out.glob("*.growing"))


def test_the_drafter_has_one_identity_wherever_it_lies(target: Path, tmp_path: Path) -> None:
    export(plan_export(target, FILE_BYTES), tmp_path / "several")
    export(plan_export(target), tmp_path / "one")
    assert len(list((tmp_path / "one").glob("*.safetensors"))) == 1
    for folder in ("several", "one"):
        assert identities(tmp_path / folder) == identities(target)


def test_an_export_can_be_exported(target: Path, tmp_path: Path) -> None:
    export(plan_export(target, FILE_BYTES), tmp_path / "once")
    export(plan_export(tmp_path / "once"), tmp_path / "twice")
    assert identities(tmp_path / "twice") == identities(target)


def test_SHARED_W_shards_without_a_part_of_the_drafter_are_not_even_opened(tmp_path: Path) -> None:
    target = write_tiny_deepseek(tmp_path / "target", "v41")
    weight_map = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    others = weight_map["norm.weight"]
    assert not any(name.startswith("mtp.") for name, file in weight_map.items() if file == others)
    (target / others).unlink()
    export(plan_export(target), tmp_path / "out")
    assert identities(tmp_path / "out") == identities(target)


def test_the_headers_follow_the_format(target: Path, tmp_path: Path) -> None:
    plan = plan_export(target, FILE_BYTES)
    export(plan, tmp_path / "out")
    for file in plan.files:
        header = file.header()
        assert len(header) % 8 == 0
        with safe_open(tmp_path / "out" / file.name, framework="pt") as opened:
            assert set(opened.keys()) == {tensor.name for tensor in file.tensors}
        assert (tmp_path / "out" / file.name).stat().st_size == file.byte_count
        sizes = [{"F32": 4, "BF16": 2}.get(tensor.dtype, 1) for tensor in file.tensors]
        assert sizes == sorted(sizes, reverse=True)


def test_progress_counts_every_byte_once(one_target: Path, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    plan = plan_export(one_target, FILE_BYTES)
    export(plan, tmp_path / "out", lambda *call: calls.append(call))
    copying = [call for call in calls if call[0] == "copying"]
    assert copying[0] == ("copying", 0, plan.byte_count)
    assert copying[-1] == ("copying", plan.byte_count, plan.byte_count)
    assert [done for _, done, _ in copying] == sorted({done for _, done, _ in copying})


# Going on -------------------------------------------------------------------------------------------------------------


def cut_short(plan: ExportPlan, out: Path, at: int) -> None:
    def progress(what: str, done: int, total: int) -> None:
        if what == "copying" and done > at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(plan, out, progress)


@pytest.fixture
def begun(one_target: Path, tmp_path: Path) -> tuple[ExportPlan, Path, Path]:
    """(plan, out, the folder beside it) of an export that stopped in its third file."""
    plan, out = plan_export(one_target, FILE_BYTES), tmp_path / "out"
    cut_short(plan, out, plan.files[0].byte_count + plan.files[1].byte_count + 10)
    assert not out.exists()
    return plan, out, tmp_path / "out.partial"


def test_an_export_that_was_cut_short_goes_on_with_what_is_missing(
    one_target: Path, begun: tuple[ExportPlan, Path, Path]
) -> None:
    plan, out, partial = begun
    finished = [partial / plan.files[index].name for index in (0, 1)]
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in finished]
    assert not (partial / plan.files[2].name).exists()
    calls: list[tuple[str, int, int]] = []
    assert export(plan, out, lambda *call: calls.append(call))
    after = [((out / path.name).stat().st_ino, (out / path.name).stat().st_mtime_ns) for path in finished]
    assert after == before
    missing = sum(file.byte_count for file in plan.files[2:])
    assert [call for call in calls if call[0] == "copying"][-1] == ("copying", missing, missing)
    assert identities(out) == identities(one_target)


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone"])
def test_a_finished_file_that_is_no_more_what_it_was_is_copied_again(
    one_target: Path, begun: tuple[ExportPlan, Path, Path], damage: str
) -> None:
    plan, out, partial = begun
    path = partial / plan.files[1].name
    if damage == "flipped":
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    elif damage == "shorter":
        os.truncate(path, 100)
    else:
        path.unlink()
    export(plan, out)
    assert identities(out) == identities(one_target)


def test_a_process_killed_in_mid_copy_leaves_what_the_next_one_goes_on_with(one_target: Path, tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        from farspark.worker.checkpoint.export import export, plan_export

        def progress(what, done, total):
            if what == "copying" and done > total // 2:
                os.kill(os.getpid(), signal.SIGKILL)

        export(plan_export(Path(sys.argv[1]), int(sys.argv[3])), Path(sys.argv[2]), progress)
    """)
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", script, one_target, out, str(FILE_BYTES)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert len(list((tmp_path / "out.partial").glob("*.safetensors"))) > 1
    export(plan_export(one_target, FILE_BYTES), out)
    assert identities(out) == identities(one_target)


def test_an_export_that_is_there_is_checked_and_left_alone(target: Path, tmp_path: Path) -> None:
    plan, out = plan_export(target, FILE_BYTES), tmp_path / "out"
    assert export(plan, out)
    before = [path.stat().st_mtime_ns for path in sorted(out.iterdir())]
    assert not export(plan, out)
    assert [path.stat().st_mtime_ns for path in sorted(out.iterdir())] == before
    data = bytearray((out / plan.files[0].name).read_bytes())
    data[-1] ^= 1
    (out / plan.files[0].name).write_bytes(data)
    with pytest.raises(ConfigError, match="is not as it was exported; remove"):
        export(plan, out)


def test_an_empty_folder_may_be_there_already(one_target: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert export(plan_export(one_target), tmp_path / "out")
    assert identities(tmp_path / "out") == identities(one_target)


# What is refused ------------------------------------------------------------------------------------------------------


def refused(plan: ExportPlan, out: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        export(plan, out)
    for word in words:
        assert word in str(caught.value)


def test_a_folder_that_holds_something_else_is_not_touched(one_target: Path, tmp_path: Path) -> None:
    plan = plan_export(one_target)
    (tmp_path / "file").write_text("x")
    refused(plan, tmp_path / "file", "file is there already, and not a folder")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine").write_text("x")
    refused(plan, tmp_path / "folder", "folder is there already and not an export of")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["mine"]


def test_the_beginning_of_another_targets_export_is_not_gone_on_with(
    begun: tuple[ExportPlan, Path, Path], tmp_path: Path
) -> None:
    _, out, partial = begun
    other = write_tiny_deepseek(tmp_path / "other", "v41", seed=5)
    refused(plan_export(other), out, "out.partial is the beginning of an export of something else; remove it")
    assert partial.exists()


def test_two_exports_into_one_folder_do_not_mix(one_target: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    descriptor = os.open(tmp_path / "out.partial", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    refused(plan_export(one_target), tmp_path / "out", "is being written by another export")
    os.close(descriptor)
    assert export(plan_export(one_target), tmp_path / "out")


def test_too_little_room_is_said_before_anything_is_copied(
    one_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    plan = plan_export(one_target)
    refused(plan, tmp_path / "out", f"takes another {plan.byte_count:,} bytes and 1,000 are free; make room")


def test_a_disk_that_fills_up_is_one_sentence_and_keeps_what_is_done(one_target: Path, tmp_path: Path) -> None:
    """A real one: a small tmpfs in a mount namespace of its own. What is free is lied about, as another writer would."""
    script = textwrap.dedent("""
        import shutil, sys
        from pathlib import Path
        from farspark.errors import ConfigError
        from farspark.worker.checkpoint.export import export, plan_export

        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
        try:
            export(plan_export(Path(sys.argv[1]), int(sys.argv[3])), Path(sys.argv[2]))
        except ConfigError as error:
            print(error)
            print(len(list(Path(sys.argv[2] + ".partial").glob("*.safetensors"))))
    """)
    small = tmp_path / "small"
    small.mkdir()
    mount = f'mount -t tmpfs -o size=320k small {small} && exec {sys.executable} -c "$0" "$@"'
    unshared = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
    done = subprocess.run(
        [*unshared, script, one_target, small / "out", str(FILE_BYTES)], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    said, count = done.stdout.splitlines()
    assert "the disk is full; the export of" in said
    assert "what is done is kept" in said
    assert int(count) >= 1


def test_a_disk_that_does_not_keep_what_is_written_is_found_out(
    one_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rot(descriptor: int, *_: int) -> None:
        os.pwrite(os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY), b"\xff\xfe", 5000)

    monkeypatch.setattr(os, "posix_fadvise", rot)
    refused(plan_export(one_target), tmp_path / "out", "does not read back as it was written")
    assert not (tmp_path / "out").exists()


def test_a_source_that_shrinks_meanwhile_is_named(tmp_path: Path) -> None:
    target = write_tiny_deepseek(tmp_path / "target", "v41")
    plan = plan_export(target)
    path = plan.files[0].tensors[-1].path
    os.truncate(path, path.stat().st_size // 2)
    refused(plan, tmp_path / "out", path.name, "ends within")


def bad_target(target: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        plan_export(target)
    for word in words:
        assert word in str(caught.value)


def test_a_target_that_is_not_whole_is_named(tmp_path: Path) -> None:
    target = write_tiny_deepseek(tmp_path / "target", "v41")
    bad_target(tmp_path / "nowhere", "nowhere is not a folder")
    shard = target / "model-00002-of-00004.safetensors"
    data = shard.read_bytes()
    os.truncate(shard, len(data) // 2)
    bad_target(target, shard.name)
    shard.unlink()
    bad_target(target, shard.name, "not in the folder")
    shard.write_bytes(data)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    index["weight_map"]["mtp.0.attn_norm.weight"] = "../elsewhere.safetensors"
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    bad_target(target, "'../elsewhere.safetensors' is not a plain file name")
    (target / "model.safetensors.index.json").write_text("{")
    bad_target(target, "model.safetensors.index.json is not JSON")
    (target / "model.safetensors.index.json").unlink()
    bad_target(target, "has neither model.safetensors nor model.safetensors.index.json")


def test_a_target_without_a_drafter_is_told_so(tmp_path: Path) -> None:
    config = tiny_config("v4")
    tensors: dict[str, Any] = {
        name: tensor for name, tensor in tiny_tensors(config).items() if not name.startswith("mtp.")
    }
    bad_target(write_deepseek(tmp_path / "plain", config, tensors), "it has no DSpark stages")
    bad_target(write_tiny(tmp_path / "qwen3"), "a drafter's own checkpoint", "give it to the worker as it is")


def test_a_tensor_larger_than_a_chunk_is_copied_whole(tmp_path: Path) -> None:
    """129 MiB of embedding, as it is never in the tiny ones."""
    config = tiny_config("v41", vocab_size=CHUNK_BYTES // 64)
    tensors = tiny_tensors(config)
    target = write_deepseek(tmp_path / "target", config, tensors)
    assert tensors["embed.weight"].nbytes > 2 * CHUNK_BYTES
    plan = plan_export(target)
    export(plan, tmp_path / "out")
    assert identities(tmp_path / "out") == identities(target)
