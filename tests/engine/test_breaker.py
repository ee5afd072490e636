from __future__ import annotations

import pytest

from farspark.engine.breaker import LONGEST, TRANSITIONS, Breaker, Event, State, Wait


@pytest.mark.parametrize("state", State)
def test_every_state_answers_every_event(state: State) -> None:
    assert set(TRANSITIONS[state]) == set(Event)


def test_a_cool_down_begins_where_the_breaker_opens_and_nowhere_else() -> None:
    for state, answers in TRANSITIONS.items():
        for after, wait in answers.values():
            opens = after is State.OPEN and state is not State.OPEN
            assert (wait is not Wait.SAME) == opens

    # A failed probe and a relapse are reasons to wait longer.
    for event in (Event.FAILURE, Event.LIMIT, Event.RELAPSE):
        assert TRANSITIONS[State.HALF_OPEN][event] == (State.OPEN, Wait.LONGER)
    assert TRANSITIONS[State.CLOSED][Event.RELAPSE] == (State.OPEN, Wait.LONGER)
    assert TRANSITIONS[State.CLOSED][Event.LIMIT] == (State.OPEN, Wait.FIRST)


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


def test_a_good_probe_closes_and_a_bad_one_opens_for_twice_as_long() -> None:
    breaker = tripped(cooldown=2)
    assert [breaker.allows() for _ in range(3)] == [False, False, True]
    breaker.failed()
    assert [breaker.allows() for _ in range(5)] == [False] * 4 + [True]
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    assert (breaker.trips, breaker.recoveries) == (2, 1)
    # One failure after a recovery is one failure, not the fourth.
    breaker.failed()
    assert breaker.state is State.CLOSED


def stays_at_home(breaker: Breaker) -> int:
    """Rounds until the breaker lets one out."""
    rounds = 0
    while not breaker.allows():
        rounds += 1
    return rounds


def fails(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        assert breaker.allows()
        breaker.failed()


def test_each_failed_probe_doubles_the_cool_down_up_to_a_bound() -> None:
    breaker = tripped(trip=3, cooldown=5)
    waits = []
    for _ in range(6):
        waits.append(stays_at_home(breaker))
        breaker.failed()
    assert waits == [5, 10, 20, 40, 40, 40]
    assert waits[-1] == LONGEST * 5
    assert breaker.snapshot()["newest_cooldown"] == breaker.snapshot()["cooldown_left"] == 40
    assert (breaker.trips, breaker.recoveries) == (7, 0)


@pytest.mark.parametrize(("successes", "expected"), [(0, 20), (4, 20), (5, 5), (50, 5)])
def test_a_recovery_that_lasts_as_many_rounds_as_a_first_cool_down_starts_afresh(successes: int, expected: int) -> None:
    breaker = tripped(trip=3, cooldown=5)
    assert stays_at_home(breaker) == 5
    breaker.failed()
    assert stays_at_home(breaker) == 10
    breaker.succeeded()
    assert (breaker.state, breaker.snapshot()["on_trial"]) == (State.CLOSED, 5)
    for _ in range(successes):
        breaker.failed()  # One in between is no reason to doubt it.
        breaker.succeeded()
    fails(breaker, 3)
    assert breaker.snapshot()["newest_cooldown"] == stays_at_home(breaker) == expected
    assert (breaker.trips, breaker.recoveries) == (3, 1)


def test_the_first_trip_of_all_is_no_relapse() -> None:
    breaker = Breaker(trip=2, cooldown=5)
    fails(breaker, 2)
    assert stays_at_home(breaker) == 5


def test_with_the_defaults_a_worker_that_never_answers_in_time_is_asked_once_in_2049_rounds() -> None:
    breaker = tripped(trip=3, cooldown=256)
    probes = 0
    for _ in range(20_000):
        if breaker.allows():
            probes += 1
            breaker.failed()
    assert probes == 3 + 8, "behind 256, 512 and 1,024 rounds, then every 2,049th"


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
    assert (breaker.snapshot()["state"], breaker.cooldown_left) == ("open", 6)
    for _ in range(5):
        breaker.stayed_home()
    assert [breaker.allows(), breaker.allows()] == [False, True], "the longer ones count such rounds too"


def test_a_neutral_round_leaves_the_probe_pending() -> None:
    breaker = tripped(cooldown=0)
    assert breaker.allows()
    assert breaker.allows()
    assert breaker.state is State.HALF_OPEN


def test_what_one_worker_failed_is_no_reason_to_keep_from_another_but_its_first_round_decides() -> None:
    breaker = tripped(trip=3, cooldown=100)
    breaker.moved()
    assert (breaker.state, breaker.failures_in_a_row) == (State.HALF_OPEN, 0)
    assert breaker.allows()
    breaker.failed()
    assert (breaker.state, stays_at_home(breaker)) == (State.OPEN, 200)


def test_failures_of_two_workers_are_not_added_up() -> None:
    breaker = Breaker(trip=3, cooldown=4)
    fails(breaker, 2)
    breaker.moved()
    fails(breaker, 2)
    assert breaker.state is State.CLOSED


def test_trip_zero_is_off() -> None:
    breaker = Breaker(trip=0, cooldown=1)
    for _ in range(100):
        breaker.failed()
        assert breaker.allows()
