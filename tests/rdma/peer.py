"""`python -m tests.rdma.peer ENDPOINT`: workers to be killed, stopped and cut off.

Each line that comes in starts one more: the real server with `ArithmeticDrafter`, in a process of its own, which says its
process id and its endpoint as JSON once it listens. This process itself never touches UCX, so that it may fork: a Python that
starts from nothing takes a minute in an emulated machine.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.fakes.drafters import ArithmeticDrafter, info

from farspark.transport import parse_endpoint
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server


def main(endpoint: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a worker ended
    for _ in sys.stdin:
        if os.fork() == 0:
            serve(endpoint)


def serve(endpoint: str) -> None:
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint(endpoint),
        slots=4,
        context=10,
        allow_unauthenticated_network=True,
    )
    with Server(ArithmeticDrafter(info(context=10, slots=4)), config) as server:
        print(json.dumps([os.getpid(), server.endpoint]), flush=True)
        server.serve()


if __name__ == "__main__":
    main(sys.argv[1])
