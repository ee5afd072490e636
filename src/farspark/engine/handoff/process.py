"""The proxy as a process with an interpreter of its own, and the thread that starts another one when it dies or stalls."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import farspark
from farspark.engine.config import AsyncSettings
from farspark.engine.handoff.child import Job
from farspark.engine.handoff.gate import Gate
from farspark.engine.handoff.region import Region, distance, next_round
from farspark.engine.talker import TalkerSpec
from farspark.errors import FarsparkError
from farspark.native import HostPage

logger = logging.getLogger(__name__)

_START_S: Final = 30.0
# How often the heartbeat is looked at.
_CHECK_S: Final = 0.05
# A busy machine may keep a process from running for that long.
_STALL_AT_LEAST_S: Final = 1.0


class ProxyError(FarsparkError):
    """The proxy process cannot be started; the message says why."""


class ProxyProcess:
    """`start` and `stop` belong to the engine thread; between the two a keeper thread owns the child and the gate."""

    kind = "process"

    def __init__(self, settings: AsyncSettings, spec: TalkerSpec, region: Region, page: HostPage, gate: Gate) -> None:
        self._settings = settings
        self._spec = spec
        self._region = region
        self._page = page
        self._gate = gate
        self._stall_s = max(4 * settings.watchdog_s, _STALL_AT_LEAST_S)
        self._left = settings.respawns
        self._started = 0  # children
        self._child: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._served_from_s = 0.0
        self._accounts = threading.Lock()  # guards the next two, and that what is added to them leaves the region
        self._past: Counter[str] = Counter()  # of children that are gone
        self._last_details: dict[str, Any] = {}
        self._stopping = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._keeper = threading.Thread(target=self._keep, name="farspark-proxy-keeper", daemon=True)

    def start(self) -> None:
        """The first child, ready to serve; opens the gate. Raises ProxyError."""
        try:
            self._spawn(self._gate.newest)
        except BaseException:
            self._kill()
            raise
        self._keeper.start()

    def stop(self, timeout_s: float) -> bool:
        """Everything was failed ahead, which ends the child. One that does not end in time is killed, so that this is True."""
        until = time.monotonic() + timeout_s
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        if self._keeper.is_alive():
            self._keeper.join(timeout_s)
        if self._child is not None:
            try:
                self._child.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("farspark: the proxy process did not end within %g s and is killed", timeout_s)
        self._settle_accounts(self._gate.newest)
        self._kill()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        return True

    def counters(self) -> dict[str, int]:
        with self._accounts:
            return dict(self._past + Counter(self._region.counters.read().get("counters", {})))

    def latency(self) -> dict[str, Any]:
        latency: dict[str, Any] = self.details_and_latency().get("latency", {})
        return latency

    def details(self) -> dict[str, Any]:
        return {name: value for name, value in self.details_and_latency().items() if name != "latency"}

    def details_and_latency(self) -> dict[str, Any]:
        with self._accounts:
            return self._region.details.read() or self._last_details

    def facts(self) -> dict[str, Any]:
        child = self._child
        return {
            "proxy_pid": None if child is None else child.pid,
            "proxies_started": self._started,
            "respawns_left": self._left,
            "stall_s": self._stall_s,
        }

    # The keeper thread, but for the first child.

    def _spawn(self, newest: int) -> None:
        """Start a child that serves the rounds behind `newest`, wait until it can, and open the gate. Raises ProxyError."""
        self._started += 1
        self._region.renew(newest)
        job = Job(
            spec=self._spec.for_proxy(self._started),
            shape=self._region.shape,
            library=str(self._page.library.path),
            first=next_round(newest),
            spin_ns=self._settings.spin_ns,
            nap_ns=self._settings.nap_ns,
            parent=os.getpid(),
            log_level=logging.getLogger("farspark").getEffectiveLevel(),
        )
        fd = self._region.fd
        try:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "farspark.engine.handoff.child", str(fd)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[fd],
                env=_environment(),
            )
            self._child = child
            self._pidfd = os.pidfd_open(child.pid)
            assert child.stdin is not None
            child.stdin.write(pickle.dumps(job))
            child.stdin.flush()
        except OSError as error:
            raise ProxyError(f"the proxy process could not be started: {error}") from error
        until = time.monotonic() + _START_S
        while self._region.ready_pid != child.pid:
            if child.poll() is not None:
                raise ProxyError(f"the proxy process ended with code {child.returncode} before it was ready")
            if self._stopping.is_set():
                raise ProxyError("the engine ends")
            if time.monotonic() >= until:
                raise ProxyError(f"the proxy process was not ready within {_START_S:g} s")
            time.sleep(0.002)
        self._page.follow(self._pidfd)
        self._served_from_s = time.monotonic()
        self._gate.open(newest)

    def _keep(self) -> None:
        try:
            while (why := self._watch()) is not None:
                if not self._replace(why):
                    return
        except Exception:
            # A thread that dies leaves nobody to tell; the native watchdog still ends what is parked.
            logger.exception("farspark: the keeper of the proxy process failed")
            newest = self._gate.shut("internal error in the keeper of the proxy process", for_good=True)
            self._page.fail_all(newest)

    def _watch(self) -> str | None:
        """Why the child is of no more use; None when the engine stops it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        seen, unmoved = -1, 0
        while True:
            ready = poll.poll(_CHECK_S * 1000)
            if self._stopping.is_set():
                return None
            assert self._child is not None
            if ready:
                code = self._child.wait()
                return f"the proxy process {self._child.pid} ended ({_how(code)})"
            beat = self._region.heartbeat
            # Counted in looks, not in time: when all of the machine stood still, this thread did not look either.
            unmoved = unmoved + 1 if beat == seen else 0
            seen = beat
            if unmoved >= math.ceil(self._stall_s / _CHECK_S):
                return f"the proxy process {self._child.pid} has not moved for {self._stall_s:g} s"

    def _replace(self, why: str) -> bool:
        """Fail what is pending, bury the child and start another. False if there is none to be had."""
        while True:
            newest = self._gate.shut(why, for_good=False)
            served_s = time.monotonic() - self._served_from_s
            self._kill()
            _, far = self._page.fail_all(newest)
            self._page.follow(None)
            self._settle_accounts(newest)
            if self._stopping.is_set():
                return False
            if 0 < self._settings.respawn_reset_s <= served_s:
                self._left = self._settings.respawns
            if self._left == 0:
                self._gate.shut(why, for_good=True)
                logger.error(
                    "farspark: %s, and the budget of %d new ones is spent; the target decodes without drafts from here on",
                    why,
                    self._settings.respawns,
                )
                return False
            self._left -= 1
            logger.warning("farspark: %s; starting another, %d more are left", why, self._left)
            try:
                self._spawn(far)
            except ProxyError as error:
                why = str(error)
                self._served_from_s = time.monotonic()
                continue
            return True

    def _settle_accounts(self, newest: int) -> None:
        """Keep the counters of the child that is gone, and count the rounds that it was given and took no note of."""
        with self._accounts:
            told = self._region.counters.read()
            self._past += Counter(told.get("counters", {}))
            lost = distance(newest, int(told.get("noted", self._region.noted)))
            if lost > 0:
                self._past["rounds_failed"] += lost
                self._past["fallback_proxy_dead"] += lost
            self._last_details = self._region.details.read() or self._last_details
            self._region.renew(newest)

    def _kill(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):  # it went before it was told its job
                    child.stdin.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __repr__(self) -> str:
        return f"<ProxyProcess {self.facts()['proxy_pid']}, {self._started} started, {self._left} more are left>"


def _environment() -> dict[str, str]:
    """As this process's, with this package in reach. Numerical libraries need no threads for a few dozen numbers."""
    package = str(Path(farspark.__file__).resolve().parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
