"""Lines between two ends in one process, over real sockets: nobody gets what was not judged, nor what was judged wrong."""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.gate import Gate
from farspark.engine.vllm.pp.header import WORDS, Header
from farspark.engine.vllm.pp.history import Step
from farspark.engine.vllm.pp.lines import HostLine, Judge, Slot, Wire

SOON_S = 1.0
A_WHILE_S = 0.15
CPU = torch.device("cpu")


@dataclass
class End:
    line: HostLine
    slots: list[Slot]
    group: Any
    told: list[str] = field(default_factory=list)  # by on_error

    def slot(self, header: Header) -> Slot:
        slot = self.slots[header.sequence % 2]
        slot.step = Step("", header, "", "begun")
        slot.sent = header
        slot.is_consumed = False
        return slot


def make_end(store: Any, rank: int) -> End:
    group = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=30))
    slots = [Slot(index, torch.zeros(3 + WORDS, dtype=torch.int64)) for index in range(2)]
    gate, told = Gate(), list[str]()
    judge = Judge(gate, 1, lambda error: told.append(str(error)))
    return End(HostLine(Wire(group, 1), slots, CPU, gate, judge, is_source=rank == 1), slots, group, told)


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    """The receiver and the last stage."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    made = dict[int, End]()
    threads = [threading.Thread(target=lambda rank=rank: made.update({rank: make_end(store, rank)})) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    yield made[0], made[1]
    for end in made.values():
        end.line.close()


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.raised: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except TokenTransportError as error:
            self.raised = error

    def is_done_within(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


HEADER = Header(1, 0xABCD, 2)


def test_a_step_is_delivered_once_it_has_come_and_was_judged(ends: tuple[End, End]) -> None:
    receiver, source = ends
    slot = receiver.slot(HEADER)
    receiver.line.expect(slot)
    delivered = Later(lambda: receiver.line.deliver(slot))
    assert not delivered.is_done_within(A_WHILE_S)
    sent = source.slot(HEADER)
    sent.message[:3] = torch.tensor([5, 6, 7])
    source.line.post(sent)
    assert delivered.is_done_within(SOON_S)
    assert slot.message.tolist() == [5, 6, 7, *HEADER.words()]
    source.line.release(sent)
    receiver.line.release(slot)
    assert (sent.step.state, slot.step.state) == ("posted", "arrived")


def test_a_wrong_step_is_delivered_to_nobody_and_told_once(ends: tuple[End, End]) -> None:
    receiver, source = ends
    slot, sent = receiver.slot(HEADER), source.slot(Header(1, 0xABCD, 3))
    receiver.line.expect(slot)
    source.line.post(sent)
    found = "step 1 from the last stage (rank 1): num_reqs expected 2, got 3"
    for call in (receiver.line.deliver, receiver.line.release, lambda _: receiver.line.look()):
        later = Later(lambda call=call: call(slot))  # type: ignore[misc]
        assert later.is_done_within(SOON_S)
        assert str(later.raised) == found
    ends_s = time.monotonic() + SOON_S
    while not receiver.told and time.monotonic() < ends_s:  # told behind the gate's failure, which all others wait for
        time.sleep(0.001)
    assert receiver.told == [found]
    assert slot.step.state == "MISMATCH: num_reqs expected 2, got 3"


def test_an_engine_thread_that_asks_for_nothing_need_not_ask_for_a_wrong_step_to_be_told(
    ends: tuple[End, End],
) -> None:
    receiver, source = ends
    told = threading.Event()
    receiver.line._judge._on_error = lambda _: told.set()
    receiver.line.expect(receiver.slot(HEADER))
    source.line.post(source.slot(Header(0, 0xABCD, 2)))
    assert told.wait(SOON_S)


def test_the_last_stage_waits_for_no_receiver_until_it_needs_the_buffers_again(ends: tuple[End, End]) -> None:
    receiver, source = ends
    sent = source.slot(HEADER)
    posted = Later(lambda: source.line.post(sent))
    assert posted.is_done_within(SOON_S)
    released = Later(lambda: source.line.release(sent))
    assert not released.is_done_within(A_WHILE_S)
    receiver.line.expect(receiver.slot(HEADER))
    assert released.is_done_within(SOON_S)


def test_a_step_behind_a_wrong_one_is_delivered_to_nobody_either(ends: tuple[End, End]) -> None:
    receiver, source = ends
    second = Header(2, 0xABCD, 2)
    slots = [receiver.slot(header) for header in (HEADER, second)]
    for slot in slots:
        receiver.line.expect(slot)
    for header in (Header(0, 0xABCD, 2), second):
        source.line.post(source.slot(header))
    later = Later(lambda: receiver.line.deliver(slots[1]))
    assert later.is_done_within(SOON_S)
    assert "step 1 from the last stage" in str(later.raised)
    # Nor by a stream that waits for the count of what has passed.
    assert not threading.Event().wait(A_WHILE_S)
    assert receiver.line._passed_value[0] == 0


def test_a_stream_finds_counted_what_has_passed(ends: tuple[End, End]) -> None:
    receiver, source = ends
    for header in (HEADER, Header(2, 0xABCD, 2)):
        slot, sent = receiver.slot(header), source.slot(header)
        receiver.line.expect(slot)
        source.line.post(sent)
        receiver.line.deliver(slot)
    assert not threading.Event().wait(A_WHILE_S)
    assert receiver.line._passed.tolist() == [2]


def test_two_wrong_steps_are_told_once() -> None:
    told: list[str] = []
    gate = Gate()
    judge = Judge(gate, 1, lambda error: told.append(str(error)))
    slot = Slot(0, torch.zeros(WORDS, dtype=torch.int64), Step("", HEADER, "", ""))
    assert not judge.judge(slot, Header(1, 0xABCD, 3).words())
    assert not judge.judge(slot, Header(1, 0xABCD, 4).words())
    assert told == ["step 1 from the last stage (rank 1): num_reqs expected 2, got 3"]
