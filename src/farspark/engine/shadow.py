"""Comparing the local drafts with the remote ones, block by block.

Two drafters that compute the same in another order may choose differently where two tokens are nearly equal, and from there
on their chains have nothing in common. So a block that differs is judged by teacher forcing: the worker says what it thinks of
each local token with the local chain's own tokens in front of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from farspark.wire.messages import Judgement

# A tie: the local token's logit is within so many bf16 steps (of the greatest logit's size) of the greatest.
TIE_ULPS: Final = 2
# No rounding explains more.
FAR_ULPS: Final = 8
# What parity asks for: so many steps equal or ties, none far off, confidences this near.
LEAST_AGREEMENT: Final = 0.995
CONFIDENCE_BOUND: Final = 0.01
_EXAMPLES: Final = 16
_BUCKETS: Final = (0, 1, 2, 4, 8)


class JudgedChains(NamedTuple):
    """What the worker's drafter thinks of C local chains, teacher-forced; [C, N] each."""

    best: npt.NDArray[np.int32]  # its own choice
    gaps: npt.NDArray[np.float32]  # max L - L[the local token]
    peaks: npt.NDArray[np.float32]  # max |L|
    confidences: npt.NDArray[np.float32]

    @classmethod
    def of(cls, judgement: Judgement) -> JudgedChains:
        def plane(array: memoryview, dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.frombuffer(array, dtype=dtype).reshape(-1, judgement.num_drafts)

        return cls(
            plane(judgement.best, np.int32),
            plane(judgement.gaps, np.float32),
            plane(judgement.peaks, np.float32),
            plane(judgement.confidences, np.float32),
        )


def gaps_in_ulps(judged: JudgedChains) -> npt.NDArray[np.float64]:
    """[C, N]: each gap in steps of bf16 at the size of the greatest logit, `2 ** (floor(log2 max(1, |L|)) - 7)`."""
    size = np.floor(np.log2(np.maximum(1.0, judged.peaks.astype(np.float64))))
    ulps: npt.NDArray[np.float64] = judged.gaps / np.exp2(size - 7)
    return ulps


class ShadowComparison:
    """Owned by the engine thread. N is `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._blocks = 0
        self._agree = np.zeros(num_drafts, dtype=np.int64)  # by position, free-running
        self._first_mismatch: Counter[int] = Counter()  # N: the whole block agrees
        self._equal = self._ties = self._diverged = self._far = 0  # steps, teacher-forced
        self._unjudged = 0  # blocks
        self._gap_ulps: Counter[str] = Counter()  # of the steps that are not equal
        self._largest_gap_ulps = 0.0
        self._largest_confidence_difference: float | None = None
        self._examples: list[dict[str, Any]] = []

    def differing(
        self, local: npt.NDArray[np.integer[Any]], remote: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.intp]:
        """Of blocks [n, N], those that differ."""
        return np.flatnonzero((local != remote).any(axis=1))

    def observe(
        self,
        local: npt.NDArray[np.integer[Any]],  # [n, N]
        remote: npt.NDArray[np.integer[Any]],  # [n, N]
        *,
        judge: Callable[[npt.NDArray[np.intp]], JudgedChains | None]
        | None = None,  # asked of the blocks that differ, if any
        margins: npt.NDArray[np.float32] | None = None,  # [n, N], the worker's, for the examples
        local_confidences: npt.NDArray[np.float32] | None = None,  # [n, N]
        remote_confidences: npt.NDArray[np.float32] | None = None,  # [n, N]
    ) -> None:
        """Take note of `n` blocks that both drafters drafted from the same rows."""
        equal = local == remote
        different = self.differing(local, remote)
        self._blocks += len(equal)
        self._agree += equal.sum(axis=0)
        self._first_mismatch[self._num_drafts] += len(equal) - len(different)
        # Where both chains are one, each is the other's teacher.
        self._equal += (len(equal) - len(different)) * self._num_drafts
        judged = judge(different) if judge is not None and len(different) else None
        ulps = None if judged is None else self._judge(local[different], judged)
        if judged is None:
            self._unjudged += len(different)
        for index, row in enumerate(different):
            first = int(np.argmin(equal[row]))
            self._first_mismatch[first] += 1
            if len(self._examples) < _EXAMPLES:
                self._examples.append(
                    {
                        "first_mismatch": first,
                        "local": local[row].tolist(),
                        "remote": remote[row].tolist(),
                        "margins": None if margins is None else _rounded(margins[row]),
                        "gap_ulps": None if ulps is None else _rounded(ulps[index]),
                    }
                )
        if local_confidences is not None and remote_confidences is not None:
            theirs, comparable = remote_confidences, equal.all(axis=1)
            if judged is not None:
                theirs = theirs.copy()
                theirs[different] = judged.confidences
                comparable = np.ones(len(equal), dtype=bool)
            # NaN is near nothing: the greatest difference there is.
            differences = np.nan_to_num(np.abs(local_confidences - theirs)[comparable], nan=1.0)
            if differences.size:
                self._largest_confidence_difference = max(
                    self._largest_confidence_difference or 0.0, float(differences.max())
                )

    def _judge(self, local: npt.NDArray[np.integer[Any]], judged: JudgedChains) -> npt.NDArray[np.float64]:
        """Count the steps of these blocks [C, N]; their gaps in bf16 steps."""
        ulps = gaps_in_ulps(judged)
        is_equal = (judged.gaps == 0) & (judged.best == local)
        self._equal += int(is_equal.sum())
        others = ulps[~is_equal]
        self._ties += int((others <= TIE_ULPS).sum())
        self._diverged += int((others > TIE_ULPS).sum())
        self._far += int((others > FAR_ULPS).sum())
        for one in others.tolist():
            self._gap_ulps[next((f"<={bound}" for bound in _BUCKETS if one <= bound), f">{_BUCKETS[-1]}")] += 1
        self._largest_gap_ulps = max(self._largest_gap_ulps, float(others.max(initial=0.0)))
        return ulps

    def snapshot(self) -> dict[str, Any]:
        blocks, steps = self._blocks, self._equal + self._ties + self._diverged
        agreement = (self._equal + self._ties) / steps if steps else None
        return {
            "blocks": blocks,
            "agree_rate_by_position": [round(int(count) / blocks, 5) if blocks else None for count in self._agree],
            "first_mismatch": {str(k): self._first_mismatch[k] for k in range(self._num_drafts + 1)},
            "full_block_agree_rate": round(self._first_mismatch[self._num_drafts] / blocks, 5) if blocks else None,
            "steps": steps,
            "equal": self._equal,
            "ties": self._ties,
            "diverged": self._diverged,
            "far_diverged": self._far,
            "unjudged": self._unjudged,
            "equal_or_tie_rate": None if agreement is None else round(agreement, 5),
            "gap_ulps": dict(sorted(self._gap_ulps.items())),
            "largest_gap_ulps": round(self._largest_gap_ulps, 3),
            "largest_confidence_difference": self._largest_confidence_difference,
            "passes": None if agreement is None else self._passes(agreement),
            # What passes, beside no step far off and no block unjudged: whoever judges these numbers has no rule of their own.
            "bounds": {"equal_or_tie_rate": LEAST_AGREEMENT, "confidence_difference": CONFIDENCE_BOUND},
            "examples": list(self._examples),
        }

    def _passes(self, agreement: float) -> bool:
        return (
            agreement >= LEAST_AGREEMENT
            and self._far == 0
            and self._unjudged == 0
            and (self._largest_confidence_difference or 0.0) <= CONFIDENCE_BOUND
        )


def _rounded(values: npt.NDArray[np.floating[Any]]) -> list[float]:
    return [round(float(one), 4) for one in values]
