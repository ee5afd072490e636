"""Comparing the local drafts with the remote ones, block by block.

Two drafters that compute the same in another order may choose differently where two tokens are nearly equal, and from there
on their chains have nothing in common. So a block that differs is judged by teacher forcing: the worker says what it thinks of
each local token with the local chain's own tokens in front of it.

A router that is at a near tie may pick another expert in another order of sums, and then nothing of the block need be alike,
chosen tokens or not. So of a drafter with a router every block is judged, and those that were near such a tie are kept out.
Where that leaves few, how many drafts of either the target accepts speaks for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from farspark.engine.accepted_lengths import AcceptedLengths
from farspark.wire.messages import Judgement

# A tie: the local token's logit is within so many bf16 steps (of the greatest logit's size) of the greatest.
TIE_ULPS: Final = 2
# Of a drafter with a router: the engine keeps the context of these in fp8, and multiplies in it.
ROUTED_TIE_ULPS: Final = 4
# No rounding explains more.
FAR_ULPS: Final = 8
# What parity asks for: so many steps equal or ties, none far off, confidences this near.
LEAST_AGREEMENT: Final = 0.995
CONFIDENCE_BOUND: Final = 0.01
# Of a drafter with a router: experts that are the same still see inputs that differ by their rounding.
ROUTED_CONFIDENCE_BOUND: Final = 0.03
# A block whose smallest routing margin is below this may be of other experts on the other side.
ROUTING_BOUND: Final = 2.0**-7
_EXAMPLES: Final = 16
_BUCKETS: Final = (0, 1, 2, 4, 8)
_ROUTING_EXPONENTS: Final = range(-13, -2)  # of the bounds of a histogram


class JudgedChains(NamedTuple):
    """What the worker's drafter thinks of C local chains, teacher-forced; [C, N] each but the last."""

    best: npt.NDArray[np.int32]  # its own choice
    gaps: npt.NDArray[np.float32]  # max L - L[the local token]
    peaks: npt.NDArray[np.float32]  # max |L|
    confidences: npt.NDArray[np.float32]
    # [C], the smallest routing margin of the worker's draft; None: no router
    routing: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, judgement: Judgement) -> JudgedChains:
        def plane(array: memoryview, dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.frombuffer(array, dtype=dtype).reshape(-1, judgement.num_drafts)

        return cls(
            plane(judgement.best, np.int32),
            plane(judgement.gaps, np.float32),
            plane(judgement.peaks, np.float32),
            plane(judgement.confidences, np.float32),
            None if judgement.routing is None else np.frombuffer(judgement.routing, dtype=np.float32),
        )

    def of_chains(self, which: npt.NDArray[np.intp]) -> JudgedChains:
        routing = None if self.routing is None else self.routing[which]
        return JudgedChains(self.best[which], self.gaps[which], self.peaks[which], self.confidences[which], routing)


def gaps_in_ulps(judged: JudgedChains) -> npt.NDArray[np.float64]:
    """[C, N]: each gap in steps of bf16 at the size of the greatest logit, `2 ** (floor(log2 max(1, |L|)) - 7)`."""
    size = np.floor(np.log2(np.maximum(1.0, judged.peaks.astype(np.float64))))
    ulps: npt.NDArray[np.float64] = judged.gaps / np.exp2(size - 7)
    return ulps


class ShadowComparison:
    """Owned by the engine thread. N is `num_drafts`."""

    def __init__(self, num_drafts: int) -> None:
        self.accepted: Final = AcceptedLengths(num_drafts)
        self._num_drafts = num_drafts
        self._blocks = 0
        self._agree = np.zeros(num_drafts, dtype=np.int64)  # by position, free-running
        self._first_mismatch: Counter[int] = Counter()  # N: the whole block agrees
        self._equal = self._ties = self._diverged = self._far = 0  # steps, teacher-forced
        self._unjudged = 0  # blocks
        self._has_router: bool | None = None  # not known: the worker does not say
        self._ambiguous = 0  # blocks, by their routing
        # Blocks, by the exponent of the bound that their margin is below; None: above all.
        self._routing_margins: Counter[int | None] = Counter()
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
        | None = None,  # asked of the blocks that differ, of all where there is a router, if any
        has_router: bool | None = None,  # of the worker's drafter; None: the worker does not say
        margins: npt.NDArray[np.float32] | None = None,  # [n, N], the worker's, for the examples
        local_confidences: npt.NDArray[np.float32] | None = None,  # [n, N]
        remote_confidences: npt.NDArray[np.float32] | None = None,  # [n, N]
    ) -> None:
        """Take note of `n` blocks that both drafters drafted from the same rows."""
        equal = local == remote
        is_equal, different = equal.all(axis=1), self.differing(local, remote)
        self._blocks += len(equal)
        self._agree += equal.sum(axis=0)
        firsts = np.where(is_equal, self._num_drafts, np.argmin(equal, axis=1))
        self._first_mismatch.update(firsts.tolist())
        self._has_router = self._has_router if has_router is None else has_router
        asked = np.arange(len(equal)) if has_router else different
        judged = judge(asked) if judge is not None and len(asked) else None
        # Blocks that count: their verdict is known, and no choice of experts in them could fall otherwise.
        counts = np.ones(len(equal), dtype=bool)
        if judged is None:
            self._unjudged += len(asked)
            counts[asked] = False
        elif judged.routing is not None:
            counts[asked] = judged.routing >= ROUTING_BOUND
            self._note_routing(judged.routing)
        # Where both chains are one, each is the other's teacher.
        self._equal += int((is_equal & counts).sum()) * self._num_drafts
        # Those that differ and are examples: those that count, and where nobody judged them all.
        rows, ulps = different, None
        if judged is not None:
            found = judged.of_chains(np.flatnonzero(~is_equal[asked] & counts[asked]))
            rows = different[counts[different]]
            ulps = self._judge(local[rows], found)
            if remote_confidences is not None:
                remote_confidences = remote_confidences.copy()
                remote_confidences[rows] = found.confidences
        for index, row in enumerate(rows[: max(0, _EXAMPLES - len(self._examples))]):
            self._examples.append(
                {
                    "first_mismatch": int(firsts[row]),
                    "local": local[row].tolist(),
                    "remote": remote[row].tolist(),
                    "margins": None if margins is None else _rounded(margins[row]),
                    "gap_ulps": None if ulps is None else _rounded(ulps[index]),
                }
            )
        if local_confidences is not None and remote_confidences is not None:
            self._compare_confidences(local_confidences[counts], remote_confidences[counts])

    def _compare_confidences(self, local: npt.NDArray[np.float32], remote: npt.NDArray[np.float32]) -> None:
        # NaN is near nothing: the greatest difference there is.
        differences = np.nan_to_num(np.abs(local - remote), nan=1.0)
        if differences.size:
            self._largest_confidence_difference = max(
                self._largest_confidence_difference or 0.0, float(differences.max())
            )

    def _note_routing(self, margins: npt.NDArray[np.float32]) -> None:
        self._ambiguous += int((margins < ROUTING_BOUND).sum())
        for one in margins.tolist():
            self._routing_margins[next((e for e in _ROUTING_EXPONENTS if one < 2.0**e), None)] += 1

    def _judge(self, local: npt.NDArray[np.integer[Any]], judged: JudgedChains) -> npt.NDArray[np.float64]:
        """Count the steps of these blocks [C, N]; their gaps in bf16 steps."""
        ulps = gaps_in_ulps(judged)
        is_equal = (judged.gaps == 0) & (judged.best == local)
        self._equal += int(is_equal.sum())
        others = ulps[~is_equal]
        tie = ROUTED_TIE_ULPS if self._has_router else TIE_ULPS
        self._ties += int((others <= tie).sum())
        self._diverged += int((others > tie).sum())
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
            "has_router": self._has_router,
            "routing_ambiguous": self._ambiguous,
            "routing_margins": self._routing_histogram(),
            "equal_or_tie_rate": None if agreement is None else round(agreement, 5),
            "gap_ulps": dict(sorted(self._gap_ulps.items())),
            "largest_gap_ulps": round(self._largest_gap_ulps, 3),
            "largest_confidence_difference": self._largest_confidence_difference,
            "accepted_lengths": self.accepted.snapshot(),
            "passes": self._passes(agreement),
            # What passes, beside no step far off and no block unjudged: whoever judges these numbers has no rule of their own.
            "bounds": {
                "equal_or_tie_rate": LEAST_AGREEMENT,
                "confidence_difference": self._confidence_bound,
                **({"routing_margin": ROUTING_BOUND} if self._has_router else {}),
            },
            "examples": list(self._examples),
        }

    def _passes(self, agreement: float | None) -> bool | None:
        """None: nothing is left to judge by."""
        # Without a router the steps say all.
        lengths = self.accepted.passes if self._has_router else None
        if agreement is None:
            return None if lengths and self._unjudged else lengths
        return (
            agreement >= LEAST_AGREEMENT
            and self._far == 0
            and self._unjudged == 0
            and (self._largest_confidence_difference or 0.0) <= self._confidence_bound
            and lengths is not False
        )

    @property
    def _confidence_bound(self) -> float:
        return ROUTED_CONFIDENCE_BOUND if self._has_router else CONFIDENCE_BOUND

    def _routing_histogram(self) -> dict[str, int]:
        """Blocks by their smallest routing margin; empty without a router."""
        margins = self._routing_margins
        found = {f"<2^{exponent}": margins[exponent] for exponent in _ROUTING_EXPONENTS if margins[exponent]}
        return found | ({f">=2^{_ROUTING_EXPONENTS[-1]}": margins[None]} if margins[None] else {})


def _rounded(values: npt.NDArray[np.floating[Any]]) -> list[float]:
    return [round(float(one), 4) for one in values]
