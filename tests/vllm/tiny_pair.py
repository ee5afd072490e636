"""A tiny target and a tiny DSpark drafter, written as Hugging Face folders that vLLM serves as they are.

The weights are random, so the checkpoints need no download and say nothing; the names, shapes and configuration keys are
those of the published Qwen3 DSpark checkpoints. Only torch, safetensors and the standard library are imported.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN = 128
HEAD_DIM = 32
HEADS = 4
KV_HEADS = 2
INTERMEDIATE = 256
VOCAB = 512
TARGET_LAYERS = 4
DRAFT_LAYERS = 2
# Layers whose outputs the drafter reads. Never the last one: Hugging Face returns that normed, vLLM does not.
TAPS = (0, 1, 2)
BLOCK = 5
MARKOV_RANK = 16
MASK_TOKEN = VOCAB - 1

# The residual branches of the agreeable target are scaled down to this part of a random network's: context still moves
# every logit, but the largest leads by far more than rounding, so that no forward shape turns the choice.
AGREEABLE_BRANCH_SCALE = 0.5
# The agreeable drafter knows the successor of this part of the tokens. After one of the others its context decides, wrongly
# as a rule, so that a run has whole blocks, cut blocks and refused blocks.
AGREEABLE_KNOWN = 5 / 6


@dataclass(frozen=True, slots=True)
class TinyPair:
    """Where the two checkpoints lie."""

    target: Path
    drafter: Path
    vocab_size: int
    block_size: int


def make_tiny_pair(
    directory: Path | str,
    seed: int = 0,
    *,
    agreeable: bool = False,
    own_embed: bool = True,
    own_lm_head: bool = True,
    confidence_head: bool = True,
    block_size: int = BLOCK,
    max_positions: int = 4096,
    dtype: torch.dtype = torch.bfloat16,
) -> TinyPair:
    """Write ``directory/target`` and ``directory/drafter`` and say where they are.

    A random drafter agrees with a random target about once in ``VOCAB`` tokens. With ``agreeable`` the target follows a
    permutation of the vocabulary, which its embedding and head carry, and the drafter's Markov head has most of that
    permutation, so that most drafts are accepted. Its confidence head is then high where it knows, low where it guesses.

    Without ``own_embed`` or ``own_lm_head`` the drafter's checkpoint lacks that tensor and the target's must be taken.
    Equal arguments write equal bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(VOCAB, generator=generator)  # [V]: the token after t is successor[t]
    target = _target_tensors(generator, successor if agreeable else None)
    drafter = _drafter_tensors(generator, successor if agreeable else None, confidence_head=confidence_head)
    if not own_embed:
        del drafter["embed_tokens.weight"]
    if not own_lm_head:
        del drafter["lm_head.weight"]

    root = Path(directory)
    pair = TinyPair(root / "target", root / "drafter", VOCAB, block_size)
    target_config = _target_config(max_positions, dtype)
    drafter_config = target_config | {
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": DRAFT_LAYERS,
        "num_target_layers": TARGET_LAYERS,
        "layer_types": ["full_attention"] * DRAFT_LAYERS,
        "block_size": block_size,
        "mask_token_id": MASK_TOKEN,
        "target_layer_ids": list(TAPS),
        "markov_rank": MARKOV_RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence_head,
        "confidence_head_with_markov": confidence_head,
        "num_anchors": 1,
    }
    _write(pair.target, target_config, target, dtype)
    _write(pair.drafter, drafter_config, drafter, dtype)
    return pair


def _target_config(max_positions: int, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        # No text of the pair ends by itself: tests choose the length.
        "eos_token_id": None,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "layer_types": ["full_attention"] * TARGET_LAYERS,
        "max_position_embeddings": max_positions,
        "max_window_layers": TARGET_LAYERS,
        "num_attention_heads": HEADS,
        "num_hidden_layers": TARGET_LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB,
    }


def _target_tensors(generator: torch.Generator, successor: torch.Tensor | None) -> dict[str, torch.Tensor]:
    scale = 1.0 if successor is None else AGREEABLE_BRANCH_SCALE
    tensors = {"model.embed_tokens.weight": _normal(generator, VOCAB, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(TARGET_LAYERS):
        for name, tensor in _layer_tensors(generator, branch_scale=scale).items():
            tensors[f"model.layers.{layer}.{name}"] = tensor
    tensors["lm_head.weight"] = (
        # Logits of a few units' spread, so that the largest two are seldom within rounding of each other.
        _normal(generator, VOCAB, HIDDEN) * (3.0 / HIDDEN**0.5)
        if successor is None
        else _head_for(tensors["model.embed_tokens.weight"], successor, gain=12.0 / HIDDEN)
    )
    return tensors


def _drafter_tensors(
    generator: torch.Generator, successor: torch.Tensor | None, *, confidence_head: bool
) -> dict[str, torch.Tensor]:
    taps = len(TAPS)
    tensors = {
        "embed_tokens.weight": _normal(generator, VOCAB, HIDDEN),
        "lm_head.weight": _normal(generator, VOCAB, HIDDEN) * (1.0 / HIDDEN**0.5),
        "fc.weight": _normal(generator, HIDDEN, taps * HIDDEN) / (taps * HIDDEN) ** 0.5,
        "hidden_norm.weight": _norm_weight(generator, HIDDEN),
        "norm.weight": _norm_weight(generator, HIDDEN),
    }
    for layer in range(DRAFT_LAYERS):
        for name, tensor in _layer_tensors(generator, branch_scale=1.0).items():
            tensors[f"layers.{layer}.{name}"] = tensor
    if successor is None:
        tensors["markov_head.markov_w1.weight"] = _normal(generator, VOCAB, MARKOV_RANK) / MARKOV_RANK**0.5
        tensors["markov_head.markov_w2.weight"] = _normal(generator, VOCAB, MARKOV_RANK)
        confidence = _normal(generator, 1, HIDDEN + MARKOV_RANK) * 0.1
    else:
        # Column 0 says whether the token's successor is known; the head ignores it, the confidence reads nothing else of
        # the embedding. The other columns are rows of length 1: of all inner products with one of them its own is the
        # largest, so the bias points at the successor. Rows that are not known are too short to outweigh the base logits.
        is_known = torch.rand(VOCAB, generator=generator) < AGREEABLE_KNOWN
        directions = torch.nn.functional.normalize(_normal(generator, VOCAB, MARKOV_RANK - 1), dim=1)
        directions *= torch.where(is_known, 1.0, 0.02).unsqueeze(1)
        flag = torch.where(is_known, 1.0, -1.0).unsqueeze(1)
        head = _head_for(directions, successor, gain=60.0)
        tensors["markov_head.markov_w1.weight"] = torch.cat([flag, directions], dim=1)
        tensors["markov_head.markov_w2.weight"] = torch.cat([torch.zeros(VOCAB, 1), head], dim=1)
        confidence = _normal(generator, 1, HIDDEN + MARKOV_RANK) * 0.02
        confidence[0, HIDDEN] = 3.0
    if confidence_head:
        tensors["confidence_head.proj.weight"] = confidence
        tensors["confidence_head.proj.bias"] = torch.tensor([0.1])
    return tensors


def _layer_tensors(generator: torch.Generator, *, branch_scale: float) -> dict[str, torch.Tensor]:
    """One Qwen3 decoder layer; ``branch_scale`` is the size of what it adds to the residual stream."""
    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "input_layernorm.weight": _norm_weight(generator, HIDDEN),
        "post_attention_layernorm.weight": _norm_weight(generator, HIDDEN),
        "self_attn.q_proj.weight": _linear(generator, query, HIDDEN),
        "self_attn.k_proj.weight": _linear(generator, key_value, HIDDEN),
        "self_attn.v_proj.weight": _linear(generator, key_value, HIDDEN),
        "self_attn.o_proj.weight": _linear(generator, HIDDEN, query) * branch_scale,
        "self_attn.q_norm.weight": _norm_weight(generator, HEAD_DIM),
        "self_attn.k_norm.weight": _norm_weight(generator, HEAD_DIM),
        "mlp.gate_proj.weight": _linear(generator, INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": _linear(generator, INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": _linear(generator, HIDDEN, INTERMEDIATE) * branch_scale,
    }


def _head_for(rows: torch.Tensor, successor: torch.Tensor, *, gain: float) -> torch.Tensor:
    """A head [V, d] whose product with ``rows[t]`` [V, d] is largest at ``successor[t]``."""
    head = torch.empty_like(rows)
    head[successor] = rows * gain
    return head


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    values: torch.Tensor = torch.randn(*shape, generator=generator)
    return values


def _linear(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """A matrix [rows, columns] that keeps the size of what it multiplies."""
    return _normal(generator, rows, columns) / math.sqrt(columns)


def _norm_weight(generator: torch.Generator, size: int) -> torch.Tensor:
    # Not all ones: a norm that forgets its weight must show.
    return 1.0 + 0.1 * _normal(generator, size)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
