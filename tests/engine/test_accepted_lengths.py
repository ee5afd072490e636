from __future__ import annotations

import random

import pytest

from farspark.engine import accepted_lengths
from farspark.engine.accepted_lengths import AcceptedLengths, agreeing

N = 4


class Target:
    """Decodes a known text; drafters are right with probability `share` at each position."""

    def __init__(self, seed: int, length: int) -> None:
        self.random = random.Random(seed)
        self.text = [self.random.randrange(50) for _ in range(length + N)]
        self.length = length

    def drafts(self, position: int, share: float) -> list[int]:
        true = self.text[position + 1 : position + 1 + N]
        return [token if self.random.random() < share else 50 for token in true]

    def decode(
        self, lengths: AcceptedLengths, *, slot: int, local: float, remote: float | None
    ) -> list[tuple[int, int]]:
        """The accepted lengths of both, of every block whose text is known before the end."""
        expected, position, owner = [], 0, object()
        while position < self.length:
            mine = self.drafts(position, local)
            theirs = None if remote is None else self.drafts(position, remote)
            lengths.observe(slot, owner, position, self.text[position], local=mine, remote=theirs, verified=mine)
            true = self.text[position + 1 : position + 1 + N]
            if theirs is not None:
                expected.append((position, agreeing(mine, true), agreeing(theirs, true)))
            position += agreeing(mine, true) + 1
        newest = expected[-1][0] if expected else 0
        return [(ours, theirs) for at, ours, theirs in expected if at + N <= newest]


def observe(
    lengths: AcceptedLengths, owner: object, position: int, anchor: int, local: list[int], remote: list[int] | None
) -> None:
    lengths.observe(0, owner, position, anchor, local=local, remote=remote, verified=local)


def test_both_are_held_against_what_the_request_went_on_with() -> None:
    lengths, expected = AcceptedLengths(N), []
    for seed in range(20):  # the same slot, request after request
        expected += Target(seed, 60).decode(lengths, slot=3, local=0.6, remote=0.9)
    found = lengths.snapshot()
    assert found["blocks"] == len(expected) > 300
    assert found["local"] == pytest.approx(sum(ours for ours, _ in expected) / len(expected), abs=1e-4)
    assert found["remote"] == pytest.approx(sum(theirs for _, theirs in expected) / len(expected), abs=1e-4)
    assert found["remote"] > 1.5 * found["local"]
    assert found["passes"] is None


def test_rounds_without_remote_drafts_keep_the_text_known() -> None:
    lengths = AcceptedLengths(1)
    owner = object()
    observe(lengths, owner, 5, 10, [11], [11])
    observe(lengths, owner, 7, 12, [13], None)  # 11 was accepted
    observe(lengths, owner, 8, 99, [14], [14])
    assert lengths.snapshot() | {"difference": None} == {
        "blocks": 1,
        "enough_blocks": 10_000,
        "local": 1.0,
        "remote": 1.0,
        "difference": None,
        "bound": 0.02,
        "passes": None,
    }


@pytest.mark.parametrize(("owner", "position"), [("b", 7), ("a", 9), ("a", 5), ("a", 4)])
def test_another_request_or_a_text_that_is_not_known_begins_anew(owner: str, position: int) -> None:
    lengths = AcceptedLengths(2)
    observe(lengths, "a", 5, 10, [11, 12], [11, 12])
    observe(lengths, owner, position, 11, [1, 2], [1, 2])
    observe(lengths, owner, position + 3, 3, [4, 5], [4, 5])  # both were accepted
    assert lengths.snapshot()["blocks"] == 1
    assert lengths.snapshot()["local"] == 2.0


@pytest.mark.parametrize(("remote", "passes"), [(0.7, True), (0.66, False), (0.74, False)])
def test_enough_blocks_are_judged(monkeypatch: pytest.MonkeyPatch, remote: float, passes: bool) -> None:
    monkeypatch.setattr(accepted_lengths, "ENOUGH_BLOCKS", 20_000)
    lengths = AcceptedLengths(N)
    for seed in range(12):
        Target(seed, 6_000).decode(lengths, slot=seed, local=0.7, remote=remote)
    assert lengths.passes is passes
