"""May the next round touch the network? Counted in rounds, never in time.

After `trip` failed attempts in a row the next `cooldown` rounds stay at home; then one probe round decides. Without it a
worker that answers but always fails costs every round a round trip, and one that misses every deadline a whole timeout.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final


class State(enum.Enum):
    CLOSED = "closed"  # rounds go out
    OPEN = "open"  # rounds stay at home
    HALF_OPEN = "half_open"  # the next round is the probe


class Event(enum.Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    LIMIT = "limit"  # a failure that reaches `trip` in a row
    COOLED = "cooled"  # `cooldown` rounds have stayed at home


TRANSITIONS: Final[Mapping[State, Mapping[Event, State]]] = {
    State.CLOSED: {
        Event.SUCCESS: State.CLOSED,
        Event.FAILURE: State.CLOSED,
        Event.LIMIT: State.OPEN,
        Event.COOLED: State.CLOSED,
    },
    # A late success says nothing about the next round: only a probe closes.
    State.OPEN: {
        Event.SUCCESS: State.OPEN,
        Event.FAILURE: State.OPEN,
        Event.LIMIT: State.OPEN,
        Event.COOLED: State.HALF_OPEN,
    },
    State.HALF_OPEN: {
        Event.SUCCESS: State.CLOSED,
        Event.FAILURE: State.OPEN,
        Event.LIMIT: State.OPEN,
        Event.COOLED: State.HALF_OPEN,
    },
}


class Breaker:
    """Owned by the thread that runs rounds. `trip` 0: always closed."""

    def __init__(self, *, trip: int, cooldown: int) -> None:
        self._trip = trip
        self._cooldown = cooldown
        self.state = State.CLOSED
        self.failures_in_a_row = 0
        self.cooldown_left = 0
        self.trips = 0
        self.recoveries = 0

    def allows(self) -> bool:
        """Ask once per round that could go out; a refusal is one round of the cool-down."""
        if self.state is not State.OPEN:
            return True
        if self.cooldown_left == 0:
            self._move(Event.COOLED)
            return True
        self.cooldown_left -= 1
        return False

    def stayed_home(self) -> None:
        """A round that could not go out anyway: it is one of the cool-down's rounds too."""
        if self.state is State.OPEN and self.cooldown_left:
            self.cooldown_left -= 1

    def succeeded(self) -> None:
        self.failures_in_a_row = 0
        self._move(Event.SUCCESS)

    def failed(self) -> None:
        self.failures_in_a_row += 1
        reached = self._trip > 0 and self.failures_in_a_row >= self._trip
        self._move(Event.LIMIT if reached else Event.FAILURE)

    def _move(self, event: Event) -> None:
        before, self.state = self.state, TRANSITIONS[self.state][event]
        if self.state is State.OPEN and before is not State.OPEN:
            self.trips += 1
            self.cooldown_left = self._cooldown
        if self.state is State.CLOSED and before is State.HALF_OPEN:
            self.recoveries += 1

    def snapshot(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "failures_in_a_row": self.failures_in_a_row,
            "cooldown_left": self.cooldown_left,
            "trips": self.trips,
            "recoveries": self.recoveries,
            "trip": self._trip,
            "cooldown": self._cooldown,
        }

    def __repr__(self) -> str:
        return f"<Breaker {self.state.value}, {self.failures_in_a_row} failures in a row, {self.cooldown_left} to cool>"
