"""The DSpark stages of DeepSeek-V4 and V4.1: hyper-connected blocks of latent attention over a short window, and experts.

What is kept of a context position is one vector per stage, key and value at once, already rotated. Formulas and rounding
follow DeepSeek's reference (model.py of the published checkpoints): norms, hyper-connections, routing, softmax and logits
are float32 inside, every sublayer's result is rounded once.

Two modes. Plain: products of decoded weights with activations as they are. Reference: the input of every quantised
product goes through fp8 first, and so do the context's vectors, as in DeepSeek's own code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor

from farspark.errors import CheckpointError
from farspark.worker.checkpoint.deepseek import (
    EMBED,
    FP4_GROUP,
    HEAD,
    STAGES,
    V4_KV_GROUP,
    V41_KV_GROUP,
    DeepseekV4Config,
)
from farspark.worker.models.base import Arithmetic, BlockContext, Footprint
from farspark.worker.models.experts import Experts, RoutedExperts, Router, SharedExpert
from farspark.worker.models.heads import ConfidenceHead, MarkovHead, VanillaMarkov
from farspark.worker.models.hyper_connections import HyperConnection, HyperHead
from farspark.worker.models.latent_attention import attend_with_sink
from farspark.worker.models.quantised import QuantisedLinear, decode_fp4, decode_fp8, through_fp8
from farspark.worker.models.streams import FUSED_COPIES, PlainStreams, Streams

if TYPE_CHECKING:
    from farspark.worker.models.fused_sublayers import FusedSublayers

FLOAT32: Final = Arithmetic(torch.float32, torch.float32)


class Float32Logits:
    """Products with float32 results, whatever the dtype of what is multiplied: logits are never rounded to bf16."""

    def round(self, x: Tensor) -> Tensor:
        return x.float()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None
        if weight.dtype == torch.float32:
            return FLOAT32.vocabulary_linear(x.float(), weight)
        # bf16 products are exact in float32, so nothing but the order of the sum tells this from float32 weights.
        flat = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
        return flat.view(*x.shape[:-1], len(weight))


class Rotation(NamedTuple):
    """float32 [..., 1, rotated dimensions / 2]"""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class Attention:
    query_down: QuantisedLinear  # [q_lora_rank, D]
    query_norm: Tensor  # [q_lora_rank]
    query_up: QuantisedLinear  # [heads * d, q_lora_rank]
    latent: QuantisedLinear  # [d, D]
    latent_norm: Tensor  # [d]
    sink: Tensor  # [heads]
    output_down: Tensor  # [groups, heads * d / groups, o_lora_rank]: of a group's own heads; never quantised inputs
    output_up: QuantisedLinear  # [D, groups * o_lora_rank]


@dataclass(frozen=True, slots=True)
class Stage:
    attention_mixes: HyperConnection
    attention_norm: Tensor  # [D]
    attention: Attention
    moe_mixes: HyperConnection
    moe_norm: Tensor  # [D]
    router: Router
    experts: RoutedExperts
    shared: SharedExpert


class DeepseekV4:
    """A `DraftModel`. Takes its weights out of `tensors`, as stored, and decodes them one after the other."""

    to_target: Tensor | None = None

    def __init__(
        self,
        config: DeepseekV4Config,
        tensors: dict[str, Tensor],
        vocab_size: int,
        arithmetic: Arithmetic,
        *,
        is_reference: bool = False,
    ) -> None:
        self.arithmetic = arithmetic
        self._config = config
        self._is_reference = is_reference
        take = _Weights(config, tensors, arithmetic, is_reference)
        device = tensors[EMBED].device
        self.weight_bytes = weight_bytes(config, arithmetic, on_cpu=device.type == "cpu")

        first, last = f"{STAGES}0.", f"{STAGES}{config.stages - 1}."
        # Every stage projects the context with weights of its own: one product for all, of which each has its rows.
        self._latents = take.fp8_of([f"{STAGES}{stage}.attn.wkv" for stage in range(config.stages)])
        self._stages = [_stage(take, f"{STAGES}{index}.", self._latents_of(index)) for index in range(config.stages)]
        self._latent_norms = torch.stack([stage.attention.latent_norm for stage in self._stages])
        self._main = take.fp8(first + "main_proj")
        self._main_norm = take.float32(first + "main_norm.weight")
        self._norm = take.float32(last + "norm.weight")
        self._head_mix: HyperHead | None = None
        if not config.is_v41:
            self._head_mix = HyperHead(
                fn=take.float32(last + "hc_head_fn"),
                base=take.float32(last + "hc_head_base"),
                scale=take.float32(last + "hc_head_scale"),
                norm_eps=config.rms_norm_eps,
                eps=config.hc_eps,
            )
        self.confidence: ConfidenceHead | None = ConfidenceHead(
            take.float32(last + "confidence_head.proj.weight"), None, with_markov=True
        )
        self._logits = Float32Logits()
        w1, w2 = config.markov_names
        self.markov: MarkovHead | None = VanillaMarkov(
            take.carried(w1), take.vocabulary(w2)[:vocab_size], 1.0, self._logits
        )
        self._embedding = take.carried(EMBED)
        # Ids past the target's own vocabulary must never win an argmax.
        self._head = take.vocabulary(HEAD)[:vocab_size]
        assert not tensors, f"weights without a use: {sorted(tensors)}"
        self._first_copy = torch.zeros((1, config.hc_mult), dtype=torch.float32, device=device)
        self._first_copy[0, 0] = 1.0
        self._streams: Streams = PlainStreams(arithmetic, config.rms_norm_eps)
        self._fused: FusedSublayers | None = None
        if arithmetic.fused_streams is not None and config.hc_mult == FUSED_COPIES:
            self._streams = arithmetic.fused_streams(arithmetic, config.rms_norm_eps)
            if arithmetic.fused_sublayers is not None and not is_reference:
                self._fused = arithmetic.fused_sublayers(config, self._stages, arithmetic.dtype)
        # Computed on the CPU and moved: a device's own pow may differ in the last bit.
        exponents = torch.arange(0, config.rope_head_dim, 2, dtype=torch.float32) / config.rope_head_dim
        self._inverse_frequency = (1.0 / config.rope_theta**exponents).to(device)

    def project_context(self, rows: Tensor, positions: Tensor) -> Tensor:
        config, arithmetic = self._config, self.arithmetic
        if self._fused is not None:
            return self._fused.context_entries(
                rows, self._main, self._main_norm, self._latents, self._latent_norms, self._rotation(positions)
            )
        combined = arithmetic.wide_rms_norm(self._main(rows), self._main_norm, config.rms_norm_eps)
        latents = self._latents(combined).view(-1, config.stages, config.head_dim)
        latents = arithmetic.wide_rms_norm(latents, self._latent_norms, config.rms_norm_eps)
        return self._entry(latents, self._rotation(positions)).transpose(0, 1)

    def block(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        """The last stream's collapse, in front of the norm: the confidence reads it so, the logits norm it."""
        return self._through_stages(tokens, positions, context)

    def routing_margins(self, tokens: Tensor, positions: Tensor, context: BlockContext) -> Tensor:
        margins: list[Tensor] = []
        self._through_stages(tokens, positions, context, margins)
        return torch.stack(margins).amin(dim=0).view_as(tokens).amin(dim=-1)

    def _through_stages(
        self, tokens: Tensor, positions: Tensor, context: BlockContext, margins: list[Tensor] | None = None
    ) -> Tensor:
        """`block`; takes note in `margins` of each stage's, [B * Q]."""
        streams = self._streams
        rotation = self._rotation(positions)
        steps = [
            step
            for index, stage in enumerate(self._stages)
            for step in ((index, stage.attention_mixes, stage.attention_norm), (index, stage.moe_mixes, stage.moe_norm))
        ]
        connections = [connection for _, connection, _ in steps]
        stream, before = streams.enter(tokens.flatten(), self._embedding, connections[0]), self._first_copy
        for (index, connection, norm), following in zip(steps, [*connections[1:], self._head_mix], strict=True):
            x, mixes = streams.sublayer_input(stream, connection, before if self._config.is_v41 else None, norm)
            stage = self._stages[index]
            if connection is stage.attention_mixes:
                output = self._attend(index, x.view(*tokens.shape, -1), rotation, context)
            else:
                if margins is not None:
                    margins.append(stage.router.margins(x))
                output = self._mix_experts(index, x)
            stream = streams.advance(output, stream, mixes, following)
            before = mixes.pre
        return streams.leave(stream, self._head_mix, before).view(*tokens.shape, -1)

    def base_logits(self, hidden: Tensor) -> Tensor:
        normed = self.arithmetic.wide_rms_norm(hidden, self._norm, self._config.rms_norm_eps)
        return self._logits.linear(normed, self._head)

    def _attend(self, index: int, x: Tensor, rotation: Rotation, context: BlockContext) -> Any:
        """What `advance` takes of x [B, Q, D]."""
        config, arithmetic = self._config, self.arithmetic
        if self._fused is not None:
            return self._fused.attend(self._stages[index], index, x.flatten(0, 1), rotation, context)
        attention = self._stages[index].attention
        query = arithmetic.wide_rms_norm(attention.query_down(x), attention.query_norm, config.rms_norm_eps)
        query = attention.query_up(query).view(*x.shape[:2], config.num_heads, config.head_dim)
        if not config.is_v41:
            query = arithmetic.wide_rms_norm(query, None, config.rms_norm_eps)
        query = self._rotate(query, rotation)
        own = arithmetic.wide_rms_norm(attention.latent(x), attention.latent_norm, config.rms_norm_eps)
        entries = context.gather(index, self._entry(own.unsqueeze(-2), rotation).squeeze(-2))
        attended = attend_with_sink(query, entries, context.bias, attention.sink, config.head_dim**-0.5)
        # The value is the key, rotation included; turned back by the query's own position only distances remain.
        attended = self._rotate(arithmetic.round(attended), Rotation(rotation.cos, -rotation.sin))
        grouped = attended.reshape(-1, config.o_groups, attention.output_down.shape[1]).transpose(0, 1)
        output = arithmetic.round(torch.bmm(grouped, attention.output_down)).transpose(0, 1)
        return attention.output_up(output.reshape(len(output), -1))

    def _mix_experts(self, index: int, x: Tensor) -> Any:
        """What `advance` takes of x [T, D]."""
        stage = self._stages[index]
        if self._fused is not None:
            return self._fused.mix_experts(stage, index, x)
        return self.arithmetic.round(stage.experts(x, stage.router(x)) + stage.shared(x).float())

    def _latents_of(self, stage: int) -> QuantisedLinear:
        rows = slice(stage * self._config.head_dim, (stage + 1) * self._config.head_dim)
        return self._latents.part(rows)

    def _entry(self, latents: Tensor, rotation: Rotation) -> Tensor:
        """What is kept of normed latents [..., n, d]: rotated, in the reference mode as fp8 keeps it."""
        rotated = self._rotate(latents, rotation)
        if not self._is_reference:
            return rotated
        if self._config.is_v41:
            return self.arithmetic.round(through_fp8(rotated, V41_KV_GROUP))
        straight = self._config.head_dim - self._config.rope_head_dim
        kept = self.arithmetic.round(through_fp8(rotated[..., :straight], V4_KV_GROUP))
        return torch.cat((kept, rotated[..., straight:]), dim=-1)

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """RoPE on the last dimensions of [..., n, d], pairs of neighbours."""
        straight = self._config.head_dim - self._config.rope_head_dim
        rotated = self.arithmetic.rotate(x[..., straight:], *rotation, is_neox=False)
        return torch.cat((x[..., :straight], rotated), dim=-1)

    def _rotation(self, positions: Tensor) -> Rotation:
        """[...] -> [..., 1, rotated / 2], not rounded."""
        return Rotation(*self.arithmetic.rotation(positions, self._inverse_frequency, is_rounded=False))


class _Weights:
    """Takes tensors out of a checkpoint's and makes of them what the model computes with."""

    def __init__(
        self, config: DeepseekV4Config, tensors: dict[str, Tensor], arithmetic: Arithmetic, is_reference: bool
    ) -> None:
        self.config = config
        self.arithmetic = arithmetic
        # Of the inputs of quantised products.
        self.group = config.fp8_block if is_reference else None
        self._tensors = tensors

    def float32(self, name: str) -> Tensor:
        return self._tensors.pop(name).float()

    def carried(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self.arithmetic.dtype).to(self.arithmetic.carrier)

    def vocabulary(self, name: str) -> Tensor:
        """Of a product whose result is float32: a CPU can make that of float32 weights only."""
        weight = self.carried(name)
        return weight.float() if weight.device.type == "cpu" else weight

    def fp8(self, name: str) -> QuantisedLinear:
        return QuantisedLinear(self.decoded(name), self.group, self.arithmetic)

    def fp8_of(self, names: list[str]) -> QuantisedLinear:
        """Several with the same input, one below the other."""
        return QuantisedLinear(torch.cat([self.decoded(name) for name in names]), self.group, self.arithmetic)

    def decoded(self, name: str) -> Tensor:
        weight, scale = self._tensors.pop(name + ".weight"), self._tensors.pop(name + ".scale")
        return _checked(name, decode_fp8(weight, scale, self.config.fp8_block, self.arithmetic.carrier))

    def experts(self, prefix: str) -> RoutedExperts:
        """The routed experts under `prefix`: packed as they are where the arithmetic can, else each decoded into its place."""
        config = self.config
        kind = self.arithmetic.packed_experts
        if kind is not None and self._tensors[f"{prefix}0.w1.scale"].dtype == torch.float8_e8m0fnu:
            matrices = (self.packed(prefix, name) for name in ("w1", "w3", "w2"))
            return kind(*matrices, config.swiglu_limit, self.group, self.arithmetic)
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        device = self._tensors[f"{prefix}0.w1.weight"].device
        dtype = self.arithmetic.carrier
        gate_up = torch.empty((config.experts, 2 * inner, hidden), dtype=dtype, device=device)
        down = torch.empty((config.experts, hidden, inner), dtype=dtype, device=device)
        for expert in range(config.experts):
            for name, place in (("w1", gate_up[expert, :inner]), ("w3", gate_up[expert, inner:]), ("w2", down[expert])):
                full = f"{prefix}{expert}.{name}"
                packed, scale = self._tensors.pop(full + ".weight"), self._tensors.pop(full + ".scale")
                place.copy_(_checked(full, decode_fp4(packed, scale, FP4_GROUP, dtype)))
        return Experts(gate_up, down, config.swiglu_limit, self.group, self.arithmetic)

    def packed(self, prefix: str, name: str) -> Iterator[tuple[Tensor, Tensor]]:
        """One matrix of every routed expert under `prefix` and its scales, uint8, one expert after the other."""
        for expert in range(self.config.experts):
            full = f"{prefix}{expert}.{name}"
            weight, scale = self._tensors.pop(full + ".weight"), self._tensors.pop(full + ".scale")
            # Codes are numbers, all of them; a scale may be none.
            yield weight.view(torch.uint8), _checked(full, scale).view(torch.uint8)

    def hyper_connection(self, prefix: str) -> HyperConnection:
        config = self.config
        return HyperConnection(
            fn=self.float32(prefix + "_fn"),
            base=self.float32(prefix + "_base"),
            scale=self.float32(prefix + "_scale"),
            copies=config.hc_mult,
            iterations=config.hc_sinkhorn_iters,
            norm_eps=config.rms_norm_eps,
            eps=config.hc_eps,
        )


def _stage(take: _Weights, prefix: str, latent: QuantisedLinear) -> Stage:
    config = take.config
    attention, moe = prefix + "attn.", prefix + "ffn."
    return Stage(
        attention_mixes=take.hyper_connection(prefix + "hc_attn"),
        attention_norm=take.float32(prefix + "attn_norm.weight"),
        attention=Attention(
            query_down=take.fp8(attention + "wq_a"),
            query_norm=take.float32(attention + "q_norm.weight"),
            query_up=take.fp8(attention + "wq_b"),
            latent=latent,
            latent_norm=take.float32(attention + "kv_norm.weight"),
            sink=take.float32(attention + "attn_sink"),
            output_down=take.decoded(attention + "wo_a").view(config.o_groups, config.o_lora_rank, -1).mT,
            output_up=take.fp8(attention + "wo_b"),
        ),
        moe_mixes=take.hyper_connection(prefix + "hc_ffn"),
        moe_norm=take.float32(prefix + "ffn_norm.weight"),
        router=Router(
            weight=take.float32(moe + "gate.weight"),
            bias=take.float32(moe + "gate.bias"),
            per_token=config.experts_per_token,
            scaling=config.routed_scaling_factor,
        ),
        experts=take.experts(moe + "experts."),
        shared=SharedExpert(
            gate_up=take.fp8_of([moe + "shared_experts.w1", moe + "shared_experts.w3"]),
            down=take.fp8(moe + "shared_experts.w2"),
            limit=config.swiglu_limit,
            arithmetic=take.arithmetic,
        ),
    )


def _checked(name: str, decoded: Tensor) -> Tensor:
    if not bool(decoded.float().isfinite().all()):
        raise CheckpointError(f"{name}: a NaN in the weight or its scale; the file is damaged")
    return decoded


def footprint(config: DeepseekV4Config, arithmetic: Arithmetic, device: torch.device) -> Footprint:
    """`DraftModel.weight_bytes`, and the packed experts of a stage that wait to be decoded, or to be laid side by side.

    A CPU takes the memory of what is decoded only as it is written to, while what was packed is given back.
    """
    on_cpu = device.type == "cpu"
    matrix = config.experts * config.moe_intermediate_size * config.hidden_size // 2
    making = 0 if on_cpu else 2 * matrix if arithmetic.packed_experts is not None else 3 * matrix
    return Footprint(weight_bytes(config, arithmetic, on_cpu=on_cpu), making)


def weight_bytes(config: DeepseekV4Config, arithmetic: Arithmetic, *, on_cpu: bool) -> int:
    """Memory of the weights as this module holds them, in both modes; from the config alone.

    What was quantised takes the carrier's size, but for experts that stay packed; the vocabulary's projections float32 on a
    CPU, and the small rest float32, but the routers beside packed experts in the carrier's too.
    """
    is_packed = arithmetic.packed_experts is not None
    carrier = arithmetic.carrier.itemsize
    projection = 4 if on_cpu else carrier
    vocabulary = (EMBED, HEAD, *config.markov_names)
    total = config.vocab_size * (config.hidden_size + config.markov_rank) * (carrier + projection)
    shapes = config.tensor_shapes()
    for name, shape in shapes.items():
        count = math.prod(shape)
        if is_packed and ".experts." in name:
            total += count
        elif name in vocabulary or name.endswith(".scale"):
            continue
        elif ".experts." in name:
            total += 2 * count * carrier
        elif name.removesuffix(".weight") + ".scale" in shapes:
            total += count * carrier
        else:
            total += count * 4
            if is_packed and carrier < 4 and name.endswith("gate.weight"):
                total += count * carrier
    return total
