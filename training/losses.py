"""The three losses of DSpark, over a frozen output head.

Cross-entropy on the target's own next token, the total variation between draft and target distributions (as the L1
distance), and binary cross-entropy of the confidence against the acceptance chance, one minus half that distance. Each is a
mean weighted by exp(-k / decay) over the k-th positions of the blocks.

The first two are computed a slice of rows at a time together with their gradient, so that no tensor of all logits exists:
with p the draft's and q the target's distribution and s = sign(p - q),
    d CE / d z_i = p_i - [i is the token],    d |p - q|_1 / d z_i = p_i (s_i - sum_j p_j s_j).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # A CPU needs no Triton.
    triton = None


@dataclass(frozen=True, slots=True)
class LossWeights:
    """Published weights of the three losses, and how fast later positions fade."""

    cross_entropy: float
    distribution: float
    confidence: float
    decay: float


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Unweighted, one per block position. [M]"""

    cross_entropy: Tensor
    distribution: Tensor  # L1 distance, 0..2
    agrees: Tensor  # whether the draft's first choice is the token


def row_losses_reference(
    logits: Tensor, teacher: Tensor, tokens: Tensor, weight: Tensor, loss: LossWeights
) -> tuple[RowLosses, Tensor]:
    """logits, teacher [M, V], tokens, weight [M] -> losses, and the gradient of their weighted sum for the logits."""
    z, p, q = logits.float(), logits.float().softmax(-1), teacher.float().softmax(-1)
    sign = (p - q).sign()
    cross_entropy = F.cross_entropy(z, tokens, reduction="none")
    gradient = loss.distribution * p * (sign - (p * sign).sum(-1, keepdim=True))
    gradient += loss.cross_entropy * (p - F.one_hot(tokens, z.shape[1]))
    rows = RowLosses(cross_entropy, (p - q).abs().sum(-1), z.argmax(-1) == tokens)
    return rows, (gradient * weight[:, None]).to(logits.dtype)


if triton is not None:

    @triton.jit
    def _row_kernel(
        logits_p, teacher_p, tokens_p, weight_p, ce_p, l1_p, agree_p, vocab, ce_scale, l1_scale, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        z_p, t_p = logits_p + row * vocab, teacher_p + row * vocab
        token = tl.load(tokens_p + row)
        weight = tl.load(weight_p + row)
        lane = tl.arange(0, BLOCK)
        # Pass 1: the two log-sum-exps.
        z_top, z_sum, t_top, t_sum = float("-inf"), 0.0, float("-inf"), 0.0
        for begin in range(0, vocab, BLOCK):
            inside = begin + lane < vocab
            z = tl.load(z_p + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(t_p + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
            top = tl.maximum(z_top, tl.max(z, 0))
            z_sum = z_sum * tl.exp(z_top - top) + tl.sum(tl.exp(z - top), 0)
            z_top = top
            top = tl.maximum(t_top, tl.max(t, 0))
            t_sum = t_sum * tl.exp(t_top - top) + tl.sum(tl.exp(t - top), 0)
            t_top = top
        # Pass 2: the L1 distance and the mean sign under p.
        distance, mean_sign = 0.0, 0.0
        for begin in range(0, vocab, BLOCK):
            inside = begin + lane < vocab
            z = tl.load(z_p + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(t_p + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.exp(z - z_top) / z_sum
            q = tl.exp(t - t_top) / t_sum
            sign = tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))
            distance += tl.sum(tl.abs(p - q), 0)
            mean_sign += tl.sum(p * sign, 0)
        own = tl.load(z_p + token).to(tl.float32)
        tl.store(ce_p + row, tl.log(z_sum) + z_top - own)
        tl.store(l1_p + row, distance)
        tl.store(agree_p + row, own >= z_top)
        # `own` must be read by all lanes before pass 3 writes over the row.
        tl.debug_barrier()
        # Pass 3: the gradient takes the place of the logits.
        for begin in range(0, vocab, BLOCK):
            inside = begin + lane < vocab
            z = tl.load(z_p + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
            t = tl.load(t_p + begin + lane, mask=inside, other=float("-inf")).to(tl.float32)
            p = tl.exp(z - z_top) / z_sum
            q = tl.exp(t - t_top) / t_sum
            sign = tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))
            g = l1_scale * p * (sign - mean_sign) + ce_scale * (p - tl.where(begin + lane == token, 1.0, 0.0))
            tl.store(z_p + begin + lane, (g * weight).to(logits_p.dtype.element_ty), mask=inside)


def row_losses_triton(
    logits: Tensor, teacher: Tensor, tokens: Tensor, weight: Tensor, loss: LossWeights
) -> tuple[RowLosses, Tensor]:
    """The same in one kernel; the returned gradient is the memory of `logits`."""
    rows, vocab = logits.shape
    cross_entropy = torch.empty(rows, device=logits.device)
    distance = torch.empty_like(cross_entropy)
    agrees = torch.empty(rows, dtype=torch.bool, device=logits.device)
    _row_kernel[(rows,)](
        logits, teacher, tokens, weight, cross_entropy, distance, agrees, vocab, loss.cross_entropy, loss.distribution,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    return RowLosses(cross_entropy, distance, agrees), logits


class _HeadLosses(torch.autograd.Function):
    """Sum of the weighted row losses, with its gradient made on the way forward."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,  # [M, H]
        previous: Tensor,  # [M, r]
        markov_out: Tensor,  # [V, r]
        head: Tensor,  # [V, H], frozen
        teacher_hidden: Tensor,  # [M, H]
        tokens: Tensor,  # [M]
        weight: Tensor,  # [M], sums to 1
        loss: LossWeights,
        rows_at_once: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype, size = head.dtype, head.shape[1]
        row_losses = row_losses_triton if hidden.is_cuda else row_losses_reference
        both = torch.cat([head, markov_out.to(dtype)], dim=1)  # [V, H + r]
        x = torch.cat([hidden, previous], dim=1).to(dtype)
        x_gradient = torch.empty_like(x)
        out_gradient = torch.zeros_like(markov_out, dtype=torch.float32)
        ce, l1, agrees = [], [], []
        for begin in range(0, x.shape[0], rows_at_once):
            part = slice(begin, begin + rows_at_once)
            logits = F.linear(x[part], both)
            rows, gradient = row_losses(logits, F.linear(teacher_hidden[part], head), tokens[part], weight[part], loss)
            x_gradient[part] = gradient @ both
            out_gradient += gradient.t() @ x[part, size:]
            ce.append(rows.cross_entropy)
            l1.append(rows.distribution)
            agrees.append(rows.agrees)
        ctx.save_for_backward(x_gradient, out_gradient)
        ctx.size = size
        ce, l1 = torch.cat(ce), torch.cat(l1)
        total = ((loss.cross_entropy * ce + loss.distribution * l1) * weight).sum()
        out = (total, ce, l1, torch.cat(agrees))
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x_gradient, out_gradient = ctx.saved_tensors
        x_gradient = x_gradient * scale
        size = ctx.size
        return x_gradient[:, :size], x_gradient[:, size:], out_gradient * scale, *(None,) * 6


@dataclass(frozen=True, slots=True)
class BlockLosses:
    """What one step reports; all but `total` are detached."""

    total: Tensor
    cross_entropy: Tensor
    distribution: Tensor
    confidence: Tensor
    agreement: Tensor  # [N] share of positions whose first choice is the token, earlier ones given
    expected: Tensor  # mean length of the agreeing prefix, plus 1


def block_losses(
    hidden: Tensor,
    previous: Tensor,
    markov_out: Tensor,
    confidence_logits: Tensor,
    head: Tensor,
    teacher_hidden: Tensor,
    tokens: Tensor,
    valid: Tensor,
    loss: LossWeights,
    rows_at_once: int,
) -> BlockLosses:
    """hidden, teacher_hidden [M, N, H], previous [M, N, r], confidence_logits, tokens, valid [M, N]"""
    m, n = tokens.shape
    fade = torch.exp(-torch.arange(n, device=tokens.device) / loss.decay)
    weight = valid * fade
    weight = weight / weight.sum().clamp_min(1e-6)
    total, ce, l1, agrees = _HeadLosses.apply(
        hidden.flatten(0, 1), previous.flatten(0, 1), markov_out, head, teacher_hidden.flatten(0, 1), tokens.flatten(),
        weight.flatten(), loss, rows_at_once,
    )  # fmt: skip
    ce, l1, agrees = (x.view(m, n) for x in (ce, l1, agrees))
    acceptance = (1 - 0.5 * l1).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence_logits, acceptance, reduction="none")
    confidence = (bce * weight).sum()
    whole = valid[:, -1:]  # blocks cut by the end of an answer would look short
    prefix = (agrees & whole).cumprod(1)
    blocks = whole.sum().clamp_min(1)
    return BlockLosses(
        total=total + loss.confidence * confidence,
        cross_entropy=(ce * weight).sum(),
        distribution=(l1 * weight).sum(),
        confidence=confidence.detach(),
        agreement=(agrees & whole).sum(0) / blocks,
        expected=1 + prefix.sum() / blocks,
    )
