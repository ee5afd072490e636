from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from farspark.errors import ConfigError
from farspark.worker.context import ContextShape, ContextStore
from farspark.worker.memory import HEADROOM_BYTES
from farspark.worker.models.base import Arithmetic

CPU = torch.device("cpu")
BLOCK = 3


pytestmark = pytest.mark.usefixtures("one_thread")


def make_store(slots: int = 2, context: int = 8, layers: int = 1, kv_heads: int = 1, dim: int = 2) -> ContextStore:
    store = ContextStore(ContextShape(layers, (2, kv_heads, dim), slots, context, BLOCK, torch.float32), CPU)
    store.entries[:, : store.zero_row] = float("nan")
    store.entries[:, store.zero_row + 1 :] = float("nan")
    return store


def append(store: ContextStore, slot: int, first: int, count: int) -> None:
    """Write rows whose keys and values are their own position."""
    kept = min(count, store.shape.context)
    positions = torch.arange(first + count - kept, first + count, dtype=torch.float32)
    shape = store.shape
    entries = positions.view(1, -1, 1, 1, 1).expand(shape.layers, -1, *shape.entry)
    store.write(torch.from_numpy(store.destinations(slot, first + count - kept, kept)), entries)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def seen(store: ContextStore, slot: int, anchor: int, visible_from: int, visible: int | None = None) -> list[int]:
    """The positions that a block at `anchor` would attend to, read back from the store."""
    view = store.view(ints(slot), ints(anchor), ints(visible_from), visible or store.shape.context, BLOCK)
    held = store.entries[0].index_select(0, view._rows.flatten())[:-BLOCK, 1, 0, 0]
    is_visible = view.bias[0, 0, 0, :-BLOCK] == 0
    assert not held.isnan().any(), "a position that was never written would be read"
    assert not held[~is_visible].any(), "what is not visible must be zeros"
    return [int(position) for position in held[is_visible]]


def test_RING_REWIND_rows_held_are_the_newest_that_fit_after_any_steps() -> None:
    """10,000 random steps against a list: rounds that commit nothing after a wrap, resets, starts in mid-sequence."""
    rng = random.Random(3)
    store = make_store(slots=3, context=7)
    held: list[list[int]] = [[], [], []]
    position = [0, 0, 0]
    for _ in range(10_000):
        slot = rng.randrange(3)
        if rng.random() < 0.03:
            held[slot], position[slot] = [], rng.choice((0, 0, 3, 6, 7, 8, 100_000))
        count = rng.choice((0, 0, 1, 1, 2, 3, 6, 7, 8, 15))
        append(store, slot, position[slot], count)
        held[slot] += range(position[slot], position[slot] + count)
        position[slot] += count
        visible_from = max(position[slot] - len(held[slot]), position[slot] - 7)
        assert seen(store, slot, position[slot], visible_from) == held[slot][-7:]


@pytest.mark.parametrize("start", [0, 3, 8, 1001])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_RING_VALID_only_what_was_written_is_ever_read(start: int, count: int) -> None:
    store = make_store()
    append(store, 1, start, count)
    anchor = start + count
    assert seen(store, 1, anchor, max(start, anchor - 8)) == list(range(max(start, anchor - 8), anchor))
    assert seen(store, 1, anchor, anchor) == []


def test_a_claim_of_more_than_the_context_is_cut_to_it() -> None:
    store = make_store()
    append(store, 0, 0, 20)
    assert seen(store, 0, 20, 0) == list(range(12, 20))


def test_a_shorter_view_holds_the_newest_positions() -> None:
    store = make_store()
    append(store, 0, 0, 20)
    assert seen(store, 0, 20, 17, visible=4) == [17, 18, 19]


def test_slots_do_not_overlap() -> None:
    store = make_store(slots=3)
    for slot in range(3):
        append(store, slot, 100 * slot, 9)
    for slot in range(3):
        assert seen(store, slot, 100 * slot + 9, 100 * slot + 1) == list(range(100 * slot + 1, 100 * slot + 9))


def test_destinations_are_the_position_modulo_the_context() -> None:
    store = make_store(slots=3, context=8)
    assert store.destinations(2, 13, 5).tolist() == [21, 22, 23, 16, 17]
    assert store.destinations(0, 0, 0).dtype == np.int64


def test_attention_is_softmax_over_the_context_and_the_whole_block() -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    store = make_store(slots=2, context=8, layers=2, kv_heads=2, dim=4)
    counts = (5, 2)
    held = [draw(2, count, 2, 2, 4) for count in counts]
    for slot, key_value in enumerate(held):
        store.write(torch.from_numpy(store.destinations(slot, 10, counts[slot])), key_value)
    # Entry 0 is slot 1 and entry 1 is slot 0: rows of a batch are not slots.
    view = store.view(ints(1, 0), ints(12, 15), ints(10, 10), 6, BLOCK)
    arithmetic = Arithmetic(torch.float32, torch.float32)
    for layer in (0, 1):
        query, own = draw(2, BLOCK, 6, 4), draw(2, BLOCK, 2, 2, 4)
        answer = arithmetic.attend(view, layer, query, own, 0.5).view(2, BLOCK, 6, 4)
        for entry, slot in enumerate((1, 0)):
            keys = torch.cat((held[slot][layer, :, 0], own[entry, :, 0]))
            values = torch.cat((held[slot][layer, :, 1], own[entry, :, 1]))
            for head in range(6):
                weights = (query[entry, :, head] @ keys[:, head // 3].T * 0.5).softmax(-1)
                torch.testing.assert_close(answer[entry, :, head], weights @ values[:, head // 3])


def test_the_block_in_flight_enters_no_slot() -> None:
    store = make_store()
    append(store, 0, 0, 8)
    before = store.entries[:, :8].clone()
    view = store.view(ints(0), ints(8), ints(0), 8, BLOCK)
    view.gather(0, torch.ones(1, BLOCK, 2, 1, 2))
    assert torch.equal(store.entries[:, :8], before)
    assert store.entries[:, 8:16].isnan().all()
    assert not store.entries[:, store.zero_row].any()


def test_memory_is_slots_times_context_and_little_else() -> None:
    shape = ContextShape(layers=5, entry=(2, 8, 128), slots=4, context=4096, block=7, dtype=torch.bfloat16)
    per_position = 20_480
    assert shape.byte_count == per_position * (4 * 4096 + 2 + 4 * 7)
    assert make_store().entries.nbytes == make_store().shape.byte_count


def test_GB10_MEM_too_large_a_store_is_refused_before_it_is_allocated() -> None:
    shape = ContextShape(layers=5, entry=(2, 8, 128), slots=1 << 20, context=4096, block=7, dtype=torch.bfloat16)
    with pytest.raises(ConfigError) as caught:
        ContextStore(shape, CPU)
    assert f"takes {shape.byte_count + HEADROOM_BYTES:,} bytes on cpu" in str(caught.value)
    assert "lower the context or the slots" in str(caught.value)
    assert "bytes are free" in str(caught.value)
