"""Order of preference, failover and return, with time passed in."""

from __future__ import annotations

import math

import pytest

from farspark.engine.route import LONGEST, Loss, Route
from farspark.transport import Endpoint, parse_endpoint

A, B, C = (parse_endpoint(f"tcp://10.0.0.{number}:18620") for number in (1, 2, 3))
FIRST_S, LONGEST_S = 1.0, 30.0


def route(*endpoints: Endpoint) -> Route:
    return Route(endpoints or (A, B, C), first_s=FIRST_S, longest_s=LONGEST_S)


def test_a_pass_is_in_order_of_preference() -> None:
    one = route()
    assert one.new_pass() == one.new_pass() == [A, B, C]
    assert one.next_look_s() == math.inf


@pytest.mark.parametrize(
    ("how", "order"),
    [
        (Loss.FAILED, [B, C, A]),
        (Loss.DRAINED, [B, C, A]),
        # The worker answered: it is there.
        (Loss.SESSION, [A, B, C]),
    ],
)
def test_the_one_that_was_lost_is_asked_last_once_but_not_where_only_its_session_was(
    how: Loss, order: list[Endpoint]
) -> None:
    one = route()
    one.connected(A, 0)
    one.lost(100, how)
    assert one.new_pass() == order
    assert one.new_pass() == [A, B, C]


def test_one_endpoint_alone_is_always_asked() -> None:
    one = route(A)
    one.connected(A, 0)
    one.lost(1, Loss.FAILED)
    assert one.new_pass() == [A]
    assert one.others == [A]
    one.connected(A, 2)
    assert one.others == []
    assert one.next_look_s() == math.inf


def test_the_preferred_ones_are_looked_at_beside_another_and_no_one_else_is() -> None:
    one = route()
    one.connected(A, 0)
    assert one.next_look_s() == math.inf
    one.lost(100, Loss.FAILED)
    one.connected(B, 100)
    assert one.due(100.9) == []
    assert one.next_look_s() == 101
    assert one.due(101) == [A]
    one.lost(200, Loss.FAILED)
    one.connected(C, 200)
    assert one.due(201) == [A, B]


def test_the_next_look_is_the_soonest_of_all() -> None:
    one = route()
    one.connected(C, 0)
    one.not_reached(A, 1)
    assert (one.next_look_s(), one.due(1), one.due(3)) == (1, [B], [A, B])
    one.not_reached(B, 4)
    assert (one.next_look_s(), one.due(3)) == (3, [A])


def test_looks_become_rarer_while_it_is_away_up_to_the_longest_wait() -> None:
    one, now, waits = route(), 0.0, []
    one.connected(B, now)
    for _ in range(8):
        waits.append(one.next_look_s() - now)
        now = one.next_look_s()
        assert one.due(now) == [A]
        one.not_reached(A, now)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_a_place_that_does_not_last_is_returned_to_ever_more_rarely() -> None:
    one, now, waits = route(A, B), 0.0, []
    for _ in range(10):
        one.connected(A, now)
        one.lost(now + 1, Loss.FAILED)
        one.connected(B, now + 1)
        waits.append(one.next_look_s() - now - 1)
        now = one.next_look_s()
    assert waits == [2, 4, 8, 16, 32, 64, 128, 240, 240, 240]
    assert waits[-1] == LONGEST * LONGEST_S
    # A look in vain makes it neither shorter nor longer.
    one.not_reached(A, now)
    assert one.next_look_s() == now + 240


@pytest.mark.parametrize(
    ("lasted_s", "how", "wait_s"),
    [
        (LONGEST_S - 0.1, Loss.FAILED, 16.0),
        (LONGEST_S, Loss.FAILED, FIRST_S),
        (0.5, Loss.DRAINED, FIRST_S),
        (0.5, Loss.SESSION, 8.0),
    ],
)
def test_a_place_that_lasted_or_left_in_order_is_trusted_again(lasted_s: float, how: Loss, wait_s: float) -> None:
    one = route(A, B)
    for _ in range(3):
        one.connected(A, 0)
        one.lost(1, Loss.FAILED)
    one.connected(A, 50)
    one.lost(50 + lasted_s, how)
    one.connected(B, 100)
    assert one.next_look_s() == 100 + wait_s


def test_what_can_never_serve_is_neither_asked_nor_looked_at() -> None:
    one = route()
    assert one.strike_off(A, "A: another drafter")
    assert one.new_pass() == [B, C]
    one.connected(B, 0)
    assert one.next_look_s() == math.inf
    assert one.others == [C]
    assert one.strike_off(C, "C: another N")
    assert one.others == []
    assert not one.strike_off(B, "B: no token")
    assert one.why_none == "A: another drafter; C: another N; B: no token"


def test_what_serves_and_is_struck_off_serves_no_more_and_the_others_are_asked() -> None:
    one = route()
    one.connected(B, 0)
    assert one.strike_off(B, "B: another drafter")
    assert one.next_look_s() == math.inf
    assert one.others == [A, C]
    one.lost(1, Loss.FAILED)
    assert one.new_pass() == [A, C]
    assert one.snapshot()[str(B)]["state"] == "not used"


def test_a_loss_without_a_connection_changes_nothing() -> None:
    one = route()
    one.lost(0, Loss.FAILED)
    assert one.new_pass() == [A, B, C]


def test_an_endpoint_that_is_named_twice_counts_once() -> None:
    assert route(A, B, A).new_pass() == [A, B]


def test_snapshot_and_repr_say_who_serves() -> None:
    one = route()
    one.strike_off(C, "C: no token")
    one.connected(B, 0)
    assert one.snapshot() == {
        str(A): {"state": "waiting", "wait_s": 1.0},
        str(B): {"state": "serving", "wait_s": 1.0},
        str(C): {"state": "not used", "wait_s": 1.0},
    }
    assert repr(one) == f"<Route {A} waiting, {B} serving, {C} not used>"
