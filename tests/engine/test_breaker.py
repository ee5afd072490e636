from __future__ import annotations

import pytest

from farspark.engine.breaker import TRANSITIONS, Breaker, Event, State


@pytest.mark.parametrize("state", State)
def test_every_state_answers_every_event(state: State) -> None:
    assert set(TRANSITIONS[state]) == set(Event)


def tripped(trip: int = 3, cooldown: int = 4) -> Breaker:
    breaker = Breaker(trip=trip, cooldown=cooldown)
    for _ in range(trip):
        assert breaker.allows()
        breaker.failed()
    return breaker


def test_it_opens_after_so_many_failures_in_a_row_and_a_success_starts_the_count_afresh() -> None:
    breaker = Breaker(trip=3, cooldown=4)
    for outcome in (False, False, True, False, False):
        assert breaker.allows()
        breaker.succeeded() if outcome else breaker.failed()
    assert breaker.allows()
    breaker.failed()
    assert breaker.state is State.OPEN
    assert repr(breaker) == "<Breaker open, 3 failures in a row, 4 to cool>"


def test_exactly_the_cooldown_stays_at_home_then_one_probe_goes_out() -> None:
    breaker = tripped(cooldown=4)
    assert [breaker.allows() for _ in range(5)] == [False] * 4 + [True]
    assert breaker.state is State.HALF_OPEN


def test_a_good_probe_closes_and_a_bad_one_opens_for_a_whole_cooldown() -> None:
    breaker = tripped(cooldown=2)
    assert [breaker.allows() for _ in range(3)] == [False, False, True]
    breaker.failed()
    assert [breaker.allows() for _ in range(3)] == [False, False, True]
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    assert (breaker.trips, breaker.recoveries) == (2, 1)
    # One failure after a recovery is one failure, not the fourth.
    breaker.failed()
    assert breaker.state is State.CLOSED


def test_a_late_success_does_not_close_an_open_breaker() -> None:
    breaker = tripped()
    breaker.succeeded()
    assert breaker.state is State.OPEN


def test_rounds_that_could_not_go_out_anyway_are_part_of_the_cool_down() -> None:
    breaker = tripped(cooldown=3)
    breaker.stayed_home()
    assert not breaker.allows()
    for _ in range(5):
        breaker.stayed_home()
    assert breaker.snapshot()["state"] == "open", "only a round that could go out becomes the probe"
    assert breaker.allows()
    assert breaker.snapshot()["state"] == "half_open"
    breaker.stayed_home()
    breaker.failed()
    assert (breaker.snapshot()["state"], breaker.cooldown_left) == ("open", 3)


def test_a_neutral_round_leaves_the_probe_pending() -> None:
    breaker = tripped(cooldown=0)
    assert breaker.allows()
    assert breaker.allows()
    assert breaker.state is State.HALF_OPEN


def test_trip_zero_is_off() -> None:
    breaker = Breaker(trip=0, cooldown=1)
    for _ in range(100):
        breaker.failed()
        assert breaker.allows()
