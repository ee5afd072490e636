"""`farspark capture --show` and `farspark replay`: a recording of a real engine side, played against real workers over TCP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fakes.recorded_engine import CONTEXT, HIDDEN, SHAPE, SLOTS, TAPS, VOCAB, N, RecordedEngine, serving
from tests.fakes.tiny_checkpoint import write_tiny

from farspark.cli.main import main
from farspark.engine.capture import MAGIC, CapturedRound, CaptureReader, encode_record
from farspark.engine.replay import HostRing, Replay, verdict_of
from farspark.mock.drafter import mock_info
from farspark.mock.faults import Fault
from farspark.mock.relay import MockWorker
from farspark.transport import parse_endpoint
from farspark.worker.checkpoint import identities
from farspark.worker.server import Server

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Server]:
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def capture(folder: Path, worker: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captures") / "rounds"
    record(folder, worker, path)
    return path


def record(folder: Path, worker: Server, path: Path, planted: int | None = None, **settings: str) -> None:
    with RecordedEngine(folder, worker.endpoint, path, settings, planted) as engine:
        engine.serve()


def replay(capsys: pytest.CaptureFixture[str], path: Path, endpoint: object, *options: str) -> tuple[int, Any]:
    code = main(["replay", str(path), str(endpoint), "--json", *options])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def rewritten(path: Path, to: Path, change: Any) -> None:
    """The capture with `change(rounds)` in place of its rounds, and no tail."""
    with CaptureReader(path) as reader:
        header, rounds = reader.header, list(reader.rounds())
    pieces = [MAGIC, *encode_record(b"HEAD", [json.dumps(header.as_json()).encode()])]
    for one in change(rounds):
        pieces += encode_record(b"ROND", one.encode())
    to.write_bytes(b"".join(map(bytes, pieces)))


def test_the_recording_shows_what_was_served(capture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capture", "--show", str(capture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rounds"], found["rounds_prefill"], found["requests"]) == (13, 1, 4)
    assert (found["rounds_with_local_drafts"], found["rounds_with_remote_drafts"]) == (13, 12)
    assert found["ended"] == "closed"
    assert found["header"]["shape"]["context"] == CONTEXT
    assert main(["capture", "--show", str(capture)]) == 0
    out = capsys.readouterr().out
    assert "5 drafts, vocabulary 97, 3 taps of 32, 3 slots, context 24, ring 16" in out
    assert "13 (1 prefill, 12 decode)" in out
    assert "ended             closed" in out


@pytest.mark.parametrize("against", ["local", "remote"])
def test_APC_GAP_CHUNK_TRIM_SLOT_BEGIN_the_recording_replays_equal(
    against: str, capture: Path, worker: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = replay(capsys, capture, worker.endpoint, "--against", against)
    assert code == 0
    assert found["equal"]
    assert found["shadow"]["blocks"] == 22
    assert found["shadow"]["agree_rate_by_position"] == [1.0] * N
    # Behind its prefix-cache hit the request's window is not whole at first.
    assert found["partial_windows"] == 6
    assert found["latency"]["worker_us"]["count"] == 13
    assert 0 <= found["shadow"]["largest_confidence_difference"] < 1e-4


def test_the_report_is_short(capture: Path, worker: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(capture), str(worker.endpoint)]) == 0
    out = capsys.readouterr().out
    assert "22 blocks with the recorded local drafts" in out
    assert "whole blocks    100.00% equal" in out
    assert out.endswith("verdict           equal\n")
    assert len(out.splitlines()) <= 14


def test_a_planted_wrong_draft_is_red(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(folder, worker, tmp_path / "rounds", planted=2)
    code, found = replay(capsys, tmp_path / "rounds", worker.endpoint)
    assert code == 1
    # The wrong token, and what a chain with it in front may say next.
    assert 1 <= found["shadow"]["diverged"] <= 2
    assert found["shadow"]["first_mismatch"]["1"] == 1
    assert not found["equal"]
    assert main(["replay", str(tmp_path / "rounds"), str(worker.endpoint)]) == 1
    assert capsys.readouterr().out.endswith("verdict           DIFFERENT\n")
    # The worker's own recorded drafts are as they were.
    assert replay(capsys, tmp_path / "rounds", worker.endpoint, "--against", "remote")[0] == 0


def test_POS_OFF1_a_row_that_is_moved_by_one_is_red(
    capture: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shift(rounds: list[CapturedRound]) -> list[CapturedRound]:
        rows = np.frombuffer(rounds[1].rows, dtype=np.uint8).reshape(-1, SHAPE.row_bytes)
        rounds[1].rows = memoryview(np.roll(rows, 1, axis=0).tobytes())
        return rounds

    rewritten(capture, tmp_path / "shifted", shift)
    code, found = replay(capsys, tmp_path / "shifted", worker.endpoint)
    assert code == 1
    assert found["shadow"]["diverged"] >= 1


def test_APC_GAP_a_recording_that_begins_in_the_middle_replays_right(
    capture: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(capture, tmp_path / "late", lambda rounds: rounds[2:])
    code, found = replay(capsys, tmp_path / "late", worker.endpoint)
    assert code == 0
    assert found["partial_windows"] > 6
    assert found["shadow"]["blocks"] == 10


def test_APC_GAP_a_round_that_is_missing_costs_comparisons_and_no_verdict(
    capture: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewritten(capture, tmp_path / "gap", lambda rounds: rounds[:4] + rounds[5:])
    code, found = replay(capsys, tmp_path / "gap", worker.endpoint)
    assert code == 0
    assert found["left_out_rounds"] == 1
    assert found["partial_windows"] > 6
    assert main(["capture", "--show", str(tmp_path / "gap")]) == 0
    assert "left out        1 rounds" in capsys.readouterr().out


def test_a_torn_recording_is_played_up_to_its_tear(
    capture: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(capture.read_bytes()[:-200])
    code, found = replay(capsys, torn, worker.endpoint)
    assert code == 0
    assert found["torn_bytes"] > 0
    assert found["rounds"] == 12
    assert main(["capture", "--show", str(torn)]) == 0
    out = capsys.readouterr().out
    assert "torn tail" in out
    assert "still being written, or the engine was killed" in out


def test_a_limit_plays_the_first_rounds_only(capture: Path, worker: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = replay(capsys, capture, worker.endpoint, "--limit", "4")
    assert code == 0
    assert found["rounds"] == 4


def test_another_drafter_is_refused_with_both_identities(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "other", seed=1)
    with serving(folder) as other:
        assert main(["replay", str(capture), str(other.endpoint)]) == 2
        err = capsys.readouterr().err
        with CaptureReader(capture) as reader:
            assert reader.header.identity.hex() in err
        assert identities(folder).identity.hex() in err
        assert "cannot replay the capture" in err


def test_fewer_slots_than_the_engine_had_is_one_sentence(
    folder: Path, capture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(folder, slots=SLOTS - 1) as small:
        assert main(["replay", str(capture), str(small.endpoint)]) == 2
        assert "slots" in capsys.readouterr().err


def test_nobody_listening_and_no_recording_are_one_sentence(
    capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(capture), "tcp://127.0.0.1:1"]) == 2
    assert "the worker is not there" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nothing"), "tcp://127.0.0.1:1"]) == 2
    assert "No such file" in capsys.readouterr().err
    for options, said in ((["--limit", "0"], "--limit 0"), (["--timeout-s", "nan"], "--timeout-s nan")):
        assert main(["replay", str(capture), "tcp://127.0.0.1:1", *options]) == 2
        assert said in capsys.readouterr().err


def test_capacity_has_no_local_drafts_and_is_compared_with_the_recorded_remote_ones(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RecordedEngine(folder, worker.endpoint, tmp_path / "rounds", {"POLICY": "capacity"}) as engine:
        engine.serve()
    assert main(["replay", str(tmp_path / "rounds"), str(worker.endpoint)]) == 2
    assert "has no local drafts to compare with; record in shadow, or try --against remote" in capsys.readouterr().err
    assert replay(capsys, tmp_path / "rounds", worker.endpoint, "--against", "remote")[0] == 0


def test_the_tail_that_nobody_asked_the_worker_for_is_no_difference(
    capture: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(rounds: list[CapturedRound]) -> list[CapturedRound]:
        for one in rounds:
            if one.remote is not None and one.remote_confidences is not None:
                one.remote, one.remote_confidences = one.remote.copy(), one.remote_confidences.copy()
                one.remote[:, 3:], one.remote_confidences[:, 3:] = 0, 0
        return rounds

    rewritten(capture, tmp_path / "cut", cut)
    assert replay(capsys, tmp_path / "cut", worker.endpoint, "--against", "remote")[0] == 0


def test_FAIL_LIFETIME_after_a_lost_connection_windows_come_again_from_the_ring_and_drafts_are_equal(
    capture: Path, worker: Server
) -> None:
    with CaptureReader(capture) as reader, Replay(reader.header, [parse_endpoint(worker.endpoint)]) as playing:
        for captured in reader.rounds():
            if captured.number in (4, 7, 10):
                connection = playing._client.connection()
                assert connection is not None
                playing._client.drop(connection, "told to")
                playing._wait_ready()
            assert playing.play(captured)
        found = verdict_of(playing)
        assert playing.stats.count("resync_rows") > 30
        assert playing.stats.count("hellos") == 4
        assert found.data["shadow"]["blocks"] >= 6
        assert found.is_equal


def test_the_ring_gives_back_the_rows_of_the_newest_positions(capture: Path) -> None:
    with CaptureReader(capture) as reader:
        ring = HostRing(reader.header.shape)
        seen: dict[tuple[int, int], bytes] = {}
        for captured in reader.rounds():
            ring.keep(captured)
            at = 0
            for entry in captured.entries:
                end = int(entry["start_pos"]) + int(entry["valid_rows"])
                n = min(int(entry["valid_rows"]), CONTEXT)
                for position in range(end - n, end):
                    seen[int(entry["slot"]), position] = bytes(captured.rows[at : at + SHAPE.row_bytes])
                    at += SHAPE.row_bytes
                kept = min(n, SHAPE.ring)
                window = bytes(ring.window(int(entry["slot"]), end - kept, kept))
                assert window == b"".join(seen[int(entry["slot"]), p] for p in range(end - kept, end))


@pytest.fixture
def mock_worker(capture: Path) -> Any:
    with CaptureReader(capture) as reader:
        identity = reader.header.identity
    info = mock_info(
        num_drafts=N, vocab_size=VOCAB, hidden_size=HIDDEN, taps=TAPS, slots=SLOTS, context=CONTEXT, identity=identity
    )

    def start(fault: str) -> MockWorker:
        return MockWorker(info, parse_endpoint("tcp://127.0.0.1:0"), fault=Fault.parse(fault, VOCAB))

    return start


def test_a_worker_that_fails_every_round_ends_it_with_the_reason(
    capture: Path, mock_worker: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock_worker("id:V+1") as spoiling:
        code, found = replay(capsys, capture, spoiling.endpoint)
        assert code == 1
        assert found["failed_rounds"] == 3
        assert "3 rounds in a row failed: draft id 98" in found["stopped"]
    with mock_worker("silence") as silent:
        code, found = replay(capsys, capture, silent.endpoint, "--timeout-s", "0.2")
        assert code == 1
        assert not found["equal"]


def test_an_engine_and_a_replay_prove_the_token_to_a_worker_that_demands_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    capture = tmp_path / "rounds"
    with serving(folder, token=b"0123456789abcdef") as worker:
        record(folder, worker, capture, TOKEN_FILE=str(token))
        code, found = replay(capsys, capture, worker.endpoint, "--limit", "3", "--token-file", str(token))
        assert (code, found["rounds"]) == (0, 3)
        assert main(["replay", str(capture), worker.endpoint]) == 2
        assert "set --token-file to a file with the worker's token" in capsys.readouterr().err


# A shell's background job, as these tests may be, ignores SIGINT, and so would its children.
INTERRUPTIBLE = """import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from farspark.cli.main import main
sys.exit(main())"""


def test_Ctrl_C_ends_it_cleanly(capture: Path, mock_worker: Any) -> None:
    with mock_worker("delay:5000") as slow:
        process = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTIBLE, "replay", str(capture), str(slow.endpoint)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            while not slow.faults:
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.endswith("farspark: interrupted\n")


# The engine's side of it.


def test_the_engine_says_in_its_statistics_what_was_recorded(folder: Path, worker: Server, tmp_path: Path) -> None:
    record(folder, worker, tmp_path / "rounds")
    stats = json.loads((tmp_path / "rounds.stats.json").read_text())
    size = (tmp_path / "rounds").stat().st_size
    assert stats["capture"] == {
        "file": str(tmp_path / "rounds"),
        "state": "closed",
        "rounds": 13,
        "bytes": size,
        "dropped": 0,
    }


def test_an_engine_whose_capture_cannot_be_written_serves_on(
    folder: Path, worker: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rounds").write_text("there already")
    record(folder, worker, tmp_path / "rounds")
    stats = json.loads((tmp_path / "rounds.stats.json").read_text())
    assert stats["counters"]["capture_stopped"] == 1
    assert "File exists" in stats["capture"]["state"]
    assert stats["counters"]["rounds_ok"] == 13
    assert stats["shadow"]["full_block_agree_rate"] == 1.0


def test_without_the_setting_nothing_is_recorded(folder: Path, worker: Server, tmp_path: Path) -> None:
    record(folder, worker, tmp_path / "rounds", CAPTURE="")
    assert "capture" not in json.loads((tmp_path / "rounds.stats.json").read_text())
    assert not (tmp_path / "rounds").exists()


# `farspark capture` as a launcher.


@pytest.fixture
def launch_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("VLLM_DSPARK_REMOTE")]:
        monkeypatch.delenv(name)
    file = tmp_path / "C-shadow.env"
    file.write_text(f"VLLM_DSPARK_REMOTE=tcp://10.0.0.2:18620\nVLLM_DSPARK_REMOTE_IDENTITY={'ab' * 32}\n")
    return file


def test_capture_becomes_the_command_with_both_settings(launch_config: Path, tmp_path: Path) -> None:
    env = shutil.which("env")
    assert env
    done = subprocess.run(
        [*(sys.executable, "-m", "farspark", "capture"), "--out", "here", "--mib", "7", str(launch_config), "--", env],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    assert f"VLLM_DSPARK_REMOTE_CAPTURE={tmp_path / 'here'}" in lines
    assert "VLLM_DSPARK_REMOTE_CAPTURE_MIB=7" in lines
    assert any(line.startswith("policy      shadow") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "farspark capture --out FILE CONFIG.env"),
        (["--out", "new"], "farspark capture --out FILE CONFIG.env"),
        (["{config}", "--", "true"], "farspark capture --out FILE CONFIG.env"),
        (["--out", "{config}", "{config}", "--", "true"], "exists already"),
        (["--out", "new", "--mib", "0", "{config}", "--", "true"], "--mib 0"),
        (["--out", "no/where/new", "{config}", "--", "true"], "the folder"),
        (["--show", "new", "--out", "new"], "--show FILE starts nothing"),
        (["--out", "new", "--json", "{config}", "--", "true"], "--json goes with --show"),
        (["--show", "{config}"], "it does not begin as a capture does"),
        (["--out", "new", "{inert}", "--", "true"], "VLLM_DSPARK_REMOTE is not set"),
    ],
)
def test_what_a_person_must_put_right_is_one_sentence(
    arguments: list[str], said: str, launch_config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inert = tmp_path / "A-local.env"
    inert.write_text("VLLM_USE_V2_MODEL_RUNNER=1\n")
    filled = [one.format(config=launch_config, inert=inert) for one in arguments]
    assert main(["capture", *filled]) == 2
    assert said in capsys.readouterr().err
