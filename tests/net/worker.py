"""`python -m tests.net.worker ENDPOINT HIDDEN IDENTITY`: the real server with `ArithmeticDrafter`, as a process of its own.

Prints its endpoint as JSON once it listens, then its STATS for every line that comes in. Ends with its input, or finishes the
rounds in hand and ends on SIGTERM.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from tests.fakes.drafters import ArithmeticDrafter
from tests.net.world import CONTEXT, SLOTS, drafter_info

from farspark.transport import parse_endpoint
from farspark.worker.config import WorkerConfig
from farspark.worker.server import Server


class _Stop(Exception):
    pass


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise _Stop


def main(endpoint: str, hidden_size: int, identity: int) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s worker %(levelname)s %(message)s")
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint(endpoint),
        slots=SLOTS,
        context=CONTEXT,
        allow_unauthenticated_network=True,
    )
    signal.signal(signal.SIGTERM, _stop)
    with Server(ArithmeticDrafter(drafter_info(hidden_size, identity)), config) as server:
        serving = threading.Thread(target=server.serve)
        serving.start()
        try:
            print(json.dumps(server.endpoint), flush=True)
            for _ in sys.stdin:
                print(json.dumps(server.snapshot()), flush=True)
        except _Stop:
            pass
        server.stop()
        serving.join()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
