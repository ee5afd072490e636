"""How many of the drafts are worth verifying: the depth policy, its costs, and how many positions to ask the worker for.

Confidence k of a request is the probability that draft k is accepted, given that all before it were. So the product of its
first j confidences is the chance that j drafts are accepted, and 1 + the sum of those products over j = 1..d is the number of
tokens to expect from verifying d drafts. What is verified is always a prefix.

Pure: values in, values out. Whoever reads a depth file hands its text in.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

POLICY: Final = "VLLM_DSPARK_DEPTH_POLICY"
FILE: Final = "VLLM_DSPARK_DEPTH_FILE"
SYNTAX: Final = (
    "off, fixed:DEPTH, conf, confb, either with :MS,MS,… (a round's milliseconds by depth from 0), or "
    "confr:ROWS=MS,ROWS=MS,… (milliseconds by rows)"
)


class Mode(enum.Enum):
    OFF = "off"  # every draft
    FIXED = "fixed"
    CONF = "conf"  # one depth for all requests
    CONFB = "confb"  # a depth for each request, as many drafts in all as one depth would verify
    CONFR = "confr"  # a depth for each request, priced by rows

    @property
    def masks(self) -> bool:
        """Whether what lies past a cap is never verified."""
        return self in (Mode.CONF, Mode.CONFB, Mode.CONFR)


@dataclass(frozen=True, slots=True)
class DepthPolicy:
    """A parsed policy. `ms` are its own costs by depth, `rows_ms` those by rows, in ascending order."""

    mode: Mode
    depth: int = 0  # of FIXED
    ms: tuple[float, ...] | None = None  # of CONF and CONFB; None: the costs come from elsewhere
    rows_ms: tuple[tuple[int, float], ...] = ()  # of CONFR

    def __str__(self) -> str:
        if self.mode is Mode.FIXED:
            return f"fixed:{self.depth}"
        if self.mode is Mode.CONFR:
            return "confr:" + ",".join(f"{rows}={ms:g}" for rows, ms in self.rows_ms)
        table = ":" + ",".join(f"{ms:g}" for ms in self.ms) if self.ms else ""
        return f"{self.mode.value}{table}"


OFF: Final = DepthPolicy(Mode.OFF)


def parse_policy(text: str) -> DepthPolicy:
    """Raises ValueError with what is wrong."""
    name, colon, argument = text.strip().partition(":")
    try:
        mode = Mode(name.strip().lower())
    except ValueError:
        raise ValueError(f"{name!r} is no mode; expected {SYNTAX}") from None
    argument = argument.strip()
    if mode is Mode.OFF and colon:
        raise ValueError("off takes nothing after it")
    if mode is Mode.FIXED:
        if not argument.isdecimal():
            raise ValueError(f"fixed:{argument}: expected fixed:DEPTH, a whole number of drafts, 0 or more")
        return DepthPolicy(mode, depth=int(argument))
    if mode is Mode.CONFR:
        return DepthPolicy(mode, rows_ms=_parse_rows(argument))
    if colon and not argument:
        raise ValueError(f"{name}: has nothing after the colon; leave it out, or give the milliseconds by depth")
    return DepthPolicy(mode, ms=parse_ms_by_depth(argument) if argument else None)


def parse_ms_by_depth(text: str) -> tuple[float, ...]:
    """Milliseconds of a round by depth, from 0. Raises ValueError with what is wrong."""
    found = tuple(_positive(part) for part in text.split(","))
    _refuse_decreasing(found)
    return found


def _parse_rows(text: str) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for part in text.split(","):
        rows, equals, ms = part.partition("=")
        if not equals or not rows.strip().isdecimal() or int(rows) < 1:
            raise ValueError(f"{part.strip()!r}: expected ROWS=MS, with a whole number of rows, 1 or more")
        if found and int(rows) <= found[-1][0]:
            raise ValueError(f"{part.strip()!r} follows {found[-1][0]} rows; the rows must ascend")
        found.append((int(rows), _positive(ms)))
    _refuse_decreasing([ms for _, ms in found])
    return tuple(found)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{text.strip()!r}: expected a finite number of milliseconds above 0")
    return value


def _refuse_decreasing(ms: Sequence[float]) -> None:
    for before, after in itertools.pairwise(ms):
        if after < before:
            raise ValueError(f"{after:g} follows {before:g}; verifying more never takes less time")


def policy_from_file(text: str) -> DepthPolicy:
    """The policy of a depth file: one line as the variable has it, besides blank ones and comments (#). Raises ValueError."""
    lines = [line for line in (line.partition("#")[0].strip() for line in text.splitlines()) if line]
    if len(lines) != 1:
        raise ValueError(f"{len(lines)} lines that say something; expected one: {SYNTAX}")
    return parse_policy(lines[0])


@dataclass(frozen=True, slots=True)
class Costs:
    """What a remote round costs, in milliseconds."""

    round_ms: tuple[float, ...]  # to verify, by depth 0..N
    draft_ms: float  # on top, whatever the depth


class Resolved(NamedTuple):
    """A policy that fits the engine: nothing about it is left to find out."""

    policy: DepthPolicy
    ms: tuple[float, ...]  # [N + 1], the price by depth of CONF and CONFB; empty: nothing is priced by depth


def resolve(policy: DepthPolicy, num_drafts: int, costs: Costs | None, *, own_table: bool) -> Resolved:
    """`policy` with its prices: round_ms[d] + draft_ms. Raises ValueError where it does not fit an engine of N drafts.

    `own_table`: a table that the policy itself carries stands in for `costs.round_ms`.
    """
    if policy.mode is Mode.FIXED and policy.depth > num_drafts:
        raise ValueError(f"the engine drafts {num_drafts} tokens; depth {policy.depth} is more")
    if policy.mode not in (Mode.CONF, Mode.CONFB):
        return Resolved(policy, ())
    if costs is None:
        raise ValueError(f"{policy} needs VLLM_DSPARK_REMOTE_ROUND_MS and VLLM_DSPARK_REMOTE_DRAFT_MS")
    table = policy.ms if own_table and policy.ms else costs.round_ms
    check_table(table, num_drafts)
    return Resolved(policy, tuple(ms + costs.draft_ms for ms in table))


def refuse_local_table(policy: DepthPolicy) -> None:
    """Raises ValueError for a policy that no remote drafter can be priced with."""
    if policy.mode is Mode.CONFR:
        raise ValueError(
            "confr carries its own table, which was measured with the local drafter; use conf or confb, with "
            "VLLM_DSPARK_REMOTE_ROUND_MS and VLLM_DSPARK_REMOTE_DRAFT_MS"
        )


def check_table(table: Sequence[float], num_drafts: int) -> None:
    """Raises ValueError for a table by depth that is not one of 0..N."""
    if len(table) != num_drafts + 1:
        raise ValueError(
            f"{len(table)} values, but the engine drafts {num_drafts} tokens; expected {num_drafts + 1}, for depth 0 to "
            f"{num_drafts}"
        )


# Depths. Lists: for the few dozen values of a round plain Python is several times faster than as many numpy calls.


def survival(confidences: Sequence[float]) -> list[float]:
    """[N]: the chance that draft j and all before it are accepted. What is no probability, NaN too, counts as 0."""
    found, chance = [], 1.0
    for confidence in confidences:
        chance = chance * confidence if 0 <= confidence <= 1 else 0.0
        found.append(chance)
    return found


def choose_depths(
    resolved: Resolved, confidences: Sequence[Sequence[float]], is_usable: Sequence[bool], limit: int
) -> list[int]:
    """[n]: how many drafts of each request to verify; 0 where there are none.

    `confidences` [n][N], `is_usable` [n]: the request has drafts, `limit`: positions from there on are never verified.
    """
    mode = resolved.policy.mode
    if mode is Mode.OFF or mode is Mode.FIXED:
        depth = min(limit, resolved.policy.depth) if mode is Mode.FIXED else limit
        return [depth if usable else 0 for usable in is_usable]
    n = len(is_usable)
    if n == 0:
        return []
    # What cannot be accepted is not verified, whatever a common depth or a budget would leave for it.
    chances = [
        [chance for chance in survival(row[:limit]) if chance > 0] if usable else []
        for row, usable in zip(confidences, is_usable, strict=True)
    ]
    if mode is Mode.CONF:
        gains = [sum(row[depth] for row in chances if depth < len(row)) for depth in range(limit)]
        common = _best(n, gains, resolved.ms)
        return [min(common, len(row)) for row in chances]
    # The likeliest first, which takes each request's own in order, because a chance never grows; of equals the earlier position.
    ranked = sorted(
        (-chance, position, row) for row, kept in enumerate(chances) for position, chance in enumerate(kept)
    )
    if mode is Mode.CONFB:
        gains = [-sum(one[0] for one in ranked[depth * n : depth * n + n]) for depth in range(limit)]
        budget = n * _best(n, gains, resolved.ms)
    else:
        prices = [_ms_of_rows(n + drafts, resolved.policy.rows_ms) for drafts in range(len(ranked) + 1)]
        budget = _best(n, [-one[0] for one in ranked], prices)
    depths = [0] * n
    for _, _, row in ranked[:budget]:
        depths[row] += 1
    return depths


def _best(tokens: float, gains: Sequence[float], ms: Sequence[float]) -> int:
    """After how many of `gains` tokens per millisecond are most; the first of equals, which verifies least."""
    best, most = 0, tokens / ms[0]
    for taken, gain in enumerate(gains, start=1):
        tokens += gain
        if tokens / ms[taken] > most:
            best, most = taken, tokens / ms[taken]
    return best


def _ms_of_rows(rows: int, known: Sequence[tuple[int, float]]) -> float:
    """Between two known counts on the line through them, past the last on the line of the last two."""
    if rows <= known[0][0] or len(known) == 1:
        return known[0][1]
    after = next((at for at, (count, _) in enumerate(known) if count >= rows), len(known) - 1)
    (low, low_ms), (high, high_ms) = known[after - 1], known[after]
    return low_ms + (high_ms - low_ms) * (rows - low) / (high - low)


# Positions to ask for.


class NOut(NamedTuple):
    """How many draft positions to ask for, by the number of requests of a round."""

    by_requests: tuple[int, ...] | None  # index 0 unused; None: always all
    reason: str  # for or against

    def of(self, n: int, num_drafts: int) -> int:
        if self.by_requests is None or n >= len(self.by_requests):
            return num_drafts
        return self.by_requests[n]


def plan_n_out(
    policy: DepthPolicy,
    *,
    has_file: bool,
    is_shadow: bool,
    is_allowed: bool,
    caps: Sequence[int] | None,
    num_drafts: int,
) -> NOut:
    """Positions past the dynamic speculation schedule's cap are left out only where nothing can read them.

    `caps`: the schedule's cap by number of requests, index 0 unused; None where there is no schedule.
    """
    against = (
        (is_shadow, "shadow compares every position"),
        (not is_allowed, "VLLM_DSPARK_REMOTE_N_OUT=0"),
        (has_file, f"{FILE} may switch to a mode that reads every position"),
        (not policy.mode.masks, f"{POLICY}={policy.mode.value} reads every position"),
        (caps is None, "vLLM has no dynamic speculation schedule (num_speculative_tokens_per_batch_size)"),
        (caps is not None and min(caps[1:], default=num_drafts) >= num_drafts, "the schedule caps nothing"),
    )
    for holds, reason in against:
        if holds:
            return NOut(None, reason)
    assert caps is not None
    table = (0, *(min(cap, num_drafts) for cap in caps[1:]))
    return NOut(table, f"{policy.mode.value} verifies nothing past the schedule's cap")
