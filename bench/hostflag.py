"""What the hand-off of an asynchronous round costs the CPU: gathered is written, a proxy sees it and publishes, the release is
seen. A CPU thread stands in for the stream, so what a device adds (its way over the bus, both directions) is not in it.

Two proxies: a C loop (the floor), and a Python thread that makes the two calls as an engine's proxy does. Then the cost of
publishing alone, and the share of a core that the watchdog takes. Both threads spin on a core each, so the machine needs two
that are free. Run from the root of the repository: `python bench/hostflag.py`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from farspark.native import HostPage, Status, load
from farspark.native.build import FLAGS

HERE = Path(__file__).resolve().parent
REPLY_BYTES = 4 * (2 + 2 * 4 + 2 * 4 * 7)  # 4 slots, 7 drafts
MS = 1_000_000


class Bench:
    """The helper and the C loops in one library."""

    def __init__(self, directory: Path) -> None:
        path = directory / "libbench.so"
        subprocess.run(["cc", *FLAGS, str(HERE / "hostflag.c"), "-o", str(path)], check=True)
        self.library = load(path)
        self.calls = self.library.calls
        pointer, u32, i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int64
        self.calls.bench_stream.argtypes = (pointer, u32, u32, i64, pointer)
        self.calls.bench_proxy.argtypes = (pointer, u32, u32, pointer, u32)
        self.calls.bench_alone.argtypes = (pointer, u32, u32, pointer, u32)
        self.calls.bench_alone.restype = i64

    def proxy_in_c(self, page: HostPage, rounds: int) -> None:
        reply = page.make_reply()
        if self.calls.bench_proxy(page._handle, 1, rounds, reply.address, reply.size) != 0:
            raise RuntimeError("a round was lost")

    def proxy_in_python(self, page: HostPage, rounds: int) -> None:
        reply, deadline = page.make_reply(), time.monotonic_ns() + 600_000 * MS
        for round_ in range(1, rounds + 1):
            page.wait_gathered(round_, spin_ns=0, nap_ns=0, deadline_ns=deadline)
            if page.publish(round_, reply) is not Status.OK:
                raise RuntimeError("a round was lost")

    def rounds(self, proxy: Callable[[HostPage, int], None], rounds: int, pause_us: int) -> list[float]:
        """Microseconds of each round, sorted."""
        times = (ctypes.c_int64 * rounds)()
        cores = sorted(os.sched_getaffinity(0))
        with HostPage.create(self.library, REPLY_BYTES) as page:
            page.start_watchdog(10_000 * MS)

            def serve() -> None:
                os.sched_setaffinity(0, cores[-1:])
                proxy(page, rounds)

            def stream() -> None:
                os.sched_setaffinity(0, cores[:1])
                self.calls.bench_stream(page._handle, 1, rounds, pause_us * 1000, ctypes.byref(times))

            serving, streaming = threading.Thread(target=serve), threading.Thread(target=stream)
            serving.start()
            streaming.start()
            serving.join()
            streaming.join()
        return sorted(ns / 1000 for ns in times)

    def publish_alone_ns(self, rounds: int) -> float:
        with HostPage.create(self.library, REPLY_BYTES) as page:
            reply = page.make_reply()
            return float(self.calls.bench_alone(page._handle, 1, rounds, reply.address, reply.size)) / rounds

    def watchdog_share(self, deadline_ms: int, seconds: float) -> float:
        """CPU time of this process over wall time, with nothing but the watchdog running: an upper bound."""
        with HostPage.create(self.library, REPLY_BYTES) as page:
            page.start_watchdog(deadline_ms * MS)
            page.gather(1)
            page.fail(1)
            cpu, wall = time.process_time(), time.perf_counter()
            time.sleep(seconds)
            return (time.process_time() - cpu) / (time.perf_counter() - wall)


def percentiles(times: list[float]) -> dict[str, float]:
    at = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: round(times[int(share * (len(times) - 1))], 3) for name, share in at.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--pause-us", type=int, default=20, help="between two rounds (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        report = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
            "reply_bytes": REPLY_BYTES,
            "rounds": options.rounds,
            "hand_off_us": {
                "proxy in C": percentiles(bench.rounds(bench.proxy_in_c, options.rounds, options.pause_us)),
                "proxy in Python": percentiles(bench.rounds(bench.proxy_in_python, options.rounds, options.pause_us)),
            },
            "gather_publish_consume_alone_ns": round(bench.publish_alone_ns(1_000_000), 1),
            "watchdog_share_of_a_core": {f"{ms} ms": round(bench.watchdog_share(ms, 3.0), 5) for ms in (200, 20, 2)},
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
