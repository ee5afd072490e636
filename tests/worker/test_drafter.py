"""The drafter against a plain float32 recomputation of everything from all rows (tests/fakes/plain_dspark.py)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.plain_dspark import PlainDraft, PlainDSpark
from tests.fakes.tiny_checkpoint import tiny_config, tiny_tensors, write_checkpoint, write_target, write_tiny
from torch import Tensor

from farspark.engine.draws import draws
from farspark.errors import ConfigError
from farspark.worker.batch import DraftBatch, DraftEntry, Drafter, DraftResult
from farspark.worker.checkpoint import load_checkpoint
from farspark.worker.device import DeviceWork, cpu_arithmetic, open_device
from farspark.worker.drafter import DSparkDrafter, Shapes, assemble, fitting, open_drafter
from farspark.worker.graphs import DirectCalls
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.heads import SUPPORT

ROW = 96  # taps times hidden of the tiny checkpoint
BLOCK = 5
FLOAT32 = Arithmetic(torch.float32, torch.float32)
CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


def on_cpu(arithmetic: Arithmetic) -> DeviceWork:
    return DeviceWork(arithmetic, DirectCalls(CPU), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> PlainDSpark:
    return PlainDSpark.read(folder)


def float32_drafter(folder: Path, **options: Any) -> Drafter:
    return open_drafter(folder, **{"dtype": "float32", "slots": 8, "context": 24, **options})


def make_rows(count: int, seed: int = 0, width: int = ROW) -> Tensor:
    """bf16 [count, width]"""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass
class Request:
    """What a session keeps for one request, and the rows that a reference needs again."""

    slot: int
    rows: Tensor = field(default_factory=lambda: make_rows(0))  # all that were ever sent
    start: int = 0  # position of the first row
    is_new: bool = True

    @property
    def length(self) -> int:
        return self.start + len(self.rows)

    def entry(self, context: int, more: Tensor, anchor: int, *, draft: bool = True, n_out: int = BLOCK) -> DraftEntry:
        first = self.length
        self.rows = torch.cat((self.rows, more))
        visible = max(self.start, self.length - context)
        entry = DraftEntry(self.slot, self.is_new, first, len(more), visible, anchor, draft, n_out)
        self.is_new = False
        return entry

    def expected(self, plain: PlainDSpark, anchor: int, context: int, **options: Any) -> PlainDraft:
        return plain.draft(self.rows.float(), self.start, anchor, context=context, **options)


@dataclass
class Answer:
    ok: bool
    tokens: list[int]
    confidences: list[float]
    margins: list[float]


def packed(rows: Sequence[Tensor]) -> memoryview:
    joined = torch.cat([part.reshape(-1) for part in rows]).contiguous()
    return memoryview(joined.view(torch.uint8).numpy().tobytes())


def send(drafter: Drafter, entries: Sequence[DraftEntry], rows: Sequence[Tensor]) -> list[Answer]:
    return answers(drafter, drafter.draft(DraftBatch(entries, packed(rows), want_margins=True)))


def answers(drafter: Drafter, result: DraftResult) -> list[Answer]:
    count = drafter.info.num_drafts
    assert result.margins is not None
    assert result.tokens.format == "i"
    assert result.confidences.format == "f"
    tokens = [int(one) for one in result.tokens]
    confidences, margins = ([float(one) for one in plane] for plane in (result.confidences, result.margins))
    parts = [slice(index * count, (index + 1) * count) for index in range(len(result.ok))]
    return [
        Answer(ok, tokens[part], confidences[part], margins[part]) for ok, part in zip(result.ok, parts, strict=True)
    ]


def agree(answer: Answer, expected: PlainDraft, within: float = 2e-5) -> None:
    """`within` bounds the confidences; margins are about ten times as coarse."""
    assert answer.ok
    assert answer.tokens == expected.tokens
    assert answer.confidences == pytest.approx(expected.confidences, abs=within)
    assert answer.margins == pytest.approx(expected.margins, abs=10 * within)


def is_void(answer: Answer) -> bool:
    return not any(answer.tokens) and not any(answer.confidences) and not any(answer.margins)


# Parity ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch_size_drafts_as_one_request_alone(folder: Path, plain: PlainDSpark, batch: int) -> None:
    """Contexts from one row to beyond the window, increments of 0 to 7 rows, all in one forward."""
    drafter = float32_drafter(folder)
    rng = random.Random(batch)
    requests = [Request(slot) for slot in rng.sample(range(8), batch)]
    for step in range(7):
        entries, rows, anchors = [], [], []
        for index, request in enumerate(requests):
            more = make_rows(1 + 5 * index if request.is_new else rng.randrange(8), seed=1000 * step + index)
            anchors.append(rng.randrange(97))
            entries.append(request.entry(24, more, anchors[-1]))
            rows.append(more)
        for answer, request, anchor in zip(send(drafter, entries, rows), requests, anchors, strict=True):
            agree(answer, request.expected(plain, anchor, 24))


def test_RING_REWIND_a_long_random_life_equals_recomputing(folder: Path, plain: PlainDSpark) -> None:
    """Rounds that commit one row just after a wrap, long chunks, new requests in old slots, rounds without a draft."""
    drafter = float32_drafter(folder, slots=3, context=11)
    rng = random.Random(7)
    requests = [Request(slot) for slot in range(3)]
    for step in range(200):
        entries, rows, asked = [], [], []
        for index in rng.sample(range(3), rng.randint(1, 3)):
            if rng.random() < 0.05:
                requests[index] = Request(index, start=rng.choice((0, 0, 5, 1000)))
            request = requests[index]
            size = rng.choice((0, 1, 1, 2, 5, 6, 10, 11, 12, 30)) if not request.is_new else rng.randint(1, 30)
            more, anchor, draft = make_rows(size, seed=step * 3 + index), rng.randrange(97), rng.random() < 0.8
            entries.append(request.entry(11, more, anchor, draft=draft))
            rows.append(more)
            asked.append((request, anchor, draft))
        for answer, (request, anchor, draft) in zip(send(drafter, entries, rows), asked, strict=True):
            if draft:
                agree(answer, request.expected(plain, anchor, 11))
            else:
                assert answer.ok
                assert is_void(answer)


@pytest.mark.parametrize("start", [1, 16, 23, 24, 25, 4000])
@pytest.mark.parametrize("count", [1, 7, 30])
def test_APC_GAP_a_late_start_equals_a_drafter_that_saw_only_the_suffix(
    folder: Path, plain: PlainDSpark, start: int, count: int
) -> None:
    drafter = float32_drafter(folder)
    request = Request(3, start=start)
    for more in (make_rows(count, 1), make_rows(3, 2)):
        agree(send(drafter, [request.entry(24, more, 11)], [more])[0], request.expected(plain, 11, 24))


@pytest.mark.parametrize("depth", [16, 512, 4096])
def test_POS_OFF1_parity_at_every_depth(folder: Path, plain: PlainDSpark, depth: int) -> None:
    drafter = float32_drafter(folder, slots=2, context=depth)
    request = Request(1)
    chunk = make_rows(depth, 3)
    agree(send(drafter, [request.entry(depth, chunk, 5)], [chunk])[0], request.expected(plain, 5, depth))
    more = make_rows(2, 4)
    agree(send(drafter, [request.entry(depth, more, 6)], [more])[0], request.expected(plain, 6, depth))


@pytest.mark.parametrize("sizes", [[70], [1] * 70, [30, 40], [23, 24, 23], [25, 45], [60, 3, 7]])
def test_CHUNK_TRIM_any_chunks_equal_one_big_chunk(folder: Path, plain: PlainDSpark, sizes: list[int]) -> None:
    drafter = float32_drafter(folder)
    rows = make_rows(70, 9)
    request = Request(0)
    answer = None
    for more in torch.split(rows, sizes):
        answer = send(drafter, [request.entry(24, more, 8)], [more])[0]
    assert answer is not None
    agree(answer, plain.draft(rows.float(), 0, 8, context=24))


def test_more_rows_than_one_projection_takes_are_all_stored(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder, slots=2, context=1200)
    requests = [Request(0), Request(1, start=7)]
    rows = [make_rows(1100, 1), make_rows(1300, 2)]
    entries = [request.entry(1200, more, 5) for request, more in zip(requests, rows, strict=True)]
    for answer, request in zip(send(drafter, entries, rows), requests, strict=True):
        agree(answer, request.expected(plain, 5, 1200))


def test_SLOT_BEGIN_a_thousand_reuses_leave_nothing_behind(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder, slots=1, num_drafts=1)
    rng = random.Random(1)
    pool = make_rows(40, 5)
    for _ in range(1000):
        request = Request(0, start=rng.choice((0, 3, 100)))
        more, anchor = pool[: rng.choice((1, 2, 30, 40))], rng.randrange(97)
        answer = send(drafter, [request.entry(24, more, anchor)], [more])[0]
        if rng.random() < 0.1:
            agree(answer, request.expected(plain, anchor, 24, num_drafts=1))
        assert answer.ok


def test_K0_STATE_rows_of_rounds_without_a_draft_are_kept(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder)
    request = Request(2)
    for seed in range(4):
        more = make_rows(3, seed)
        answer = send(drafter, [request.entry(24, more, 4, draft=False, n_out=0)], [more])[0]
        assert is_void(answer)
    none = make_rows(0)
    agree(send(drafter, [request.entry(24, none, 9)], [none])[0], request.expected(plain, 9, 24))


def test_a_mixed_batch_drafts_only_for_those_that_ask(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder)
    requests = [Request(slot) for slot in (4, 0, 7)]
    rows = [make_rows(3, 1), make_rows(9, 2), make_rows(4, 3)]
    entries = [
        request.entry(24, more, 5, draft=index != 1)
        for index, (request, more) in enumerate(zip(requests, rows, strict=True))
    ]
    first, middle, last = send(drafter, entries, rows)
    agree(first, requests[0].expected(plain, 5, 24))
    assert is_void(middle)
    agree(last, requests[2].expected(plain, 5, 24))


def test_a_draft_may_see_its_block_only(folder: Path, plain: PlainDSpark) -> None:
    """No row is visible: the anchor and the masks are all there is."""
    drafter = float32_drafter(folder)
    answer = send(drafter, [DraftEntry(0, True, 10, 0, 10, 5, True, BLOCK)], [make_rows(0)])[0]
    agree(answer, plain.draft(torch.zeros(0, ROW), 10, 5, context=24))


@pytest.mark.parametrize("edge", [8189, 8190, 8191])
def test_MAXLEN_EDGE_MAXLEN_BATCH_positions_stop_at_the_last_one(folder: Path, plain: PlainDSpark, edge: int) -> None:
    """The block crosses max_position_embeddings; the other request of the batch does not feel it."""
    drafter = float32_drafter(folder)
    long, short = Request(0, start=edge - 4), Request(1)
    rows = [make_rows(4, 1), make_rows(4, 2)]
    first, second = send(drafter, [long.entry(24, rows[0], 3), short.entry(24, rows[1], 3)], rows)
    agree(first, long.expected(plain, 3, 24), within=4e-4)
    agree(second, short.expected(plain, 3, 24))


@pytest.mark.parametrize("count", range(1, BLOCK + 1))
def test_K_VS_BLOCK_fewer_drafts_are_a_shorter_block(folder: Path, plain: PlainDSpark, count: int) -> None:
    drafter = float32_drafter(folder, num_drafts=count)
    assert drafter.info.num_drafts == count
    request, more = Request(0), make_rows(9)
    answer = send(drafter, [request.entry(24, more, 5)], [more])[0]
    agree(answer, request.expected(plain, 5, 24, num_drafts=count))


@pytest.mark.parametrize("count", [-1, 0, BLOCK + 1])
def test_K_VS_BLOCK_other_counts_are_refused(folder: Path, count: int) -> None:
    with pytest.raises(ConfigError, match=f"{count} drafts wanted; this checkpoint drafts blocks of 1 to 5"):
        float32_drafter(folder, num_drafts=count)


@pytest.mark.parametrize("n_out", range(1, BLOCK + 3))
def test_what_is_past_n_out_is_zero_and_the_rest_is_the_same(folder: Path, plain: PlainDSpark, n_out: int) -> None:
    drafter = float32_drafter(folder)
    requests = [Request(0), Request(1)]
    rows = [make_rows(6, 1), make_rows(8, 2)]
    entries = [requests[0].entry(24, rows[0], 5, n_out=n_out), requests[1].entry(24, rows[1], 5, n_out=2)]
    for answer, request, count in zip(send(drafter, entries, rows), requests, (n_out, 2), strict=True):
        expected = request.expected(plain, 5, 24)
        assert answer.tokens == expected.tokens[:count] + [0] * (BLOCK - count)
        assert answer.confidences[count:] == [0] * max(0, BLOCK - count)
        assert answer.margins[count:] == [0] * max(0, BLOCK - count)
        assert answer.confidences[:count] == pytest.approx(expected.confidences[:count], abs=2e-5)


def test_margins_are_only_made_when_wanted(folder: Path) -> None:
    drafter = float32_drafter(folder)
    request, more = Request(0), make_rows(3)
    result = drafter.draft(DraftBatch([request.entry(24, more, 1)], packed([more])))
    assert result.margins is None


def test_rows_may_be_overwritten_once_the_step_is_done(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder)
    request, more = Request(0), make_rows(6)
    buffer = bytearray(packed([more]))
    drafter.draft(DraftBatch([request.entry(24, more, 1, draft=False)], memoryview(buffer)))
    buffer[:] = b"\xff" * len(buffer)
    none = make_rows(0)
    agree(send(drafter, [request.entry(24, none, 1)], [none])[0], request.expected(plain, 1, 24))


# Variants of the config -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"is_neox_style": False},
        {"rope_parameters": None, "rope_theta": 5e6, "rope_scaling": None},
        {"attention_bias": True},
        {"logit_scale": 0.25},
        {"markov_rank": 0, "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": None},
        {"confidence_head_with_markov": False},
        {"enable_confidence_head": False},
        {"target_hidden_size": 16},
        {"target_layer_ids": [-1]},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 16},
        {"vocab_size": 600, "mask_token_id": 599},
        {"num_hidden_layers": 1, "layer_types": None},
        {"block_size": 1},
    ],
    ids=str,
)
def test_ROPE_CFG_every_variant_equals_the_reference_at_position_4000(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path, **changes)
    plain, drafter = PlainDSpark.read(folder), float32_drafter(folder)
    width, block = drafter.info.row_bytes // 2, drafter.info.num_drafts
    request = Request(5, rows=make_rows(0, width=width), start=3990)
    for more in (make_rows(10, 1, width), make_rows(30, 2, width)):
        answer = send(drafter, [request.entry(24, more, 7, n_out=block)], [more])[0]
        # Angles are float32 here and float64 in the reference: 4,000 radians are good to 2.4e-4.
        agree(answer, request.expected(plain, 7, 24), within=2e-4)


def test_a_drafter_without_a_confidence_head_claims_1(tmp_path: Path) -> None:
    drafter = float32_drafter(write_tiny(tmp_path, enable_confidence_head=False))
    request, more = Request(0), make_rows(4)
    answer = send(drafter, [request.entry(24, more, 7, n_out=3)], [more])[0]
    assert answer.confidences == [1, 1, 1, 0, 0]


def test_MARKOV_the_bias_of_the_anchor_counts_at_the_first_position(folder: Path, plain: PlainDSpark) -> None:
    """Some ports skip it: there must be anchors whose bias alone decides the first draft."""
    drafter = float32_drafter(folder, slots=1)
    more, decided = make_rows(5), 0
    for anchor in range(97):
        request = Request(0)
        answer = send(drafter, [request.entry(24, more, anchor)], [more])[0]
        expected = request.expected(plain, anchor, 24)
        assert answer.tokens[0] == expected.tokens[0]
        decided += int(expected.base[0].argmax()) != expected.tokens[0]
    assert decided > 30


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("bias", [-30.0, -1.0, 0.0, 0.5, 30.0])
def test_CONF_MATH_a_known_logit_goes_through_one_sigmoid(tmp_path: Path, batch: int, bias: float) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    tensors["confidence_head.proj.weight"] = torch.zeros(1, 38).bfloat16()
    tensors["confidence_head.proj.bias"] = torch.tensor([bias]).bfloat16()
    drafter = open_drafter(write_checkpoint(tmp_path, config, tensors), slots=8, context=8)
    requests, rows = [Request(slot) for slot in range(batch)], [make_rows(2, seed) for seed in range(batch)]
    entries = [request.entry(8, more, 7) for request, more in zip(requests, rows, strict=True)]
    for answer in send(drafter, entries, rows):
        assert answer.confidences == pytest.approx([1 / (1 + math.exp(-bias))] * BLOCK, rel=1e-6)
        assert all(0 <= confidence <= 1 for confidence in answer.confidences)


def test_CONF_MATH_the_confidence_reads_the_token_before_and_the_hidden_state_of_its_position(
    folder: Path, plain: PlainDSpark
) -> None:
    drafter = float32_drafter(folder)
    requests, rows = [Request(slot) for slot in range(8)], [make_rows(4, seed) for seed in range(8)]
    entries = [request.entry(24, more, 7 + request.slot) for request, more in zip(requests, rows, strict=True)]
    for answer, request in zip(send(drafter, entries, rows), requests, strict=True):
        expected = request.expected(plain, 7 + request.slot, 24).confidences
        assert answer.confidences == pytest.approx(expected, abs=2e-5)


# Token ids ---------------------------------------------------------------------------------------------------------------


def test_equal_logits_go_to_the_lowest_id(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        tensors[name] = tensors[name][:1].repeat(97, 1)
    for dtype in ("float32", "bfloat16"):
        drafter = open_drafter(write_checkpoint(tmp_path, config, tensors), dtype=dtype, slots=2, context=8)
        request, more = Request(0), make_rows(4)
        answer = send(drafter, [request.entry(8, more, 7)], [more])[0]
        assert answer.tokens == [0] * BLOCK
        assert answer.margins == [0] * BLOCK
        assert answer.ok


def test_ID_RANGE_padding_of_the_draft_vocabulary_is_never_drafted(tmp_path: Path) -> None:
    config = tiny_config(draft_vocab_size=128)
    tensors = tiny_tensors(config)
    with torch.no_grad():
        tensors["lm_head.weight"][97:] *= 100
    folder = write_checkpoint(tmp_path, config, tensors)
    plain, drafter = PlainDSpark.read(folder), float32_drafter(folder)
    assert drafter.info.vocab_size == 97
    request, more = Request(0), make_rows(4)
    agree(send(drafter, [request.entry(24, more, 7)], [more])[0], request.expected(plain, 7, 24))


def test_ID_RANGE_a_smaller_target_bounds_the_ids(folder: Path, tmp_path: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder, target=write_target(tmp_path, vocab=20))
    assert drafter.info.vocab_size == 20
    drawn: set[int] = set()
    for seed in range(20):
        request, more = Request(0), make_rows(4, seed)
        answer = send(drafter, [request.entry(24, more, 7)], [more])[0]
        agree(answer, request.expected(plain, 7, 24, vocab=20))
        drawn.update(answer.tokens)
    assert len(drawn) > 5


# What must not be read ---------------------------------------------------------------------------------------------------


def poisoned(folder: Path, **options: Any) -> DSparkDrafter:
    """Every entry that no row has written is NaN."""
    drafter = float32_drafter(folder, **options)
    assert isinstance(drafter, DSparkDrafter)
    drafter._store.entries[:, : drafter._store.zero_row] = float("nan")
    drafter._store.entries[:, drafter._store.zero_row + 1 :] = float("nan")
    return drafter


@pytest.mark.parametrize("start", [0, 5, 40])
@pytest.mark.parametrize("count", [0, 1, 23, 24, 25])
def test_RING_VALID_a_poisoned_slot_never_reaches_a_logit(
    folder: Path, plain: PlainDSpark, start: int, count: int
) -> None:
    drafter = poisoned(folder)
    request, more = Request(2, start=start), make_rows(count, 1)
    agree(send(drafter, [request.entry(24, more, 7)], [more])[0], request.expected(plain, 7, 24))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_RING_VALID_rows_that_are_not_finite_fail_their_request_and_nobody_else(
    folder: Path, plain: PlainDSpark, bad: float
) -> None:
    drafter = float32_drafter(folder)
    requests = [Request(0), Request(1), Request(2)]
    rows = [make_rows(4, 1), make_rows(4, 2), make_rows(4, 3)]
    rows[1][2, 5] = bad
    first, middle, last = send(
        drafter, [request.entry(24, more, 7) for request, more in zip(requests, rows, strict=True)], rows
    )
    assert not middle.ok
    assert is_void(middle)
    agree(first, requests[0].expected(plain, 7, 24))
    agree(last, requests[2].expected(plain, 7, 24))
    # The next request in that slot finds nothing of it.
    again, more = Request(1), make_rows(3, 9)
    agree(send(drafter, [again.entry(24, more, 7)], [more])[0], again.expected(plain, 7, 24))


def test_RING_VALID_a_bad_row_is_forgotten_when_the_context_has_moved_past_it(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder, context=8)
    request = Request(0)
    bad = make_rows(2, 1)
    bad[0] = float("nan")
    assert not send(drafter, [request.entry(8, bad, 7)], [bad])[0].ok
    more = make_rows(6, 2)
    assert not send(drafter, [request.entry(8, more, 7)], [more])[0].ok
    one = make_rows(1, 3)
    agree(send(drafter, [request.entry(8, one, 7)], [one])[0], request.expected(plain, 7, 8))


def test_PAD_SLOT0_a_padded_batch_touches_no_slot_and_changes_no_draft(folder: Path, plain: PlainDSpark) -> None:
    shapes = Shapes(batches=(4, 8), contexts=(24,), rows=(16, 512), steps=(BLOCK,))
    drafter = assemble(
        load_checkpoint(folder, place=lambda name, tensor, as_stored: tensor.float()),
        CPU,
        on_cpu(FLOAT32),
        8,
        24,
        shapes=shapes,
    )
    store = drafter._store
    idle = Request(0)
    more = make_rows(24, 8)
    send(drafter, [idle.entry(24, more, 7, draft=False)], [more])
    before = store.entries[:, : store.zero_row].clone()
    for count in (1, 3, 5):
        requests = [Request(slot) for slot in (3, 7, 1, 2, 6)[:count]]
        rows = [make_rows(2 + slot, slot) for slot in range(count)]
        entries = [request.entry(24, part, 7) for request, part in zip(requests, rows, strict=True)]
        for answer, request in zip(send(drafter, entries, rows), requests, strict=True):
            agree(answer, request.expected(plain, 7, 24))
        unused = [slot for slot in range(8) if slot not in {request.slot for request in requests}]
        for slot in unused:
            part = slice(slot * 24, slot * 24 + 24)
            assert torch.equal(store.entries[:, part], before[:, part])
        before = store.entries[:, : store.zero_row].clone()
    assert not store.entries[:, store.zero_row].any()


def test_warming_up_leaves_no_trace_and_reports_to_the_end(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder)
    assert isinstance(drafter, DSparkDrafter)
    request, more = Request(0), make_rows(9)
    send(drafter, [request.entry(24, more, 5)], [more])
    slots = drafter._store.entries[:, : drafter._store.zero_row].clone()
    calls: list[tuple[str, int, int]] = []
    drafter.warm_up(lambda *call: calls.append(call))
    assert torch.equal(drafter._store.entries[:, : drafter._store.zero_row], slots)
    assert [done for _, done, _ in calls] == list(range(1, calls[-1][2] + 1))
    none = make_rows(0)
    agree(send(drafter, [request.entry(24, none, 6)], [none])[0], request.expected(plain, 6, 24))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("slots", "context", "count"), [(1, 1, 1), (8, 4096, 7), (100, 5000, 7), (3, 64, 5)])
def test_JIT_COLD_every_size_has_a_shape_that_warm_up_meets(device: str, slots: int, context: int, count: int) -> None:
    shapes = Shapes.of(torch.device(device), slots, context, count)
    for sizes, largest in (
        (shapes.batches, slots),
        (shapes.contexts, context),
        (shapes.rows, 512),
        (shapes.steps, count),
    ):
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        assert all(fitting(sizes, size) >= size for size in range(largest + 1))
    # Padding at most doubles the work, but where a GPU would not notice.
    least = 64 if device == "cpu" else 256
    assert all(fitting(shapes.contexts, size) <= max(least, 2 * size) for size in range(1, context + 1))


# What a session must not send ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"slot": 8},
        {"slot": -1},
        {"anchor_token": 97},
        {"anchor_token": -1},
        {"first_pos": -1},
        {"visible_from": 5},
        {"visible_from": -1},
        {"n_out": 0},
        {"n_rows": 3},
    ],
    ids=str,
)
def test_an_entry_out_of_range_is_a_value_error_before_anything_is_written(
    folder: Path, change: dict[str, int]
) -> None:
    drafter = poisoned(folder)
    good = {"slot": 0, "first_pos": 0, "n_rows": 4, "visible_from": 0, "anchor_token": 7, "n_out": 1, **change}
    entry = DraftEntry(reset=True, need_draft=True, **good)
    with pytest.raises(ValueError, match=r"out of range|rows are"):
        send(drafter, [entry], [make_rows(4)])
    assert drafter._store.entries[:, :24].isnan().all()


def test_a_slot_that_occurs_twice_is_a_value_error(folder: Path) -> None:
    entry = DraftEntry(0, True, 0, 1, 0, 1, True, 1)
    with pytest.raises(ValueError, match="twice"):
        send(float32_drafter(folder), [entry, entry], [make_rows(2)])


# bfloat16 ------------------------------------------------------------------------------------------------------------------


def ulp(logit: float) -> float:
    """The spacing of bf16 numbers at the greatest logit."""
    return float(2.0 ** (math.floor(math.log2(max(1.0, abs(logit)))) - 7))


def gaps_in_ulps(forced: PlainDraft, tokens: list[int]) -> list[float]:
    """How far below the reference's best logit each drafted token is; `forced` has followed the same tokens.

    The shadow rule: a chain is compared step by step after the drafts so far, or one tie would make all that
    follows differ.
    """
    best = [float(step.max()) for step in forced.logits]
    return [(top - float(step[token])) / ulp(top) for top, step, token in zip(best, forced.logits, tokens, strict=True)]


ARITHMETICS = {
    "native": Arithmetic(torch.bfloat16, torch.bfloat16),
    "in float32 carriers": Arithmetic(torch.bfloat16, torch.float32),
}


def with_arithmetic(folder: Path, arithmetic: Arithmetic) -> DSparkDrafter:
    loaded = load_checkpoint(folder, place=lambda name, tensor, as_stored: tensor.to(arithmetic.carrier, copy=True))
    return assemble(loaded, CPU, on_cpu(arithmetic), 8, 24)


@pytest.mark.parametrize("arithmetic", ARITHMETICS.values(), ids=ARITHMETICS)
def test_bfloat16_drafts_pass_the_shadow_rule_against_float32(
    folder: Path, plain: PlainDSpark, arithmetic: Arithmetic
) -> None:
    drafter = with_arithmetic(folder, arithmetic)
    gaps, confidence_errors = [], []
    for seed in range(16):
        requests = [Request(slot) for slot in range(8)]
        rows = [make_rows(1 + 4 * slot, 100 * seed + slot) for slot in range(8)]
        entries = [
            request.entry(24, more, slot) for slot, (request, more) in enumerate(zip(requests, rows, strict=True))
        ]
        for slot, (answer, request) in enumerate(zip(send(drafter, entries, rows), requests, strict=True)):
            assert answer.ok
            free = request.expected(plain, slot, 24)
            forced = plain.chain(free.hidden, free.base, slot, forced=answer.tokens)
            gaps += gaps_in_ulps(forced, answer.tokens)
            confidence_errors += [abs(a - b) for a, b in zip(answer.confidences, forced.confidences, strict=True)]
    # The reference is float32, so one side's roundings count in full: twice what two bf16 sides differ by.
    assert sum(gap <= 4 for gap in gaps) >= 0.995 * len(gaps)
    assert max(gaps) <= 16
    assert sum(gap == 0 for gap in gaps) >= 0.95 * len(gaps)
    assert max(confidence_errors) <= 0.03


def test_both_carriers_of_bfloat16_draft_alike(folder: Path) -> None:
    native, carried = (with_arithmetic(folder, arithmetic) for arithmetic in ARITHMETICS.values())
    same = total = 0
    for seed in range(40):
        drafts = []
        for drafter in (native, carried):
            request, more = Request(0), make_rows(1 + seed, seed)
            drafts.append(send(drafter, [request.entry(24, more, seed)], [more])[0])
        assert all(draft.ok for draft in drafts)
        same += sum(a == b for a, b in zip(drafts[0].tokens, drafts[1].tokens, strict=True))
        total += BLOCK
    assert same >= 0.9 * total


# Opening -------------------------------------------------------------------------------------------------------------------


def test_the_info_says_what_was_opened(folder: Path) -> None:
    drafter = open_drafter(folder, slots=3, context=16)
    loaded = load_checkpoint(folder)
    info = drafter.info
    assert (info.kind, info.num_drafts, info.vocab_size, info.hidden_size) == ("Qwen3DSparkModel", 5, 97, 32)
    assert (info.taps, info.row_bytes, info.slots, info.context, info.window) == (3, 192, 3, 16, 0)
    assert (info.max_position, info.device, info.dtype) == (8192, "cpu", "bfloat16")
    assert (info.identity, info.markov_identity) == (loaded.identity, loaded.markov_identity)
    carrier = cpu_arithmetic(torch.bfloat16).carrier
    assert info.context_bytes == 2 * (3 * 16 + 2 + 3 * 5) * 2 * 2 * 8 * carrier.itemsize
    assert repr(drafter) == "DSparkDrafter(Qwen3DSparkModel, cpu, bfloat16, slots=3, context=16)"


def test_the_identity_does_not_depend_on_how_it_is_served(folder: Path) -> None:
    assert len({open_drafter(folder, dtype=dtype).info.identity for dtype in ("float32", "bfloat16")}) == 1


def test_CTX_LIMIT_the_context_is_bounded_by_the_positions_there_are(folder: Path) -> None:
    assert open_drafter(folder, slots=1, context=1_000_000).info.context == 8192


def test_CTX_LIMIT_a_million_positions_take_no_more_memory_than_the_context(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, max_position_embeddings=1_048_576)
    plain, drafter = PlainDSpark.read(folder), float32_drafter(folder, slots=2)
    assert drafter.info.context_bytes < 200_000
    request, more = Request(0, start=1_048_576 - 40), make_rows(30)
    answer = send(drafter, [request.entry(24, more, 5)], [more])[0]
    expected = request.expected(plain, 5, 24)
    assert answer.ok
    # At a million, one float32 angle is only good to a tenth: close, not equal.
    assert answer.confidences == pytest.approx(expected.confidences, abs=0.2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "a dtype of 'int8'; supported: bfloat16, float32"),
        ({"slots": 0}, "slots is 0"),
        ({"context": 0}, "context is 0"),
        ({"device": "abacus"}, "a device of 'abacus'"),
        ({"device": "meta"}, "supported: cpu, cuda"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_drafter(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"a device of '{device}', but torch finds no GPU"):
        open_device(device)


def test_GB10_MEM_a_store_that_cannot_fit_is_refused_with_the_bytes_and_the_remedy(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, max_position_embeddings=1 << 40)
    with pytest.raises(ConfigError, match=r"takes [\d,]{15,} bytes on cpu.*lower the context or the slots"):
        float32_drafter(folder, context=1 << 36)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_drafts_as_the_reference(folder: Path, plain: PlainDSpark, dtype: str) -> None:
    drafter = open_drafter(folder, device="cuda", dtype=dtype, slots=8, context=24)
    drafter.warm_up(lambda what, done, total: None)
    same = total = 0
    for seed in range(10):
        requests = [Request(slot) for slot in range(8)]
        rows = [make_rows(1 + 4 * slot, 100 * seed + slot) for slot in range(8)]
        entries = [
            request.entry(24, more, slot) for slot, (request, more) in enumerate(zip(requests, rows, strict=True))
        ]
        for slot, (answer, request) in enumerate(zip(send(drafter, entries, rows), requests, strict=True)):
            assert answer.ok
            expected = request.expected(plain, slot, 24)
            same += sum(a == b for a, b in zip(answer.tokens, expected.tokens, strict=True))
            total += BLOCK
    assert same >= (1.0 if dtype == "float32" else 0.9) * total


# Judging other drafts --------------------------------------------------------------------------------------------------


def test_other_chains_are_judged_as_the_plain_reference_teacher_forces_them(folder: Path, plain: PlainDSpark) -> None:
    drafter = float32_drafter(folder)
    vocab = drafter.info.vocab_size
    rng = random.Random(3)
    requests = [Request(slot) for slot in (4, 1, 6)]
    rows = [make_rows(count, seed=count) for count in (3, 9, 30)]
    anchors = [rng.randrange(vocab) for _ in requests]
    wants = [True, False, True]
    entries = [
        one.entry(24, more, anchor, draft=want)
        for one, more, anchor, want in zip(requests, rows, anchors, wants, strict=True)
    ]
    result = drafter.draft(DraftBatch(entries, packed(rows), want_margins=True))
    assert result.judge is not None
    for index in (2, 0):
        own = plain_chain = requests[index].expected(plain, anchors[index], 24)
        forced = [rng.randrange(vocab) for _ in range(BLOCK)]
        expected = plain.chain(own.hidden, own.base, anchors[index], forced)
        chains = torch.tensor([forced, plain_chain.tokens], dtype=torch.int32)
        for row, reference in ((0, expected), (1, own)):
            judged = result.judge([index], memoryview(chains[row].numpy().tobytes()).cast("i"))
            chosen = reference.logits.gather(1, chains[row].long().unsqueeze(1)).squeeze(1)
            assert judged.best.tolist() == reference.tokens
            assert judged.gaps.tolist() == pytest.approx((reference.logits.amax(1) - chosen).tolist(), abs=2e-4)
            assert judged.peaks.tolist() == pytest.approx(reference.logits.abs().amax(1).tolist(), abs=2e-4)
            assert judged.confidences.tolist() == pytest.approx(reference.confidences, abs=2e-5)
        assert judged.gaps.tolist() == [0.0] * BLOCK, "its own chain has no gap"


def test_without_margins_no_logits_are_kept(folder: Path) -> None:
    drafter = float32_drafter(folder)
    assert drafter.draft(DraftBatch([Request(0).entry(24, make_rows(3), 5)], packed([make_rows(3)]))).judge is None


def test_positions_that_were_not_drafted_are_judged_as_zero(folder: Path) -> None:
    drafter = float32_drafter(folder)
    entry = Request(0).entry(24, make_rows(3), 5, n_out=2)
    result = drafter.draft(DraftBatch([entry], packed([make_rows(3)]), want_margins=True))
    assert result.judge is not None
    judged = result.judge([0], memoryview(bytes(4 * BLOCK)).cast("i"))
    assert judged.routing is None
    assert [plane.tolist()[2:] for plane in judged[:4]] == [[0] * (BLOCK - 2)] * 4


# Drawing ----------------------------------------------------------------------------------------------------------------


@dataclass
class DrawnAnswer:
    tokens: list[int]
    mask: int
    support: Tensor  # [N, SUPPORT]
    q: Tensor  # [N, SUPPORT]


def drawn(drafter: Drafter, entries: Sequence[DraftEntry], rows: Sequence[Tensor]) -> list[DrawnAnswer]:
    result = drafter.draft(DraftBatch(entries, packed(rows)))
    assert result.margins is None
    assert result.drawn is not None
    shape = len(entries), drafter.info.num_drafts, SUPPORT
    support = torch.frombuffer(bytearray(result.drawn.support), dtype=torch.int32).view(shape)
    q = torch.frombuffer(bytearray(result.drawn.q), dtype=torch.float32).view(shape)
    tokens = torch.frombuffer(bytearray(result.tokens), dtype=torch.int32).view(shape[:2]).tolist()
    return [DrawnAnswer(*one) for one in zip(tokens, result.drawn.mask.tolist(), support, q, strict=True)]


def hot(request: Request, more: Tensor, anchor: int, temperature: float, seed: int, n_out: int = BLOCK) -> DraftEntry:
    return request.entry(24, more, anchor, n_out=n_out)._replace(temperature=temperature, seed=seed)


@pytest.mark.parametrize("n_out", [BLOCK, 2])
def test_drafts_are_drawn_from_the_top_of_their_own_chain(folder: Path, plain: PlainDSpark, n_out: int) -> None:
    """The logits at each position are those that follow from the tokens drawn before it, greedy requests beside untouched."""
    drafter = float32_drafter(folder)
    requests, rows = [Request(slot) for slot in (5, 2, 7)], [make_rows(count, seed=count) for count in (4, 30, 9)]
    temperatures, seeds, anchors = [0.7, 0.0, 1.3], [11, 0, -(2**63)], [5, 6, 7]
    entries = [hot(*one, n_out=n_out) for one in zip(requests, rows, anchors, temperatures, seeds, strict=True)]
    found = drawn(drafter, entries, rows)
    for index, answer in enumerate(found):
        greedy_chain = requests[index].expected(plain, anchors[index], 24)
        assert answer.tokens[n_out:] == [0] * (BLOCK - n_out)
        assert not answer.support[n_out:].any()
        assert not answer.q[n_out:].any()
        assert answer.mask == int(temperatures[index] > 0)
        if not temperatures[index]:
            assert answer.tokens[:n_out] == greedy_chain.tokens[:n_out]
            assert not answer.support.any()
            assert not answer.q.any()
            continue
        forced = answer.tokens[:n_out] + [0] * (BLOCK - n_out)
        chain = plain.chain(greedy_chain.hidden, greedy_chain.base, anchors[index], forced)
        uniforms = draws(np.array([seeds[index]]), np.array([requests[index].length]), BLOCK)[0]
        for step in range(n_out):
            values, ids = chain.logits[step].topk(SUPPORT)
            assert answer.support[step].tolist() == ids.tolist()
            q = torch.softmax(values / temperatures[index], dim=0)
            assert answer.q[step].tolist() == pytest.approx(q.tolist(), abs=1e-5)
            reached = answer.q[step].double().cumsum(0)
            assert answer.tokens[step] == int(ids[int((reached <= uniforms[step] * reached[-1]).sum())])


def test_equal_seeds_draw_equal_drafts_and_others_others(folder: Path) -> None:
    """Across a restart: another drafter, another slot, another batch, but the same request."""
    rows = make_rows(9, seed=1)

    def tokens(seed: int, slot: int, beside: int = 0) -> list[int]:
        entries = [hot(Request(slot), rows, 5, 2.0, seed)]
        entries += [hot(Request(slot + 1 + more), rows, 6, 2.0, 99) for more in range(beside)]
        return drawn(float32_drafter(folder), entries, [rows] * len(entries))[0].tokens

    assert tokens(7, 0) == tokens(7, 3, beside=2)
    assert len({tuple(tokens(seed, 0)) for seed in range(10)}) > 5


def test_a_greedy_batch_says_nothing_of_draws(folder: Path) -> None:
    drafter = float32_drafter(folder)
    assert drafter.draft(DraftBatch([Request(0).entry(24, make_rows(3), 5)], packed([make_rows(3)]))).drawn is None


def test_an_entry_that_only_appends_draws_nothing(folder: Path) -> None:
    drafter = float32_drafter(folder)
    entry = Request(0).entry(24, make_rows(3), 5, draft=False)._replace(temperature=1.0)
    assert drafter.draft(DraftBatch([entry], packed([make_rows(3)]))).drawn is None


def test_D2T_what_is_drawn_from_has_the_targets_ids(tmp_path: Path) -> None:
    """A drafted vocabulary of 48 of 97 ids: support and drafts are the target's."""
    config = tiny_config(draft_vocab_size=48)
    tensors = tiny_tensors(config, seed=4)
    targets = torch.randperm(97, generator=torch.Generator().manual_seed(5))[:48].sort().values
    tensors["d2t"] = targets - torch.arange(48)
    drafter = open_drafter(write_checkpoint(tmp_path, config, tensors), dtype="float32", slots=2, context=24)
    assert drafter.info.support == SUPPORT
    (answer,) = drawn(drafter, [hot(Request(0), make_rows(5), 5, 1.0, 3)], [make_rows(5)])
    for step in range(BLOCK):
        assert set(answer.support[step].tolist()) <= set(targets.tolist())
        assert len(set(answer.support[step].tolist())) == SUPPORT
        assert answer.tokens[step] in answer.support[step].tolist()


def test_a_drafted_vocabulary_without_as_many_ids_draws_nothing(tmp_path: Path) -> None:
    config = tiny_config(draft_vocab_size=20)
    tensors = tiny_tensors(config, seed=4)
    tensors["d2t"] = torch.arange(20)
    drafter = open_drafter(write_checkpoint(tmp_path, config, tensors), dtype="float32", slots=2, context=24)
    assert drafter.info.support == 0
    with pytest.raises(ValueError, match="out of range"):
        drafter.draft(DraftBatch([hot(Request(0), make_rows(5), 5, 1.0, 3)], packed([make_rows(5)])))


@pytest.mark.parametrize("temperature", [-0.5, math.inf, math.nan])
def test_a_temperature_that_cannot_be_is_a_value_error(folder: Path, temperature: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        float32_drafter(folder).draft(
            DraftBatch([hot(Request(0), make_rows(5), 5, temperature, 3)], packed([make_rows(5)]))
        )


def test_RING_VALID_rows_that_are_not_finite_fail_a_drawn_request_and_nobody_else(folder: Path) -> None:
    drafter = float32_drafter(folder)
    bad, good = torch.full((3, ROW), torch.nan).bfloat16(), make_rows(3)
    entries = [hot(Request(0), bad, 5, 1.0, 3), hot(Request(1), good, 5, 1.0, 3)]
    result = drafter.draft(DraftBatch(entries, packed([bad, good])))
    assert list(result.ok) == [False, True]
    assert result.drawn is not None
    assert result.drawn.mask.tolist() == [0, 1]
    half = BLOCK * SUPPORT
    assert not any(result.drawn.q.tolist()[:half])
    assert sum(result.drawn.q.tolist()[half:]) == pytest.approx(BLOCK, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_draws_what_its_q_and_the_draws_give(folder: Path, dtype: str) -> None:
    """As captured graphs, greedy requests beside drawn ones; where the CPU draws another token a rounding lies between."""
    drafter = open_drafter(folder, device="cuda", dtype=dtype, slots=8, context=24)
    drafter.warm_up(lambda what, done, total: None)
    requests, rows = [Request(slot) for slot in range(3)], [make_rows(9, seed=seed) for seed in range(3)]
    for _ in range(3):
        temperatures = [1.0, 0.0, 0.5]
        entries = [
            hot(request, more, 5, temperature, 77)
            for request, more, temperature in zip(requests, rows, temperatures, strict=True)
        ]
        found = drawn(drafter, entries, rows)
        assert [answer.mask for answer in found] == [1, 0, 1]
        for request, answer in zip(requests, found, strict=True):
            if not answer.mask:
                continue
            uniforms = draws(np.array([77]), np.array([request.length]), BLOCK)[0]
            for step in range(BLOCK):
                reached = answer.q[step].double().cumsum(0)
                assert float(reached[-1]) == pytest.approx(1, abs=1e-5)
                assert len(set(answer.support[step].tolist())) == SUPPORT
                place = int((reached <= uniforms[step] * reached[-1]).sum())
                assert answer.tokens[step] == int(answer.support[step, place])
