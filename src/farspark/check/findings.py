"""What a check found: one line per criterion."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


class Verdict(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    SKIP = "SKIP"  # could not be measured here; `measured` says why
    NOTE = "NOTE"  # a measured value that has no bound


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    verdict: Verdict
    measured: str
    bound: str = ""  # what passes

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict.value}


def judged(what: str, holds: bool, measured: str, bound: str) -> Finding:
    return Finding(what, Verdict.PASS if holds else Verdict.FAIL, measured, bound)


def skipped(what: str, why: str, bound: str = "") -> Finding:
    return Finding(what, Verdict.SKIP, why, bound)


def noted(what: str, measured: str) -> Finding:
    return Finding(what, Verdict.NOTE, measured)


def exit_code(findings: Sequence[Finding]) -> int:
    """0: something passed and nothing failed; 1: something failed; 2: nothing could be judged."""
    verdicts = {finding.verdict for finding in findings}
    if Verdict.FAIL in verdicts:
        return 1
    return 0 if Verdict.PASS in verdicts else 2
