"""What a model family offers the drafter, and the arithmetic that all families share.

Rounding follows vLLM, whose local speculator is what shadow mode compares with: every operation's result is rounded to
the model's dtype where vLLM stores a tensor, and statistics, rotations and confidences are float32 inside. That is what
vLLM does on GPUs, and on CPUs for the block. Its CPU kernels for rotations and for the norms of context keys round once,
without AVX-512 towards zero; those differences of one bf16 step are not followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.worker.models.heads import ConfidenceHead, VanillaMarkov

VOCABULARY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where values are rounded (`dtype`) and what they are kept in (`carrier`).

    The two are the same, or `carrier` is float32 and `dtype` bfloat16: the same bf16 values in wider memory, for CPUs
    without bf16 instructions, where a float32 product is several times faster. Both accumulate in float32, so both round
    the same sums.
    """

    dtype: torch.dtype
    carrier: torch.dtype

    def round(self, x: Tensor) -> Tensor:
        """`x` rounded to `dtype`, in `carrier`."""
        return x.to(self.dtype).to(self.carrier)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.round(F.linear(x, weight, bias))

    def vocabulary_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """`linear` of [..., hidden] by the tens of thousands of rows of `weight` [vocabulary, hidden]."""
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return self.linear(x, weight)
        # For a few rows of x a CPU's matrix product repacks all of the weight first; as a batch of small products the
        # weight is read once, which takes two thirds of the time.
        few = x.reshape(-1, x.shape[-1])
        whole = len(weight) // VOCABULARY_BLOCK * VOCABULARY_BLOCK
        logits = few.new_empty(len(few), len(weight))
        if whole:
            blocks = weight[:whole].view(-1, VOCABULARY_BLOCK, weight.shape[1])
            products = torch.bmm(few.expand(len(blocks), -1, -1), blocks.transpose(1, 2))
            logits[:, :whole].view(len(few), -1, VOCABULARY_BLOCK).copy_(products.transpose(0, 1))
        logits[:, whole:] = F.linear(few, weight[whole:])
        return self.round(logits).view(*x.shape[:-1], len(weight))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """w · x / √(mean(x²) + eps) over the last dimension; normalised in float32, rounded, then multiplied.

        `x` may be float32 where it is a sum that has not been rounded.
        """
        x = x.float()
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        return self.round(self.round(normed) * weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(RMSNorm(x + residual), x + residual); the norm sees the sum before it is rounded, as vLLM's fused kernels do."""
        total = x.float() + residual.float()
        return self.rms_norm(total, weight, eps), self.round(total)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, *, is_neox: bool) -> Tensor:
        """RoPE on x [..., heads, d]; `cos` and `sin` [..., 1, d/2] float32, already rounded to `dtype`."""
        wide = x.float()
        if is_neox:
            first, second = wide.chunk(2, dim=-1)
            return self.round(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
        first, second = wide[..., ::2], wide[..., 1::2]
        return self.round(torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2))

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.round(self.round(F.silu(gate)) * up)


class BlockContext(Protocol):
    """What a block attends to: the context that is held for each request of the batch, and the block itself."""

    def attend(self, layer: int, query: Tensor, key_value: Tensor, scale: float) -> Tensor:
        """Softmax attention of every block position over {visible context} and {all positions of its own block}.

        `query` [B, N, heads, d] and `key_value` [B, N, 2, kv heads, d] are rotated already and in the carrier dtype;
        the answer is [B, N, heads * d], not rounded. `key_value` is of this block only and is not kept.
        """
        ...


class DraftModel(Protocol):
    """A family's maths. Stateless: what is remembered between steps is in the context store.

    All tensors are in the arithmetic's carrier dtype unless said otherwise.
    """

    arithmetic: Arithmetic
    markov: VanillaMarkov | None
    confidence: ConfidenceHead | None

    def project_context(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Keys (rotated) and values of context rows: [M, taps * tap], positions int64 [M] -> [layers, M, 2, kv heads, d]."""
        ...

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        """Hidden states of a block for the heads: tokens and positions int64 [B, N] -> [B, N, hidden]."""
        ...

    def base_logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocabulary]: the logits before the Markov bias."""
        ...
