from __future__ import annotations

import json
from pathlib import Path

import pytest

from farspark.engine.stats_file import StatsFile


def test_the_file_is_replaced_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = StatsFile(tmp_path / "stats.json")
    file.write({"a": 1})
    file.write({"a": 2})
    assert json.loads(file.path.read_text(encoding="utf-8")) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


def test_a_place_that_cannot_be_written_is_said_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StatsFile(tmp_path / "absent" / "stats.json")
    file.write({"a": 1})
    file.write({"a": 1})
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
