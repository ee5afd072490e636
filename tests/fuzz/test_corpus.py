"""The corpus holds for the code as it is, and falls over faults that are planted in a copy of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "fuzz" / "corpus"
TARGETS = ("codec", "framing", "worker", "client", "endpoint")
MAX_CORPUS_BYTES = 1 << 20


def run(target: str, source: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(source), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", f"fuzz.{target}", str(CORPUS / target)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=120,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_of_the_corpus_passes_FRAMING(target: str) -> None:
    done = run(target, ROOT / "src")
    assert done.returncode == 0, done.stderr
    assert f"{len(list((CORPUS / target).iterdir()))} inputs, no fault" in done.stdout


def test_the_corpus_stays_small() -> None:
    assert 0 < sum(file.stat().st_size for file in CORPUS.rglob("*") if file.is_file()) < MAX_CORPUS_BYTES


PLANTED = {
    "a frame of any length is taken": (
        "framing",
        "transport/tcp.py",
        "if length > self.max_frame_bytes:",
        "if False:",
    ),
    "memory is used again while somebody looks at it": (
        "framing",
        "transport/tcp.py",
        "self._memory = bytearray(len(self._memory))",
        "pass",
    ),
    "a send that was cut leaves the channel open": (
        "framing",
        "transport/tcp.py",
        "started = sent > 0",
        "started = False",
    ),
    "a STEP of any length is read": (
        "codec",
        "wire/codec.py",
        "if len(payload) != expected:",
        "if False:",
    ),
    "a text of any length is read": (
        "codec",
        "wire/codec.py",
        "if length > limit:",
        "if False:",
    ),
    "a status that is not ours is read": (
        "codec",
        "wire/codec.py",
        "except KeyError as unknown:",
        "except IndexError as unknown:",
    ),
    "rows that leave a gap are appended": (
        "worker",
        "worker/session.py",
        "elif first_pos != held.end:",
        "elif False:",
    ),
    "a session outlives its connection": (
        "worker",
        "worker/server.py",
        "ended = self._answers.end_session(connection)\n            self._forget",
        'ended = ""\n            self._forget',
    ),
    "a token out of range is drafted from": (
        "worker",
        "worker/session.py",
        "0 <= anchor_token < info.vocab_size",
        "0 <= anchor_token",
    ),
    "whoever has no token is served": (
        "worker",
        "worker/answers.py",
        "if not connection.proof.is_satisfied and",
        "if False and",
    ),
    "what a peer says can forge a line of the log": (
        "client",
        "wire/codec.py",
        "text = text if text.isprintable() else",
        "text = text if True else",
    ),
    "any id is believed": (
        "client",
        "engine/replies.py",
        "are_in_range = max(tokens, default=0) < vocab_size and ",
        "are_in_range = ",
    ),
    "NaN is a confidence": (
        "client",
        "engine/replies.py",
        " and max(confidences, default=0) <= _ONE",
        "",
    ),
    "a connection that is closed is kept": (
        "client",
        "engine/round.py",
        '            self._client.drop(connection, str(error))\n            raise _RoundFailed("transport_error"',
        '            raise _RoundFailed("transport_error"',
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, what: str) -> None:
    target, file, right, wrong = PLANTED[what]
    shutil.copytree(ROOT / "src" / "farspark", tmp_path / "farspark", ignore=shutil.ignore_patterns("__pycache__"))
    planted = tmp_path / "farspark" / file
    source = planted.read_text(encoding="utf-8")
    assert right in source, "the place has changed: plant the fault where it belongs now"
    planted.write_text(source.replace(right, wrong), encoding="utf-8")
    done = run(target, tmp_path)
    assert done.returncode != 0, f"not found: {what}"
    assert "Traceback" in done.stderr
