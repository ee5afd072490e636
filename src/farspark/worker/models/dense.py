"""What the models of dense drafters have in common: heads, drafted vocabulary, rotation, and who sees what of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from farspark.errors import CheckpointError
from farspark.worker.checkpoint import D2T, DenseConfig
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.heads import (
    ConfidenceHead,
    GatedMarkov,
    MarkovHead,
    RecurrentMarkov,
    SoftCappedMarkov,
    VanillaMarkov,
)


def take_markov(
    config: DenseConfig,
    tensors: dict[str, Tensor],
    rows: int,
    arithmetic: Arithmetic,
    *,
    scale: float = 1.0,
    soft_cap: float = 0.0,
) -> MarkovHead | None:
    """The Markov head, its weights taken out of `tensors`; `rows` of the drafted vocabulary are used.

    What vLLM does to the base logits and so to the bias too: `scale`, or `soft_cap` (0: none).
    """
    if not config.markov_rank:
        return None
    w1, w2 = tensors.pop("markov_head.markov_w1.weight"), tensors.pop("markov_head.markov_w2.weight")
    plain = (
        SoftCappedMarkov(w1, w2[:rows], soft_cap, arithmetic)
        if soft_cap
        else VanillaMarkov(w1, w2[:rows], scale, arithmetic)
    )
    if config.markov_head_type == "gated":
        return GatedMarkov(
            plain, tensors.pop("markov_head.gate_proj.weight"), tensors.pop("markov_head.gate_proj.bias")
        )
    if config.markov_head_type == "rnn":
        joint = tensors.pop("markov_head.joint_proj.weight"), tensors.pop("markov_head.joint_proj.bias")
        return RecurrentMarkov(plain, *joint)
    return plain


def take_confidence(config: DenseConfig, tensors: dict[str, Tensor]) -> ConfidenceHead | None:
    if not config.has_confidence_head:
        return None
    weight, bias = tensors.pop("confidence_head.proj.weight"), tensors.pop("confidence_head.proj.bias")
    return ConfidenceHead(weight, bias, with_markov=config.confidence_with_markov)


def take_target_ids(config: DenseConfig, tensors: dict[str, Tensor], vocab_size: int) -> Tensor | None:
    """int64 [drafted vocabulary]: the target's id of each row of the head; None where they are the same.

    Raises CheckpointError where an id is outside the target's vocabulary or has two rows.
    """
    if not config.is_reduced:
        return None
    offsets = tensors.pop(D2T).long()
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    outside = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise CheckpointError(
            f"{D2T} maps row {row} of the head to id {int(ids[row])}, outside the target's vocabulary of {vocab_size}"
        )
    if len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"{D2T} maps several rows of the head to one id of the target")
    return ids


def inverse_frequencies(theta: float, head_dim: int, rotated: int, device: torch.device) -> Tensor:
    """float32 [head_dim / 2]: theta^(-2j / head_dim) for the first `rotated` / 2 pairs, 0 for those that do not turn."""
    # Computed on the CPU and moved, as Hugging Face does: a device's own pow may differ in the last bit.
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / head_dim
    frequencies = torch.zeros(head_dim // 2)
    frequencies[: rotated // 2] = 1.0 / theta**exponents
    return frequencies.to(device)


def rotation(positions: Tensor, frequencies: Tensor, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine at `positions` [...]: float32 [..., 1, d/2], rounded to the model's dtype as vLLM's table is.

    Computed and not looked up: a table of 1,048,576 positions would take more memory than many a drafter.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
    return angles.cos().to(rounded).float().unsqueeze(-2), angles.sin().to(rounded).float().unsqueeze(-2)


def seen(
    block: int, visible: int, window: int, causal: bool, *, as_trained: bool, device: torch.device
) -> Tensor | None:
    """bool [Q, K + Q]: what each position of a block of Q sees of its K newest context positions and of the block.

    None: everything. `window` 0: no window. vLLM's window is about each position: the newest `window` positions up to its
    own, and as many to its right where the layer is not causal. The window of training hangs at the anchor, for the whole
    block: the newest `window` context positions, and of the block everything, or everything up to itself.
    """
    if not window and not causal:
        return None
    position = torch.arange(block, device=device).unsqueeze(1)
    other = torch.arange(-visible, block, device=device).unsqueeze(0)
    is_seen = other <= position if causal else torch.ones_like(other, dtype=torch.bool)
    is_seen = is_seen.expand(block, -1)
    if window and as_trained:
        return is_seen & (other >= -window)
    if window:
        return is_seen & ((other - position).abs() < window)
    return is_seen
