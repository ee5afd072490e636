"""A worker in a process of its own with `ArithmeticDrafter`, which does with signals what `farspark worker` does.

`python tests/fakes/signalled_worker.py ENDPOINT INFO` where INFO is a pickled `DrafterInfo` in hex; prints the address in use.
"""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fakes.drafters import ArithmeticDrafter  # noqa: E402

from farspark.transport import parse_endpoint  # noqa: E402
from farspark.worker.batch import DrafterInfo  # noqa: E402
from farspark.worker.config import WorkerConfig  # noqa: E402
from farspark.worker.server import Server  # noqa: E402


def main(endpoint: str, info: str) -> None:
    drafter = ArithmeticDrafter(pickle.loads(bytes.fromhex(info)))
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint(endpoint),
        slots=drafter.info.slots,
        context=drafter.info.context,
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with Server(drafter, config) as server:
        serving = threading.Thread(target=server.serve, daemon=True)
        serving.start()
        print(server.endpoint, flush=True)
        signal.sigwait({signal.SIGTERM})
        server.drain()
        server.stop()
        serving.join()


class SignalledWorker:
    """`with SignalledWorker(info) as worker`; where it was once, it is started again."""

    def __init__(self, info: DrafterInfo) -> None:
        self._info = pickle.dumps(info).hex()
        self.endpoint = "tcp://127.0.0.1:0"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__, self.endpoint, self._info], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        self.endpoint = process.stdout.readline().strip()
        assert self.endpoint, f"the worker ended with {process.wait()}"
        return process

    def __enter__(self) -> SignalledWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self._end()

    def _end(self) -> int:
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait(20)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._end()

    def restart(self) -> None:
        self.process = self._start()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
