"""Numbers in, findings out. No I/O: every bound of a check stands here.

`before` and `after` are snapshots of the engine's stats file around the time that is judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from farspark.check.findings import Finding, judged, noted, skipped
from farspark.check.measurement import Answer, Measurement

Snapshot = Mapping[str, Any]

# Of the rounds during a check: a round may be late now and then without a fault in the wiring.
MIN_ROUNDS_OK: Final = 0.99
MIN_ROUNDS: Final = 20
# Fewer blocks say nothing about shares of a hundredth.
MIN_BLOCKS: Final = 50
# Standard errors that two shares of accepted drafts may lie apart.
NOISE: Final = 3.0
# Two bf16 steps of logits between 16 and 32 in size: the target's own rounding between forward passes of other widths.
TIE_GAP: Final = 0.25
_MS: Final = 1000.0


def counter(snapshot: Snapshot, name: str) -> int:
    return int(snapshot.get("counters", {}).get(name, 0))


def grown(before: Snapshot, after: Snapshot, name: str) -> int:
    return counter(after, name) - counter(before, name)


def p50_us(snapshot: Snapshot, name: str) -> float | None:
    latency = snapshot.get("latency", {}).get(name)
    return float(latency["p50"]) if latency and latency.get("count") else None


def health(before: Snapshot, after: Snapshot) -> list[Finding]:
    """The worker is there, and what was asked of it was answered."""
    worker = after.get("worker", {})
    ok = grown(before, after, "rounds_ok")
    partly, failed = grown(before, after, "rounds_some_failed"), grown(before, after, "rounds_failed")
    rounds = ok + partly + failed
    reasons = ", ".join(f"{name} {n}" for name, n in _fallbacks(before, after).items())
    findings = [
        judged("worker", worker.get("state") == "ready", f"{worker.get('state')}: {worker.get('name')}", "ready"),
    ]
    if rounds < MIN_ROUNDS:
        findings.append(
            skipped("rounds that succeeded", f"{rounds} rounds are too few", f"at least {MIN_ROUNDS} rounds")
        )
    else:
        findings.append(
            judged(
                "rounds that succeeded",
                ok / rounds >= MIN_ROUNDS_OK,
                f"{ok:,} of {rounds:,} ({ok / rounds:.2%})" + (f"; {reasons}" if reasons else ""),
                f"at least {MIN_ROUNDS_OK:.0%}",
            )
        )
    stale = counter(after, "stale_generation_new_sessions")
    findings.append(judged("stale generations", stale == 0, str(stale), "0"))
    off = after.get("off_because")
    findings.append(judged("no internal error", off is None, off or "none", "none"))
    return findings


def _fallbacks(before: Snapshot, after: Snapshot) -> dict[str, int]:
    names = [name for name in after.get("counters", {}) if name.startswith("fallback_")]
    return {name: count for name in sorted(names) if (count := grown(before, after, name))}


def parity(after: Snapshot) -> list[Finding]:
    """Local and remote drafts of the same rows, over everything that the engine has compared since its start.

    By the engine's own bounds, which stand beside what it counted. Whole blocks are told and not judged: behind one near tie
    the free-running chains have nothing in common. Neither are blocks in which a router was near a tie.
    """
    shadow = after.get("shadow", {})
    blocks, ambiguous = int(shadow.get("blocks", 0)), int(shadow.get("routing_ambiguous", 0))
    told = [*_routing(shadow), *_accepted_lengths(shadow)]
    if blocks - ambiguous < MIN_BLOCKS:
        few = f"{blocks - ambiguous} blocks are too few"
        if ambiguous:
            few += (
                f": in {ambiguous:,} more a router was near a tie. Let it run longer; accepted drafts judge all of them"
            )
        return [*told, skipped("drafts compared", few, f"at least {MIN_BLOCKS}")]
    least_rate = float(shadow["bounds"]["equal_or_tie_rate"])
    most_apart = float(shadow["bounds"]["confidence_difference"])
    diverged, far, unjudged = (int(shadow.get(name, 0)) for name in ("diverged", "far_diverged", "unjudged"))
    rate = float(shadow.get("equal_or_tie_rate") or 0)
    findings = [
        *told,
        noted("whole blocks equal", f"{float(shadow['full_block_agree_rate']):.2%} of {blocks:,}"),
        judged(
            "equal or a near tie",
            rate >= least_rate,
            f"{rate:.2%} of {int(shadow.get('steps', 0)):,} drafts, {shadow.get('ties', 0)} ties, {diverged} diverged",
            f"at least {least_rate:.1%}",
        ),
        judged("drafts far off", far == 0, f"{far}, largest gap {shadow.get('largest_gap_ulps')} bf16 steps", "0"),
        judged("blocks that were not judged", unjudged == 0, str(unjudged), "0"),
    ]
    difference = shadow.get("largest_confidence_difference")
    bound = f"at most {most_apart:g}"
    if difference is None:
        findings.append(skipped("confidences", "this vLLM's local drafter computes none", bound))
    else:
        findings.append(judged("confidences", difference <= most_apart, f"differ by {difference:.4f} at most", bound))
    return findings


def _routing(shadow: Mapping[str, Any]) -> list[Finding]:
    """What a router kept out of the comparison; nothing of a drafter without one."""
    if shadow.get("has_router"):
        ambiguous, bound = int(shadow["routing_ambiguous"]), float(shadow["bounds"]["routing_margin"])
        kept_out = f"{ambiguous:,} of {int(shadow['blocks']):,}, with a margin below {bound:g}"
        return [noted("blocks kept out: a router near a tie", kept_out)]
    if shadow.get("blocks") and shadow.get("has_router") is None:
        why = "this worker is too old to say; if the drafter has a router, confidences may fail without being wrong"
        return [noted("routing", why)]
    return []


def _accepted_lengths(shadow: Mapping[str, Any]) -> list[Finding]:
    """Judged where a router leaves the drafts themselves in doubt, and where there are enough; told otherwise."""
    lengths = shadow.get("accepted_lengths")
    if not lengths or lengths["difference"] is None:
        return []
    what = "drafts accepted of a block, local and remote"
    found = f"{lengths['local']:.3f} and {lengths['remote']:.3f} ({lengths['difference']:+.2%}) of {lengths['blocks']:,} blocks"
    if not shadow.get("has_router"):
        return [noted(what, found)]
    bound = f"within {lengths['bound']:.0%} of each other"
    if lengths["passes"] is None:
        return [skipped(what, f"{found}, too few", f"{bound}, {lengths['enough_blocks']:,} blocks")]
    return [judged(what, lengths["passes"], found, bound)]


def acceptance(now: Measurement, baseline: Measurement) -> list[Finding]:
    """Accepted over drafted, within what the number of rounds lets one expect."""
    a, b = now.metrics, baseline.metrics
    if min(a.drafts, b.drafts) < MIN_BLOCKS:
        return [
            skipped("accepted drafts", f"{a.drafts} and {b.drafts} rounds are too few", f"at least {MIN_BLOCKS} each")
        ]
    share_a, share_b = a.accepted / a.drafted, b.accepted / b.drafted
    pooled = (a.accepted + b.accepted) / (a.drafted + b.drafted)
    # The drafts of a round stand and fall together, so that rounds are counted and not drafts.
    error = math.sqrt(pooled * (1 - pooled) * (1 / a.drafts + 1 / b.drafts))
    bound = NOISE * error
    return [
        judged(
            "accepted drafts",
            abs(share_a - share_b) <= bound,
            f"{share_a:.2%} of {a.drafted:,}, baseline {share_b:.2%} of {b.drafted:,}",
            f"within {bound:.2%} of the baseline",
        )
    ]


DRAFT_MS: Final = "VLLM_DSPARK_REMOTE_DRAFT_MS"
ROUND_MS: Final = "VLLM_DSPARK_REMOTE_ROUND_MS"


def cost_settings(after: Snapshot, round_ms: Sequence[float] | None) -> dict[str, str]:
    """The cost settings of the remote modes, as far as the measurements reach; see `timing`."""
    settings = {}
    remote_us, local_us = p50_us(after, "rank0_round_us"), p50_us(after, "local_propose_us")
    if remote_us is not None:
        settings[DRAFT_MS] = f"{remote_us / _MS:.3f}"
    if local_us is not None and round_ms is not None:
        settings[ROUND_MS] = ",".join(f"{one - local_us / _MS:.3f}" for one in round_ms)
    return settings


def timing(after: Snapshot, round_ms: Sequence[float] | None) -> list[Finding]:
    """Whether both cost settings can be had from what shadow has measured.

    `round_ms`: the live table VLLM_DSPARK_ROUND_MS, milliseconds by depth. Its rounds contain the local drafter; what is
    left without it is a round that only verifies.
    """
    remote_us, local_us = p50_us(after, "rank0_round_us"), p50_us(after, "local_propose_us")
    findings = []
    for what, us, name in (
        ("remote round", remote_us, "rank0_round_us"),
        ("local draft", local_us, "local_propose_us"),
    ):
        bound = f"{name} has been timed"
        if us is None:
            findings.append(skipped(what, "no round has been timed in shadow", bound))
        else:
            findings.append(judged(what, us > 0, f"{us / _MS:.3f} ms (p50)", bound))
    if round_ms is None:
        why = "needs this engine's live table with its local drafter: give --round-ms, or set VLLM_DSPARK_ROUND_MS"
        findings.append(skipped(ROUND_MS, why, "one time per depth, 0 to k"))
    elif local_us is not None:
        table = [one - local_us / _MS for one in round_ms]
        holds = min(table) > 0 and all(a <= b for a, b in itertools.pairwise(table))
        findings.append(
            judged(
                ROUND_MS,
                holds,
                f"{table[0]:.3f} to {table[-1]:.3f} ms, the live table less the local draft",
                "above 0 and never falling with depth; else the table is of another local drafter",
            )
        )
    return findings


def saved_memory(after: Snapshot, now: Measurement, baseline: Measurement) -> list[Finding]:
    """What capacity does not take, on every rank."""
    findings = []
    for name, gib in (after.get("not_allocated") or {}).items():
        if gib is not None:
            findings.append(noted(f"not allocated: {name}", f"{int(gib):,}"))
    if now.memory is None or baseline.memory is None:
        findings.append(
            skipped("load size", "give --log here and for the baseline: vLLM's own log names it for every rank")
        )
    elif now.memory.is_of_cpu or baseline.memory.is_of_cpu:
        why = "on a CPU vLLM's log says how much less of the machine's memory is free, whoever took it"
        findings.append(skipped("load size", why, "below the baseline"))
    else:
        findings += _less("load size", now.memory.load_gib, baseline.memory.load_gib)
        findings += _less("graph memory", now.memory.graph_gib, baseline.memory.graph_gib, or_equal=True)
    findings += more_kv(now, baseline, or_equal=True)
    return findings


def _less(
    what: str, now: Mapping[str, float], baseline: Mapping[str, float], *, or_equal: bool = False
) -> list[Finding]:
    ranks = sorted(set(now) & set(baseline))
    if not ranks:
        return [skipped(what, "the logs do not name it for the same processes")]
    return [
        judged(
            f"{what}, {rank}",
            now[rank] < baseline[rank] or (or_equal and now[rank] == baseline[rank]),
            f"{now[rank]:.2f} GiB, baseline {baseline[rank]:.2f} GiB",
            "not above the baseline" if or_equal else "below the baseline",
        )
        for rank in ranks
    ]


def more_kv(now: Measurement, baseline: Measurement, *, or_equal: bool = False) -> list[Finding]:
    tokens, before = now.metrics.kv_tokens, baseline.metrics.kv_tokens
    bound = "not below the baseline" if or_equal else "above the baseline"
    if tokens is None or before is None:
        return [skipped("KV cache", "this vLLM's /metrics does not say", bound)]
    findings = [
        judged(
            "KV cache",
            tokens > before or (or_equal and tokens == before),
            f"{tokens:,} tokens, baseline {before:,}",
            bound,
        )
    ]
    a, b = now.concurrency, baseline.concurrency
    if a is None or b is None:
        findings.append(skipped("concurrency", "/v1/models does not say how long a request may be", bound))
    else:
        findings.append(
            judged("concurrency", a > b or (or_equal and a == b), f"{a:.2f} full requests, baseline {b:.2f}", bound)
        )
    return findings


def sane(now: Measurement) -> list[Finding]:
    """Every prompt has an answer."""
    bad = [
        number
        for number, answer in enumerate(now.answers, start=1)
        if not answer.text.strip() or answer.finished not in ("stop", "length")
    ]
    return [
        judged(
            "answers",
            not bad,
            f"{len(now.answers) - len(bad)} of {len(now.answers)} whole" + (f", not {bad}" if bad else ""),
            "every one has text and an end",
        )
    ]


def same_text(now: Measurement, baseline: Measurement) -> list[Finding]:
    """Greedy answers are the baseline's, token for token, but for ties within the target's own rounding."""
    if now.questions != baseline.questions:
        return [skipped("text", "the baseline was asked other questions", "the same prompts and limits")]
    equal = ties = unknown = 0
    wrong: list[str] = []
    for number, (answer, expected) in enumerate(zip(now.answers, baseline.answers, strict=True), start=1):
        at = first_difference(answer, expected)
        if at is None:
            equal += 1
        elif (tie := _is_tie(answer, expected, at)) is None:
            unknown += 1
        elif tie:
            ties += 1
        else:
            wrong.append(f"answer {number} at token {at}")
    measured = f"{equal} of {len(now.answers)} equal, {ties} up to a near tie"
    bound = f"equal, or the target's two best within {TIE_GAP} where they part"
    if unknown and not wrong:
        return [skipped("text", f"{measured}, {unknown} differ and the server told no logprobs to judge by", bound)]
    return [judged("text", not wrong, measured + (f"; WRONG: {', '.join(wrong)}" if wrong else ""), bound)]


def first_difference(answer: Answer, expected: Answer) -> int | None:
    """The first token that differs, or where one of them ends; None: the same."""
    for at, (a, b) in enumerate(zip(answer.tokens, expected.tokens, strict=False)):
        if a != b:
            return at
    return None if len(answer.tokens) == len(expected.tokens) else min(len(answer.tokens), len(expected.tokens))


def _is_tie(answer: Answer, expected: Answer, at: int) -> bool | None:
    """Whether the two parted where the target itself hardly knew; None where the baseline does not tell."""
    if at >= len(expected.gaps) or at >= len(answer.tokens) or expected.gaps[at] is None:
        return None if not expected.gaps else False
    gap = expected.gaps[at]
    assert gap is not None
    return gap <= TIE_GAP and answer.tokens[at] == expected.second_best[at]


def speed(now: Measurement, baseline: Measurement) -> list[Finding]:
    if not baseline.tokens_per_s:
        return []
    ratio = now.tokens_per_s / baseline.tokens_per_s
    return [
        noted(
            "speed",
            f"{now.tokens_per_s:.1f} tokens/s, baseline {baseline.tokens_per_s:.1f} ({ratio:.2f} times)",
        )
    ]


def prefix_cache(now: Measurement, baseline: Measurement) -> list[Finding]:
    """Of a long prompt's second time nothing is computed again that need not be.

    The baseline is not enough: vLLM drops the last block of every hit for a local drafter's sake, so one with a drafter has
    lost it too.
    """
    bound = "as many as the baseline"
    if now.cached_tokens is None or baseline.cached_tokens is None:
        return [skipped("cached tokens", "not measured", bound)]
    if now.questions != baseline.questions:
        return [skipped("cached tokens", "the baseline was asked other questions", bound)]
    if not now.cached_tokens and not baseline.cached_tokens:
        why = (
            "nothing was found again, nor by the baseline: is the prefix cache on, and the prompt longer than a block?"
        )
        return [skipped("cached tokens", why, bound)]
    return [
        judged(
            "cached tokens",
            now.cached_tokens >= baseline.cached_tokens,
            f"{now.cached_tokens:,} of the second time, baseline {baseline.cached_tokens:,}",
            f"{bound}; if not, start C-capacity-nodrop",
        ),
        _last_block(now, baseline),
    ]


def _last_block(now: Measurement, baseline: Measurement) -> Finding:
    """Only the block with the prompt's last token has to be computed again, because that token has to be."""
    cached, block, prompt = now.cached_tokens, now.metrics.block_tokens, now.long_prompt_tokens
    bound = "no whole block is computed again"
    if cached is None or block is None or prompt is None:
        return skipped("the last block", "this vLLM's /metrics does not say how long a block is", bound)
    measured = f"{prompt - cached} of {prompt:,} tokens computed again, in blocks of {block}"
    if prompt - cached > block and not baseline.metrics.drafts:
        # Without speculation nothing is dropped: what that does not find no policy can.
        return noted("the last block", f"{measured}, as without speculation")
    return judged("the last block", prompt - cached <= block, measured, f"{bound}; if not, start C-capacity-nodrop")


def outage(policy: str, before: Snapshot, down: Snapshot, *, generated: int) -> list[Finding]:
    """The time without a worker, from `before` to `down`; `generated` tokens were made in it."""
    failed = grown(before, down, "rounds_failed") + grown(before, down, "rounds_some_failed")
    reasons = ", ".join(f"{name} {n}" for name, n in _fallbacks(before, down).items())
    findings = [
        judged(
            "rounds without the worker", failed > 0, f"{failed}: {reasons or 'no reason counted'}", "counted, above 0"
        ),
        judged("output while it is gone", generated > 0, f"{generated} tokens", "above 0"),
    ]
    if policy == "resilience":
        local = grown(before, down, "local_fallback_rounds")
        findings.append(judged("local rounds", local > 0, str(local), "counted, above 0"))
    return findings


def recovery(down: Snapshot, after: Snapshot) -> list[Finding]:
    """The time since the worker came back."""
    hellos, ok = grown(down, after, "hellos"), grown(down, after, "rounds_ok")
    resyncs = grown(down, after, "resync_rounds")
    stale = counter(after, "stale_generation_new_sessions")
    return [
        judged("sessions after its return", hellos == 1, str(hellos), "exactly 1 more HELLO"),
        judged("rounds that succeed again", ok > 0, str(ok), "above 0"),
        judged("windows sent again", resyncs > 0, f"{resyncs} resync rounds", "above 0"),
        judged("stale generations", stale == 0, str(stale), "0"),
    ]


def nobody_failed(answers: int, errors: Sequence[str]) -> list[Finding]:
    return [
        judged(
            "requests during the drill",
            answers > 0 and not errors,
            f"{answers} answered, {len(errors)} failed" + (f": {errors[0]}" if errors else ""),
            "none failed",
        )
    ]
