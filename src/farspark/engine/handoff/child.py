"""The proxy process, `python -m farspark.engine.handoff.child FD`: an interpreter of its own, no torch, no CUDA."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import select
import signal
import sys
import threading
from dataclasses import dataclass
from typing import Final

from farspark.engine.handoff.proxy import Proxy, StagedRing
from farspark.engine.handoff.region import Region, RegionShape
from farspark.engine.talker import Talker, TalkerSpec
from farspark.native import HostPage, load
from farspark.stats import Stats

logger = logging.getLogger(__name__)

_PARENT_CHECK_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the engine's process hands down through the child's standard input."""

    spec: TalkerSpec
    shape: RegionShape
    library: str  # path of the native helper
    first: int  # number of the first round
    spin_ns: int
    nap_ns: int
    parent: int  # process id
    log_level: int


def main(fd: int) -> int:
    # Ctrl-C reaches the whole group; the engine ends this process when it is done with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job: Job = pickle.load(sys.stdin.buffer)
    logging.basicConfig(
        level=job.log_level,
        stream=sys.stderr,
        format="%(levelname)s %(asctime)s [farspark proxy %(process)d] %(message)s",
    )
    threading.Thread(target=_end_with, args=(job.parent,), name="farspark-parent", daemon=True).start()
    region = Region(job.shape, fd)
    # What was compiled into a temporary directory is gone from there.
    library = load(job.library if os.path.exists(job.library) else None)
    page = HostPage.attach(library, region.memory, region.page_offset)
    stats, ring = Stats(), StagedRing(region)
    talker = Talker(job.spec, ring, stats, ring_lags=True)
    proxy = Proxy(page, region, ring, talker, stats, spin_ns=job.spin_ns, nap_ns=job.nap_ns, tells=True)
    talker.start()
    # What is there now stays; a collection while a stream is parked need not look at it.
    gc.collect()
    gc.freeze()
    region.say_ready(os.getpid())
    try:
        proxy.run(job.first)
    finally:
        talker.close()
        proxy.tell_details()
        page.close()
    return 0


def _end_with(parent: int) -> None:
    """The engine may go without a word: its end of the pipe closes, or it is no longer this process's parent."""
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin], [], [], _PARENT_CHECK_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
