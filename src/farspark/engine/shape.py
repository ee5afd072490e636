"""What the engine's drafter looks like from outside: the numbers that both sides of the wire must agree on."""

from __future__ import annotations

from dataclasses import dataclass

from farspark.wire.layout import Dtype, HelloFlag
from farspark.wire.messages import Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Fixed for the engine's life. A row is `taps` hidden states of `hidden_size` bf16 values each."""

    num_drafts: int  # N
    vocab_size: int
    hidden_size: int
    taps: int
    slots: int  # the engine's max_num_seqs
    context: int  # newest positions the drafter may see
    ring: int  # newest rows that rank 0 can send again
    max_position: int  # the engine's max_model_len
    support: int = 0  # ids whose probabilities come with each draft (wire's SUPPORT_IDS); 0: drafts are greedy

    @property
    def row_bytes(self) -> int:
        return self.taps * self.hidden_size * 2

    def hello(self, *, engine: str, identity: bytes, markov_identity: bytes, want_margin: bool) -> Hello:
        return Hello(
            engine=engine,
            identity=identity,
            markov_identity=markov_identity,
            row_bytes=self.row_bytes,
            taps=self.taps,
            hidden_size=self.hidden_size,
            dtype=Dtype.BF16,
            ring=self.ring,
            context=self.context,
            num_drafts=self.num_drafts,
            slots=self.slots,
            vocab_size=self.vocab_size,
            flags=(HelloFlag.MARGINS | HelloFlag.ROUTING if want_margin else HelloFlag(0))
            | (HelloFlag.SAMPLED if self.support else HelloFlag(0)),
        )
