"""What happens to the residual stream between the sublayers of a DeepSeek stage, operation by operation."""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch.nn.functional as F
from torch import Tensor

from farspark.worker.models.base import Arithmetic
from farspark.worker.models.hyper_connections import HyperConnection, HyperHead, Mixes, collapse, spread

# Copies of a stream that kernels are written for: those of every published model.
FUSED_COPIES: Final = 4


class Streams(Protocol):
    """The streams of T tokens. What one method gives as a stream is the next one's: only they look into it."""

    def enter(self, tokens: Tensor, embedding: Tensor, connection: HyperConnection) -> Any:
        """The stream in front of the first sublayer: every copy the embedding [vocabulary, D] of the int64 `tokens` [T].

        `connection`: that of the sublayer to come, here and in `advance`.
        """
        ...

    def sublayer_input(
        self, stream: Any, connection: HyperConnection, before: Tensor | None, norm: Tensor
    ) -> tuple[Tensor, Mixes]:
        """(what the sublayer sees [T, D], its mixes): the stream collapsed and normed with `norm` float32 [D].

        Collapsed by `before` float32 [T or 1, copies], or by the sublayer's own `pre` where that is None.
        """
        ...

    def advance(self, output: Any, stream: Any, mixes: Mixes, following: HyperConnection | HyperHead | None) -> Any:
        """The stream behind a sublayer that gave `output` [T, D]. `following` reads it next; None: nothing does."""
        ...

    def leave(self, stream: Any, head: HyperHead | None, before: Tensor) -> Tensor:
        """The last stream's collapse by `head`, or where there is none by `before` float32 [T, copies]: [T, D]."""
        ...


class PlainStreams:
    """`Streams` as tensors [T, copies, D]."""

    def __init__(self, arithmetic: Arithmetic, eps: float) -> None:
        self._arithmetic = arithmetic
        self._eps = eps

    def enter(self, tokens: Tensor, embedding: Tensor, connection: HyperConnection) -> Tensor:
        return F.embedding(tokens, embedding).unsqueeze(-2).expand(-1, connection.copies, -1)

    def sublayer_input(
        self, stream: Tensor, connection: HyperConnection, before: Tensor | None, norm: Tensor
    ) -> tuple[Tensor, Mixes]:
        mixes = connection(stream)
        collapsed = self._arithmetic.round(collapse(stream, mixes.pre if before is None else before))
        return self._arithmetic.wide_rms_norm(collapsed, norm, self._eps), mixes

    def advance(
        self, output: Tensor, stream: Tensor, mixes: Mixes, following: HyperConnection | HyperHead | None
    ) -> Tensor:
        return self._arithmetic.round(spread(output, stream, mixes))

    def leave(self, stream: Tensor, head: HyperHead | None, before: Tensor) -> Tensor:
        return self._arithmetic.round(collapse(stream, before if head is None else head(stream)))
