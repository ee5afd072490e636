"""What one worker gives 1, 2, 4 and 8 engines: drafts a second, and the time of a round, against one engine alone.

The worker and every engine are processes of their own, over TCP. An engine's round is one STEP and its reply; between two
rounds it does nothing for `--think-ms`, as long as its target's step takes (0: it asks again at once, which no engine does, and
which shows the worker at its limit). Every engine has `--requests` requests of `--rows` rows a round.

On a CPU, with the trained drafter:
    python bench/many_engines.py --checkpoint DRAFTER --target TARGET
On a GPU, with random weights of a published shape (bench/gpu_draft.py has the names):
    python bench/many_engines.py --shape v4.1-flash --device cuda
What grows with context and slots: `--prompt 500,4000`, `--requests 1,4`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from farspark.clock import Deadline  # noqa: E402
from farspark.errors import TransportError  # noqa: E402
from farspark.probe.peer import StatsReader  # noqa: E402
from farspark.transport import connect, exchange, parse_endpoint  # noqa: E402
from farspark.wire import codec  # noqa: E402
from farspark.wire.layout import EntryFlag, FrameStatus, Operation  # noqa: E402
from farspark.wire.messages import Entry, Header, Hello, StepReply  # noqa: E402

ROUND_WITHIN_S = 60.0
PROMPT_AT_ONCE = 512  # rows of a STEP while the context is filled


def serve(options: argparse.Namespace) -> None:
    """The worker's process; its first line is the endpoint."""
    from farspark.worker.config import WorkerConfig
    from farspark.worker.server import Server

    drafter: Any
    slots = max(map(int, options.engines.split(","))) * max(map(int, options.requests.split(",")))
    if options.shape:
        import torch
        from bench.gpu_draft import configs, random_checkpoint

        from farspark.worker.device import open_device, work_on
        from farspark.worker.drafter import assemble

        device = open_device(options.device)
        work = work_on(device, torch.bfloat16)
        drafter = assemble(random_checkpoint(configs()[options.shape], device), device, work, slots, options.context)
    else:
        from farspark.worker.drafter import open_drafter

        drafter = open_drafter(
            options.checkpoint,
            target=options.target,
            device=options.device,
            slots=slots,
            context=options.context,
        )
    drafter.warm_up(lambda what, done, total: None)
    config = WorkerConfig(checkpoint=Path(), listen=parse_endpoint("tcp://127.0.0.1:0"), slots=slots)
    with Server(drafter, config) as server:
        print(server.endpoint, flush=True)
        server.serve()


@dataclass
class Engine:
    """Asks for drafts on one connection."""

    endpoint: str
    number: int
    requests: int

    def __post_init__(self) -> None:
        endpoint = parse_endpoint(self.endpoint)
        with StatsReader(endpoint, 30.0) as reader:
            drafter = reader.read()["drafter"]
        self.drafter = drafter
        self.channel = connect(endpoint, Deadline.after(30))
        self.sequence = 0
        self.at = 0
        self.random = random.Random(self.number)
        hello = Hello(
            engine=f"engine-{self.number}",
            identity=bytes.fromhex(drafter["identity"]),
            markov_identity=bytes(32),
            row_bytes=drafter["row_bytes"],
            taps=drafter["taps"],
            hidden_size=drafter["hidden_size"],
            dtype=1,
            ring=drafter["context"],
            context=drafter["context"],
            num_drafts=drafter["num_drafts"],
            slots=self.requests,
            vocab_size=drafter["vocab_size"],
        )
        frame = codec.encode_frame(Header(Operation.HELLO, self.session, 0, 0), codec.encode_hello(hello))
        header, payload = codec.decode_frame(exchange(self.channel, [frame], Deadline.after(30)))
        if header.status != FrameStatus.OK:
            raise RuntimeError(codec.decode_refusal(Operation.HELLO, payload))

    @property
    def session(self) -> int:
        return self.number + 1

    def rows(self, count: int) -> bytes:
        """Small finite bf16 values, all alike in size."""
        values = bytearray(self.random.randbytes(count * self.drafter["row_bytes"]))
        values[1::2] = bytes(0x3C | (value & 0x83) for value in values[1::2])
        return bytes(values)

    def round(self, rows_each: int, rows: bytes, *, drafts: bool = True) -> StepReply:
        flags = (EntryFlag.NEED_DRAFT if drafts else 0) | (0 if self.at else EntryFlag.NEW_GEN)
        first, self.at = self.at, self.at + rows_each
        entries = [Entry(slot, 1, first, rows_each, 17, self.at, flags) for slot in range(self.requests)]
        self.sequence += 1
        head = codec.encode_step_head(self.session, self.sequence, self.sequence, entries, len(rows))
        frame = exchange(self.channel, [head, rows], Deadline.after(ROUND_WITHIN_S))
        reply = codec.decode_answer(frame, self.session, self.sequence)
        if reply is None or any(entry.status.has_drafts is not drafts for entry in reply.entries):
            raise RuntimeError(f"{reply or codec.decode_frame(frame)[0]}")
        return reply


def ask(options: argparse.Namespace) -> None:
    """An engine's process: fills the context, says `ready`, reads when to start and to end, answers with its rounds."""
    engine = Engine(options.endpoint, options.number, int(options.requests))
    left = int(options.prompt)
    while left:
        count = min(left, max(1, PROMPT_AT_ONCE // engine.requests))
        engine.round(count, engine.rows(count * engine.requests), drafts=False)
        left -= count
    rows = engine.rows(options.rows * engine.requests)
    for _ in range(5):
        engine.round(options.rows, rows)
    print("ready", flush=True)
    start, end = map(float, sys.stdin.readline().split())
    # Engines do not step in time with each other.
    time.sleep(max(0.0, start - time.time()) + engine.random.random() * options.think_ms / 1000)
    taken: list[float] = []
    worker_us: list[int] = []
    while time.time() < end:
        began = time.perf_counter()
        reply = engine.round(options.rows, rows)
        taken.append(1e6 * (time.perf_counter() - began))
        worker_us.append(reply.worker_us)
        if options.think_ms:
            # Around the mean, or engines would fall into step.
            time.sleep(options.think_ms / 1000 * (0.75 + engine.random.random() / 2))
    print(json.dumps({"round_us": taken, "worker_us": worker_us}), flush=True)


def share(values: Sequence[float], at: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))] if ordered else 0.0


def start(stack: contextlib.ExitStack, *arguments: object) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, __file__, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError("a process of the benchmark has ended; its error stands above")
    return line


def cpu_s(pid: int) -> float:
    """Seconds of CPU time that a process has taken: says what a round costs on a machine that others use, too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    options: argparse.Namespace, worker: int, endpoint: str, engines: int, requests: int, prompt: int
) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        asked = ["--role", "engine", "--endpoint", endpoint, "--requests", requests, "--prompt", prompt]
        asked += ["--rows", options.rows, "--think-ms", options.think_ms]
        processes = [start(stack, *asked, "--number", number) for number in range(engines)]
        for process in processes:
            line_of(process)
        with StatsReader(parse_endpoint(endpoint), 30.0) as reader:
            before = reader.read()["counters"]
            taken = cpu_s(worker)
            begin = time.time() + 0.3
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(f"{begin} {begin + options.seconds}\n")
                process.stdin.flush()
            answers = [json.loads(line_of(process)) for process in processes]
            taken = cpu_s(worker) - taken
            after = reader.read()["counters"]
            num_drafts = reader.read()["drafter"]["num_drafts"]
    rounds = [us for answer in answers for us in answer["round_us"]]
    worker_us = [us for answer in answers for us in answer["worker_us"]]
    steps = after["steps"] - before["steps"]
    joined = after.get("companions", 0) - before.get("companions", 0)
    return {
        "engines": engines,
        "requests": requests,
        "prompt": prompt,
        "think_ms": options.think_ms,
        "drafts_per_s": len(rounds) * requests * num_drafts / options.seconds,
        "round_us": {"p50": share(rounds, 0.5), "p99": share(rounds, 0.99)},
        "slowest_engine_p50_us": max(share(answer["round_us"], 0.5) for answer in answers),
        "worker_us": share(worker_us, 0.5),
        "worker_cpu_ms": 1000 * taken / steps if steps else 0.0,
        "batched_with": joined / steps if steps else 0.0,
    }


def report(options: argparse.Namespace) -> list[dict[str, Any]]:
    lines = []
    thinks = [float(text) for text in options.think_ms.split(",")]
    with contextlib.ExitStack() as stack:
        passed = ["--engines", options.engines, "--requests", options.requests, "--context", options.context]
        passed += ["--device", options.device]
        passed += [*(["--shape", options.shape] if options.shape else ["--checkpoint", options.checkpoint])]
        passed += ["--target", options.target] if options.target else []
        worker = start(stack, "--role", "worker", *passed)
        endpoint = line_of(worker)
        print(
            f"{'engines':>8}{'requests':>9}{'context':>8}{'think ms':>9}{'drafts/s':>10}{'round p50':>11}{'p99':>9}"
            f"{'to 1':>6}{'worker':>9}{'cpu ms':>8}{'batched':>8}   (microseconds; cpu: the worker's, a round)",
            flush=True,
        )
        for requests, prompt, think in itertools.product(
            map(int, options.requests.split(",")), map(int, options.prompt.split(",")), thinks
        ):
            alone = 0.0
            for engines in map(int, options.engines.split(",")):
                asked = argparse.Namespace(**{**vars(options), "think_ms": think})
                found = measure(asked, worker.pid, endpoint, engines, requests, prompt)
                alone = alone or found["round_us"]["p50"]
                found["to_alone"] = found["round_us"]["p50"] / alone
                lines.append(found)
                print(
                    f"{engines:>8}{requests:>9}{prompt:>8}{think:>9g}{found['drafts_per_s']:>10,.0f}"
                    f"{found['round_us']['p50']:>11,.0f}{found['round_us']['p99']:>9,.0f}{found['to_alone']:>6.2f}"
                    f"{found['worker_us']:>9,.0f}{found['worker_cpu_ms']:>8.2f}{found['batched_with']:>8.2f}",
                    flush=True,
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="of a drafter")
    parser.add_argument("--target", type=Path, help="lends the drafter's embedding and head")
    parser.add_argument("--shape", help="random weights of this published shape instead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--engines", default="1,2,4,8")
    parser.add_argument("--requests", default="1", help="of each engine; several separated by commas")
    parser.add_argument("--prompt", default="500", help="positions in front of the first round; likewise")
    parser.add_argument("--rows", type=int, default=4, help="per request and round: an anchor and the accepted drafts")
    parser.add_argument("--think-ms", default="20,0", help="between an engine's rounds; likewise")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5.0, help="each measurement")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--role", choices=("worker", "engine"), help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "worker":
        serve(options)
        return
    if options.role == "engine":
        options.think_ms = float(options.think_ms)
        with contextlib.suppress(TransportError):
            ask(options)
        return
    if bool(options.shape) == bool(options.checkpoint):
        parser.error("give --checkpoint DRAFTER (with --target) or --shape NAME")
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}", flush=True)
    lines = report(options)
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
