"""The hand-off of asynchronous rounds on a GPU: module loads while the stream is parked, a soak with faults, kills in mid-round.

From the root of the repository, with torch and Triton and no vLLM:
    PYTHONPATH=src python3 tests/gpu/handoff.py [loads] [soak] [kills] [capture] [--proxy thread|process] [--gather fused|torch]
Every part takes one to three minutes. Prints one JSON report per part and proxy, and exits 0 if every draft was exact, every
failed row zero, every wait over in time and every account balanced.
"""

from __future__ import annotations

import argparse
import atexit
import ctypes
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import torch  # noqa: E402
from tests.fakes.async_soak import OF_A_PROCESS, OF_ANY_PROXY, Soak  # noqa: E402
from tests.fakes.async_worker import WorkerProcess  # noqa: E402
from tests.fakes.async_world import (  # noqa: E402
    DEPTH,
    Mismatch,
    Row,
    World,
    make_info,
    row_of,
    settings,
    talker_spec,
)

from farspark.engine.config import AsyncProxy, AsyncSettings, FusedGather  # noqa: E402
from farspark.engine.gather.forms import make_gather  # noqa: E402
from farspark.engine.gather.layout import GatherShape  # noqa: E402
from farspark.engine.gather.streams import current_stream  # noqa: E402
from farspark.engine.gather.torch_gather import StepTensors, TorchGather  # noqa: E402
from farspark.engine.handoff.cuda_stream import CudaStream  # noqa: E402
from farspark.engine.handoff.handoff import DeviceBuffers  # noqa: E402
from farspark.engine.handoff.process import ProxyProcess  # noqa: E402
from farspark.engine.handoff.region import Region, distance  # noqa: E402
from farspark.engine.handoff.stream import Stream  # noqa: E402
from farspark.engine.result import ResultLayout, RoundOutcome  # noqa: E402
from farspark.native import HostPage  # noqa: E402
from farspark.worker.batch import DrafterInfo  # noqa: E402

TIMEOUT_S = 0.1
MAX_TOKENS = 64
SETS = DEPTH + 2  # of host buffers: what a round in flight reads is not written
INFO = make_info(taps=3, hidden_size=1024)


class GpuCopy:
    def __init__(self, buffer: torch.Tensor, source: torch.Tensor) -> None:
        self._buffer = buffer
        self._buffer.copy_(source, non_blocking=True)
        self._there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record()

    def wait(self, timeout_s: float) -> npt.NDArray[np.int32] | None:
        until = time.monotonic() + timeout_s
        while not self._there.query():
            if time.monotonic() >= until:
                return None
            time.sleep(0.00002)
        array: npt.NDArray[np.int32] = self._buffer.numpy().copy()
        return array


class _Buffers:
    """One step's inputs, pinned and on the device."""

    def __init__(self, info: DrafterInfo) -> None:
        slots = info.slots
        self.hidden = torch.zeros(MAX_TOKENS, info.taps, info.hidden_size, dtype=torch.bfloat16, pin_memory=True)
        self.positions = torch.zeros(MAX_TOKENS, dtype=torch.int64, pin_memory=True)
        # query starts, slots, sampled, rejected, next tokens by slot
        self.ints = torch.zeros(5, max(MAX_TOKENS, slots + 1), dtype=torch.int32, pin_memory=True)
        self.last = torch.zeros(slots, 1, dtype=torch.int64, pin_memory=True)
        self.on_device = [one.to("cuda") for one in (self.hidden, self.positions, self.ints, self.last)]


class _Pack:
    """As an engine has it enqueued: the gather itself with the rest of the round, where it can be."""

    def __init__(self, gather: TorchGather, enqueue_inputs: Callable[[], StepTensors]) -> None:
        self._gather = gather
        self._enqueue_inputs = enqueue_inputs

    def prepare(self, rows: int, meta: int) -> int:
        return self._gather.prepare(self._enqueue_inputs(), rows, meta)

    def __call__(self) -> None:
        self._gather.pack(self._enqueue_inputs())


class GpuDevice:
    """The real gather and the real stream."""

    def __init__(self, info: DrafterInfo, fused: FusedGather) -> None:
        self._info = info
        device = torch.device("cuda", torch.cuda.current_device())
        shape = GatherShape(
            max_requests=info.slots,
            max_tokens=MAX_TOKENS,
            taps=info.taps,
            hidden_size=info.hidden_size,
            context=info.context,
            ring=info.context,
        )
        self.form = make_gather(fused, shape, device, has_host_buffers=False)
        self.max_rows = shape.max_rows
        self._size = ResultLayout(info.slots, info.num_drafts).size
        self._result = torch.zeros(self._size, dtype=torch.int32, device=device)
        self._copies = [torch.zeros(self._size, dtype=torch.int32, pin_memory=True) for _ in range(SETS)]
        self._sets = [_Buffers(info) for _ in range(SETS)]
        self._turn = 0
        self.newest: StepTensors | None = None
        gather = self.form.gather
        self.buffers = DeviceBuffers(
            gather.rows_address, gather.meta_address, gather.ring.rows.data_ptr(), self._result.data_ptr()
        )
        torch.cuda.synchronize()

    def make_stream(self, region: Region, page: HostPage) -> Stream:
        return CudaStream(region, page, current_stream(torch.device("cuda")))

    def pack(self, rows: Sequence[Row]) -> Callable[[], None]:
        self._turn = (self._turn + 1) % SETS
        buffers, info = self._sets[self._turn], self._info
        n, at = len(rows), 0
        hidden = buffers.hidden.view(torch.uint8).view(MAX_TOKENS, -1).numpy()
        bound = 0
        for index, row in enumerate(rows):
            buffers.ints[0, index] = at
            buffers.ints[1, index] = row.request.slot
            buffers.ints[2, index] = int(row.sampled)
            buffers.ints[3, index] = row.rejected
            buffers.last[row.request.slot, 0] = row.token
            for offset in range(row.valid + row.rejected):
                # Behind the valid rows come others' rows: what was rejected must not be read.
                number = row.request.number if offset < row.valid else 0
                hidden[at] = np.frombuffer(row_of(number, row.start + offset, info.row_bytes), dtype=np.uint8)
                buffers.positions[at] = row.start + offset
                at += 1
            bound += min(row.valid + row.rejected, info.context)
        buffers.ints[0, n] = at
        tokens = at
        row_bound = min(bound, self.max_rows)

        def enqueue_inputs() -> StepTensors:
            for there, here in zip(
                buffers.on_device, (buffers.hidden, buffers.positions, buffers.ints, buffers.last), strict=True
            ):
                there.copy_(here, non_blocking=True)
            states, positions, ints, last = buffers.on_device
            self.newest = StepTensors(
                hidden=[states[:tokens, tap] for tap in range(info.taps)],
                positions=positions,
                query_start_loc=ints[0, : n + 1],
                slots=ints[1, :n],
                num_sampled=ints[2, :n],
                num_rejected=ints[3, :n],
                last_sampled=last,
                next_prefill_tokens=ints[4, : info.slots],
                row_bound=row_bound,
                wants_drafts=True,
            )
            return self.newest

        return _Pack(self.form.gather, enqueue_inputs)

    def clear_result(self) -> None:
        self._result.zero_()

    def copy_result(self, stream: Stream) -> GpuCopy:
        return GpuCopy(self._copies[self._turn], self._result)


class Modules:
    """Fresh modules, each with one kernel, loaded by the driver from PTX and launched on a stream of its own.

    With `holds_gil` the calls keep the GIL, as an extension's may.
    """

    PTX = """.version 7.0
.target sm_70
.address_size 64
.visible .entry k{n}(.param .u64 p)
{{
  .reg .u64 %a; .reg .u32 %v;
  ld.param.u64 %a, [p];
  mov.u32 %v, {n};
  st.global.u32 [%a], %v;
  ret;
}}
"""

    def __init__(self) -> None:
        self._free = ctypes.CDLL("libcuda.so.1")
        self._holding = ctypes.PyDLL("libcuda.so.1")
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._word = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._back = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._kept: list[Any] = []
        self.count = 0
        torch.cuda.synchronize()

    def load_and_run(self, *, holds_gil: bool) -> float:
        """Milliseconds until the load and the launch returned."""
        self.count += 1
        calls = self._holding if holds_gil else self._free
        began = time.perf_counter()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        image = ctypes.create_string_buffer(self.PTX.format(n=self.count).encode())
        self._check(calls.cuModuleLoadData(ctypes.byref(module), image))
        self._check(calls.cuModuleGetFunction(ctypes.byref(function), module, f"k{self.count}".encode()))
        pointer = ctypes.c_uint64(self._word.data_ptr())
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        stream = ctypes.c_void_p(self._stream.cuda_stream)
        self._check(calls.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))
        took = time.perf_counter() - began
        self._kept.append(module)
        return took * 1000

    def is_right(self) -> bool:
        """Whether the newest kernel has run. The side stream is not parked."""
        with torch.cuda.stream(self._stream):
            self._back.copy_(self._word, non_blocking=True)
        self._stream.synchronize()
        return int(self._back[0]) == self.count

    @staticmethod
    def _check(result: int) -> None:
        if result:
            raise RuntimeError(f"CUDA error {result}")


@contextmanager
def engine(
    proxy: AsyncProxy, fused: FusedGather, *, seed: int, timeout_s: float = TIMEOUT_S, **changes: Any
) -> Iterator[tuple[World, WorkerProcess, AsyncSettings]]:
    with WorkerProcess(INFO) as worker:
        chosen = settings(proxy, nap_us=0.0, **changes)
        spec = talker_spec(INFO, worker.endpoint, timeout_s=timeout_s)
        with World(GpuDevice(INFO, fused), INFO, chosen, spec, seed=seed) as world:
            world.wait_ready()
            for _ in range(8):
                world.step()
            world.drain()
            torch.cuda.synchronize()
            yield world, worker, chosen


def stop(pid: int) -> None:
    """Returns when the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.0005)


def until_good(world: World) -> None:
    """Until the worker holds both slots again."""
    until, good = time.monotonic() + 20, 0
    while good < 2:
        world.step([world.row(0, 2), world.row(1, 1)])
        world.drain()
        good = good + 1 if world.outcomes[-1] is RoundOutcome.OK else 0
        if time.monotonic() > until:
            raise RuntimeError(f"no good round within 20 s: {world.counters()}")


def is_parked(world: World) -> bool:
    """Wait until the newest round is gathered; whether it is not released yet."""
    page, newest = world.handoff._page, world.handoff._gate.newest
    until = time.monotonic() + 10
    while distance(page.words().gathered, newest) < 0 and time.monotonic() < until:
        time.sleep(0.0001)
    words = page.words()
    return distance(words.gathered, newest) >= 0 and distance(words.released, newest) < 0


def loads(proxy: AsyncProxy, fused: FusedGather) -> dict[str, Any]:
    """30 loads with the GIL left, 30 with it held, then 30 whose round nobody but the watchdog ends."""
    report: dict[str, Any] = {}
    faults: list[str] = []
    with engine(proxy, fused, seed=11, watchdog_s=0.3) as (world, worker, _):
        modules = Modules()
        worker.tell("every 25000")
        for name, holds_gil in (("gil_left", False), ("gil_held", True)):
            report[name] = _load_while_parked(world, modules, 30, holds_gil, faults, lambda: None, lambda: None)
        worker.tell("every 0")
        report["torch_first_uses"] = _first_uses(world, worker, faults)
    with engine(proxy, fused, seed=12, watchdog_s=0.2, timeout_s=20.0) as (world, worker, _):
        pid = worker.process.pid
        report["watchdog_only"] = _load_while_parked(
            world,
            modules,
            30,
            True,
            faults,
            lambda: stop(pid),
            lambda: os.kill(pid, signal.SIGCONT),
        )
        report["watchdog_preempted"] = world.handoff.snapshot()["async_watchdog"]["preempted"]
        if report["watchdog_preempted"] < 30:
            faults.append(f"the watchdog ended {report['watchdog_preempted']} rounds, expected 30")
    return report | {"faults": faults}


def _load_while_parked(
    world: World,
    modules: Modules,
    count: int,
    holds_gil: bool,
    faults: list[str],
    before: Callable[[], None],
    after: Callable[[], None],
) -> dict[str, Any]:
    times, parked, right = [], 0, 0
    for _ in range(count):
        # A round that was lost is followed by one that asks for windows and is over at once.
        until_good(world)
        before()
        world.step([world.row(0, 2), world.row(1, 1)])
        parked += is_parked(world)
        times.append(modules.load_and_run(holds_gil=holds_gil))
        right += modules.is_right()
        world.drain()
        after()
    if (parked, right) != (count, count):
        faults.append(f"of {count} loads {parked} began while the stream was parked and {right} kernels ran")
    times.sort()
    return {
        "loads": count,
        "while_parked": parked,
        "ran": right,
        "ms_p50": round(times[count // 2], 2),
        "ms_max": round(times[-1], 2),
        "rounds": dict(world.tally.outcomes),
    }


FIRST_USES: list[Callable[..., Any]] = [
    torch.special.i0e,
    torch.special.i1,
    torch.special.erfcx,
    torch.special.ndtri,
    torch.special.bessel_j0,
    torch.special.bessel_y0,
    torch.special.modified_bessel_k0,
    torch.special.airy_ai,
    torch.lgamma,
    torch.digamma,
    torch.erfinv,
    torch.asinh,
    torch.acosh,
    torch.frac,
    lambda x: torch.cummax(x, 0),
    lambda x: torch.logcumsumexp(x, 0),
    lambda x: torch.heaviside(x, x),
    lambda x: torch.hypot(x, x),
    lambda x: torch.nextafter(x, x),
    lambda x: torch.fmod(x, x),
]


def _first_uses(world: World, worker: WorkerProcess, faults: list[str]) -> dict[str, Any]:
    """Kernels of torch's own that this process has not used: the driver loads each at its first launch."""
    x = torch.rand(64, device="cuda") + 1.5
    torch.cuda.synchronize()
    times, parked = [], 0
    for use in FIRST_USES:
        until_good(world)
        worker.tell("late 25")
        world.step([world.row(0, 2)])
        parked += is_parked(world)
        began = time.perf_counter()
        use(x)
        times.append((time.perf_counter() - began) * 1000)
        world.drain()
    if parked < len(FIRST_USES):
        faults.append(f"{parked} of {len(FIRST_USES)} first uses began while the stream was parked")
    return {"uses": len(times), "while_parked": parked, "ms_max": round(max(times), 2)}


def soak(proxy: AsyncProxy, fused: FusedGather, rounds: int, seed: int) -> dict[str, Any]:
    faults_wanted = list(OF_ANY_PROXY) * 8
    if proxy is AsyncProxy.PROCESS:
        faults_wanted += list(OF_A_PROCESS) * 3
    random.Random(seed).shuffle(faults_wanted)
    began = time.monotonic()
    with engine(proxy, fused, seed=seed, respawns=50) as (world, worker, chosen):
        modules = Modules()
        soaking = Soak(world, worker, chosen, TIMEOUT_S)
        slowest = 0.0

        def between(at: int) -> None:
            nonlocal slowest
            if at % 40 == 7:
                slowest = max(slowest, modules.load_and_run(holds_gil=at % 80 == 7))

        faults: list[str] = []
        try:
            soaking.run(rounds, faults_wanted, between=between)
            soaking.settle()
            faults += soaking.faults_of_accounts()
        except (Mismatch, AssertionError) as error:
            faults.append(f"{type(error).__name__}: {error}")
        if not modules.is_right():
            faults.append("the newest module's kernel did not run")
        if modules.count < 200 <= rounds // 40:
            faults.append(f"{modules.count} module loads, expected 200")
        snapshot = world.handoff.snapshot()
        report = {
            "seconds": round(time.monotonic() - began, 1),
            "rounds": world.tally.rounds,
            "drafts_compared": world.tally.drafts,
            "outcomes": dict(world.tally.outcomes),
            "not_handed_over": world.tally.not_handed_over,
            "slots_begun_anew": world.tally.afresh,
            "module_loads": modules.count,
            "slowest_load_ms": round(slowest, 1),
            "faults_injected": dict(soaking.faults),
            "longest_recovery_s": round(soaking.longest_recovery_s, 2),
            "counters": dict(sorted(world.counters().items())),
            "watchdog": snapshot["async_watchdog"],
            "async": snapshot["async"],
            "latency": world.handoff.side.latency() | world.stats.snapshot()["latency"],
            "fused": world.device.form.is_fused,  # type: ignore[attr-defined]
            "launched": world.device.form.gather.how_launched,  # type: ignore[attr-defined]
        }
    return report | {"faults": faults}


# ---- capture


def capture(proxy: AsyncProxy, fused: FusedGather) -> dict[str, Any]:
    """What an engine captures of a step waits for nobody, and its replays leave the rounds that follow alone."""
    faults: list[str] = []
    with engine(proxy, fused, seed=41) as (world, _, _):
        device = world.device
        assert isinstance(device, GpuDevice)
        assert device.newest is not None
        device.form.gather.rehearse(device.newest)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        before = world.handoff._gate.newest
        with torch.cuda.graph(graph):
            device.form.gather.rehearse(device.newest)
        for _ in range(200):
            graph.replay()
            world.step()
        world.drain()
        rounds = world.handoff._gate.newest - before
        if rounds != 200:
            faults.append(f"{rounds} rounds were numbered for 200 steps")
        if world.tally.good < 150:
            faults.append(f"{world.tally.good} rounds of 200 were good")
        return {"outcomes": dict(world.tally.outcomes), "faults": faults}


# ---- kills


def kills(proxy: AsyncProxy, fused: FusedGather) -> dict[str, Any]:
    """In mid-round: the worker killed and stopped, the proxy killed and stopped, the interpreter ended in three ways."""
    faults: list[str] = []
    report: dict[str, Any] = {}
    scenarios: list[tuple[str, Callable[[World, WorkerProcess], None]]] = [
        ("worker SIGKILL", lambda world, worker: worker.process.send_signal(signal.SIGKILL)),
        ("worker SIGSTOP", lambda world, worker: worker.process.send_signal(signal.SIGSTOP)),
    ]
    if proxy is AsyncProxy.PROCESS:
        scenarios += [
            ("proxy SIGKILL", lambda world, worker: os.kill(_pid_of(world), signal.SIGKILL)),
            ("proxy SIGSTOP", lambda world, worker: os.kill(_pid_of(world), signal.SIGSTOP)),
        ]
    for name, strike in scenarios:
        with engine(proxy, fused, seed=21, watchdog_s=0.3) as (world, worker, _):
            worker.tell("every 60000")
            for _ in range(DEPTH):
                world.step([world.row(0, 2), world.row(2, 1)])
            parked = is_parked_at_all(world)
            strike(world, worker)
            began = time.monotonic()
            world.drain()
            drained_ms = (time.monotonic() - began) * 1000
            for _ in range(4):
                world.step([world.row(1, 1)])
            world.drain()
            began = time.monotonic()
            closed = world.handoff.close()
            report[name] = {
                "was_parked": parked,
                "drained_ms": round(drained_ms),
                "closed": closed,
                "closed_ms": round((time.monotonic() - began) * 1000),
                "outcomes": dict(world.tally.outcomes),
                "watchdog": world.handoff.snapshot()["async_watchdog"],
            }
            if not parked or not closed or drained_ms > 5000:
                faults.append(f"{name}: {report[name]}")
    for how in ("exit", "exception", "exit without a handler"):
        report[how] = _exit_in_mid_round(proxy, fused, how, faults)
    return report | {"faults": faults}


def is_parked_at_all(world: World) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        words = world.handoff._page.words()
        if distance(words.gathered, words.released) > 0:
            return True
        time.sleep(0.0005)
    return False


def _pid_of(world: World) -> int:
    assert isinstance(world.handoff.side, ProxyProcess)
    return int(world.handoff.side.facts()["proxy_pid"])


def _exit_in_mid_round(proxy: AsyncProxy, fused: FusedGather, how: str, faults: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--exit", how, "--proxy", proxy.value, "--gather", fused.name.lower()]
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        faults.append(f"{how}: the interpreter did not end within 90 s")
        return {"ended": False}
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
    ended_s = time.time() - float(lines.get("ending_at", "nan"))
    proxy_pid = int(lines.get("proxy_pid", "0"))
    time.sleep(2.5)
    is_proxy_gone = not proxy_pid or not Path(f"/proc/{proxy_pid}").exists()
    found = {
        "code": done.returncode,
        "was_parked": lines.get("parked") == "True",
        "drained": lines.get("drained"),
        "ended_s_after": round(ended_s, 2),
        "proxy_is_gone": is_proxy_gone,
        "seconds": round(time.monotonic() - began, 1),
    }
    expected_code = {"exit": 7, "exception": 1, "exit without a handler": 7}[how]
    expected_drained = None if how == "exit without a handler" else "True"
    if (
        done.returncode != expected_code
        or not found["was_parked"]
        or found["drained"] != expected_drained
        or not is_proxy_gone
        or not ended_s < 15
    ):
        faults.append(f"{how}: {found} {done.stderr[-2000:]}")
    return found


def exit_in_mid_round(proxy: AsyncProxy, fused: FusedGather, how: str) -> None:
    """The child of `_exit_in_mid_round`: does not return."""
    worker = WorkerProcess(INFO)
    chosen = settings(proxy, nap_us=0.0, watchdog_s=1.0)
    spec = talker_spec(INFO, worker.endpoint, timeout_s=0.3)
    world = World(GpuDevice(INFO, fused), INFO, chosen, spec, seed=31)
    world.wait_ready()
    for _ in range(8):
        world.step()
    world.drain()
    if isinstance(world.handoff.side, ProxyProcess):
        print("proxy_pid", _pid_of(world), flush=True)
    # The last handler runs first: the worker ends after the rounds.
    atexit.register(worker.process.kill)
    if how != "exit without a handler":
        atexit.register(lambda: print("drained", world.handoff.close(), flush=True))
    worker.process.send_signal(signal.SIGSTOP)
    for _ in range(DEPTH):
        world.step([world.row(0, 2)])
    print("parked", is_parked_at_all(world), flush=True)
    print("ending_at", time.time(), flush=True)
    if how == "exception":
        raise RuntimeError("the engine fails in mid-round")
    sys.exit(7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], help="loads, soak, kills, capture; all if none is named")
    parser.add_argument("--proxy", choices=("thread", "process"), action="append", help="both if not given")
    parser.add_argument("--gather", choices=("auto", "on", "fused", "off", "torch"), default="fused")
    parser.add_argument("--rounds", type=int, default=10_000, help="of the soak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the reports into this file")
    parser.add_argument("--exit", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    names = {"fused": FusedGather.ON, "on": FusedGather.ON, "torch": FusedGather.OFF, "off": FusedGather.OFF}
    fused = names.get(arguments.gather, FusedGather.AUTO)
    proxies = [AsyncProxy(name) for name in arguments.proxy or ("thread", "process")]
    if arguments.exit:
        exit_in_mid_round(proxies[0], fused, arguments.exit)
    reports: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "CUDA_MODULE_LOADING": os.environ.get("CUDA_MODULE_LOADING", ""),
    }
    print(json.dumps(reports), flush=True)
    passed = True
    for part in arguments.parts or ("loads", "soak", "kills", "capture"):
        for proxy in proxies:
            began = time.monotonic()
            try:
                match part:
                    case "loads":
                        report = loads(proxy, fused)
                    case "soak":
                        report = soak(proxy, fused, arguments.rounds, arguments.seed)
                    case "capture":
                        report = capture(proxy, fused)
                    case "kills":
                        report = kills(proxy, fused)
                    case _:
                        parser.error(f"no part {part!r}: loads, soak, kills or capture")
            except (Mismatch, AssertionError, RuntimeError) as error:
                logging.exception("%s %s", part, proxy.value)
                report = {"faults": [f"{type(error).__name__}: {error}"]}
            report["total_s"] = round(time.monotonic() - began, 1)
            passed = passed and not report["faults"]
            reports[f"{part} {proxy.value}"] = report
            print(json.dumps({f"{part} {proxy.value}": report}), flush=True)
    reports["passed"] = passed
    print(json.dumps({"passed": passed}))
    if arguments.out:
        arguments.out.write_text(json.dumps(reports, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
