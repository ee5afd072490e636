"""Every dense family and head against its formula (tests/fakes/plain_dspark.py): float32, batched, over the life of a slot."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tests.fakes.plain_dspark import PlainDraft, PlainDSpark, PlainGemma4
from tests.fakes.tiny_checkpoint import write_gemma4, write_speculators, write_target, write_tiny
from torch import Tensor

from farspark.worker.batch import DraftBatch, DraftEntry, Drafter, Judged
from farspark.worker.checkpoint import load_checkpoint
from farspark.worker.device import DeviceWork
from farspark.worker.drafter import assemble, open_drafter
from farspark.worker.graphs import DirectCalls
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.families import ModelOptions

CONTEXT = 24
pytestmark = pytest.mark.usefixtures("one_thread")


class Kind(NamedTuple):
    write: Callable[..., Path]
    changes: dict[str, Any]
    plain: type[PlainDSpark] = PlainDSpark
    follow: str = "vllm"


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
ALL_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
KINDS = {
    "qwen3 gated": Kind(write_tiny, {"markov_head_type": "gated"}),
    "qwen3 rnn": Kind(write_tiny, {"markov_head_type": "rnn"}),
    "qwen3 rnn 1+N": Kind(write_tiny, {"markov_head_type": "rnn", "sample_from_anchor": False}),
    "qwen3 reduced": Kind(write_tiny, {"draft_vocab_size": 32}),
    "qwen3 causal": Kind(write_tiny, {"is_causal": True}),
    "gemma4": Kind(write_gemma4, {}, PlainGemma4),
    "gemma4 as trained": Kind(write_gemma4, {}, PlainGemma4, "training"),
    "gemma4 values apart, no cap": Kind(
        write_gemma4, {"attention_k_eq_v": False, "final_logit_softcapping": None, "attention_bias": True}, PlainGemma4
    ),
    "gemma4 rnn": Kind(write_gemma4, {"markov_head_type": "rnn"}, PlainGemma4),
    "gemma4 gated, no confidence": Kind(
        write_gemma4, {"markov_head_type": "gated", "enable_confidence_head": False}, PlainGemma4
    ),
    "speculators": Kind(write_speculators, {}),
    "speculators 1+N": Kind(write_speculators, {"sample_from_anchor": False}),
    "speculators 1+N reduced": Kind(write_speculators, {"sample_from_anchor": False, "draft_vocab_size": 32}),
    "speculators reduced gated": Kind(write_speculators, {"draft_vocab_size": 32, "markov_head_type": "gated"}),
    "speculators reduced rnn 1+N": Kind(
        write_speculators, {"draft_vocab_size": 32, "markov_head_type": "rnn", "sample_from_anchor": False}
    ),
    "speculators sliding": Kind(write_speculators, SLIDING),
    "speculators sliding as trained": Kind(write_speculators, SLIDING, follow="training"),
    "speculators all sliding 1+N": Kind(write_speculators, {**ALL_SLIDING, "sample_from_anchor": False}),
    "speculators sliding, not causal": Kind(
        write_speculators, {**ALL_SLIDING, "is_causal": False, "sample_from_anchor": False}
    ),
    "speculators trained not causal": Kind(
        write_speculators, {**SLIDING, "sliding_window_non_causal": True}, follow="training"
    ),
}


class Pair(NamedTuple):
    """A drafter and its formula."""

    drafter: Drafter
    plain: PlainDSpark
    context: int

    @property
    def drafts(self) -> int:
        return self.drafter.info.num_drafts


def open_pair(kind: Kind, folder: Path, **options: Any) -> Pair:
    checkpoint = kind.write(folder / "drafter", **kind.changes)
    target = lent = None
    if kind.write is write_speculators:
        target = write_target(folder / "target")
        weights = load_file(target / "model.safetensors")
        lent = {
            "embed_tokens.weight": weights["model.embed_tokens.weight"],
            "lm_head.weight": weights["lm_head.weight"],
        }
    drafter = open_drafter(
        checkpoint,
        **{
            "target": target,
            "dtype": "float32",
            "slots": 8,
            "context": CONTEXT,
            "options": ModelOptions(follow=kind.follow),
            **options,
        },
    )
    plain = kind.plain.read(checkpoint, as_trained=kind.follow == "training", lent=lent or {})
    return Pair(drafter, plain, drafter.info.context)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def pair(kind: Kind, tmp_path: Path) -> Pair:
    return open_pair(kind, tmp_path)


class Request:
    """What a session keeps for one request, and the rows that a formula needs again."""

    def __init__(self, slot: int, start: int = 0) -> None:
        self.slot = slot
        self.start = start
        self.rows = make_rows(0)

    def entry(self, pair: Pair, more: Tensor, anchor: int, *, draft: bool = True) -> DraftEntry:
        first, is_new = self.start + len(self.rows), not len(self.rows)
        self.rows = torch.cat((self.rows, more))
        visible = max(self.start, first + len(more) - pair.context)
        return DraftEntry(self.slot, is_new, first, len(more), visible, anchor, draft, pair.drafts)

    def expected(self, pair: Pair, anchor: int, **options: Any) -> PlainDraft:
        return pair.plain.draft(self.rows.float(), self.start, anchor, context=CONTEXT, **options)


def make_rows(count: int, seed: int = 0) -> Tensor:
    """bf16 [count, taps * hidden]"""
    return torch.randn(count, 96, generator=torch.Generator().manual_seed(seed)).bfloat16()


def packed(rows: list[Tensor]) -> memoryview:
    return memoryview(torch.cat(rows).view(torch.uint8).numpy().tobytes())


def check(
    pair: Pair,
    entries: list[DraftEntry],
    rows: list[Tensor],
    expected: list[PlainDraft | None],
    within: float = 3e-5,
) -> None:
    """The answers are the formula's, and zero where None was expected. `within` bounds the confidences."""
    result = pair.drafter.draft(DraftBatch(entries, packed(rows), want_margins=True))
    assert all(result.ok)
    assert result.margins is not None
    count = pair.drafts
    for index, wanted in enumerate(expected):
        part = slice(index * count, (index + 1) * count)
        if wanted is None:
            assert not any(result.tokens[part])
            continue
        assert list(result.tokens[part]) == wanted.tokens
        assert list(result.confidences[part]) == pytest.approx(wanted.confidences, abs=within)
        assert list(result.margins[part]) == pytest.approx(wanted.margins, abs=20 * within)


def test_every_batch_size_and_context_drafts_as_the_formula(pair: Pair) -> None:
    """1 to 8 requests in one forward, contexts from one row to beyond the window, starts in mid-sequence, rounds without
    rows, without a draft, and new requests in old slots."""
    rng = random.Random(5)
    requests = [Request(slot, start=rng.choice((0, 0, 7))) for slot in range(8)]
    for step, batch in enumerate((1, 8, 3, 8, 5, 2, 7, 4, 6, 8)):
        entries, rows, expected = [], [], []
        for slot in rng.sample(range(8), batch):
            if rng.random() < 0.15:
                requests[slot] = Request(slot, start=rng.choice((0, 3, 40)))
            request = requests[slot]
            size = rng.choice((0, 1, 2, 5, 23, 30)) if len(request.rows) else rng.randint(1, 30)
            more, anchor, draft = make_rows(size, seed=step * 8 + slot), rng.randrange(97), rng.random() < 0.9
            entries.append(request.entry(pair, more, anchor, draft=draft))
            rows.append(more)
            expected.append(request.expected(pair, anchor) if draft else None)
        check(pair, entries, rows, expected)


@pytest.mark.gpu
def test_a_gpu_drafts_as_the_formula(kind: Kind, tmp_path: Path) -> None:
    pair = open_pair(kind, tmp_path, device="cuda")
    pair.drafter.warm_up(lambda what, done, total: None)
    requests = [Request(slot, start=slot % 3) for slot in range(8)]
    for step, size in enumerate((5, 1, 30, 3)):
        rows = [make_rows(size + slot, seed=step * 8 + slot) for slot in range(8)]
        entries = [one.entry(pair, more, 3 * one.slot) for one, more in zip(requests, rows, strict=True)]
        check(pair, entries, rows, [one.expected(pair, 3 * one.slot) for one in requests], within=5e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_K_VS_BLOCK_fewer_drafts_are_a_shorter_block(kind: Kind, tmp_path: Path, count: int) -> None:
    pair = open_pair(kind, tmp_path, num_drafts=count)
    request, more = Request(2), make_rows(9)
    check(pair, [request.entry(pair, more, 5)], [more], [request.expected(pair, 5, num_drafts=count)])


def test_LAYOUT_1N_a_block_is_one_draft_shorter_where_the_anchor_predicts_nothing(pair: Pair, kind: Kind) -> None:
    assert pair.drafts == (5 if kind.changes.get("sample_from_anchor", True) else 4)


def test_other_chains_are_judged_as_the_formula_teacher_forces_them(pair: Pair) -> None:
    requests = [Request(4), Request(1, start=3)]
    rows = [make_rows(count, seed=count) for count in (3, 30)]
    anchors, rng = (11, 50), random.Random(3)
    entries = [one.entry(pair, more, anchor) for one, more, anchor in zip(requests, rows, anchors, strict=True)]
    result = pair.drafter.draft(DraftBatch(entries, packed(rows), want_margins=True))
    assert result.judge is not None
    for index in (1, 0):
        own = requests[index].expected(pair, anchors[index])
        # Ids that can be drafted, so that each has a logit.
        ids = pair.plain.ids or list(range(97))
        forced = [rng.choice(ids) for _ in range(pair.drafts)]
        reference = pair.plain.chain(own.hidden, own.base, anchors[index], forced, own.ignored)
        for chain, wanted in ((forced, reference), (own.tokens, own)):
            judged = result.judge(
                [index], memoryview(torch.tensor(chain, dtype=torch.int32).numpy().tobytes()).cast("i")
            )
            agrees(judged, wanted, [ids.index(one) for one in chain])
        assert judged.gaps.tolist() == [0.0] * pair.drafts, "its own chain has no gap"


def agrees(judged: Judged, wanted: PlainDraft, rows: list[int]) -> None:
    """`rows` of the head are the judged chain."""
    chosen = wanted.logits.gather(1, torch.tensor(rows).unsqueeze(1)).squeeze(1)
    assert judged.best.tolist() == wanted.tokens
    assert judged.gaps.tolist() == pytest.approx((wanted.logits.amax(1) - chosen).tolist(), abs=5e-4)
    assert judged.peaks.tolist() == pytest.approx(wanted.logits.abs().amax(1).tolist(), abs=5e-4)
    assert judged.confidences.tolist() == pytest.approx(wanted.confidences, abs=3e-5)


# bfloat16 --------------------------------------------------------------------------------------------------------------

CARRIERS = {"native": torch.bfloat16, "in float32 carriers": torch.float32}


@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("name", ["qwen3 gated", "qwen3 rnn 1+N", "gemma4", "speculators sliding"])
def test_bfloat16_drafts_pass_the_shadow_rule_against_float32(tmp_path: Path, name: str, carrier: torch.dtype) -> None:
    kind = KINDS[name]
    exact, cpu = open_pair(kind, tmp_path), torch.device("cpu")
    target = tmp_path / "target" if kind.write is write_speculators else None
    loaded = load_checkpoint(
        tmp_path / "drafter", target, place=lambda name, tensor, as_stored: tensor.to(carrier, copy=True)
    )
    drafter = assemble(loaded, cpu, DeviceWork(Arithmetic(torch.bfloat16, carrier), DirectCalls(cpu), None), 8, CONTEXT)
    pair, gaps, confidences = exact._replace(drafter=drafter), [], []
    for seed in range(6):
        requests = [Request(slot) for slot in range(8)]
        rows = [make_rows(1 + 4 * slot, 100 * seed + slot) for slot in range(8)]
        entries = [one.entry(pair, more, one.slot) for one, more in zip(requests, rows, strict=True)]
        result = drafter.draft(DraftBatch(entries, packed(rows)))
        assert all(result.ok)
        for index, request in enumerate(requests):
            part = slice(index * pair.drafts, (index + 1) * pair.drafts)
            tokens, free = [int(one) for one in result.tokens[part]], request.expected(pair, request.slot)
            forced = pair.plain.chain(free.hidden, free.base, request.slot, tokens, free.ignored)
            for step, token in zip(forced.logits, tokens, strict=True):
                top = float(step.max())
                gaps.append((top - float(step[token])) / 2.0 ** (math.floor(math.log2(max(1.0, abs(top)))) - 7))
            confidences += [abs(a - b) for a, b in zip(result.confidences[part], forced.confidences, strict=True)]
    # The formula is float32, so one side's roundings count in full: twice what two bf16 sides differ by.
    assert sum(gap <= 4 for gap in gaps) >= 0.99 * len(gaps)
    assert max(gaps) <= 16
    assert max(confidences) <= 0.05
