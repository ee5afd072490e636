"""`farspark overlay` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

import farspark
from farspark.cli.main import main
from farspark.engine.vllm.overlay import OVERLAID, make_overlay

BASE = b"""\
def init_speculator(vllm_config, device):
    speculative_config = vllm_config.speculative_config
    assert speculative_config is not None
    if speculative_config.method == "dspark":
        return DSparkSpeculator(vllm_config, device)
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.py"
    path.write_bytes(BASE)
    return path


def test_generate_writes_the_overlay_and_prints_the_mounts(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "overlay.py"
    assert main(["overlay", "generate", str(base), str(out)]) == 0
    assert out.read_bytes() == make_overlay(BASE)
    assert out.stat().st_mode & 0o777 == 0o644
    packages = "/usr/local/lib/python3.12/dist-packages"
    assert capsys.readouterr().out.splitlines()[2:] == [
        f"  -v {out}:{packages}/{OVERLAID}:ro",
        f"  -v {Path(farspark.__file__).parent}:{packages}/farspark:ro",
    ]
    assert sorted(tmp_path.iterdir()) == [base, out]


def test_the_place_in_the_image_can_be_named(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "over lay.py"
    assert main(["overlay", "generate", str(base), str(out), "--packages", "/opt/site"]) == 0
    assert f"  -v '{out}:/opt/site/{OVERLAID}:ro'" in capsys.readouterr().out
    assert main(["overlay", "generate", str(base), str(out), "--packages", "site"]) == 2
    assert "expected an absolute path inside the image" in capsys.readouterr().err


def test_verify_proves_an_overlay(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "overlay.py"
    main(["overlay", "generate", str(base), str(out)])
    capsys.readouterr()
    assert main(["overlay", "verify", str(out), "--base", str(base)]) == 0
    assert capsys.readouterr().out == f"{out} is {base} plus the branch and nothing else\n"


def test_verify_finds_another_byte_and_another_image(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "overlay.py"
    main(["overlay", "generate", str(base), str(out)])
    out.write_bytes(out.read_bytes() + b"\n")
    assert main(["overlay", "verify", str(out), "--base", str(base)]) == 1
    assert f"farspark: {out} is not the overlay of {base}: without the branch" in capsys.readouterr().err
    base.write_bytes(b"# another image\n" + BASE)
    assert main(["overlay", "verify", str(out), "--base", str(base)]) == 1
    assert "generate it for this image" in capsys.readouterr().err


def test_what_a_person_must_put_right_ends_with_2_and_writes_nothing(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, out = tmp_path / "other.py", tmp_path / "out.py"
    other.write_text("x = 1\n")
    for arguments, sentence in (
        (["generate", str(other), str(out)], "other.py: this is not the vllm/v1/worker/gpu/spec_decode/__init__.py"),
        (["generate", str(tmp_path / "absent"), str(out)], "absent cannot be read: No such file"),
        (["generate", str(base), str(base)], "is the image's file itself"),
        (["generate", str(base), str(tmp_path / "absent" / "out.py")], "out.py cannot be written: No such file"),
        (["verify", str(out), "--base", str(base)], "out.py cannot be read: No such file"),
        (["verify", str(base), "--base", str(other)], "other.py: this is not the"),
    ):
        assert main(["overlay", *arguments]) == 2
        assert sentence in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [base, other]
    assert base.read_bytes() == BASE
