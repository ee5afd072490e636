"""How drafts are to be drawn, and the check that they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from farspark.engine.draws import draws, find_faults_of_draws, how_to_sample
from farspark.wire.layout import SUPPORT_IDS, EntryFlag, RequestStatus
from farspark.wire.messages import Entry, EntryReply, SampledDrafts, Sampling, StepReply

MASK64 = (1 << 64) - 1
VOCAB, N = 200, 3
SEED, ANCHOR = -(2**62) + 5, 1234


def plain_mix(bits: int) -> int:
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & MASK64
    return bits ^ (bits >> 31)


def plain_draw(seed: int, anchor: int, position: int) -> float:
    """As `docs/wire.md` has it."""
    gamma = 0x9E3779B97F4A7C15
    state = plain_mix(((seed & MASK64) ^ 0x46535041524B0001) & MASK64)
    state = plain_mix((state + anchor * gamma) & MASK64)
    return (plain_mix((state + position * gamma) & MASK64) >> 11) / 2**53


def test_the_draws_are_those_that_wire_md_describes() -> None:
    seeds = np.array([0, -1, 2**63 - 1, -(2**63), SEED], dtype=np.int64)
    anchors = np.array([0, 7, 4095, 2**31, ANCHOR], dtype=np.int64)
    expected = [
        [plain_draw(seed, anchor, anchor + 1 + k) for k in range(7)]
        for seed, anchor in zip(seeds.tolist(), anchors.tolist(), strict=True)
    ]
    assert draws(seeds, anchors, 7).tolist() == expected


def test_the_draws_of_neighbours_have_nothing_to_do_with_each_other() -> None:
    """Uniform, and without correlation between seeds, rounds and positions: 2^16 of each, bounds of five deviations."""
    count = 1 << 16
    found = draws(np.arange(count, dtype=np.int64), np.full(count, 100, dtype=np.int64), 2)
    by_anchor = draws(np.full(count, 3, dtype=np.int64), np.arange(count, dtype=np.int64), 2)
    within = 5 / math.sqrt(count)
    for one in (found[:, 0], found[:, 1], by_anchor[:, 0]):
        assert abs(one.mean() - 0.5) < within * math.sqrt(1 / 12)
        counts = np.histogram(one, bins=64, range=(0, 1))[0]
        chi2 = ((counts - count / 64) ** 2 / (count / 64)).sum()
        assert chi2 < 63 + 5 * math.sqrt(2 * 63)
    # The last pair: the same position, drafted from one anchor and from the next.
    pairs = ((found[:, 0], found[:, 1]), (found[1:, 0], found[:-1, 0]), (by_anchor[1:, 0], by_anchor[:-1, 1]))
    for one, other in pairs:
        assert abs(np.corrcoef(one, other)[0, 1]) < within


def test_nothing_is_asked_for_where_nothing_is_drawn() -> None:
    temperatures = np.array([0.0, 0.7, 1.0], dtype=np.float32)
    seeds = np.array([1, 2, -3], dtype=np.int64)
    assert how_to_sample(temperatures, seeds, [True, False, False]) == []
    assert how_to_sample(temperatures, seeds, [True, False, True]) == [(0, 0.0), (0, 0.0), (-3, 1.0)]


class Answer:
    """The right answer for one drawn request, to be spoiled."""

    def __init__(self, n_out: int = 0) -> None:
        rng = np.random.default_rng(5)
        self.count = n_out or N
        self.support = np.zeros((N, SUPPORT_IDS), dtype=np.int32)
        self.q = np.zeros((N, SUPPORT_IDS), dtype=np.float32)
        self.tokens = np.zeros(N, dtype=np.int32)
        self.mask = 1
        self.status = RequestStatus.OK
        self.entry = Entry(1, 1, ANCHOR - 2, 2, 5, ANCHOR, EntryFlag.NEED_DRAFT, 0, n_out)
        for k in range(self.count):
            self.support[k] = rng.permutation(VOCAB)[:SUPPORT_IDS]
            weights = rng.random(SUPPORT_IDS) ** 4
            self.q[k] = weights / weights.sum()
        self.draw()

    def draw(self) -> None:
        for k in range(self.count):
            reached = self.q[k].astype(np.float64).cumsum()
            place = int((reached <= plain_draw(SEED, ANCHOR, ANCHOR + 1 + k) * reached[-1]).sum())
            self.tokens[k] = self.support[k, place]

    def fault(self, temperature: float = 1.0) -> str | None:
        reply = StepReply(
            1,
            N,
            0,
            [EntryReply(1, 1, 2, self.status)],
            self.tokens.data,
            np.zeros(N, dtype=np.float32).data,
            None,
            2,
            SampledDrafts(
                np.array([self.mask], dtype=np.int32).data, self.support.reshape(-1).data, self.q.reshape(-1).data
            ),
        )
        found = find_faults_of_draws(reply, [self.entry], [Sampling(SEED, temperature)], vocab_size=VOCAB)
        return found.get(0)


def test_a_right_answer_has_no_fault() -> None:
    assert Answer().fault() is None
    assert Answer(n_out=2).fault() is None
    peaked = Answer()
    peaked.q[:] = 0
    peaked.q[:, 4] = 1
    peaked.draw()
    assert peaked.fault() is None
    lowest = Answer()
    lowest.support[1] = np.arange(SUPPORT_IDS)
    lowest.draw()
    assert lowest.fault() is None


@pytest.mark.parametrize(
    ("past", "chosen", "is_right"),
    [(5e-10, 1, True), (5e-10, 2, True), (-5e-10, 1, True), (-5e-10, 2, True)]
    + [(2e-9, 1, True), (2e-9, 2, False), (-2e-9, 1, False), (-2e-9, 2, True)],
)
def test_a_draw_at_the_edge_of_a_share_is_taken_for_either_neighbours(past: float, chosen: int, is_right: bool) -> None:
    """The edge between the second and the third id of the support lies so far past the draw."""
    answer, edge = Answer(), plain_draw(SEED, ANCHOR, ANCHOR + 1) + past
    answer.q[0] = 0
    # Small second summands, so that the sums are exact to some 1e-10 in spite of float32.
    answer.q[0, 0] = edge - 1e-3
    answer.q[0, 1] = edge - float(answer.q[0, 0])
    answer.q[0, 2] = 1 - edge - 1e-3
    answer.q[0, 3] = 1 - edge - float(answer.q[0, 2])
    answer.tokens[0] = answer.support[0, chosen]
    assert answer.fault() == (None if is_right else "position 0: the draft is not what the draw gives")


def other_draft(answer: Answer) -> None:
    """One that is in its support, and likely; but not the one that was drawn."""
    likely = answer.support[1, np.argsort(answer.q[1])[::-1]]
    answer.tokens[1] = next(one for one in likely if one != answer.tokens[1])


def put(name: str, where: Any, value: float) -> Callable[[Answer], None]:
    def spoil(answer: Answer) -> None:
        array: npt.NDArray[Any] = getattr(answer, name)
        array[where] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (put("q", (2, 31), math.nan), "position 2: a probability is not finite or below 0"),
        (put("q", (2, 31), math.inf), "position 2: a probability is not finite or below 0"),
        (put("q", (0, 0), -1e-6), "position 0: a probability is not finite or below 0"),
        (lambda answer: np.multiply(answer.q, 1.001, out=answer.q), "position 0: q does not sum to 1"),
        (lambda answer: np.multiply(answer.q, 0, out=answer.q), "position 0: q does not sum to 1"),
        (put("support", (1, 3), VOCAB), f"position 1: an id of its support is outside 0 .. {VOCAB - 1}"),
        (put("support", (1, 3), -1), f"position 1: an id of its support is outside 0 .. {VOCAB - 1}"),
        (lambda answer: answer.support[2].put(5, answer.support[2, 6]), "position 2: an id is twice in its support"),
        (other_draft, "position 1: the draft is not what the draw gives"),
        (lambda answer: setattr(answer, "mask", 0), "temperature 1, but the drafts are greedy"),
        (lambda answer: setattr(answer, "mask", 2), "mask 2, expected 0 or 1"),
    ],
)
def test_what_cannot_have_been_drawn_so_is_named(spoil: Callable[[Answer], object], why: str) -> None:
    answer = Answer()
    spoil(answer)
    assert answer.fault() == why


def test_a_draft_outside_its_support_and_one_of_probability_0_are_refused() -> None:
    answer = Answer()
    answer.tokens[0] = next(one for one in range(VOCAB) if one not in answer.support[0])
    assert answer.fault() == "position 0: the draft is not in its support"
    answer = Answer()
    answer.q[0, 7] = 0
    answer.q[0] /= answer.q[0].sum()
    answer.tokens[0] = answer.support[0, 7]
    assert answer.fault() == "position 0: the draft is not in its support"


def test_drafts_of_another_seed_or_another_anchor_are_refused() -> None:
    answer = Answer()
    answer.entry = answer.entry._replace(anchor_pos=ANCHOR + 1)
    assert (answer.fault() or "").endswith("the draft is not what the draw gives")


def test_greedy_drafts_that_are_said_to_be_drawn_are_refused() -> None:
    answer = Answer()
    assert answer.fault(temperature=0.0) == "temperature 0, but the drafts are drawn"
    answer.tokens = answer.support[np.arange(N), answer.q.argmax(axis=1)].copy()
    assert (answer.fault() or "").endswith("the draft is not what the draw gives")


def test_probabilities_past_the_positions_asked_for_are_refused() -> None:
    answer = Answer(n_out=2)
    answer.q[2, 0] = 0.5
    assert answer.fault() == "probabilities past the positions asked for"


def test_an_entry_without_drafts_is_not_judged() -> None:
    answer = Answer()
    answer.status, answer.q[0, 0] = RequestStatus.GAP, math.nan
    assert answer.fault() is None
