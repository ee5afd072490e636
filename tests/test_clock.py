from __future__ import annotations

import pytest
from tests.fakes.clock import FakeClock

from farspark.clock import Deadline


def test_a_deadline_is_a_point_in_time_and_what_is_left_never_goes_below_zero() -> None:
    clock = FakeClock()
    deadline = Deadline.after(2.0, clock)
    assert deadline.left_s() == 2.0
    assert not deadline.has_passed()
    clock.advance(2.5)
    assert deadline.left_s() == 0.0
    assert deadline.has_passed()
    with pytest.raises(TimeoutError, match="deadline passed while waiting for a reply"):
        deadline.check("waiting for a reply")


def test_a_deadline_of_never_does_not_pass() -> None:
    assert not Deadline.never().has_passed()
    Deadline.never().check("waiting")


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_HALF_OPEN_a_timeout_that_is_none_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="expected a number of seconds"):
        Deadline.after(timeout_s)
