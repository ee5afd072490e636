from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from farspark.engine import stats_file
from farspark.engine.stats_file import StatsFile


def read(file: StatsFile) -> Any:
    return json.loads(file.path.read_text(encoding="utf-8"))


def until_taken(file: StatsFile) -> None:
    """The writer has what waited, and its disk does not answer."""
    while file._waiting is not None:
        time.sleep(0.001)


def test_the_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = StatsFile(tmp_path / "stats.json")
    file.close({"a": 1})
    file.close({"a": 2})
    assert read(file) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


def test_a_place_that_cannot_be_written_is_said_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StatsFile(tmp_path / "absent" / "stats.json")
    file.close({"a": 1})
    file.close({"a": 1})
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_a_slow_disk_holds_nobody_up_and_the_newest_snapshot_is_what_is_written_next(tmp_path: Path) -> None:
    file = StatsFile(tmp_path / "stats.json")
    os.mkfifo(tmp_path / f".stats.json.{os.getpid()}")  # whoever opens it waits for a reader
    live = {"a": 1}
    file.write_soon(live)
    until_taken(file)
    began = time.monotonic()
    for value in range(2, 100):
        live["a"] = value
        file.write_soon(live)
    live["a"] = 100  # too late: what was handed over is its own
    assert time.monotonic() - began < 5
    with open(tmp_path / f".stats.json.{os.getpid()}", encoding="utf-8") as reader:
        assert json.loads(reader.read()) == {"a": 1}
    until = time.monotonic() + 30
    while not file.path.is_file() or read(file) != {"a": 99}:
        assert time.monotonic() < until
        time.sleep(0.01)
    file.close({"a": 200})
    assert read(file) == {"a": 200}
    assert not any(thread.name == "farspark-stats" for thread in threading.enumerate())


def test_HALF_OPEN_a_disk_that_hangs_does_not_keep_the_engine_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stats_file, "_LAST_WRITE_S", 0.1)
    file = StatsFile(tmp_path / "stats.json")
    fifo = tmp_path / f".stats.json.{os.getpid()}"
    os.mkfifo(fifo)
    file.write_soon({"a": 1})
    until_taken(file)
    file.close({"a": 2})
    assert "the disk does not answer" in caplog.text
    fifo.read_text(encoding="utf-8")  # let the thread go
    assert file._writer is not None
    file._writer.join(10)
    assert not file._writer.is_alive()
