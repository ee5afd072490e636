"""Drafts that were drawn: how each request is to be sampled, and whether what came back was drawn that way.

The target verifies a draft by the distribution that it was drawn from, so a draft that was not drawn from its q makes other
text than the target's own. What a worker says is therefore drawn again: the draws are a pure function of the request's seed
and of positions (`docs/wire.md`), and the draft must be the one that they give. Pure; numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from farspark.wire.layout import SUPPORT_IDS
from farspark.wire.messages import Entry, Sampling, StepReply, make_sampling

# How far from 1 the sum of a q may be: what 32 roundings to float32 add up to stays a hundred times below.
SUM_WITHIN: Final = 1e-4
# A draw nearer than this to the edge of its token's share is taken for either neighbour: sums are rounded in another order.
EDGE: Final = 1e-9

_GREEDY: Final = Sampling(0, 0.0)
_DOMAIN: Final = np.uint64(0x46535041524B0001)
_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
    (np.uint64(31), np.uint64(1)),
)

Numbers = npt.NDArray[np.uint64]


def how_to_sample(
    temperatures: npt.NDArray[np.float32], seeds: npt.NDArray[np.int64], wants_draft: Sequence[bool]
) -> list[Sampling]:
    """How to sample each of [n] requests; an empty list where nobody's drafts are to be drawn."""
    drawn = [temperature > 0 and wanted for temperature, wanted in zip(temperatures.tolist(), wants_draft, strict=True)]
    if not any(drawn):
        return []
    each = zip(drawn, seeds.tolist(), temperatures.tolist(), strict=True)
    return [make_sampling((seed, temperature)) if is_drawn else _GREEDY for is_drawn, seed, temperature in each]


def draws(seeds: npt.NDArray[np.int64], anchors: npt.NDArray[np.int64], num_drafts: int) -> npt.NDArray[np.float64]:
    """[n, N] in [0, 1): what decides each draft, at positions anchor + 1 .. anchor + N."""
    anchor = anchors.astype(np.uint64)
    positions = anchor[:, None] + np.arange(1, num_drafts + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        state = _mixed(_mixed(seeds.view(np.uint64) ^ _DOMAIN) + anchor * _GAMMA)
        mixed = _mixed(state[:, None] + positions * _GAMMA)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: Numbers) -> Numbers:
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> shift)) * factor
    return bits


def find_faults_of_draws(
    reply: StepReply, entries: Sequence[Entry], sampling: Sequence[Sampling], *, vocab_size: int
) -> dict[int, str]:
    """By place, of entries that have drafts: why these cannot be verified by their q. `reply` is otherwise without fault."""
    assert reply.sampled is not None
    mask = reply.sampled.mask.tolist()
    faults: dict[int, str] = {}
    places: list[int] = []
    for place, (answer, how, is_drawn) in enumerate(zip(reply.entries, sampling, mask, strict=True)):
        if not answer.status.has_drafts:
            continue
        if is_drawn not in (0, 1):
            faults[place] = f"mask {is_drawn}, expected 0 or 1"
        elif is_drawn != (how.temperature > 0):
            faults[place] = f"temperature {how.temperature:g}, but the drafts are {'drawn' if is_drawn else 'greedy'}"
        elif is_drawn:
            places.append(place)
    if places:
        wrong = _first_faults(
            reply, [entries[place] for place in places], [sampling[place] for place in places], places, vocab_size
        )
        faults |= {place: why for place, why in zip(places, wrong, strict=True) if why is not None}
    return faults


def _first_faults(
    reply: StepReply, entries: Sequence[Entry], sampling: Sequence[Sampling], places: Sequence[int], vocab_size: int
) -> list[str | None]:
    """Of each of `places`."""
    assert reply.sampled is not None
    num_drafts = reply.num_drafts
    shape = len(reply.entries), num_drafts, SUPPORT_IDS
    support = np.frombuffer(reply.sampled.support, dtype=np.int32).reshape(shape)[places]
    q = np.frombuffer(reply.sampled.q, dtype=np.float32).reshape(shape)[places].astype(np.float64)
    tokens = np.frombuffer(reply.tokens, dtype=np.int32).reshape(shape[:2])[places]
    counts = np.array([entry.n_out or num_drafts for entry in entries])
    is_asked = np.arange(num_drafts) < counts[:, None]

    ordered = np.sort(support, axis=-1)
    is_probability = np.isfinite(q) & (q >= 0)
    q = np.where(is_probability, q, 0.0)
    reached = q.cumsum(axis=-1)
    sums = reached[..., -1]
    is_draft = support == tokens[..., None]
    drawn = draws(
        np.array([how.seed for how in sampling], dtype=np.int64),
        np.array([entry.anchor_pos for entry in entries], dtype=np.int64),
        num_drafts,
    )
    share_end = np.where(is_draft, reached, 0.0).sum(axis=-1)
    share = np.where(is_draft, q, 0.0).sum(axis=-1)
    at = drawn * sums
    checks: tuple[tuple[Any, str], ...] = (
        (
            ((support >= 0) & (support < vocab_size)).all(axis=-1),
            f"an id of its support is outside 0 .. {vocab_size - 1}",
        ),
        ((ordered[..., 1:] != ordered[..., :-1]).all(axis=-1), "an id is twice in its support"),
        (is_probability.all(axis=-1), "a probability is not finite or below 0"),
        (np.abs(sums - 1.0) <= SUM_WITHIN, "q does not sum to 1"),
        (share > 0, "the draft is not in its support"),
        ((at >= share_end - share - EDGE) & (at <= share_end + EDGE), "the draft is not what the draw gives"),
    )
    faults: list[str | None] = [None] * len(places)
    is_empty = ((support == 0) & (q == 0) & is_probability).all(axis=-1)
    for row in np.flatnonzero((~is_empty & ~is_asked).any(axis=-1)).tolist():
        faults[row] = "probabilities past the positions asked for"
    for holds, why in reversed(checks):
        fails = ~holds & is_asked
        for row in np.flatnonzero(fails.any(axis=-1)).tolist():
            faults[row] = f"position {int(fails[row].argmax())}: {why}"
    return faults
