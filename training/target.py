"""The target: SmolLM2's weights, its forward pass over packed rows with taps, and one decoding step.

Every row holds several documents end to end. A position attends to its own document only, and its rotary
position counts from the start of that document, so a packed row computes what separate sequences would.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import Compiled, PackedMask, attend, decode_attention


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The sizes of a Llama model with tied embeddings."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int


class LayerWeights(NamedTuple):
    """One decoder layer; projections that read the same input are stacked."""

    input_norm: Tensor  # [H]
    qkv: Tensor  # [(heads + 2 kv) d, H]
    o: Tensor  # [H, heads d]
    post_norm: Tensor  # [H]
    gate_up: Tensor  # [2 I, H]
    down: Tensor  # [H, I]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Statistics in fp32, cast back before the weight, as the Llama of transformers does."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotary_table(max_positions: int, head_dim: int, theta: float, device: torch.device) -> Tensor:
    """cos and sin for every position, fp32. [positions, 2, d / 2]"""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(max_positions, dtype=torch.float64)[:, None] * inverse
    return torch.stack([angle.cos(), angle.sin()], dim=1).float().to(device)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Half-split rotary embedding. x [B, S, heads, d], rotary [B, S, 2, d / 2]"""
    cos, sin = rotary[..., None, 0, :], rotary[..., None, 1, :]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def _before_attention(
    x: Tensor, w: LayerWeights, rotary: Tensor, kv_heads: int, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, S, H] -> q [B, S, heads, d], k and v [B, S, kv, d]"""
    heads = w.o.shape[1] // head_dim
    qkv = F.linear(rms_norm(x, w.input_norm, eps), w.qkv).unflatten(-1, (-1, head_dim))
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=-2)
    return rotate(q, rotary), rotate(k, rotary), v


def _after_attention(x: Tensor, attended: Tensor, w: LayerWeights, eps: float) -> Tensor:
    """x [B, S, H], attended [B, S, heads, d] -> [B, S, H]"""
    x = x + F.linear(attended.flatten(-2), w.o)
    gate, up = F.linear(rms_norm(x, w.post_norm, eps), w.gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, w.down)


class Target:
    """A Llama model in one dtype on one device, for inference only."""

    def __init__(self, config: TargetConfig, weights: dict[str, Tensor], compiled: Compiled) -> None:
        """`weights` has the names of a LlamaForCausalLM of transformers."""
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]  # [V, H], also the output head
        self.norm = weights["model.norm.weight"]
        self.layers = [_layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self.rotary = rotary_table(config.max_positions, config.head_dim, config.rope_theta, self.embed.device)
        self._compiled = compiled
        self._before = compiled.wrap(_before_attention)
        self._after = compiled.wrap(_after_attention)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    def _split(self, x: Tensor, w: LayerWeights, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        return self._before(x, w, rotary, c.num_kv_heads, c.head_dim, c.rms_norm_eps)

    @torch.no_grad()
    def forward(self, ids: Tensor, mask: PackedMask, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Tap rows and the final normed hidden state of packed rows.

        ids [B, S]; returns taps [B, S, len(taps) H], the outputs of these layers (0-based) side by side, and [B, S, H].
        """
        x = F.embedding(ids, self.embed)
        rotary = self.rotary[mask.positions]
        rows = []
        for index, w in enumerate(self.layers):
            q, k, v = self._split(x, w, rotary)
            x = self._after(x, attend(q, k, v, mask, self._compiled), w, self.config.rms_norm_eps)
            if index in taps:
                rows.append(x)
        return torch.cat(rows, dim=-1), rms_norm(x, self.norm, self.config.rms_norm_eps)

    @torch.no_grad()
    def decode(self, ids: Tensor, step: Tensor, first: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Logits after one more token in every row.

        ids [B] are the tokens at index `step` (a one-element tensor, the same for all rows), first [B] is the index at
        which each row's current document starts; the caches are [layers, B, kv, S, d]. Returns [B, V].
        """
        x = F.embedding(ids, self.embed)[:, None]
        rotary = self.rotary[(step - first)[:, None]]
        for index, w in enumerate(self.layers):
            q, k, v = self._split(x, w, rotary)
            k_cache[index].index_copy_(2, step, k.transpose(1, 2))
            v_cache[index].index_copy_(2, step, v.transpose(1, 2))
            attended = decode_attention(q[:, 0], k_cache[index], v_cache[index], first, step)
            x = self._after(x, attended[:, None], w, self.config.rms_norm_eps)
        return F.linear(rms_norm(x[:, 0], self.norm, self.config.rms_norm_eps), self.embed)


def _layer(weights: dict[str, Tensor], prefix: str) -> LayerWeights:
    def get(*names: str) -> Tensor:
        return torch.cat([weights[f"{prefix}{name}.weight"] for name in names]).contiguous()

    return LayerWeights(
        input_norm=get("input_layernorm"),
        qkv=get("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        o=get("self_attn.o_proj"),
        post_norm=get("post_attention_layernorm"),
        gate_up=get("mlp.gate_proj", "mlp.up_proj"),
        down=get("mlp.down_proj"),
    )


def load_target(path: Path, device: torch.device, dtype: torch.dtype, compiled: Compiled) -> Target:
    """Read a GGUF file, or a folder with config.json and model.safetensors. Weights pass through bf16 in any case."""
    config, weights = _read_gguf(path) if path.suffix == ".gguf" else _read_folder(path)
    # bf16 is what an engine serves; a wider dtype on the CPU then only changes the arithmetic.
    return Target(config, {k: v.to(torch.bfloat16).to(device, dtype) for k, v in weights.items()}, compiled)


def _read_folder(path: Path) -> tuple[TargetConfig, dict[str, Tensor]]:
    from safetensors.torch import load_file

    raw = json.loads((path / "config.json").read_text())
    theta = raw.get("rope_theta") or raw["rope_parameters"]["rope_theta"]
    config = TargetConfig(
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        vocab_size=raw["vocab_size"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=theta,
        max_positions=raw["max_position_embeddings"],
    )
    return config, load_file(path / "model.safetensors")


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _read_gguf(path: Path) -> tuple[TargetConfig, dict[str, Tensor]]:
    import gguf

    reader = gguf.GGUFReader(path)

    def field(name: str) -> float:
        return reader.fields[f"llama.{name}"].contents()

    config = TargetConfig(
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_layers=int(field("block_count")),
        num_heads=int(field("attention.head_count")),
        num_kv_heads=int(field("attention.head_count_kv")),
        head_dim=int(field("rope.dimension_count")),
        vocab_size=int(field("vocab_size")),
        rms_norm_eps=float(f"{field('attention.layer_norm_rms_epsilon'):.6g}"),  # stored in fp32
        rope_theta=float(field("rope.freq_base")),
        max_positions=int(field("context_length")),
    )
    weights = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name == "token_embd.weight":
            weights["model.embed_tokens.weight"] = value
        elif tensor.name == "output_norm.weight":
            weights["model.norm.weight"] = value
        else:
            _, index, name, _ = tensor.name.split(".")
            if name in ("attn_q", "attn_k"):
                # GGUF interleaves the two rotary halves of each head.
                value = value.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            weights[f"model.layers.{index}.{_GGUF_NAMES[name]}.weight"] = value
    return config, weights
