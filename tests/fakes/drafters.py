"""Real small drafters without torch: one that does nothing, one whose drafts depend on every byte that it was given.

`expected` computes what `ArithmeticDrafter` must draft from the rows alone, so a stale, missing, doubled or shifted row
changes the ids, and a test that compares ids sees it.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from farspark.worker.batch import DraftBatch, DrafterInfo, DraftResult, Judged, Judging, Progress

INFO = DrafterInfo(
    kind="ArithmeticDrafter",
    num_drafts=5,
    vocab_size=1000,
    hidden_size=4,
    taps=2,
    row_bytes=16,
    slots=4,
    context=8,
    window=0,
    max_position=1 << 20,
    identity=bytes(range(32)),
    markov_identity=bytes(range(32, 64)),
    device="cpu",
    dtype="bfloat16",
    context_bytes=4 * 8 * 16,
)


def info(**changes: object) -> DrafterInfo:
    """`INFO` with some fields changed; `row_bytes` follows `taps` and `hidden_size` unless it is given."""
    changed = replace(INFO, **changes)  # type: ignore[arg-type]
    if "row_bytes" not in changes:
        changed = replace(changed, row_bytes=2 * changed.taps * changed.hidden_size)
    return changed


def expected(
    rows_by_position: Mapping[int, bytes],
    anchor_token: int,
    anchor_pos: int,
    *,
    num_drafts: int,
    vocab_size: int,
    n_out: int,
) -> tuple[list[int], list[float], list[float]]:
    """Ids, confidences and margins for a request whose visible rows are `rows_by_position`; zeros from `n_out` on.

    The draft at depth d is the one before it plus 1 plus a digest of (position, row) over all visible rows.
    """
    digest = zlib.crc32(struct.pack("<q", anchor_pos))
    for position in sorted(rows_by_position):
        digest = zlib.crc32(rows_by_position[position], zlib.crc32(struct.pack("<q", position), digest))
    tokens, confidences, margins = [0] * num_drafts, [0.0] * num_drafts, [0.0] * num_drafts
    last = anchor_token
    for depth in range(n_out):
        last = tokens[depth] = (last + 1 + digest % 97) % vocab_size
        # Quarters and eighths are exact in float32.
        confidences[depth] = ((digest >> depth) % 4 + 1) / 4
        margins[depth] = ((digest >> depth) % 8) / 8
    return tokens, confidences, margins


class NoopDrafter:
    """Answers zeros from one prepared buffer: what is left of a round is the transport and the session."""

    def __init__(self, info: DrafterInfo = INFO) -> None:
        self._info = info
        self._zeros = memoryview(bytes(4 * info.num_drafts * 4096))
        self._results: dict[tuple[int, bool], DraftResult] = {}

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def warm_up(self, progress: Progress) -> None:
        progress("nothing to warm up", 1, 1)

    def draft(self, batch: DraftBatch) -> DraftResult:
        asked = len(batch.entries), batch.want_margins
        result = self._results.get(asked)
        if result is None:
            result = self._results[asked] = self._nothing(*asked)
        return result

    def _nothing(self, count: int, want_margins: bool) -> DraftResult:
        array = self._zeros[: 4 * count * self._info.num_drafts]
        floats = cast(memoryview, array.cast("f"))
        return DraftResult([True] * count, array.cast("i"), floats, floats if want_margins else None)


class ArithmeticDrafter:
    """Keeps the rows of every slot by position and drafts what `expected` says. Asserts what the seam promises it.

    `fail_next` makes that many calls raise; `not_finite` names slots whose entries come back not ok; `calls` counts;
    `pause` is waited for inside `draft` where it is set.
    """

    def __init__(self, info: DrafterInfo = INFO) -> None:
        self._info = info
        self.rows: list[dict[int, bytes]] = [{} for _ in range(info.slots)]
        self.fail_next = 0
        self.not_finite: set[int] = set()
        self.calls = 0
        self.is_warm = False
        self.pause: threading.Event | None = None
        self.entered = threading.Event()
        self._inside = threading.Lock()
        self.threads: set[str] = set()

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def warm_up(self, progress: Progress) -> None:
        progress("warming up", 0, 1)
        self.is_warm = True
        progress("warming up", 1, 1)

    def draft(self, batch: DraftBatch) -> DraftResult:
        assert self._inside.acquire(blocking=False), "two threads inside the drafter"
        try:
            return self._draft(batch)
        finally:
            self._inside.release()

    def _draft(self, batch: DraftBatch) -> DraftResult:
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        self.entered.set()
        if self.pause is not None:
            assert self.pause.wait(10)
        if self.fail_next:
            self.fail_next -= 1
            raise RuntimeError("the drafter was told to fail")
        info = self._info
        assert len(batch.rows) == info.row_bytes * sum(entry.n_rows for entry in batch.entries)
        assert len({entry.slot for entry in batch.entries}) == len(batch.entries), "a slot twice in one batch"
        tokens: list[int] = []
        confidences: list[float] = []
        margins: list[float] = []
        ok = []
        steps: list[int] = []  # what each entry adds to the token before
        at = 0
        for entry in batch.entries:
            held = self.rows[entry.slot]
            if entry.reset:
                held.clear()
            assert not held or max(held) + 1 == entry.first_pos, "rows that do not continue the slot"
            assert entry.n_rows <= info.context
            assert 0 <= entry.anchor_token < info.vocab_size
            assert 1 <= entry.n_out <= info.num_drafts
            for position in range(entry.first_pos, entry.anchor_pos):
                held[position] = bytes(batch.rows[at : at + info.row_bytes])
                at += info.row_bytes
            for position in [old for old in held if old < entry.anchor_pos - info.context]:
                del held[position]
            ok.append(entry.slot not in self.not_finite)
            n_out = entry.n_out if entry.need_draft and ok[-1] else 0
            visible = {position: row for position, row in held.items() if position >= entry.visible_from}
            assert len(visible) == entry.anchor_pos - entry.visible_from, "a visible position that is not held"
            drafted = expected(
                visible,
                entry.anchor_token,
                entry.anchor_pos,
                num_drafts=info.num_drafts,
                vocab_size=info.vocab_size,
                n_out=n_out,
            )
            steps.append((drafted[0][0] - entry.anchor_token) % info.vocab_size)
            tokens += drafted[0]
            confidences += drafted[1]
            margins += drafted[2]
        count = len(tokens)
        return DraftResult(
            ok,
            memoryview(struct.pack(f"<{count}i", *tokens)).cast("i"),
            _floats(confidences),
            _floats(margins) if batch.want_margins else None,
            self._judging(batch, steps, confidences) if batch.want_margins else None,
        )

    def _judging(self, batch: DraftBatch, steps: list[int], confidences: list[float]) -> Judging:
        """The right token has logit 1, every other 0."""
        n, vocab_size = self._info.num_drafts, self._info.vocab_size

        def judge(entries: Sequence[int], tokens: memoryview) -> Judged:
            best: list[int] = []
            for index, entry in enumerate(entries):
                chain = [batch.entries[entry].anchor_token, *tokens[index * n : (index + 1) * n]]
                best += [(before + steps[entry]) % vocab_size for before in chain[:n]]
            gaps = [float(right != token) for right, token in zip(best, tokens, strict=True)]
            sure = [one for entry in entries for one in confidences[entry * n : (entry + 1) * n]]
            ids = memoryview(struct.pack(f"<{len(best)}i", *best)).cast("i")
            # Differs by the rows, as the drafts do.
            routing = _floats([steps[entry] / vocab_size for entry in entries]) if self._info.has_router else None
            return Judged(ids, _floats(gaps), _floats([1.0] * len(best)), _floats(sure), routing)

        return judge


def _floats(values: list[float]) -> memoryview:
    return cast(memoryview, memoryview(struct.pack(f"<{len(values)}f", *values)).cast("f"))
