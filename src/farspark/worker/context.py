"""What the drafter remembers: what its model keeps of every position (keys and values, or a latent), by slot and position.

Position p of a slot lies at ring index `p mod context`. Nothing marks an entry as valid: which positions a draft may see
is said by each request (`visible_from <= p < anchor_pos`), and only those are ever read. An index that is not visible is
replaced by the index of a row of zeros, so a stale or never written entry, NaN included, cannot reach a product (masking
the scores alone would not do: 0 · NaN is NaN in the weighted sum of values).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.errors import ConfigError
from farspark.worker.memory import HEADROOM_BYTES, require_memory

RingAttention = Callable[..., Tensor]
# Longer heads leave a GPU's program no room for keys and values beside each other: the models' own attention serves those.
LONGEST_FUSED_HEAD_BYTES = 1024

SMALLER_CONTEXT = "lower the context or the slots (--context, --slots)"


class Ring(NamedTuple):
    """What the requests of a batch see of one layer, where it lies."""

    entries: Tensor  # [rows, *entry]: position p of a slot at row `slot * context + p % context`
    slots: Tensor  # int64 [B], as the next two
    anchors: Tensor
    visible_from: Tensor
    visible: int  # bounds `anchors - visible_from`
    context: int


@dataclass(frozen=True, slots=True)
class ContextShape:
    """Sizes of a store."""

    layers: int
    entry: tuple[int, ...]  # what one position takes in one layer: (2, kv heads, head_dim) for keys and values
    slots: int
    context: int  # positions kept per slot
    block: int  # positions of the longest block
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        """Per layer: the slots, the row of zeros, the scratch row, and one block per slot."""
        return self.slots * self.context + 2 + self.slots * self.block

    @property
    def byte_count(self) -> int:
        return self.layers * self.rows * math.prod(self.entry) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"a context of {self.context} positions for {self.slots} slots"


class ContextStore:
    """Used under the drafting lock, by one thread at a time. Raises ConfigError when the device has not got the memory."""

    def __init__(self, shape: ContextShape, device: torch.device, attention: RingAttention | None = None) -> None:
        """`attention`: the device's own over keys and values, as `ring_attention.attend_ring`; None: that of the models."""
        self.shape = shape
        self.attention = attention if shape.entry[-1] * shape.dtype.itemsize <= LONGEST_FUSED_HEAD_BYTES else None
        self.zero_row = shape.slots * shape.context  # always zeros, never written
        self.scratch_row = self.zero_row + 1  # written for padding, never read
        self._block_row = self.zero_row + 2  # entries of the block in flight, one layer after the other
        require_memory(f"{shape} with room to work", shape.byte_count + HEADROOM_BYTES, device, SMALLER_CONTEXT)
        try:
            # Zeroed, so that the memory is really taken here and not when a request arrives.
            self.entries = torch.zeros((shape.layers, shape.rows, *shape.entry), dtype=shape.dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ConfigError(
                f"{shape} takes {shape.byte_count:,} bytes on {device}, which cannot be had ({error}); {SMALLER_CONTEXT}"
            ) from error

    def destinations(self, slot: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """Rows of positions first .. first + count - 1 of `slot`; `count` is at most the context."""
        positions = np.arange(first, first + count, dtype=np.int64)
        return positions % self.shape.context + slot * self.shape.context

    def write(self, rows: Tensor, entries: Tensor) -> None:
        """Store [layers, M, *entry] at `rows` int64 [M]."""
        self.entries.index_copy_(1, rows, entries)

    def view(self, slots: Tensor, anchors: Tensor, visible_from: Tensor, visible: int, block: int) -> ContextView:
        """What blocks at positions `anchors` of `slots` see: at most the `visible` newest positions before them.

        Three int64 [B]; `visible` (a bound of `anchors - visible_from`) and `block` fix the shapes. Entries with
        `visible_from == anchor` see their own block only.
        """
        own = slice(self._block_row, self._block_row + len(slots) * block)
        return ContextView(self, own, slots, anchors, visible_from, visible)


class ContextView:
    """A `BlockContext` for one batch; valid until the store is written to."""

    def __init__(
        self, store: ContextStore, own: slice, slots: Tensor, anchors: Tensor, visible_from: Tensor, visible: int
    ) -> None:
        self._store = store
        self._own = own
        self._requests = slots, anchors, visible_from
        self.visible = visible
        self.fused = None if store.attention is None else self._attend_in_place

    @cached_property
    def _is_visible(self) -> Tensor:
        """bool [B, visible], oldest first."""
        _, anchors, visible_from = self._requests
        # A position more than the context away has been overwritten by a newer one.
        lowest = torch.maximum(visible_from, anchors - self._store.shape.context).unsqueeze(1)
        return self._positions >= lowest

    @cached_property
    def _positions(self) -> Tensor:
        _, anchors, _ = self._requests
        return anchors.unsqueeze(1) + torch.arange(-self.visible, 0, device=anchors.device)

    @cached_property
    def _rows(self) -> Tensor:
        """int64 [B, visible + block]"""
        slots, _, _ = self._requests
        context = self._store.shape.context
        held = slots.unsqueeze(1) * context + self._positions % context
        own = torch.arange(self._own.start, self._own.stop, device=slots.device).view(len(slots), -1)
        return torch.cat((torch.where(self._is_visible, held, self._store.zero_row), own), dim=1)

    @cached_property
    def bias(self) -> Tensor:
        # The block is not causal, so all of its queries see the same entries.
        block = (self._own.stop - self._own.start) // len(self._is_visible)
        is_visible = F.pad(self._is_visible, (0, block), value=True)
        bias = torch.zeros(is_visible.shape, dtype=self._store.entries.dtype, device=is_visible.device)
        return bias.masked_fill_(~is_visible, float("-inf"))[:, None, None, :]

    def gather(self, layer: int, own: Tensor) -> Tensor:
        entries = self._store.entries[layer]
        entries[self._own] = own.flatten(0, 1)
        return entries.index_select(0, self._rows.flatten()).view(*self._rows.shape, *entries.shape[1:])

    def ring(self, layer: int) -> Ring:
        """What is seen of `layer`, for those who read it where it lies. The block's own entries are not in it."""
        return Ring(self._store.entries[layer], *self._requests, self.visible, self._store.shape.context)

    def _attend_in_place(self, layer: int, query: Tensor, key_value: Tensor, scale: float) -> Tensor:
        store = self._store
        assert store.attention is not None
        return store.attention(
            query,
            key_value,
            store.entries[layer],
            *self._requests,
            visible=self.visible,
            context=store.shape.context,
            scale=scale,
        )
