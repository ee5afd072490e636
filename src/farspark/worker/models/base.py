"""What a model family offers the drafter, and the arithmetic that all families share.

Rounding follows vLLM, whose local speculator is what shadow mode compares with: every operation's result is rounded to
the model's dtype where vLLM stores a tensor, and statistics, rotations and confidences are float32 inside. That is what
vLLM does on GPUs, and on CPUs for the block. Its CPU kernels for rotations and for the norms of context keys round once,
without AVX-512 towards zero; those differences of one bf16 step are not followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from farspark.worker.models.heads import ConfidenceHead, MarkovHead

if TYPE_CHECKING:
    from farspark.worker.models.experts import RoutedExperts
    from farspark.worker.models.fused_sublayers import FusedSublayers
    from farspark.worker.models.streams import Streams

VOCABULARY_BLOCK = 256


class HeadProjections(NamedTuple):
    """What makes a layer's queries, keys and values. Weights [out, in], biases [out] or None, norms [d]."""

    query: Tensor
    query_bias: Tensor | None
    query_norm: Tensor
    keys_values: Tensor
    keys_values_bias: Tensor | None
    key_norm: Tensor
    entry: tuple[int, int, int]  # projections (2, or 1 where values are keys), kv heads, d
    norms_values: bool  # values are normed too, without a weight


class Footprint(NamedTuple):
    """Bytes that a model takes, known from its config."""

    held: int  # its weights as it holds them
    making: int  # what lies beside them while it is made


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Where values are rounded (`dtype`) and what they are kept in (`carrier`).

    The two are the same, or `carrier` is float32 and `dtype` bfloat16: the same bf16 values in wider memory, for CPUs
    without bf16 instructions, where a float32 product is several times faster. Both accumulate in float32, so both round
    the same sums.
    """

    dtype: torch.dtype
    carrier: torch.dtype
    # Makes routed experts of packed fp4 weights; None: they are decoded.
    packed_experts: ClassVar[Callable[..., RoutedExperts] | None] = None
    # What runs DeepSeek's stages in few launches; None: operation by operation.
    fused_streams: ClassVar[Callable[..., Streams] | None] = None
    fused_sublayers: ClassVar[Callable[..., FusedSublayers] | None] = None

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

    def wide_rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """`rms_norm` with the product in float32 too: rounded once, at the end. `weight` None: all ones."""
        x = x.float()
        normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
        return self.round(normed if weight is None else normed * weight.float())

    def block_inputs(
        self, anchors: Tensor, anchor_tokens: Tensor, mask_token: int, length: int, last_position: int
    ) -> tuple[Tensor, Tensor]:
        """(tokens, positions) of blocks, int64 [B, length] each: the anchor's token and masks, from its position on.

        `anchors` (positions) and `anchor_tokens` int64 [B]. No position is past `last_position`.
        """
        tokens = torch.full((len(anchors), length), mask_token, dtype=torch.int64, device=anchors.device)
        tokens[:, 0] = anchor_tokens
        positions = anchors.unsqueeze(1) + torch.arange(length, device=anchors.device)
        return tokens, positions.clamp_(max=last_position)

    def embed_norm(
        self, tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm(e), e) of e = scale · the rows `tokens` int64 [...] of `embedding` [vocabulary, D]: [..., D]."""
        embedded = F.embedding(tokens, embedding)
        if scale != 1.0:
            embedded = self.round(embedded * scale)
        return self.rms_norm(embedded, weight, eps), embedded

    def rotation(self, positions: Tensor, frequencies: Tensor, *, is_rounded: bool = True) -> tuple[Tensor, Tensor]:
        """Cosine and sine at `positions` int64 [...]: float32 [..., 1, d/2], rounded to `dtype` where vLLM's table is.

        Computed and not looked up: a table of 1,048,576 positions would take more memory than many a drafter.
        """
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = (one.unsqueeze(-2) for one in (angles.cos(), angles.sin()))
        return (self.round(cos).float(), self.round(sin).float()) if is_rounded else (cos, sin)

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

    def norm_rotate(self, x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool) -> Tensor:
        """A norm per head, then RoPE: x [A, T, heads, d], weight [d]."""
        return self.rotate(self.rms_norm(x, weight, eps), cos, sin, is_neox=is_neox)

    def norm_rotate_keys(
        self, keys_values: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool
    ) -> Tensor:
        """The keys of [A, T, 2, kv heads, d] normed and rotated, the values as they are. `weight` [d], or [A, d]."""
        weight = weight if weight.dim() == 1 else weight[:, None, None, :]
        keys = self.norm_rotate(keys_values[:, :, 0], weight, eps, cos, sin, is_neox=is_neox)
        return torch.stack((keys, keys_values[:, :, 1]), dim=2)

    def project_heads(
        self, x: Tensor, projections: HeadProjections, eps: float, cos: Tensor, sin: Tensor, *, is_neox: bool
    ) -> tuple[Tensor, Tensor]:
        """(query [B, Q, heads, d], key_value [B, Q, 2, kv heads, d]) of x [B, Q, hidden], as `attend` takes them."""
        shape, entry = x.shape[:2], projections.entry
        query = self.linear(x, projections.query, projections.query_bias).view(*shape, -1, entry[-1])
        query = self.norm_rotate(query, projections.query_norm, eps, cos, sin, is_neox=is_neox)
        projected = self.linear(x, projections.keys_values, projections.keys_values_bias).view(*shape, *entry)
        if projections.norms_values:
            projected = self.with_normed_values(projected, eps)
        return query, self.norm_rotate_keys(projected, projections.key_norm, eps, cos, sin, is_neox=is_neox)

    def with_normed_values(self, projected: Tensor, eps: float) -> Tensor:
        """Keys and values [A, T, 2, kv heads, d] of projections [A, T, 1 or 2, kv heads, d], values normed without a weight."""
        values = self.wide_rms_norm(projected[:, :, -1:], None, eps)
        return torch.cat((projected[:, :, :1], values), dim=2)

    def linear_add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`add_rms_norm` of a product."""
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm, eps)

    def linear_norm_add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        own_norm: Tensor,
        residual: Tensor,
        scalar: Tensor | None,
        norm: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        """(RMSNorm(t), t) of t = s · (RMSNorm(a product) + residual), each step rounded; `scalar` None: s is 1."""
        total = self.round(self.rms_norm(self.linear(x, weight, bias), own_norm, eps) + residual)
        if scalar is not None:
            total = self.round(total * scalar)
        return self.rms_norm(total, norm, eps), total

    def gated_linear(self, x: Tensor, gate_up: Tensor, *, is_gelu: bool = False) -> Tensor:
        """activation(a) · b of a product [a, b]: SiLU, or GELU by its tanh."""
        gate, up = self.linear(x, gate_up).chunk(2, dim=-1)
        if is_gelu:
            return self.round(self.round(F.gelu(gate, approximate="tanh")) * up)
        return self.silu_times(gate, up)

    def attend(
        self,
        context: BlockContext,
        layer: int,
        query: Tensor,
        key_value: Tensor,
        scale: float,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Softmax attention of every block position over {visible context} and {its own block}, for keys and values.

        `query` [B, Q, heads, d] and `key_value` [B, Q, 2, kv heads, d] are rotated already; the answer is [B, Q, heads * d],
        not rounded. `seen` bool [Q, K + Q]: what of it each position sees besides being visible; None: everything.
        """
        if context.fused is not None and seen is None:
            return context.fused(layer, query, key_value, scale)
        batch, length, heads, dim = query.shape
        held = context.gather(layer, key_value)
        kv_heads = held.shape[3]
        keys, values = held[:, :, 0].transpose(1, 2), held[:, :, 1].transpose(1, 2)  # [B, kv heads, keys, d]
        # Queries that share a key head are folded into one longer run of queries: no key is repeated.
        group = heads // kv_heads
        folded = query.view(batch, length, kv_heads, group, dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(batch, kv_heads, group * length, dim)
        bias = context.bias.expand(-1, 1, group * length, -1)
        if seen is not None:
            bias = bias.masked_fill(~seen.repeat(group, 1), float("-inf"))
        attended = F.scaled_dot_product_attention(folded, keys, values, attn_mask=bias, scale=scale)
        attended = attended.view(batch, kv_heads, group, length, dim).permute(0, 3, 1, 2, 4)
        return attended.reshape(batch, length, heads * dim)

    def greedy_answer(
        self,
        base: Tensor,
        hidden: Tensor,
        anchor_tokens: Tensor,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
    ) -> Tensor | None:
        """The whole sequential stage at once: every position's most probable token given the one before it.

        `base` [B, steps, vocabulary] contiguous, `hidden` [B, steps, hidden] what they are made of, `anchor_tokens` int64 [B].
        Returns int32 [B, 3, steps]: the lowest id with the greatest logit, 1 where that logit and the confidence are finite
        (NaN wins every maximum, so the greatest logit tells for all of them), the confidence (the bits of a float32; 1.0
        without a head). None where there is no kernel for this head.
        """
        return None

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.round(self.round(F.silu(gate)) * up)


class BlockContext(Protocol):
    """What a block attends to: the context that is held for each request of the batch, and the block itself.

    B requests, Q block positions, K context positions; an entry is what the model keeps per position and layer.
    `fused`: the whole attention over keys and values where the device has one: (layer, query, key_value, scale), as
    `Arithmetic.attend`.
    """

    @property
    def fused(self) -> Callable[[int, Tensor, Tensor, float], Tensor] | None: ...

    @property
    def visible(self) -> int:
        """K"""
        ...

    @property
    def bias(self) -> Tensor:
        """[B, 1, 1, K + Q] in the store's dtype: 0 where an entry is visible, -inf elsewhere. The block is visible always."""
        ...

    def gather(self, layer: int, own: Tensor) -> Tensor:
        """[B, K + Q, *entry]: the context's entries of `layer`, oldest first, then the block's `own` [B, Q, *entry].

        Context position K - j is j in front of the anchor. Entries that are not visible are zeros. `own` is not kept.
        """
        ...


class Ring(Protocol):
    """What the B requests of a batch see of one layer, where it lies; positions and rows are those of a context store."""

    @property
    def entries(self) -> Tensor:
        """[rows, *entry], position p of a slot at row `slot * context + p % context`."""
        ...

    @property
    def slots(self) -> Tensor:
        """int64 [B], as the next two."""
        ...

    @property
    def anchors(self) -> Tensor: ...

    @property
    def visible_from(self) -> Tensor: ...

    @property
    def visible(self) -> int:
        """Bounds `anchors - visible_from`."""
        ...

    @property
    def context(self) -> int: ...


class RingContext(BlockContext, Protocol):
    """A `BlockContext` that can be read where it lies."""

    def ring(self, layer: int) -> Ring: ...


class DraftModel(Protocol):
    """A family's maths. Stateless: what is remembered between steps is in the context store.

    All tensors are in the arithmetic's carrier dtype unless said otherwise.
    """

    @property
    def arithmetic(self) -> Arithmetic: ...

    @property
    def markov(self) -> MarkovHead | None: ...

    @property
    def confidence(self) -> ConfidenceHead | None: ...

    @property
    def to_target(self) -> Tensor | None:
        """int64 [drafted vocabulary]: the target's id of each row of the logits; None: the same."""
        ...

    @property
    def routing_margins(self) -> Callable[[Tensor, Tensor, BlockContext], Tensor] | None:
        """Of what `block` is given: float32 [B], how close a block's closest choice of experts was; None: there is no router.

        The margin of a choice is that of the scores it is made by, bias included: (s_k - s_k+1) / |s_k| with s_k the last chosen
        expert's and s_k+1 the first not chosen one's. A block's is the smallest over all layers and positions.
        """
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as held."""
        ...

    def project_context(self, rows: Tensor, positions: Tensor) -> Tensor:
        """What is kept of context rows: [M, taps * tap], positions int64 [M] -> [layers, M, *entry]."""
        ...

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        """What the heads read of a block: tokens and positions int64 [B, Q] -> [B, Q, hidden]."""
        ...

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Of what `block` gave, [..., hidden] -> [..., drafted vocabulary]: the logits before the Markov bias.

        In the dtype that the family keeps logits in; `markov` adds to them in the same.
        """
        ...
