"""The last steps of the transport, for the moment when somebody has to know where it stopped."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from farspark.engine.vllm.pp.header import Header

KEPT = 32


@dataclass(slots=True)
class Step:
    """One step on this rank. `state` moves on as the step does."""

    direction: str  # "send" or "receive"
    header: Header
    rows: str  # shapes of what is really in the padded messages
    state: str

    def __str__(self) -> str:
        sequence, mask_hash, num_reqs, _ = self.header.words()
        rows = f" {self.rows}" if self.rows else ""
        return f"step {sequence} {self.direction} mask {mask_hash:08x} num_reqs {num_reqs}{rows}: {self.state}"


class StepHistory:
    """A ring of the last `KEPT` steps. Written by one thread, read by any."""

    def __init__(self, label: str, kept: int = KEPT) -> None:
        self._label = label
        self._steps: deque[Step] = deque(maxlen=kept)

    def add(self, direction: str, header: Header, rows: str, state: str) -> Step:
        step = Step(direction, header, rows, state)
        self._steps.append(step)
        return step

    def __str__(self) -> str:
        # A copy first: the writer does not wait for readers.
        steps = [str(step) for step in self._steps.copy()]
        lines = [f"farspark: {self._label}: the last {len(steps)} steps with tokens, newest last", *steps]
        return "\n".join(lines)
