"""What a worker's reply must be, given what it was asked: replies are checked, not trusted. Pure."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np

from farspark.native.round_calls import ready_round_calls
from farspark.wire.layout import EntryFlag, RequestStatus
from farspark.wire.messages import Entry, Judge, Judgement, StepReply

# Names of the module, the flag a plain integer: members of enums and their operators are slow, and a round asks for
# every entry.
_NOT_NEEDED: Final = RequestStatus.NOT_NEEDED
_NEED_DRAFT: Final = int(EntryFlag.NEED_DRAFT)
_ONE: Final = 0x3F800000  # the bits of 1.0 in float32


def find_fault(
    reply: StepReply,
    entries: Sequence[Entry],
    *,
    step_id: int,
    num_drafts: int,
    vocab_size: int,
    context: int,
    want_margins: bool,
    want_sampled: bool = False,
) -> str | None:
    """Why `reply` cannot be the answer to `entries`, as a sentence with the values; None if it can."""
    calls = ready_round_calls()
    if (
        calls is not None
        and not want_sampled
        and reply.sampled is None
        and calls.is_faultless(reply, entries, step_id, num_drafts, vocab_size, context, want_margins)
    ):
        return None  # almost always; where it does not say so, what follows says what is right
    if reply.step_id != step_id:
        return f"reply to step {reply.step_id}, in flight is {step_id}"
    if reply.num_drafts != num_drafts or len(reply.entries) != len(entries):
        return f"{len(reply.entries)} entries by {reply.num_drafts} drafts, asked were {len(entries)} by {num_drafts}"
    if want_margins != (reply.margins is not None):
        return f"margins {'missing' if want_margins else 'sent unasked'}"
    if want_sampled != (reply.sampled is not None):
        return f"probabilities {'missing' if want_sampled else 'sent unasked'}"
    # As unsigned integers, where one comparison sees a negative id, and a float32 of 0 to 1 is at most the 1.0. For the few
    # dozen values of a round this is several times faster than numpy.
    form = _unsigned(len(entries) * num_drafts)
    tokens: Sequence[int]
    confidences: Sequence[float]
    tokens, confidences = form.unpack(reply.tokens), form.unpack(reply.confidences)
    are_in_range = max(tokens, default=0) < vocab_size and max(confidences, default=0) <= _ONE
    if not are_in_range:
        tokens, confidences = reply.tokens.tolist(), reply.confidences.tolist()
    stray: list[int] = []
    end = 0
    for asked, (slot, generation, window_rows, status) in zip(entries, reply.entries, strict=True):
        asked_slot, asked_generation, _, _, _, _, flags, _, n_out = asked
        if slot != asked_slot or generation != asked_generation:
            return (
                f"answer for slot {slot} generation {generation}, asked was slot {asked_slot} "
                f"generation {asked_generation}"
            )
        if window_rows > context:
            return f"slot {slot}: window of {window_rows} rows, the context is {context}"
        if status.has_drafts:
            if not flags & _NEED_DRAFT:
                return f"slot {slot}: status {status.name} though no draft was asked for"
            wanted = n_out or num_drafts
        else:
            if status is _NOT_NEEDED and asked.needs_draft:
                return f"slot {slot}: status NOT_NEEDED though a draft was asked for"
            wanted = 0
        beyond, end = end + wanted, end + num_drafts
        if beyond < end and (any(tokens[beyond:end]) or any(confidences[beyond:end])):
            stray.append(slot)
    if not are_in_range:
        wrong = [not 0 <= one < vocab_size for one in tokens]
        if any(wrong):
            return f"draft id {_first(tokens, wrong, num_drafts)}, the vocabulary has {vocab_size}"
        # NaN fails every comparison. -0.0 comes here, too, and passes.
        wrong = [not 0 <= one <= 1 for one in confidences]
        if any(wrong):
            return f"confidence {_first(confidences, wrong, num_drafts)}, expected 0 to 1"
    if reply.margins is not None:
        margins = reply.margins.tolist()
        if not (min(margins) >= 0 and sum(margins) >= 0):
            wrong = [not one >= 0 for one in margins]
            return f"margin {_first(margins, wrong, num_drafts)}, expected 0 or more"
    return f"slot {stray[0]}: drafts past the positions asked for" if stray else None


def find_fault_of_judgement(judgement: Judgement, judge: Judge, vocab_size: int, *, has_router: bool) -> str | None:
    """Why `judgement` cannot be the answer to `judge`; None if it can. `has_router`: the welcome said so."""
    wanted = len(judge.places) * judge.num_drafts
    if (judgement.step_id, judgement.num_drafts, len(judgement.best)) != (judge.step_id, judge.num_drafts, wanted):
        return f"judgement of {len(judgement.best)} drafts of step {judgement.step_id}, asked were {wanted} of {judge.step_id}"
    best, confidences = np.asarray(judgement.best), np.asarray(judgement.confidences)
    if not ((best >= 0) & (best < vocab_size)).all():
        return f"judgement with an id outside 0 .. {vocab_size - 1}"
    for name, values in (("gap", np.asarray(judgement.gaps)), ("peak", np.asarray(judgement.peaks))):
        if not (np.isfinite(values) & (values >= 0)).all():
            return f"judgement with a {name} that is not finite or below 0"
    if not ((confidences >= 0) & (confidences <= 1)).all():
        return "judgement with a confidence outside 0 to 1"
    if judgement.routing is None:
        return "judgement without routing margins, from a drafter with a router" if has_router else None
    if not has_router:
        return "judgement with routing margins, from a drafter without a router"
    wrong = [one for one in judgement.routing.tolist() if not 0 <= one < math.inf]
    return f"judgement with a routing margin of {wrong[0]:g}, expected a finite number, 0 or more" if wrong else None


def _first(values: Sequence[float], wrong: Sequence[bool], num_drafts: int) -> str:
    """The first value that is wrong, with its place."""
    at = wrong.index(True)
    return f"{values[at]} at entry {at // num_drafts}, position {at % num_drafts}"


@functools.lru_cache(maxsize=64)
def _unsigned(count: int) -> struct.Struct:
    return struct.Struct(f"={count}I")
