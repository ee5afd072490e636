"""The packed result of a round: one int32 buffer, the same on every rank, broadcast in one piece.

`[outcome, n, ok[M], depth[M], tokens[M * N], confidence bits[M * N]]`, M = slots, N = drafts; where drafts are sampled also
`[sampled[M], support ids[M * N * S], q bits[M * N * S]]`, S = ids per draft. A row that is not ok holds token 0 with confidence
0: a legal id, because whatever stands here reaches an embedding.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class RoundOutcome(enum.IntEnum):
    """Decided on rank 0, obeyed on every rank."""

    FAILED = 0  # drafts were needed and none came
    SOME_FAILED = 1
    OK = 2  # every request that needed drafts got them
    NOTHING = 3  # no request needed a draft


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Where things stand in the buffer, as slices of int32 elements."""

    max_requests: int  # M
    num_drafts: int  # N
    support: int = 0  # S; 0: drafts are not sampled

    @property
    def ok(self) -> slice:
        return slice(2, 2 + self.max_requests)

    @property
    def depths(self) -> slice:
        return slice(self.ok.stop, self.ok.stop + self.max_requests)

    @property
    def tokens(self) -> slice:
        start = self.depths.stop
        return slice(start, start + self.max_requests * self.num_drafts)

    @property
    def confidences(self) -> slice:
        start = self.tokens.stop
        return slice(start, start + self.max_requests * self.num_drafts)

    @property
    def sampled(self) -> slice:
        start = self.confidences.stop
        return slice(start, start + (self.max_requests if self.support else 0))

    @property
    def support_ids(self) -> slice:
        start = self.sampled.stop
        return slice(start, start + self.max_requests * self.num_drafts * self.support)

    @property
    def q(self) -> slice:
        start = self.support_ids.stop
        return slice(start, start + self.max_requests * self.num_drafts * self.support)

    @property
    def size(self) -> int:
        return int(self.q.stop)


class PackedResult:
    """A view of such a buffer; `buffer` is int32 `[layout.size]` and stays the caller's."""

    def __init__(self, layout: ResultLayout, buffer: npt.NDArray[np.int32]) -> None:
        if buffer.dtype != np.int32 or buffer.shape != (layout.size,):
            raise ValueError(f"buffer of {buffer.dtype} {buffer.shape}, expected int32 ({layout.size},)")
        shape = (layout.max_requests, layout.num_drafts)
        self.buffer = buffer
        self.ok = buffer[layout.ok]  # [M], 0 or 1
        self.depths = buffer[layout.depths]  # [M], how many of the drafts to verify
        self.tokens = buffer[layout.tokens].reshape(shape)  # [M, N]
        self.confidences = buffer[layout.confidences].view(np.float32).reshape(shape)  # [M, N]
        # The next three are empty where drafts are not sampled.
        self.sampled = buffer[layout.sampled]  # [M], 1: the drafts were drawn from q
        self.support_ids = buffer[layout.support_ids].reshape(*shape, layout.support)  # [M, N, S]
        self.q = buffer[layout.q].view(np.float32).reshape(*shape, layout.support)  # [M, N, S]
        # The same places for `put`: for so few values numpy's own views cost more than the copies do.
        self._ok = self.ok.data
        self._tokens = buffer[layout.tokens].data
        self._confidences = buffer[layout.confidences].view(np.float32).data
        self._ones = np.ones(layout.max_requests, dtype=np.int32).data
        self._num_drafts = layout.num_drafts

    @classmethod
    def empty(cls, layout: ResultLayout) -> PackedResult:
        return cls(layout, np.zeros(layout.size, dtype=np.int32))

    @property
    def outcome(self) -> RoundOutcome:
        return RoundOutcome(int(self.buffer[0]))

    @property
    def num_requests(self) -> int:
        return int(self.buffer[1])

    def clear(self, outcome: RoundOutcome, num_requests: int) -> None:
        """No drafts for anyone."""
        self.buffer[:] = 0
        self.buffer[0] = outcome
        self.buffer[1] = num_requests

    def put(self, tokens: memoryview, confidences: memoryview, num_requests: int) -> None:
        """Drafts for the first `num_requests` rows: int32 and float32 `[num_requests * N]`."""
        count = num_requests * self._num_drafts
        self._ok[:num_requests] = self._ones[:num_requests]
        self._tokens[:count] = tokens
        self._confidences[:count] = confidences

    def set_outcome(self, outcome: RoundOutcome) -> None:
        self.buffer[0] = outcome

    def __repr__(self) -> str:
        return (
            f"<PackedResult {self.outcome.name}, {int(self.ok[: self.num_requests].sum())} of {self.num_requests} ok>"
        )
