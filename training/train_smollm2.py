"""Train the DSpark drafter of SmolLM2-135M-Instruct, from conversations that the target writes itself.

One run generates the conversations, trains, saves the checkpoint, and evaluates it on prompts that training never saw.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from attention import BlockDraftMask, Compiled, DocumentMask
from drafter import Drafter, DrafterConfig, load_drafter, save_drafter
from evaluate import evaluate, markers_of, read_prompts, read_tokenizer, report
from generate import GREEDY, SAMPLED, GenerationSettings, Markers, Packed, Writer
from losses import BlockLosses, LossWeights, block_losses
from prompts import Head, training_heads
from target import Target, load_target


@dataclass(frozen=True, slots=True)
class Blocks:
    """Anchors of one batch and what their blocks should predict."""

    anchors: Tensor  # [B, A] ascending indices into the rows
    first: Tensor  # [B, A] starts of their documents
    labels: Tensor  # [B, A, N] indices of the predicted tokens, inside the row
    valid: Tensor  # [B, A, N]


def choose_blocks(batch: Packed, anchors: int, block_size: int) -> Blocks:
    """Random anchors among the target's own tokens, each row apart; a block is valid up to the end of its answer."""
    learnt = batch.kind >= GREEDY
    length = batch.ids.shape[1]
    eligible = learnt[:, :-1] & learnt[:, 1:] & (batch.first[:, :-1] == batch.first[:, 1:])
    scores = torch.rand(eligible.shape, device=eligible.device) * eligible
    chosen = scores.topk(anchors, dim=1).indices.sort(dim=1).values
    first = batch.first.gather(1, chosen).long()
    labels = chosen[..., None] + torch.arange(1, block_size + 1, device=chosen.device)
    inside = labels.clamp(max=length - 1)
    flat = inside.flatten(1)
    good = learnt.gather(1, flat) & (batch.first.gather(1, flat) == first.repeat_interleave(block_size, 1))
    valid = good.view_as(labels) & (labels < length) & eligible.gather(1, chosen)[..., None]
    return Blocks(chosen, first, inside, valid.int().cumprod(-1).bool())


class Trainer:
    """One drafter, its optimizer and the fixed masks of one batch shape."""

    def __init__(self, target: Target, drafter: Drafter, args: argparse.Namespace) -> None:
        self._target, self._drafter, self._args = target, drafter, args
        self._loss = LossWeights(args.ce_weight, args.l1_weight, args.confidence_weight, args.decay)
        device, size = target.device, drafter.config.block_size
        self._documents = DocumentMask(args.batch_rows, args.length, device)
        self._blocks = BlockDraftMask(args.batch_rows, args.length, args.anchors, size, device)
        self._compiled = Compiled(enabled=device.type == "cuda")
        self._forward = self._compiled.wrap(drafter.forward)
        self._optimizer = torch.optim.AdamW(
            drafter.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=device.type == "cuda"
        )
        warmup = max(1, round(args.warmup * args.steps))

        def rate(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))

        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)

    @property
    def rate(self) -> float:
        """The learning rate of the next step."""
        return self._optimizer.param_groups[0]["lr"]

    def step(self, batch: Packed) -> BlockLosses:
        """One update from one batch of rows."""
        drafter, target, size = self._drafter, self._target, self._drafter.config.block_size
        ids = batch.ids.long()
        documents = self._documents.set(batch.first)
        taps, final = target.forward(ids, documents, drafter.config.taps)
        blocks = choose_blocks(batch, self._args.anchors, size)
        mask = self._blocks.set(blocks.anchors, blocks.first)
        anchor_ids = ids.gather(1, blocks.anchors)
        labels = ids.gather(1, blocks.labels.flatten(1)).view_as(blocks.labels)
        previous_ids = torch.cat([anchor_ids[..., None], labels[..., :-1]], dim=-1).flatten(0, 1)  # [B A, N]
        teacher_index = (blocks.labels - 1).flatten(1)[..., None].expand(-1, -1, final.shape[-1])
        teacher = final.gather(1, teacher_index).view(-1, size, final.shape[-1])
        embedded = F.embedding(drafter.block_ids(anchor_ids), target.embed)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=target.embed.dtype == torch.bfloat16):
            hidden = self._forward(taps, documents.positions, embedded, mask, self._compiled)
        hidden = hidden.view(-1, size, hidden.shape[-1])
        previous = F.embedding(previous_ids, drafter.markov_head.markov_w1.weight)
        losses = block_losses(
            hidden, previous, drafter.markov_head.markov_w2.weight, drafter.confidence_logits(hidden, previous),
            target.embed, teacher, labels.flatten(0, 1), blocks.valid.flatten(0, 1), self._loss, self._args.rows_at_once,
        )  # fmt: skip
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), self._args.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._schedule.step()
        return losses


def generate(target: Target, heads: list[Head], markers: Markers, args: argparse.Namespace) -> Packed:
    """At least `args.tokens` tokens of packed rows."""
    settings = GenerationSettings(
        user_limit=args.user_limit,
        user_temperature=args.user_temperature,
        answer_limits=(args.answer_min, args.answer_max),
        sampled_share=args.sampled_share,
        sampled_temperature=args.sampled_temperature,
        next_turn=args.next_turn,
        long_share=args.long_share,
    )
    writer = Writer(target, heads, markers, settings, args.generate_rows, args.length)
    batches, begun = [], time.monotonic()
    for index in range(-(-args.tokens // (args.generate_rows * args.length))):
        batches.append(writer.write())
        kind = batches[-1].kind
        learnt = (kind >= GREEDY).float().mean().item()
        made, took = (index + 1) * kind.numel(), time.monotonic() - begun
        print(f"generated {made / 1e6:.1f} M tokens in {took:.1f} s, {learnt:.0%} of them answers", flush=True)
    return Packed(*(torch.cat([getattr(b, name) for b in batches]) for name in ("ids", "first", "kind")))


def rows_of(target: Target, heads: list[Head], markers: Markers, args: argparse.Namespace) -> Packed:
    """Generated rows, kept in a file if the settings name one."""
    if args.rows and args.rows.exists():
        return Packed(*torch.load(args.rows, map_location=target.device))
    data = generate(target, heads, markers, args)
    if args.rows:
        torch.save((data.ids, data.first, data.kind), args.rows)
    return data


def batches_of(data: Packed, rows: int, seed: int) -> Iterator[Packed]:
    """Endless batches; every row once an epoch, in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(data.ids.shape[0], generator=generator).to(data.ids.device)
        for begin in range(0, len(order) - rows + 1, rows):
            yield data.rows(order[begin : begin + rows])


def unseen(prompts: list[Head], data: Packed, markers: Markers) -> list[Head]:
    """The prompts whose whole user's turn occurs nowhere in the training rows."""
    start = markers.to_user[1:]
    kept = []
    for head in prompts:
        tokens = head.tokens
        # The last start of a user's turn in the head; what follows it is the prompt with its end.
        at = max(i for i in range(len(tokens)) if tokens[i : i + len(start)] == start)
        turn = torch.tensor(tokens[at : len(tokens) - len(markers.to_assistant)], device=data.ids.device)
        found = data.ids.unfold(1, 2, 1)[:, : data.ids.shape[1] - len(turn) + 1, 0] == turn[0]
        for offset in range(1, len(turn)):
            found &= data.ids[:, offset : offset + found.shape[1]] == turn[offset]
        if not found.any():
            kept.append(head)
    return kept


def arguments() -> argparse.Namespace:
    """Every setting; the defaults are those of the published checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    here = Path(__file__).parent
    add = parser.add_argument
    add("--target", type=Path, required=True, help="the target's GGUF file, or a folder with its safetensors")
    add("--tokenizer", type=Path, help="tokenizer.json; by default the target's own")
    add("--output", type=Path, required=True, help="folder for the checkpoint, log.jsonl and results.json")
    add("--rows", type=Path, help="file of the generated rows: read if it is there, otherwise written")
    add("--eval-prompts", type=Path, default=here / "eval_prompts.txt", help="held-out prompts, one a line")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    add("--seed", type=int, default=20, help="of heads, sampling, initial weights and order")

    add("--layers", type=int, default=4, help="draft layers")
    add("--intermediate", type=int, default=768, help="width of the draft layers' MLP")
    add("--taps", type=int, nargs="+", default=[1, 10, 19, 28], help="target layers whose outputs are read, 0-based")
    add("--block-size", type=int, default=7, help="tokens drafted a round")
    add("--mask-token", type=int, default=16, help="id of a token that no text has, <|empty_output|>")
    add("--markov-rank", type=int, default=24, help="rank of the Markov head")

    add("--tokens", type=int, default=28_000_000, help="tokens to generate, templates and prompts included")
    add("--heads", type=int, default=32_768, help="different beginnings of documents")
    add("--length", type=int, default=2048, help="tokens of a packed row; the longest context trained on")
    add("--generate-rows", type=int, default=1536, help="rows generated together; 47 MB of cache each")
    add("--user-limit", type=int, default=64, help="longest user's turn")
    add("--user-temperature", type=float, default=1.0, help="temperature of the user's turns")
    add("--answer-min", type=int, default=192, help="shortest limit of an answer")
    add("--answer-max", type=int, default=512, help="longest limit of an answer")
    add("--sampled-share", type=float, default=0.15, help="share of documents with sampled answers, others are greedy")
    add("--sampled-temperature", type=float, default=0.7, help="temperature of the sampled answers")
    add("--next-turn", type=float, default=0.3, help="chance of another turn after an answer")
    add("--long-share", type=float, default=0.12, help="share of rows that begin with a conversation of full length")

    add("--start-from", type=Path, help="checkpoint to go on from; by default the weights start at random")
    add("--steps", type=int, default=8500, help="updates of the whole schedule")
    add("--stop-at", type=int, default=7000, help="end here, with the schedule unfinished")
    add("--batch-rows", type=int, default=8, help="rows of an update")
    add("--anchors", type=int, default=256, help="blocks of a row")
    add("--lr", type=float, default=1.5e-3, help="highest learning rate")
    add("--warmup", type=float, default=0.04, help="share of the steps in which the rate rises; then a cosine to zero")
    add("--weight-decay", type=float, default=0.0, help="of AdamW")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--ce-weight", type=float, default=0.5, help="weight of the cross-entropy")
    add("--l1-weight", type=float, default=0.5, help="weight of the distance of distributions")
    add("--confidence-weight", type=float, default=1.0, help="weight of the confidence's loss")
    add("--decay", type=float, default=4.0, help="position k of a block weighs exp(-k / decay)")
    add("--rows-at-once", type=int, default=8192, help="block positions whose logits exist at one time")

    add("--eval-tokens", type=int, default=256, help="longest answer in the evaluation")
    add("--log-every", type=int, default=100, help="steps between lines of the log")
    add("--save-every", type=int, default=500, help="steps between checkpoints")
    return parser.parse_args()


def train(target: Target, data: Packed, args: argparse.Namespace, begun: float) -> None:
    """Train a new drafter on `data` and save it, with a line of the log now and then."""
    if args.start_from:
        drafter = load_drafter(args.start_from, target.config, target.device, torch.float32).train()
    else:
        config = DrafterConfig(
            args.layers, args.intermediate, tuple(args.taps), args.block_size, args.mask_token, args.markov_rank
        )
        drafter = Drafter(config, target.config).to(target.device)
    print(f"{sum(p.numel() for p in drafter.parameters()):,} parameters", flush=True)
    trainer = Trainer(target, drafter, args)
    batches = batches_of(data, args.batch_rows, args.seed)
    gathered: list[Tensor] = []
    with (args.output / "log.jsonl").open("w") as log:
        for step in range(1, min(args.steps, args.stop_at) + 1):
            losses = trainer.step(next(batches))
            scalars = [losses.cross_entropy, losses.distribution, losses.confidence, losses.expected]
            gathered.append(torch.stack([*scalars, *losses.agreement]).detach())
            if step % args.log_every == 0 or step == 1:
                ce, l1, confidence, expected, *agreement = torch.stack(gathered).mean(0).tolist()
                gathered.clear()
                took = time.monotonic() - begun
                line = {
                    "step": step,
                    "seconds": round(took, 1),
                    "lr": trainer.rate,
                    "cross_entropy": round(ce, 4),
                    "l1": round(l1, 4),
                    "confidence": round(confidence, 4),
                    "tokens_per_round_forced": round(expected, 4),
                    "agreement": [round(x, 4) for x in agreement],
                }
                log.write(json.dumps(line) + "\n")
                log.flush()
                print(
                    f"step {step} {took:.0f} s  ce {ce:.3f}  l1 {l1:.3f}  conf {confidence:.3f}  forced {expected:.3f}",
                    flush=True,
                )
            if step % args.save_every == 0:
                save_drafter(drafter, args.output / "checkpoint", {"num_anchors": args.anchors})
    size = save_drafter(drafter, args.output / "checkpoint", {"num_anchors": args.anchors})
    print(f"checkpoint of {size:,} bytes", flush=True)


def main() -> None:
    """Generate, train, evaluate."""
    args = arguments()
    begun = time.monotonic()
    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_target(args.target, device, dtype, Compiled(enabled=device.type == "cuda"))
    tokenizer = read_tokenizer(args.target, args.tokenizer)
    markers = markers_of(tokenizer)
    heads = training_heads(tokenizer, args.heads, args.seed)
    print(f"target loaded, {len(heads)} heads, {time.monotonic() - begun:.1f} s", flush=True)

    data = rows_of(target, heads, markers, args)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    kinds = [int((data.kind == kind).sum()) for kind in range(SAMPLED + 1)]
    for row in data.ids[:: max(1, data.ids.shape[0] // 3), 1:400].tolist()[:3]:
        print("--- sample row:", tokenizer.decode(row, skip_special_tokens=False), flush=True)
    prompts = read_prompts(args.eval_prompts, tokenizer)
    held_out = unseen(prompts, data, markers)
    print(f"{len(held_out)} of {len(prompts)} evaluation prompts do not occur in training", flush=True)

    torch.manual_seed(args.seed)  # the same start whether the rows were generated or read
    train(target, data, args, begun)
    trained = time.monotonic() - begun
    drafter = load_drafter(args.output / "checkpoint", target.config, device, dtype)
    result = evaluate(target, drafter, held_out, markers, args.eval_tokens, rows_at_once=4)
    print(report(result), flush=True)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    summary = {
        "settings": settings,
        "rows": data.ids.shape[0],
        "tokens_by_kind": dict(zip(("template", "user", "greedy", "sampled"), kinds, strict=True)),
        "seconds_to_checkpoint": round(trained, 1),
        "seconds": round(time.monotonic() - begun, 1),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "evaluation": asdict(result),
    }
    (args.output / "results.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
