"""What lies in the shared memory is read whole, or not at all."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.fakes.async_world import make_info, talker_spec

from farspark.engine.handoff.gate import Gate
from farspark.engine.handoff.region import KEPT, Area, Region, RegionShape, Submission, distance, next_round
from farspark.engine.round import Phase
from farspark.native.round_calls import open_round_calls


@pytest.fixture
def region() -> Iterator[Region]:
    shape = talker_spec(make_info(), "tcp://127.0.0.1:1").shape
    with Region(RegionShape(shape, 40, 4096)) as region:
        yield region


def submission(slots: list[int], owners: list[int]) -> Submission:
    return Submission(slots, owners, [5] * len(slots), Phase.PREFILL, 4)


def test_round_numbers_are_cyclic() -> None:
    assert next_round((1 << 32) - 1) == 0
    assert distance(2, (1 << 32) - 1) == 3
    assert distance((1 << 32) - 1, 2) == -3
    assert distance(7, 7) == 0


def test_a_second_mapping_reads_what_the_first_wrote_through_the_wrap(region: Region) -> None:
    with Region(region.shape, os.dup(region.fd)) as other:
        for round_ in ((1 << 32) - 1, 0, 1):
            region.describe(round_, submission([3, 1], [2**40, 9]), [1])
            record = other.record(round_)
            assert record is not None
            found = other.decode(record)
            assert (found.slots, found.owners, found.k_windows) == ([3, 1], [2**40, 9], [5, 5])
            assert (found.phase, found.windows) == (Phase.PREFILL, [1])
        region.ask(2)
        assert other.wanted.tolist() == [0, 0, 1, 0]


def test_a_descriptor_is_kept_for_so_many_rounds_and_no_longer(region: Region) -> None:
    region.describe(5, submission([0], [1]), [])
    region.describe(5 + KEPT - 1, submission([0], [2]), [])
    assert region.record(5) is not None
    region.describe(5 + KEPT, submission([0], [3]), [])
    assert region.record(5) is None
    assert region.record(5 + KEPT) is not None


def test_a_descriptor_that_is_being_written_is_nobodys(region: Region) -> None:
    region.describe(5, submission([0], [1]), [])
    seen = []

    class Slots(list[int]):
        def __iter__(self) -> Iterator[int]:
            seen.extend([region.record(5), region.record(5 + KEPT)])
            return super().__iter__()

    region.describe(5 + KEPT, Submission([2], Slots([7]), 0, Phase.DECODE, 4), [])
    assert seen == [None, None]
    assert region.record(5 + KEPT) is not None


def test_a_round_is_described_in_one_call_as_it_is_without(region: Region) -> None:
    """Where that call leaves something to Python, Python does it, or says what is wrong."""
    chance = random.Random(4)
    made: list[bool] = []

    def describe_round(*arguments: Any) -> bool:
        made.append(open_round_calls().describe_round(*arguments))
        return made[-1]

    with Region(region.shape, describe_round=describe_round) as quick:
        for round_ in (*range(200), (1 << 32) - 1, 0):
            n = chance.randint(1, region.shape.model.slots)
            one = Submission(
                chance.sample(range(region.shape.model.slots), n),
                [chance.randrange(2**64) for _ in range(n)],
                chance.choice((0, 5, [chance.randrange(8) for _ in range(n)])),
                chance.choice((Phase.DECODE, Phase.PREFILL)),
                4,
            )
            windows = one.slots[:1] if round_ % 9 == 8 else []
            for each in (region, quick):
                each.describe(round_, one, windows)
            records = region.record(round_), quick.record(round_)
            assert records[0] is not None
            assert records[1] is not None
            size = 16 + 16 * n + 4 * len(windows)
            assert records[0][:size] == records[1][:size]
        assert made == [True] * 180
        for wrong in ({"slots": [1 << 31]}, {"owners": [-1]}, {"k_windows": [1, 2]}, {"k_windows": -1 << 70}):
            before = quick.record(0)
            said = {"slots": [1], "owners": [2], "k_windows": 0} | wrong
            assert not describe_round(quick.record_address(0), 64, *said.values(), False)
            assert quick.record(0) == before


def test_ring_rewind_a_staged_window_is_read_in_order_of_position(region: Region) -> None:
    model = region.shape.model
    rows = np.arange(model.ring, dtype=np.uint8).repeat(model.row_bytes)
    at = region.windows_offset + 2 * region.window_bytes
    region.memory[at : at + region.window_bytes] = rows.tobytes()
    window = region.window(2, model.ring - 2, 5)  # positions 8 to 12 of a ring of 10
    assert [window[i * model.row_bytes] for i in range(5)] == [8, 9, 0, 1, 2]
    assert len(window) == 5 * model.row_bytes


def test_an_area_is_read_whole_while_it_is_written() -> None:
    area = Area(memoryview(bytearray(1 << 14)))
    assert area.read() == {}
    stop = threading.Event()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            area.write({"turn": turn, "again": [turn] * 50})

    writing = threading.Thread(target=write)
    writing.start()
    newest = 0
    try:
        for _ in range(2000):
            found = area.read()
            if found:
                assert found["again"] == [found["turn"]] * 50
                newest = max(newest, found["turn"])
    finally:
        stop.set()
        writing.join()
    assert newest > 10


def test_what_does_not_fit_into_an_area_leaves_the_older_document() -> None:
    area = Area(memoryview(bytearray(256)))
    area.write({"a": 1})
    area.write({"a": "x" * 500})
    assert area.read() == {"a": 1}
    area.clear()
    assert area.read() == {}


def test_a_gate_gives_numbers_while_it_is_open_and_the_first_reason_stands() -> None:
    gate = Gate((1 << 32) - 2)
    assert gate.take() is None
    gate.open((1 << 32) - 2)
    assert [gate.take(), gate.take()] == [(1 << 32) - 1, 0]
    assert gate.shut("a", for_good=False) == 0
    assert gate.take() is None
    gate.open(77)
    assert (gate.take(), gate.why_shut) == (78, None)
    gate.shut("b", for_good=True)
    gate.shut("c", for_good=True)
    gate.open(100)
    assert (gate.take(), gate.why_shut, gate.is_final) == (None, "b", True)
