"""Thousands of rounds, three in flight, with faults of every kind: good drafts exact, failed rows zero, accounts that balance."""

from __future__ import annotations

import random
import secrets

import pytest
from tests.engine.handoff.conftest import Open
from tests.fakes.async_soak import OF_A_PROCESS, OF_ANY_PROXY, Fault
from tests.fakes.async_world import Mismatch

from farspark.engine.config import AsyncProxy
from farspark.engine.handoff.region import Region

# The numbers of the rounds wrap around after a few of them.
BEFORE_THE_WRAP = (1 << 32) - 40


def _of(proxy: AsyncProxy, times: int, seed: int) -> list[Fault]:
    faults = [*OF_ANY_PROXY * times, *(OF_A_PROCESS if proxy is AsyncProxy.PROCESS else ())]
    random.Random(seed).shuffle(faults)
    return faults


@pytest.mark.parametrize("proxy", list(AsyncProxy), ids=lambda proxy: proxy.value)
@pytest.mark.parametrize(
    ("rounds", "times"), [(300, 1), pytest.param(10_000, 8, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_every_draft_is_exact_whatever_fails_pinned_reuse_late_reply_tp_agree(
    open_world: Open, proxy: AsyncProxy, rounds: int, times: int
) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    world, soak = open_world(proxy, seed=seed, start=BEFORE_THE_WRAP, respawns=50)
    soak.run(rounds, _of(proxy, times, seed))
    soak.settle()
    assert soak.faults_of_accounts() == []
    assert world.tally.drafts > rounds


def test_the_soak_finds_windows_of_another_round(open_world: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy that takes a staged window for the newest long after."""
    _, soak = open_world()
    kept: dict[int, memoryview] = {}
    window = Region.window

    def stale(region: Region, slot: int, first_pos: int, n_rows: int) -> memoryview:
        fresh = window(region, slot, first_pos, n_rows)
        old = kept.setdefault(slot, fresh)
        return old if len(old) == len(fresh) else fresh

    monkeypatch.setattr(Region, "window", stale)
    with pytest.raises(Mismatch, match="expected"):
        soak.run(400, [Fault.CUT] * 12)


@pytest.mark.parametrize("is_plain", [False, True], ids=["kernels", "copies"])
def test_without_faults_every_round_is_good(open_world: Open, is_plain: bool) -> None:
    # However busy the machine is.
    world, soak = open_world(spec={"timeout_s": 10.0}, watchdog_s=30.0, is_plain=is_plain)
    for _ in range(300):
        world.step()
    world.drain()
    soak.settle()
    assert set(world.tally.outcomes) <= {"OK", "NOTHING"}
    assert world.counters()["rounds_ok"] == 300
    assert world.counters()["resync_windows_staged"] == 0
    assert soak.faults_of_accounts() == []
