"""May the next round touch the network? Counted in rounds, never in time.

After `trip` failed attempts in a row the next `cooldown` rounds stay at home; then one probe round decides. Without it a
worker that answers but always fails costs every round a round trip, and one that misses every deadline a whole timeout.
Each probe that fails doubles the next cool-down, up to `LONGEST` times the first: a worker that can be reached and never
answers in time then costs one timeout in thousands of rounds. So does a recovery that does not last: only once as many rounds
have succeeded as a first cool-down has is the worker trusted as before.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Final

LONGEST: Final = 8


class State(enum.Enum):
    CLOSED = "closed"  # rounds go out
    OPEN = "open"  # rounds stay at home
    HALF_OPEN = "half_open"  # the next round is the probe


class Event(enum.Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    LIMIT = "limit"  # a failure that reaches `trip` in a row
    RELAPSE = "relapse"  # the same, soon after a recovery
    COOLED = "cooled"  # the cool-down's rounds have stayed at home
    MOVED = "moved"  # another worker takes the place of the one that all this was about


class Wait(enum.Enum):
    """What a transition does with the cool-down."""

    SAME = "same"
    FIRST = "first"  # a cool-down of `cooldown` rounds begins
    LONGER = "longer"  # one of twice the last one's rounds begins, at most `LONGEST * cooldown`


TRANSITIONS: Final[Mapping[State, Mapping[Event, tuple[State, Wait]]]] = {
    State.CLOSED: {
        Event.SUCCESS: (State.CLOSED, Wait.SAME),
        Event.FAILURE: (State.CLOSED, Wait.SAME),
        Event.LIMIT: (State.OPEN, Wait.FIRST),
        Event.RELAPSE: (State.OPEN, Wait.LONGER),
        Event.COOLED: (State.CLOSED, Wait.SAME),
        Event.MOVED: (State.CLOSED, Wait.SAME),
    },
    # A late success says nothing about the next round: only a probe closes.
    State.OPEN: {
        Event.SUCCESS: (State.OPEN, Wait.SAME),
        Event.FAILURE: (State.OPEN, Wait.SAME),
        Event.LIMIT: (State.OPEN, Wait.SAME),
        Event.RELAPSE: (State.OPEN, Wait.SAME),
        Event.COOLED: (State.HALF_OPEN, Wait.SAME),
        Event.MOVED: (State.HALF_OPEN, Wait.SAME),  # what the other one failed says nothing about this one
    },
    State.HALF_OPEN: {
        Event.SUCCESS: (State.CLOSED, Wait.SAME),
        Event.FAILURE: (State.OPEN, Wait.LONGER),
        Event.LIMIT: (State.OPEN, Wait.LONGER),
        Event.RELAPSE: (State.OPEN, Wait.LONGER),
        Event.COOLED: (State.HALF_OPEN, Wait.SAME),
        Event.MOVED: (State.HALF_OPEN, Wait.SAME),
    },
}


class Breaker:
    """Owned by the thread that runs rounds. `trip` 0: always closed."""

    def __init__(self, *, trip: int, cooldown: int) -> None:
        self._trip = trip
        self._cooldown = cooldown
        self._newest_cooldown = cooldown  # the one that is on, or was last
        self.state = State.CLOSED
        self.failures_in_a_row = 0
        self.cooldown_left = 0
        self.on_trial = 0  # rounds that must still succeed before the newest recovery counts
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
        if self.on_trial:
            self.on_trial -= 1
        self._move(Event.SUCCESS)

    def failed(self) -> None:
        self.failures_in_a_row += 1
        reached = self._trip > 0 and self.failures_in_a_row >= self._trip
        limit = Event.RELAPSE if self.on_trial else Event.LIMIT
        self._move(limit if reached else Event.FAILURE)

    def moved(self) -> None:
        """The next round goes to another worker than the last one did."""
        self.failures_in_a_row = 0
        self._move(Event.MOVED)

    def _move(self, event: Event) -> None:
        before = self.state
        self.state, wait = TRANSITIONS[before][event]
        if wait is not Wait.SAME:
            self.trips += 1
            longer = min(2 * self._newest_cooldown, LONGEST * self._cooldown)
            self.cooldown_left = self._newest_cooldown = self._cooldown if wait is Wait.FIRST else longer
        if self.state is State.CLOSED and before is State.HALF_OPEN:
            self.recoveries += 1
            self.on_trial = self._cooldown

    def snapshot(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "failures_in_a_row": self.failures_in_a_row,
            "cooldown_left": self.cooldown_left,
            "trips": self.trips,
            "recoveries": self.recoveries,
            "trip": self._trip,
            "cooldown": self._cooldown,
            "newest_cooldown": self._newest_cooldown,
            "on_trial": self.on_trial,
        }

    def __repr__(self) -> str:
        return f"<Breaker {self.state.value}, {self.failures_in_a_row} failures in a row, {self.cooldown_left} to cool>"
