"""The fixed schedule: one broadcast a step, always, of one shape, whatever there is to say.

A message is int64 words: the sampled tokens, their counts, the drafts, and the header last, so that a message that is too short
is without it. The rows of a step stand at the beginning of their part, packed; what is behind them means nothing.

Pure: no torch, no sockets.
"""

from __future__ import annotations

from dataclasses import dataclass

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import WORDS

SENTINEL = -1  # what a step does not have


@dataclass(frozen=True, slots=True)
class FrameShape:
    """A shape that no step changes. A broadcast that is larger than its receiver expects aborts the receiver's process under
    Gloo, and a smaller one is taken without a word; so every message has room for `max_reqs` rows."""

    max_reqs: int
    num_drafts: int

    @property
    def counts_at(self) -> int:
        """The word behind the tokens, where the counts begin: int32, all numbers sampled and then all numbers rejected."""
        return self.max_reqs * (self.num_drafts + 1)

    @property
    def drafts_at(self) -> int:
        return self.counts_at + self.max_reqs

    @property
    def header_at(self) -> int:
        return self.drafts_at + self.max_reqs * self.num_drafts

    @property
    def words(self) -> int:
        return self.header_at + WORDS

    def check_tokens(self, shape: tuple[int, ...]) -> None:
        """Whether sampled tokens of `shape` [n, w] fit. Raises TokenTransportError."""
        if shape[0] > self.max_reqs or shape[1] > self.num_drafts + 1:
            self._refuse("tokens", shape, self.num_drafts + 1)

    def check_drafts(self, shape: tuple[int, ...]) -> None:
        """Whether drafts of `shape` [n, N] fit, which have one width. Raises TokenTransportError."""
        if shape[0] > self.max_reqs or shape[1] != self.num_drafts:
            self._refuse("drafts", shape, self.num_drafts)

    def _refuse(self, name: str, shape: tuple[int, ...], width: int) -> None:
        raise TokenTransportError(
            f"{name} of shape {list(shape)} do not fit into the fixed {[self.max_reqs, width]}: a stage "
            "runs with another --max-num-seqs or another number of drafts"
        )


class Order:
    """Which step is next, on either side. The sequence moves before anything of the step is posted."""

    def __init__(self) -> None:
        self.sequence = 0
        self._is_open = False

    def begin(self) -> int:
        """The new step's sequence. Raises TokenTransportError where the step before it was not posted."""
        if self._is_open:
            raise TokenTransportError(f"a step begins while step {self.sequence} was not posted")
        self._is_open = True
        self.sequence += 1
        return self.sequence

    def post(self) -> None:
        """Raises TokenTransportError where no step has begun."""
        if not self._is_open:
            raise TokenTransportError(f"step {self.sequence} would be posted twice")
        self._is_open = False
