"""The DeepSeek-V4 and V4.1 drafters as formulas: float32, one request, one position at a time; no cache, ring or batching.

An oracle for the drafter's tests, so it shares no code with it: written from the description of the models and of the
number formats. `Behaviour` holds what the two versions differ in, so that a test can plant one's way in the other.
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
from tests.fakes.plain_dspark import PlainDraft
from tests.fakes.tiny_deepseek import text_of
from torch import Tensor

# e4m3: sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity, all ones is NaN.
E4M3 = [
    (-1) ** (byte >> 7)
    * (
        math.nan
        if byte & 127 == 127
        else (byte & 7) / 8 * 2.0**-6
        if byte & 120 == 0
        else (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3 & 15) - 7)
    )
    for byte in range(256)
]
# e2m1: sign, 2 exponent bits of bias 1, 1 mantissa bit.
E2M1 = [
    (-1) ** (code >> 3) * ((code & 1) / 2 if code & 6 == 0 else (1 + (code & 1) / 2) * 2.0 ** ((code >> 1 & 3) - 1))
    for code in range(16)
]
E8M0 = [math.nan if byte == 255 else 2.0 ** (byte - 127) for byte in range(256)]


@dataclass(frozen=True)
class Behaviour:
    """What V4 and V4.1 differ in, besides sizes and names."""

    eps: float
    normalises_query_heads: bool
    delays_pre: bool  # a sublayer's input is collapsed with the weights of the one before
    has_head_mix: bool
    kv_group: int
    quantises_rotated: bool  # the context's rotated dimensions too
    activation_group: int


def behaviour_of(config: Mapping[str, Any]) -> Behaviour:
    is_v41 = config["model_type"] == "deepseek_v41"
    return Behaviour(
        eps=text_of(config)["rms_norm_eps"],
        normalises_query_heads=not is_v41,
        delays_pre=is_v41,
        has_head_mix=not is_v41,
        kv_group=32 if is_v41 else 64,
        quantises_rotated=is_v41,
        activation_group=32 if is_v41 else 128,
    )


def nearest_e4m3(x: Tensor) -> Tensor:
    """[n]: the nearest e4m3 value of each, of two equally near the one with the even mantissa; 448 is the end."""
    codes = [code for code in range(256) if not math.isnan(E4M3[code])]
    # Even codes first: the first of several minima is taken.
    codes.sort(key=lambda code: code % 2)
    grid = torch.tensor([E4M3[code] for code in codes], dtype=torch.float64)
    distances = (x.double().clamp(-448, 448)[:, None] - grid).abs()
    nearest = (distances == distances.amin(dim=1, keepdim=True)).int().argmax(dim=1)
    return grid[nearest].float()


def table(values: list[float], codes: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[codes.long()]


def codes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


class PlainDeepseek:
    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        quantises: bool = False,
        behaviour: Behaviour | None = None,
    ) -> None:
        self.text = text_of(config)
        self.is_v41 = config["model_type"] == "deepseek_v41"
        self.behaviour = behaviour or behaviour_of(config)
        self.quantises = quantises
        self.block = config["quantization_config"]["weight_block_size"][0]
        self.stages = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("mtp."))
        self.weights = {name: self.decode(name, tensors) for name in tensors if not name.endswith(".scale")}
        self.margins: list[float] = []  # of every choice of experts since the newest `draft` began

    @classmethod
    def read(cls, folder: Path, **options: Any) -> PlainDeepseek:
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        mine = {
            name: one
            for name, one in tensors.items()
            if name.startswith("mtp.") or name in ("embed.weight", "head.weight")
        }
        return cls(json.loads((folder / "config.json").read_text()), mine, **options)

    def decode(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = tensors[name]
        scale_name = name.removesuffix(".weight") + ".scale"
        if scale_name not in tensors:
            return weight.float()
        scales = table(E8M0, codes_of(tensors[scale_name]))
        if weight.dtype == torch.int8:
            codes = codes_of(weight)
            values = torch.empty((len(codes), 2 * codes.shape[1]))
            values[:, 0::2], values[:, 1::2] = table(E2M1, codes & 15), table(E2M1, codes >> 4)
            for column in range(values.shape[1]):
                values[:, column] *= scales[:, column // 32]
            return values
        values = table(E4M3, codes_of(weight))
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                tile = (
                    slice(row * self.block, (row + 1) * self.block),
                    slice(column * self.block, (column + 1) * self.block),
                )
                values[tile] *= scales[row, column]
        return values

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.weights[name] * self.unit(x)

    def unit(self, x: Tensor) -> Tensor:
        return x / ((x * x).mean() + self.behaviour.eps).sqrt()

    def quantise(self, x: Tensor, group: int) -> Tensor:
        """[n] -> [n]: each group as e4m3 numbers times one power of two."""
        out = []
        for part in torch.split(x, group):
            peak = max(float(part.abs().max()), 1e-4)
            mantissa, exponent = math.frexp(float(torch.tensor(peak) * torch.tensor(1 / 448)))
            scale = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
            out.append(nearest_e4m3(part / scale) * scale)
        return torch.cat(out)

    def linear(self, x: Tensor, name: str) -> Tensor:
        if self.quantises:
            x = self.quantise(x, self.behaviour.activation_group)
        return self.weights[name + ".weight"] @ x

    def rope(self, x: Tensor, position: int, sign: int = 1) -> Tensor:
        """[d]: the last dimensions turned in neighbouring pairs; `sign` -1 turns back."""
        rotated = self.text["qk_rope_head_dim"]
        straight, pairs = x[:-rotated], x[-rotated:].view(-1, 2)
        angles = [sign * position * self.text["rope_theta"] ** (-2 * j / rotated) for j in range(rotated // 2)]
        cos, sin = (torch.tensor([f(angle) for angle in angles]) for f in (math.cos, math.sin))
        a, b = pairs[:, 0], pairs[:, 1]
        return torch.cat((straight, torch.stack((a * cos - b * sin, b * cos + a * sin), dim=1).flatten()))

    def latent(self, x: Tensor, stage: int, position: int) -> Tensor:
        """What a position gives as key and value."""
        at = f"mtp.{stage}.attn."
        kv = self.rope(self.norm(self.linear(x, at + "wkv"), at + "kv_norm.weight"), position)
        if not self.quantises:
            return kv
        end = len(kv) if self.behaviour.quantises_rotated else len(kv) - self.text["qk_rope_head_dim"]
        return torch.cat((self.quantise(kv[:end], self.behaviour.kv_group), kv[end:]))

    def mixes(self, stream: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """pre [n], post [n], C [n, n] of the stream [n, D]."""
        n, eps = len(stream), self.text["hc_eps"]
        base, scale = self.weights[name + "_base"], self.weights[name + "_scale"]
        z = self.weights[name + "_fn"] @ self.unit(stream.flatten())
        pre, post, comb = torch.zeros(n), torch.zeros(n), torch.zeros(n, n)
        for i in range(n):
            pre[i] = 1 / (1 + (-(z[i] * scale[0] + base[i])).exp()) + eps
            post[i] = 2 / (1 + (-(z[n + i] * scale[1] + base[n + i])).exp())
            row = z[2 * n + n * i : 2 * n + n * (i + 1)] * scale[2] + base[2 * n + n * i : 2 * n + n * (i + 1)]
            comb[i] = row.exp() / row.exp().sum() + eps
        comb = comb / (comb.sum(0) + eps)  # columns
        for _ in range(self.text["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(1)[:, None] + eps)  # rows
            comb = comb / (comb.sum(0) + eps)
        return pre, post, comb

    def spread(self, y: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        copies = range(len(stream))
        return torch.stack([post[j] * y + sum(comb[i, j] * stream[i] for i in copies) for j in copies])

    def attention(self, xs: list[Tensor], stage: int, context: list[Tensor], positions: list[int]) -> list[Tensor]:
        at, text = f"mtp.{stage}.attn.", self.text
        heads, dim, groups = text["num_attention_heads"], text["head_dim"], text["o_groups"]
        entries = context + [self.latent(x, stage, position) for x, position in zip(xs, positions, strict=True)]
        outputs = []
        for x, position in zip(xs, positions, strict=True):
            query = self.linear(self.norm(self.linear(x, at + "wq_a"), at + "q_norm.weight"), at + "wq_b")
            attended = []
            for head in range(heads):
                q = query[head * dim : (head + 1) * dim]
                q = self.rope(self.unit(q) if self.behaviour.normalises_query_heads else q, position)
                weights = [float(torch.exp(q @ entry / dim**0.5)) for entry in entries]
                total = sum(weights) + math.exp(float(self.weights[at + "attn_sink"][head]))
                value = torch.stack(
                    [weight / total * entry for weight, entry in zip(weights, entries, strict=True)]
                ).sum(0)
                attended.append(self.rope(value, position, -1))
            rows, per_group = text["o_lora_rank"], heads // groups
            wo_a = self.weights[at + "wo_a.weight"]
            parts = []
            for group in range(groups):
                mine = torch.cat(attended[group * per_group : (group + 1) * per_group])
                parts.append(wo_a[group * rows : (group + 1) * rows] @ mine)
            outputs.append(self.linear(torch.cat(parts), at + "wo_b"))
        return outputs

    def expert(self, x: Tensor, name: str, weight: float) -> Tensor:
        limit = self.text["swiglu_limit"]
        gate = self.linear(x, name + ".w1").clamp(max=limit)
        up = self.linear(x, name + ".w3").clamp(-limit, limit)
        return self.linear(weight * gate / (1 + (-gate).exp()) * up, name + ".w2")

    def chosen_experts(self, x: Tensor, stage: int) -> dict[int, float]:
        """Expert -> routing weight."""
        at, text = f"mtp.{stage}.ffn.", self.text
        scores = torch.log1p((self.weights[at + "gate.weight"] @ x).exp()).sqrt()
        biased = scores + self.weights[at + "gate.bias"]
        count = text["dspark_num_experts_per_tok"] if self.is_v41 else text["num_experts_per_tok"]
        ranked = sorted(range(len(biased)), key=lambda expert: -float(biased[expert]))
        chosen = ranked[:count]
        last, first_out = float(biased[ranked[count - 1]]), float(biased[ranked[count]])
        self.margins.append((last - first_out) / abs(last))
        total = sum(float(scores[expert]) for expert in chosen) + 1e-20
        return {expert: float(scores[expert]) / total * text["routed_scaling_factor"] for expert in chosen}

    def moe(self, x: Tensor, stage: int) -> Tensor:
        at = f"mtp.{stage}.ffn."
        total = self.expert(x, at + "shared_experts", 1.0)
        for expert, weight in self.chosen_experts(x, stage).items():
            total = total + self.expert(x, f"{at}experts.{expert}", weight)
        return total

    def contexts(self, rows: Tensor, first_pos: int) -> list[list[Tensor]]:
        """[stage][row] -> what attention sees of it."""
        combined = [self.norm(self.linear(row, "mtp.0.main_proj"), "mtp.0.main_norm.weight") for row in rows]
        return [
            [self.latent(one, stage, first_pos + index) for index, one in enumerate(combined)]
            for stage in range(self.stages)
        ]

    def draft(
        self,
        rows: Tensor,
        first_pos: int,
        anchor: int,
        *,
        context: int | None = None,
        num_drafts: int | None = None,
    ) -> PlainDraft:
        """`rows` [M, taps * D] float32 are positions first_pos ..; the newest of them, as many as the window, are seen."""
        text, last = self.text, f"mtp.{self.stages - 1}."
        self.margins = []
        seen = min(len(rows), context or text["sliding_window"], text["sliding_window"])
        anchor_pos = first_pos + len(rows)
        contexts = self.contexts(rows[len(rows) - seen :], anchor_pos - seen)
        count = num_drafts or text["dspark_block_size"]
        ids = [anchor] + [text["dspark_noise_token_id"]] * (count - 1)
        positions = [min(anchor_pos + k, text["max_position_embeddings"] - 1) for k in range(count)]
        copies = text["hc_mult"]
        streams = [self.weights["embed.weight"][token].repeat(copies, 1) for token in ids]
        pres = [torch.eye(copies)[0] for _ in ids]
        for stage in range(self.stages):
            for part in ("attn", "ffn"):
                mixes = [self.mixes(stream, f"mtp.{stage}.hc_{part}") for stream in streams]
                used = pres if self.behaviour.delays_pre else [pre for pre, _, _ in mixes]
                norm = f"mtp.{stage}.{part}_norm.weight"
                xs = [self.norm(pre @ stream, norm) for pre, stream in zip(used, streams, strict=True)]
                ys = (
                    self.attention(xs, stage, contexts[stage], positions)
                    if part == "attn"
                    else [self.moe(x, stage) for x in xs]
                )
                streams = [
                    self.spread(y, stream, post, comb)
                    for y, stream, (_, post, comb) in zip(ys, streams, mixes, strict=True)
                ]
                pres = [pre for pre, _, _ in mixes]
        if self.behaviour.has_head_mix:
            pres = [self.head_mix(stream, last) for stream in streams]
        hidden = torch.stack([pre @ stream for pre, stream in zip(pres, streams, strict=True)])
        base = torch.stack([self.weights["head.weight"] @ self.norm(x, last + "norm.weight") for x in hidden])
        return self.chain(hidden, base, anchor)

    def head_mix(self, stream: Tensor, last: str) -> Tensor:
        z = self.weights[last + "hc_head_fn"] @ self.unit(stream.flatten())
        eps: float = self.text["hc_eps"]
        return torch.sigmoid(z * self.weights[last + "hc_head_scale"] + self.weights[last + "hc_head_base"]) + eps

    def chain(self, hidden: Tensor, base: Tensor, anchor: int, forced: list[int] | None = None) -> PlainDraft:
        """The sequential part; with `forced` the tokens before each position are those, not the chosen ones."""
        head = f"mtp.{self.stages - 1}.markov_head."
        w1, w2 = ("embed", "head") if self.is_v41 else ("markov_w1", "markov_w2")
        tokens: list[int] = []
        confidences, margins, logits = [], [], []
        for k in range(len(base)):
            before = anchor if k == 0 else (forced or tokens)[k - 1]
            embedded = self.weights[f"{head}{w1}.weight"][before]
            step = base[k] + self.weights[f"{head}{w2}.weight"] @ embedded
            features = torch.cat((hidden[k], embedded))
            proj = self.weights[f"mtp.{self.stages - 1}.confidence_head.proj.weight"]
            confidences.append(float(torch.sigmoid(proj @ features)))
            ordered = step.sort(descending=True).values
            tokens.append(int((step == ordered[0]).nonzero()[0]))
            margins.append(float(ordered[0] - ordered[1]))
            logits.append(step)
        return PlainDraft(tokens, confidences, margins, hidden, base, torch.stack(logits))
