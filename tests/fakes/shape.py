"""What an engine would say of itself to a worker with this drafter."""

from __future__ import annotations

from farspark.engine.shape import ModelShape
from farspark.worker.batch import DrafterInfo


def shape_for(
    info: DrafterInfo, *, ring: int = 4, slots: int | None = None, context: int | None = None, support: int = 0
) -> ModelShape:
    """Slots and context are the drafter's where they are not given."""
    return ModelShape(
        num_drafts=info.num_drafts,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        taps=info.taps,
        slots=info.slots if slots is None else slots,
        context=info.context if context is None else context,
        ring=ring,
        max_position=info.max_position,
        support=support,
    )
