"""`farspark demo`: what is said before minutes of work; the demo itself is run by `make demo`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farspark.cli.main import main


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-tokens", "0"], "--max-tokens 0: expected 1 or more"),
        (["--json", "/no/such/report"], "--json /no/such/report: expected a file in a folder that exists"),
        (["--json", "/tmp"], "--json /tmp: expected a file in a folder that exists"),
    ],
)
def test_what_a_person_must_put_right_is_said_at_once(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *options]) == 2
    assert capsys.readouterr().err == f"farspark: {said}\n"


def test_a_cache_that_is_no_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["demo", "--cache", str(tmp_path / "file")]) == 2
    assert f"farspark: --cache {tmp_path / 'file'}: File exists; expected a folder" in capsys.readouterr().err


def test_an_environment_that_make_did_not_set_up_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    for name in ("farspark.demo.run", "farspark.demo.completions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err == (
        "farspark: httpx is not installed; the demo runs in the environment that `make demo` sets up\n"
    )


def test_a_user_without_a_home_is_asked_for_a_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert main(["demo"]) == 2
    assert "give --cache DIR" in capsys.readouterr().err
