"""What both processes of a drill know of each other: the drafter's shape and the rows. Worker and engine are told the rest."""

from __future__ import annotations

import functools
import random

from tests.fakes.drafters import info

from farspark.worker.batch import DrafterInfo

SLOTS = 4
CONTEXT = 12
# As with a sliding window: what rank 0 can send again is all that the drafter can see, so a draft is always exact.
RING = CONTEXT


def drafter_info(hidden_size: int, identity: int) -> DrafterInfo:
    """A row is 4 bytes times `hidden_size`; `identity` tells checkpoints apart."""
    return info(slots=SLOTS, context=CONTEXT, hidden_size=hidden_size, identity=bytes([identity]) * 32)


# The upper byte of a bfloat16 of 0.5 to 2, either sign, by a random byte.
_UPPER = bytes(0x3F | (byte & 0x80) for byte in range(256))


# Those that a round may send again are made before it: making them is not what is measured.
@functools.lru_cache(maxsize=4 * SLOTS * RING)
def row_of(request: int, position: int, row_bytes: int) -> bytes:
    """The row of one position, as finite bfloat16 values: no two are alike."""
    half = random.Random(request << 32 | position).randbytes(row_bytes // 2)
    row = bytearray(row_bytes)
    row[0::2], row[1::2] = half, half[::-1].translate(_UPPER)
    return bytes(row)
