"""The four broadcasts of a step over one process group: posted without waiting, checked before a token is used.

Imports nothing of vLLM. Two ways over the wire, told apart by where the group's tensors live:

- on the device (NCCL): a side stream posts, the stream that uses the tokens waits on the device. The host waits for one small
  copy, the header and the guards, in the step that uses the tokens.
- on the host (Gloo): payloads are staged in host memory. The sender's host waits for its device; receivers post all four at
  once (a root's broadcast is complete only when they did) and wait in the step that uses the tokens.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import WORDS, Header
from farspark.engine.vllm.pp.history import Step, StepHistory
from farspark.engine.vllm.pp.schedule import SENTINEL, FrameShape, Message, Order, guard_of

# Steps whose buffers are in use beyond those that wait for their consumer.
_SPARE_FRAMES = 2
_AGREE_S = 60.0
_PROTOCOL = 1


class Frame:
    """One step's messages on one device, reused."""

    def __init__(self, shape: FrameShape, device: torch.device, *, pinned: bool) -> None:
        def empty(message: Message, dtype: torch.dtype) -> torch.Tensor:
            return torch.full(shape.of(message), SENTINEL, dtype=dtype, device=device, pin_memory=pinned)

        self.messages = (
            empty(Message.HEADER, torch.int64),
            empty(Message.TOKENS, torch.int64),
            empty(Message.COUNTS, torch.int32),
            empty(Message.DRAFTS, torch.int64),
        )

    def write(self, message: Message, rows: torch.Tensor | None, guard: int) -> torch.Tensor:
        """Fill a payload: `rows` [n, w] in its upper left corner, the guard in its last row, the sentinel elsewhere."""
        payload = self.messages[message].fill_(SENTINEL)
        if rows is not None:
            payload[: rows.shape[0], : rows.shape[1]] = rows
        payload[-1].fill_(guard)
        return payload

    def evidence(self) -> torch.Tensor:
        """int64 [6]: the header, and the last guard of each payload."""
        header, *payloads = self.messages
        return torch.cat([header, *(payload[-1, -1:].to(torch.int64) for payload in payloads)])


_IDLE = Header(0, 0, 0)


@dataclass(slots=True, eq=False)
class Slot:
    """One step's buffers. `stage` is where tokens are made and used, `wire` where the group's tensors live; often the same."""

    stage: Frame
    wire: Frame
    words: torch.Tensor  # int64 [3] in host memory, where the header is made; pinned for a wire on the device
    evidence: torch.Tensor | None  # int64 [6] in pinned memory; None where the wire is host memory itself
    works: list[Any] = field(default_factory=list)
    step: Step = field(default_factory=lambda: Step("idle", _IDLE, "", ""))
    arrived: Any = None  # CUDA event
    copied: Any = None  # CUDA event: what lies in pinned memory was copied; it may be written again
    is_checked: bool = True

    @property
    def header(self) -> Header:
        return self.step.header


class TokenTransport:
    """One stage's end. `source` is the last stage's global rank; `depth` steps at most wait for their consumer."""

    def __init__(
        self,
        group: Any,
        *,
        source: int,
        is_source: bool,
        shape: FrameShape,
        depth: int,
        device: torch.device,
        wire_device: torch.device,
        label: str,
    ) -> None:
        self.shape = shape
        self.history = StepHistory(label)
        self._group = group
        self._source = source
        self._is_source = is_source
        self._order = Order()
        self._device = device
        self.is_over_host = wire_device.type == "cpu"
        self._is_cuda = device.type == "cuda"
        cuda: Any = torch.cuda
        self._side = cuda.Stream(device) if self._is_cuda else None
        self._slots = [self._make_slot(wire_device) for _ in range(depth + _SPARE_FRAMES)]
        self._sending: Slot | None = None

    def _make_slot(self, wire_device: torch.device) -> Slot:
        stage = Frame(self.shape, self._device, pinned=False)
        is_same = wire_device.type == self._device.type
        wire = stage if is_same else Frame(self.shape, wire_device, pinned=True)
        words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=not self.is_over_host)
        evidence = None if self.is_over_host else torch.zeros(6, dtype=torch.int64, pin_memory=True)
        return Slot(stage, wire, words, evidence)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the side stream, behind what the current stream has been given so far."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def rehearse(self) -> None:
        """Run every device operation of a step without a message, so that no kernel is first loaded while one is awaited."""
        slot = self._slots[0]
        n = self.shape.max_reqs
        tokens = torch.zeros(n, self.shape.num_drafts + 1, dtype=torch.int64, device=self._device)
        with self._beside():
            slot.stage.write(Message.TOKENS, tokens, 0)
            slot.stage.write(Message.COUNTS, torch.zeros(n, 2, dtype=torch.int32, device=self._device), 0)
            slot.stage.write(Message.DRAFTS, tokens[:, 1:], 0)
            slot.stage.evidence()
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def agree(self, host_group: Any, world_size: int) -> None:
        """Every stage must run this transport, with the same shapes. Raises TokenTransportError with the values of all.

        A collective over `host_group` (Gloo), to be entered by every stage before its first step.
        """
        mine = torch.tensor(
            [_PROTOCOL, self.shape.max_reqs, self.shape.num_drafts, int(self.is_over_host)], dtype=torch.int64
        )
        every = [torch.zeros_like(mine) for _ in range(world_size)]
        try:
            dist.all_gather(every, mine, group=host_group, async_op=True).wait(datetime.timedelta(seconds=_AGREE_S))
        except RuntimeError as error:
            raise TokenTransportError(
                f"not every stage joined the token transport within {_AGREE_S:g} s ({error}); its settings must be in the "
                "environment of every stage, on every host"
            ) from error
        self._agree_on(every)
        # A device communicator is made by its first collective. That must not be one of a step, beside activations.
        first = torch.zeros(1, dtype=torch.int64, device="cpu" if self.is_over_host else self._device)
        dist.broadcast(first, src=self._source, group=self._group)
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    @staticmethod
    def _agree_on(every: list[torch.Tensor]) -> None:
        names = ("protocol", "max_num_seqs", "drafts", "over the host")
        for name, values in zip(names, zip(*(one.tolist() for one in every), strict=True), strict=True):
            if len(set(values)) > 1:
                raise TokenTransportError(f"the stages differ in {name}: {list(values)}, first to last stage")

    # The last stage.

    def send_sampled(
        self, mask_hash: int, num_reqs: int, tokens: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Begin a step: its header, `tokens` int64 [n, w <= N + 1], `num_sampled` and `num_rejected` int32 [n].

        Raises TokenTransportError where the schedule forbids it or a receiver is gone.
        """
        assert self._is_source
        self._look_at_works()
        header = Header(self._order.begin(), mask_hash, num_reqs)
        slot = self._take_slot(self.history.add("send", header, f"tokens {list(tokens.shape)}", "begun"))
        self._sending = slot
        self.shape.check_rows(Message.TOKENS, tuple(tokens.shape))
        guard = guard_of(header.sequence)
        with self._beside():
            self._write_header(slot)
            slot.stage.write(Message.TOKENS, tokens, guard)
            slot.stage.write(Message.COUNTS, torch.stack((num_sampled, num_rejected), dim=1), guard)
            self._keep(tokens, num_sampled, num_rejected)
            self._to_wire(slot, Message.TOKENS, Message.COUNTS)
            for message in (Message.HEADER, Message.TOKENS, Message.COUNTS):
                self._post(slot, message)
        slot.step.state = "sampled tokens posted"

    def send_drafts(self, drafts: torch.Tensor | None) -> None:
        """End the step: `drafts` int64 [n, N], or None where the step has none. Raises as `send_sampled` does."""
        slot, self._sending = self._sending, None
        if slot is None:
            raise TokenTransportError("drafts of a step that has not begun")
        if drafts is not None:
            self.shape.check_rows(Message.DRAFTS, tuple(drafts.shape))
        with self._beside():
            slot.stage.write(Message.DRAFTS, drafts, guard_of(slot.header.sequence))
            if drafts is not None:
                self._keep(drafts)
            self._to_wire(slot, Message.DRAFTS)
            self._post(slot, Message.DRAFTS)
        slot.step.state = "posted"
        if drafts is not None:
            slot.step.rows += f" drafts {list(drafts.shape)}"

    # The other stages.

    def receive(self, mask_hash: int, num_reqs: int) -> Slot:
        """Post all four receives of a step and return at once. Raises TokenTransportError where an earlier step was wrong."""
        assert not self._is_source
        self._look_at_works()
        header = Header(self._order.begin(), mask_hash, num_reqs)
        slot = self._take_slot(self.history.add("receive", header, "", "begun"))
        slot.is_checked = False
        with self._beside():
            for message in Message:
                self._post(slot, message)
            if slot.evidence is not None:
                for work in slot.works:
                    work.wait()  # the side stream waits, not the host
                slot.evidence.copy_(slot.wire.evidence(), non_blocking=True)
                slot.arrived = _event()
                slot.arrived.record()
        slot.step.state = "posted"
        return slot

    def complete(self, slot: Slot) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What came: tokens int64 [n, N + 1], number sampled and rejected int32 [n], drafts int64 [n, N], on the device, for
        the current stream. Waits for it. Raises TokenTransportError where it is not this step's."""
        self.check(slot)
        n = slot.header.num_reqs
        if slot.wire is not slot.stage:
            for mine, theirs in zip(slot.stage.messages, slot.wire.messages, strict=True):
                mine.copy_(theirs, non_blocking=True)
            slot.copied = _event()
            slot.copied.record()
        elif slot.arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.arrived)
        slot.step.state = "consumed"
        _, tokens, counts, drafts = slot.stage.messages
        return tokens[:n], counts[:n, 0].contiguous(), counts[:n, 1].contiguous(), drafts[:n]

    def check(self, slot: Slot) -> None:
        """Wait for a step and judge it. Raises TokenTransportError where it is not the one that is expected."""
        if slot.is_checked:
            return
        if slot.evidence is not None:
            slot.arrived.synchronize()
            evidence = slot.evidence
        else:
            self._await(slot)
            evidence = slot.wire.evidence()
        words = evidence.tolist()
        difference = slot.header.difference(Header.from_words(words[:3]))
        guard = guard_of(slot.header.sequence)
        if difference is None and words[3:] != [guard] * 3:
            difference = f"payload guards expected {guard}, got {words[3:]} (tokens, counts, drafts)"
        if difference is not None:
            slot.step.state = f"MISMATCH: {difference}"
            raise TokenTransportError(
                f"step {slot.header.sequence} from the last stage (rank {self._source}): {difference}"
            )
        slot.is_checked = True
        slot.works = []
        slot.step.state = "arrived"

    # Both.

    def _look_at_works(self) -> None:
        """Find what went wrong in any step so far, without waiting."""
        for slot in self._slots:
            if slot.evidence is not None:
                if not slot.is_checked and slot.arrived.query():
                    self.check(slot)
                continue
            for work in slot.works:
                if work.is_completed():
                    self._await_work(slot, work)
            if not slot.is_checked and all(work.is_completed() for work in slot.works):
                self.check(slot)

    def _take_slot(self, step: Step) -> Slot:
        slot = self._slots[step.header.sequence % len(self._slots)]
        self._await(slot)
        if not slot.is_checked:
            raise TokenTransportError(f"step {slot.header.sequence} was never consumed")
        if slot.copied is not None:
            slot.copied.synchronize()
        slot.works, slot.step, slot.arrived, slot.copied = [], step, None, None
        return slot

    def _await(self, slot: Slot) -> None:
        for work in slot.works:
            self._await_work(slot, work)

    def _await_work(self, slot: Slot, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            slot.step.state = f"LOST: {error}"
            raise TokenTransportError(
                f"step {slot.header.sequence}: a stage is gone or sent what does not fit ({error})"
            ) from error

    def _write_header(self, slot: Slot) -> None:
        slot.words.copy_(torch.tensor(slot.header.words(), dtype=torch.int64))
        slot.wire.messages[Message.HEADER].copy_(slot.words, non_blocking=True)
        if not self.is_over_host:
            slot.copied = _event()
            slot.copied.record()

    def _keep(self, *tensors: torch.Tensor) -> None:
        """They were made on another stream, and are read on this one."""
        if self._side is not None:
            for tensor in tensors:
                tensor.record_stream(self._side)

    def _to_wire(self, slot: Slot, *messages: Message) -> None:
        if slot.wire is slot.stage:
            return
        for message in messages:
            slot.wire.messages[message].copy_(slot.stage.messages[message], non_blocking=True)
        assert self._side is not None
        self._side.synchronize()

    def _post(self, slot: Slot, message: Message) -> None:
        self._order.post(message)
        try:
            work = dist.broadcast(slot.wire.messages[message], src=self._source, group=self._group, async_op=True)
        except RuntimeError as error:
            raise TokenTransportError(f"step {self._order.sequence}: a stage is gone ({error})") from error
        slot.works.append(work)


def _event() -> Any:
    cuda: Any = torch.cuda
    return cuda.Event()
