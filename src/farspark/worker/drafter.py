"""The drafter: appends the rows of a step to the context store, then drafts for every request that asks, in one forward pass.

Every shape is rounded up to one of a few, so that warm-up can meet them all: requests to a batch size, visible context to
a length, rows to a count. What is padded reads zeros and writes to a row that nobody reads.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from farspark.errors import ConfigError
from farspark.worker.batch import (
    DraftBatch,
    DraftEntry,
    Drafter,
    DrafterInfo,
    DraftResult,
    Drawn,
    Judged,
    Judging,
    Progress,
)
from farspark.worker.checkpoint import DrafterConfig, LoadedCheckpoint, load_checkpoint, no_progress
from farspark.worker.checkpoint.load import FilePath
from farspark.worker.context import SMALLER_CONTEXT, ContextShape, ContextStore, ContextView
from farspark.worker.device import DeviceWork, at_work, open_device, work_on
from farspark.worker.graphs import DeviceCalls
from farspark.worker.memory import HEADROOM_BYTES, require_memory
from farspark.worker.models.base import Arithmetic, DraftModel
from farspark.worker.models.families import DEFAULT_OPTIONS, ModelOptions, build_model, footprint_of
from farspark.worker.models.heads import SUPPORT, Draw, draw, draw_uniforms, greedy, margin

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_GREATEST = torch.finfo(torch.float32).max

# Numbers that the host says of each request: slot, anchor position, lowest visible position, anchor token; with tokens drawn
# also seed and temperature.
_PLAIN, _SAMPLED = 4, 6

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
        # A GPU attends to what is visible only, wherever it lies; a CPU to all that the shape holds.
        shortest = (64, 96) if on_cpu else (256,)
        lengths = sorted(length * 2**i for length in shortest for i in range(20))
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
    state: Tensor | None  # [B, r]: the Markov head's, in front of the first draft

    def of(self, rows: Tensor) -> _Block:
        """The requests `rows` int64 [C] alone."""
        state = None if self.state is None else self.state[rows]
        return _Block(self.hidden[rows], self.base[rows], self.anchor_tokens[rows], state)


class _Asked(NamedTuple):
    """A draft's requests, and the sizes that it is rounded up to."""

    numbers: npt.NDArray[np.int64]  # [_PLAIN or _SAMPLED, requests]
    size: int  # B
    visible: int
    steps: int


class _Sampling(NamedTuple):
    """How the drafts of a block are drawn; None in its place: none is."""

    temperatures: Tensor  # float32 [B]; 0: the best token
    uniforms: Tensor  # float64 [B, steps]


class _Step(NamedTuple):
    """One position of every chain, with the tokens before it fixed."""

    logits: Tensor  # [B, drafted vocabulary]
    embedded: Tensor | None  # [B, r]: the Markov embedding of the token before
    best: Tensor  # int64 [B]: the target's id of the greatest logit, or of the one that was drawn
    top: Tensor  # float32 [B]: the greatest logit
    drawn: Draw | None = None  # its support in the target's ids; where requests have temperatures


class _Answer(NamedTuple):
    """The arrays of a `DraftResult` as they are filled; zero where nothing was."""

    ok: list[bool]  # [entries]
    tokens: npt.NDArray[np.int32]  # [entries, N]
    confidences: npt.NDArray[np.float32]  # [entries, N]
    margins: npt.NDArray[np.float32] | None  # [entries, N]
    mask: npt.NDArray[np.int32] | None  # [entries]; this and the next two where something is drawn
    support: npt.NDArray[np.int32] | None  # [entries, N, SUPPORT]
    q: npt.NDArray[np.float32] | None  # [entries, N, SUPPORT]

    @classmethod
    def of(cls, entries: int, num_drafts: int, *, want_margins: bool, is_sampled: bool) -> _Answer:
        shape = entries, num_drafts
        return cls(
            ok=[True] * entries,
            tokens=np.zeros(shape, np.int32),
            confidences=np.zeros(shape, np.float32),
            margins=np.zeros(shape, np.float32) if want_margins else None,
            mask=np.zeros(entries, np.int32) if is_sampled else None,
            support=np.zeros((*shape, SUPPORT), np.int32) if is_sampled else None,
            q=np.zeros((*shape, SUPPORT), np.float32) if is_sampled else None,
        )

    def result(self, judge: Judging | None) -> DraftResult:
        drawn = None
        if self.mask is not None and self.support is not None and self.q is not None:
            drawn = Drawn(self.mask.data, self.support.reshape(-1).data, self.q.reshape(-1).data)
        return DraftResult(
            ok=self.ok,
            tokens=self.tokens.reshape(-1).data,
            confidences=self.confidences.reshape(-1).data,
            margins=None if self.margins is None else self.margins.reshape(-1).data,
            judge=judge,
            drawn=drawn,
        )


class DSparkDrafter:
    """A `Drafter` on a family's `DraftModel`. Used under the drafting lock, by one thread at a time."""

    def __init__(
        self,
        model: DraftModel,
        store: ContextStore,
        info: DrafterInfo,
        config: DrafterConfig,
        shapes: Shapes,
        calls: DeviceCalls,
    ) -> None:
        self._model = model
        self._store = store
        self._info = info
        self._shapes = shapes
        self._calls = calls
        self._device = store.entries.device
        self._mask_token_id = config.mask_token_id
        self._skipped = 0 if config.anchor_predicts else 1  # block positions in front of the first that predicts
        # int64 [vocabulary]: the logits' row of a target's id, -1 for those not drafted; None: the same.
        self._row_of: Tensor | None = None
        if model.to_target is not None:
            self._row_of = torch.full((info.vocab_size,), -1, dtype=torch.int64, device=self._device)
            self._row_of[model.to_target] = torch.arange(len(model.to_target), device=self._device)

    @property
    def info(self) -> DrafterInfo:
        return self._info

    def __repr__(self) -> str:
        info = self._info
        return f"DSparkDrafter({info.kind}, {info.device}, {info.dtype}, slots={info.slots}, context={info.context})"

    def warm_up(self, progress: Progress) -> None:
        info, shapes, most = self._info, self._shapes, self._shapes.steps[-1]
        if self._device.type == "cpu":
            # Nothing is compiled for a combination of sizes here: each size once, beside the smallest of the others.
            sizes = [(batch, shapes.contexts[0], 1) for batch in shapes.batches]
            sizes += [(1, context, 1) for context in shapes.contexts[1:]] + [(1, shapes.contexts[0], most)]
        else:
            sizes = list(itertools.product(shapes.batches, shapes.contexts, shapes.steps))
        kinds = [(False, _PLAIN), (True, _PLAIN)] + ([(True, _SAMPLED)] if info.support else [])
        total, done = len(shapes.rows) + len(sizes), 0
        with at_work(self._device):
            for rows in shapes.rows:
                self._row_staging(rows)
                self._calls.run(rows, self._write)
                progress("warming up", done := done + 1, total)
            for batch, context, steps in sizes:
                for want_margins, numbers in kinds:
                    nothing = _Asked(np.zeros((numbers, 0), np.int64), batch, context, steps)
                    packed, _ = self._run(nothing, want_margins)
                    packed.cpu()
                progress("warming up", done := done + 1, total)

    def draft(self, batch: DraftBatch) -> DraftResult:
        entries = batch.entries
        self._check(batch)
        wanted = [index for index, entry in enumerate(entries) if entry.need_draft]
        is_sampled = any(entries[index].temperature for index in wanted)
        answer = _Answer.of(len(entries), self._info.num_drafts, want_margins=batch.want_margins, is_sampled=is_sampled)
        judge = None
        with at_work(self._device):
            self._append(batch)
            if wanted:
                asked = self._ask([entries[index] for index in wanted], is_sampled)
                packed, block = self._run(asked, batch.want_margins or is_sampled)
                self._fill(entries, wanted, packed.cpu().numpy(), answer)
                if batch.want_margins:
                    # The next step may overwrite the block.
                    block = block.of(torch.arange(len(wanted), device=self._device))
                    judge = self._judging(asked, block, {index: row for row, index in enumerate(wanted)})
        return answer.result(judge)

    def _judging(self, asked: _Asked, block: _Block, rows: dict[int, int]) -> Judging:
        """`rows`: the row of `block` of each entry that was drafted for."""
        num_drafts = self._info.num_drafts

        def judge(entries: Sequence[int], tokens: memoryview) -> Judged:
            chains = torch.frombuffer(bytearray(tokens), dtype=torch.int32).view(-1, num_drafts)
            chosen = [rows[entry] for entry in entries]
            with at_work(self._device):
                return self._judge(block, chosen, chains)._replace(routing=self._routing_margins(asked, chosen))

        return judge

    def _routing_margins(self, asked: _Asked, rows: Sequence[int]) -> memoryview | None:
        """float32 [C]: how close the choices of experts were for `rows` of a draft that has been made; None without a router.

        The block runs once more, in the draft's own shape and over the same context, so a draft that nobody asks about pays
        nothing for it.
        """
        margins_of = self._model.routing_margins
        if margins_of is None:
            return None
        requests = np.zeros((_PLAIN, asked.size), np.int64)
        requests[:, : asked.numbers.shape[1]] = asked.numbers[:_PLAIN]
        slots, anchors, visible_from, anchor_tokens = torch.from_numpy(requests).to(self._device).unbind()
        margins = margins_of(*self._block_of(slots, anchors, visible_from, anchor_tokens, asked.visible))
        chosen: npt.NDArray[np.float32] = margins.clamp_(max=_GREATEST).cpu().numpy()[list(rows)]
        return chosen.data

    def _judge(self, block: _Block, rows: Sequence[int], chains: Tensor) -> Judged:
        """Teacher-force int32 `chains` [C, N] through the rows of `block`.

        A token outside the drafted vocabulary has no logit: its gap is the greatest float32.
        """
        chosen = block.of(torch.tensor(rows, dtype=torch.int64, device=self._device))
        chains = chains.to(self._device, torch.int64)
        found = torch.zeros((3, *chains.shape), dtype=torch.float32, device=self._device)
        best = torch.zeros(chains.shape, dtype=torch.int32, device=self._device)
        steps = list(self._walk(chosen, chains))
        for index, step in enumerate(steps):
            best[:, index] = step.best
            found[0, :, index] = step.top - self._logit_of(chains[:, index], step.logits)
            found[1, :, index] = step.logits.abs().amax(dim=-1).float()
        found[2, :, : len(steps)] = self._confidence(chosen, _embedded(steps))
        gaps, peaks, confidences = (one.reshape(-1).data for one in found.clamp_(max=_GREATEST).cpu().numpy())
        return Judged(best.cpu().numpy().reshape(-1).data, gaps, peaks, confidences)

    def _logit_of(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """float32 [B] of [B, drafted vocabulary] at the target's ids `tokens` int64 [B]; -inf where there is none."""
        if self._row_of is None:
            return logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float()
        rows = self._row_of[tokens]
        found = logits.gather(-1, rows.clamp(min=0).unsqueeze(-1)).squeeze(-1).float()
        return found.masked_fill(rows < 0, float("-inf"))

    def _walk(self, block: _Block, forced: Tensor | None = None, sampling: _Sampling | None = None) -> Iterator[_Step]:
        """The sequential part: each position's logits after the tokens in front of it, which are the best ones, those drawn, or
        `forced` int64 [B, N]."""
        model = self._model
        previous, embedded, state = block.anchor_tokens, None, block.state
        for index in range(block.base.shape[1]):
            logits = block.base[:, index]
            if model.markov is not None:
                embedded = model.markov.embed(previous)
                logits, state = model.markov.step(logits, block.hidden[:, index], embedded, state)
            best, top = greedy(logits)
            drawn = None
            if sampling is not None:
                drawn = draw(logits, sampling.temperatures, sampling.uniforms[:, index])
                best = torch.where(sampling.temperatures > 0, drawn.tokens, best)
            if model.to_target is not None:
                best = model.to_target[best]
                drawn = drawn and drawn._replace(support=model.to_target[drawn.support])
            yield _Step(logits, embedded, best, top, drawn)
            previous = best if forced is None else forced[:, index]

    def _confidence(self, block: _Block, embedded: Tensor | None) -> Tensor:
        """float32 [B, steps], given the embeddings of the tokens in front [B, steps, r]."""
        if self._model.confidence is None:
            return torch.ones(block.base.shape[:2], dtype=torch.float32, device=self._device)
        return self._model.confidence(block.hidden, embedded)

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
                and (entry.temperature == 0.0 or (info.support and 0.0 < entry.temperature < math.inf))
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
        for first in range(0, len(newest), ROWS_AT_ONCE):
            part = slice(first, min(first + ROWS_AT_ONCE, len(newest)))
            count = part.stop - part.start
            size = fitting(self._shapes.rows, count)
            taps, numbers = self._row_staging(size)
            _copy_rows(kept, first, taps.view(torch.uint8).numpy()[:count])
            to = numbers.numpy()
            to[0, :count], to[1, :count] = newest[part], where[part]
            # What is left over in the rows after them is projected too, and written where nobody reads.
            to[0, count:], to[1, count:] = 0, self._store.scratch_row
            self._calls.run(size, self._write)

    def _row_staging(self, size: int) -> Sequence[Tensor]:
        """bf16 [size, row_bytes / 2] for rows, int64 [2, size] for their positions and their rows of the store."""

        def make() -> Sequence[Tensor]:
            numbers = torch.zeros((2, size), dtype=torch.int64)
            numbers[1] = self._store.scratch_row
            return torch.zeros((size, self._info.row_bytes // 2), dtype=torch.bfloat16), numbers

        return self._calls.staging(size, make)

    def _write(self, taps: Tensor, where: Tensor) -> None:
        """The two of `_row_staging`, on the device."""
        taps = taps.to(self._model.arithmetic.carrier)
        self._store.write(where[1], self._model.project_context(taps, where[0]))

    def _ask(self, entries: Sequence[DraftEntry], is_sampled: bool) -> _Asked:
        numbers = np.zeros((_SAMPLED if is_sampled else _PLAIN, len(entries)), np.int64)
        visible = 0
        for index, entry in enumerate(entries):
            lowest = max(entry.visible_from, entry.anchor_pos - self._info.context)
            visible = max(visible, entry.anchor_pos - lowest)
            numbers[:_PLAIN, index] = entry.slot, entry.anchor_pos, lowest, entry.anchor_token
        if is_sampled:
            numbers[_PLAIN] = [entry.seed for entry in entries]
            numbers[_PLAIN + 1] = np.array([entry.temperature for entry in entries], np.float32).view(np.int32)
        steps = fitting(self._shapes.steps, max(min(entry.n_out, self._info.num_drafts) for entry in entries))
        context = fitting(self._shapes.contexts, visible)
        return _Asked(numbers, fitting(self._shapes.batches, len(entries)), context, steps)

    def _run(self, asked: _Asked, want_margins: bool) -> tuple[Tensor, _Block]:
        """`_forward` of what the host asks."""
        numbers, size, visible, steps = asked
        rows = len(numbers)
        key = size, visible, steps, want_margins, rows
        (staged,) = self._calls.staging(key, lambda: [torch.zeros((rows, size), dtype=torch.int64)])
        requests = staged.numpy()
        requests[:, : numbers.shape[1]], requests[:, numbers.shape[1] :] = numbers, 0
        forward = functools.partial(self._forward, visible=visible, steps=steps, want_margins=want_margins)
        return self._calls.run(key, forward)

    def _forward(self, requests: Tensor, visible: int, steps: int, want_margins: bool) -> tuple[Tensor, _Block]:
        """The part of a step whose shapes are fixed by its arguments and that nothing on the host waits for.

        `requests` int64 [_PLAIN, B]: slot, anchor position, lowest visible position, anchor token; where tokens are drawn
        [_SAMPLED, B], with seed and temperature (the bits of a float32), and always with margins. The answer is int32
        [B, planes, steps]: token, whether all is finite, confidence and perhaps margin (the bits of a float32), then where
        tokens are drawn SUPPORT planes of ids and SUPPORT of q (the bits of a float32).
        """
        slots, anchors, visible_from, anchor_tokens, *drawing = requests.unbind()
        model, first = self._model, self._skipped
        hidden = model.block(*self._block_of(slots, anchors, visible_from, anchor_tokens, visible))
        state = None if model.markov is None else model.markov.start(anchor_tokens, hidden[:, :first])
        hidden = hidden[:, first : first + steps]
        block = _Block(hidden, model.base_logits(hidden), anchor_tokens, state)

        if not want_margins and model.to_target is None:
            answer = model.arithmetic.greedy_answer(block.base, hidden, anchor_tokens, model.markov, model.confidence)
            if answer is not None:
                return answer, block

        gaps: list[Tensor] = []
        supports: list[Tensor] = []
        probabilities: list[Tensor] = []
        sampling = None
        if drawing:
            seeds, temperature_bits = drawing
            sampling = _Sampling(temperature_bits.int().view(torch.float32), draw_uniforms(seeds, anchors, steps))
        walked = []
        for step in self._walk(block, sampling=sampling):
            if step.drawn is not None:
                gaps.append(step.drawn.margins)
                supports.append(step.drawn.support)
                probabilities.append(step.drawn.q)
            elif want_margins:
                gaps.append(margin(step.logits))
            walked.append(step)
        ids, tops = (torch.stack(one, dim=1) for one in ([s.best for s in walked], [s.top for s in walked]))
        confidence = self._confidence(block, _embedded(walked))
        # NaN wins every maximum, so the greatest logit tells for all of them.
        finite = tops.isfinite() & confidence.isfinite()
        planes = [ids.int(), finite.int(), confidence.contiguous().view(torch.int32)]
        if want_margins:
            planes.append(torch.stack(gaps, dim=1).view(torch.int32))
        packed = torch.stack(planes, dim=1)
        if supports:
            drawn_from = torch.stack(probabilities, dim=2).view(torch.int32)
            packed = torch.cat((packed, torch.stack(supports, dim=2).int(), drawn_from), dim=1)
        return packed, block

    def _block_of(
        self, slots: Tensor, anchors: Tensor, visible_from: Tensor, anchor_tokens: Tensor, visible: int
    ) -> tuple[Tensor, Tensor, ContextView]:
        """What a model's block is given for int64 [B] each: tokens and positions int64 [B, Q], and what it attends to."""
        length = self._store.shape.block
        # Past the end vLLM keeps every position at the last one; those drafts are never used.
        tokens, positions = self._model.arithmetic.block_inputs(
            anchors, anchor_tokens, self._mask_token_id, length, self._info.max_position - 1
        )
        return tokens, positions, self._store.view(slots, anchors, visible_from, visible, length)

    def _fill(
        self,
        entries: Sequence[DraftEntry],
        wanted: Sequence[int],
        packed: npt.NDArray[np.int32],
        answer: _Answer,
    ) -> None:
        """Spread the packed answer over all entries; what is not wanted or not finite stays zero."""
        for row, index in enumerate(wanted):
            count = min(entries[index].n_out, self._info.num_drafts)
            planes = packed[row, :, :count]
            answer.ok[index] = bool(planes[1].all())
            if not answer.ok[index]:
                continue
            answer.tokens[index, :count] = planes[0]
            answer.confidences[index, :count] = planes[2].view(np.float32)
            if answer.margins is not None:
                answer.margins[index, :count] = planes[3].view(np.float32)
            if (
                answer.mask is not None
                and answer.support is not None
                and answer.q is not None
                and entries[index].temperature
            ):
                answer.mask[index] = 1
                answer.support[index, :count] = planes[4 : 4 + SUPPORT].T
                answer.q[index, :count] = planes[4 + SUPPORT :].view(np.float32).T


def _embedded(steps: Sequence[_Step]) -> Tensor | None:
    """[B, steps, r]; None without a Markov head."""
    found = [step.embedded for step in steps if step.embedded is not None]
    return torch.stack(found, dim=1) if found else None


def _copy_rows(pieces: Sequence[npt.NDArray[np.uint8]], first: int, to: npt.NDArray[np.uint8]) -> None:
    """Fill `to` [M, row_bytes] with rows first .. first + M - 1 of `pieces`, one after the other."""
    done = 0
    for piece in pieces:
        part = piece[first : first + len(to) - done]
        to[done : done + len(part)] = part
        done += len(part)
        first = max(0, first - len(piece))


def open_drafter(
    checkpoint: FilePath,
    *,
    target: FilePath | None = None,
    device: str = "cpu",
    dtype: str = "bfloat16",
    slots: int = 8,
    context: int = 4096,
    num_drafts: int | None = None,
    options: ModelOptions = DEFAULT_OPTIONS,
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
    for what, number in (("slots", slots), ("context", context)):
        if number < 1:
            raise ConfigError(f"{what} is {number}; expected 1 or more")
    work = work_on(where, DTYPES[dtype])
    arithmetic = work.arithmetic

    def place(name: str, tensor: Tensor, as_stored: bool) -> Tensor:
        if as_stored:
            return tensor.to(device=where, copy=True)
        return tensor.to(device=where, dtype=arithmetic.dtype, copy=True).to(arithmetic.carrier)

    def admit(config: DrafterConfig) -> None:
        shape = _context_shape(config, arithmetic, slots, context, num_drafts)
        held, making = footprint_of(config, arithmetic, where)
        work_bytes = max(HEADROOM_BYTES, making)
        what = f"the drafter in {Path(checkpoint)}, its weights of {held:,} bytes and room to work"
        require_memory(what, held + work_bytes, where, "free some there, or take a device with more")
        both = held + max(making, shape.byte_count + HEADROOM_BYTES)
        require_memory(f"{what}, with {shape}", both, where, SMALLER_CONTEXT)

    try:
        loaded = load_checkpoint(checkpoint, target, progress, place=place, admit=admit)
        return assemble(loaded, where, work, slots, context, num_drafts, options)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"the drafter in {Path(checkpoint)} does not fit on {where}: {error}") from error


def assemble(
    loaded: LoadedCheckpoint,
    device: torch.device,
    work: DeviceWork,
    slots: int,
    context: int,
    num_drafts: int | None = None,
    options: ModelOptions = DEFAULT_OPTIONS,
    shapes: Shapes | None = None,
) -> DSparkDrafter:
    """A drafter from a loaded checkpoint whose tensors are on `device` as placed; they are taken out of it."""
    config, arithmetic = loaded.config, work.arithmetic
    shape = _context_shape(config, arithmetic, slots, context, num_drafts)
    context, count = shape.context, num_drafts or config.max_drafts
    model = build_model(loaded, arithmetic, options)
    store = ContextStore(shape, device, work.attention)
    drafted = loaded.vocab_size if model.to_target is None else len(model.to_target)
    info = DrafterInfo(
        kind=config.kind,
        num_drafts=count,
        vocab_size=loaded.vocab_size,
        hidden_size=config.tap_size,
        taps=config.taps,
        row_bytes=config.row_bytes,
        slots=slots,
        context=context,
        window=config.window,
        max_position=config.max_position,
        identity=loaded.identity,
        markov_identity=loaded.markov_identity,
        device=str(device),
        dtype=str(arithmetic.dtype).removeprefix("torch."),
        context_bytes=shape.byte_count,
        weight_bytes=model.weight_bytes,
        # Of a smaller drafted vocabulary there are not as many ids to draw from as a reply has places for.
        support=SUPPORT if drafted >= SUPPORT else 0,
        has_router=model.routing_margins is not None,
    )
    return DSparkDrafter(model, store, info, config, shapes or Shapes.of(device, slots, context, count), work.calls)


def _context_shape(
    config: DrafterConfig, arithmetic: Arithmetic, slots: int, context: int, num_drafts: int | None
) -> ContextShape:
    if num_drafts is not None and not 1 <= num_drafts <= config.max_drafts:
        raise ConfigError(f"{num_drafts} drafts wanted; this checkpoint drafts blocks of 1 to {config.max_drafts}")
    count = num_drafts or config.max_drafts
    return ContextShape(
        layers=config.context_layers,
        entry=config.context_entry,
        slots=slots,
        # Positions end at max_position and a window slides: a larger context could never be filled or read.
        context=min(context, config.max_position, config.window or context),
        block=count if config.anchor_predicts else 1 + count,
        dtype=arithmetic.carrier,
    )
