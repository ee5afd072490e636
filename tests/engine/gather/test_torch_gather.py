"""The torch gather against plain Python lists: the same random programs, compared after every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from farspark.engine.gather.layout import GatherShape
from farspark.engine.gather.torch_gather import Gathered, StepTensors, TorchGather
from farspark.engine.round import MetaColumn, SamplingColumn, meta_columns

CPU = torch.device("cpu")
NO_TOKEN = 7_000_000  # stands where no token may ever be taken from


@dataclass
class Request:
    """What one request's part of a step looks like, in host terms."""

    slot: int
    start_pos: int
    query: int
    rejected: int = 0
    sampled: int = 1
    last_sampled: int = NO_TOKEN
    next_prefill: int = NO_TOKEN

    @property
    def valid(self) -> int:
        return self.query - self.rejected


def shape(*, is_sampled: bool = False, **changes: int) -> GatherShape:
    values = {"max_requests": 4, "max_tokens": 64, "taps": 2, "hidden_size": 3, "context": 8, "ring": 4} | changes
    return GatherShape(**values, is_sampled=is_sampled)


def row_at(slot: int, position: int, salt: int, of: GatherShape) -> torch.Tensor:
    """The row of one position [taps, hidden]: small integers, exact in bf16, different by slot, position and salt."""
    seed = (slot * 31 + position * 7 + salt * 101) % 120
    return torch.arange(of.row_values, dtype=torch.float32).reshape(of.taps, of.hidden_size) + seed


@dataclass
class Model:
    """The same gather in plain Python."""

    of: GatherShape
    ring: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (slot, position) -> [row]

    def step(self, requests: list[Request], salt: int) -> list[torch.Tensor]:
        """Rows in packed order; the ring keeps the newest."""
        packed = []
        for request in requests:
            end = request.start_pos + request.valid
            for position in range(max(request.start_pos, end - self.of.context), end):
                row = row_at(request.slot, position, salt, self.of).reshape(-1)
                packed.append(row)
                self.ring[request.slot, position % self.of.ring] = row
        return packed


def tensors(
    requests: list[Request],
    of: GatherShape,
    salt: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
    lookahead: bool = True,
    wants_drafts: bool = True,
) -> StepTensors:
    rows, positions = [], []
    for request in requests:
        for position in range(request.start_pos, request.start_pos + request.query):
            rejected = position >= request.start_pos + request.valid
            rows.append(
                torch.full((of.taps, of.hidden_size), torch.nan)
                if rejected
                else row_at(request.slot, position, salt, of)
            )
            positions.append(position)
    rows += [torch.full((of.taps, of.hidden_size), torch.nan)] * padding
    positions += [0] * padding
    hidden = torch.stack(rows).to(dtype)
    last_sampled = torch.full((of.max_requests, 1), NO_TOKEN)
    next_prefill = torch.full((1, of.max_requests), NO_TOKEN, dtype=torch.int32)
    for request in requests:
        last_sampled[request.slot] = request.last_sampled
        next_prefill[0, request.slot] = request.next_prefill
    ends = np.cumsum([request.query for request in requests])
    return StepTensors(
        hidden=[hidden[:, tap] for tap in range(of.taps)],
        positions=torch.tensor(positions),
        query_start_loc=torch.tensor([0, *ends], dtype=torch.int32),
        slots=torch.tensor([request.slot for request in requests]),
        num_sampled=torch.tensor([request.sampled for request in requests], dtype=torch.int32),
        num_rejected=torch.tensor([request.rejected for request in requests], dtype=torch.int32),
        last_sampled=last_sampled,
        next_prefill_tokens=next_prefill if lookahead else next_prefill[0],
        row_bound=sum(min(request.query, of.context) for request in requests),
        wants_drafts=wants_drafts,
    )


def rows_of(view: memoryview, of: GatherShape) -> torch.Tensor:
    """[rows, row] of a host view."""
    values = torch.frombuffer(bytearray(view), dtype=torch.bfloat16) if len(view) else torch.empty(0)
    return values.reshape(-1, of.row_values).float()


def gather(one: TorchGather, requests: list[Request], salt: int = 0, **how: object) -> Gathered:
    one.run(tensors(requests, one.shape, salt, **how))  # type: ignore[arg-type]
    return one.wait()


def assert_rows(view: memoryview, expected: list[torch.Tensor], of: GatherShape) -> None:
    found = rows_of(view, of)
    assert found.shape[0] == len(expected)
    if expected:
        assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_pack_and_keep_what_the_list_model_does(seed: int) -> None:
    rng = random.Random(seed)
    of = shape(context=rng.choice([5, 8, 16]), ring=rng.choice([1, 3, 5]), max_tokens=96)
    one, model = TorchGather(of, CPU), Model(of)
    end = dict.fromkeys(range(of.max_requests), 0)
    first = dict.fromkeys(range(of.max_requests), 0)
    for salt in range(60):
        batch = []
        for slot in rng.sample(range(of.max_requests), rng.randint(1, of.max_requests)):
            if rng.random() < 0.1:  # another request takes the slot, perhaps with a cached prefix
                end[slot] = first[slot] = rng.choice([0, 0, 13])
                model.ring = {key: row for key, row in model.ring.items() if key[0] != slot}
            query = rng.choice([1, 2, 6, rng.randint(1, 24)])
            request = Request(slot, end[slot], query, rejected=rng.randint(0, min(query - 1, 5)))
            request.sampled = rng.choice([0, 1, 2]) if request.rejected == 0 else 1
            request.last_sampled, request.next_prefill = 1000 + salt * 10 + slot, 2000 + salt * 10 + slot
            end[slot] += request.valid
            batch.append(request)
        gathered = gather(one, batch, salt, padding=rng.choice([0, 3]), lookahead=rng.random() < 0.5)
        assert_rows(gathered.rows, model.step(batch, salt), of)
        for row, request in zip(gathered.meta, batch, strict=True):
            assert row[MetaColumn.START_POS] == request.start_pos
            assert row[MetaColumn.VALID_ROWS] == request.valid
            assert row[MetaColumn.ANCHOR_TOKEN] == (request.last_sampled if request.sampled else request.next_prefill)
            assert row[MetaColumn.SAMPLED] == (1 if request.sampled else 0)
        for slot in range(of.max_requests):
            held = min(of.ring, end[slot] - first[slot])
            expected = [model.ring[slot, position % of.ring] for position in range(end[slot] - held, end[slot])]
            assert_rows(one.ring.window(slot, end[slot] - held, held), expected, of)


@pytest.mark.parametrize("chunks", [[30], [9, 21], [3, 27], [8, 8, 8, 6], [1] * 30])
def test_chunk_trim_any_chunking_leaves_the_ring_of_one_big_chunk(chunks: list[int]) -> None:
    of = shape(context=8, ring=6)
    one, position = TorchGather(of, CPU), 0
    for chunk in chunks:
        gathered = gather(one, [Request(2, position, chunk, sampled=0)])
        newest = range(position + max(0, chunk - of.context), position + chunk)
        assert_rows(gathered.rows, [row_at(2, p, 0, of).reshape(-1) for p in newest], of)
        position += chunk
    assert_rows(one.ring.window(2, 24, 6), [row_at(2, p, 0, of).reshape(-1) for p in range(24, 30)], of)


def test_ring_rewind_rejecting_all_drafts_just_after_a_wrap_keeps_the_older_rows() -> None:
    of = shape(context=8, ring=4)
    one = TorchGather(of, CPU)
    gather(one, [Request(0, 0, 4, sampled=0)], salt=1)
    gather(one, [Request(0, 4, 4, rejected=3)], salt=2)
    held = rows_of(one.ring.window(0, 1, 4), of)
    expected = [row_at(0, 1, 1, of), row_at(0, 2, 1, of), row_at(0, 3, 1, of), row_at(0, 4, 2, of)]
    assert torch.equal(held, torch.stack(expected).reshape(4, -1))


def test_rejected_rows_reach_neither_the_message_nor_the_ring() -> None:
    of = shape()
    one = TorchGather(of, CPU)
    gathered = gather(one, [Request(3, 10, 6, rejected=4), Request(1, 0, 6, rejected=5)])
    assert not rows_of(gathered.rows, of).isnan().any()
    assert not one.ring.rows[: one.ring.scratch_row].isnan().any()
    assert len(gathered.rows) == (2 + 1) * of.row_bytes


def test_qrows_a_full_decode_of_every_slot_fits() -> None:
    num_drafts = 5
    of = shape(max_requests=16, max_tokens=16 * (num_drafts + 1), context=128, ring=128)
    one, model = TorchGather(of, CPU), Model(of)
    slots = list(range(16))
    random.Random(5).shuffle(slots)
    batch = [Request(slot, 100 + slot, num_drafts + 1, rejected=slot % 6, last_sampled=slot) for slot in slots]
    gathered = gather(one, batch)
    assert_rows(gathered.rows, model.step(batch, 0), of)
    assert list(gathered.meta[:, MetaColumn.ANCHOR_TOKEN]) == slots


@pytest.mark.parametrize("context", [16, 512, 4096])
def test_pos_off1_the_anchor_stands_one_past_the_newest_row(context: int) -> None:
    of = shape(max_requests=2, max_tokens=8192, context=context, ring=min(context, 512), hidden_size=1)
    one = TorchGather(of, CPU)
    for start, query, rejected in [(0, 5000, 0), (5000, 6, 0), (5006, 6, 3), (5009, 1, 0)]:
        gathered = gather(one, [Request(1, start, query, rejected, last_sampled=9)])
        end = int(gathered.meta[0, MetaColumn.START_POS] + gathered.meta[0, MetaColumn.VALID_ROWS])
        assert end == start + query - rejected
        newest = rows_of(gathered.rows, of)[-1]
        assert torch.equal(newest, row_at(1, end - 1, 0, of).reshape(-1).bfloat16().float())


@pytest.mark.parametrize("lookahead", [True, False])
def test_BACKUP_TOK_a_row_that_sampled_nothing_is_anchored_at_its_last_committed_token(lookahead: bool) -> None:
    """The end of a chunk: the next prompt token. All drafts rejected: what the target chose instead, which it did sample."""
    of = shape()
    gathered = gather(
        TorchGather(of, CPU),
        [
            Request(2, 0, 5, sampled=0, next_prefill=31),
            Request(0, 9, 6, rejected=5, last_sampled=32),
            Request(3, 4, 1, last_sampled=33),
        ],
        lookahead=lookahead,
    )
    assert gathered.meta[:, MetaColumn.ANCHOR_TOKEN].tolist() == [31, 32, 33]
    assert gathered.meta[:, MetaColumn.SAMPLED].tolist() == [0, 1, 1]


def test_taps_stand_side_by_side_in_the_order_given() -> None:
    of = shape(taps=3, hidden_size=2, context=2, ring=2)
    one = TorchGather(of, CPU)
    gathered = gather(one, [Request(0, 0, 1)])
    assert rows_of(gathered.rows, of).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_float32_rows_are_rounded_to_bf16() -> None:
    of = shape(taps=1, hidden_size=1, context=2, ring=2)
    one = TorchGather(of, CPU)
    step = tensors([Request(0, 0, 1)], of, 0, dtype=torch.float32)
    step.hidden[0][:] = 1 + 2**-8 + 2**-10
    one.run(step)
    assert rows_of(one.wait().rows, of).item() == 1 + 2**-7


def test_a_round_that_wants_no_drafts_still_packs_its_rows() -> None:
    of = shape()
    one = TorchGather(of, CPU)
    gathered = gather(one, [Request(0, 0, 3), Request(1, 0, 3)], wants_drafts=False)
    assert list(gathered.meta[:, MetaColumn.SAMPLED]) == [0, 0]
    assert len(gathered.rows) == 6 * of.row_bytes


def test_warmup_rehearsal_touches_no_slot() -> None:
    of = shape()
    one = TorchGather(of, CPU)
    before = one.ring.rows[: one.ring.scratch_row].clone()
    one.rehearse(tensors([Request(0, 0, 5), Request(1, 3, 9)], of, 3))
    assert torch.equal(one.ring.rows[: one.ring.scratch_row], before)


def test_two_windows_of_one_round_do_not_share_memory() -> None:
    of = shape()
    one = TorchGather(of, CPU)
    gather(one, [Request(0, 0, 4), Request(1, 50, 4)])
    first, second = one.ring.window(0, 0, 4), one.ring.window(1, 50, 4)
    assert_rows(first, [row_at(0, p, 0, of).reshape(-1) for p in range(4)], of)
    assert_rows(second, [row_at(1, p, 0, of).reshape(-1) for p in range(50, 54)], of)


def test_hidden_states_of_another_width_are_refused() -> None:
    one = TorchGather(shape(), CPU)
    step = tensors([Request(0, 0, 1)], shape(taps=3), 0)
    with pytest.raises(ValueError, match=r"widths \[3, 3, 3\], expected 2 taps of 3"):
        one.run(step)


def test_a_ring_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="ring of 9 rows with a context of 8"):
        shape(ring=9)


@pytest.mark.parametrize(("slot", "first", "rows"), [(4, 0, 1), (-1, 0, 1), (0, 0, 5), (0, -1, 2)])
def test_a_window_that_the_ring_cannot_have_is_refused(slot: int, first: int, rows: int) -> None:
    with pytest.raises(ValueError, match="the ring has 4 rows of each of 4 slots"):
        TorchGather(shape(), CPU).ring.window(slot, first, rows)


def test_a_sampled_step_says_each_requests_seed_and_temperature() -> None:
    """Behind the four columns, by slot: the bits of the temperature, the low and the high half of the seed."""
    of = shape(is_sampled=True)
    requests = [Request(slot=2, start_pos=0, query=3), Request(slot=0, start_pos=5, query=1)]
    step = tensors(requests, of, 1)._replace(
        temperature=torch.tensor([0.7, 9.0, 0.0, 9.0]),
        seeds=torch.tensor([-(2**63) + 5, 9, 2**40 - 1, 9]),
    )
    one = TorchGather(of, CPU)
    one.run(step)
    meta = one.wait().meta
    assert meta.shape == (2, meta_columns(is_sampled=True))
    assert np.ascontiguousarray(meta[:, SamplingColumn.TEMPERATURE]).view(np.float32).tolist() == [
        0.0,
        np.float32(0.7),
    ]
    seeds = np.ascontiguousarray(meta[:, SamplingColumn.SEED_LOW :]).view(np.int64)[:, 0]
    assert seeds.tolist() == [2**40 - 1, -(2**63) + 5]
    plain = TorchGather(shape(), CPU)
    plain.run(step)
    assert np.array_equal(meta[:, :4], plain.wait().meta)


def test_a_sampled_step_without_seeds_is_a_value_error() -> None:
    of = shape(is_sampled=True)
    with pytest.raises(ValueError, match="without seeds and temperatures"):
        TorchGather(of, CPU).run(tensors([Request(slot=0, start_pos=0, query=1)], of, 1))
