"""The newest rows of every slot, on the device, so that a worker that lost them can be given them again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from farspark.engine.gather.layout import GatherShape


class DeviceRing:
    """bf16 `[slots * ring + 1, row]`; a slot's position p lies at `slot * ring + p mod ring`.

    The last row is scratch: whatever a step must not keep is written there, so that no write depends on a number that
    only the device knows. Owned by the engine thread; reads and writes are ordered by its stream.
    """

    def __init__(self, shape: GatherShape, device: torch.device) -> None:
        self._length = shape.ring
        self._num_slots = shape.max_requests
        self.scratch_row = shape.max_requests * shape.ring
        self.rows = torch.zeros(self.scratch_row + 1, shape.row_values, dtype=torch.bfloat16, device=device)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def window(self, slot: int, first_pos: int, n_rows: int) -> memoryview:
        """Rows `first_pos .. first_pos + n_rows - 1` of `slot`, in order; blocks until the device has them.

        The memory is the caller's: one round may send the windows of several slots. It is not pinned, because a resync is
        rare and pinned memory for every slot would be held for ever. Raises ValueError for more rows than the ring has.
        """
        if not (0 <= slot < self._num_slots and 0 <= n_rows <= self._length and first_pos >= 0):
            raise ValueError(
                f"{n_rows} rows from position {first_pos} of slot {slot}; "
                f"the ring has {self._length} rows of each of {self._num_slots} slots"
            )
        begin = first_pos % self._length
        head = min(n_rows, self._length - begin)
        base = slot * self._length
        host = torch.empty(n_rows, self.rows.shape[1], dtype=torch.bfloat16)
        host[:head].copy_(self.rows[base + begin : base + begin + head])
        host[head:].copy_(self.rows[base : base + n_rows - head])
        return host_bytes(host)


def host_bytes(rows: torch.Tensor) -> memoryview:
    """The bytes of a contiguous host tensor, without a copy."""
    values: npt.NDArray[np.uint8] = rows.view(torch.uint8).reshape(-1).numpy()
    return values.data
