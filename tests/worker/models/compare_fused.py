"""The fused kernels against `Arithmetic` and the plain greedy loop, in this process: on a GPU, or under TRITON_INTERPRET=1.

Prints one line for each comparison and ends with 1 at the first difference above its bound. A process of its own, because
Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tests.fakes.tiny_deepseek import write_tiny_deepseek
from torch import Tensor

from farspark.worker.checkpoint import load_checkpoint
from farspark.worker.context import ContextShape, ContextStore
from farspark.worker.models import fused_streams
from farspark.worker.models.base import Arithmetic
from farspark.worker.models.dense import seen
from farspark.worker.models.experts import Experts, Routing
from farspark.worker.models.families import DEFAULT_OPTIONS, build_model
from farspark.worker.models.fused import FusedArithmetic, greedy_chain
from farspark.worker.models.heads import VanillaMarkov, lowest_of_equals
from farspark.worker.models.hyper_connections import HyperConnection, collapse, spread
from farspark.worker.models.packed_experts import PackedExperts
from farspark.worker.models.quantised import decode_fp4
from farspark.worker.ring_attention import attend_ring

EPS = 1e-6


class Cases:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.plain = Arithmetic(dtype, dtype)
        self.fused = FusedArithmetic(dtype, dtype)
        self.dtype = dtype
        self.device = device
        self._rng = torch.Generator().manual_seed(3)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._rng) * scale).to(self.device, self.dtype)

    def rotation(self, *shape: int) -> tuple[Tensor, Tensor]:
        angles = torch.randn(shape, generator=self._rng) * 3
        return tuple(one.to(self.dtype).float().to(self.device) for one in (angles.cos(), angles.sin()))  # type: ignore[return-value]

    def pairs(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for rows, width in ((1, 96), (5, 128), (3, 2560)):
            x, residual, weight = self.random(rows, 2, width), self.random(rows, 2, width), self.random(width)
            yield f"norm {rows}x{width}", self.plain.rms_norm(x, weight, EPS), self.fused.rms_norm(x, weight, EPS)
            for name, a, b in zip(
                ("normed", "sum"),
                self.plain.add_rms_norm(x, residual, weight, EPS),
                self.fused.add_rms_norm(x, residual, weight, EPS),
                strict=True,
            ):
                yield f"add, norm {rows}x{width}: {name}", a, b
            gate, up = x.repeat(1, 1, 2).chunk(2, dim=-1)
            yield f"silu {rows}x{width}", self.plain.silu_times(gate, up), self.fused.silu_times(gate, up)
        for is_neox in (True, False):
            for batch, length, heads, dim in ((1, 5, 4, 64), (3, 2, 2, 80)):
                cos, sin = self.rotation(batch, length, 1, dim // 2)
                x, weight = self.random(batch, length, heads, dim), self.random(dim)
                expected = self.plain.norm_rotate(x, weight, EPS, cos, sin, is_neox=is_neox)
                yield "rotate a block", expected, self.fused.norm_rotate(x, weight, EPS, cos, sin, is_neox=is_neox)
                both = self.random(batch, length, 2, heads, dim)
                expected = self.plain.norm_rotate_keys(both, weight, EPS, cos, sin, is_neox=is_neox)
                actual = self.fused.norm_rotate_keys(both, weight, EPS, cos, sin, is_neox=is_neox)
                yield "keys of a block", expected, actual
                # As a context's rows come out of one product for all layers.
                layers = self.random(length, batch, 2, heads, dim).transpose(0, 1)
                weights = self.random(batch, dim)
                cos, sin = cos[0], sin[0]
                expected = self.plain.norm_rotate_keys(layers, weights, EPS, cos, sin, is_neox=is_neox)
                actual = self.fused.norm_rotate_keys(layers, weights, EPS, cos, sin, is_neox=is_neox)
                yield "keys of a context", expected, actual

    def chains(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for requests, steps, vocabulary, rank, scale in (
            (1, 3, 50, 16, 1.0),
            (5, 4, 200, 24, 0.5),
            (19, 2, 130, 0, 1.0),
        ):
            base = self.random(requests, steps, vocabulary, scale=3.0)
            if requests > 2:
                base[2, 1, 7] = float("nan")
                base[0] = torch.round(base[0])  # equal maxima
            anchors = torch.randint(0, vocabulary, (requests,), generator=self._rng).to(self.device)
            w1 = self.random(vocabulary, rank) if rank else None
            w2 = self.random(vocabulary, rank) if rank else None
            markov = None if w1 is None or w2 is None else VanillaMarkov(w1, w2, scale, self.plain)
            previous, tokens, tops = anchors, [], []
            # The kernel's own tokens are forced, so that one near tie is one difference and not a chain of them.
            chosen, best, embedded = greedy_chain(base, anchors, w1, w2, scale)
            for step in range(steps):
                logits = base[:, step]
                if markov is not None:
                    assert embedded is not None
                    yield "embedded", markov.embed(previous), embedded[:, step]
                    logits = self.plain.round(logits + markov.bias(markov.embed(previous)))
                ids, top = lowest_of_equals(logits)
                tokens.append(ids)
                tops.append(top)
                previous = chosen[:, step]
            name = f"chain of {requests}x{steps}, {vocabulary} tokens, rank {rank}"
            yield f"{name}: logits", torch.stack(tops, 1), best
            same = (torch.stack(tokens, 1) == chosen).float().mean().item()
            share = 1.0 if self.dtype == torch.float32 else 0.98
            yield f"{name}: {same:.3f} of the tokens", torch.tensor(same >= share), torch.tensor(True)

    def attention(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        slots = torch.tensor([3, 0, 4, 1], device=self.device)
        for heads, kv_heads, dim, context, length in ((4, 2, 64, 40, 5), (8, 2, 80, 700, 3), (5, 1, 128, 512, 7)):
            shape = ContextShape(1, (2, kv_heads, dim), slots=5, context=context, block=length, dtype=self.dtype)
            plain, fused = ContextStore(shape, self.device), ContextStore(shape, self.device, attend_ring)
            anchors = torch.tensor([0, context + 17, context // 2, 9], device=self.device)
            visible_from = torch.tensor([0, 5, context // 4, 9], device=self.device)
            held = self.random(5 * context, 2, kv_heads, dim)
            plain.entries[0, : len(held)] = held
            # Whatever is not visible must not be read.
            is_seen = torch.zeros(len(held), dtype=torch.bool)
            for slot, anchor, first in zip(slots.tolist(), anchors.tolist(), visible_from.tolist(), strict=True):
                for position in range(max(first, anchor - context), anchor):
                    is_seen[slot * context + position % context] = True
            held[~is_seen.to(self.device)] = float("nan")
            fused.entries[0, : len(held)] = held
            query, own = self.random(4, length, heads, dim), self.random(4, length, 2, kv_heads, dim)
            # The kernel knows no window: a layer that has one must not come to it.
            window = seen(length, context, context // 4, True, as_trained=False, device=self.device)
            for kind, mask in (("full", None), ("windowed", window)):
                answers = [
                    self.plain.attend(view, 0, query, own, dim**-0.5, mask)
                    for view in (store.view(slots, anchors, visible_from, context, length) for store in (plain, fused))
                ]
                yield f"{kind} attention of {heads} heads on {kv_heads}, context {context}", answers[0], answers[1]

    def experts(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for count, inner, width, tokens, per_token in ((6, 96, 160, 7, 2), (4, 64, 64, 40, 3)):
            packed = [
                (self.bytes(256, count, rows, columns // 2), self.bytes(6, count, rows, columns // 32) + 118)
                for rows, columns in ((inner, width), (inner, width), (width, inner))
            ]
            gate, up, down = (decode_fp4(one, 2.0 ** (scale.float() - 127), 32, self.dtype) for one, scale in packed)
            plain = Experts(torch.cat((gate, up), dim=1), down, 10.0, None, self.plain)
            fused = PackedExperts(packed[0], packed[1], packed[2], 10.0, None, self.fused)
            chosen = [torch.randperm(count, generator=self._rng)[:per_token] for _ in range(tokens)]
            weights = torch.rand(tokens, per_token, generator=self._rng).to(self.device)
            routing = Routing(torch.stack(chosen).to(self.device), weights)
            x = self.random(tokens, width)
            yield f"{count} experts, {tokens} tokens", plain.looped(x, routing), fused(x, routing)

    def streams(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        for batch, length, width in ((1, 5, 96), (3, 2, 700)):
            stream = self.random(batch, length, 4, width)
            connection = HyperConnection(
                fn=self.random(24, 4 * width, scale=(4 * width) ** -0.5).float(),
                base=self.random(24).float(),
                scale=self.random(3).float(),
                copies=4,
                iterations=20,
                norm_eps=EPS,
                eps=EPS,
            )
            expected, actual = connection(stream), fused_streams.mixes(connection, stream)
            for name, a, b in zip(("pre", "post", "comb"), expected, actual, strict=True):
                yield f"{name} of {batch}x{length}x{width}", a, b
            collapsed = self.plain.round(collapse(stream, expected.pre))
            yield "collapse", collapsed, fused_streams.collapse(stream, expected.pre, None, EPS, self.dtype)
            weight = self.random(width).float()
            normed = self.plain.wide_rms_norm(collapsed, weight, EPS)
            yield "collapse, norm", normed, fused_streams.collapse(stream, expected.pre, weight, EPS, self.dtype)
            y = self.random(batch, length, width)
            mixed = self.plain.round(spread(y, stream, expected))
            yield "spread", mixed, fused_streams.spread(y, stream, expected, self.dtype)

    def whole_models(self, folder: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
        for version in ("v4", "v41"):
            checkpoint = write_tiny_deepseek(folder / version, version)
            answers = []
            for arithmetic in (self.plain, self.fused):
                loaded = load_checkpoint(
                    checkpoint, place=lambda name, tensor, as_stored: tensor.to(self.device, copy=True)
                )
                model = build_model(loaded, arithmetic, DEFAULT_OPTIONS)
                shape = ContextShape(loaded.config.context_layers, loaded.config.context_entry, 2, 16, 5, self.dtype)
                store = ContextStore(shape, self.device)
                tokens = torch.tensor([[9, 1, 1, 1, 1]], device=self.device)
                anchors = torch.tensor([7], device=self.device)
                rows = torch.linspace(-2, 2, 7 * loaded.config.row_bytes // 2).view(7, -1).to(self.device, self.dtype)
                where, positions = torch.arange(16, 23, device=self.device), torch.arange(7, device=self.device)
                store.write(where, model.project_context(rows, positions))
                slots = torch.ones_like(anchors)
                view = store.view(slots, anchors, torch.zeros_like(anchors), 16, 5)
                hidden = model.block(tokens, anchors.unsqueeze(1) + torch.arange(5, device=self.device), view)
                answers.append(model.base_logits(hidden))
            yield f"logits of a whole {version}", answers[0], answers[1]

    def bytes(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(0, limit, shape, generator=self._rng, dtype=torch.uint8).to(self.device)


def differs(expected: Tensor, actual: Tensor, dtype: torch.dtype) -> float:
    """The largest difference in steps of the dtype at the value, or at 1 where that is more.

    Infinite where only one of the two is NaN.
    """
    a, b = expected.double(), actual.double()
    if not torch.equal(a.isnan(), b.isnan()) or a.shape != b.shape:
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    step = torch.finfo(dtype).eps * torch.maximum(a.abs(), torch.ones_like(a))
    return float(((a - b).abs() / step).max())


def main(device: torch.device, dtype: torch.dtype, plant: bool) -> int:
    cases = Cases(device, dtype)
    sources = (cases.pairs(), cases.chains(), cases.attention(), cases.experts(), cases.streams())
    with tempfile.TemporaryDirectory() as folder:
        # Whole models in float32 only: in bf16 one rounding may turn a choice of experts.
        whole = (cases.whole_models(Path(folder)),) if dtype == torch.float32 else ()
        return compare([*sources, *whole], dtype, plant)


def compare(sources: Sequence[Iterator[tuple[str, Tensor, Tensor]]], dtype: torch.dtype, plant: bool) -> int:
    # Sums are taken in another order, and a float32 rotation may be fused: a step of bf16, some of float32, and more of them
    # where a whole model lies in between.
    bound = 2.0 if dtype == torch.bfloat16 else 64.0
    for source in sources:
        for name, expected, actual in source:
            allowed = 2048.0 if "whole" in name else bound
            if plant:
                actual = actual + 1
            steps = differs(expected, actual, dtype)
            print(f"{name}: {steps:.2f} steps")
            if not steps <= allowed:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1]), getattr(torch, sys.argv[2]), "plant" in sys.argv))
