"""The seam between the worker's sessions and its drafter: what is asked of the drafter in one step, and what it answers.

Sessions decide (generations, gaps, windows, which slot of the drafter serves whom); the drafter obeys. Nothing here
knows a socket, the wire or torch, so each side is tested without the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

Progress = Callable[[str, int, int], None]
"""`progress(what, done, total)`: called as long work goes on; `total` is 0 while it is not known."""


class DraftEntry(NamedTuple):
    """One request of a step, already judged: its rows continue what the slot holds, its numbers are in range.

    The rows are positions `first_pos .. first_pos + n_rows - 1`. The anchor is the token at `first_pos + n_rows`, the
    newest token, which has no row yet. A draft may attend to the held positions `visible_from .. anchor_pos - 1`.
    """

    slot: int  # the drafter's own slot, 0 .. slots - 1; at most one entry per slot and batch
    reset: bool  # forget everything that the slot holds before the rows are appended
    first_pos: int
    n_rows: int  # may be 0: a draft from what the slot already holds
    visible_from: int  # the lowest position held and within the context; anchor_pos when nothing is visible
    anchor_token: int
    need_draft: bool
    n_out: int  # how many draft positions are wanted, 1 .. N; the rest are 0 in the answer
    seed: int = 0  # 64 bits, signed: of the draws, where there are any
    temperature: float = 0.0  # finite, 0 or more; 0: the most probable token, nothing is drawn

    @property
    def anchor_pos(self) -> int:
        return self.first_pos + self.n_rows


# A named tuple's own constructor is Python code; this takes all fields as one tuple and checks nothing.
make_draft_entry: Callable[[tuple[Any, ...]], DraftEntry] = functools.partial(tuple.__new__, DraftEntry)


class DraftBatch(NamedTuple):
    """One step. `rows` holds the rows of all entries in entry order, packed, `row_bytes` each, raw little-endian bf16."""

    entries: Sequence[DraftEntry]
    rows: memoryview  # sum of n_rows times row_bytes; valid only until `draft` returns
    want_margins: bool = False


make_draft_batch: Callable[[tuple[Any, ...]], DraftBatch] = functools.partial(tuple.__new__, DraftBatch)


class Judged(NamedTuple):
    """Given chains as the drafter sees them: at each position its logits L with the chain's own tokens in front of it.

    `[chains * N]` each but the last; zero past the positions that were drafted.
    """

    best: memoryview  # int32, the lowest id with the greatest logit
    gaps: memoryview  # float32, max L - L[the chain's token], 0 or more
    peaks: memoryview  # float32, max |L|
    confidences: memoryview  # float32
    # float32 [chains], how close the closest choice of experts was while the chain's draft was made; None: no router
    routing: memoryview | None = None


Judging = Callable[[Sequence[int], memoryview], Judged]
"""`judging(entries, tokens)`: chains int32 `[chains * N]`, each for an entry of the batch that was drafted for."""


class Drawn(NamedTuple):
    """What drafts were drawn from; S is `DrafterInfo.support`. Zeros wherever the mask is 0, and past `n_out`."""

    mask: memoryview  # int32 [entries], 1: this entry's drafts were drawn, each from q at its position
    support: memoryview  # int32 [entries * N * S], distinct ids, the most probable ones at the entry's temperature
    q: memoryview  # float32 [entries * N * S], their probabilities, which sum to 1


class DraftResult(NamedTuple):
    """Drafts for every entry of the batch, in entry order; N is `DrafterInfo.num_drafts`.

    Entries that did not need a draft, positions at or past `n_out` and entries whose `ok` is False are zero.
    """

    ok: Sequence[bool]  # [entries]; False: this entry's logits were not finite, its slot holds nothing usable
    tokens: memoryview  # int32 [entries * N]
    confidences: memoryview  # float32 [entries * N], each in [0, 1]
    margins: memoryview | None  # float32 [entries * N], top-1 minus top-2 logit; None unless wanted
    judge: Judging | None = None  # keeps the step's logits; only with margins, and only where something was drafted
    drawn: Drawn | None = None  # only where an entry has a temperature


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """What a drafter is. The identities are SHA-256 digests, see `checkpoint.py`."""

    kind: str  # the family, as in the checkpoint's architectures: "Qwen3DSparkModel"
    num_drafts: int  # N
    vocab_size: int  # ids that may be drafted: the target's true vocabulary, without padding
    hidden_size: int
    taps: int
    row_bytes: int
    slots: int
    context: int  # positions kept per slot
    window: int  # the drafter's own sliding window; 0 for full attention
    max_position: int  # exclusive bound of positions
    identity: bytes  # 32 bytes
    markov_identity: bytes  # 32 bytes
    device: str
    dtype: str
    context_bytes: int  # memory of the context store
    weight_bytes: int = 0  # memory of the weights; 0 for a drafter without
    support: int = 0  # ids that a draft is drawn from at a temperature; 0: this drafter draws none
    has_router: bool = False  # it chooses experts, so what it judges has routing margins


class Drafter(Protocol):
    """Used by one thread at a time, whoever holds the server's drafting lock. `info` may be read anywhere."""

    @property
    def info(self) -> DrafterInfo: ...

    def warm_up(self, progress: Progress) -> None:
        """Meet every shape once, so that no later step waits for a compilation. Leaves every slot empty."""
        ...

    def draft(self, batch: DraftBatch) -> DraftResult:
        """Append the rows of every entry, then draft for those that need it, in one forward pass.

        Raises whatever torch raises when the step cannot be done; the caller then holds every slot of the batch for void, or
        asks again for some of the same entries: a row that is appended again takes its own place.
        """
        ...
