from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fakes.tiny_checkpoint import write_target, write_tiny

from farspark.cli.main import main
from farspark.worker.checkpoint import identities

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def test_both_identities_are_printed_in_hex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_tiny(tmp_path / "drafter")
    wanted = identities(checkpoint)
    assert main(["identity", str(checkpoint)]) == 0
    assert capsys.readouterr().out == (
        f"identity          {wanted.identity.hex()}\nmarkov identity   {wanted.markov_identity.hex()}\n"
    )
    assert main(["identity", str(checkpoint), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "identity": wanted.identity.hex(),
        "markov_identity": wanted.markov_identity.hex(),
    }


def test_the_target_is_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, target = write_tiny(tmp_path / "drafter"), write_target(tmp_path / "target")
    assert main(["identity", str(checkpoint), "--target", str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["identity"] == identities(checkpoint, target).identity.hex()


def test_a_folder_without_a_checkpoint_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["identity", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("farspark: ")
    assert "config.json" in said
    assert "Traceback" not in said
