"""The gather in torch operations: the reference for every other form, and good for any device.

How many rows of a request are valid only the device knows (rejected drafts). So the host fixes every shape by upper
bounds and the device decides by indices what stands where; nothing here waits for the device but `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.ring import DeviceRing, host_bytes
from farspark.engine.round import MetaColumn, SamplingColumn


class StepTensors(NamedTuple):
    """One step as vLLM's runner hands it to a speculator. All but `row_bound` and `wants_drafts` live on the device.

    `native/submit_calls.c` knows the order.
    """

    hidden: Sequence[torch.Tensor]  # taps x [>= num_tokens, hidden], ascending layer order
    positions: torch.Tensor  # [>= num_tokens]
    query_start_loc: torch.Tensor  # [n + 1]
    slots: torch.Tensor  # [n], the request-state index of each batch row
    num_sampled: torch.Tensor  # [n]
    num_rejected: torch.Tensor  # [n]
    last_sampled: torch.Tensor  # [slots] or [slots, 1]
    next_prefill_tokens: torch.Tensor  # [slots], or [lookahead, slots] whose first row is the very next token
    row_bound: int  # what the step can pack at most: the sum of min(query length, context), as far as the host knows
    wants_drafts: bool  # False: rows are appended, nobody needs drafts
    temperature: torch.Tensor | None = None  # float32 [slots]; this and the next are read where drafts are sampled
    seeds: torch.Tensor | None = None  # int64 [slots]

    @property
    def num_requests(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A step on the host; views of the gather's buffers, which hold until its next `run`."""

    meta: npt.NDArray[np.int32]  # [n, the shape's meta_columns]
    rows: memoryview  # request after request, the newest min(valid rows, context) of each


class TorchGather:
    """Owned by the engine thread, which calls `run` and then `wait` once per step, on one stream."""

    def __init__(self, shape: GatherShape, device: torch.device, *, has_host_buffers: bool = True) -> None:
        """Without host buffers only `pack` may be used, until `make_host_buffers`."""
        self.shape = shape
        self.ring = DeviceRing(shape, device)
        self._device = device
        # A float32 target's rows are rounded to bf16 here, because the wire carries nothing else: the remote drafter then
        # sees the hidden states with 8 bits of mantissa where a local one would see 24, and near ties may fall otherwise.
        self._staging = torch.zeros(shape.max_rows, shape.row_values, dtype=torch.bfloat16, device=device)
        self._meta = torch.zeros(shape.max_requests, shape.meta_columns, dtype=torch.int32, device=device)
        self._row_index = torch.arange(shape.max_rows, dtype=torch.int64, device=device)
        self._staging_host = self._staging
        self._meta_host = self._meta
        self._made = self._staging, self._meta  # where the newest step's rows and metadata were written to
        if has_host_buffers:
            self.make_host_buffers()
        self._num_requests = 0
        self._enqueued_requests = 0

    def make_host_buffers(self) -> None:
        """For `run` and `wait`. The CPU needs none of its own."""
        if self._device.type != "cuda":
            return
        self._staging_host = torch.empty_like(self._staging, device="cpu", pin_memory=True)
        self._meta_host = torch.empty_like(self._meta, device="cpu", pin_memory=True)
        self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._arrived = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    @property
    def device_nbytes(self) -> int:
        return self.ring.nbytes + self._staging.nbytes + self._meta.nbytes + self._row_index.nbytes

    @property
    def pinned_nbytes(self) -> int:
        buffers = [(self._staging_host, self._staging), (self._meta_host, self._meta)]
        return sum(host.nbytes for host, device in buffers if host is not device)

    @property
    def rows_address(self) -> int:
        """Of the packed rows, on the device."""
        return self._staging.data_ptr()

    @property
    def meta_address(self) -> int:
        """Of the metadata, int32 `[slots, meta_columns]`, on the device."""
        return self._meta.data_ptr()

    @property
    def how_launched(self) -> str:
        """For the statistics."""
        return "torch operations"

    def prepare(self, step: StepTensors, rows: int, meta: int) -> int:
        """The address of a `Launch` that does what `pack` does, once, for whoever enqueues the rest in the same call, but for
        where rows and metadata go: to the addresses `rows` and `meta`, of the host's memory as the device has it.

        0 where `pack` is to be called.
        """
        return 0

    def pack(self, step: StepTensors) -> None:
        """Enqueue all that `run` does on the device; the copies to the host are somebody else's."""
        self._enqueue(step, keep=True)

    def run(self, step: StepTensors) -> None:
        """Enqueue everything: pack, write the ring, describe, bring it to the host."""
        if self._device.type == "cuda":
            self._began.record()
        self._bring(step)
        self._num_requests = step.num_requests
        if self._device.type == "cuda":
            self._arrived.record()

    def _bring(self, step: StepTensors) -> None:
        row_bound = self._enqueue(step, keep=True)
        if self._device.type == "cuda":
            self._meta_host[: step.num_requests].copy_(self._meta[: step.num_requests], non_blocking=True)
            self._staging_host[:row_bound].copy_(self._staging[:row_bound], non_blocking=True)

    def rehearse(self, step: StepTensors) -> None:
        """The device work of `run` without its effects: for profiling and warm-up. No slot is touched, nobody waits."""
        self._enqueue(step, keep=False)

    def wait(self) -> Gathered:
        """The one place where the host waits for the device: for the copies that `run` enqueued last."""
        if self._device.type == "cuda":
            self._arrived.synchronize()
        meta = self._meta_host[: self._num_requests].numpy()
        num_rows = int(np.minimum(meta[:, MetaColumn.VALID_ROWS], self.shape.context).sum())
        return Gathered(meta, host_bytes(self._staging_host[:num_rows]))

    def buffers(self) -> dict[str, torch.Tensor]:
        """What the newest step made, without what nobody reads: for comparing two forms of the gather. Waits for the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        staging, meta = self._made
        meta = meta[: self._enqueued_requests]
        rows = int(meta[:, MetaColumn.VALID_ROWS].clamp(max=self.shape.context).sum())
        return {"metadata": meta, "rows": staging[:rows], "ring": self.ring.rows[: self.ring.scratch_row]}

    def device_us(self) -> float | None:
        """Device time from `run` to the data's arrival, after `wait`; None where no device clock exists."""
        return self._began.elapsed_time(self._arrived) * 1000 if self._device.type == "cuda" else None

    def _enqueue(self, step: StepTensors, *, keep: bool) -> int:
        row_bound = min(step.row_bound, self.shape.max_rows)
        self._check(step)
        self._pack(step, row_bound, keep=keep)
        self._made = self._staging, self._meta
        self._enqueued_requests = step.num_requests
        return row_bound

    def _pack(self, step: StepTensors, row_bound: int, *, keep: bool) -> None:
        """Fill staging and metadata and, with `keep`, the ring."""
        shape, n = self.shape, step.num_requests
        slots = step.slots.long()
        starts = step.query_start_loc[:n].long()
        valid = step.query_start_loc[1 : n + 1].long() - starts - step.num_rejected[:n].long()
        start_pos = step.positions[starts].long()
        end_pos = start_pos + valid  # the anchor's position
        packed = valid.clamp(max=shape.context)
        packed_ends = packed.cumsum(0)

        # Staging row r belongs to the request whose packed range holds it; rows past the last one belong to nobody and
        # are packed from wherever the clamps lead: the host never reads them.
        r = self._row_index[:row_bound]
        owner = torch.searchsorted(packed_ends, r, right=True).clamp(max=n - 1)
        from_end = packed_ends[owner] - r  # 1 for a request's newest row
        source = (starts + valid)[owner] - from_end
        source = source.clamp(min=0, max=step.hidden[0].shape[0] - 1)
        staging = self._staging[:row_bound]
        for tap, hidden in enumerate(step.hidden):
            column = tap * shape.hidden_size
            staging[:, column : column + shape.hidden_size].copy_(hidden.index_select(0, source))

        position = end_pos[owner] - from_end
        in_ring = (from_end >= 1) & (from_end <= shape.ring) & keep
        place = torch.where(in_ring, slots[owner] * shape.ring + position % shape.ring, self.ring.scratch_row)
        self.ring.rows.index_copy_(0, place, staging)

        sampled = step.num_sampled[:n] > 0
        # A placeholder never becomes an anchor: a row that sampled nothing has its next prompt token there.
        next_prefill = step.next_prefill_tokens
        next_prefill = next_prefill[0] if next_prefill.dim() == 2 else next_prefill
        anchor = torch.where(sampled, step.last_sampled.reshape(-1)[slots].long(), next_prefill[slots].long())
        meta = self._meta[:n]
        meta[:, MetaColumn.START_POS] = start_pos.int()
        meta[:, MetaColumn.VALID_ROWS] = valid.int()
        meta[:, MetaColumn.ANCHOR_TOKEN] = anchor.int()
        meta[:, MetaColumn.SAMPLED] = (sampled & step.wants_drafts).int()
        if step.temperature is not None and step.seeds is not None and shape.is_sampled:
            meta[:, SamplingColumn.TEMPERATURE] = step.temperature[slots].view(torch.int32)
            # Little-endian: the low half comes first.
            meta[:, SamplingColumn.SEED_LOW :] = step.seeds[slots].view(torch.int32).view(n, 2)

    def _check(self, step: StepTensors) -> None:
        """What the host can see of a step that does not fit. Raises ValueError."""
        shape = self.shape
        widths = [hidden.shape[-1] for hidden in step.hidden]
        if widths != [shape.hidden_size] * shape.taps:
            raise ValueError(
                f"hidden states of widths {widths}, expected {shape.taps} taps of {shape.hidden_size} values each"
            )
        if not 1 <= step.num_requests <= shape.max_requests:
            raise ValueError(f"{step.num_requests} requests in a step, expected 1 to {shape.max_requests}")
        if shape.is_sampled and (step.temperature is None or step.seeds is None):
            raise ValueError("a step without seeds and temperatures, which sampled drafts need")
        if step.row_bound > shape.max_rows:
            raise ValueError(f"up to {step.row_bound} rows in a step, expected {shape.max_rows} at most")
