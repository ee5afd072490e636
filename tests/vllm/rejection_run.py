"""vLLM's own rejection sampler, fed with drafts as a worker draws them: is what comes out distributed as the target's tokens are?

Target and drafter are tables: the next token's distribution by the token before. So every token of a stream has a known
distribution, whatever was drafted, accepted and resampled, and so has every pair. Prints the figures as one line of JSON.
Its kernels are the CPU engine's, bit for bit what Triton's interpreter makes of vLLM's own and a hundred times as fast, or
those under the interpreter. A process of its own, because Triton decides at its import whether it interprets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from types import SimpleNamespace

import torch

import farspark_vllm_cpu_engine.plugin
from farspark.engine.shape import ModelShape
from farspark.engine.vllm.proposal import Proposal
from farspark.engine.vllm.remote import RemoteDrafts
from farspark.worker.models.heads import SUPPORT, draw, draw_uniforms

VOCAB, N = 48, 3
PLANTS = ("none", "other-q", "greedy-drafts", "one-hot")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--draws", type=int, required=True)
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--plant", choices=PLANTS, default="none")
    parser.add_argument("--interpreted", action="store_true", help="vLLM's kernels under Triton's interpreter")
    options = parser.parse_args()
    if not options.interpreted:
        farspark_vllm_cpu_engine.plugin.register()
    # Streams of equal length: to stop at a number of tokens would favour those that were accepted.
    streams = max(64, options.draws // 64)
    length = -(-options.draws // streams)
    print(json.dumps({"seed": options.seed} | judge(*run(streams, length, options.seed, options.plant))))


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [V, V] each: log p of the target, as it is sampled from; the drafter's logits before the temperature."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 2
    drafter = target + torch.randn(VOCAB, VOCAB, generator=generator)
    return torch.log_softmax(target, dim=1), drafter


def run(streams: int, length: int, seed: int, plant: str) -> tuple[torch.Tensor, torch.Tensor]:
    """log p [V, V], and the tokens of all streams int64 [streams, length + 1], the first given."""
    from vllm.triton_utils import tl
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils

    # The one function of a GPU's library that the kernels call, for which the interpreter has no code.
    rejection_sampler_utils.tldevice = SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    log_p, drafter = tables(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    temperatures = torch.tensor([0.7, 1.0, 1.4])[torch.arange(streams) % 3]
    seeds = torch.randint(-(2**62), 2**62, (streams,), generator=generator)
    tokens = torch.zeros(streams, length + N + 2, dtype=torch.int64)
    tokens[:, 0] = torch.arange(streams) % VOCAB
    done = torch.zeros(streams, dtype=torch.int64)  # tokens after the given one
    shape = ModelShape(
        num_drafts=N,
        vocab_size=VOCAB,
        hidden_size=1,
        taps=1,
        slots=streams,
        context=1,
        ring=1,
        max_position=1 << 20,
        support=SUPPORT,
    )
    proposal = Proposal(shape, torch.device("cpu"), is_shared=False, is_divided=True)
    while (done < length).any():
        slots = (done < length).nonzero().squeeze(1)
        n = len(slots)
        anchors = 100 + done[slots]
        last = tokens[slots, done[slots]]
        drafts, support, q = draft(drafter, last, temperatures[slots], draw_uniforms(seeds[slots], anchors, N), plant)
        proposal.put(
            slots,
            RemoteDrafts(
                tokens=drafts.int(),
                confidences=torch.ones(n, N),
                ok=torch.ones(n, dtype=torch.bool),
                depths=torch.full((n,), N, dtype=torch.int32),
                sampled=torch.full((n,), plant != "one-hot"),
                support=support.int(),
                q=q,
            ),
            temperatures,
        )
        rows = torch.cat((last.unsqueeze(1), drafts), dim=1)  # [n, N + 1]: the token in front of each row of logits
        local = torch.arange(N + 1).repeat(n)
        sampled, counts = rejection_sampler_utils.rejection_sample(
            log_p[rows.reshape(-1)].contiguous(),
            proposal.logits,
            rows.reshape(-1),
            torch.arange(n + 1, dtype=torch.int32) * (N + 1),
            (anchors.unsqueeze(1) + torch.arange(N + 1)).reshape(-1),
            slots.int(),
            slots.int().repeat_interleave(N + 1),
            local.int(),
            temperatures,
            seeds,
            N,
        )
        for slot, ids, count in zip(slots.tolist(), sampled.tolist(), counts.tolist(), strict=True):
            at = int(done[slot]) + 1
            tokens[slot, at : at + count] = torch.tensor(ids[:count])
        done[slots] += counts.long()
    return log_p, tokens[:, : length + 1]


def draft(
    drafter: torch.Tensor, last: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, plant: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens int64 [n, N], support int64 and q float32 [n, N, SUPPORT]."""
    found = []
    for step in range(N):
        one = draw(drafter[last], temperatures, uniforms[:, step])
        if plant == "other-q":
            one = one._replace(q=torch.softmax(one.q.log() * 0.5, dim=1))
        if plant == "greedy-drafts":
            one = one._replace(tokens=one.support[:, 0])
        last = one.tokens
        found.append(one)
    drafts, support, q = (torch.stack([one[part] for one in found], dim=1) for part in range(3))
    return drafts, support, q


def judge(log_p: torch.Tensor, tokens: torch.Tensor) -> dict[str, float]:
    """How far marginals and pairs are from p: chi-square in deviations from its expectation, and total variation."""
    before, after = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    p = log_p.double().exp()
    pairs = torch.bincount(before * VOCAB + after, minlength=VOCAB * VOCAB).view(VOCAB, VOCAB).double()
    expected = pairs.sum(dim=1, keepdim=True) * p
    return {
        "draws": len(after),
        "pairs_z": deviations(pairs, expected, p),
        "marginals_z": deviations(pairs.sum(dim=0), expected.sum(dim=0), expected.sum(dim=0) / len(after)),
        "marginals_tv": float((pairs.sum(dim=0) - expected.sum(dim=0)).abs().sum() / 2 / len(after)),
        # Given the token before, weighted by how often it was.
        "pairs_tv": float((pairs - expected).abs().sum() / 2 / len(after)),
    }


def deviations(seen: torch.Tensor, expected: torch.Tensor, p: torch.Tensor) -> float:
    """Of chi-square over the cells in which five or more are expected; `p` of each cell in its row."""
    likely = expected >= 5
    chi2 = float(((seen - expected).square() / expected)[likely].sum())
    freedom = float((1 - p)[likely].sum())
    return (chi2 - freedom) / math.sqrt(2 * freedom)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    main()
