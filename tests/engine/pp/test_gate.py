"""What waits for a verdict, and what ends the wait."""

from __future__ import annotations

import threading

import pytest

from farspark.engine.vllm.pp.faults import TokenTransportError
from farspark.engine.vllm.pp.gate import Gate


def test_a_step_passes_once_it_or_a_later_one_has_passed() -> None:
    gate = Gate()
    gate.wait(0)
    threading.Timer(0.05, lambda: gate.open(3)).start()
    gate.wait(2)
    gate.wait(3)


def test_a_failure_ends_every_wait_and_the_first_one_counts() -> None:
    gate = Gate()
    gate.look()
    first, second = TokenTransportError("first"), TokenTransportError("second")
    threading.Timer(0.05, lambda: gate.fail(first)).start()
    with pytest.raises(TokenTransportError, match="first"):
        gate.wait(1)
    assert not gate.fail(second)
    with pytest.raises(TokenTransportError, match="first"):
        gate.look()


def test_what_has_passed_is_not_handed_out_behind_a_failure() -> None:
    gate = Gate()
    gate.open(1)
    assert gate.fail(TokenTransportError("wrong"))
    with pytest.raises(TokenTransportError, match="wrong"):
        gate.wait(1)
