"""A proxy process over a shared page: `proxy_child.py LIBRARY FD BYTES OFFSET MODE`. Prints a line for each step."""

from __future__ import annotations

import mmap
import os
import sys
import time

from farspark.native import HostPage, Status, load


def main(library: str, fd: str, size: str, offset: str, mode: str) -> None:
    memory = mmap.mmap(int(fd), int(size))
    page = HostPage.attach(load(library), memory, int(offset))
    round_, reply = (page.words().released + 1) % (1 << 32), page.make_reply()
    print("ready", os.getpid(), flush=True)
    while True:
        deadline = time.monotonic_ns() + 60_000_000_000
        status = page.wait_gathered(round_, spin_ns=20_000, nap_ns=50_000, deadline_ns=deadline)
        if status in (Status.ENDED, Status.TIMED_OUT):
            break
        if mode == "claim":
            print("claimed", page.claim(round_).name, flush=True)
            time.sleep(60)
        elif mode == "sleep":
            print("sleeps", flush=True)
            time.sleep(60)
        reply.memory[:] = bytes([(round_ & 0x7F) + 1]) * reply.size
        page.publish(round_, reply)
        round_ += 1
    page.close()
    print("over", status.name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
