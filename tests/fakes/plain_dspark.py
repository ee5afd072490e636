"""Dense DSpark drafters as formulas: float32, one request, every context row from scratch, no cache, no batching.

Oracles for the drafter's tests, so they share no code with it: written from the description of the models.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

NOTHING = torch.zeros(0, 0)


@dataclass(frozen=True)
class PlainDraft:
    tokens: list[int]
    confidences: list[float]
    margins: list[float]
    hidden: Tensor  # [N, hidden], after the final norm
    base: Tensor  # [N, rows of the head], before the Markov bias
    logits: Tensor  # [N, rows of the head]
    ignored: Tensor = NOTHING  # [0 or 1, hidden]: of the anchor, where it predicts nothing


class PlainDSpark:
    """The Qwen3 drafter. `config` has all keys at the top level, whatever the checkpoint's format."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, as_trained: bool = False) -> None:
        self.config = config
        self.weights = {name: tensor.float() for name, tensor in tensors.items() if name != "d2t"}
        self.ids: list[int] | None = None  # the target's id of each row of the head
        if "d2t" in tensors:
            self.ids = [row + int(offset) for row, offset in enumerate(tensors["d2t"])]
        self.as_trained = as_trained

    @classmethod
    def read(cls, folder: Path, **options: Any) -> PlainDSpark:
        """A checkpoint of DeepSpec's format, or of speculators' with what the target lends in `lent`."""
        config = json.loads((folder / "config.json").read_text())
        lent = options.pop("lent", {})
        own = {key: value for key, value in config.items() if key != "transformer_layer_config"}
        flat = {**config.get("transformer_layer_config", {}), **own}
        return cls(flat, {**lent, **load_file(folder / "model.safetensors")}, **options)

    def norm(self, x: Tensor, name: str | None) -> Tensor:
        mean = (x * x).mean(-1, keepdim=True)
        eps: float = self.config["rms_norm_eps"]
        normed = x / (mean + eps).sqrt()
        return normed if name is None else self.weights[name + ".weight"] * normed

    def project(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights.get(name + ".bias", torch.zeros(1))
        return x @ self.weights[name + ".weight"].T + bias

    def theta(self) -> float:
        parameters = self.config.get("rope_parameters") or {}
        return float(parameters.get("rope_theta") or self.config["rope_theta"])

    def turned_pairs(self, dim: int) -> int:
        return dim // 2

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [n, heads, d]: dimension pairs turned by position times theta^(-2j/d), in float64."""
        dim = x.shape[-1]
        turned = x.clone()
        for j in range(self.turned_pairs(dim)):
            angle = positions.double() * self.theta() ** (-2 * j / dim)
            cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
            a, b = (j, j + dim // 2) if self.config.get("is_neox_style", True) else (2 * j, 2 * j + 1)
            turned[..., a] = x[..., a] * cos - x[..., b] * sin
            turned[..., b] = x[..., b] * cos + x[..., a] * sin
        return turned

    def heads(self, x: Tensor) -> Tensor:
        dim: int = self.config["head_dim"]
        return x.reshape(len(x), x.shape[-1] // dim, dim)

    def sees(self, layer: int, query: int, key: int) -> bool:
        """Whether block position `query` sees the position `key`, both counted from the anchor."""
        types = self.config.get("layer_types") or ["full_attention"] * 1000
        is_sliding = types[layer] == "sliding_attention"
        is_causal = self.config.get("is_causal")
        if is_causal is None:
            is_causal = is_sliding
        if not is_sliding:
            return key <= query or not is_causal
        window: int = self.config["sliding_window"]
        if self.as_trained:
            if self.config.get("sliding_window_non_causal"):
                is_causal = False
            return (key <= query or not is_causal) and key >= -window
        return query - window < key <= query if is_causal else abs(query - key) < window

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [Q, heads, d], keys and values [context + Q, kv heads, d] -> [Q, heads * d]"""
        block, heads, _ = query.shape
        group, first = heads // keys.shape[1], block - len(keys)
        mask = torch.tensor([[self.sees(layer, q, k) for k in range(first, block)] for q in range(block)])
        outputs = []
        for head in range(heads):
            scores = query[:, head] @ keys[:, head // group].T * scale
            outputs.append(scores.masked_fill(~mask, float("-inf")).softmax(-1) @ values[:, head // group])
        return torch.cat(outputs, -1)

    def backbone(self, seen: Tensor, seen_pos: Tensor, ids: list[int], block_pos: Tensor) -> Tensor:
        """[Q, hidden] after the final norm; `seen` [M, taps * tap] are the context's rows."""
        config = self.config
        combined = self.norm(seen @ self.weights["fc.weight"].T, "hidden_norm")
        x = self.weights["embed_tokens.weight"][ids]
        for layer in range(config["num_hidden_layers"]):
            name = f"layers.{layer}.self_attn."
            normed = self.norm(x, f"layers.{layer}.input_layernorm")
            query = self.rope(self.norm(self.heads(self.project(normed, name + "q_proj")), name + "q_norm"), block_pos)
            keys, values = [], []
            for source, positions in ((combined, seen_pos), (normed, block_pos)):
                key = self.norm(self.heads(self.project(source, name + "k_proj")), name + "k_norm")
                keys.append(self.rope(key, positions))
                values.append(self.heads(self.project(source, name + "v_proj")))
            attended = self.attend(layer, query, torch.cat(keys), torch.cat(values), config["head_dim"] ** -0.5)
            x = x + self.project(attended, name + "o_proj")
            normed = self.norm(x, f"layers.{layer}.post_attention_layernorm")
            gate = self.project(normed, f"layers.{layer}.mlp.gate_proj")
            up = self.project(normed, f"layers.{layer}.mlp.up_proj")
            x = x + self.project(gate / (1 + (-gate).exp()) * up, f"layers.{layer}.mlp.down_proj")
        return self.norm(x, "norm")

    def finished(self, logits: Tensor) -> Tensor:
        """What becomes of base logits."""
        scale: float = self.config.get("logit_scale", 1.0)
        return scale * logits

    def finished_bias(self, bias: Tensor) -> Tensor:
        """What becomes of the Markov bias."""
        return self.finished(bias)

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
        skipped = 0 if config.get("sample_from_anchor", True) else 1
        length = config["block_size"] if num_drafts is None else num_drafts + skipped
        anchor_pos = first_pos + len(rows)
        seen = rows[max(0, len(rows) - context) :]
        seen_pos = torch.arange(anchor_pos - len(seen), anchor_pos)
        block_pos = torch.arange(anchor_pos, anchor_pos + length).clamp(max=config["max_position_embeddings"] - 1)
        ids = [anchor] + [config["mask_token_id"]] * (length - 1)
        hidden = self.backbone(seen, seen_pos, ids, block_pos)
        base = self.finished(self.project(hidden[skipped:], "lm_head"))
        if self.ids is None:
            base = base[:, : vocab or config["vocab_size"]]
        return self.chain(hidden[skipped:], base, anchor, ignored=hidden[:skipped])

    def bias(self, hidden: Tensor, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """(the Markov bias of one position, the state after it)"""
        w2 = self.weights["markov_head.markov_w2.weight"]
        head_type = self.config.get("markov_head_type") or "vanilla"
        if head_type == "gated":
            gate = self.project(torch.cat((hidden, embedded)), "markov_head.gate_proj").sigmoid()
            return self.finished_bias(w2 @ (gate * embedded)), state
        if head_type == "rnn":
            joint = self.project(torch.cat((state, embedded, hidden)), "markov_head.joint_proj")
            gate, candidate, output = joint[: len(state)], joint[len(state) : 2 * len(state)], joint[2 * len(state) :]
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
            return self.finished_bias(w2 @ output.tanh()), state
        return self.finished_bias(w2 @ embedded), state

    def chain(
        self,
        hidden: Tensor,
        base: Tensor,
        anchor: int,
        forced: list[int] | None = None,
        ignored: Tensor = NOTHING,
    ) -> PlainDraft:
        """The sequential part; with `forced` the tokens before each position are those, not the chosen ones."""
        rank: int = self.config["markov_rank"]
        state = torch.zeros(rank)
        for before in ignored if rank else ():
            _, state = self.bias(before, self.weights["markov_head.markov_w1.weight"][anchor], state)
        tokens: list[int] = []
        confidences, margins, logits = [], [], []
        for k in range(len(base)):
            previous = anchor if k == 0 else (forced or tokens)[k - 1]
            step, embedded = base[k], torch.zeros(0)
            if rank:
                embedded = self.weights["markov_head.markov_w1.weight"][previous]
                bias, state = self.bias(hidden[k], embedded, state)
                step = step + bias[: len(step)]
            features = hidden[k]
            if self.config.get("confidence_head_with_markov"):
                features = torch.cat((features, embedded))
            if self.config.get("enable_confidence_head"):
                confidences.append(float(torch.sigmoid(self.project(features, "confidence_head.proj")).squeeze()))
            else:
                confidences.append(1.0)
            ordered = step.sort(descending=True).values
            row = int((step == ordered[0]).nonzero()[0])
            tokens.append(row if self.ids is None else self.ids[row])
            margins.append(float(ordered[0] - ordered[1]))
            logits.append(step)
        return PlainDraft(tokens, confidences, margins, hidden, base, torch.stack(logits), ignored)


class PlainGemma4(PlainDSpark):
    """The Gemma 4 drafter; `as_trained`: the Markov bias is not soft-capped."""

    def theta(self) -> float:
        return float(self.config["rope_parameters"]["full_attention"]["rope_theta"])

    def turned_pairs(self, dim: int) -> int:
        factor: float = self.config["rope_parameters"]["full_attention"].get("partial_rotary_factor", 1.0)
        return math.floor(factor * dim / 2)

    def heads(self, x: Tensor) -> Tensor:
        dim: int = self.config["global_head_dim"]
        return x.reshape(len(x), x.shape[-1] // dim, dim)

    def finished(self, logits: Tensor) -> Tensor:
        cap = self.config.get("final_logit_softcapping")
        return logits if cap is None else cap * (logits / cap).tanh()

    def finished_bias(self, bias: Tensor) -> Tensor:
        return bias if self.as_trained else self.finished(bias)

    def backbone(self, seen: Tensor, seen_pos: Tensor, ids: list[int], block_pos: Tensor) -> Tensor:
        config = self.config
        combined = self.norm(seen @ self.weights["fc.weight"].T, "hidden_norm")
        x = self.weights["embed_tokens.weight"][ids] * config["hidden_size"] ** 0.5
        for layer in range(config["num_hidden_layers"]):
            name, attention = f"layers.{layer}.", f"layers.{layer}.self_attn."
            normed = self.norm(x, name + "input_layernorm")
            query = self.norm(self.heads(self.project(normed, attention + "q_proj")), attention + "q_norm")
            query = self.rope(query, block_pos)
            keys, values = [], []
            for source, positions in ((combined, seen_pos), (normed, block_pos)):
                projected = self.heads(self.project(source, attention + "k_proj"))
                keys.append(self.rope(self.norm(projected, attention + "k_norm"), positions))
                if not config["attention_k_eq_v"]:
                    projected = self.heads(self.project(source, attention + "v_proj"))
                values.append(self.norm(projected, None))
            attended = self.attend(layer, query, torch.cat(keys), torch.cat(values), 1.0)
            attended = self.project(attended, attention + "o_proj")
            x = x + self.norm(attended, name + "post_attention_layernorm")
            normed = self.norm(x, name + "pre_feedforward_layernorm")
            gate, up = self.project(normed, name + "mlp.gate_proj"), self.project(normed, name + "mlp.up_proj")
            inner = 0.5 * gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) * up
            inner = self.project(inner, name + "mlp.down_proj")
            x = x + self.norm(inner, name + "post_feedforward_layernorm")
            x = x * self.weights[name + "layer_scalar"]
        return self.norm(x, "norm")
