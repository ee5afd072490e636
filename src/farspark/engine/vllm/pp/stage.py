"""One stage's view of the exchange: what vLLM's runner calls in each step, on whatever carries it.

Imports nothing of vLLM; `handler.py` makes it one of vLLM's handlers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import mask_hash
from farspark.engine.vllm.pp.lines import Slot
from farspark.engine.vllm.pp.transport import TokenTransport

NeedMask = Callable[[Any], "npt.NDArray[np.bool_] | None"]


@dataclass(frozen=True, slots=True)
class Pending:
    """A step that was posted and is not consumed."""

    slot: Slot
    need: npt.NDArray[np.bool_]  # [n]: rows whose sampled tokens a later step needs
    indices: npt.NDArray[np.integer]  # [n]: slots of the request table
    generations: npt.NDArray[np.integer]  # [n]: of those slots when the step was posted
    idx_mapping: torch.Tensor  # [n]: `indices` on the device


class StageHandler:
    """The exchange of one stage. Until `start_exchange` every call is a no-op: warm-up makes no tokens that anyone needs.

    A step consumes what the step `depth` before it received, as vLLM's schedule does.
    """

    transport: TokenTransport
    is_last_rank: bool
    req_idx_gen_np: npt.NDArray[np.int32]
    is_exchanging: bool

    def set_up(
        self, transport: TokenTransport, *, is_last: bool, depth: int, max_num_reqs: int, need_mask: NeedMask
    ) -> None:
        self.transport = transport
        self.is_last_rank = is_last
        self.req_idx_gen_np = np.zeros(max_num_reqs, dtype=np.int32)
        self._need_mask = need_mask
        self._queue: deque[Pending | None] = deque([None] * depth)
        self.is_exchanging = False
        self._batch: Any = None

    def start_exchange(self) -> None:
        """Warm-up is over, on every stage, because no step is scheduled before."""
        self._queue = deque([None] * len(self._queue))
        self.transport.rehearse()
        self.is_exchanging = True

    def on_req_idx_freed(self, req_idx: int) -> None:
        self.req_idx_gen_np[req_idx] += 1

    # The last stage.

    def broadcast(
        self,
        sampled_token_ids: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        input_batch: Any,
    ) -> None:
        """The step's first parts: tokens int64 [n, w], counts int32 [n] each."""
        if not self.is_exchanging:
            return
        if self._batch is not None:
            raise TokenTransportError("a second batch was sampled before the first one's drafts were sent")
        need = self._need(input_batch)
        self._batch = input_batch
        self.transport.send_sampled(
            self._hash(need, input_batch), input_batch.num_reqs, sampled_token_ids, num_sampled, num_rejected
        )

    def broadcast_drafts(self, *ignored: Any) -> None:
        """vLLM calls this in some steps only. `finish_step` sends, in all."""

    def finish_step(self, draft_table: torch.Tensor | None) -> None:
        """The step's last part, in every step: the batch's rows of `draft_table` int64 [slots, N], or the sentinel. Sends it."""
        batch, self._batch = self._batch, None
        if batch is not None:
            self.transport.send_drafts(draft_table, batch.idx_mapping)

    # The other stages.

    def receive(self, input_batch: Any, recv_drafts: bool = True) -> bool:
        """Post the step's receive, whatever vLLM expects to come. True where every row's tokens will be needed."""
        if not self.is_exchanging:
            return False
        need = self._need(input_batch)
        slot = self.transport.receive(self._hash(need, input_batch), input_batch.num_reqs)
        indices = input_batch.idx_mapping_np
        # The queue's last entry was reserved by this step's `get_prev_sampled_outputs`.
        self._queue[-1] = Pending(slot, need, indices, self.req_idx_gen_np[indices], input_batch.idx_mapping)
        return bool(need.all())

    def get_prev_sampled_outputs(self, draft_table: torch.Tensor | None = None) -> dict[str, torch.Tensor] | None:
        """What came in the step `depth` ago, for the rows that still matter; drafts go into `draft_table` [slots, N].

        Rows of others have index -1, which vLLM's kernel skips. Raises TokenTransportError where a step is known to be wrong;
        what was not judged yet is held back by the stream that would use it.
        """
        if self.is_last_rank or not self.is_exchanging:
            return None
        pending = self._queue.popleft()
        self._queue.append(None)
        if pending is None:
            return None
        keep = pending.need & (self.req_idx_gen_np[pending.indices] == pending.generations)
        if not keep.any():
            self.transport.skip(pending.slot)
            return None
        came = self.transport.complete(pending.slot)
        indices = pending.idx_mapping
        if keep.all():
            if draft_table is not None:
                draft_table.index_copy_(0, indices.long(), came.drafts)
        else:
            indices = _to_device(np.where(keep, pending.indices, -1), came.tokens.device)
            if draft_table is not None:
                rows = _to_device(np.flatnonzero(keep), came.tokens.device)
                draft_table.index_copy_(0, indices[rows], came.drafts[rows])
        return {
            "sampled_tokens": came.tokens,
            "num_sampled": came.num_sampled,
            "num_rejected": came.num_rejected,
            "idx_mapping": indices,
        }

    def _need(self, batch: Any) -> npt.NDArray[np.bool_]:
        need = self._need_mask(batch)
        return np.zeros(batch.num_reqs, dtype=np.bool_) if need is None else need

    @staticmethod
    def _hash(need: npt.NDArray[np.bool_], batch: Any) -> int:
        n = batch.num_reqs
        return mask_hash(need[:n], batch.num_computed_tokens_np[:n], batch.num_scheduled_tokens[:n])


def _to_device(values: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(values.astype(np.int64))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
