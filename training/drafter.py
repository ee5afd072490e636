"""The drafter: a Qwen3DSparkModel without its own embedding and output head, for training and for evaluation.

A block is the anchor and block_size - 1 masks; query k predicts the token k + 1 places after the anchor. Every layer sees
the projected tap rows of the positions before the anchor, and the whole block in both directions. Parameter names are those
of the checkpoint.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attention import Compiled, PackedMask, attend
from target import TargetConfig, rms_norm, rotary_table, rotate


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """What config.json says about the drafter, beyond the sizes that it shares with its target."""

    num_layers: int
    intermediate_size: int
    taps: tuple[int, ...]  # target layers, 0-based, whose outputs are read
    block_size: int
    mask_token: int
    markov_rank: int


class Norm(nn.Module):
    """RMSNorm with a learnt weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class SelfAttention(nn.Module):
    """Queries from the block; keys and values from the context and the block, through the same projections."""

    def __init__(self, target: TargetConfig) -> None:
        super().__init__()
        h, d = target.hidden_size, target.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(h, target.num_heads * d, bias=False)
        self.k_proj = nn.Linear(h, target.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(h, target.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(target.num_heads * d, h, bias=False)
        self.q_norm = Norm(d, target.rms_norm_eps)
        self.k_norm = Norm(d, target.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, S, H] -> 2 of [B, S, kv, d]"""
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(k), rotary), v

    def forward(
        self, x: Tensor, context: Tensor, rotary: Tensor, context_rotary: Tensor, mask: PackedMask, compiled: Compiled
    ) -> Tensor:
        """x [B, Q, H], context [B, S, H] -> [B, Q, H]"""
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rotary)
        k_context, v_context = self.keys_values(context, context_rotary)
        k, v = self.keys_values(x, rotary)
        k, v = torch.cat([k_context, k], dim=1), torch.cat([v_context, v], dim=1)
        return self.o_proj(attend(q, k, v, mask, compiled).flatten(-2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One draft layer."""

    def __init__(self, target: TargetConfig, intermediate: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(target.hidden_size, target.rms_norm_eps)
        self.self_attn = SelfAttention(target)
        self.post_attention_layernorm = Norm(target.hidden_size, target.rms_norm_eps)
        self.mlp = Mlp(target.hidden_size, intermediate)

    def forward(
        self, x: Tensor, context: Tensor, rotary: Tensor, context_rotary: Tensor, mask: PackedMask, compiled: Compiled
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, context_rotary, mask, compiled)
        return x + self.mlp(self.post_attention_layernorm(x))


class MarkovHead(nn.Module):
    """A low-rank bias on the next token's logits, given the token before."""

    def __init__(self, vocab: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, vocab, bias=False)
        # The product starts at zero and either factor can move.
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)


class ConfidenceHead(nn.Module):
    """The chance that a drafted token is accepted, if all before it were."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)
        nn.init.zeros_(self.proj.weight)


class Drafter(nn.Module):
    """The parameters of the checkpoint."""

    def __init__(self, config: DrafterConfig, target: TargetConfig) -> None:
        super().__init__()
        self.config, self.target = config, target
        hidden = target.hidden_size
        self.fc = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
        self.hidden_norm = Norm(hidden, target.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(target, config.intermediate_size) for _ in range(config.num_layers))
        self.norm = Norm(hidden, target.rms_norm_eps)
        self.markov_head = MarkovHead(target.vocab_size, config.markov_rank)
        self.confidence_head = ConfidenceHead(hidden + config.markov_rank)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and name.startswith(("fc.", "layers.")):
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(1 / math.sqrt(2 * config.num_layers))
        rotary = rotary_table(target.max_positions, target.head_dim, target.rope_theta, torch.device("cpu"))
        self.register_buffer("rotary", rotary, persistent=False)

    def forward(
        self, taps: Tensor, context_positions: Tensor, block: Tensor, mask: PackedMask, compiled: Compiled
    ) -> Tensor:
        """Normed hidden states of all block positions.

        taps [B, S, T H] with their rotary positions [B, S], block [B, A N, H] embedded -> [B, A N, H]
        """
        context = self.hidden_norm(self.fc(taps))
        rotary, context_rotary = self.rotary[mask.positions], self.rotary[context_positions]
        for layer in self.layers:
            block = layer(block, context, rotary, context_rotary, mask, compiled)
        return self.norm(block)

    def block_ids(self, anchors: Tensor) -> Tensor:
        """anchors [B, A] token ids -> [B, A N]: each anchor followed by masks."""
        ids = anchors[..., None].repeat(1, 1, self.config.block_size)
        ids[..., 1:] = self.config.mask_token
        return ids.flatten(1)

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """In fp32, as an engine evaluates it. hidden [..., H], previous [..., r] embedded by the Markov head -> [...]"""
        proj = self.confidence_head.proj
        features = torch.cat([hidden, previous], dim=-1).float()
        return F.linear(features, proj.weight.float(), proj.bias.float())[..., 0]

    @torch.no_grad()
    def draft(self, hidden: Tensor, anchors: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy drafts, token after token. hidden [M, N, H], anchors [M], head [V, H] -> tokens and confidences [M, N]"""
        tokens, confidences = [], []
        previous = anchors
        for k in range(self.config.block_size):
            embedded = F.embedding(previous, self.markov_head.markov_w1.weight)
            bias = self.markov_head.markov_w2(embedded)
            confidences.append(self.confidence_logits(hidden[:, k], embedded).sigmoid())
            previous = (F.linear(hidden[:, k], head) + bias).argmax(-1)
            tokens.append(previous)
        return torch.stack(tokens, dim=1), torch.stack(confidences, dim=1)


def checkpoint_config(config: DrafterConfig, target: TargetConfig, training: dict[str, int]) -> dict[str, object]:
    """config.json of the checkpoint."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_target_layers": target.num_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": target.rope_theta},
        "max_position_embeddings": target.max_positions,
        "use_sliding_window": False,
        "sliding_window": None,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": True,
        "target_layer_ids": list(config.taps),
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **training,
    }


def save_drafter(drafter: Drafter, folder: Path, training: dict[str, int]) -> int:
    """Write config.json and model.safetensors in bf16; returns the size of the tensors' file in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = checkpoint_config(drafter.config, drafter.target, training)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in drafter.named_parameters()}
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path.stat().st_size


def load_drafter(folder: Path, target: TargetConfig, device: torch.device, dtype: torch.dtype) -> Drafter:
    """Read a checkpoint back."""
    raw = json.loads((folder / "config.json").read_text())
    config = DrafterConfig(
        num_layers=raw["num_hidden_layers"],
        intermediate_size=raw["intermediate_size"],
        taps=tuple(raw["target_layer_ids"]),
        block_size=raw["block_size"],
        mask_token=raw["mask_token_id"],
        markov_rank=raw["markov_rank"],
    )
    drafter = Drafter(config, target)
    drafter.load_state_dict(load_file(folder / "model.safetensors"))
    rotary = drafter.rotary
    drafter = drafter.to(device, dtype).eval()
    drafter.rotary = rotary.to(device)  # stays fp32
    return drafter
