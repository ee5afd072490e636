"""The gather in one Triton launch: rows, ring and metadata, bit for bit what `torch_gather` makes of the same step.

Importing this module imports Triton, which a device without a compiler for it does not have: ask `make_gather`.
"""

from __future__ import annotations

from typing import Any, Final

import triton
import triton.language as tl

from farspark.engine.gather.torch_gather import StepTensors, TorchGather

MAX_TAPS: Final = 8
# Values of a row that one program copies; rows are 576 to 7,168 values a tap.
_BLOCK: Final = 1024


@triton.jit
def _rounded(values):  # type: ignore[no-untyped-def]
    """float -> bf16, to the nearest, ties to even; in integers, because Triton's interpreter cuts the low bits off."""
    bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    # Rounding up could make a NaN an infinity.
    kept = tl.where(values != values, (bits >> 16) | 0x40, nearest)
    return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)


# Values that change from step to step are not specialised: a kernel for each kind of them would be compiled while serving.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["token_stride", "last_stride", "n", "context", "ring_length", "wants_drafts", "keep"],
    do_not_specialize_on_alignment=[
        "positions",
        "query_start_loc",
        "slots",
        "num_sampled",
        "num_rejected",
        "temperature",
        "seeds",
    ],
)
def _pack_kernel(  # type: ignore[no-untyped-def]
    tap0,
    tap1,
    tap2,
    tap3,
    tap4,
    tap5,
    tap6,
    tap7,
    token_stride,
    positions,
    query_start_loc,
    slots,
    num_sampled,
    num_rejected,
    last_sampled,
    last_stride,
    next_prefill,
    temperature,
    seeds,
    staging,
    ring,
    meta,
    n,
    context,
    ring_length,
    wants_drafts,
    keep,
    TAPS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    REQUESTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_SAMPLED: tl.constexpr,
):
    """Program (r, c) copies columns c of packed row r, of every tap. Each finds its request by itself: n is small."""
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1)
    i = tl.arange(0, REQUESTS)
    here = i < n
    starts = tl.load(query_start_loc + i, mask=here, other=0).to(tl.int64)
    ends = tl.load(query_start_loc + i + 1, mask=here, other=0).to(tl.int64)
    rejected = tl.load(num_rejected + i, mask=here, other=0).to(tl.int64)
    slot = tl.load(slots + i, mask=here, other=0).to(tl.int64)
    start_pos = tl.load(positions + starts, mask=here, other=0).to(tl.int64)
    valid = ends - starts - rejected
    packed = tl.where(here, tl.minimum(valid, context), 0)
    packed_ends = tl.cumsum(packed, 0)

    if (r == 0) & (c == 0):
        sampled = tl.load(num_sampled + i, mask=here, other=0) > 0
        last = tl.load(last_sampled + slot * last_stride, mask=here, other=0).to(tl.int64)
        following = tl.load(next_prefill + slot, mask=here, other=0).to(tl.int64)
        # A placeholder never becomes an anchor: a row that sampled nothing has its next prompt token there.
        anchor = tl.where(sampled, last, following)
        tl.store(meta + i * COLUMNS, start_pos.to(tl.int32), mask=here)
        tl.store(meta + i * COLUMNS + 1, valid.to(tl.int32), mask=here)
        tl.store(meta + i * COLUMNS + 2, anchor.to(tl.int32), mask=here)
        tl.store(meta + i * COLUMNS + 3, (sampled & (wants_drafts != 0)).to(tl.int32), mask=here)
        if IS_SAMPLED:
            hot = tl.load(temperature + slot, mask=here, other=0.0)
            seed = tl.load(seeds + slot, mask=here, other=0)
            tl.store(meta + i * COLUMNS + 4, hot.to(tl.int32, bitcast=True), mask=here)
            tl.store(meta + i * COLUMNS + 5, (seed & 0xFFFFFFFF).to(tl.int32), mask=here)
            tl.store(meta + i * COLUMNS + 6, (seed >> 32).to(tl.int32), mask=here)

    if r < tl.sum(packed):
        is_owner = i == tl.sum((here & (packed_ends <= r)).to(tl.int32))
        from_end = tl.sum(tl.where(is_owner, packed_ends, 0)) - r  # 1 for a request's newest row
        source = tl.sum(tl.where(is_owner, starts + valid, 0)) - from_end
        position = tl.sum(tl.where(is_owner, start_pos + valid, 0)) - from_end
        place = tl.sum(tl.where(is_owner, slot, 0)) * ring_length + position % ring_length
        column = c * BLOCK + tl.arange(0, BLOCK)
        inside = column < HIDDEN
        # Columns that the ring keeps: all of a row that is among the newest, else none.
        kept = tl.where(from_end <= ring_length, keep * HIDDEN, 0)
        for tap in tl.static_range(TAPS):
            if tap == 0:
                hidden = tap0
            elif tap == 1:
                hidden = tap1
            elif tap == 2:
                hidden = tap2
            elif tap == 3:
                hidden = tap3
            elif tap == 4:
                hidden = tap4
            elif tap == 5:
                hidden = tap5
            elif tap == 6:
                hidden = tap6
            else:
                hidden = tap7
            values = tl.load(hidden + source * token_stride + column, mask=inside, other=0.0)
            if values.dtype != tl.bfloat16:
                values = _rounded(values)
            tl.store(staging + r * (TAPS * HIDDEN) + tap * HIDDEN + column, values, mask=inside)
            tl.store(ring + place * (TAPS * HIDDEN) + tap * HIDDEN + column, values, mask=column < kept)


class TritonGather(TorchGather):
    """As `TorchGather`, with one launch in place of its operations. Staging past the packed rows is left as it was."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Raises ValueError for more taps than the kernel takes."""
        super().__init__(*arguments, **options)
        if self.shape.taps > MAX_TAPS:
            raise ValueError(f"{self.shape.taps} taps; the fused gather takes {MAX_TAPS} at most")
        self._requests = triton.next_power_of_2(self.shape.max_requests)

    def _pack(self, step: StepTensors, row_bound: int, *, keep: bool) -> None:
        shape = self.shape
        taps = [*step.hidden, *[step.hidden[0]] * (MAX_TAPS - shape.taps)]
        strides = {(hidden.stride(0), hidden.stride(1)) for hidden in taps}
        token_stride, column_stride = next(iter(strides))
        if len(strides) > 1 or column_stride != 1:
            raise ValueError(f"hidden states with strides {sorted(strides)}; the fused gather takes equal, dense rows")
        next_prefill = step.next_prefill_tokens
        _pack_kernel[(row_bound, triton.cdiv(shape.hidden_size, _BLOCK))](
            *taps,
            token_stride,
            step.positions,
            step.query_start_loc,
            step.slots,
            step.num_sampled,
            step.num_rejected,
            step.last_sampled,
            step.last_sampled.stride(0),
            next_prefill[0] if next_prefill.dim() == 2 else next_prefill,
            step.slots if step.temperature is None else step.temperature,
            step.slots if step.seeds is None else step.seeds,
            self._staging,
            self.ring.rows,
            self._meta,
            step.num_requests,
            shape.context,
            shape.ring,
            int(step.wants_drafts),
            int(keep),
            TAPS=shape.taps,
            HIDDEN=shape.hidden_size,
            BLOCK=_BLOCK,
            REQUESTS=self._requests,
            COLUMNS=shape.meta_columns,
            IS_SAMPLED=shape.is_sampled,
        )
