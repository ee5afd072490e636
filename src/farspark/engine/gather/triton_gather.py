"""The gather in one Triton launch: rows, ring and metadata, bit for bit what `torch_gather` makes of the same step.

Importing this module imports Triton, which a device without a compiler for it does not have: ask `make_gather`.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from farspark.engine.gather.direct import DirectLaunchError, KernelDriver, make_launch
from farspark.engine.gather.streams import current_stream
from farspark.engine.gather.torch_gather import StepTensors, TorchGather
from farspark.native import Launch
from farspark.native.round_calls import GatherKind, load_round_calls

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


@triton.jit
def _read(hidden, at, column, inside):  # type: ignore[no-untyped-def]
    values = tl.load(hidden + at + column, mask=inside, other=0.0)
    if values.dtype != tl.bfloat16:
        values = _rounded(values)
    return values


@triton.jit
def _write(staging, ring, column, inside, kept, values):  # type: ignore[no-untyped-def]
    tl.store(staging + column, values, mask=inside)
    tl.store(ring + column, values, mask=column < kept)


# Values that change from step to step are not specialised: a kernel for each kind of them would be compiled while serving.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["token_stride", "last_stride", "n", "context", "ring_length", "wants_drafts", "keep"],
    do_not_specialize_on_alignment=[
        "positions",
        "query_start_loc",
        "slots",
        "num_sampled",
        "num_rejected",
        "last_sampled",
        "next_prefill",
        "meta",
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
    IS_WIDE: tl.constexpr,
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
        at = source * token_stride
        if IS_WIDE:
            at = tl.multiple_of(at, 16)  # else every value is read by itself
        staged = staging + r * (TAPS * HIDDEN)
        in_ring = ring + place * (TAPS * HIDDEN)
        # All reads come first: none can begin behind a write that might change what it reads.
        values0 = _read(tap0, at, column, inside)
        if TAPS > 1:
            values1 = _read(tap1, at, column, inside)
        if TAPS > 2:
            values2 = _read(tap2, at, column, inside)
        if TAPS > 3:
            values3 = _read(tap3, at, column, inside)
        if TAPS > 4:
            values4 = _read(tap4, at, column, inside)
        if TAPS > 5:
            values5 = _read(tap5, at, column, inside)
        if TAPS > 6:
            values6 = _read(tap6, at, column, inside)
        if TAPS > 7:
            values7 = _read(tap7, at, column, inside)
        _write(staged, in_ring, column, inside, kept, values0)
        if TAPS > 1:
            _write(staged + HIDDEN, in_ring + HIDDEN, column, inside, kept, values1)
        if TAPS > 2:
            _write(staged + 2 * HIDDEN, in_ring + 2 * HIDDEN, column, inside, kept, values2)
        if TAPS > 3:
            _write(staged + 3 * HIDDEN, in_ring + 3 * HIDDEN, column, inside, kept, values3)
        if TAPS > 4:
            _write(staged + 4 * HIDDEN, in_ring + 4 * HIDDEN, column, inside, kept, values4)
        if TAPS > 5:
            _write(staged + 5 * HIDDEN, in_ring + 5 * HIDDEN, column, inside, kept, values5)
        if TAPS > 6:
            _write(staged + 6 * HIDDEN, in_ring + 6 * HIDDEN, column, inside, kept, values6)
        if TAPS > 7:
            _write(staged + 7 * HIDDEN, in_ring + 7 * HIDDEN, column, inside, kept, values7)


_ARGUMENTS: Final = 27  # of the kernel, without its constants
# What Triton tells kernels apart by: rows that can be read sixteen bytes at a time, and integers of 32 bits.
_ALIGNED: Final = 16
_GREATEST: Final = 2**31 - 1
_WIDE: Final = 16  # of which the distance between two rows is a multiple, in values, where they are read in wide pieces

_Kind = tuple[Any, ...]
_Places = tuple[int, int, int]
"""Where rows, ring and metadata are written to."""


class TritonGather(TorchGather):
    """As `TorchGather`, with one launch in place of its operations. Staging past the packed rows is left as it was.

    The first launch of a kind of step goes through Triton, which compiles the kernel; further ones go to the driver where that
    can be. Of one kind are steps for which Triton would take the same kernel.

    A launch of the driver's writes into host memory itself where it is told to, in stores of sixteen bytes that fill whole lines:
    the bus is as busy with them as with a copy, and the step waits for no second engine of the device.
    """

    def __init__(
        self, *arguments: Any, driver: KernelDriver | None = None, why_not_direct: str = "not asked for", **options: Any
    ) -> None:
        """Without a `driver` every launch is Triton's, for the reason `why_not_direct`.

        Raises ValueError for more taps than the kernel takes.
        """
        super().__init__(*arguments, **options)
        if self.shape.taps > MAX_TAPS:
            raise ValueError(f"{self.shape.taps} taps; the fused gather takes {MAX_TAPS} at most")
        self._requests = triton.next_power_of_2(self.shape.max_requests)
        self._blocks = triton.cdiv(self.shape.hidden_size, _BLOCK)
        self._driver = driver
        calls = None if driver is None else load_round_calls()
        self._refill = None if calls is None else calls.refill_gather  # for a step of the same kind as the one before
        self._current = current_stream(self._device) if self._device.type == "cuda" else int
        self._launches: dict[_Kind, Launch | None] = {}  # None: Triton's to make
        self._why_not = why_not_direct if driver is None else "no step has come yet"
        # Of the step at hand: addresses of its taps, and the two strides.
        self._rows: list[int] = []
        self._token_stride = self._last_stride = 0
        self._step: StepTensors | None = None  # prepared: its memory must not be anybody else's before the launch
        self._known: tuple[Launch, GatherKind] | None = None  # how the newest launch was filled, where it was prepared
        self._places: _Places = self._staging.data_ptr(), self.ring.rows.data_ptr(), self._meta.data_ptr()

    @property
    def how_launched(self) -> str:
        is_direct = any(launch is not None for launch in self._launches.values())
        return "by the driver" if is_direct else f"by Triton's launcher: {self._why_not}"

    def _bring(self, step: StepTensors) -> None:
        launch = None
        if self._driver is not None and self._device.type == "cuda":
            # Pinned memory has one address for both.
            launch = self._prepare(step, self._staging_host.data_ptr(), self._meta_host.data_ptr())
        if launch is None or self._driver is None:
            super()._bring(step)
            return
        self._driver.launch(launch, self._current())
        self._made = self._staging_host, self._meta_host

    def prepare(self, step: StepTensors, rows: int, meta: int) -> int:
        launch = self._prepare(step, rows, meta)
        return 0 if launch is None else launch.address

    def _prepare(self, step: StepTensors, rows: int, meta: int) -> Launch | None:
        if self._refill is not None and self._known is not None:
            again, kind = self._known
            if requests := self._refill(kind, step, rows, meta):
                self._enqueued_requests, self._step = requests, step
                return again
        row_bound = min(step.row_bound, self.shape.max_rows)
        self._check(step)
        launch = self._launches.get(self._kind(step))
        if launch is None or row_bound == 0 or rows % _ALIGNED:
            return None
        self._fill(launch, step, row_bound, (rows, self._places[1], meta), keep=True)
        self._known = launch, self._note(launch, step)
        self._enqueued_requests, self._step = step.num_requests, step
        return launch

    def _note(self, launch: Launch, step: StepTensors) -> GatherKind:
        """`_kind` has just looked at the step."""
        sampling = [tensor.dtype if self.shape.is_sampled else None for tensor in self._sampling(step)]
        return (
            launch.values_address,
            launch.grid_address,
            self.shape.max_rows,
            self.shape.max_requests,
            (step.last_sampled, step.next_prefill_tokens),
            (*[tensor.dtype for tensor in (*_changing(step), step.hidden[0])], *sampling),
            step.hidden[0].stride(),
            self.shape.taps,
            self.shape.hidden_size,
        )

    def _pack(self, step: StepTensors, row_bound: int, *, keep: bool) -> None:
        if self._driver is None or row_bound == 0:
            self._launch_by_triton(step, row_bound, keep=keep)
            return
        kind = self._kind(step)
        launch = self._launches.get(kind)
        if launch is not None:
            self._fill(launch, step, row_bound, self._places, keep=keep)
            self._driver.launch(launch, self._current())
            return
        kernel = self._launch_by_triton(step, row_bound, keep=keep)
        if kind and kind not in self._launches:
            try:
                self._launches[kind] = make_launch(kernel, self._driver, _ARGUMENTS)
            except DirectLaunchError as error:
                self._launches[kind] = None
                self._why_not = str(error)

    def _kind(self, step: StepTensors) -> _Kind:
        """Empty where nothing can be said of it. Leaves what it has read of the tensors for `_fill`."""
        first = step.hidden[0]
        dtype, stride = first.dtype, first.stride()
        rows, bits = [], 0
        for tap in step.hidden:
            if tap.dtype is not dtype or tap.stride() != stride:
                return ()
            address = tap.data_ptr()
            rows.append(address)
            bits |= address
        token_stride, column_stride = stride
        last_stride = step.last_sampled.stride(0)
        # Of unaligned rows each makes a kernel of its own.
        if bits % _ALIGNED or column_stride != 1 or token_stride > _GREATEST or last_stride > _GREATEST:
            return ()
        self._rows, self._token_stride, self._last_stride = rows, token_stride, last_stride
        return (
            token_stride % _WIDE == 0,
            dtype,
            *[tensor.dtype for tensor in _changing(step)],
            step.last_sampled.dtype,
            step.next_prefill_tokens.dtype,
            *[tensor.dtype for tensor in self._sampling(step)],
        )

    def _fill(self, launch: Launch, step: StepTensors, row_bound: int, places: _Places, *, keep: bool) -> None:
        """The arguments in the kernel's order, then no scratch memory. `_kind` has just looked at the step."""
        self._known = None
        rows = self._rows
        launch.fill(
            row_bound,
            self._blocks,
            *rows,
            *rows[:1] * (MAX_TAPS - len(rows)),
            self._token_stride,
            *[tensor.data_ptr() for tensor in _changing(step)],
            step.last_sampled.data_ptr(),
            self._last_stride,
            step.next_prefill_tokens.data_ptr(),
            *[tensor.data_ptr() for tensor in self._sampling(step)],
            *places,
            step.num_requests,
            self.shape.context,
            self.shape.ring,
            step.wants_drafts,
            keep,
            0,
            0,
        )

    def _sampling(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Temperature and seeds, where the kernel reads them; elsewhere it is given what is there for the gather's life."""
        if not self.shape.is_sampled:
            return self._meta, self._meta
        assert step.temperature is not None
        assert step.seeds is not None
        return step.temperature, step.seeds

    def _launch_by_triton(self, step: StepTensors, row_bound: int, *, keep: bool) -> Any:
        """The kernel that it took; None where Triton interprets."""
        shape = self.shape
        taps = [*step.hidden, *[step.hidden[0]] * (MAX_TAPS - shape.taps)]
        strides = {(hidden.stride(0), hidden.stride(1)) for hidden in taps}
        token_stride, column_stride = next(iter(strides))
        if len(strides) > 1 or column_stride != 1:
            raise ValueError(f"hidden states with strides {sorted(strides)}; the fused gather takes equal, dense rows")
        next_prefill = step.next_prefill_tokens
        return _pack_kernel[(row_bound, self._blocks)](
            *taps,
            token_stride,
            *_changing(step),
            step.last_sampled,
            step.last_sampled.stride(0),
            next_prefill[0] if next_prefill.dim() == 2 else next_prefill,
            *self._sampling(step),
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
            IS_WIDE=token_stride % _WIDE == 0,
        )


def _changing(step: StepTensors) -> tuple[torch.Tensor, ...]:
    """Tensors that may be others in every step, beside the taps, in the order of the kernel's arguments."""
    return step.positions, step.query_start_loc, step.slots, step.num_sampled, step.num_rejected
