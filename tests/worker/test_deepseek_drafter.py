"""Drafting with DeepSeek stages: the ring of a window, slots, batches, both modes, and a worker over TCP.

References are the formulas (tests/fakes/plain_deepseek.py), or the same drafter with one request alone that was sent
everything at once, which the formulas are compared with.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.fakes.plain_deepseek import PlainDeepseek
from tests.fakes.plain_dspark import PlainDraft
from tests.fakes.shape import shape_for
from tests.fakes.tiny_deepseek import write_tiny_deepseek
from torch import Tensor

from farspark.clock import Deadline
from farspark.errors import ConfigError
from farspark.transport import Channel, connect
from farspark.wire import codec
from farspark.wire.layout import EntryFlag, FrameStatus, Operation, RequestStatus
from farspark.wire.messages import Entry, Header
from farspark.worker.batch import DraftBatch, DraftEntry, DraftResult
from farspark.worker.config import WorkerConfig
from farspark.worker.drafter import DSparkDrafter, open_drafter
from farspark.worker.models.deepseek_v4 import DeepseekV4
from farspark.worker.models.experts import Router
from farspark.worker.models.families import ModelOptions

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 5
VOCAB = 97
# Small enough that most tests go past it; the published one is tested once.
WINDOW = 8


@pytest.fixture(scope="module", params=["v4", "v41"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_deepseek(tmp_path_factory.mktemp(request.param), request.param, sliding_window=WINDOW)


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainDeepseek:
    return PlainDeepseek.read(folder)


def float32_drafter(folder: Path, **options: Any) -> DSparkDrafter:
    return cast(DSparkDrafter, open_drafter(folder, **{"dtype": "float32", "slots": 8, **options}))


@pytest.fixture(scope="module")
def alone(folder: Path) -> DSparkDrafter:
    """The drafter that serves one request at a time, from one STEP."""
    return float32_drafter(folder, slots=1)


def make_rows(drafter: DSparkDrafter, count: int, seed: int) -> Tensor:
    """bf16 [count, taps * hidden]"""
    return torch.randn(count, drafter.info.row_bytes // 2, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(rows: Sequence[Tensor]) -> memoryview:
    joined = torch.cat([part.reshape(-1) for part in rows]).contiguous()
    return memoryview(joined.view(torch.uint8).numpy().tobytes())


def tokens_of(result: DraftResult, index: int = 0) -> list[int]:
    assert result.ok[index]
    return [int(token) for token in result.tokens][index * BLOCK : (index + 1) * BLOCK]


def confidences_of(result: DraftResult, index: int = 0) -> list[float]:
    return [float(one) for one in result.confidences][index * BLOCK : (index + 1) * BLOCK]


@dataclass
class Request:
    """What a session keeps of one request, and the rows that a reference needs again."""

    slot: int
    start: int = 0
    rows: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        return self.start + sum(len(part) for part in self.rows)

    def entry(self, more: Tensor, anchor: int, *, window: int = WINDOW) -> DraftEntry:
        is_new, first = not self.rows, self.length
        self.rows.append(more)
        visible = max(self.start, self.length - window)
        return DraftEntry(self.slot, is_new, first, len(more), visible, anchor, True, BLOCK)

    def by_itself(self, drafter: DSparkDrafter, anchor: int, *, window: int = WINDOW) -> DraftResult:
        """What a drafter says that is sent the window at once."""
        rows = torch.cat(self.rows)[-window:]
        first = self.length - len(rows)
        entry = DraftEntry(0, True, first, len(rows), first, anchor, True, BLOCK)
        return drafter.draft(DraftBatch([entry], packed([rows])))

    def by_formula(self, plain: PlainDeepseek, anchor: int) -> PlainDraft:
        return plain.draft(torch.cat(self.rows).float(), self.start, anchor)


def same(result: DraftResult, index: int, other: DraftResult) -> None:
    assert tokens_of(result, index) == tokens_of(other)
    assert confidences_of(result, index) == pytest.approx(confidences_of(other), abs=1e-5)


def agree(result: DraftResult, expected: PlainDraft, index: int = 0) -> None:
    assert tokens_of(result, index) == expected.tokens
    assert confidences_of(result, index) == pytest.approx(expected.confidences, abs=1e-4)


# The ring -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch_size_drafts_as_one_request_alone(
    folder: Path, plain: PlainDeepseek, alone: DSparkDrafter, batch: int
) -> None:
    """Contexts from one row to beyond the window, increments of 1 to 10 rows, starts in mid-sequence, in any slots."""
    drafter, rng = float32_drafter(folder), random.Random(batch)
    requests = [Request(slot, start=rng.choice((0, 1, 500))) for slot in rng.sample(range(8), batch)]
    for step in range(2):
        more = [make_rows(drafter, rng.randrange(1, 11), 100 * step + index) for index in range(batch)]
        anchors = [rng.randrange(VOCAB) for _ in range(batch)]
        entries = [request.entry(rows, anchor) for request, rows, anchor in zip(requests, more, anchors, strict=True)]
        result = drafter.draft(DraftBatch(entries, packed(more)))
        for index, (request, anchor) in enumerate(zip(requests, anchors, strict=True)):
            same(result, index, request.by_itself(alone, anchor))
    agree(result, requests[0].by_formula(plain, anchors[0]))


@pytest.mark.parametrize("first", [0, 3, 4000])
@pytest.mark.parametrize("count", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1])
def test_RING_VALID_APC_GAP_a_poisoned_slot_opened_anywhere_with_any_number_of_rows(
    folder: Path, plain: PlainDeepseek, first: int, count: int
) -> None:
    drafter = float32_drafter(folder, slots=2)
    drafter._store.entries[:, : 2 * WINDOW] = float("nan")
    rows = make_rows(drafter, count, count)
    entry = DraftEntry(1, True, first, count, max(first, first + count - WINDOW), 11, True, BLOCK)
    result = drafter.draft(DraftBatch([entry], packed([rows])))
    expected = plain.draft(rows.float(), first, 11)
    assert tokens_of(result) == expected.tokens
    # Angles of positions in the thousands are good to about 1e-4 in float32.
    assert confidences_of(result) == pytest.approx(expected.confidences, abs=1e-5 if first < 4000 else 5e-3)


def test_RING_REWIND_a_long_random_life_equals_one_that_only_saw_the_window(
    folder: Path, plain: PlainDeepseek, alone: DSparkDrafter
) -> None:
    drafter, rng = float32_drafter(folder, slots=3), random.Random(1)
    requests = {slot: Request(slot) for slot in range(3)}
    for step in range(30):
        slot = rng.randrange(3)
        if rng.random() < 0.08:
            requests[slot] = Request(slot, start=rng.randrange(50))
        request, anchor = requests[slot], rng.randrange(VOCAB)
        more = make_rows(drafter, rng.choice((1, 1, 1, 2, 6, 20)), step)
        result = drafter.draft(DraftBatch([request.entry(more, anchor)], packed([more])))
        same(result, 0, request.by_itself(alone, anchor))
        if step % 15 == 14:
            agree(result, request.by_formula(plain, anchor))


def test_SLOT_BEGIN_many_reuses_leave_nothing_behind(folder: Path, alone: DSparkDrafter) -> None:
    drafter = float32_drafter(folder, slots=1)
    for turn in range(40):
        request = Request(0, start=turn % 5)
        rows = make_rows(drafter, 1 + turn * 7 % (2 * WINDOW), turn)
        result = drafter.draft(DraftBatch([request.entry(rows, 3)], packed([rows])))
        if turn % 4 == 0:
            same(result, 0, request.by_itself(alone, 3))


def test_RING_VALID_a_request_with_rows_that_are_not_finite_fails_alone(folder: Path, alone: DSparkDrafter) -> None:
    drafter = float32_drafter(folder)
    good, bad = Request(0), Request(1)
    rows = [make_rows(drafter, 3, 1), make_rows(drafter, 3, 2)]
    rows[1][1, 7] = float("nan")
    entries = [good.entry(rows[0], 5), bad.entry(rows[1], 5)]
    result = drafter.draft(DraftBatch(entries, packed(rows)))
    assert list(result.ok) == [True, False]
    same(result, 0, good.by_itself(alone, 5))


@pytest.mark.parametrize("context", [64, 128, 512])
def test_CTX_LIMIT_the_published_window_is_all_that_is_ever_held(tmp_path: Path, context: int) -> None:
    folder = write_tiny_deepseek(tmp_path, "v41")
    drafter = float32_drafter(folder, slots=2, context=context)
    held = min(context, 128)
    assert (drafter.info.window, drafter.info.context) == (128, held)
    assert drafter.info.context_bytes == 3 * (2 * held + 2 + 2 * BLOCK) * 64 * 4
    request, plain = Request(0, start=7), PlainDeepseek.read(folder)
    rows = make_rows(drafter, 200, 4)
    result = drafter.draft(DraftBatch([request.entry(rows, 5, window=held)], packed([rows])))
    expected = plain.draft(rows.float(), 7, 5, context=held)
    agree(result, expected)
    assert expected.tokens != plain.draft(rows.float(), 7, 5, context=held - 40).tokens


def test_CTX_LIMIT_a_million_positions_take_no_more_memory(folder: Path) -> None:
    sizes = {float32_drafter(folder, context=context).info.context_bytes for context in (WINDOW, 4096, 1_000_000)}
    assert len(sizes) == 1


@pytest.mark.parametrize("edge", [0, 2, 5])
def test_MAXLEN_EDGE_positions_stop_at_the_last_one(tmp_path: Path, edge: int) -> None:
    folder = write_tiny_deepseek(tmp_path, "v41", max_position_embeddings=40)
    drafter, plain = float32_drafter(folder, slots=1), PlainDeepseek.read(folder)
    rows = make_rows(drafter, 40 - edge, edge)
    result = drafter.draft(DraftBatch([Request(0).entry(rows, 5, window=128)], packed([rows])))
    agree(result, plain.draft(rows.float(), 0, 5))


@pytest.mark.parametrize("count", [1, 3])
def test_K_VS_BLOCK_fewer_drafts_are_a_shorter_block(folder: Path, plain: PlainDeepseek, count: int) -> None:
    drafter = float32_drafter(folder, num_drafts=count)
    rows = make_rows(drafter, 6, 2)
    entry = DraftEntry(0, True, 0, 6, 0, 5, True, count)
    result = drafter.draft(DraftBatch([entry], packed([rows])))
    assert [int(token) for token in result.tokens] == plain.draft(rows.float(), 0, 5, num_drafts=count).tokens
    with pytest.raises(ConfigError, match="blocks of 1 to 5"):
        float32_drafter(folder, num_drafts=6)


# Modes and dtypes -----------------------------------------------------------------------------------------------------


def test_the_reference_mode_drafts_as_the_formulas_with_fp8_in_between(folder: Path) -> None:
    """Where a float32 sum's last bit moves a value over a rounding, the two go apart: seldom, and not far."""
    drafter = float32_drafter(folder, options=ModelOptions(quantisation="reference"))
    plain, exact = PlainDeepseek.read(folder, quantises=True), float32_drafter(folder)
    close = same_as_plain_mode = 0
    for seed in range(4):
        rows = make_rows(drafter, 3 + seed, 40 + seed)
        batch = DraftBatch([Request(0).entry(rows, seed)], packed([rows]))
        result, expected = drafter.draft(batch), plain.draft(rows.float(), 0, seed)
        is_close = confidences_of(result) == pytest.approx(expected.confidences, abs=1e-3)
        close += is_close and tokens_of(result) == expected.tokens
        same_as_plain_mode += confidences_of(result) == pytest.approx(confidences_of(exact.draft(batch)), abs=1e-3)
    assert close >= 3
    assert same_as_plain_mode == 0


def test_bfloat16_drafts_are_near_those_of_float32(folder: Path) -> None:
    """Most tokens are the same; logits here are random, so near ties are frequent."""
    rounded, exact = float32_drafter(folder, dtype="bfloat16"), float32_drafter(folder)
    equal = total = 0
    for seed in range(20):
        rows = make_rows(exact, 6, seed)
        batch = DraftBatch([Request(0).entry(rows, seed)], packed([rows]))
        ours, theirs = tokens_of(rounded.draft(batch)), tokens_of(exact.draft(batch))
        equal += sum(a == b for a, b in zip(ours, theirs, strict=True))
        total += BLOCK
    print(f"{equal} of {total}")
    assert equal >= 0.7 * total


def test_the_identity_does_not_depend_on_how_it_is_served(folder: Path) -> None:
    infos = [
        float32_drafter(folder, **options).info
        for options in ({}, {"dtype": "bfloat16"}, {"options": ModelOptions(quantisation="reference")})
    ]
    assert len({(info.identity, info.markov_identity) for info in infos}) == 1


def test_other_chains_are_judged_as_the_formulas_teacher_force_them(folder: Path, plain: PlainDeepseek) -> None:
    drafter = float32_drafter(folder)
    rows = make_rows(drafter, 6, 8)
    result = drafter.draft(DraftBatch([Request(0).entry(rows, 5)], packed([rows]), want_margins=True))
    drafted = plain.draft(rows.float(), 0, 5)
    assert result.judge is not None
    chain = [3, drafted.tokens[1], 9, 96, 0]
    judged = result.judge([0], memoryview(array("i", chain)))
    forced = plain.chain(drafted.hidden, drafted.base, 5, forced=chain)
    assert [int(one) for one in judged.best] == forced.tokens
    gaps = [float(forced.logits[k].max() - forced.logits[k][chain[k]]) for k in range(BLOCK)]
    assert [float(one) for one in judged.gaps] == pytest.approx(gaps, abs=1e-3)
    assert [float(one) for one in judged.confidences] == pytest.approx(forced.confidences, abs=1e-4)


# Routing margins -------------------------------------------------------------------------------------------------------


def routing_of(result: DraftResult, entries: Sequence[int]) -> list[float]:
    assert result.judge is not None
    routing = result.judge(entries, memoryview(bytes(4 * BLOCK * len(entries))).cast("i")).routing
    assert routing is not None
    return [float(one) for one in routing]


def test_the_smallest_routing_margin_of_each_block_is_that_of_the_formulas(folder: Path, plain: PlainDeepseek) -> None:
    """Five requests of a batch of eight, of which one only appends; again after others have drafted in slots of their own."""
    drafter = float32_drafter(folder)
    assert drafter.info.has_router
    requests = [Request(slot, start=slot * 50) for slot in (6, 1, 4, 0, 3)]
    rows = [make_rows(drafter, 2 + 3 * index, index) for index in range(5)]
    entries = [
        request.entry(part, 10 + index) for index, (request, part) in enumerate(zip(requests, rows, strict=True))
    ]
    entries[2] = entries[2]._replace(need_draft=False)
    result = drafter.draft(DraftBatch(entries, packed(rows), want_margins=True))
    expected = {}
    for index, request in enumerate(requests):
        request.by_formula(plain, 10 + index)
        expected[index] = min(plain.margins)
    assert len(plain.margins) == 3 * BLOCK
    order = [4, 0, 3]
    found = routing_of(result, order)
    assert found == pytest.approx([expected[index] for index in order], rel=1e-3, abs=1e-5)
    assert len(set(found)) == 3
    other = make_rows(drafter, 9, 77)
    drafter.draft(DraftBatch([Request(7).entry(other, 5)], packed([other])))
    assert routing_of(result, order) == found
    assert routing_of(result, [1]) == pytest.approx([expected[1]], rel=1e-3, abs=1e-5)


def test_a_step_pays_nothing_for_routing_margins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the margins nor for a second look at the block; a judgement does, once for all of its chains."""
    asked: list[int] = []
    blocks: list[int] = []
    margins, through = Router.margins, DeepseekV4._through_stages

    def noting_margins(router: Router, x: Tensor) -> Tensor:
        asked.append(len(x))
        return margins(router, x)

    def noting_blocks(model: DeepseekV4, tokens: Tensor, *rest: Any) -> Tensor:
        blocks.append(len(tokens))
        return through(model, tokens, *rest)

    monkeypatch.setattr(Router, "margins", noting_margins)
    monkeypatch.setattr(DeepseekV4, "_through_stages", noting_blocks)
    drafter, rows = float32_drafter(folder), make_rows(float32_drafter(folder), 4, 1)
    more = [rows, rows]
    entries = [Request(slot).entry(rows, 5) for slot in (0, 1)]
    result = drafter.draft(DraftBatch(entries, packed(more), want_margins=True))
    assert (asked, blocks) == ([], [2])
    routing_of(result, [0, 1])
    assert (asked, blocks) == ([2 * BLOCK] * 3, [2, 2])


@pytest.mark.gpu
def test_routing_margins_on_a_gpu_are_those_of_a_cpu(folder: Path) -> None:
    gpu, cpu = float32_drafter(folder, device="cuda"), float32_drafter(folder)
    rows = make_rows(cpu, 6, 3)
    batch = DraftBatch([Request(0).entry(rows, 5)], packed([rows]), want_margins=True)
    assert routing_of(gpu.draft(batch), [0]) == pytest.approx(routing_of(cpu.draft(batch), [0]), rel=1e-2, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantisation", ["plain", "reference"])
def test_a_gpu_drafts_as_the_cpu(folder: Path, dtype: str, quantisation: str) -> None:
    options = ModelOptions(quantisation=quantisation)
    gpu = float32_drafter(folder, device="cuda", dtype=dtype, options=options)
    cpu = float32_drafter(folder, options=options)
    equal = total = 0
    for seed in range(12):
        requests = [Request(slot) for slot in range(1 + seed % 8)]
        rows = [make_rows(cpu, 2 + slot, 100 * seed + slot) for slot in range(len(requests))]
        entries = [request.entry(part, seed) for request, part in zip(requests, rows, strict=True)]
        batch = DraftBatch(entries, packed(rows))
        ours, theirs = gpu.draft(batch), cpu.draft(batch)
        for index in range(len(requests)):
            pairs = zip(tokens_of(ours, index), tokens_of(theirs, index), strict=True)
            equal += sum(a == b for a, b in pairs)
            total += BLOCK
    print(f"{dtype} {quantisation}: {equal} of {total}")
    assert equal >= {"plain": 0.7, "reference": 0.4}[quantisation] * total if dtype == "bfloat16" else 0.97 * total


# Over TCP -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(checkpoint: Path, ready: Path, *options: object) -> Iterator[Channel]:
    """`farspark worker` as a process of its own, and a connection to it."""
    arguments = ("worker", checkpoint, "--listen", "tcp://127.0.0.1:0", "--ready-file", ready, "--dtype", "float32")
    process = subprocess.Popen(
        [sys.executable, "-m", "farspark", *map(str, (*arguments, *options))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = Deadline.after(180)
        while not ready.exists():
            assert process.poll() is None, process.communicate()[0]
            deadline.check("waiting for the ready file")
            time.sleep(0.02)
        with contextlib.closing(connect(ready.read_text().strip(), Deadline.after(30))) as channel:
            yield channel
    finally:
        process.kill()
        process.communicate()


class Engine:
    """The engine's end of one session: what was sent of each slot, and the steps."""

    def __init__(self, channel: Channel, drafter: DSparkDrafter) -> None:
        self._channel = channel
        self._deadline = Deadline.after(120)
        self._sequence = 1
        self._generations = [0, 0]
        self.held: dict[int, tuple[int, Tensor]] = {}  # slot -> position of the first row, all rows
        info = drafter.info
        hello = shape_for(info, ring=128, slots=2, context=128).hello(
            engine="test", identity=info.identity, markov_identity=info.markov_identity, want_margin=False
        )
        status, payload = self._ask(codec.encode_frame(Header(Operation.HELLO, 1, 1, 0), codec.encode_hello(hello)))
        welcome = codec.decode_welcome(payload)
        assert (status, welcome.window, welcome.context) == (FrameStatus.OK, 128, 128), welcome.message

    def _ask(self, *parts: bytes) -> tuple[int, memoryview]:
        self._channel.send(parts, self._deadline)
        header, payload = codec.decode_frame(self._channel.recv(self._deadline))
        return header.status, payload

    def step(self, *requests: tuple[int, int, Tensor, bool]) -> tuple[list[list[int]], list[list[float]]]:
        """(slot, first position, rows, whether the slot begins) of each; tokens and confidences of each."""
        self._sequence += 1
        entries = []
        for slot, first, rows, begins in requests:
            start, before = (first, rows[:0]) if begins else self.held[slot]
            self.held[slot] = (start, torch.cat((before, rows)))
            self._generations[slot] += begins
            flags = EntryFlag.NEED_DRAFT | (EntryFlag.NEW_GEN if begins else EntryFlag(0))
            end = first + len(rows)
            entries.append(Entry(slot, self._generations[slot], first, len(rows), 10 + slot, end, flags))
        data = bytes(packed([rows for _, _, rows, _ in requests]))
        _, payload = self._ask(codec.encode_step_head(1, self._sequence, self._sequence, entries, len(data)), data)
        reply = codec.decode_step_reply(payload)
        assert all(one.status in (RequestStatus.OK, RequestStatus.PARTIAL_WINDOW) for one in reply.entries)
        parts = [slice(index * BLOCK, (index + 1) * BLOCK) for index in range(len(requests))]
        tokens, confidences = [int(one) for one in reply.tokens], [float(one) for one in reply.confidences]
        return [tokens[part] for part in parts], [confidences[part] for part in parts]


def test_a_worker_process_answers_STEPs_with_the_drafts_of_the_reference(tmp_path: Path) -> None:
    """A V4.1 target taken out with `farspark export`; two requests, one in mid-sequence, three rounds, a slot used again."""
    target, exported = write_tiny_deepseek(tmp_path / "target", "v41"), tmp_path / "drafter"
    subprocess.run([sys.executable, "-m", "farspark", "export", target, exported], check=True, capture_output=True)
    plain, here = PlainDeepseek.read(target), float32_drafter(target, slots=1)
    rounds = [
        [(0, 0, 5, True), (1, 300, 2, True)],
        [(1, 302, 3, False), (0, 5, 1, False)],
        [(0, 40, 140, True), (1, 305, 1, False)],
    ]
    with worker(exported, tmp_path / "ready", "--slots", 2) as channel:
        engine = Engine(channel, here)
        for number, entries in enumerate(rounds):
            sent = [
                (slot, first, make_rows(here, count, 10 * number + slot), begins)
                for slot, first, count, begins in entries
            ]
            tokens, confidences = engine.step(*sent)
            for index, (slot, *_) in enumerate(sent):
                start, rows = engine.held[slot]
                expected = plain.draft(rows.float(), start, 10 + slot)
                assert tokens[index] == expected.tokens
                assert confidences[index] == pytest.approx(expected.confidences, abs=1e-3)


def test_a_worker_serves_the_target_itself_and_in_the_mode_that_it_was_told(tmp_path: Path) -> None:
    target = write_tiny_deepseek(tmp_path / "target", "v4")
    here, exact = (
        float32_drafter(target, slots=1, options=ModelOptions(quantisation=one)) for one in ("reference", "plain")
    )
    with worker(target, tmp_path / "ready", "--slots", 2, "--quantisation", "reference") as channel:
        rows = make_rows(here, 9, 3)
        tokens, confidences = Engine(channel, here).step((1, 50, rows, True))
    batch = DraftBatch([DraftEntry(0, True, 50, 9, 50, 11, True, BLOCK)], packed([rows]))
    assert tokens[0] == tokens_of(here.draft(batch))
    assert confidences[0] == pytest.approx(confidences_of(here.draft(batch)), abs=1e-5)
    assert confidences[0] != pytest.approx(confidences_of(exact.draft(batch)), abs=1e-4)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="--quantisation 'fp4': expected plain or reference"):
        WorkerConfig(checkpoint=Path(), quantisation="fp4")
    with pytest.raises(ConfigError, match="a quantisation of 'fp4'"):
        ModelOptions(quantisation="fp4")
