"""Which endpoint is asked next, and when: order of preference, failover, return. Pure: time comes as `now`.

Without a connection all endpoints are asked in order, but the one that has just failed comes last: it may take a whole
time-out to fail again. Beside a connection to a less preferred endpoint the more preferred ones are looked at, each in
its own time: soon at first, less often the longer it is away, and less often still each time that it did not last after a
return. So a worker that comes and goes costs ever less.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from farspark.transport.endpoint import Endpoint

# A place that never lasts is looked at this many times as rarely, at most, as one that is only away.
LONGEST: Final = 8


class Loss(enum.Enum):
    """How a connection ended."""

    SESSION = "session"  # the worker is there and has no such session: it is asked again first
    FAILED = "failed"
    DRAINED = "drained"  # the worker said that it goes, which is nobody's fault


@dataclass(slots=True)
class _Place:
    wait_s: float  # between two looks
    look_at_s: float = 0.0  # not before this, beside another's connection


class Route:
    """Guarded by the lock of the client that it belongs to. Endpoints that are named twice count once."""

    def __init__(self, endpoints: Sequence[Endpoint], *, first_s: float, longest_s: float) -> None:
        """`first_s`: until the first look at an endpoint that others are preferred to, once it was lost. `longest_s`: what
        that grows to while it is away; and how long a connection must last for its endpoint to be trusted again."""
        self._places = {endpoint: _Place(first_s) for endpoint in endpoints}
        self._first_s = first_s
        self._longest_s = longest_s
        self._unfit: dict[Endpoint, str] = {}
        self._serving: Endpoint | None = None
        self._since_s = 0.0
        self._failed: Endpoint | None = None  # comes last in the next pass

    @property
    def fit(self) -> list[Endpoint]:
        """In order of preference."""
        return [endpoint for endpoint in self._places if endpoint not in self._unfit]

    @property
    def others(self) -> list[Endpoint]:
        """All but the one that serves, in order of preference."""
        return [endpoint for endpoint in self.fit if endpoint != self._serving]

    def new_pass(self) -> list[Endpoint]:
        """The order in which to ask where there is no connection."""
        failed, self._failed = self._failed, None
        return sorted(self.fit, key=lambda endpoint: endpoint == failed)

    def due(self, now: float) -> list[Endpoint]:
        """Those to look at, in order of preference: each is preferred to the one that serves."""
        return [endpoint for endpoint in self._preferred() if self._places[endpoint].look_at_s <= now]

    def next_look_s(self) -> float:
        """When `due` will have something; infinity: not as things are."""
        return min((self._places[endpoint].look_at_s for endpoint in self._preferred()), default=math.inf)

    def _preferred(self) -> list[Endpoint]:
        """To the one that serves."""
        if self._serving is None:
            return []
        fit = self.fit
        return fit[: fit.index(self._serving)]

    def connected(self, endpoint: Endpoint, now: float) -> None:
        self._serving, self._since_s, self._failed = endpoint, now, None
        for better in self._preferred():
            place = self._places[better]
            place.look_at_s = now + place.wait_s

    def not_reached(self, endpoint: Endpoint, now: float) -> None:
        """A look at it has failed."""
        place = self._places[endpoint]
        place.wait_s = max(place.wait_s, min(2 * place.wait_s, self._longest_s))
        place.look_at_s = now + place.wait_s

    def lost(self, now: float, how: Loss) -> None:
        """The one that served does so no more."""
        endpoint, self._serving = self._serving, None
        if endpoint is None or how is Loss.SESSION:
            return
        self._failed = endpoint
        place = self._places[endpoint]
        if how is Loss.DRAINED or now - self._since_s >= self._longest_s:
            place.wait_s = self._first_s
        else:
            place.wait_s = min(2 * place.wait_s, LONGEST * self._longest_s)

    def strike_off(self, endpoint: Endpoint, why: str) -> bool:
        """It can never serve this engine, and does so no more. Whether others are left."""
        self._unfit[endpoint] = why
        if endpoint == self._serving:
            self._serving = None
        return bool(self.fit)

    @property
    def why_none(self) -> str:
        """Why each of those that were struck off cannot serve."""
        return "; ".join(self._unfit.values())

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """By endpoint, in order of preference: whether it serves, and how long the next wait for a look at it is."""
        return {
            str(endpoint): {"state": self._state_of(endpoint), "wait_s": round(place.wait_s, 3)}
            for endpoint, place in self._places.items()
        }

    def _state_of(self, endpoint: Endpoint) -> str:
        if endpoint in self._unfit:
            return "not used"
        return "serving" if endpoint == self._serving else "waiting"

    def __repr__(self) -> str:
        states = ", ".join(f"{endpoint} {one['state']}" for endpoint, one in self.snapshot().items())
        return f"<Route {states}>"
