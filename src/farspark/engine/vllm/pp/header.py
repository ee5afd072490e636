"""What proves of a message which step's it is: the step's number and what both sides think the step is.

Pure: arrays and numbers in, numbers out.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NAMES = ("sequence", "mask hash", "num_reqs", "seal")
WORDS = len(NAMES)


@dataclass(frozen=True, slots=True)
class Header:
    """Sent as int64: an unsigned CRC-32 does not fit into int32."""

    sequence: int  # steps that exchanged tokens, from 1
    mask_hash: int  # 0 … 2^32 - 1
    num_reqs: int  # part of the header because all-false masks of different lengths may hash alike

    @property
    def seal(self) -> int:
        """0 … 2^32 - 1, over all fields: what a device compares, which looks at one word of 32 bits."""
        return zlib.crc32(struct.pack("<3q", self.sequence, self.mask_hash, self.num_reqs))

    def words(self) -> tuple[int, int, int, int]:
        """As they travel: the fields, and the seal as the last word."""
        return self.sequence, self.mask_hash, self.num_reqs, self.seal

    def difference(self, received: Sequence[int]) -> str | None:
        """Every word of `received` that is not this header's, with both values; None where all are. The seal, which differs
        wherever another word does, only where it is alone."""
        differing = {
            name: f"{name} expected {expected}, got {got}"
            for name, expected, got in zip(NAMES, self.words(), received, strict=True)
            if expected != got
        }
        if len(differing) > 1:
            differing.pop("seal", None)
        return "; ".join(differing.values()) or None


def mask_hash(mask: npt.NDArray[np.bool_], *columns: npt.NDArray[np.integer]) -> int:
    """CRC-32 over `mask` [n] (which rows need their sampled tokens) and over what decides it, each of `columns` [n].

    The columns matter in steady decoding, where every mask is all true: without them two different steps would look alike.
    """
    crc = zlib.crc32(np.ascontiguousarray(mask, dtype=np.uint8).tobytes())
    for column in columns:
        crc = zlib.crc32(np.ascontiguousarray(column, dtype="<i8").tobytes(), crc)
    return crc
