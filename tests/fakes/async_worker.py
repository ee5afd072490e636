"""A worker in a process of its own with `ArithmeticDrafter`, told on standard input how to misbehave.

`python tests/fakes/async_worker.py ENDPOINT INFO` where INFO is a pickled `DrafterInfo` in hex; prints the address in use.
Lines of standard input: `late MS` (the next draft takes so long), `fail` (the next draft raises), `entry` (the next draft's
first entry fails), `cut` (every connection ends now), `every US` (each draft takes at least so long), `end`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.fakes.drafters import ArithmeticDrafter  # noqa: E402

from farspark.transport import parse_endpoint  # noqa: E402
from farspark.worker.batch import DraftBatch, DrafterInfo, DraftResult  # noqa: E402
from farspark.worker.config import WorkerConfig  # noqa: E402
from farspark.worker.server import Server  # noqa: E402


class MisbehavingDrafter(ArithmeticDrafter):
    """What is told by one thread happens in another, once."""

    def __init__(self, info: DrafterInfo) -> None:
        super().__init__(info)
        self.late_s = 0.0
        self.every_s = 0.0
        self.fails_first_entry = False

    def draft(self, batch: DraftBatch) -> DraftResult:
        late_s, self.late_s = self.late_s, 0.0
        time.sleep(late_s)
        until = time.perf_counter() + self.every_s
        self.not_finite = {batch.entries[0].slot} if self.fails_first_entry and batch.entries else set()
        self.fails_first_entry = False
        result = super().draft(batch)
        while time.perf_counter() < until:
            pass
        return result


def main(endpoint: str, info: str) -> None:
    drafter = MisbehavingDrafter(pickle.loads(bytes.fromhex(info)))
    config = WorkerConfig(
        checkpoint=Path("none"),
        listen=parse_endpoint(endpoint),
        slots=drafter.info.slots,
        context=drafter.info.context,
    )
    with Server(drafter, config) as server:
        print(server.endpoint, flush=True)
        threading.Thread(target=server.serve, daemon=True).start()
        for line in sys.stdin:
            match line.split():
                case ["late", ms]:
                    drafter.late_s = float(ms) / 1000
                case ["every", us]:
                    drafter.every_s = float(us) / 1e6
                case ["fail"]:
                    drafter.fail_next = 1
                case ["entry"]:
                    drafter.fails_first_entry = True
                case ["cut"]:
                    for connection in list(server._connections):
                        connection.channel.close()
                case _:
                    return


class WorkerProcess:
    """`with WorkerProcess(info) as worker`; `restart` takes the same address again."""

    def __init__(self, info: DrafterInfo) -> None:
        self._info = info
        self.endpoint = "tcp://127.0.0.1:0"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, self.endpoint, pickle.dumps(self._info).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        stdout: IO[str] | None = process.stdout
        assert stdout is not None
        self.endpoint = stdout.readline().strip()
        assert self.endpoint, "the worker did not start"
        return process

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def restart(self) -> None:
        self.kill()
        self.process = self._start()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
