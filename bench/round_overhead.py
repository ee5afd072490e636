"""What a round costs on top of its bytes: client and worker over loopback, the drafter doing nothing, against a bare
socket exchange of the same bytes between two processes, with the same socket options.

The sides are measured in alternating blocks, so that all see the same machine. Two bare ones: blocking, to which the ratio
is taken, and one that spins as Farspark's client does. One straight one: the work of a round in one straight piece of Python
on either side, without channel, codec, session or server, for decode steps in which nothing is out of the ordinary: the least
that Python can do. Then both sides run once more with time stamps on either end, which cost a microsecond or two: they say
where the time of a round is. At last the same work is timed alone, in a tight loop: in a real round each part runs once, with
caches that the rows have just swept. Run from the root of the repository:
`python bench/round_overhead.py`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.bare_socket import now_ns, read_exactly, spin  # noqa: E402
from tests.fakes.drafters import NoopDrafter, info  # noqa: E402

from farspark.clock import Deadline  # noqa: E402
from farspark.engine.client import Client  # noqa: E402
from farspark.engine.replies import find_fault  # noqa: E402
from farspark.engine.shape import ModelShape  # noqa: E402
from farspark.native.round_calls import load_round_calls  # noqa: E402
from farspark.stats import Stats  # noqa: E402
from farspark.transport import Channel, parse_endpoint, parse_endpoints  # noqa: E402
from farspark.transport.base import Piece  # noqa: E402
from farspark.transport.endpoint import DEFAULT_CONNECT_SPIN_US  # noqa: E402
from farspark.transport.tcp import TcpChannel  # noqa: E402
from farspark.wire import codec, layout  # noqa: E402
from farspark.wire.layout import EntryFlag, RequestStatus, StepFlag  # noqa: E402
from farspark.wire.messages import Entry, EntryReply, StepReply  # noqa: E402
from farspark.worker.batch import DraftBatch, DraftEntry, DraftResult, make_draft_entry  # noqa: E402
from farspark.worker.config import WorkerConfig  # noqa: E402
from farspark.worker.server import Server  # noqa: E402
from farspark.worker.session import Plan, Session, SlotPool  # noqa: E402

REQUESTS, NUM_DRAFTS, CONTEXT, VOCAB = 4, 5, 128, 129280
INFO = info(taps=3, hidden_size=4096, num_drafts=NUM_DRAFTS, vocab_size=VOCAB, slots=REQUESTS, context=CONTEXT)
SESSION = 0x1234


def joined(*forms: struct.Struct | str) -> struct.Struct:
    return struct.Struct(
        "<" + "".join([form if isinstance(form, str) else form.format.removeprefix("<") for form in forms])
    )


STRAIGHT_STEP = joined("I", layout.HEADER, layout.STEP, *[layout.ENTRY] * REQUESTS)
STRAIGHT_REPLY_HEAD = joined("I", layout.HEADER, layout.STEP_REPLY, *[layout.ENTRY_REPLY] * REQUESTS)
STRAIGHT_REPLY = joined(STRAIGHT_REPLY_HEAD, f"{2 * REQUESTS * NUM_DRAFTS}I")
NO_FLAGS = StepFlag(0)
STATUSES = tuple(RequestStatus)
NEED_DRAFT, NEW_GEN = int(EntryFlag.NEED_DRAFT), int(EntryFlag.NEW_GEN)
Microseconds = list[float]
FOR_SERVERS: list[str] = []  # arguments that every server gets


class Stamps:
    """Points in time of the newest round, in memory that two processes share: who serves writes, who asks reads."""

    NAMES = ("received", "draft begins", "draft ends", "send begins")
    FORM = struct.Struct(f"<{len(NAMES)}Q")

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._shared = mmap.mmap(file.fileno(), self.FORM.size)
        self._times = memoryview(self._shared).cast("Q")

    def mark(self, at: int) -> None:
        self._times[at] = now_ns()

    def read(self) -> tuple[int, ...]:
        return self.FORM.unpack(self._shared)


class StampedServer(Server):
    """The worker's server, with the times at which a frame is there and a reply is sent."""

    def __init__(self, drafter: StampedDrafter, config: WorkerConfig, stamps: Stamps) -> None:
        self._stamps = stamps
        super().__init__(drafter, config)

    def _admit(self, channel: Channel) -> None:
        receive, send, stamps = channel.recv, channel.send, self._stamps

        def stamped_recv(*arguments: Any, **options: Any) -> memoryview:
            frame = receive(*arguments, **options)
            stamps.mark(0)
            return frame

        def stamped_send(pieces: Sequence[Piece], deadline: Deadline) -> None:
            stamps.mark(3)
            send(pieces, deadline)

        channel.recv, channel.send = stamped_recv, stamped_send  # type: ignore[method-assign]
        super()._admit(channel)


class StampedDrafter(NoopDrafter):
    def __init__(self, stamps: Stamps) -> None:
        super().__init__(INFO)
        self._stamps = stamps

    def draft(self, batch: DraftBatch) -> DraftResult:
        self._stamps.mark(1)
        result = super().draft(batch)
        self._stamps.mark(2)
        return result


def serve_worker(spin: str, stamps: str) -> None:
    config = WorkerConfig(checkpoint=Path("none"), listen=parse_endpoint(f"tcp://127.0.0.1:0{spin}"), slots=REQUESTS)
    if stamps:
        shared = Stamps(stamps)
        server: Server = StampedServer(StampedDrafter(shared), config, shared)
    else:
        server = Server(NoopDrafter(INFO), config)
    with server:
        print(server.endpoint, flush=True)
        server.serve()


def serve_bare(request_bytes: int, reply_bytes: int, spin_us: int, stamps: str) -> None:
    """Read exactly the request, write exactly the reply."""
    shared = Stamps(stamps) if stamps else None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request, reply = memoryview(bytearray(request_bytes)), bytes(reply_bytes)
            while read_exactly(sock, request, spin_us):
                if shared:
                    shared.mark(0)
                sock.sendall(reply)


def start(stack: ExitStack, *arguments: str) -> str:
    """Start this script as a server and return the line that it prints first."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments, *FOR_SERVERS],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    return process.stdout.readline().strip()


def serve_straight(rows_each: int) -> None:
    """Judge while the rows arrive, draft, answer; anything that is not an ordinary decode step is an error."""
    frame_bytes = STRAIGHT_STEP.size + REQUESTS * rows_each * INFO.row_bytes
    memory = bytearray(frame_bytes)
    view = memoryview(memory)
    drafter = NoopDrafter(INFO)
    generations, starts, ends = [1] * REQUESTS, [0] * REQUESTS, [0] * REQUESTS
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        sock, _ = listener.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while arrived := sock.recv_into(memory):
            head = STRAIGHT_STEP.unpack_from(memory)
            session, sequence, step_id, n_rows = head[5], head[6], head[10], head[13]
            assert head[:5] == (frame_bytes - 4, layout.MAGIC, layout.VERSION, 2, 0)
            assert head[9] == frame_bytes - 36
            assert head[11] == REQUESTS
            entries = head[14:]
            assert n_rows * INFO.row_bytes == frame_bytes - STRAIGHT_STEP.size
            assert sum(entries[3::9]) == n_rows
            assert len(set(entries[0::9])) == REQUESTS
            drafts: list[DraftEntry] = []
            replies: list[int] = []
            fields = iter(entries)
            for slot, generation, first, rows, anchor, anchor_pos, flags, _, n_out in zip(*[fields] * 9, strict=True):
                assert slot < REQUESTS
                assert generation == generations[slot]
                assert first == ends[slot]
                assert anchor_pos == first + rows <= INFO.max_position
                assert flags == NEED_DRAFT
                assert 0 <= anchor < VOCAB
                assert n_out <= NUM_DRAFTS
                ends[slot] = anchor_pos
                start = starts[slot] = max(starts[slot], anchor_pos - CONTEXT)
                drafts.append(
                    make_draft_entry((slot, False, first, rows, start, anchor, True, n_out or NUM_DRAFTS, 0, 0.0))
                )
                replies += (
                    slot,
                    generation,
                    anchor_pos - start,
                    1 if start > 0 and anchor_pos - start < CONTEXT else 0,
                )
            sizes = STRAIGHT_REPLY.size - 4, STRAIGHT_REPLY.size - 36
            answer = STRAIGHT_REPLY_HEAD.pack(
                sizes[0], layout.MAGIC, layout.VERSION, 2, 1, session, sequence, 0, 0, sizes[1],
                step_id, REQUESTS, NUM_DRAFTS, 0, 0, 0, 0, *replies,
            )  # fmt: skip
            batch = DraftBatch(drafts, view[STRAIGHT_STEP.size :])
            if arrived < frame_bytes:
                sock.recv_into(view[arrived:], 0, socket.MSG_WAITALL)
            result = drafter.draft(batch)
            assert all(result.ok)
            sock.sendmsg([answer, result.tokens, result.confidences])


class StraightRound:
    """The client's part of it, with every check of the reply."""

    def __init__(self, sock: socket.socket, rows_each: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.rows_each = rows_each
        self.rows = memoryview(os.urandom(REQUESTS * rows_each * INFO.row_bytes))
        self.frame_bytes = STRAIGHT_STEP.size + len(self.rows)
        self.reply = bytearray(STRAIGHT_REPLY.size)
        self.position = self.sequence = 0

    def __call__(self) -> float:
        first, self.position = self.position, self.position + self.rows_each
        entries = [
            Entry(slot, 1, first, self.rows_each, 7, self.position, NEED_DRAFT, NUM_DRAFTS) for slot in range(REQUESTS)
        ]
        started = now_ns()
        self.sequence += 1
        head = STRAIGHT_STEP.pack(
            self.frame_bytes - 4, layout.MAGIC, layout.VERSION, 2, 0, SESSION, self.sequence, 0, 0, self.frame_bytes - 36,
            self.sequence, len(entries), 0, sum([entry.n_rows for entry in entries]), *chain.from_iterable(entries),
        )  # fmt: skip
        sent = self.sock.sendmsg([head, self.rows])
        if sent < self.frame_bytes:
            self.sock.sendall(b"".join([head, self.rows])[sent:])
        spin(self.sock, memoryview(self.reply), 5_000_000)
        got = STRAIGHT_REPLY.unpack(self.reply)
        answers, values = got[17 : 17 + 4 * REQUESTS], got[17 + 4 * REQUESTS :]
        is_right = (
            got[1:9] == (layout.MAGIC, layout.VERSION, 2, 1, SESSION, self.sequence, 0, 0)
            and got[10:13] == (self.sequence, REQUESTS, NUM_DRAFTS)
            and answers[0::4] == tuple([entry.slot for entry in entries])
            and answers[1::4] == tuple([entry.generation for entry in entries])
            and max(answers[2::4]) <= CONTEXT
            and max(answers[3::4]) <= 1
            and max(values[: REQUESTS * NUM_DRAFTS]) < VOCAB
            and max(values[REQUESTS * NUM_DRAFTS :]) <= 0x3F800000  # 1.0
        )
        ended = now_ns()
        assert is_right, got
        return (ended - started) / 1000


class FarsparkRound:
    """One engine: the real client, and the real check of the reply. With `stamps`, `parts` gets the parts of each round."""

    PARTS = (
        "client: encode",
        "request travels",
        "worker: decode, judge",
        "worker: drafter",
        "worker: reply, encode",
        "reply travels",
        "client: decode, check",
    )

    def __init__(self, endpoint: str, rows_each: int, stamps: Stamps | None) -> None:
        self.rows_each = rows_each
        self.rows = memoryview(os.urandom(REQUESTS * rows_each * INFO.row_bytes))
        self.pieces = [self.rows]
        self.positions = [0] * REQUESTS
        self.step_id = 0
        self.stamps = stamps
        self.sent = self.received = 0
        self.parts: list[list[int]] = []
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
        if stamps:
            self._stamp(connection.channel)

    def close(self) -> None:
        self.client.close()

    def _stamp(self, channel: Channel) -> None:
        assert isinstance(channel, TcpChannel)
        exchange = channel.exchange

        def stamped_exchange(pieces: Sequence[Piece], deadline: Deadline) -> memoryview:
            self.sent = now_ns()
            frame = exchange(pieces, deadline)
            self.received = now_ns()
            return frame

        channel.exchange = stamped_exchange  # type: ignore[method-assign]

    def entries(self) -> list[Entry]:
        made = []
        for slot in range(REQUESTS):
            first = self.positions[slot]
            flags = NEED_DRAFT if first else NEED_DRAFT | NEW_GEN
            made.append(Entry(slot, 1, first, self.rows_each, 7, first + self.rows_each, flags, NUM_DRAFTS, 0))
            self.positions[slot] = first + self.rows_each
        return made

    def __call__(self) -> float:
        entries = self.entries()
        started = now_ns()
        self.step_id += 1
        reply = self.client.step(self.connection, self.step_id, entries, self.pieces, NO_FLAGS, Deadline.after(5))
        fault = fault_of(reply, entries, self.step_id)
        ended = now_ns()
        check(fault, reply)
        if self.stamps:
            at = [started, self.sent, *self.stamps.read(), self.received, ended]
            self.parts.append([after - before for before, after in pairwise(at)])
        return (ended - started) / 1000


def fault_of(reply: StepReply, entries: Sequence[Entry], step_id: int) -> str | None:
    return find_fault(
        reply,
        entries,
        step_id=step_id,
        num_drafts=NUM_DRAFTS,
        vocab_size=VOCAB,
        context=CONTEXT,
        want_margins=False,
    )


def check(fault: str | None, reply: StepReply) -> None:
    if fault is not None or not all(entry.status.has_drafts for entry in reply.entries):
        raise RuntimeError(f"unexpected reply: {fault or reply}")


class BareRound:
    PARTS = ("request travels", "reply travels")

    def __init__(
        self, sock: socket.socket, request_bytes: int, reply_bytes: int, spin_us: int, stamps: Stamps | None
    ) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.request = os.urandom(request_bytes)
        self.reply = memoryview(bytearray(reply_bytes))
        self.spin_us = spin_us
        self.stamps = stamps
        self.parts: list[list[int]] = []

    def __call__(self) -> float:
        started = now_ns()
        self.sock.sendall(self.request)
        read_exactly(self.sock, self.reply, self.spin_us)
        ended = now_ns()
        if self.stamps:
            received = self.stamps.read()[0]
            self.parts.append([received - started, ended - received])
        return (ended - started) / 1000


def alone(rows_each: int, repeats: int = 3000) -> dict[str, float]:
    """Median microseconds of what a round does besides moving bytes, each timed alone in this process."""
    rows = memoryview(bytes(REQUESTS * rows_each * INFO.row_bytes))
    session = Session(INFO, SlotPool(INFO.slots), slots=REQUESTS, context=CONTEXT, stats=Stats())
    drafter = NoopDrafter(INFO)
    at = 0

    def entries() -> list[Entry]:
        flags = NEED_DRAFT if at else NEED_DRAFT | NEW_GEN
        return [Entry(slot, 1, at, rows_each, 7, at + rows_each, flags, NUM_DRAFTS) for slot in range(REQUESTS)]

    calls = load_round_calls()
    samples: dict[str, Microseconds] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter_ns()
        result = work()
        samples.setdefault(name, []).append((time.perf_counter_ns() - started) / 1000)
        return result

    def head(made: Sequence[Entry]) -> bytes:
        quick = None if calls is None else calls.step_head(SESSION, 1, 1, made, len(rows), NO_FLAGS)
        return quick or codec.encode_step_head(SESSION, 1, 1, made, len(rows), NO_FLAGS)

    def begin(frame: memoryview) -> tuple[Plan, bytearray]:
        begun = None if calls is None else session.begin(calls, frame, len(frame), SESSION, len(rows))
        if begun is not None:
            return begun[1:]
        assert codec.peek_step(frame, SESSION) is not None
        step = codec.decode_step(frame[layout.HEADER.size :], INFO.row_bytes)
        plan = session.plan(step)
        expected = StepReply(1, NUM_DRAFTS, 0, plan.replies, memoryview(b""), memoryview(b""))
        return plan, codec.encode_step_reply_head(SESSION, 1, expected)

    def finish(head: bytearray, reply: StepReply) -> Sequence[Piece]:
        quick = None if calls is None else calls.finish_reply(head, reply)
        return quick or codec.finish_step_reply(head, reply)

    def judge_reply(answer: memoryview, made: Sequence[Entry]) -> str | None:
        reply = None if calls is None else calls.read_answer(answer, SESSION, 1, StepReply, EntryReply, STATUSES)
        reply = reply or codec.decode_answer(answer, SESSION, 1)
        assert reply is not None
        return fault_of(reply, made, 1)

    for _ in range(repeats):
        made = entries()
        frame = memoryview(timed("client: encode head", lambda: head(made)) + rows)  # noqa: B023
        plan, reply_head = timed("worker: decode, judge, the reply's head", lambda: begin(frame))  # noqa: B023
        batch = session.batch(plan)
        assert batch is not None
        result = timed("worker: drafter", lambda: drafter.draft(batch))  # noqa: B023
        reply = timed("worker: session, reply", lambda: session.complete(plan, result, 1))  # noqa: B023
        pieces = timed("worker: finish the reply", lambda: finish(reply_head, reply))  # noqa: B023
        answer = memoryview(b"".join(pieces))
        timed("worker: count, once it is sent", lambda: session.count(plan, reply))  # noqa: B023
        check(timed("client: decode and check", lambda: judge_reply(answer, made)), reply)  # noqa: B023
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

        def stamps_file() -> str:
            file = stack.enter_context(tempfile.NamedTemporaryFile())
            file.write(bytes(Stamps.FORM.size))
            file.flush()
            return file.name

        def farspark(stamps: str = "") -> FarsparkRound:
            endpoint = start(stack, "--role", "worker", "--worker-spin", spin, "--stamps", stamps)
            shared = Stamps(stamps) if stamps else None
            return stack.enter_context(closing(FarsparkRound(endpoint + client_spin, rows_each, shared)))

        def bare(spin_us: int = 0, stamps: str = "") -> BareRound:
            settings = f"{request_bytes},{reply_bytes},{spin_us}"
            port = int(start(stack, "--role", "bare", "--bare", settings, "--stamps", stamps))
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            return BareRound(sock, request_bytes, reply_bytes, spin_us, Stamps(stamps) if stamps else None)

        def straight() -> StraightRound:
            port = int(start(stack, "--role", "straight", "--rows", str(rows_each)))
            return StraightRound(stack.enter_context(socket.create_connection(("127.0.0.1", port))), rows_each)

        stamped: dict[str, FarsparkRound | BareRound] = {
            "farspark": farspark(stamps_file()),
            "bare": bare(stamps=stamps_file()),
        }
        sides: dict[str, Callable[[], float]] = {
            "farspark": farspark(),
            "bare": bare(),
            "bare_spinning": bare(DEFAULT_CONNECT_SPIN_US),
            "straight": straight(),
            **{f"{name}_stamped": side for name, side in stamped.items()},
        }
        measured: dict[str, Microseconds] = {name: [] for name in sides}
        for block in range(blocks + 1):
            for name, round_ in sides.items():
                values = [round_() for _ in range(rounds)]
                # The first block warms everything up.
                if block:
                    measured[name] += values
        parts = {
            name: {
                part: share([one / 1000 for one in values], 0.5)
                for part, values in zip(side.PARTS, zip(*side.parts[rounds:], strict=True), strict=True)
            }
            for name, side in stamped.items()
        }
    result: dict[str, Any] = {"request_bytes": request_bytes, "reply_bytes": reply_bytes, "rounds": blocks * rounds}
    for name, values in measured.items():
        result[name] = {"p50": share(values, 0.5), "p99": share(values, 0.99)}
    for name in ("bare", "bare_spinning"):
        result[f"ratio_to_{name}"] = {at: result["farspark"][at] / result[name][at] for at in ("p50", "p99")}
    result["straight_ratio"] = {at: result["straight"][at] / result["bare"][at] for at in ("p50", "p99")}
    result["parts"] = parts
    result["alone"] = alone(rows_each)
    return result


def show(rows_each: int, result: dict[str, Any]) -> None:
    print(
        f"\n{REQUESTS} requests x {rows_each} rows x {INFO.row_bytes:,} bytes, N = {NUM_DRAFTS}: "
        f"{result['request_bytes']:,} bytes out, {result['reply_bytes']:,} back; {result['rounds']} rounds of each"
    )

    def line(name: str, values: dict[str, float], form: str = ".1f") -> None:
        print(f"{name:<46}{values['p50']:>10{form}}{values['p99']:>10{form}}")

    print(f"{'microseconds':<46}{'p50':>10}{'p99':>10}")
    line("bare exchange, blocking", result["bare"])
    line("bare exchange, spinning", result["bare_spinning"])
    line("straight Python, no-op drafter", result["straight"])
    line("Farspark round, no-op drafter", result["farspark"])
    line("ratio of the straight one", result["straight_ratio"], ".2f")
    line("ratio to the blocking one", result["ratio_to_bare"], ".2f")
    line("ratio to the spinning one", result["ratio_to_bare_spinning"], ".2f")
    ours, bare = result["parts"]["farspark"], result["parts"]["bare"]
    print(f"\n{'where it is (p50 of each part, stamped rounds)':<46}{'Farspark':>10}{'bare':>10}{'more':>10}")
    for part, value in ours.items():
        print(f"    {part:<42}{value:>10.1f}{bare.get(part, 0.0):>10.1f}{value - bare.get(part, 0.0):>+10.1f}")
    whole, bare_whole = result["farspark_stamped"]["p50"], result["bare_stamped"]["p50"]
    print(f"    {'the whole round':<42}{whole:>10.1f}{bare_whole:>10.1f}{whole - bare_whole:>+10.1f}")
    print("\nthe same work timed alone, with warm caches")
    for name, value in result["alone"].items():
        print(f"    {name:<42}{value:>10.1f}")
    print(f"    {'sum':<42}{sum(result['alone'].values()):>10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="6", help="rows per request, several separated by commas")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=100, help="rounds per block")
    parser.add_argument("--worker-spin", default="", help="option text for the worker's endpoint, as ?spin_us=50")
    parser.add_argument("--client-spin", default="", help="the same for the client's")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pin", action="store_true", help="the client on one CPU, the servers on another")
    parser.add_argument("--cpu", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("worker", "bare", "straight"), help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    parser.add_argument("--stamps", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu is not None:
        os.sched_setaffinity(0, {options.cpu})
    if options.role == "straight":
        serve_straight(int(options.rows))
    elif options.role == "worker":
        serve_worker(options.worker_spin, options.stamps)
    elif options.role == "bare":
        request_bytes, reply_bytes, spin_us = map(int, options.bare.split(","))
        serve_bare(request_bytes, reply_bytes, spin_us, options.stamps)
    else:
        if options.pin:
            ours, theirs, *_ = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {ours})
            FOR_SERVERS.extend(["--cpu", str(theirs)])
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
