"""What the side that talks to the worker consists of: connection, round, depth policy, capture; made from one plain value.

The engine's own thread, a proxy thread and a proxy process make the same from the same `TalkerSpec`, which can be pickled.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from farspark.engine.breaker import Breaker
from farspark.engine.capture import CaptureHeader, CaptureWriter
from farspark.engine.client import Client
from farspark.engine.depth import Costs, DepthPolicy, NOut
from farspark.engine.depth_control import DepthControl
from farspark.engine.result import PackedResult
from farspark.engine.round import RemoteRound, RingReader, RoundInput
from farspark.engine.shape import ModelShape
from farspark.stats import Stats
from farspark.transport import Endpoint
from farspark.wire.messages import Hello

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSpec:
    """Fixed for the engine's life. Holds the token: it goes to a child through a pipe, never through its environment."""

    shape: ModelShape
    hello: Hello
    endpoints: tuple[Endpoint, ...]
    timeout_s: float
    connect_timeout_s: float
    backoff_s: float
    backoff_max_s: float
    trip: int
    cooldown: int
    want_margin: bool
    token: bytes | None = field(repr=False)
    depth_policy: DepthPolicy
    depth_costs: Costs | None
    depth_file: Path | None
    n_out: NOut
    capture: Path | None
    capture_header: CaptureHeader
    capture_bytes: int

    def for_proxy(self, number: int) -> TalkerSpec:
        """For the `number`-th proxy process, from 1: a capture is never written over, so each has a file of its own."""
        if self.capture is None or number == 1:
            return self
        return replace(self, capture=self.capture.with_name(f"{self.capture.name}.{number}"))


class Talker:
    """Owned by the thread that runs rounds, which starts and closes it; `details` may be called from any."""

    def __init__(self, spec: TalkerSpec, ring: RingReader, stats: Stats, *, ring_lags: bool = False) -> None:
        """`ring_lags` as of a `RemoteRound`. Raises ValueError where the depth policy does not fit the shape."""
        self.spec = spec
        self.stats = stats
        self.depth = DepthControl(
            spec.depth_policy,
            num_drafts=spec.shape.num_drafts,
            costs=spec.depth_costs,
            file=spec.depth_file,
            stats=stats,
        )
        self.client = Client(
            spec.hello,
            spec.endpoints,
            connect_timeout_s=spec.connect_timeout_s,
            backoff_s=spec.backoff_s,
            backoff_max_s=spec.backoff_max_s,
            stats=stats,
            token=spec.token,
        )
        self.round = RemoteRound(
            client=self.client,
            shape=spec.shape,
            ring=ring,
            breaker=Breaker(trip=spec.trip, cooldown=spec.cooldown),
            stats=stats,
            timeout_s=spec.timeout_s,
            want_margin=spec.want_margin,
            depth=self.depth,
            n_out=spec.n_out,
            ring_lags=ring_lags,
        )
        self.capture: CaptureWriter | None = None

    def start(self) -> None:
        self.client.start()
        if self.spec.capture is not None:
            logger.info(
                "farspark: rounds are recorded in %s, up to %d MiB", self.spec.capture, self.spec.capture_bytes >> 20
            )
            self.capture = CaptureWriter(
                self.spec.capture, self.spec.capture_header, limit_bytes=self.spec.capture_bytes, stats=self.stats
            )

    def record(self, number: int, step: RoundInput, result: PackedResult) -> None:
        """Give the round that is over to the capture; its local drafts follow where there are any."""
        if self.capture is None:
            return
        n, last = len(step.requests), self.round.last_drafts
        self.capture.round(
            number,
            step,
            result.outcome,
            ok=result.ok[:n],
            tokens=result.tokens[:n],
            confidences=result.confidences[:n],
            margins=None if last.margins is None else last.margins[:n],
            statuses=last.entry_status,
        )

    def record_local(
        self, drafts: npt.NDArray[np.integer[Any]], confidences: npt.NDArray[np.floating[Any]] | None
    ) -> None:
        if self.capture is not None:
            self.capture.local(drafts, confidences)

    def details(self) -> dict[str, Any]:
        """What of the statistics is not a counter and not a latency, as the stats file has it."""
        connection = self.client.connection()
        return {
            "endpoint": ",".join(map(str, [connection.endpoint] if connection else self.spec.endpoints)),
            "lane": connection.channel.lane if connection else None,
            "worker": {
                "state": self.client.state.value,
                "name": connection.welcome.worker if connection else None,
                "kind": connection.welcome.kind if connection else None,
                "epoch": connection.epoch if connection else None,
                "context": connection.welcome.context if connection else None,
                "last_failure": self.client.last_failure,
                "last_disconnect": self.client.last_disconnect,
            },
            "endpoints": self.client.endpoints(),
            "breaker": self.round.breaker.snapshot(),
            "last_bad_reply": self.round.last_bad_reply,
            "depth": self.depth.snapshot(),
            **({"capture": self.capture.snapshot()} if self.capture is not None else {}),
        }

    def close(self) -> None:
        """Idempotent."""
        if self.capture is not None:
            self.capture.close()
        self.client.close()

    def __repr__(self) -> str:
        return f"<Talker {self.client!r}>"
