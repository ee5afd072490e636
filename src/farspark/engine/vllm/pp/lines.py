"""What carries a step's message from the last stage to the others, in order, and judges it on arrival.

- `DeviceLine` (NCCL): a side stream posts. The stream that uses what has come compares it with what is expected, and stops for
  good where it differs; the host looks later, and says what is wrong.
- `HostLine` (Gloo): a thread waits for the device and for the network, and judges. The stream that uses what has come waits for
  the verdict, the engine thread for nothing. Without a device it is the engine thread that waits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.gate import Gate
from farspark.engine.vllm.pp.header import WORDS, Header
from farspark.engine.vllm.pp.history import Step
from farspark.engine.vllm.pp.stream_waits import waits_of

# How long a step that nobody asks about stays unjudged on the device, at most.
_WATCH_S: Final = 0.05
# A stage that is gone may have been ended by the same hand as this one will be: not a fault to be shouted about.
_GRACE_S: Final = 0.5

_IDLE = Header(0, 0, 0)


@dataclass(slots=True, eq=False)
class Slot:
    """One step's buffers, reused."""

    index: int
    message: torch.Tensor  # int64 [words], where tokens are made and used
    step: Step = field(default_factory=lambda: Step("idle", _IDLE, "", ""))
    sent: Header = _IDLE  # the last stage: what goes out
    is_consumed: bool = True

    @property
    def header(self) -> Header:
        return self.step.header


OnError = Callable[[TokenTransportError], None]


class Line(Protocol):
    """Owned by the engine thread. Steps are posted, expected and delivered in order; each of these raises TokenTransportError."""

    def look(self) -> None:
        """Find what went wrong in any step so far, without waiting."""
        ...

    def post(self, slot: Slot) -> None:
        """The last stage: send what the current stream has put into `slot.message`, and its header."""
        ...

    def expect(self, slot: Slot) -> None:
        """The other stages: have the step's message received."""
        ...

    def deliver(self, slot: Slot) -> None:
        """From here on the current stream has the message in `slot.message`, or stands still."""
        ...

    def release(self, slot: Slot) -> None:
        """Wait until the slot's buffers may be written again; its step has been judged then."""
        ...

    def close(self) -> None: ...


class Wire:
    """A group's broadcasts from one of its ranks, without what torch's own function does around them in every call."""

    def __init__(self, group: Any, root: int) -> None:
        """`root`: a rank of the group."""
        self._group = group
        self._options = {is_async: self._broadcast_options(root, is_async) for is_async in (False, True)}

    @staticmethod
    def _broadcast_options(root: int, is_async: bool) -> Any:
        options: Any = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.asyncOp = is_async
        return options

    def broadcast(self, message: torch.Tensor, *, is_async: bool) -> Any:
        return self._group.broadcast([message], self._options[is_async])


class Judge:
    """What a difference or a lost stage means: the gate fails, and `on_error` is told once."""

    def __init__(self, gate: Gate, source: int, on_error: OnError | None) -> None:
        self._gate = gate
        self._source = source
        self._on_error = on_error

    def judge(self, slot: Slot, words: Sequence[int]) -> bool:
        difference = slot.header.difference(words)
        if difference is None:
            if not slot.is_consumed:
                slot.step.state = "arrived"
            self._gate.open(slot.header.sequence)
            return True
        slot.step.state = f"MISMATCH: {difference}"
        self._tell(
            TokenTransportError(f"step {slot.header.sequence} from the last stage (rank {self._source}): {difference}")
        )
        return False

    def lose(self, slot: Slot, error: RuntimeError, *, grace_s: float = 0.0) -> None:
        slot.step.state = f"LOST: {error}"
        self._tell(
            TokenTransportError(f"step {slot.header.sequence}: a stage is gone or sent what does not fit ({error})"),
            grace_s,
        )

    def _tell(self, error: TokenTransportError, grace_s: float = 0.0) -> None:
        if self._gate.fail(error) and self._on_error is not None:
            time.sleep(grace_s)
            self._on_error(error)


class DeviceLine:
    """Over the group's device communicator."""

    def __init__(
        self, wire: Wire, slots: Sequence[Slot], device: torch.device, gate: Gate, judge: Judge, *, is_source: bool
    ) -> None:
        cuda: Any = torch.cuda
        self._wire = wire
        self._device = device
        self._gate = gate
        self._judge = judge
        self._side = cuda.Stream(device)
        self._ready = [cuda.Event() for _ in slots]  # the current stream has come to this step
        self._done = [cuda.Event() for _ in slots]  # the message was sent or has come
        # Page-locked: headers on their way to the device, or back from it.
        self._headers = torch.zeros(len(slots), WORDS, dtype=torch.int64, pin_memory=True)
        self._at_host = [self._headers[slot.index] for slot in slots]
        self._at_device = [slot.message[-WORDS:] for slot in slots]
        self._values = self._headers.numpy()
        self._seals = [slot.message[-1:].data_ptr() for slot in slots]
        self._waits = waits_of(device)
        self._lock = threading.Lock()  # guards _unjudged
        self._unjudged: deque[Slot] = deque()
        self._closed = threading.Event()
        if not is_source:
            threading.Thread(target=self._watch, name="farspark-pp-tokens", daemon=True).start()

    def look(self) -> None:
        self._judge_arrived()
        self._gate.look()

    def post(self, slot: Slot) -> None:
        at = slot.index
        self._values[at] = slot.sent.words()
        self._at_device[at].copy_(self._at_host[at], non_blocking=True)
        self._beside(slot, comes_back=False)
        slot.step.state = "posted"

    def expect(self, slot: Slot) -> None:
        self._beside(slot, comes_back=True)
        with self._lock:
            self._unjudged.append(slot)
        slot.step.state = "posted"

    def _beside(self, slot: Slot, *, comes_back: bool) -> None:
        """The broadcast, behind what the current stream has been given so far."""
        at = slot.index
        self._ready[at].record(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._ready[at])
            try:
                work = self._wire.broadcast(slot.message, is_async=False)
                if work is not None:
                    work.wait()  # the side stream, not the host
            except RuntimeError as error:
                raise TokenTransportError(f"step {slot.header.sequence}: a stage is gone ({error})") from error
            if comes_back:
                self._at_host[at].copy_(self._at_device[at], non_blocking=True)
            self._done[at].record(self._side)

    def deliver(self, slot: Slot) -> None:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._done[slot.index])
        if self._waits is not None:
            self._waits.until_equal(stream.cuda_stream, self._seals[slot.index], slot.header.seal)
        else:
            self._done[slot.index].synchronize()
            self.look()

    def release(self, slot: Slot) -> None:
        if slot.header.sequence:
            self._done[slot.index].synchronize()
            self.look()

    def _judge_arrived(self) -> None:
        with self._lock:
            while self._unjudged and self._done[self._unjudged[0].index].query():
                slot = self._unjudged.popleft()
                if not self._judge.judge(slot, self._values[slot.index].tolist()):
                    self._unjudged.clear()

    def _watch(self) -> None:
        """For the step that nobody asks about, because everything waits for a stream that stands still."""
        torch.cuda.set_device(self._device)
        while not self._closed.wait(_WATCH_S):
            try:
                self._judge_arrived()
            except RuntimeError:  # the device has failed, which is not for this thread to say
                return

    def close(self) -> None:
        self._closed.set()


class HostLine:
    """Over a Gloo group; `slots` on a device are staged in page-locked memory."""

    def __init__(
        self, wire: Wire, slots: Sequence[Slot], device: torch.device, gate: Gate, judge: Judge, *, is_source: bool
    ) -> None:
        self._wire = wire
        self._gate = gate
        self._judge = judge
        self._device = device
        self._is_source = is_source
        self._is_cuda = device.type == "cuda"
        self._staged = [
            torch.zeros(slot.message.shape, dtype=torch.int64, pin_memory=True) if self._is_cuda else slot.message
            for slot in slots
        ]
        self._headers = [staged[-WORDS:].numpy() for staged in self._staged]
        self._copied = [self._event() for _ in slots] if self._is_cuda else []
        self._waits = waits_of(device)
        self._passed = torch.zeros(1, dtype=torch.int32, pin_memory=self._is_cuda)  # modulo 2^32, for a stream
        self._passed_value = self._passed.numpy().view("uint32")
        self._passed_at = self._waits.address_of(self._passed) if self._waits is not None else 0
        self._queue: queue.SimpleQueue[tuple[Slot, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._carry, name="farspark-pp-tokens", daemon=True).start()

    @staticmethod
    def _event() -> Any:
        cuda: Any = torch.cuda
        return cuda.Event(blocking=True)

    def look(self) -> None:
        self._gate.look()

    def post(self, slot: Slot) -> None:
        if self._is_cuda:
            self._staged[slot.index].copy_(slot.message, non_blocking=True)
            self._copied[slot.index].record(torch.cuda.current_stream(self._device))
        self._queue.put((slot, None))

    def expect(self, slot: Slot) -> None:
        try:
            work = self._wire.broadcast(self._staged[slot.index], is_async=True)
        except RuntimeError as error:
            raise TokenTransportError(f"step {slot.header.sequence}: a stage is gone ({error})") from error
        slot.step.state = "posted"
        self._queue.put((slot, work))

    def deliver(self, slot: Slot) -> None:
        if not self._is_cuda:
            self._gate.wait(slot.header.sequence)
            return
        stream = torch.cuda.current_stream(self._device)
        if self._waits is not None:
            self._waits.until_reached(stream.cuda_stream, self._passed_at, slot.header.sequence)
        else:
            self._gate.wait(slot.header.sequence)
        slot.message.copy_(self._staged[slot.index], non_blocking=True)
        self._copied[slot.index].record(stream)

    def release(self, slot: Slot) -> None:
        self._gate.wait(slot.header.sequence)
        if self._is_cuda:
            self._copied[slot.index].synchronize()

    def _carry(self) -> None:
        """Step by step; the first fault is the last step."""
        if self._is_cuda:
            torch.cuda.set_device(self._device)
        while (one := self._queue.get()) is not None:
            slot, work = one
            try:
                if work is None:
                    work = self._send(slot)
                work.wait()
            except RuntimeError as error:
                self._judge.lose(slot, error, grace_s=_GRACE_S)
                return
            if self._is_source:
                self._gate.open(slot.header.sequence)
            elif not self._judge.judge(slot, self._headers[slot.index].tolist()):
                return
            self._passed_value[0] = slot.header.sequence & 0xFFFFFFFF

    def _send(self, slot: Slot) -> Any:
        if self._is_cuda:
            self._copied[slot.index].synchronize()
        self._headers[slot.index][:] = slot.sent.words()
        work = self._wire.broadcast(self._staged[slot.index], is_async=True)
        slot.step.state = "posted"
        return work

    def close(self) -> None:
        self._queue.put(None)
