"""Tests run in parallel in two lanes; real engines keep to theirs."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ENGINES

ROOT = Path(__file__).parent.parent
MARK = "mark." + "vllm"  # not found in this file


def test_every_test_of_a_real_engine_is_in_the_engines_lane() -> None:
    files = [path for folder in ("tests", "packages") for path in sorted((ROOT / folder).rglob("test_*.py"))]
    engines = [str(path.relative_to(ROOT)) for path in files if MARK in path.read_text()]
    assert len(engines) > 10
    assert [path for path in engines if not path.startswith(ENGINES)] == []
    assert all((ROOT / place).exists() for place in ENGINES)
