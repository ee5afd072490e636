"""Drafts that are made up: the worker's drafter without a model."""

from __future__ import annotations

from collections.abc import Sequence

from farspark.mock.arrays import array
from farspark.wire import layout
from farspark.wire.auth import NO_IDENTITY
from farspark.worker.batch import DraftBatch, DrafterInfo, DraftResult, Drawn, Judged, Judging, Progress


class MockDrafter:
    """Drafts the anchor's successors, each with confidence a half, whatever the rows are.

    Where a draft is to be drawn it has a probability of 1, and the ids after it 0: whatever the draw is, it gives this draft.
    With `info.has_router` it also judges: a token's successor has logit 1, all others 0, and the closest choice of experts in
    every block is by `routing_margin`. Without, it has no opinion of other drafts.
    """

    def __init__(self, info: DrafterInfo, routing_margin: float = 0.0) -> None:
        self._info = info
        self._routing_margin = routing_margin

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def warm_up(self, progress: Progress) -> None:
        progress("nothing to warm up", 1, 1)

    def draft(self, batch: DraftBatch) -> DraftResult:
        tokens: list[int] = []
        confidences: list[float] = []
        for entry in batch.entries:
            for depth in range(self._info.num_drafts):
                is_wanted = entry.need_draft and depth < entry.n_out
                tokens.append((entry.anchor_token + 1 + depth) % self._info.vocab_size if is_wanted else 0)
                confidences.append(0.5 if is_wanted else 0.0)
        floats = array("f", confidences)
        return DraftResult(
            [True] * len(batch.entries),
            array("i", tokens),
            floats,
            floats if batch.want_margins else None,
            self._judging(batch) if batch.want_margins and self._info.has_router else None,
            drawn=self._drawn(batch, tokens) if any(entry.temperature for entry in batch.entries) else None,
        )

    def _judging(self, batch: DraftBatch) -> Judging:
        n, vocab_size = self._info.num_drafts, self._info.vocab_size

        def judge(entries: Sequence[int], tokens: memoryview) -> Judged:
            best: list[int] = []
            gaps: list[float] = []
            drafted: list[float] = []
            for index, entry in enumerate(entries):
                one = batch.entries[entry]
                chain = [one.anchor_token, *tokens[index * n : (index + 1) * n]]
                for depth in range(n):
                    right = (chain[depth] + 1) % vocab_size if depth < one.n_out else 0
                    best.append(right)
                    gaps.append(float(depth < one.n_out and chain[depth + 1] != right))
                    drafted.append(float(depth < one.n_out))
            routing = array("f", [self._routing_margin] * len(entries))
            peaks, confidences = array("f", drafted), array("f", [one / 2 for one in drafted])
            return Judged(array("i", best), array("f", gaps), peaks, confidences, routing)

        return judge

    def _drawn(self, batch: DraftBatch, tokens: list[int]) -> Drawn:
        info = self._info
        support: list[int] = []
        q: list[float] = []
        for index, entry in enumerate(batch.entries):
            for depth in range(info.num_drafts):
                is_drawn = entry.need_draft and entry.temperature > 0 and depth < entry.n_out
                first = tokens[index * info.num_drafts + depth]
                support += [(first + more) % info.vocab_size if is_drawn else 0 for more in range(info.support)]
                q += [1.0 if is_drawn and more == 0 else 0.0 for more in range(info.support)]
        mask = [int(entry.need_draft and entry.temperature > 0) for entry in batch.entries]
        return Drawn(array("i", mask), array("i", support), array("f", q))


def mock_info(
    *,
    num_drafts: int,
    vocab_size: int,
    hidden_size: int,
    taps: int,
    slots: int,
    context: int,
    identity: bytes,
    has_router: bool = False,
) -> DrafterInfo:
    """A drafter of this shape that holds nothing."""
    return DrafterInfo(
        kind="MockDrafter",
        num_drafts=num_drafts,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        taps=taps,
        row_bytes=2 * taps * hidden_size,
        slots=slots,
        context=context,
        window=0,
        max_position=layout.MAX_POSITION,
        identity=identity,
        markov_identity=NO_IDENTITY,
        device="none",
        dtype="bfloat16",
        context_bytes=0,
        support=layout.SUPPORT_IDS if vocab_size >= layout.SUPPORT_IDS else 0,
        has_router=has_router,
    )
