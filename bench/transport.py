"""What an exchange costs over each transport: a small echo and two real rounds, between two processes of one machine.

Measured in alternating blocks, so that all see the same machine; the ratio is to a bare socket that spins. Besides the channels
of Farspark: the same bytes with the wire's own messages made and read on both sides, ZeroMQ REQ/REP with a JSON header (what
the nearest peers use), UCX's own `ucx_perftest` where it is installed, and the shim under the UCX channel without Python
(`ucx_echo.c`) where UCX's headers are. Whatever spins does so for as long as the others, and
sleeps then. CPU is that of the whole process, the system's part included. What cannot be measured here is left out with its
reason. The processes run at real-time priority where that is allowed, so that other work on the machine is not measured.
Run from the root of the repository: `python bench/transport.py`.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import os
import platform
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.bare_socket import now_ns, read_exactly  # noqa: E402

from farspark.clock import Deadline  # noqa: E402
from farspark.errors import FarsparkError, TransportError  # noqa: E402
from farspark.native.round_calls import load_round_calls  # noqa: E402
from farspark.transport import Piece, connect, exchange, listen  # noqa: E402
from farspark.transport.endpoint import DEFAULT_CONNECT_SPIN_US, DEFAULT_LISTEN_SPIN_US  # noqa: E402
from farspark.wire import codec  # noqa: E402
from farspark.wire.layout import EntryFlag, FrameStatus, HeaderFlag, Operation, RequestStatus  # noqa: E402
from farspark.wire.messages import Entry, EntryReply, Header, StepReply  # noqa: E402

SPIN_US: Final = 500
# After so long nothing spins any more. The kernel brings a thread's run time up to date when it stops running.
ASLEEP_S: Final = 0.004
LIMIT: Final = 8 * 1024 * 1024
REQUESTS, NUM_DRAFTS = 4, 5
Exchange = Callable[[], None]


class Shape(NamedTuple):
    name: str
    out_bytes: int
    back_bytes: int


SHAPES: Final = (
    Shape("64 B both ways", 64, 64),
    Shape("75 KB out, 200 B back", 75_000, 200),
    Shape("600 KB out, 200 B back", 600_000, 200),
)


class Absent(Exception):
    """This machine cannot measure it; the reason."""


class Side(NamedTuple):
    """One way to exchange: how its server serves, and how a client makes one exchange."""

    serve: Callable[[Shape], None]
    client: Callable[[str, Shape, ExitStack], Exchange]


# A bare socket.


def serve_bare(shape: Shape, spin_us: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        say(str(listener.getsockname()[1]))
        sock, _ = listener.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request, reply = memoryview(bytearray(shape.out_bytes)), bytes(shape.back_bytes)
            while read_exactly(sock, request, spin_us):
                sock.sendall(reply)


def bare_client(address: str, shape: Shape, stack: ExitStack, spin_us: int) -> Exchange:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", int(address))))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request, reply = bytes(shape.out_bytes), memoryview(bytearray(shape.back_bytes))

    def one() -> None:
        sock.sendall(request)
        read_exactly(sock, reply, spin_us)

    return one


def bare(spin_us: int) -> Side:
    return Side(
        lambda shape: serve_bare(shape, spin_us),
        lambda address, shape, stack: bare_client(address, shape, stack, spin_us),
    )


# Farspark's channels: frames only.


def serve_channel(shape: Shape, scheme: str, spin_us: int) -> None:
    listener = listen(f"{scheme}://127.0.0.1:0?spin_us={spin_us}", max_frame_bytes=LIMIT)
    say(listener.endpoint)
    channel = listener.accept(Deadline.after(60))
    reply, never = bytes(shape.back_bytes), Deadline.never()
    try:
        while True:
            channel.recv(never)
            channel.send([reply], Deadline.after(5))
    except TransportError:
        pass
    finally:
        channel.close()
        listener.close()


def channel_client(address: str, shape: Shape, stack: ExitStack, scheme: str, spin_us: int) -> Exchange:
    address = f"{scheme}://{address.partition('://')[2].partition('?')[0]}"
    channel = connect(f"{address}?spin_us={spin_us}", Deadline.after(30), max_frame_bytes=LIMIT)
    stack.callback(channel.close)
    # As a round's: what stands in front of the rows, and the rows.
    head_bytes = min(224, shape.out_bytes)
    pieces: list[Piece] = [bytes(head_bytes), memoryview(bytes(shape.out_bytes - head_bytes))]

    def one() -> None:
        exchange(channel, pieces, Deadline.after(5))

    return one


def channel(scheme: str, server_us: int, client_us: int) -> Side:
    return Side(
        lambda shape: serve_channel(shape, scheme, server_us),
        lambda address, shape, stack: channel_client(address, shape, stack, scheme, client_us),
    )


# The same channel, with the wire's messages made, read and matched. Replies have the size of a real one, 200 bytes and some.


def serve_wire(shape: Shape, spin_us: int) -> None:
    listener = listen(f"tcp://127.0.0.1:0?spin_us={spin_us}", max_frame_bytes=LIMIT)
    say(listener.endpoint)
    channel = listener.accept(Deadline.after(60))
    n_values = REQUESTS * NUM_DRAFTS
    tokens, confidences = memoryview(bytes(4 * n_values)).cast("i"), memoryview(bytes(4 * n_values)).cast("f")
    row_bytes, never = _row_bytes(shape), Deadline.never()
    try:
        while True:
            header, payload = codec.decode_frame(channel.recv(never))
            step = codec.decode_step(payload, row_bytes)
            entries = [EntryReply(one.slot, one.generation, one.n_rows, RequestStatus.OK) for one in step.entries]
            reply = StepReply(step.step_id, NUM_DRAFTS, 1, entries, tokens, confidences)
            answer = Header(header.operation, header.session, header.sequence, 0, int(HeaderFlag.REPLY), FrameStatus.OK)
            channel.send([codec.encode_frame(answer, codec.encode_step_reply(reply))], Deadline.after(5))
    except TransportError:
        pass
    finally:
        channel.close()
        listener.close()


def wire_client(address: str, shape: Shape, stack: ExitStack, spin_us: int) -> Exchange:
    channel = connect(f"{address.partition('?')[0]}?spin_us={spin_us}", Deadline.after(30), max_frame_bytes=LIMIT)
    stack.callback(channel.close)
    rows = memoryview(bytes(REQUESTS * _row_bytes(shape)))
    sequence = 0

    def one() -> None:
        nonlocal sequence
        sequence += 1
        entries = [
            Entry(slot, 1, sequence, 1, 7, sequence + 1, int(EntryFlag.NEED_DRAFT), NUM_DRAFTS)
            for slot in range(REQUESTS)
        ]
        head = codec.encode_step_head(1, sequence, sequence, entries, len(rows))
        header, payload = codec.decode_frame(exchange(channel, [head, rows], Deadline.after(5)))
        reply = codec.decode_step_reply(payload)
        if header.sequence != sequence or reply.step_id != sequence or header.operation != Operation.STEP:
            raise SystemExit(f"another answer than was asked for: {header}")

    return one


def _row_bytes(shape: Shape) -> int:
    return max(4, (shape.out_bytes - 224) // REQUESTS)


# ZeroMQ with a JSON header in front of the rows.


def serve_zmq(shape: Shape) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.REP) as server:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        say(str(port))
        while True:
            head, _ = server.recv_multipart(copy=False)
            asked = json.loads(head.buffer.tobytes())
            drafts = [{"slot": one["slot"], "status": "ok"} for one in asked["requests"]]
            answer = {"step": asked["step"], "drafts": drafts, "worker_us": 1}
            server.send_multipart([json.dumps(answer).encode(), bytes(shape.back_bytes)], copy=False)


def zmq_client(address: str, shape: Shape, stack: ExitStack) -> Exchange:
    import zmq

    context = stack.enter_context(zmq.Context())
    sock = stack.enter_context(context.socket(zmq.REQ))
    sock.connect(f"tcp://127.0.0.1:{address}")
    rows = bytes(shape.out_bytes)
    step = 0

    def one() -> None:
        nonlocal step
        step += 1
        requests = [
            {"slot": slot, "generation": 1, "first_pos": step, "n_rows": 1, "anchor": 7, "need_draft": True}
            for slot in range(REQUESTS)
        ]
        sock.send_multipart([json.dumps({"op": "step", "step": step, "requests": requests}).encode(), rows], copy=False)
        head, _ = sock.recv_multipart(copy=False)
        if json.loads(head.buffer.tobytes())["step"] != step:
            raise SystemExit("another answer than was asked for")

    return one


BASE: Final = "bare socket, spinning"
SIDES: Final[dict[str, Side]] = {
    BASE: bare(SPIN_US),
    "bare socket, blocking": bare(0),
    "tcp, spinning": channel("tcp", SPIN_US, SPIN_US),
    "tcp, blocking": channel("tcp", 0, 0),
    "tcp, as it comes": channel("tcp", DEFAULT_LISTEN_SPIN_US, DEFAULT_CONNECT_SPIN_US),
    "tcp, spinning, with wire messages": Side(
        lambda shape: serve_wire(shape, SPIN_US),
        lambda address, shape, stack: wire_client(address, shape, stack, SPIN_US),
    ),
    "ucx over its TCP lane": channel("o1tcp", SPIN_US, SPIN_US),
    "ucx over RDMA": channel("o1rdma", SPIN_US, SPIN_US),
    "ZeroMQ REQ/REP, JSON header": Side(serve_zmq, zmq_client),
}


# Both sides.


def say(line: str) -> None:
    print(line, flush=True)


def start(name: str, shape: Shape, stack: ExitStack) -> tuple[subprocess.Popen[str], str]:
    """The server of a side, as a process of its own, and its address."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", name, "--shape", shape.name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stderr is not None
    stack.callback(process.stdout.close)
    stack.callback(process.stderr.close)
    address = process.stdout.readline().strip()
    if not address:
        raise Absent(process.stderr.read().strip().splitlines()[-1])
    return process, address


def cpu_ns(pid: int) -> int:
    """What all threads of a process have run so far."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent += int((task / "schedstat").read_text().split()[0])
    return spent


class Runner:
    """One side with its server; `block` makes so many exchanges and notes what they cost."""

    def __init__(self, name: str, shape: Shape, stack: ExitStack) -> None:
        self.name = name
        self.server, address = start(name, shape, stack)
        try:
            self.exchange = SIDES[name].client(address, shape, stack)
        except FarsparkError as error:
            raise Absent(str(error)) from error
        self.us: list[float] = []
        self.client_ns = self.server_ns = 0

    def block(self, count: int) -> None:
        exchange, took = self.exchange, []
        for _ in range(5):
            exchange()
        time.sleep(ASLEEP_S)
        ours, theirs = time.process_time_ns(), cpu_ns(self.server.pid)
        for _ in range(count):
            began = now_ns()
            exchange()
            took.append((now_ns() - began) / 1000)
        self.client_ns += time.process_time_ns() - ours
        time.sleep(ASLEEP_S)
        self.server_ns += cpu_ns(self.server.pid) - theirs
        self.us += took

    def result(self) -> dict[str, float]:
        ordered = sorted(self.us)
        return {
            "p50_us": round(statistics.median(ordered), 1),
            "p99_us": round(ordered[int(0.99 * len(ordered))], 1),
            "client_cpu_s_per_10000": round(self.client_ns / len(ordered) / 1e5, 3),
            "server_cpu_s_per_10000": round(self.server_ns / len(ordered) / 1e5, 3),
        }


def measure(shape: Shape, names: Sequence[str], blocks: int, rounds: int) -> dict[str, Any]:
    """Results by side; a sentence where it cannot be measured."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        runners = []
        for name in names:
            try:
                runners.append(Runner(name, shape, stack))
            except (Absent, ImportError) as absent:
                found[name] = f"not measured: {absent}"
        for _ in range(blocks):
            for runner in runners:
                runner.block(rounds)
            for name, program in PROGRAMS.items():
                note(name, program, shape, rounds, found)
        found |= {runner.name: runner.result() for runner in runners}
    return {name: found[name] for name in [*names, *PROGRAMS] if name in found}


def note(name: str, program: Callable[[Shape, int], float], shape: Shape, rounds: int, found: dict[str, Any]) -> None:
    """Note what a program of its own says that an exchange takes, the median over the blocks."""
    if isinstance(found.get(name), str):
        return
    try:
        us = program(shape, rounds)
    except Absent as absent:
        found[name] = f"not measured: {absent}"
        return
    kept = found.setdefault(name, {"each_us": []})
    kept["each_us"].append(us)
    kept["p50_us"] = round(statistics.median(kept["each_us"]), 1)


def perftest(shape: Shape, rounds: int) -> float:
    """UCX's own program: one way there with the request's size and one back with the reply's, medians added up."""
    tool = shutil.which("ucx_perftest")
    if tool is None:
        raise Absent("ucx_perftest is not installed (Debian: ucx-utils)")
    us = sum(one_way_us(tool, size, rounds) for size in {shape.out_bytes, shape.back_bytes})
    return 2 * us if shape.out_bytes == shape.back_bytes else us


def one_way_us(tool: str, size: int, rounds: int) -> float:
    """Median of active messages of `size` bytes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    # As the channel's own: one lane over TCP, on the loopback interface.
    environment = {**os.environ, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_WARN_UNUSED_ENV_VARS": "n"}
    command = [tool, "-p", port]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as server:
        try:
            time.sleep(0.2)
            test = ["-t", "ucp_am_lat", "-s", str(size), "-n", str(rounds), "-w", "20"]
            done = subprocess.run(
                [tool, "127.0.0.1", "-p", port, *test], capture_output=True, text=True, env=environment, timeout=60
            )
        except subprocess.TimeoutExpired as error:
            raise Absent("ucx_perftest did not end within 60 s") from error
        finally:
            server.kill()
    final = re.search(r"Final:\s+\d+\s+([0-9.]+)", done.stdout)
    if done.returncode or final is None:
        raise Absent(f"ucx_perftest failed: {(done.stderr or done.stdout).strip()[-200:]}")
    return float(final[1])


@functools.cache
def echo_program() -> Path:
    """`ucx_echo.c`, compiled; removed when this process ends. Raises Absent, which says why."""
    directory = tempfile.mkdtemp(prefix="farspark-bench-")
    atexit.register(shutil.rmtree, directory)
    program, native = Path(directory) / "ucx_echo", ROOT / "src" / "farspark" / "native"
    sources = [ROOT / "bench" / "ucx_echo.c", native / "ucx_channel.c"]
    done = subprocess.run(
        [
            "cc",
            "-std=c11",
            "-O2",
            "-D_GNU_SOURCE",
            "-pthread",
            f"-I{native}",
            *sources,
            "-lucp",
            "-lucs",
            "-o",
            program,
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Absent(f"ucx_echo.c needs a C compiler and the headers of UCX: {done.stderr.strip()[-200:]}")
    return program


def echo(shape: Shape, rounds: int) -> float:
    """The shim's exchange between two C programs."""
    quiet = {**os.environ, "UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal"}
    sizes = [str(one) for one in (shape.out_bytes, shape.back_bytes, rounds)]
    done = subprocess.run([echo_program(), *sizes], capture_output=True, text=True, env=quiet, timeout=60)
    if done.returncode:
        raise Absent(f"ucx_echo failed: {done.stderr.strip()[-200:]}")
    return float(done.stdout)


PROGRAMS: Final[dict[str, Callable[[Shape, int], float]]] = {
    "ucx_perftest over its TCP lane, C": perftest,
    "the shim over UCX's TCP lane, C": echo,
}


def show(shape: Shape, result: dict[str, Any]) -> None:
    print(
        f"\n{shape.name}\n{'':36}{'p50 us':>9}{'p99 us':>9}{'client':>9}{'server':>9}{'ratio':>8}   (CPU s per 10,000)"
    )
    base = result[BASE]["p50_us"]
    for name, one in result.items():
        if isinstance(one, str):
            print(f"{name:36} {one}")
            continue
        rest = (
            f"{one['p99_us']:9.1f}{one['client_cpu_s_per_10000']:9.2f}{one['server_cpu_s_per_10000']:9.2f}"
            if "p99_us" in one
            else f"{'':27}"
        )
        print(f"{name:36}{one['p50_us']:9.1f}{rest}{one['p50_us'] / base:8.2f}")


def run_in_real_time() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    except OSError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=300, help="of one side in one block")
    parser.add_argument(
        "--only", metavar="TEXT", action="append", help="sides whose names hold it; the bare one is always there"
    )
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--serve", choices=list(SIDES), help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=[shape.name for shape in SHAPES], help="only this one")
    options = parser.parse_args()
    load_round_calls()  # as engine and worker do before they connect
    if options.serve:
        shape = next(shape for shape in SHAPES if shape.name == options.shape)
        try:
            SIDES[options.serve].serve(shape)
        except (FarsparkError, ImportError) as error:
            raise SystemExit(str(error)) from error
        return
    names = [name for name in SIDES if name == BASE or not options.only or any(text in name for text in options.only)]
    in_real_time = run_in_real_time()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{'real-time priority' if in_real_time else 'no real-time priority'}, {options.blocks} blocks of {options.rounds}"
    )
    results = {}
    for shape in [shape for shape in SHAPES if options.shape in (None, shape.name)]:
        results[shape.name] = measure(shape, names, options.blocks, options.rounds)
        show(shape, results[shape.name])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
