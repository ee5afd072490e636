"""What a round costs on top of its bytes: client and worker over loopback, the drafter doing nothing, against a bare
blocking socket exchange of the same bytes between two processes.

The two are measured in alternating blocks, so that both see the same machine. Then the parts of the difference are timed
alone, in a tight loop: in a real round each of them runs once, with caches that the rows have just swept. Run from the root
of the repository: `python bench/round_overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.fakes.drafters import NoopDrafter, info  # noqa: E402

from farspark.clock import Deadline  # noqa: E402
from farspark.engine.client import Client  # noqa: E402
from farspark.engine.round import find_fault  # noqa: E402
from farspark.engine.shape import ModelShape  # noqa: E402
from farspark.stats import Stats  # noqa: E402
from farspark.transport import parse_endpoint, parse_endpoints  # noqa: E402
from farspark.wire import codec  # noqa: E402
from farspark.wire.layout import EntryFlag, HeaderFlag, Operation, StepFlag  # noqa: E402
from farspark.wire.messages import Entry, Header, StepReply  # noqa: E402
from farspark.worker.config import WorkerConfig  # noqa: E402
from farspark.worker.server import Server  # noqa: E402
from farspark.worker.session import Session, SlotPool  # noqa: E402

REQUESTS, NUM_DRAFTS, CONTEXT, VOCAB = 4, 5, 128, 129280
INFO = info(taps=3, hidden_size=4096, num_drafts=NUM_DRAFTS, vocab_size=VOCAB, slots=REQUESTS, context=CONTEXT)
SESSION = 0x1234
Microseconds = list[float]


def serve_worker(spin: str) -> None:
    config = WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint(f"tcp://127.0.0.1:0{spin}"), slots=REQUESTS)
    with Server(NoopDrafter(INFO), config) as server:
        print(server.endpoint, flush=True)
        server.serve()


def serve_bare(request_bytes: int, reply_bytes: int) -> None:
    """Read exactly the request, write exactly the reply, with blocking calls."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request, reply = memoryview(bytearray(request_bytes)), bytes(reply_bytes)
            while read_exactly(sock, request):
                sock.sendall(reply)


def read_exactly(sock: socket.socket, into: memoryview) -> bool:
    got = 0
    while got < len(into):
        count = sock.recv_into(into[got:])
        if not count:
            return False
        got += count
    return True


def start(stack: ExitStack, *arguments: str) -> str:
    """Start this script as a server and return the line that it prints first."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return process.stdout.readline().strip()


class FarsparkRound:
    """One engine: the real client, and the real check of the reply."""

    def __init__(self, endpoint: str, rows_each: int) -> None:
        self.rows_each = rows_each
        self.rows = memoryview(os.urandom(REQUESTS * rows_each * INFO.row_bytes))
        self.positions = [0] * REQUESTS
        self.step_id = 0
        shape = ModelShape(
            num_drafts=NUM_DRAFTS,
            vocab_size=VOCAB,
            hidden_size=INFO.hidden_size,
            taps=INFO.taps,
            slots=REQUESTS,
            context=CONTEXT,
            ring=CONTEXT,
            max_position=1 << 20,
        )
        hello = shape.hello(engine="bench", identity=INFO.identity, markov_identity=bytes(32), want_margin=False)
        self.client = Client(
            hello, parse_endpoints(endpoint), connect_timeout_s=5, backoff_s=1, backoff_max_s=1, stats=Stats()
        )
        self.client.start()
        if not self.client.wait_ready(Deadline.after(10)):
            raise RuntimeError(f"no connection: {self.client.last_failure}")
        connection = self.client.connection()
        assert connection is not None
        self.connection = connection

    def close(self) -> None:
        self.client.close()

    def entries(self) -> list[Entry]:
        made = []
        for slot in range(REQUESTS):
            first = self.positions[slot]
            flags = EntryFlag.NEED_DRAFT if first else EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN
            made.append(Entry(slot, 1, first, self.rows_each, 7, first + self.rows_each, flags, NUM_DRAFTS, 0))
            self.positions[slot] = first + self.rows_each
        return made

    def __call__(self) -> float:
        entries = self.entries()
        started = time.perf_counter_ns()
        self.step_id += 1
        reply = self.client.step(self.connection, self.step_id, entries, [self.rows], StepFlag(0), Deadline.after(5))
        check(reply, entries, self.step_id)
        return (time.perf_counter_ns() - started) / 1000


def check(reply: StepReply, entries: Sequence[Entry], step_id: int) -> None:
    fault = find_fault(
        reply,
        entries,
        step_id=step_id,
        num_drafts=NUM_DRAFTS,
        vocab_size=VOCAB,
        context=CONTEXT,
        want_margins=False,
    )
    if fault is not None or not all(entry.status.has_drafts for entry in reply.entries):
        raise RuntimeError(f"unexpected reply: {fault or reply}")


class BareRound:
    def __init__(self, sock: socket.socket, request_bytes: int, reply_bytes: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.request = os.urandom(request_bytes)
        self.reply = memoryview(bytearray(reply_bytes))

    def __call__(self) -> float:
        started = time.perf_counter_ns()
        self.sock.sendall(self.request)
        read_exactly(self.sock, self.reply)
        return (time.perf_counter_ns() - started) / 1000


def parts(rows_each: int, repeats: int = 3000) -> dict[str, float]:
    """Median microseconds of what a round does besides moving bytes, each timed alone in this process."""
    rows = memoryview(bytes(REQUESTS * rows_each * INFO.row_bytes))
    session = Session(INFO, SlotPool(INFO.slots), slots=REQUESTS, context=CONTEXT, stats=Stats())
    drafter = NoopDrafter(INFO)
    at = 0

    def entries() -> list[Entry]:
        flags = EntryFlag.NEED_DRAFT if at else EntryFlag.NEED_DRAFT | EntryFlag.NEW_GEN
        return [Entry(slot, 1, at, rows_each, 7, at + rows_each, flags, NUM_DRAFTS) for slot in range(REQUESTS)]

    def head() -> bytes:
        return codec.encode_step_head(SESSION, 1, 1, made, len(rows))

    made = entries()
    frame = memoryview(head() + rows)
    samples: dict[str, Microseconds] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter_ns()
        result = work()
        samples.setdefault(name, []).append((time.perf_counter_ns() - started) / 1000)
        return result

    def take_apart(whole: memoryview) -> Any:
        _, payload = codec.decode_frame(whole)
        return codec.decode_step(payload, INFO.row_bytes)

    def reply_frame(reply: StepReply) -> bytes:
        header = Header(Operation.STEP, SESSION, 1, 0, HeaderFlag.REPLY)
        return codec.encode_frame(header, codec.encode_step_reply(reply))

    def check_reply(answer: bytes) -> None:
        _, payload = codec.decode_frame(memoryview(answer))
        check(codec.decode_step_reply(payload), made, 1)

    for _ in range(repeats):
        made = entries()
        encoded = timed("client: encode head", head)
        frame[: len(encoded)].tobytes()
        step = take_apart(memoryview(encoded + rows))
        timed("worker: decode frame", lambda: take_apart(frame))
        plan = timed("worker: session, judge", lambda: session.plan(step))  # noqa: B023
        result = timed("worker: drafter", lambda: drafter.draft(plan.batch))  # noqa: B023
        reply = timed("worker: session, reply", lambda: session.complete(plan, result, 1))  # noqa: B023
        answer = timed("worker: encode reply", lambda: reply_frame(reply))  # noqa: B023
        timed("client: decode and check", lambda: check_reply(answer))  # noqa: B023
        at += rows_each
    return {name: share(values, 0.5) for name, values in samples.items()}


def share(values: Sequence[float], at: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(at * len(ordered)))]


def measure(rows_each: int, blocks: int, rounds: int, spin: str, client_spin: str) -> dict[str, Any]:
    head = codec.encode_step_head(SESSION, 1, 1, [Entry(0, 1, 0, rows_each, 7, rows_each, EntryFlag(0))] * REQUESTS, 0)
    request_bytes = 4 + len(head) + REQUESTS * rows_each * INFO.row_bytes
    reply_bytes = 4 + 32 + 24 + REQUESTS * (16 + 2 * 4 * NUM_DRAFTS)
    with ExitStack() as stack:
        endpoint = start(stack, "--role", "worker", "--worker-spin", spin)
        port = int(start(stack, "--role", "bare", "--bytes", f"{request_bytes},{reply_bytes}"))
        ours = stack.enter_context(closing(FarsparkRound(endpoint + client_spin, rows_each)))
        bare = BareRound(stack.enter_context(socket.create_connection(("127.0.0.1", port))), request_bytes, reply_bytes)
        measured: dict[str, Microseconds] = {"farspark": [], "bare": []}
        for block in range(blocks + 1):
            for name, round_ in (("farspark", ours), ("bare", bare)):
                values = [round_() for _ in range(rounds)]
                # The first block warms both up.
                if block:
                    measured[name] += values
    result: dict[str, Any] = {"request_bytes": request_bytes, "reply_bytes": reply_bytes, "rounds": blocks * rounds}
    for name, values in measured.items():
        result[name] = {"p50": share(values, 0.5), "p99": share(values, 0.99)}
    result["ratio_p50"] = result["farspark"]["p50"] / result["bare"]["p50"]
    result["parts"] = parts(rows_each)
    return result


def show(rows_each: int, result: dict[str, Any]) -> None:
    ours, bare = result["farspark"], result["bare"]
    print(
        f"\n{REQUESTS} requests x {rows_each} rows x {INFO.row_bytes:,} bytes, N = {NUM_DRAFTS}: "
        f"{result['request_bytes']:,} bytes out, {result['reply_bytes']:,} back; {result['rounds']} rounds of each"
    )
    print(f"{'microseconds':<34}{'p50':>10}{'p99':>10}")
    print(f"{'bare blocking exchange':<34}{bare['p50']:>10.1f}{bare['p99']:>10.1f}")
    print(f"{'farspark round, no-op drafter':<34}{ours['p50']:>10.1f}{ours['p99']:>10.1f}")
    print(f"{'ratio':<34}{result['ratio_p50']:>10.2f}{ours['p99'] / bare['p99']:>10.2f}")
    difference = ours["p50"] - bare["p50"]
    print(f"difference at p50: {difference:.1f}; its parts, each timed alone:")
    for name, value in result["parts"].items():
        print(f"    {name:<52}{value:>8.1f}")
    print(f"    {'sum':<52}{sum(result['parts'].values()):>8.1f}")
    print(
        f"    {'the rest (cold caches in place of warm ones, sockets)':<52}{difference - sum(result['parts'].values()):>8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6", help="rows per request, several separated by commas")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=200, help="rounds per block")
    parser.add_argument("--worker-spin", default="", help="option text for the worker's endpoint, as ?spin_us=50")
    parser.add_argument("--client-spin", default="", help="the same for the client's")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("worker", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--bytes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "worker":
        serve_worker(options.worker_spin)
    elif options.role == "bare":
        request_bytes, reply_bytes = map(int, options.bytes.split(","))
        serve_bare(request_bytes, reply_bytes)
    else:
        results = {}
        for rows_each in map(int, options.rows.split(",")):
            results[rows_each] = measure(
                rows_each, options.blocks, options.rounds, options.worker_spin, options.client_spin
            )
        if options.json:
            print(json.dumps(results, indent=2))
            return
        print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
        for rows_each, result in results.items():
            show(rows_each, result)


if __name__ == "__main__":
    main()
