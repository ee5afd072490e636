"""`python -m tests.net.relay SEED`: the wire between two namespaces. Carries IP packets from one TUN device to the other.

Commands come as lines of JSON on the standard input, each is answered by one line with the counts of both directions:
`{"open": END, "pid": P, "name": DEVICE}` makes the TUN device of an end in the namespace of process P, in place of the one
before; `{"from": END, "impairment": {...}}` changes one direction; `{}` only asks. END is 0 or 1. Ends with its input.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import heapq
import json
import os
import select
import struct
import sys
import time
from typing import Any

from tests.net.impairment import Impairment, Lane

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 65_536
_PACKETS_AT_ONCE = 64
_STDIN = 0


def open_tun(pid: int, name: str) -> int:
    """A TUN device in the network namespace of process `pid`; its descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(namespace, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to the namespace of process {pid}")
    finally:
        os.close(namespace)
    # The device belongs to the namespace in which it is made, whatever this thread does later.
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return tun


class Relay:
    """Owns both devices; one thread."""

    def __init__(self, seed: int) -> None:
        self._tuns: list[int | None] = [None, None]
        self._lanes = (Lane(2 * seed), Lane(2 * seed + 1))  # by the end that the packets come from
        self._under_way: list[tuple[float, int, int, bytes]] = []  # due, a running number, from which end, packet
        self._number = 0
        self._commands = b""

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self._under_way[0][0] - time.monotonic()) if self._under_way else None
            tuns = {tun: end for end, tun in enumerate(self._tuns) if tun is not None}
            ready, _, _ = select.select([_STDIN, *tuns], [], [], wait_s)
            for descriptor in ready:
                if descriptor != _STDIN:
                    self._take(descriptor, tuns[descriptor])
            self._deliver()
            if _STDIN in ready and not self._obey():
                return

    def _take(self, tun: int, end: int) -> None:
        lane = self._lanes[end]
        for _ in range(_PACKETS_AT_ONCE):
            try:
                packet = os.read(tun, _PACKET_BYTES)
            except OSError:
                return  # nothing more, or the device is down
            for due_s in lane.offer(len(packet), time.monotonic()):
                self._number += 1
                heapq.heappush(self._under_way, (due_s, self._number, end, packet))

    def _deliver(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(self._under_way)
            to = self._tuns[1 - end]
            if self._lanes[end].impairment.cut or to is None:
                self._lanes[end].counts.cut += 1
                continue
            try:
                os.write(to, packet)
            except OSError:
                self._lanes[end].counts.lost += 1  # the device is down, or not up yet

    def _obey(self) -> bool:
        read = os.read(_STDIN, 65_536)
        *lines, self._commands = (self._commands + read).split(b"\n")
        for line in lines:
            self._do(json.loads(line))
            print(json.dumps([dataclasses.asdict(lane.counts) for lane in self._lanes]), flush=True)
        return bool(read)

    def _do(self, command: dict[str, Any]) -> None:
        if "open" in command:
            end = command["open"]
            if (old := self._tuns[end]) is not None:
                os.close(old)
            self._tuns[end] = open_tun(command["pid"], command["name"])
        if "from" in command:
            self._lanes[command["from"]].impairment = Impairment(**command["impairment"])


if __name__ == "__main__":
    Relay(int(sys.argv[1])).run()
