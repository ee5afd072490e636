"""The fixed schedule: four broadcasts a step, always, in this order and in these shapes, whatever there is to say.

Pure: no torch, no sockets.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.header import WORDS

SENTINEL = -1  # fills the rows of no request, and whatever a step does not have


class Message(enum.IntEnum):
    """A step's broadcasts, in order."""

    HEADER = 0
    TOKENS = 1
    COUNTS = 2
    DRAFTS = 3


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Shapes that no step changes. A broadcast that is larger than its receiver expects aborts the receiver's process under
    Gloo, and a smaller one is taken without a word; so every message is padded to `max_reqs` rows, and ends in one guard row
    that holds the step's sequence."""

    max_reqs: int
    num_drafts: int

    def of(self, message: Message) -> tuple[int, ...]:
        """int64, but for the counts, which are int32: the number sampled and the number rejected."""
        rows = self.max_reqs + 1
        return {
            Message.HEADER: (WORDS,),
            Message.TOKENS: (rows, self.num_drafts + 1),
            Message.COUNTS: (rows, 2),
            Message.DRAFTS: (rows, self.num_drafts),
        }[message]

    def check_rows(self, message: Message, shape: tuple[int, ...]) -> None:
        """Whether a payload of `shape` fits into its message. Raises TokenTransportError."""
        rows, width = self.of(message)
        if shape[0] > rows - 1 or shape[1] > width or (message is not Message.TOKENS and shape[1] != width):
            raise TokenTransportError(
                f"{message.name.lower()} of shape {list(shape)} do not fit into the fixed {[rows - 1, width]}: a stage "
                "runs with another --max-num-seqs or another number of drafts"
            )


class Order:
    """Which step and which message is next, on either side. The sequence moves before the header is posted."""

    def __init__(self) -> None:
        self.sequence = 0
        self._next = Message.HEADER

    def begin(self) -> int:
        """The new step's sequence. Raises TokenTransportError where the step before it is not complete."""
        if self._next is not Message.HEADER:
            raise TokenTransportError(
                f"a step begins while step {self.sequence} has not posted its {self._next.name.lower()}"
            )
        self.sequence += 1
        return self.sequence

    def post(self, message: Message) -> None:
        """Raises TokenTransportError where `message` is not the one that is due."""
        if message is not self._next:
            raise TokenTransportError(
                f"step {self.sequence} would post its {message.name.lower()} where its {self._next.name.lower()} is due"
            )
        self._next = Message((message + 1) % len(Message))


def guard_of(sequence: int) -> int:
    """The guard row's value: fits into int32, and is never the sentinel."""
    return sequence % 2**31
