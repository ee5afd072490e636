"""`farspark export` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fakes.tiny_deepseek import write_tiny_deepseek

from farspark.cli.main import main
from farspark.clock import Deadline
from farspark.worker.checkpoint import identities


def test_what_was_exported_is_said_with_the_identity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = write_tiny_deepseek(tmp_path / "target", "v41"), tmp_path / "some" / "drafter"
    wanted = identities(target)
    assert main(["export", str(target), str(out)]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[0] == "drafter           DeepseekV41ForCausalLM, 3 stages of 8 experts"
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert lines[1] == f"to copy           240 tensors, {size:,} bytes"
    assert lines[2:] == [
        f"exported to       {out}",
        f"identity          {wanted.identity.hex()}",
        f"markov identity   {wanted.markov_identity.hex()}",
    ]
    assert "copying ..." in said.err
    assert "copying: done" in said.err
    assert main(["export", str(target), str(out)]) == 0
    assert f"there already     {out}\n" in capsys.readouterr().out


def test_what_a_person_must_put_right_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_tiny_deepseek(tmp_path / "target", "v4")
    (tmp_path / "taken").write_text("")
    for arguments, said in (
        ([str(tmp_path / "nowhere"), str(tmp_path / "out")], "nowhere is not a folder"),
        ([str(target), str(tmp_path / "taken")], "taken is there already, and not a folder"),
        ([str(target), str(target)], "is there already and not an export of"),
        ([str(target), "/proc/nothing/here"], "/proc/nothing"),
    ):
        assert main(["export", *arguments]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    with pytest.raises(SystemExit) as caught:
        main(["export", str(target)])
    assert caught.value.code == 2


def test_ctrl_c_leaves_the_beginning_and_the_next_run_goes_on(tmp_path: Path) -> None:
    """The embedding and the head are large enough for the signal to find the copying at work."""
    target, out = write_tiny_deepseek(tmp_path / "target", "v41", vocab_size=200_000), tmp_path / "out"
    command = [sys.executable, "-m", "farspark", "export", str(target), str(out)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job, as these tests may be, ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = Deadline.after(120)
    partial = tmp_path / "out.partial"
    while not list(partial.glob("*.growing")):
        deadline.check("waiting for the first file to grow")
        assert process.poll() is None, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, error.splitlines()[-1]) == (130, "farspark: interrupted"), output
    assert not out.exists()
    assert partial.exists()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert f"exported to       {out}" in done.stdout
    assert not partial.exists()
