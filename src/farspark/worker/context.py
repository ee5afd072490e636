"""What the drafter remembers: projected keys and values by slot and position.

Position p of a slot lies at ring index `p mod context`. Nothing marks an entry as valid: which positions a draft may see
is said by each request (`visible_from <= p < anchor_pos`), and only those are ever read. An index that is not visible is
replaced by the index of a row of zeros, so a stale or never written entry, NaN included, cannot reach a product (masking
the scores alone would not do: 0 · NaN is NaN in the weighted sum of values).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.errors import ConfigError

# Left free beside the context: activations of a step, and the allocator's own rounding.
HEADROOM_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ContextShape:
    """Sizes of a store; `row` is what one position takes in one layer: [2 (key, value), kv heads, head_dim]."""

    layers: int
    kv_heads: int
    head_dim: int
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
        return self.layers * self.rows * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class ContextStore:
    """Used under the drafting lock, by one thread at a time. Raises ConfigError when the device has not got the memory."""

    def __init__(self, shape: ContextShape, device: torch.device) -> None:
        self.shape = shape
        self.zero_row = shape.slots * shape.context  # always zeros, never written
        self.scratch_row = self.zero_row + 1  # written for padding, never read
        self._block_row = self.zero_row + 2  # keys and values of the block in flight, one layer after the other
        require_memory(shape, device)
        try:
            # Zeroed, so that the memory is really taken here and not when a request arrives.
            self.kv = torch.zeros(
                (shape.layers, shape.rows, 2, shape.kv_heads, shape.head_dim), dtype=shape.dtype, device=device
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ConfigError(f"{_too_large(shape, device)}: {error}") from error

    def destinations(self, slot: int, first: int, count: int) -> npt.NDArray[np.int64]:
        """Rows of positions first .. first + count - 1 of `slot`; `count` is at most the context."""
        positions = np.arange(first, first + count, dtype=np.int64)
        return positions % self.shape.context + slot * self.shape.context

    def write(self, rows: Tensor, key_value: Tensor) -> None:
        """Store [layers, M, 2, kv heads, d] at `rows` int64 [M]."""
        self.kv.index_copy_(1, rows, key_value)

    def view(self, slots: Tensor, anchors: Tensor, visible_from: Tensor, visible: int, block: int) -> ContextView:
        """What blocks at positions `anchors` of `slots` see: at most the `visible` newest positions before them.

        Three int64 [B]; `visible` (a bound of `anchors - visible_from`) and `block` fix the shapes. Entries with
        `visible_from == anchor` see their own block only.
        """
        context = self.shape.context
        offsets = torch.arange(-visible, 0, device=slots.device)
        positions = anchors.unsqueeze(1) + offsets
        # A position more than the context away has been overwritten by a newer one.
        lowest = torch.maximum(visible_from, anchors - context).unsqueeze(1)
        is_visible = positions >= lowest
        rows = torch.where(is_visible, slots.unsqueeze(1) * context + positions % context, self.zero_row)
        batch = slots.shape[0]
        own = torch.arange(batch * block, device=slots.device).view(batch, block) + self._block_row
        return ContextView(
            self.kv,
            block_rows=slice(self._block_row, self._block_row + batch * block),
            rows=torch.cat((rows, own), dim=1),
            is_visible=F.pad(is_visible, (0, block), value=True),
        )


class ContextView:
    """A `BlockContext` for one batch; valid until the store is written to."""

    def __init__(self, kv: Tensor, block_rows: slice, rows: Tensor, is_visible: Tensor) -> None:
        self._kv = kv
        self._block_rows = block_rows
        self._batch, self._length = rows.shape
        self._rows = rows.flatten()
        # [B, 1, 1, keys]: the block is not causal, so all of its queries see the same keys.
        self._bias = torch.zeros(is_visible.shape, dtype=kv.dtype, device=kv.device)
        self._bias = self._bias.masked_fill_(~is_visible, float("-inf"))[:, None, None, :]

    def attend(self, layer: int, query: Tensor, key_value: Tensor, scale: float) -> Tensor:
        batch, length, heads, dim = query.shape
        kv = self._kv[layer]
        kv_heads = kv.shape[2]
        kv[self._block_rows] = key_value.flatten(0, 1)
        held = kv.index_select(0, self._rows).view(self._batch, self._length, 2, kv_heads, dim)
        keys, values = held[:, :, 0].transpose(1, 2), held[:, :, 1].transpose(1, 2)  # [B, kv heads, keys, d]
        # Queries that share a key head are folded into one longer run of queries: no key is repeated.
        group = heads // kv_heads
        folded = query.view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(batch, kv_heads, group * length, dim)
        bias = self._bias.expand(-1, 1, group * length, -1)
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scale)
        attended = attended.view(batch, kv_heads, group, length, dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(batch, length, heads * dim)


def require_memory(shape: ContextShape, device: torch.device) -> None:
    """Raise ConfigError if the store would not fit in what is free; say nothing where that is not known."""
    free = free_bytes(device)
    if free is not None and shape.byte_count + HEADROOM_BYTES > free:
        raise ConfigError(f"{_too_large(shape, device)}: {free:,} bytes are free")


def free_bytes(device: torch.device) -> int | None:
    """Free memory of `device`; None when nothing tells.

    GPUs that share the host's memory (GB10) refuse the driver's query or answer with a part of the truth; what the
    kernel calls available is then the best that is known.
    """
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
        except (RuntimeError, AssertionError, OSError):
            return host_free_bytes()
        if total > 0:
            return free
    return host_free_bytes()


def host_free_bytes(meminfo: str = "/proc/meminfo") -> int | None:
    try:
        with open(meminfo, encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _too_large(shape: ContextShape, device: torch.device) -> str:
    return (
        f"a context of {shape.context} positions for {shape.slots} slots takes {shape.byte_count:,} bytes on {device}, "
        "and that is not to be had; lower the context or the slots"
    )
