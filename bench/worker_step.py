"""What the worker adds to its drafter: a whole step, from the bytes of a STEP frame to the bytes of its reply, against the
drafter's own time for the same batch, and the parts of the difference.

Blocks of both alternate, so that both see the same machine. With `--checkpoint DIR` a real drafter, without it a random one
of a small published shape. Run from the root of the repository: `python bench/worker_step.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fakes.tiny_checkpoint import tiny_config, tiny_tensors, write_checkpoint  # noqa: E402

from farspark.stats import Stats  # noqa: E402
from farspark.wire import codec  # noqa: E402
from farspark.wire.layout import EntryFlag, HeaderFlag, Operation  # noqa: E402
from farspark.wire.messages import Entry, Header  # noqa: E402
from farspark.worker.batch import Drafter  # noqa: E402
from farspark.worker.drafter import open_drafter  # noqa: E402
from farspark.worker.session import Session, SlotPool  # noqa: E402

# Of a drafter that a CPU drafts with in milliseconds: 3 layers of width 512, a vocabulary of 8,192.
SMALL: dict[str, object] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "mask_token_id": 8191,
    "markov_rank": 64,
    "layer_types": ["full_attention"] * 3,
}


class Steps:
    """One session's rounds: every request commits `rows_each` rows a round and wants all drafts."""

    def __init__(self, drafter: Drafter, requests: int, rows_each: int, prompt: int) -> None:
        self.drafter = drafter
        self.info = drafter.info
        self.requests = requests
        self.rows_each = rows_each
        self.rows = os.urandom(2) * (requests * max(rows_each, prompt) * self.info.row_bytes // 2)
        self.samples: dict[str, list[float]] = {}
        self.session = Session(
            self.info, SlotPool(self.info.slots), slots=requests, context=self.info.context, stats=Stats()
        )
        self.at = 0
        self.step(prompt)

    def frame(self, n_rows: int) -> memoryview:
        flags = EntryFlag.NEED_DRAFT if self.at else EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN
        entries = [
            Entry(slot, 1, self.at, n_rows, 7, self.at + n_rows, flags, self.info.num_drafts)
            for slot in range(self.requests)
        ]
        rows = self.rows[: self.requests * n_rows * self.info.row_bytes]
        self.at += n_rows
        return memoryview(codec.encode_step_head(1, 1, 1, entries, len(rows)) + rows)

    def step(self, n_rows: int) -> dict[str, float]:
        """One whole step; microseconds of each part and of all."""
        frame = self.frame(n_rows)
        marks = [time.perf_counter_ns()]
        _, payload = codec.decode_frame(frame)
        step = codec.decode_step(payload, self.info.row_bytes)
        marks.append(time.perf_counter_ns())
        plan = self.session.plan(step)
        batch = self.session.batch(plan)
        marks.append(time.perf_counter_ns())
        assert batch is not None
        result = self.drafter.draft(batch)
        marks.append(time.perf_counter_ns())
        reply = self.session.complete(plan, result, 1)
        marks.append(time.perf_counter_ns())
        header = Header(Operation.STEP, 1, 1, 0, HeaderFlag.REPLY)
        codec.encode_frame(header, codec.encode_step_reply(reply))
        marks.append(time.perf_counter_ns())
        assert all(entry.status.has_drafts for entry in reply.entries)
        names = ("decode frame", "session, judge", "drafter", "session, reply", "encode reply")
        taken = {name: (marks[at + 1] - marks[at]) / 1000 for at, name in enumerate(names)}
        return {**taken, "whole step": (marks[-1] - marks[0]) / 1000}

    def drafter_alone(self, n_rows: int) -> float:
        """The drafter's time for the batch that a step would hand it."""
        _, payload = codec.decode_frame(self.frame(n_rows))
        batch = self.session.batch(self.session.plan(codec.decode_step(payload, self.info.row_bytes)))
        assert batch is not None
        started = time.perf_counter_ns()
        self.drafter.draft(batch)
        return (time.perf_counter_ns() - started) / 1000

    def record(self, name: str, us: float) -> None:
        self.samples.setdefault(name, []).append(us)


def share(values: Sequence[float], at: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]


def measure(steps: Steps, blocks: int, rounds: int) -> dict[str, dict[str, float]]:
    for block in range(blocks + 1):
        for _ in range(rounds):
            taken = steps.step(steps.rows_each)
            # The first block warms up.
            if block:
                for name, us in taken.items():
                    steps.record(name, us)
        for _ in range(rounds):
            us = steps.drafter_alone(steps.rows_each)
            if block:
                steps.record("drafter alone", us)
    return {name: {"p50": share(values, 0.5), "p99": share(values, 0.99)} for name, values in steps.samples.items()}


def quiet(_what: str, _done: int, _total: int) -> None:
    pass


def open_measured(options: argparse.Namespace, folder: Path) -> Drafter:
    checkpoint = options.checkpoint or write_checkpoint(
        folder / "drafter", config := tiny_config(**SMALL), tiny_tensors(config, 0)
    )
    drafter = open_drafter(
        checkpoint,
        target=options.target,
        device=options.device,
        dtype=options.dtype,
        slots=options.requests,
        context=options.context,
    )
    drafter.warm_up(quiet)
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="a drafter's folder; left out: a small random one")
    parser.add_argument("--target", type=Path, help="the target's folder, where the drafter shares its tensors")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than there are idle cores cost dearly")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rows", type=int, default=3, help="rows per request and round")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=40, help="rounds per block")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        drafter = open_measured(options, Path(folder))
    steps = Steps(drafter, options.requests, options.rows, prompt=64)
    measured = measure(steps, options.blocks, options.rounds)
    if options.json:
        print(json.dumps({"rounds": options.blocks * options.rounds, "us": measured}, indent=2))
        return
    show(drafter, options, measured)


def show(drafter: Drafter, options: argparse.Namespace, measured: dict[str, dict[str, float]]) -> None:
    info = drafter.info
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    print(
        f"{info.kind} on {info.device} in {info.dtype}, N = {info.num_drafts}; {options.requests} requests x {options.rows} "
        f"rows x {info.row_bytes:,} bytes, context {info.context}; {options.blocks * options.rounds} rounds"
    )
    print(f"{'microseconds':<24}{'p50':>10}{'p99':>10}")
    for name, values in measured.items():
        print(f"{name:<24}{values['p50']:>10.1f}{values['p99']:>10.1f}")
    whole, alone = measured["whole step"]["p50"], measured["drafter alone"]["p50"]
    parts = sum(values["p50"] for name, values in measured.items() if name not in ("whole step", "drafter alone"))
    print(f"whole step / drafter alone: {whole / alone:.3f}; whole step / sum of its parts: {whole / parts:.3f}")


if __name__ == "__main__":
    main()
