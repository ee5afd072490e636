"""What an asynchronous round costs the device's stream, and the engine's thread, beyond the worker's draft and the wire.

Run on a machine with a GPU, from the root of the repository: `PYTHONPATH=src python3 bench/async_round.py`. No vLLM: each step
is a stretch of device time in place of the target, then the real gather, hand-off, proxy, client and a worker in a process of its
own that drafts nothing. Everything is measured in one run, by events on the stream:

  copies      the gather onto the host as synchronous rounds have it, and a copy of a result's size back: no hand-off between them
  null proxy  the same with the hand-off, released by a Python thread that only waits and publishes: the floor for Python
  thread, process   real asynchronous rounds; "beyond" is their stream time less the client's round trip
  sync        real synchronous rounds: the host waits, the stream idles
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fakes.drafters import NoopDrafter, info  # noqa: E402

from farspark.transport import parse_endpoint  # noqa: E402
from farspark.worker.batch import DraftBatch, DrafterInfo, DraftResult  # noqa: E402
from farspark.worker.config import WorkerConfig  # noqa: E402
from farspark.worker.server import Server  # noqa: E402

NUM_DRAFTS, CONTEXT, QUERY = 7, 128, 6
WARM_UP = 200


class BusyDrafter(NoopDrafter):
    def __init__(self, info: DrafterInfo, draft_us: float) -> None:
        super().__init__(info)
        self._draft_s = draft_us / 1e6

    def draft(self, batch: DraftBatch) -> DraftResult:
        until = time.perf_counter() + self._draft_s
        while time.perf_counter() < until:
            pass
        return super().draft(batch)


def serve(described: str, draft_us: float) -> None:
    drafter = BusyDrafter(pickle.loads(bytes.fromhex(described)), draft_us)
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint("tcp://127.0.0.1:0"),
        slots=drafter.info.slots,
        context=drafter.info.context,
    )
    with Server(drafter, config) as server:
        print(server.endpoint, flush=True)
        threading.Thread(target=server.serve, daemon=True).start()
        sys.stdin.read()


def start_worker(stack: ExitStack, described: DrafterInfo, draft_us: float) -> str:
    command = [sys.executable, __file__, "--serve", pickle.dumps(described).hex(), "--draft-us", str(draft_us)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().strip()


class Rig:
    """One batch shape: the device's buffers, the worker, and ways to run a step. Everything on the current stream."""

    def __init__(self, requests: int, taps: int, hidden: int, target_us: float, draft_us: float) -> None:
        import torch
        from tests.fakes.async_world import talker_spec

        from farspark.engine.config import FusedGather
        from farspark.engine.gather.forms import make_gather
        from farspark.engine.gather.layout import GatherShape
        from farspark.engine.gather.torch_gather import StepTensors
        from farspark.engine.handoff.handoff import DeviceBuffers
        from farspark.engine.result import ResultLayout

        self.torch = torch
        self.requests = requests
        self.info = info(
            taps=taps, hidden_size=hidden, num_drafts=NUM_DRAFTS, slots=requests, context=CONTEXT, vocab_size=100_000
        )
        self.rows = requests * QUERY
        device = torch.device("cuda", torch.cuda.current_device())
        shape = GatherShape(
            max_requests=requests,
            max_tokens=self.rows,
            taps=taps,
            hidden_size=hidden,
            context=CONTEXT,
            ring=CONTEXT,
        )
        self.form = make_gather(FusedGather.AUTO, shape, device)
        self.gather = self.form.gather
        self.layout = ResultLayout(requests, NUM_DRAFTS)
        self.result = torch.zeros(self.layout.size, dtype=torch.int32, device=device)
        self.host_result = torch.zeros(self.layout.size, dtype=torch.int32, pin_memory=True)
        self.buffers = DeviceBuffers(
            self.gather.rows_address,
            self.gather.meta_address,
            self.gather.ring.rows.data_ptr(),
            self.result.data_ptr(),
        )

        def ints(values: list[int], kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=kind, device=device)

        self.step = StepTensors(
            hidden=[torch.randn(self.rows, hidden, device=device, dtype=torch.bfloat16) for _ in range(taps)],
            positions=ints([i % QUERY for i in range(self.rows)], torch.int64),
            query_start_loc=ints([QUERY * i for i in range(requests + 1)]),
            slots=ints(list(range(requests))),
            num_sampled=ints([1] * requests),
            num_rejected=ints([0] * requests),
            last_sampled=ints([7] * requests, torch.int64).unsqueeze(1),
            next_prefill_tokens=ints([7] * requests),
            row_bound=self.rows,
            wants_drafts=True,
        )
        self.stack = ExitStack()
        self.endpoint = start_worker(self.stack, self.info, draft_us)
        self.spec = talker_spec(self.info, self.endpoint, timeout_s=1.0)
        self.cycles = int(target_us * 1000 * 1.7)
        self.owners = 0
        event: Any = torch.cuda.Event
        self._events = [[event(enable_timing=True) for _ in range(2)] for _ in range(4096)]

    def make_stream(self, region: Any, page: Any) -> Any:
        from farspark.engine.gather.streams import current_stream
        from farspark.engine.handoff.cuda_stream import CudaStream

        return CudaStream(region, page, current_stream(self.torch.device("cuda")))

    def measure(self, rounds: int, one_round: Callable[[], None], in_flight: int = 3) -> dict[str, Any]:
        """`one_round` enqueues a round, or does it. Percentiles of its time on the stream, and the time of a step."""
        torch = self.torch
        times: list[float] = []
        host: list[float] = []
        began = time.perf_counter()
        for at in range(WARM_UP + rounds):
            if at == WARM_UP:
                torch.cuda.synchronize()
                began = time.perf_counter()
            first, last = self._events[at % 4096]
            torch.cuda._sleep(self.cycles)  # the target's step
            first.record()
            before = time.perf_counter()
            one_round()
            host.append((time.perf_counter() - before) * 1e6)
            last.record()
            self.step.positions.add_(QUERY)
            if at >= in_flight:
                older = self._events[(at - in_flight) % 4096]
                older[1].synchronize()  # leaves the GIL, as an engine does that waits for its step
                if at - in_flight >= WARM_UP:
                    times.append(older[0].elapsed_time(older[1]) * 1000)
        torch.cuda.synchronize()
        step_us = (time.perf_counter() - began) / rounds * 1e6
        return {"stream_us": percentiles(times), "host_us": percentiles(host[WARM_UP:]), "step_us": round(step_us, 1)}

    def copies(self) -> None:
        self.gather._bring(self.step)
        self.result.copy_(self.host_result, non_blocking=True)

    def submission(self) -> Any:
        from farspark.engine.handoff.region import Submission
        from farspark.engine.round import Phase

        return Submission(
            list(range(self.requests)),
            [self.owners + i for i in range(self.requests)],
            0,
            Phase.DECODE,
            self.rows,
        )

    def reset_positions(self) -> None:
        torch = self.torch
        self.step.positions.copy_(torch.arange(self.rows, device="cuda") % QUERY)
        self.owners += self.requests
        torch.cuda.synchronize()

    def asynchronous(self, proxy: str, rounds: int) -> dict[str, Any]:
        from tests.fakes.async_world import settings

        from farspark.engine.config import AsyncProxy
        from farspark.engine.handoff.handoff import open_handoff
        from farspark.stats import Stats

        self.reset_positions()
        stats = Stats()
        chosen = settings(AsyncProxy(proxy), nap_us=0.0, watchdog_s=4.0)
        handoff = open_handoff(
            chosen, self.spec, max_rows=self.rows, buffers=self.buffers, make_stream=self.make_stream, stats=stats
        )
        try:
            until = time.monotonic() + 20
            while handoff.side.details().get("worker", {}).get("state") != "ready":
                if time.monotonic() > until:
                    raise RuntimeError("no worker")
                time.sleep(0.01)
            submission = self.submission()

            def one_round() -> None:
                handoff.begin(self.gather.pack, self.step, prepare=self.gather.prepare)
                handoff.submit(submission)

            found = self.measure(rounds, one_round)
        finally:
            handoff.close()
        counters = handoff.side.counters()
        found["mechanism"] = handoff.stream.mechanism
        latency = stats.snapshot()["latency"] | handoff.side.latency()
        found["rank0_submit_us"] = latency["rank0_submit_us"]
        found["rtt_us"], found["worker_us"] = latency["rtt_us"], latency["worker_us"]
        found["parked_us"] = latency["proxy_parked_us_decode"]
        found["proxy_before_us"], found["proxy_after_us"] = latency["proxy_before_us"], latency["proxy_after_us"]
        found["rounds_ok"], found["rounds_in_one_call"] = (
            counters.get("rounds_ok", 0),
            counters.get("rounds_in_one_call", 0),
        )
        found["beyond_us_p50"] = round(found["stream_us"]["p50"] - latency["rtt_us"]["p50"], 1)
        if found["rounds_ok"] < 0.99 * (rounds + WARM_UP):
            found["fault"] = f"of {rounds + WARM_UP} rounds {found['rounds_ok']} were good: {counters}"
        return found

    def null_proxy(self, rounds: int) -> dict[str, Any]:
        from farspark.engine.handoff.region import Region, RegionShape
        from farspark.native import HostPage, Status, load

        self.reset_positions()
        library = load()
        size = 4 * self.layout.size
        region = Region(RegionShape(self.spec.shape, self.rows, HostPage.bytes_needed(library, size)))
        page = HostPage.format(library, region.memory, region.page_offset, size)
        page.start_watchdog(4_000_000_000)
        stream = self.make_stream(region, page)
        reply = page.make_reply()

        def publish() -> None:
            round_ = 1
            while True:
                deadline = time.monotonic_ns() + 1_000_000_000
                status = page.wait_gathered(round_, spin_ns=10**9, nap_ns=0, deadline_ns=deadline)
                if status is Status.TIMED_OUT:
                    continue
                if status is not Status.OK:
                    return
                page.publish(round_, reply)
                round_ += 1

        thread = threading.Thread(target=publish)
        thread.start()
        number = 0

        def one_round() -> None:
            nonlocal number
            number += 1
            rows, meta = region.rows_address, region.meta_address(number)
            offset = stream.device_offset
            copies: list[int] = []
            launch = self.gather.prepare(self.step, rows + offset, meta + offset)
            if not launch:
                self.gather.pack(self.step)
                copies += (meta, self.buffers.meta, 16 * self.requests)
                copies += (rows, self.buffers.rows, self.rows * self.info.row_bytes)
            stream.submit(number, copies, self.buffers.result, launch)

        try:
            return self.measure(rounds, one_round)
        finally:
            page.fail_all(number)
            thread.join()
            self.torch.cuda.synchronize()
            page.stop_watchdog()
            stream.close()
            page.close()
            region.close()

    def synchronous(self, rounds: int) -> dict[str, Any]:
        from farspark.engine.result import PackedResult
        from farspark.engine.round import Phase, RoundInput, RoundRequest
        from farspark.engine.talker import Talker
        from farspark.stats import Stats

        self.reset_positions()
        stats = Stats()
        talker = Talker(self.spec, self.gather.ring, stats)
        talker.start()
        from farspark.clock import Deadline

        if not talker.client.wait_ready(Deadline.after(20)):
            raise RuntimeError("no worker")
        packed = PackedResult(self.layout, self.host_result.numpy())
        requests = [RoundRequest(i, (self.owners, i), 0) for i in range(self.requests)]

        def one_round() -> None:
            self.gather.run(self.step)
            gathered = self.gather.wait()
            talker.round.run(RoundInput(requests, gathered.meta, gathered.rows, Phase.DECODE), packed)
            self.result.copy_(self.host_result, non_blocking=True)

        try:
            found = self.measure(rounds, one_round)
        finally:
            talker.close()
        latency = stats.snapshot()["latency"]
        found["rtt_us"] = latency["rtt_us"]
        found["rounds_ok"] = stats.count("rounds_ok")
        found["beyond_us_p50"] = round(found["stream_us"]["p50"] - latency["rtt_us"]["p50"], 1)
        return found

    def close(self) -> None:
        self.stack.close()


def percentiles(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4", help="batch sizes (default: %(default)s)")
    parser.add_argument("--taps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--target-us", type=float, default=2000, help="device time of a step (default: %(default)s)")
    parser.add_argument("--draft-us", type=float, default=0, help="the worker's draft (default: %(default)s)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.draft_us)
        return 0
    import torch

    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "CUDA_MODULE_LOADING": os.environ.get("CUDA_MODULE_LOADING", ""),
    }
    is_good = True
    for requests in (int(one) for one in options.requests.split(",")):
        rig = Rig(requests, options.taps, options.hidden, options.target_us, options.draft_us)
        found: dict[str, Any] = {"rows_kib": rig.rows * rig.info.row_bytes // 1024, "fused": rig.form.is_fused}
        try:
            found["copies"] = rig.measure(options.rounds, rig.copies)
            found["null_proxy"] = rig.null_proxy(options.rounds)
            for proxy in ("thread", "process"):
                found[proxy] = rig.asynchronous(proxy, options.rounds)
                is_good = is_good and "fault" not in found[proxy]
            found["sync"] = rig.synchronous(options.rounds)
            found["launched"] = rig.gather.how_launched
        finally:
            rig.close()
        report[f"{requests} requests"] = found
    print(json.dumps(report, indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
