"""What the two sides say to each other, as values. Field meanings are those of `docs/wire.md`.

What is made in every round is a named tuple: a frozen dataclass takes four times as long to make. Most have
a maker (`make_entry`), which takes all fields as one tuple and checks nothing: a named tuple's own constructor is
Python code. Flags are plain integers, made of the enums' members: the operators of enum.IntFlag take a microsecond each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from farspark.wire.layout import (
    VERSION,
    EntryFlag,
    FrameStatus,
    HeaderFlag,
    HelloFlag,
    Operation,
    RequestStatus,
)

_REPLY, _DRAINING = int(HeaderFlag.REPLY), int(HeaderFlag.DRAINING)
_NEED_DRAFT, _NEW_GEN = int(EntryFlag.NEED_DRAFT), int(EntryFlag.NEW_GEN)


class Header(NamedTuple):
    """The application header in front of every payload."""

    operation: Operation | int  # an int where the peer's operation is not one of ours
    session: int  # 64 bits, random, made by the engine at HELLO; 0 outside a session
    sequence: int  # echoed by the reply
    payload_bytes: int
    flags: int = 0  # of HeaderFlag
    status: FrameStatus | int = FrameStatus.OK
    version: int = VERSION

    @property
    def is_reply(self) -> bool:
        return bool(int(self.flags) & _REPLY)

    @property
    def is_draining(self) -> bool:
        """In a reply: the worker is about to go."""
        return bool(int(self.flags) & _DRAINING)


make_header: Callable[[tuple[Any, ...]], Header] = functools.partial(tuple.__new__, Header)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who the engine is and what it needs. Starts a new session: windows of this engine's previous one are dropped."""

    engine: str
    identity: bytes  # 32 bytes
    markov_identity: bytes  # 32 bytes; zeros: not checked
    row_bytes: int
    taps: int
    hidden_size: int
    dtype: int
    ring: int  # newest rows that rank 0 can send again
    context: int  # newest positions the drafter may see
    num_drafts: int  # N
    slots: int
    vocab_size: int
    flags: HelloFlag = HelloFlag(0)
    instance: int = 0  # 64 bits, random, one per engine process: its newer session ends its older ones; 0: none to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The worker's answer to HELLO, also when it refuses: then `message` says what differs, with both values."""

    worker: str
    kind: str
    identity: bytes
    markov_identity: bytes
    vocab_size: int
    context: int  # what both sides use: the smaller of the two
    window: int  # the drafter's own sliding window; 0 for full attention
    slots: int
    max_rows: int  # rows per STEP
    num_drafts: int
    flags: HelloFlag = HelloFlag(0)
    message: str = ""
    lease_s: float = 0.0  # in tenths; a session that is silent for longer ends; 0: none does

    @property
    def has_router(self) -> bool | None:
        """Whether the drafter chooses experts by a router; None where the peer is too old to say."""
        return bool(self.flags & HelloFlag.ROUTER) if self.flags & HelloFlag.ROUTING else None


class Entry(NamedTuple):
    """One request of a STEP."""

    slot: int
    generation: int
    first_pos: int
    n_rows: int
    anchor_token: int
    anchor_pos: int
    flags: int  # of EntryFlag
    k_window: int = 0  # drafts that the target verified in this step; 0 for prefill
    n_out: int = 0  # draft positions wanted; 0 = all N

    @property
    def needs_draft(self) -> bool:
        return bool(int(self.flags) & _NEED_DRAFT)

    @property
    def is_new(self) -> bool:
        return bool(int(self.flags) & _NEW_GEN)


make_entry: Callable[[tuple[Any, ...]], Entry] = functools.partial(tuple.__new__, Entry)


class Sampling(NamedTuple):
    """How one request's drafts are drawn."""

    seed: int  # 64 bits, signed: of the request
    temperature: float  # float32, 0 or more; 0: the most probable token, nothing is drawn


make_sampling: Callable[[tuple[Any, ...]], Sampling] = functools.partial(tuple.__new__, Sampling)


class Step(NamedTuple):
    """One round. `rows` are the rows of all entries, packed in entry order."""

    step_id: int
    entries: Sequence[Entry]
    rows: memoryview
    flags: int = 0  # of StepFlag
    sampling: Sequence[Sampling] = ()  # [entries] in a sampled STEP, else empty


class EntryReply(NamedTuple):
    slot: int
    generation: int
    window_rows: int  # how many rows the worker holds for the slot after this step
    status: RequestStatus


make_entry_reply: Callable[[tuple[Any, ...]], EntryReply] = functools.partial(tuple.__new__, EntryReply)


class SampledDrafts(NamedTuple):
    """What the drafts of a sampled STEP were drawn from. Arrays are flat, row-major."""

    mask: memoryview  # int32 [entries]: 1: this entry's drafts were drawn from q; 0: they are greedy, or there are none
    support: memoryview  # int32 [entries * N * SUPPORT_IDS], the ids that could be drawn; zeros where the mask is 0
    q: memoryview[Any]  # float32 [entries * N * SUPPORT_IDS], their probabilities


class StepReply(NamedTuple):
    """Drafts of one round; N is `num_drafts`. Arrays are flat, `[entries * N]`, row-major."""

    step_id: int
    num_drafts: int
    worker_us: int  # the worker's own time for the step
    entries: Sequence[EntryReply]
    tokens: memoryview  # int32
    confidences: memoryview[Any]  # float32
    margins: memoryview[Any] | None = None  # float32, top-1 minus top-2 logit
    flags: int = 0  # of StepFlag
    sampled: SampledDrafts | None = None  # in a sampled reply


make_step_reply: Callable[[tuple[Any, ...]], StepReply] = functools.partial(tuple.__new__, StepReply)


class Judge(NamedTuple):
    """Drafts of another drafter, for the newest step of the session, to be judged by this one."""

    step_id: int
    num_drafts: int
    places: Sequence[int]  # each chain's entry of that step
    tokens: memoryview  # int32 [chains * N]


class Judgement(NamedTuple):
    """What the drafter thinks of given chains: at each position its logits L with the chain's own tokens in front of it.

    Arrays but the last are flat, `[chains * N]`, row-major.
    """

    step_id: int
    num_drafts: int
    best: memoryview  # int32, the id of the greatest logit
    gaps: memoryview[Any]  # float32, max L - L[the chain's token]
    peaks: memoryview[Any]  # float32, max |L|
    confidences: memoryview[Any]  # float32
    routing: memoryview[Any] | None = None  # float32 [chains], the smallest routing margin of the chain's draft


@dataclass(frozen=True, slots=True)
class Freed:
    """A slot that the engine is done with."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """One side's proof that it holds the token, and who it claims to be."""

    identity: bytes  # 32 bytes; zeros: a probe that opens no session
    markov_identity: bytes  # 32 bytes
    proof: bytes  # 32 bytes
