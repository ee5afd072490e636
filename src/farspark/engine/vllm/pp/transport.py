"""A step's one broadcast over one process group: posted without waiting, and never used before it was judged.

Imports nothing of vLLM. Which of two ways it goes is told by where the group's tensors live: on the device (NCCL) or in host
memory (Gloo). `lines.py` has both.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.gate import Gate
from farspark.engine.vllm.pp.header import Header
from farspark.engine.vllm.pp.history import Step, StepHistory
from farspark.engine.vllm.pp.lines import DeviceLine, HostLine, Judge, Line, OnError, Slot, Wire
from farspark.engine.vllm.pp.schedule import SENTINEL, FrameShape, Order

# Steps whose buffers are in use beyond those that wait for their consumer.
_SPARE_SLOTS = 2
_AGREE_S = 60.0
_PROTOCOL = 2


class Parts:
    """The rows of a step within a message: what is sent from there, and used there, without another copy."""

    def __init__(self, message: torch.Tensor, shape: FrameShape, num_reqs: int) -> None:
        def rows(start: int, width: int) -> torch.Tensor:
            return message[start : start + num_reqs * width].view(num_reqs, width)

        self.tokens = rows(0, shape.num_drafts + 1)  # int64 [n, N + 1]
        self.drafts = rows(shape.drafts_at, shape.num_drafts)  # int64 [n, N]
        counts = message[shape.counts_at : shape.drafts_at].view(torch.int32)
        self.counts = counts[: 2 * num_reqs]  # int32 [2 n]
        self.num_sampled, self.num_rejected = self.counts[:num_reqs], self.counts[num_reqs:]  # int32 [n]


class TokenTransport:
    """One stage's end, for the engine thread. `source` is the last stage's global rank; `depth` steps at most wait for their
    consumer. `on_error` is called, from another thread perhaps, where a step is found wrong while the engine thread waits for
    its device and cannot raise."""

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
        on_error: OnError | None = None,
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
        self._slots = [
            Slot(index, torch.full((shape.words,), SENTINEL, dtype=torch.int64, device=device))
            for index in range(depth + _SPARE_SLOTS)
        ]
        self._parts: dict[tuple[int, int], Parts] = {}
        self._sending: Slot | None = None
        gate = Gate()
        wire, judge = Wire(group, dist.get_group_rank(group, source)), Judge(gate, source, on_error)
        line = HostLine if self.is_over_host else DeviceLine
        self._line: Line = line(wire, self._slots, device, gate, judge, is_source=is_source)

    def rehearse(self) -> None:
        """Run every device operation of a step without a message, so that no kernel is first loaded while one is awaited."""
        parts = self._parts_of(self._slots[0], self.shape.max_reqs)
        self._pack(parts, torch.empty_like(parts.tokens), parts.num_sampled.clone(), parts.num_rejected.clone())
        rows = torch.zeros(self.shape.max_reqs, dtype=torch.int32, device=self._device)
        torch.index_select(torch.zeros_like(parts.drafts), 0, rows, out=parts.drafts)
        parts.drafts.fill_(SENTINEL)
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
        """Begin a step: `tokens` int64 [n, w <= N + 1], `num_sampled` and `num_rejected` int32 [n], all copied by the current
        stream. Raises TokenTransportError where they do not fit, the schedule forbids it or a receiver is gone."""
        assert self._is_source
        self._line.look()
        header = Header(self._order.begin(), mask_hash, num_reqs)
        slot = self._take_slot(self.history.add("send", header, f"tokens {list(tokens.shape)}", "begun"))
        slot.sent = self._outgoing(header)
        self._sending = slot
        self.shape.check_tokens(tuple(tokens.shape))
        self._pack(self._parts_of(slot, num_reqs), tokens, num_sampled, num_rejected)

    @staticmethod
    def _outgoing(header: Header) -> Header:
        return header

    @staticmethod
    def _pack(parts: Parts, tokens: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor) -> None:
        parts.tokens[:, : tokens.shape[1]].copy_(tokens)
        torch.cat((num_sampled, num_rejected), out=parts.counts)

    def send_drafts(self, table: torch.Tensor | None, rows: torch.Tensor) -> None:
        """End the step and send it: the drafts are `rows` [n] of `table` int64 [slots, N], or None where the step has none.
        Raises as `send_sampled` does."""
        slot, self._sending = self._sending, None
        if slot is None:
            raise TokenTransportError("drafts of a step that has not begun")
        drafts = self._parts_of(slot, slot.header.num_reqs).drafts
        if table is None:
            drafts.fill_(SENTINEL)
        else:
            self.shape.check_drafts((rows.shape[0], table.shape[1]))
            torch.index_select(table, 0, rows, out=drafts)
            slot.step.rows += f" drafts {list(drafts.shape)}"
        self._order.post()
        self._line.post(slot)

    # The other stages.

    def receive(self, mask_hash: int, num_reqs: int) -> Slot:
        """Have a step received, and return at once. Raises TokenTransportError where an earlier step was wrong."""
        assert not self._is_source
        self._line.look()
        header = Header(self._order.begin(), mask_hash, num_reqs)
        slot = self._take_slot(self.history.add("receive", header, "", "begun"))
        slot.is_consumed = False
        self._order.post()
        self._line.expect(slot)
        return slot

    def complete(self, slot: Slot) -> Parts:
        """What came, on the device, for what the current stream is given from here on, for as long as two steps. That stream
        goes on only if it is this step's. Raises TokenTransportError where a step is known to be wrong."""
        self._line.deliver(slot)
        self.skip(slot)
        return self._parts_of(slot, slot.header.num_reqs)

    def skip(self, slot: Slot) -> None:
        """The step's message has no use any more. It is judged all the same. Raises as `complete` does."""
        self._line.look()
        slot.is_consumed = True
        slot.step.state = "consumed"

    # Both.

    def _take_slot(self, step: Step) -> Slot:
        slot = self._slots[step.header.sequence % len(self._slots)]
        if not slot.is_consumed:
            raise TokenTransportError(f"step {slot.header.sequence} was never consumed")
        self._line.release(slot)
        slot.step = step
        return slot

    def _parts_of(self, slot: Slot, num_reqs: int) -> Parts:
        """Kept, because a view costs as much as a copy of its rows."""
        parts = self._parts.get((slot.index, num_reqs))
        if parts is None:
            parts = self._parts[slot.index, num_reqs] = Parts(slot.message, self.shape, num_reqs)
        return parts

    def close(self) -> None:
        """Ends the transport's own thread."""
        self._line.close()
