"""What must be drafted, computed from a request's rows alone: no slots, no connection, nothing remembered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

from tests.fakes.drafters import expected

from farspark.worker.batch import DraftBatch, DraftEntry, DrafterInfo


class Reference(Protocol):
    @property
    def info(self) -> DrafterInfo: ...

    def agrees(
        self, rows: memoryview, first_pos: int, anchor_token: int, tokens: list[int], confidences: list[float]
    ) -> bool:
        """Whether these are the drafts behind `rows`, which are positions `first_pos` to the one before the anchor."""
        ...


class Arithmetic:
    """For a worker with `ArithmeticDrafter`."""

    def __init__(self, info: DrafterInfo) -> None:
        self.info = info

    def agrees(
        self, rows: memoryview, first_pos: int, anchor_token: int, tokens: list[int], confidences: list[float]
    ) -> bool:
        size = self.info.row_bytes
        by_position = {first_pos + at // size: bytes(rows[at : at + size]) for at in range(0, len(rows), size)}
        should_tokens, should_confidences, _ = expected(
            by_position,
            anchor_token,
            first_pos + len(by_position),
            num_drafts=self.info.num_drafts,
            vocab_size=self.info.vocab_size,
            n_out=self.info.num_drafts,
        )
        return (tokens, confidences) == (should_tokens, should_confidences)


class Checkpoint:
    """For a worker that serves this checkpoint in float32: the same model, from nothing each time. Imports torch."""

    def __init__(self, folder: Path, *, slots: int, context: int) -> None:
        from dataclasses import replace

        from farspark.worker.drafter import open_drafter

        self._drafter = open_drafter(
            folder,
            target=None,
            device="cpu",
            dtype="float32",
            slots=1,
            context=context,
            num_drafts=None,
            progress=lambda _what, _done, _total: None,
        )
        self.info = replace(self._drafter.info, slots=slots)

    def agrees(
        self, rows: memoryview, first_pos: int, anchor_token: int, tokens: list[int], confidences: list[float]
    ) -> bool:
        n_rows = len(rows) // self.info.row_bytes
        entry = DraftEntry(0, True, first_pos, n_rows, first_pos, anchor_token, True, self.info.num_drafts)
        drafted = self._drafter.draft(DraftBatch([entry], rows))
        # Another batch adds up in another order.
        close = all(
            math.isclose(ours, theirs, abs_tol=1e-3)
            for ours, theirs in zip(confidences, drafted.confidences.tolist(), strict=True)
        )
        return tokens == drafted.tokens.tolist() and close
