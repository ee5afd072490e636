"""Comparing the local drafts with the remote ones, block by block.

Judged by the teacher-forced rule: up to and including the first position that differs both chains saw the same tokens,
so the worker's margin (top-1 minus top-2 logit) at that position says whether the difference is a near tie; what comes
after it follows from another token and is not judged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# Two bf16 steps of logits between 16 and 32 in size (2^(4-7) each): differences below it are rounding, not disagreement.
TIE_MARGIN: Final = 0.25
_EXAMPLES: Final = 16


class ShadowComparison:
    """Owned by the engine thread. N is `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._blocks = 0
        self._agree = np.zeros(num_drafts, dtype=np.int64)  # by position, free-running
        self._first_mismatch: Counter[int] = Counter()  # N: the whole block agrees
        self._ties = 0
        self._diverged = 0
        self._unjudged = 0
        self._largest_margin = 0.0
        self._largest_confidence_difference: float | None = None
        self._examples: list[dict[str, Any]] = []

    def observe(
        self,
        local: npt.NDArray[np.integer[Any]],  # [n, N]
        remote: npt.NDArray[np.integer[Any]],  # [n, N]
        *,
        margins: npt.NDArray[np.float32] | None = None,  # [n, N], the worker's
        local_confidences: npt.NDArray[np.float32] | None = None,  # [n, N]
        remote_confidences: npt.NDArray[np.float32] | None = None,  # [n, N]
    ) -> None:
        """Take note of `n` blocks that both drafters drafted from the same rows."""
        equal = local == remote
        self._blocks += len(equal)
        self._agree += equal.sum(axis=0)
        for row in range(len(equal)):
            differing = np.flatnonzero(~equal[row])
            first = int(differing[0]) if len(differing) else self._num_drafts
            self._first_mismatch[first] += 1
            if first < self._num_drafts:
                self._judge(first, local[row], remote[row], None if margins is None else margins[row])
        if local_confidences is not None and remote_confidences is not None and len(equal):
            # Past the first mismatch the confidences describe different tokens.
            same_prefix = np.cumprod(np.hstack([np.ones((len(equal), 1), bool), equal[:, :-1]]), axis=1).astype(bool)
            differences = np.abs(local_confidences - remote_confidences)[same_prefix]
            if differences.size:
                largest = float(differences.max())
                self._largest_confidence_difference = max(self._largest_confidence_difference or 0.0, largest)

    def _judge(
        self,
        first: int,
        local: npt.NDArray[np.integer[Any]],
        remote: npt.NDArray[np.integer[Any]],
        margins: npt.NDArray[np.float32] | None,
    ) -> None:
        margin = None if margins is None else float(margins[first])
        if margin is None:
            self._unjudged += 1
        elif margin <= TIE_MARGIN:
            self._ties += 1
        else:
            self._diverged += 1
        self._largest_margin = max(self._largest_margin, margin or 0.0)
        if len(self._examples) < _EXAMPLES:
            self._examples.append(
                {
                    "first_mismatch": first,
                    "local": [int(token) for token in local],
                    "remote": [int(token) for token in remote],
                    "margins": None if margins is None else [round(float(one), 4) for one in margins],
                }
            )

    def snapshot(self) -> dict[str, Any]:
        blocks = self._blocks
        return {
            "blocks": blocks,
            "agree_rate_by_position": [round(int(count) / blocks, 5) if blocks else None for count in self._agree],
            "first_mismatch": {str(k): self._first_mismatch[k] for k in range(self._num_drafts + 1)},
            "full_block_agree_rate": round(self._first_mismatch[self._num_drafts] / blocks, 5) if blocks else None,
            "ties": self._ties,
            "diverged": self._diverged,
            "unjudged": self._unjudged,
            "largest_mismatch_margin": round(self._largest_margin, 4),
            "largest_confidence_difference": self._largest_confidence_difference,
            "examples": list(self._examples),
        }
