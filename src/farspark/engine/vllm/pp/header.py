"""What every step's broadcasts begin with: the step's number and what both sides think the step is.

Pure: arrays and numbers in, numbers out.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORDS = 3


@dataclass(frozen=True, slots=True)
class Header:
    """Sent as int64: an unsigned CRC-32 does not fit into int32."""

    sequence: int  # steps that exchanged tokens, from 1
    mask_hash: int  # 0 … 2^32 - 1
    num_reqs: int  # part of the header because all-false masks of different lengths may hash alike

    def words(self) -> tuple[int, int, int]:
        return self.sequence, self.mask_hash, self.num_reqs

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Header:
        sequence, mask_hash, num_reqs = (int(word) for word in words)
        return cls(sequence, mask_hash, num_reqs)

    def difference(self, received: Header) -> str | None:
        """Every field in which `received` is not this header, with both values; None where it is equal."""
        parts = [
            f"{name} expected {expected}, got {got}"
            for name, expected, got in zip(
                ("sequence", "mask hash", "num_reqs"), self.words(), received.words(), strict=True
            )
            if expected != got
        ]
        return "; ".join(parts) or None


def mask_hash(mask: npt.NDArray[np.bool_], *columns: npt.NDArray[np.integer]) -> int:
    """CRC-32 over `mask` [n] (which rows need their sampled tokens) and over what decides it, each of `columns` [n].

    The columns matter in steady decoding, where every mask is all true: without them two different steps would look alike.
    """
    crc = zlib.crc32(np.ascontiguousarray(mask, dtype=np.uint8).tobytes())
    for column in columns:
        crc = zlib.crc32(np.ascontiguousarray(column, dtype="<i8").tobytes(), crc)
    return crc
