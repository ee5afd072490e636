"""How many drafts of each of two drafters the target accepts, of blocks that both drafted from the same rows.

The tokens that a request goes on with are known a few rounds later, whichever drafter's the target verified. Both blocks are then
held against the same tokens, so that one drafter's luck is not the other's. This needs no judge, and no router in the same mood:
two drafters that are the same up to rounding have the same mean.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Final

# Below this many blocks chance alone makes more of a difference than the bound.
ENOUGH_BLOCKS: Final = 10_000
# Of the local drafter's mean.
BOUND: Final = 0.02


@dataclass(slots=True)
class _Block:
    local: list[int]
    remote: list[int]
    tokens: list[int] = field(default_factory=list)  # what the request went on with, behind the anchor


@dataclass(slots=True)
class _Request:
    owner: Hashable
    position: int  # of its newest anchor
    verified: list[int]  # drafts that the target has in hand, behind that anchor
    waiting: list[_Block] = field(default_factory=list)


class AcceptedLengths:
    """Owned by the engine thread."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._requests: dict[int, _Request] = {}  # by slot
        self._blocks = self._local = self._remote = 0

    def observe(
        self,
        slot: int,
        owner: Hashable,
        position: int,
        anchor: int,
        *,
        local: list[int],
        remote: list[int] | None,
        verified: list[int],
    ) -> None:
        """A request's round: its newest token is `anchor` at `position`, and the drafts behind it are `local` [N] and `remote`
        [N]; None where the worker has none that may be compared. `verified`: those of the two that the target verifies next.
        Every round of a request is to be told, one that wanted no drafts too: its text is known by the positions.
        """
        request = self._requests.get(slot)
        if request is None or request.owner != owner or not self._goes_on(request, position, anchor):
            request = self._requests[slot] = _Request(owner, position, verified)
        request.position, request.verified = position, verified
        if remote is not None:
            request.waiting.append(_Block(local, remote))

    def _goes_on(self, request: _Request, position: int, anchor: int) -> bool:
        """Take note of the tokens since the anchor before; False where they cannot be known."""
        accepted = position - request.position - 1
        if not 0 <= accepted <= self._num_drafts:
            return False
        tokens = [*request.verified[:accepted], anchor]
        for block in request.waiting:
            block.tokens += tokens
        known = [block for block in request.waiting if len(block.tokens) >= self._num_drafts]
        for block in known:
            self._blocks += 1
            self._local += agreeing(block.local, block.tokens)
            self._remote += agreeing(block.remote, block.tokens)
        request.waiting = request.waiting[len(known) :]  # the oldest know the most
        return True

    @property
    def passes(self) -> bool | None:
        """Whether the two means are within the bound of each other; None: not enough is known."""
        if self._blocks < ENOUGH_BLOCKS:
            return None
        return abs(self._remote - self._local) <= BOUND * self._local

    def snapshot(self) -> dict[str, Any]:
        blocks = self._blocks
        return {
            "blocks": blocks,
            "enough_blocks": ENOUGH_BLOCKS,
            "local": round(self._local / blocks, 4) if blocks else None,
            "remote": round(self._remote / blocks, 4) if blocks else None,
            "difference": round((self._remote - self._local) / self._local, 5) if self._local else None,
            "bound": BOUND,
            "passes": self.passes,
        }


def agreeing(drafts: list[int], tokens: list[int]) -> int:
    """How many of `drafts` come true before the first that does not."""
    return next(
        (at for at, (draft, token) in enumerate(zip(drafts, tokens, strict=False)) if draft != token), len(drafts)
    )
