"""Tokens per round of a drafter checkpoint on held-out prompts, greedy.

The target answers every prompt greedily first. Greedy speculative decoding emits exactly that text, and the drafter only ever
reads rows of emitted tokens; so all drafts can be made in one go, one block per position, and then the rounds are walked:
each begins at the last emitted token, keeps the drafts that agree with the text, and adds the target's own token.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from attention import BlockDraftMask, Compiled, DocumentMask
from drafter import Drafter, load_drafter
from generate import GREEDY, GenerationSettings, Markers, Writer
from prompts import DEFAULT_SYSTEM, Head, chat_head
from target import Target, load_target

BINS = 10  # of confidence


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures over all rounds."""

    prompts: int
    rounds: int
    tokens: int
    tokens_per_round: float
    survival: list[float]  # [N] share of rounds in which drafts 0..k were all accepted
    acceptance: list[float]  # [N] share of accepted drafts k among rounds whose earlier ones were accepted
    accepted_counts: list[int]  # [N + 1] rounds by number of accepted drafts
    confidence_bins: list[dict[str, float]]  # mean confidence, share accepted and number of drafts per bin
    confidence_error: float  # expected calibration error


def read_tokenizer(target: Path, tokenizer: Path | None) -> Tokenizer:
    """From a tokenizer.json, or out of the GGUF file."""
    if tokenizer is None and target.is_dir():
        tokenizer = target / "tokenizer.json"
    if tokenizer is not None:
        return Tokenizer.from_file(str(tokenizer))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target.parent, gguf_file=target.name).backend_tokenizer


def markers_of(tokenizer: Tokenizer) -> Markers:
    """The turns of the chat template."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    return Markers(
        end_of_turn=tokenizer.token_to_id("<|im_end|>"),
        end_of_text=tokenizer.token_to_id("<|endoftext|>"),
        to_assistant=encode("\n<|im_start|>assistant\n"),
        to_user=encode("\n<|im_start|>user\n"),
    )


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Head]:
    """One user's prompt a line."""
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    return [chat_head(tokenizer, DEFAULT_SYSTEM, line, complete=True) for line in lines]


@torch.no_grad()
def evaluate(
    target: Target, drafter: Drafter, prompts: list[Head], markers: Markers, max_tokens: int, rows_at_once: int
) -> Evaluation:
    """Answer all prompts greedily with at most `max_tokens` tokens each, draft everywhere, walk the rounds."""
    settings = GenerationSettings(
        user_limit=1,
        user_temperature=1.0,
        answer_limits=(max_tokens, max_tokens),
        sampled_share=0.0,
        sampled_temperature=0.0,
        next_turn=0.0,
        long_share=0.0,
    )
    longest = 1 + max(len(head.tokens) for head in prompts) + max_tokens
    length = -(-longest // 128) * 128
    writer = Writer(target, prompts, markers, settings, len(prompts), length)
    packed = writer.write(first_heads=torch.arange(len(prompts), device=target.device))
    # The document at index 1 is the prompt with its answer; what a row does after it is of no interest.
    answered = (packed.first == 1) & (packed.kind == GREEDY)
    rounds: list[tuple[int, int, list[float]]] = []  # accepted, emitted, confidences
    for begin in range(0, len(prompts), rows_at_once):
        part = slice(begin, begin + rows_at_once)
        drafts, confidences = _draft_everywhere(target, drafter, packed.ids[part].long(), answered[part], max_tokens)
        for row in range(drafts.shape[0]):
            text = packed.ids[part][row][answered[part][row]].tolist()
            rounds += _walk(text, markers.end_of_turn, drafts[row].tolist(), confidences[row].tolist())
    return _summary(len(prompts), drafter.config.block_size, rounds)


def _draft_everywhere(
    target: Target, drafter: Drafter, ids: Tensor, answered: Tensor, max_tokens: int
) -> tuple[Tensor, Tensor]:
    """Drafts and confidences with the j-th answer token as anchor. ids, answered [B, S] -> 2 of [B, max_tokens, N]"""
    rows, length = ids.shape
    plain = Compiled(enabled=False)
    first = torch.ones_like(ids)
    first[:, 0] = 0
    mask = DocumentMask(rows, length, ids.device).set(first)
    taps, _ = target.forward(ids, mask, drafter.config.taps)
    # Answers are contiguous; anchors past the end of one draft from nothing that matters.
    start = answered.int().argmax(1, keepdim=True)
    anchors = (start + torch.arange(max_tokens, device=ids.device)).clamp(max=length - 1)
    size = drafter.config.block_size
    blocks = BlockDraftMask(rows, length, max_tokens, size, ids.device).set(anchors, torch.ones_like(anchors))
    anchor_ids = ids.gather(1, anchors)
    embedded = F.embedding(drafter.block_ids(anchor_ids), target.embed)
    hidden = drafter(taps, mask.positions, embedded, blocks, plain).unflatten(1, (max_tokens, size))
    tokens, confidences = drafter.draft(hidden.flatten(0, 1), anchor_ids.flatten(), target.embed)
    return tokens.unflatten(0, (rows, max_tokens)), confidences.unflatten(0, (rows, max_tokens))


def _walk(
    text: list[int], end_of_turn: int, drafts: list[list[int]], confidences: list[list[float]]
) -> list[tuple[int, int, list[float]]]:
    """The rounds of one answer. Rounds that the length limit would cut short are left out."""
    rounds = []
    at, ended = 0, text[-1] == end_of_turn
    while at < len(text) - 1:
        left = text[at + 1 :]
        block = drafts[at]
        if not ended and len(left) <= len(block):
            break
        accepted = 0
        while accepted < min(len(block), len(left)) and block[accepted] == left[accepted]:
            accepted += 1
        emitted = min(accepted + 1, len(left))
        rounds.append((accepted, emitted, confidences[at]))
        at += emitted
    return rounds


def _summary(prompts: int, size: int, rounds: list[tuple[int, int, list[float]]]) -> Evaluation:
    counts = [sum(1 for accepted, _, _ in rounds if accepted == n) for n in range(size + 1)]
    reached = [sum(counts[k:]) for k in range(size + 1)]  # rounds with at least k accepted
    tokens = sum(emitted for _, emitted, _ in rounds)
    seen = [(confidence[k], k < accepted) for accepted, _, confidence in rounds for k in range(min(accepted + 1, size))]
    bins, error = [], 0.0
    for index in range(BINS):
        inside = [(c, a) for c, a in seen if min(int(c * BINS), BINS - 1) == index]
        if inside:
            mean = sum(c for c, _ in inside) / len(inside)
            share = sum(a for _, a in inside) / len(inside)
            bins.append({"confidence": round(mean, 4), "accepted": round(share, 4), "drafts": len(inside)})
            error += abs(mean - share) * len(inside) / len(seen)
    return Evaluation(
        prompts=prompts,
        rounds=len(rounds),
        tokens=tokens,
        tokens_per_round=tokens / len(rounds),
        survival=[round(reached[k + 1] / len(rounds), 4) for k in range(size)],
        acceptance=[round(reached[k + 1] / max(reached[k], 1), 4) for k in range(size)],
        accepted_counts=counts,
        confidence_bins=bins,
        confidence_error=round(error, 4),
    )


def report(result: Evaluation) -> str:
    """A few lines for people."""
    lines = [
        f"tokens per round {result.tokens_per_round:.3f} over {result.rounds} rounds, {result.prompts} prompts",
        "draft            " + " ".join(f"{k:6d}" for k in range(1, len(result.survival) + 1)),
        "accepted, given  " + " ".join(f"{x:6.3f}" for x in result.acceptance),
        "accepted, all    " + " ".join(f"{x:6.3f}" for x in result.survival),
        f"confidence: expected calibration error {result.confidence_error:.4f}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Evaluate a checkpoint, on a CPU or a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    here = Path(__file__).parent
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--target", type=Path, required=True, help="GGUF file or folder of the target")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; by default the target's own")
    parser.add_argument("--prompts", type=Path, default=here / "eval_prompts.txt", help="one prompt a line")
    parser.add_argument("--limit", type=int, help="use only so many prompts")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer")
    parser.add_argument("--rows-at-once", type=int, default=4, help="answers that are drafted for together")
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    parser.add_argument("--output", type=Path, help="write all figures here as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(args.target, device, dtype, Compiled(enabled=device.type == "cuda"))
    drafter = load_drafter(args.checkpoint, target.config, device, dtype)
    tokenizer = read_tokenizer(args.target, args.tokenizer)
    prompts = read_prompts(args.prompts, tokenizer)[: args.limit]
    result = evaluate(target, drafter, prompts, markers_of(tokenizer), args.max_tokens, args.rows_at_once)
    print(report(result))
    if args.output:
        args.output.write_text(json.dumps(asdict(result), indent=1) + "\n")


if __name__ == "__main__":
    main()
