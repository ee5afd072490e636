"""The numbers of the wire: magic, version, operations, statuses, flags, struct formats, limits. `docs/wire.md` is normative."""

from __future__ import annotations

import enum
import struct
from typing import Final

MAGIC: Final = b"FSPK"
VERSION: Final = 1
IDENTITY_BYTES: Final = 32
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32


class Operation(enum.IntEnum):
    """What a frame is. A reply carries the operation that it answers and the flag REPLY."""

    HELLO = 1
    STEP = 2
    PING = 3
    STATS = 4
    FREE = 5
    BYE = 6
    JUDGE = 7
    CHALLENGE = 8
    PROVE = 9


class HeaderFlag(enum.IntFlag):
    REPLY = 1
    DRAINING = 2  # in replies: the worker is about to go


class FrameStatus(enum.IntEnum):
    """The fate of a whole frame, in replies."""

    OK = 0
    NO_SESSION = 1
    VERSION = 2
    IDENTITY = 3
    MARKOV_IDENTITY = 4
    CONFIG = 5
    AUTH = 6
    BUSY = 7
    INTERNAL = 8
    BAD_FRAME = 9

    @property
    def is_final(self) -> bool:
        """True where the same engine and the same worker can never agree: it is not asked again until a restart."""
        return self in _FINAL


_FINAL: Final = frozenset(
    {FrameStatus.VERSION, FrameStatus.IDENTITY, FrameStatus.MARKOV_IDENTITY, FrameStatus.CONFIG, FrameStatus.AUTH}
)


class RequestStatus(enum.IntEnum):
    """The fate of one request of a STEP, from best to worst: those with drafts, the other usable one, the failures."""

    has_drafts: bool
    is_usable: bool  # the worker holds what rank 0 believes it holds

    OK = 0
    PARTIAL_WINDOW = 1
    NOT_NEEDED = 2
    STALE_GENERATION = 3
    NO_WINDOW = 4
    GAP = 5
    BAD_ENTRY = 6
    NO_CAPACITY = 7
    INTERNAL = 8

    def __init__(self, number: int) -> None:
        # Attributes: asked several times for every request of a round, and a property that compares takes ten times as long.
        self.has_drafts = number <= 1
        self.is_usable = number <= 2


class HelloFlag(enum.IntFlag):
    MARGINS = 1
    SAMPLED = 2
    ROUTING = 4  # judgements say how close the choices of experts were; not granted: this peer is too old to know
    ROUTER = 8  # in a welcome that grants ROUTING: the drafter has a router, hence routing margins


class StepFlag(enum.IntFlag):
    MARGINS = 1
    SAMPLED = 2


class JudgementFlag(enum.IntFlag):
    ROUTING = 1


class EntryFlag(enum.IntFlag):
    NEED_DRAFT = 1
    NEW_GEN = 2
    RESYNC = 4


class Dtype(enum.IntEnum):
    """Element type of the rows."""

    BF16 = 1


# magic, version, operation, flags, session, sequence, frame status, reserved, payload bytes
HEADER: Final = struct.Struct("<4sHBBQQHHI")
# identity, Markov identity, row bytes, hidden size, ring, context, vocabulary, slots, N, taps, dtype, flags, name bytes,
# instance; then the engine's name
HELLO: Final = struct.Struct("<32s32sIIIIIHHHHHHQ")
# identity, Markov identity, vocabulary, context, window, slots, rows per STEP, N, flags, kind bytes, name bytes,
# message bytes, lease in tenths of a second; then kind, name, message
WELCOME: Final = struct.Struct("<32s32sIIIIIHHHHHH")
# step id, requests, flags, rows
STEP: Final = struct.Struct("<QHHI")
# slot, generation, first position, rows, anchor token, anchor position, flags, k_window, n_out, 2 reserved bytes
ENTRY: Final = struct.Struct("<IIIIiIHHH2x")
# of each entry of a sampled STEP, behind all entries: seed, temperature, 4 reserved bytes
SAMPLING: Final = struct.Struct("<qf4x")
# step id, requests, N, flags, reserved, worker microseconds, reserved
STEP_REPLY: Final = struct.Struct("<QHHHHII")
# slot, generation, window rows, status, 2 reserved bytes
ENTRY_REPLY: Final = struct.Struct("<IIIH2x")
# slot count; then slot, generation each
FREE: Final = struct.Struct("<I")
FREE_ENTRY: Final = struct.Struct("<II")
# step id, chains, N, reserved; then each chain's place among the step's entries, then the chains
JUDGE: Final = struct.Struct("<QHHI")
# step id, chains, N, flags; then best ids, gaps, peaks and confidences, and where flagged routing margins
JUDGE_REPLY: Final = struct.Struct("<QHHI")
# the engine's nonce
CHALLENGE: Final = struct.Struct("<32s")
# the worker's nonce, whether it demands a proof, reserved
CHALLENGE_REPLY: Final = struct.Struct("<32sHH")
# identity, Markov identity, proof; both ways
PROVE: Final = struct.Struct("<32s32s32s")

# A frame larger than this is refused on its header alone. 256 MiB holds 4 full resyncs of 512 rows of 51,200 bytes
# (the widest published row) with room for every prefill chunk that fits a context.
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
# Until HELLO has opened a session. Everything that comes before it is small, and whoever sends it is not known yet.
MAX_GREETING_BYTES: Final = 64 * 1024
# Replies are small but for STATS; an engine never reserves more than this for one.
MAX_REPLY_BYTES: Final = 4 * 1024 * 1024
MAX_REQUESTS: Final = 4096
MAX_DRAFTS: Final = 64
# Ids whose probabilities a sampled reply has for each draft position: the most probable ones, all that may be drawn.
SUPPORT_IDS: Final = 32
MAX_NAME_BYTES: Final = 256
MAX_MESSAGE_BYTES: Final = 4096
MAX_POSITION: Final = 1 << 31
MAX_TOKEN: Final = (1 << 31) - 1
