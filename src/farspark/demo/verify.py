"""Is a text the target's own? Judged token by token against the target without speculation.

A bf16 target can disagree with itself between a one-token and a six-token forward pass. A difference counts as equal only
where the token is one of the target's own top two and their logits lie within two bf16 steps; what follows is then judged
against the target continuing from that token, so that no token escapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BF16_STEPS = 2


@dataclass(frozen=True, slots=True)
class TargetToken:
    """One token of the target alone, with its own two largest logits there: ((token, logit), (token, logit))."""

    token: int
    top_two: tuple[tuple[int, float], tuple[int, float]]


Continue = Callable[[Sequence[int], int], Sequence[TargetToken]]
"""`continue_from(tokens so far, at most)`: what the target alone says after them, greedily."""


@dataclass(frozen=True, slots=True)
class Verdict:
    equal: bool
    near_ties: int
    tokens: int  # judged
    difference: str | None = None  # the first real one, as a sentence


def bf16_step(logit: float) -> float:
    """The distance between neighbouring bf16 numbers of `logit`'s size: 2^(exponent - 7)."""
    return 2.0 ** (math.floor(math.log2(max(abs(logit), 2.0**-126))) - 7)


def judge(tokens: Sequence[int], continue_from: Continue, *, limit: int, allow_ties: bool) -> Verdict:
    """Compare `tokens` with what the target alone says within `limit` tokens. A text that ends early or late differs."""
    ties = 0
    at = 0
    while True:
        alone = continue_from(tokens[:at], limit - at)
        for offset, target in enumerate(alone):
            if at + offset >= len(tokens):
                return Verdict(False, ties, len(tokens), f"ends at token {len(tokens)}, the target alone goes on")
            token = tokens[at + offset]
            if token == target.token:
                continue
            if not (allow_ties and _is_near_tie(token, target)):
                return Verdict(
                    False, ties, at + offset, f"token {at + offset} is {token}, the target alone says {_show(target)}"
                )
            ties += 1
            at += offset + 1
            break
        else:
            at += len(alone)
            if at < len(tokens):
                return Verdict(False, ties, at, f"goes on after token {at}, where the target alone ends")
            return Verdict(True, ties, len(tokens))
        if at == len(tokens):
            return Verdict(True, ties, len(tokens))


def _is_near_tie(token: int, target: TargetToken) -> bool:
    (first, largest), (second, next_largest) = target.top_two
    return token in (first, second) and largest - next_largest <= BF16_STEPS * bf16_step(largest)


def _show(target: TargetToken) -> str:
    (first, largest), (second, next_largest) = target.top_two
    return f"{target.token} (logits {first}: {largest:.4f}, {second}: {next_largest:.4f})"
