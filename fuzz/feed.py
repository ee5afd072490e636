"""An input, read as a sequence of small decisions. Reading past the end gives zeros, so every input is a whole program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Feed:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        """Of the whole input."""
        return len(self._data)

    @property
    def is_empty(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        at = self._at
        self._at = at + 1
        return self._data[at] if at < len(self._data) else 0

    def number(self, n_bytes: int) -> int:
        """Little-endian, unsigned."""
        return int.from_bytes(self.take(n_bytes), "little")

    def take(self, n_bytes: int) -> bytes:
        """Up to `n_bytes`: fewer at the end."""
        at = self._at
        self._at = at + n_bytes
        return self._data[at : at + n_bytes]

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.byte() % len(choices)]

    def size(self, largest: int) -> int:
        """0 to `largest`; most bytes give small ones."""
        first = self.byte()
        return min(first, largest) if first < 192 else self.number(3) % (largest + 1)
