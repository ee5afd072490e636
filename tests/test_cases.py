"""Faults that remote drafters are known for: each has an id, and at least one test that carries it in its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = """
    APC-GAP RING-VALID LAYOUT-1N PAD-SLOT0 LATE-REPLY NEG1-EMBED ID-RANGE TP-AGREE FAIL-LIFETIME QROWS MAXLEN-EDGE MAXLEN-BATCH
    K0-STATE HELLO-LIMITS CHUNK-TRIM SLOT-BEGIN POS-OFF1 BACKUP-TOK GATES APC-LOSS AUX-INDEX AUX-LAST HEAD-SILENT HEAD-FLAGS
    CONF-MATH ROPE-CFG MASK-ID SHARED-W WRONG-FAMILY K-VS-BLOCK DYN-K JIT-COLD WARMUP-RPC CTX-LIMIT RING-REWIND ABORT-RACE
    FRAMING SLOW-PEER HALF-OPEN ADDR GB10-MEM METRICS PLUGIN-LOAD D2T LAZY-LOAD FLAG-GIL CAPTURE-WAIT
    PINNED-REUSE UCX-LANE SEND-GC
"""


def names_of_tests() -> list[str]:
    """Of functions and methods, in lower case, those of contracts that several test classes share included."""
    found = []
    for folder in (ROOT / "tests", ROOT / "packages"):
        for path in sorted(folder.rglob("*.py")):
            found += re.findall(r"^\s*def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return [name.lower() for name in found]


def carrying(case: str, names: list[str]) -> list[str]:
    """Those of `names` with the id in them, as whole words."""
    word = case.lower().replace("-", "_")
    return [name for name in names if f"_{word}_" in f"{name}_"]


@pytest.fixture(scope="module")
def names() -> list[str]:
    return names_of_tests()


@pytest.mark.parametrize("case", CASES.split())
def test_every_case_has_a_test(case: str, names: list[str]) -> None:
    assert carrying(case, names), f"no test carries the id {case} in its name"


def test_an_id_is_a_whole_word() -> None:
    assert carrying("APC-GAP", ["test_apc_gap_is_seen", "test_no_apc_gaps", "test_apc_gap"]) == [
        "test_apc_gap_is_seen",
        "test_apc_gap",
    ]
