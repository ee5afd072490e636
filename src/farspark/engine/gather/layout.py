"""Where things stand in the gather's buffers. Read by the device side, which writes them, and by the round, which reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from farspark.engine.round import meta_columns

# The wire carries bf16 always: two bytes per value.
VALUE_BYTES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherShape:
    """What the buffers are sized by, fixed for the engine's life."""

    max_requests: int  # slots, too: a request occupies one
    max_tokens: int  # tokens that one step can hold
    taps: int
    hidden_size: int
    context: int  # newest rows per request that a step packs
    ring: int  # newest rows per slot that the ring keeps
    is_sampled: bool = False  # the metadata has seeds and temperatures

    def __post_init__(self) -> None:
        if not 1 <= self.ring <= self.context:
            # The ring is written from the packed rows, which are the newest `context`.
            raise ValueError(f"a ring of {self.ring} rows with a context of {self.context}; expected 1 to the context")

    @property
    def meta_columns(self) -> int:
        return meta_columns(is_sampled=self.is_sampled)

    @property
    def row_values(self) -> int:
        return self.taps * self.hidden_size

    @property
    def row_bytes(self) -> int:
        return self.row_values * VALUE_BYTES

    @property
    def max_rows(self) -> int:
        """Rows that one step can pack: no request more than the context, all of them no more than the step holds."""
        return min(self.max_tokens, self.max_requests * self.context)
