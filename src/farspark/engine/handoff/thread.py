"""The proxy as a thread of the engine's process: it shares the GIL, so the interpreter hands it over more often."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from farspark.engine.config import AsyncSettings
from farspark.engine.handoff.gate import Gate
from farspark.engine.handoff.proxy import Proxy, StagedRing
from farspark.engine.handoff.region import Region, next_round
from farspark.engine.talker import Talker, TalkerSpec
from farspark.native import HostPage
from farspark.stats import Stats

logger = logging.getLogger(__name__)


class ProxyThread:
    """Made, started and stopped by the engine thread."""

    kind = "thread"

    def __init__(self, settings: AsyncSettings, spec: TalkerSpec, region: Region, page: HostPage, gate: Gate) -> None:
        self.stats = Stats()
        ring = StagedRing(region)
        self.talker = Talker(spec, ring, self.stats, ring_lags=True)
        self._page = page
        self._gate = gate
        self._switch_interval_s = settings.switch_interval_us / 1e6
        self._interval_before: float | None = None
        self._proxy = Proxy(
            page,
            region,
            ring,
            self.talker,
            self.stats,
            spin_ns=settings.spin_ns,
            nap_ns=settings.nap_ns,
            tells=False,
        )
        self._first = 0
        self._thread = threading.Thread(target=self._run, name="farspark-proxy", daemon=True)

    def start(self) -> None:
        """Opens the gate."""
        self.talker.start()
        if self._switch_interval_s:
            self._interval_before = sys.getswitchinterval()
            sys.setswitchinterval(self._switch_interval_s)
        self._first = next_round(self._gate.newest)
        self._gate.open(self._gate.newest)
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Everything was failed ahead, which ends the loop. Whether the thread has ended in time."""
        if self._interval_before is not None:
            sys.setswitchinterval(self._interval_before)
            self._interval_before = None
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self.talker.close()
        return True

    def counters(self) -> dict[str, int]:
        return dict(self.stats.counters())

    def latency(self) -> dict[str, Any]:
        latency: dict[str, Any] = self.stats.snapshot()["latency"]
        return latency

    def details(self) -> dict[str, Any]:
        return self.talker.details()

    def facts(self) -> dict[str, Any]:
        return {"switch_interval_us": round(sys.getswitchinterval() * 1e6)}

    def _run(self) -> None:
        why = "the proxy thread ended"
        try:
            self._proxy.run(self._first)
        except Exception as error:
            # A thread that dies leaves nobody to tell, and a stream parked.
            why = f"the proxy thread failed: {error!r}"
            logger.exception("farspark: the proxy thread failed; the target decodes without drafts from here on")
        newest = self._gate.shut(why, for_good=True)
        self._page.fail_all(newest)

    def __repr__(self) -> str:
        return f"<ProxyThread {self._proxy!r}>"
