"""The Qwen3 DSpark drafter as a formula: float32, one request, every context row from scratch, no cache, no batching.

An oracle for the drafter's tests, so it shares no code with it: written from the description of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class PlainDraft:
    tokens: list[int]
    confidences: list[float]
    margins: list[float]
    hidden: Tensor  # [N, hidden], after the final norm
    base: Tensor  # [N, vocabulary], before the Markov bias
    logits: Tensor  # [N, vocabulary]


class PlainDSpark:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.weights = {name: tensor.float() for name, tensor in tensors.items()}

    @classmethod
    def read(cls, folder: Path) -> PlainDSpark:
        return cls(json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        eps: float = self.config["rms_norm_eps"]
        return self.weights[name + ".weight"] * x / (mean + eps).sqrt()

    def project(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(name + ".bias", torch.zeros(1))
        return x @ self.weights[name + ".weight"].T + bias

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, d]: dimension pairs turned by position times theta^(-2j/d), in float64."""
        dim = x.shape[-1]
        parameters = self.config.get("rope_parameters") or {}
        theta = parameters.get("rope_theta") or self.config["rope_theta"]
        turned = torch.empty_like(x)
        for j in range(dim // 2):
            angle = positions.double() * float(theta) ** (-2 * j / dim)
            cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
            a, b = (j, j + dim // 2) if self.config.get("is_neox_style", True) else (2 * j, 2 * j + 1)
            turned[..., a] = x[..., a] * cos - x[..., b] * sin
            turned[..., b] = x[..., b] * cos + x[..., a] * sin
        return turned

    def heads(self, x: Tensor) -> Tensor:
        dim: int = self.config["head_dim"]
        return x.reshape(len(x), x.shape[-1] // dim, dim)

    def draft(
        self,
        rows: Tensor,
        first_pos: int,
        anchor: int,
        *,
        context: int,
        num_drafts: int | None = None,
        vocab: int | None = None,
    ) -> PlainDraft:
        """`rows` [M, taps * tap] float32 are positions first_pos ..; the newest `context` of them are seen."""
        config = self.config
        count = num_drafts or config["block_size"]
        anchor_pos = first_pos + len(rows)
        seen = rows[max(0, len(rows) - context) :]
        seen_pos = torch.arange(anchor_pos - len(seen), anchor_pos)
        block_pos = torch.arange(anchor_pos, anchor_pos + count).clamp(max=config["max_position_embeddings"] - 1)
        combined = self.norm(seen @ self.weights["fc.weight"].T, "hidden_norm")
        ids = [anchor] + [config["mask_token_id"]] * (count - 1)
        x = self.weights["embed_tokens.weight"][ids]
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        for layer in range(config["num_hidden_layers"]):
            name = f"layers.{layer}.self_attn."
            normed = self.norm(x, f"layers.{layer}.input_layernorm")
            query = self.rope(self.norm(self.heads(self.project(normed, name + "q_proj")), name + "q_norm"), block_pos)
            keys, values = [], []
            for source, positions in ((combined, seen_pos), (normed, block_pos)):
                key = self.norm(self.heads(self.project(source, name + "k_proj")), name + "k_norm")
                keys.append(self.rope(key, positions))
                values.append(self.heads(self.project(source, name + "v_proj")))
            all_keys, all_values = torch.cat(keys), torch.cat(values)
            outputs = []
            for head in range(config["num_attention_heads"]):
                scores = query[:, head] @ all_keys[:, head // group].T / config["head_dim"] ** 0.5
                outputs.append(scores.softmax(-1) @ all_values[:, head // group])
            x = x + self.project(torch.cat(outputs, -1), name + "o_proj")
            normed = self.norm(x, f"layers.{layer}.post_attention_layernorm")
            gate = self.project(normed, f"layers.{layer}.mlp.gate_proj")
            up = self.project(normed, f"layers.{layer}.mlp.up_proj")
            x = x + self.project(gate / (1 + (-gate).exp()) * up, f"layers.{layer}.mlp.down_proj")
        hidden = self.norm(x, "norm")
        scale = config.get("logit_scale", 1.0)
        base = scale * self.project(hidden, "lm_head")[:, : vocab or config["vocab_size"]]
        return self.chain(hidden, base, anchor)

    def chain(self, hidden: Tensor, base: Tensor, anchor: int, forced: list[int] | None = None) -> PlainDraft:
        """The sequential part; with `forced` the tokens before each position are those, not the chosen ones."""
        scale = self.config.get("logit_scale", 1.0)
        tokens: list[int] = []
        confidences, margins, logits = [], [], []
        for k in range(len(base)):
            before = anchor if k == 0 else (forced or tokens)[k - 1]
            step, embedded = base[k], torch.zeros(0)
            if self.config["markov_rank"]:
                embedded = self.weights["markov_head.markov_w1.weight"][before]
                bias = self.weights["markov_head.markov_w2.weight"] @ embedded
                step = step + scale * bias[: len(step)]
            features = hidden[k]
            if self.config.get("confidence_head_with_markov"):
                features = torch.cat((features, embedded))
            if self.config.get("enable_confidence_head"):
                confidences.append(float(torch.sigmoid(self.project(features, "confidence_head.proj")).squeeze()))
            else:
                confidences.append(1.0)
            ordered = step.sort(descending=True).values
            tokens.append(int((step == ordered[0]).nonzero()[0]))
            margins.append(float(ordered[0] - ordered[1]))
            logits.append(step)
        return PlainDraft(tokens, confidences, margins, hidden, base, torch.stack(logits))
