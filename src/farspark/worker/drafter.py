"""The drafter: appends the rows of a step to the context store, then drafts for every request that asks, in one forward pass.

Every shape is rounded up to one of a few, so that warm-up can meet them all: requests to a batch size, visible context to
a length, rows to a count. What is padded reads zeros and writes to a row that nobody reads.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farspark.errors import ConfigError
from farspark.worker.batch import DraftBatch, DraftEntry, Drafter, DrafterInfo, DraftResult, Judged, Judging, Progress
from farspark.worker.checkpoint import LoadedCheckpoint, Qwen3DSparkConfig, load_checkpoint, no_progress
from farspark.worker.checkpoint.load import FilePath
from farspark.worker.context import ContextShape, ContextStore
from farspark.worker.models.base import Arithmetic, DraftModel
from farspark.worker.models.heads import greedy, margin
from farspark.worker.models.qwen3 import Qwen3DSpark

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Rows projected at once: bounds the activations of a long prefill, wide enough to keep a GPU busy.
ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Shapes:
    """The sizes that a step is rounded up to, each ascending; the last of each is the largest that can occur."""

    batches: tuple[int, ...]  # requests drafted for
    contexts: tuple[int, ...]  # visible positions
    rows: tuple[int, ...]  # rows projected at once
    steps: tuple[int, ...]  # draft positions whose logits are computed

    @classmethod
    def of(cls, device: torch.device, slots: int, context: int, num_drafts: int) -> Shapes:
        on_cpu = device.type == "cpu"
        few = range(1, 9) if on_cpu else (1, 2, 4, 8)
        lengths = sorted({64 * 2**i for i in range(20)} | {96 * 2**i for i in range(20)})
        return cls(
            batches=_up_to(slots, [*few, 12, *(2**i for i in range(4, 12))]),
            contexts=_up_to(context, lengths),
            rows=_up_to(ROWS_AT_ONCE, [2**i for i in range(10)]),
            # On a GPU the whole block costs what one position costs.
            steps=tuple(range(1, num_drafts + 1)) if on_cpu else (num_drafts,),
        )


def _up_to(largest: int, sizes: Sequence[int]) -> tuple[int, ...]:
    return (*(size for size in sizes if size < largest), largest)


def fitting(sizes: tuple[int, ...], size: int) -> int:
    """The smallest of `sizes` that holds `size`."""
    return next(one for one in sizes if one >= size)


class _Block(NamedTuple):
    """What a draft was made of; B and steps as rounded up."""

    hidden: Tensor  # [B, steps, hidden size]
    base: Tensor  # [B, steps, vocabulary], in front of the Markov bias
    anchor_tokens: Tensor  # int64 [B]


class DSparkDrafter:
    """A `Drafter` on a family's `DraftModel`. Used under the drafting lock, by one thread at a time."""

    def __init__(
        self, model: DraftModel, store: ContextStore, info: DrafterInfo, config: Qwen3DSparkConfig, shapes: Shapes
    ) -> None:
        self._model = model
        self._store = store
        self._info = info
        self._shapes = shapes
        self._device = store.kv.device
        self._mask_token_id = config.mask_token_id
        self._steps = torch.arange(info.num_drafts, device=self._device)

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def __repr__(self) -> str:
        info = self._info
        return f"DSparkDrafter({info.kind}, {info.device}, {info.dtype}, slots={info.slots}, context={info.context})"

    def warm_up(self, progress: Progress) -> None:
        shapes, most = self._shapes, self._shapes.steps[-1]
        if self._device.type == "cpu":
            # Nothing is compiled for a combination of sizes here: each size once, beside the smallest of the others.
            sizes = [(batch, shapes.contexts[0], 1) for batch in shapes.batches]
            sizes += [(1, context, 1) for context in shapes.contexts[1:]] + [(1, shapes.contexts[0], most)]
        else:
            sizes = list(itertools.product(shapes.batches, shapes.contexts, shapes.steps))
        total, done = len(shapes.rows) + len(sizes), 0
        with torch.inference_mode():
            for rows in shapes.rows:
                self._project(np.zeros((0, self._info.row_bytes), np.uint8), _no_ints(), _no_ints(), padded=rows)
                progress("warming up", done := done + 1, total)
            for batch, context, steps in sizes:
                nobody = torch.zeros((4, batch), dtype=torch.int64, device=self._device)
                for want_margins in (False, True):
                    packed, _ = self._forward(nobody, context, steps, want_margins)
                    packed.cpu()
                progress("warming up", done := done + 1, total)

    def draft(self, batch: DraftBatch) -> DraftResult:
        entries = batch.entries
        self._check(batch)
        num_drafts = self._info.num_drafts
        ok = [True] * len(entries)
        tokens = np.zeros((len(entries), num_drafts), np.int32)
        confidences = np.zeros((len(entries), num_drafts), np.float32)
        margins = np.zeros((len(entries), num_drafts), np.float32) if batch.want_margins else None
        judge = None
        with torch.inference_mode():
            self._append(batch)
            wanted = [index for index, entry in enumerate(entries) if entry.need_draft]
            if wanted:
                answer, block = self._draft([entries[index] for index in wanted], batch.want_margins)
                self._fill(entries, wanted, answer, ok, tokens, confidences, margins)
                if batch.want_margins:
                    judge = self._judging(block, {index: row for row, index in enumerate(wanted)})
        return DraftResult(
            ok=ok,
            tokens=tokens.reshape(-1).data,
            confidences=confidences.reshape(-1).data,
            margins=None if margins is None else margins.reshape(-1).data,
            judge=judge,
        )

    def _judging(self, block: _Block, rows: dict[int, int]) -> Judging:
        """`rows`: the row of `block` of each entry that was drafted for."""
        num_drafts = self._info.num_drafts

        def judge(entries: Sequence[int], tokens: memoryview) -> Judged:
            chains = torch.frombuffer(bytearray(tokens), dtype=torch.int32).view(-1, num_drafts)
            with torch.inference_mode():
                return self._judge(block, [rows[entry] for entry in entries], chains)

        return judge

    def _judge(self, block: _Block, rows: Sequence[int], chains: Tensor) -> Judged:
        """Teacher-force int32 `chains` [C, N] through the rows of `block`."""
        model = self._model
        where = torch.tensor(rows, dtype=torch.int64, device=self._device)
        chains = chains.to(self._device, torch.int64)
        hidden, base = block.hidden[where], block.base[where]
        count, steps = len(rows), base.shape[1]
        previous = torch.cat((block.anchor_tokens[where].unsqueeze(1), chains[:, : steps - 1]), dim=1)
        embedded = None if model.markov is None else model.markov.embed(previous)
        found = torch.zeros((3, count, self._info.num_drafts), dtype=torch.float32, device=self._device)
        best = torch.zeros((count, self._info.num_drafts), dtype=torch.int32, device=self._device)
        for step in range(steps):
            logits = base[:, step]
            if model.markov is not None and embedded is not None:
                logits = model.arithmetic.round(logits + model.markov.bias(embedded[:, step]))
            best[:, step], top = greedy(logits)
            found[0, :, step] = top - logits.gather(-1, chains[:, step : step + 1]).squeeze(-1).float()
            found[1, :, step] = logits.abs().amax(dim=-1).float()
        found[2, :, :steps] = 1.0 if model.confidence is None else model.confidence(hidden, embedded)
        gaps, peaks, confidences = (one.reshape(-1).data for one in found.cpu().numpy())
        return Judged(best.cpu().numpy().reshape(-1).data, gaps, peaks, confidences)

    def _check(self, batch: DraftBatch) -> None:
        """Raise ValueError for what a session should have refused: on a GPU an index out of range ends the process."""
        info = self._info
        for entry in batch.entries:
            if not (
                0 <= entry.slot < info.slots
                and 0 <= entry.anchor_token < info.vocab_size
                and entry.first_pos >= 0
                and entry.n_rows >= 0
                and 0 <= entry.visible_from <= entry.anchor_pos
                and (entry.n_out >= 1 or not entry.need_draft)
            ):
                raise ValueError(f"an entry is out of range: {entry}")
        if len({entry.slot for entry in batch.entries}) != len(batch.entries):
            raise ValueError("a slot occurs twice in a batch")
        expected = sum(entry.n_rows for entry in batch.entries) * info.row_bytes
        if batch.rows.nbytes != expected:
            raise ValueError(f"rows are {batch.rows.nbytes} bytes; the entries make it {expected}")

    def _append(self, batch: DraftBatch) -> None:
        """Project and store the rows of all entries, of each only what the context can hold.

        `reset` asks for nothing here: what a draft may see is `visible_from`, whatever else lies in the slot.
        """
        rows = np.frombuffer(batch.rows, np.uint8).reshape(-1, self._info.row_bytes)
        kept, positions, destinations = [], [], []
        start = 0
        for entry in batch.entries:
            start += entry.n_rows
            count = min(entry.n_rows, self._info.context)
            if count:
                kept.append(rows[start - count : start])
                positions.append(np.arange(entry.anchor_pos - count, entry.anchor_pos, dtype=np.int64))
                destinations.append(self._store.destinations(entry.slot, entry.anchor_pos - count, count))
        if not kept:
            return
        newest, where = np.concatenate(positions), np.concatenate(destinations)
        packed = kept[0] if len(kept) == 1 else np.concatenate(kept)
        for first in range(0, len(packed), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            self._project(packed[part], newest[part], where[part])

    def _project(
        self,
        rows: npt.NDArray[np.uint8],
        positions: npt.NDArray[np.int64],
        destinations: npt.NDArray[np.int64],
        padded: int | None = None,
    ) -> None:
        """uint8 [M, row_bytes], int64 [M], int64 [M]; M is rounded up to one of the row counts."""
        count = len(rows)
        size = padded or fitting(self._shapes.rows, count)
        staged = np.zeros((size, self._info.row_bytes), np.uint8)
        staged[:count] = rows
        numbers = np.zeros((2, size), np.int64)
        numbers[0, :count] = positions
        numbers[1] = self._store.scratch_row
        numbers[1, :count] = destinations
        where = torch.from_numpy(numbers).to(self._device)
        taps = torch.from_numpy(staged).to(self._device).view(torch.bfloat16).to(self._model.arithmetic.carrier)
        self._store.write(where[1], self._model.project_context(taps, where[0]))

    def _draft(self, entries: Sequence[DraftEntry], want_margins: bool) -> tuple[npt.NDArray[np.int32], _Block]:
        """The packed answer of `_forward`, on the host, for `entries` only, and what it was made of."""
        size = fitting(self._shapes.batches, len(entries))
        numbers = np.zeros((4, size), np.int64)
        visible = 0
        for index, entry in enumerate(entries):
            lowest = max(entry.visible_from, entry.anchor_pos - self._info.context)
            visible = max(visible, entry.anchor_pos - lowest)
            numbers[:, index] = entry.slot, entry.anchor_pos, lowest, entry.anchor_token
        steps = fitting(self._shapes.steps, max(min(entry.n_out, self._info.num_drafts) for entry in entries))
        context = fitting(self._shapes.contexts, visible)
        packed, block = self._forward(torch.from_numpy(numbers).to(self._device), context, steps, want_margins)
        answer: npt.NDArray[np.int32] = packed.cpu().numpy()
        return answer[: len(entries)], block

    def _forward(self, requests: Tensor, visible: int, steps: int, want_margins: bool) -> tuple[Tensor, _Block]:
        """The part of a step whose shapes are fixed by its arguments and that nothing on the host waits for.

        `requests` int64 [4, B]: slot, anchor position, lowest visible position, anchor token. The answer is int32
        [B, 3 or 4, steps]: token, whether all is finite, confidence and perhaps margin (the bits of a float32).
        """
        model, block = self._model, self._info.num_drafts
        slots, anchors, visible_from, anchor_tokens = requests.unbind()
        view = self._store.view(slots, anchors, visible_from, visible, block)
        tokens = torch.full((len(slots), block), self._mask_token_id, dtype=torch.int64, device=self._device)
        tokens[:, 0] = anchor_tokens
        # Past the end vLLM keeps every position at the last one; those drafts are never used.
        positions = (anchors.unsqueeze(1) + self._steps).clamp_(max=self._info.max_position - 1)
        hidden = model.block(tokens, positions, view)[:, :steps]
        base = model.base_logits(hidden)

        previous = anchor_tokens
        ids, tops, embedded, gaps = [], [], [], []
        for step in range(steps):
            logits = base[:, step]
            if model.markov is not None:
                embedded.append(model.markov.embed(previous))
                logits = model.arithmetic.round(logits + model.markov.bias(embedded[-1]))
            previous, top = greedy(logits)
            ids.append(previous)
            tops.append(top)
            if want_margins:
                gaps.append(margin(logits))

        top = torch.stack(tops, dim=1)
        if model.confidence is None:
            confidence = torch.ones_like(top)
        else:
            confidence = model.confidence(hidden, torch.stack(embedded, dim=1) if embedded else None)
        # NaN wins every maximum, so the greatest logit tells for all of them.
        finite = top.isfinite() & confidence.isfinite()
        planes = [torch.stack(ids, dim=1).int(), finite.int(), confidence.contiguous().view(torch.int32)]
        if want_margins:
            planes.append(torch.stack(gaps, dim=1).view(torch.int32))
        return torch.stack(planes, dim=1), _Block(hidden, base, anchor_tokens)

    def _fill(
        self,
        entries: Sequence[DraftEntry],
        wanted: Sequence[int],
        answer: npt.NDArray[np.int32],
        ok: list[bool],
        tokens: npt.NDArray[np.int32],
        confidences: npt.NDArray[np.float32],
        margins: npt.NDArray[np.float32] | None,
    ) -> None:
        """Spread the packed answer over all entries; what is not wanted or not finite stays zero."""
        for row, index in enumerate(wanted):
            count = min(entries[index].n_out, self._info.num_drafts)
            planes = answer[row, :, :count]
            ok[index] = bool(planes[1].all())
            if ok[index]:
                tokens[index, :count] = planes[0]
                confidences[index, :count] = planes[2].view(np.float32)
                if margins is not None:
                    margins[index, :count] = planes[3].view(np.float32)


def _no_ints() -> npt.NDArray[np.int64]:
    return np.zeros(0, np.int64)


def open_drafter(
    checkpoint: FilePath,
    *,
    target: FilePath | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
    slots: int = 8,
    context: int = 4096,
    num_drafts: int | None = None,
    progress: Progress = no_progress,
) -> Drafter:
    """The drafter in the folder `checkpoint`, its weights on `device`, its context store allocated; not warmed up.

    `target` lends embed_tokens and lm_head where the checkpoint lacks them. `num_drafts` below the checkpoint's block
    size makes the block really shorter, which changes the drafts: its positions see each other.
    Raises CheckpointError for the files, ConfigError for the device, the numbers and the memory.
    """
    where = open_device(device)
    if dtype not in DTYPES:
        raise ConfigError(f"a dtype of {dtype!r}; supported: {', '.join(DTYPES)}")
    arithmetic = arithmetic_for(where, DTYPES[dtype])
    for what, number in (("slots", slots), ("context", context)):
        if number < 1:
            raise ConfigError(f"{what} is {number}; expected 1 or more")

    def place(name: str, tensor: Tensor) -> Tensor:
        if name.startswith("confidence_head."):
            return tensor.to(device=where, dtype=torch.float32, copy=True)
        return tensor.to(device=where, dtype=arithmetic.dtype, copy=True).to(arithmetic.carrier)

    try:
        loaded = load_checkpoint(checkpoint, target, progress, place=place)
        return assemble(loaded, where, arithmetic, slots, context, num_drafts)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the drafter in {Path(checkpoint)} does not fit on {where}: {error}") from error


def assemble(
    loaded: LoadedCheckpoint,
    device: torch.device,
    arithmetic: Arithmetic,
    slots: int,
    context: int,
    num_drafts: int | None = None,
    shapes: Shapes | None = None,
) -> DSparkDrafter:
    """A drafter from a loaded checkpoint whose tensors are on `device` in the carrier dtype; they are taken out of it."""
    config = loaded.config
    if num_drafts is not None and not 1 <= num_drafts <= config.block_size:
        raise ConfigError(f"{num_drafts} drafts wanted; this checkpoint drafts blocks of 1 to {config.block_size}")
    count = num_drafts or config.block_size
    # Positions end at max_position: a larger context could never be filled.
    context = min(context, config.max_position)
    shape = ContextShape(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        slots=slots,
        context=context,
        block=count,
        dtype=arithmetic.carrier,
    )
    model = Qwen3DSpark(config, loaded.tensors, loaded.vocab_size, arithmetic)
    store = ContextStore(shape, device)
    info = DrafterInfo(
        kind=config.architecture,
        num_drafts=count,
        vocab_size=loaded.vocab_size,
        hidden_size=config.tap_size,
        taps=config.taps,
        row_bytes=config.row_bytes,
        slots=slots,
        context=context,
        window=0,
        max_position=config.max_position,
        identity=loaded.identity,
        markov_identity=loaded.markov_identity,
        device=str(device),
        dtype=str(arithmetic.dtype).removeprefix("torch."),
        context_bytes=shape.byte_count,
    )
    return DSparkDrafter(model, store, info, config, shapes or Shapes.of(device, slots, context, count))


def open_device(name: str) -> torch.device:
    """The torch device called `name`, with its index. Raises ConfigError if it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"a device of {name!r}; expected cpu, cuda or cuda:INDEX") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ConfigError(f"a device of {name!r}; supported: cpu, cuda, cuda:INDEX")
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(f"a device of {name!r}, but torch finds no GPU (torch {torch.__version__} {built})")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise ConfigError(f"a device of {name!r}, but there are {torch.cuda.device_count()} GPUs (from cuda:0)")
    return torch.device("cuda", index)


def arithmetic_for(device: torch.device, dtype: torch.dtype) -> Arithmetic:
    """bfloat16 is kept in float32 on a CPU without bf16 instructions: its own product is several times slower there."""
    if device.type == "cpu" and dtype == torch.bfloat16 and not _has_bf16_instructions():
        return Arithmetic(dtype, torch.float32)
    return Arithmetic(dtype, dtype)


def _has_bf16_instructions(cpuinfo: str = "/proc/cpuinfo") -> bool:
    try:
        text = Path(cpuinfo).read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    flags = set(text.split())
    return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
