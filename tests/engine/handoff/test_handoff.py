"""What ends a round, a proxy and a hand-off, and what is said of it."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.engine.handoff.conftest import Open
from tests.fakes.async_soak import Fault
from tests.fakes.async_world import HostDevice, World, make_info, settings, talker_spec

from farspark.engine.capture import CaptureReader
from farspark.engine.config import AsyncProxy
from farspark.engine.handoff.gate import Gate
from farspark.engine.handoff.handoff import HandoffRefusedError, open_handoff
from farspark.engine.handoff.process import ProxyProcess
from farspark.engine.handoff.region import Region, RegionShape
from farspark.engine.handoff.thread import ProxyThread
from farspark.engine.result import RoundOutcome
from farspark.stats import Stats

BOTH = pytest.mark.parametrize("proxy", list(AsyncProxy), ids=lambda proxy: proxy.value)


def until(holds: Callable[[], bool], what: str = "") -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def good_round(world: World) -> None:
    for _ in range(50):
        world.step([world.row(0, 2), world.row(1, 1)])
        world.drain()
        if world.outcomes[-1] is RoundOutcome.OK:
            return
    raise AssertionError(f"no good round: {world.counters()}")


@BOTH
def test_after_a_failure_the_windows_are_asked_for_and_the_drafts_are_exact_again(
    open_world: Open, proxy: AsyncProxy
) -> None:
    world, soak = open_world(proxy, spec={"timeout_s": 10.0}, watchdog_s=30.0)
    for _ in range(6):
        world.step([world.row(0, 2), world.row(1, 1)])
    world.drain()
    soak.worker.tell("fail")
    began = len(world.outcomes)
    for _ in range(8):
        world.step([world.row(0, 1), world.row(1, 1)])
        world.drain()
    # The round that fails, the one that asks for the windows, and from then on all are good.
    names = [outcome.name for outcome in world.outcomes[began:]]
    assert "FAILED" in names
    assert names[names.index("FAILED") :][:3] == ["FAILED", "FAILED", "OK"]
    assert set(names[names.index("FAILED") + 2 :]) == {"OK"}
    counters = world.counters()
    assert (counters["fallback_resync_pending"], counters["resync_windows_staged"]) == (1, 2)
    assert counters["resync_rounds"] == 1


def test_a_round_that_the_watchdog_ends_is_skipped_and_counted_by_phase(open_world: Open) -> None:
    world, soak = open_world()
    good_round(world)
    soak.inject(Fault.PREEMPTED)
    world.drain()
    soak.settle()
    counters = world.counters()
    preempted = world.handoff.snapshot()["async_watchdog"]["preempted"]
    assert preempted >= 1
    assert counters["watchdog_preempted"] == preempted == counters["fallback_preempted"]
    assert counters["watchdog_preempted_decode"] + counters["watchdog_preempted_prefill"] == preempted
    assert 0 < counters["watchdog_skipped_rounds"] < preempted
    events = [event for event in world.handoff.snapshot()["watchdog_events"] if event["how"] == "preempted"]
    assert len(events) == preempted
    assert all(event["phase"] in ("decode", "prefill") and event["requests"] >= 1 for event in events)


def test_ring_valid_a_proxy_that_is_further_behind_than_rounds_are_kept_starts_its_slots_afresh(
    open_world: Open,
) -> None:
    world, soak = open_world(AsyncProxy.PROCESS)
    good_round(world)
    soak.inject(Fault.PROXY_BEHIND)
    world.drain()
    soak.settle()
    assert world.counters()["watchdog_skipped_unknown_ring"] >= 20
    assert world.counters()["watchdog_skipped_rounds"] >= 80
    assert soak.faults_of_accounts() == []


@BOTH
@pytest.mark.parametrize("how", ["idle", "in mid-round"])
def test_closing_ends_everything_in_time_and_twice_is_fine(open_world: Open, proxy: AsyncProxy, how: str) -> None:
    world, soak = open_world(proxy)
    good_round(world)
    if how == "in mid-round":
        soak.worker.tell("late 80")
        for _ in range(3):
            world.step([world.row(0, 1)])
    began = time.monotonic()
    assert world.handoff.close()
    assert time.monotonic() - began < 5
    world.drain()
    assert world.handoff.close()
    assert not [one for one in threading.enumerate() if one.name in ("farspark-proxy", "farspark-proxy-keeper")]
    assert world.handoff.snapshot()["async_dead"] is None
    # Steps after the end are the target's alone.
    assert not world.handoff.is_open


def test_a_proxy_thread_that_fails_ends_all_rounds_once_and_loudly(
    open_world: Open, caplog: pytest.LogCaptureFixture
) -> None:
    world, _ = open_world()
    good_round(world)
    side = world.handoff.side
    assert isinstance(side, ProxyThread)

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("planted")

    side.talker.round.run = fail  # type: ignore[method-assign, assignment]
    before = world.tally.rounds
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            world.step([world.row(0, 1)])
        world.drain()
        until(lambda: not world.handoff.is_open)
        for _ in range(20):
            world.step([world.row(0, 1)])
        world.drain()
    # An ordinary round has its drafts before its books are kept.
    assert world.outcomes[before] in (RoundOutcome.OK, RoundOutcome.FAILED)
    assert set(world.outcomes[before + 1 :]) == {RoundOutcome.FAILED}
    assert world.counters()["fallback_proxy_dead"] >= 20
    assert "planted" in str(world.handoff.snapshot()["async_dead"])
    said = [record.getMessage() for record in caplog.records]
    assert (
        sum("proxy thread failed" in one for one in said) == 2
    )  # with its traceback; and the first step that nobody serves
    assert sum("decodes without drafts" in one for one in said) == 2


def test_half_open_a_killed_proxy_is_replaced_until_the_budget_is_spent(
    open_world: Open, caplog: pytest.LogCaptureFixture
) -> None:
    world, soak = open_world(AsyncProxy.PROCESS, respawns=1, watchdog_s=5.0)
    good_round(world)
    # What a process has not told yet ends with it.
    until(lambda: world.counters().get("hellos") == 1)
    soak.inject(Fault.PROXY_KILLED)
    good_round(world)
    until(lambda: world.counters()["hellos"] == 2)
    side = world.handoff.side
    assert isinstance(side, ProxyProcess)
    with caplog.at_level(logging.ERROR):
        os.kill(soak._proxy_pid(), signal.SIGKILL)
        until(lambda: world.handoff._gate.is_final)
        for _ in range(10):
            world.step([world.row(0, 1)])
        world.drain()
    assert set(world.outcomes[-10:]) == {RoundOutcome.FAILED}
    assert "signal 9" in str(world.handoff.snapshot()["async_dead"])
    assert [record.getMessage() for record in caplog.records if "budget" in record.getMessage()] != []
    assert side.facts()["respawns_left"] == 0
    ended = world.counters()
    assert ended["rounds_ok"] + ended["rounds_failed"] + ended["rounds_some_failed"] == world.tally.rounds


def test_a_proxy_that_ends_before_it_was_told_its_job_costs_one_of_the_budget(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, soak = open_world(AsyncProxy.PROCESS, respawns=2, watchdog_s=5.0)
    good_round(world)
    side = world.handoff.side
    assert isinstance(side, ProxyProcess)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    pidfd_open = os.pidfd_open

    def late(pid: int) -> int:
        """The keeper's thread does not come to run for a while."""
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", late)
    os.kill(soak._proxy_pid(), signal.SIGKILL)
    until(lambda: world.handoff._gate.is_final)
    assert "signal 9" in str(world.handoff.snapshot()["async_dead"])
    assert (side.facts()["respawns_left"], side.facts()["proxies_started"]) == (0, 3)


def test_counters_read_while_a_proxy_is_buried_are_whole_and_never_go_back() -> None:
    """The engine's thread reads them, the keeper's adds those of the proxy that is gone."""
    spec = talker_spec(make_info(), "tcp://127.0.0.1:1")
    region = Region(RegionShape(spec.shape, 8, 4096))
    page: Any = None  # nothing is served
    side = ProxyProcess(settings(AsyncProxy.PROCESS), spec, region, page, Gate(0))
    is_over = threading.Event()

    def bury() -> None:
        for proxy in range(1 << 30):
            counters = {f"counter_{at}": 1 for at in range(40)} | {f"only_of_{proxy}": 1}
            region.counters.write({"noted": 0, "counters": counters})
            side._settle_accounts(0)
            if is_over.is_set():
                break

    before, keeper = sys.getswitchinterval(), threading.Thread(target=bury)
    sys.setswitchinterval(1e-6)
    keeper.start()
    seen, deadline = [0], time.monotonic() + 20
    try:
        while seen[-1] < 200 and time.monotonic() < deadline:
            seen.append(side.counters().get("counter_0", 0))
    finally:
        is_over.set()
        keeper.join()
        sys.setswitchinterval(before)
        os.close(side._wake)
        region.close()
    assert seen == sorted(seen)
    assert seen[-1] >= 200


def test_a_proxy_that_served_long_enough_restores_the_budget(open_world: Open) -> None:
    world, soak = open_world(AsyncProxy.PROCESS, respawns=1, respawn_reset_s=0.01, watchdog_s=5.0)
    for _ in range(2):
        good_round(world)
        soak.inject(Fault.PROXY_KILLED)
    good_round(world)
    assert world.handoff.side.facts()["proxies_started"] == 3


def test_half_open_a_stopped_proxy_is_taken_for_stalled_and_replaced(open_world: Open) -> None:
    world, soak = open_world(AsyncProxy.PROCESS, watchdog_s=0.11)
    good_round(world)
    soak.inject(Fault.PROXY_STALLED)
    good_round(world)
    assert world.handoff.side.facts()["proxies_started"] == 2


def test_the_process_has_no_torch_and_no_cuda_and_ends_with_its_engine(open_world: Open) -> None:
    world, soak = open_world(AsyncProxy.PROCESS)
    good_round(world)
    maps = Path(f"/proc/{soak._proxy_pid()}/maps").read_text()
    assert "libhostflag" in maps
    for library in ("libtorch", "libcuda", "triton", "vllm"):
        assert library not in maps


def test_abort_race_a_proxy_whose_engine_was_killed_ends_too(worker: Any, tmp_path: Path) -> None:
    program = tmp_path / "engine.py"
    program.write_text(
        "import sys, time\n"
        "from tests.fakes.async_world import HostDevice, World, make_info, settings, talker_spec\n"
        "from farspark.engine.config import AsyncProxy\n"
        "info = make_info()\n"
        f"spec = talker_spec(info, {worker.endpoint!r})\n"
        "world = World(HostDevice(info), info, settings(AsyncProxy.PROCESS), spec, seed=1)\n"
        "print(world.handoff.side.facts()['proxy_pid'], flush=True)\n"
        "time.sleep(60)\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(Path(root) / "src")])}
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True, env=environment) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "the proxy lives on")


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Watcher:
    """A profiler for one thread that keeps every call into a module that a proxy must not touch."""

    FORBIDDEN = (
        "torch",
        "triton",
        "vllm",
        "farspark.engine.cuda_driver",
        "farspark.engine.gather",
        "farspark.engine.handoff.cuda_stream",
        "farspark.engine.handoff.stream",
        "tests.fakes.host_stream",
    )

    def __init__(self) -> None:
        self.calls = 0
        self.found: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        self.calls += 1
        if event == "c_call":
            module = getattr(argument, "__module__", None) or type(getattr(argument, "__self__", None)).__module__
        else:
            module = frame.f_globals.get("__name__", "")
        if str(module).startswith(self.FORBIDDEN):
            self.found.add(f"{event} in {module}: {frame.f_code.co_name}")


@pytest.mark.parametrize("is_planted", [False, True])
def test_flag_gil_the_proxy_thread_makes_no_torch_and_no_cuda_call(
    open_world: Open, monkeypatch: pytest.MonkeyPatch, is_planted: bool
) -> None:
    import torch

    watcher = Watcher()
    run = ProxyThread._run

    def watched(side: ProxyThread) -> None:
        sys.setprofile(watcher)
        try:
            run(side)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(ProxyThread, "_run", watched)
    world, soak = open_world()
    if is_planted:
        side = world.handoff.side
        assert isinstance(side, ProxyThread)
        note = side._proxy._region.note
        side._proxy._region.note = lambda round_: (torch.zeros(1), note(round_))[1]  # type: ignore[method-assign]
    soak.run(20, [Fault.FRAME, Fault.PREEMPTED])
    world.handoff.close()
    assert watcher.calls > 5_000
    assert bool(watcher.found) is is_planted, watcher.found


def test_the_switch_interval_is_lowered_for_a_thread_and_given_back(open_world: Open) -> None:
    before = sys.getswitchinterval()
    world, _ = open_world(switch_interval_us=300.0)
    assert sys.getswitchinterval() == pytest.approx(300e-6)
    world.handoff.close()
    assert sys.getswitchinterval() == before
    world, _ = open_world(switch_interval_us=0.0)
    assert sys.getswitchinterval() == before
    world, _ = open_world(AsyncProxy.PROCESS, switch_interval_us=300.0)
    assert sys.getswitchinterval() == before


@BOTH
def test_rounds_are_recorded_where_they_are_run(open_world: Open, proxy: AsyncProxy, tmp_path: Path) -> None:
    path = tmp_path / "rounds"
    world, soak = open_world(proxy, spec={"capture": path})
    for _ in range(30):
        world.step()
    world.drain()
    if proxy is AsyncProxy.PROCESS:
        soak.inject(Fault.PROXY_KILLED)
        good_round(world)
    world.handoff.close()
    with CaptureReader(path) as reader:
        recorded = list(reader.rounds())
    if proxy is AsyncProxy.THREAD:
        assert len(recorded) == 30
        assert {one.outcome for one in recorded} <= {RoundOutcome.OK, RoundOutcome.NOTHING}
    else:
        with CaptureReader(tmp_path / "rounds.2") as reader:
            assert len(list(reader.rounds())) >= 1


def test_the_statistics_say_what_serves(open_world: Open) -> None:
    for proxy in AsyncProxy:
        world, _ = open_world(proxy)
        good_round(world)
        time.sleep(0.6)
        good_round(world)
        snapshot = world.handoff.snapshot()
        assert snapshot["async"]["is_on"]
        assert snapshot["async"]["proxy"] == proxy.value
        assert snapshot["async_dead"] is None
        assert snapshot["async_watchdog"]["deadline_ns"] == 400_000_000
        latency = world.handoff.side.latency()
        assert {"rtt_us", "worker_us", "rank0_round_us"} <= set(latency)
        assert any(name.startswith("proxy_parked_us_") for name in latency)
        # What of a round is the proxy's own: in front of the round trip and behind it.
        assert latency["proxy_before_us"]["count"] == latency["proxy_after_us"]["count"] == latency["rtt_us"]["count"]
        parked = max(each["max"] for name, each in latency.items() if name.startswith("proxy_parked_us_"))
        assert 0 < latency["proxy_before_us"]["max"] < parked
        assert 0 < latency["proxy_after_us"]["max"] < parked
        assert world.stats.snapshot()["latency"]["rank0_submit_us"]["count"] == world.tally.rounds
        assert world.handoff.side.details()["worker"]["state"] == "ready"


def _open(library: Path | None, make_stream: Any) -> None:
    info = make_info()
    device = HostDevice(info)
    open_handoff(
        settings(AsyncProxy.THREAD, library=library),
        talker_spec(info, "tcp://127.0.0.1:1"),
        max_rows=device.max_rows,
        buffers=device.buffers,
        make_stream=make_stream or device.make_stream,
        stats=Stats(),
    )


def test_a_library_that_is_none_is_a_refusal_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"no library")
    with pytest.raises(HandoffRefusedError, match=r"lib\.so cannot be loaded"):
        _open(path, None)


def test_a_proxy_process_that_does_not_start_is_a_refusal(monkeypatch: pytest.MonkeyPatch, worker: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    info = make_info()
    device = HostDevice(info)
    with pytest.raises(HandoffRefusedError, match="could not be started"):
        open_handoff(
            settings(AsyncProxy.PROCESS),
            talker_spec(info, worker.endpoint),
            max_rows=device.max_rows,
            buffers=device.buffers,
            make_stream=device.make_stream,
            stats=Stats(),
        )


def test_a_gather_that_is_launched_needs_no_copies_but_those_of_windows(
    open_world: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, _ = open_world()
    good_round(world)
    stream, copied = world.handoff.stream, []
    monkeypatch.setattr(stream, "to_host", lambda to, source, size: copied.append(size))
    device = world.device
    assert isinstance(device, HostDevice)
    rows, meta = world.info.row_bytes, 16
    device._launches = 0  # every fourth gather is not launched
    for launched in (True, True, True, False):
        world.step([world.row(0, 1)])
        assert bool(copied) is not launched
    assert copied[0] == meta
    assert copied[1] >= rows
    copied.clear()
    world.handoff._region.ask(0)
    world.step([world.row(0, 1)])
    assert copied == [world.handoff._region.window_bytes]
    world.handoff.abandon("the copies are gone")
    world._in_flight.clear()


def test_a_round_that_is_begun_and_not_submitted_costs_only_itself(open_world: Open) -> None:
    world, _ = open_world(spec={"timeout_s": 10.0}, watchdog_s=30.0)
    good_round(world)
    world.handoff.begin(lambda: None)
    for _ in range(4):
        world.step([world.row(0, 1)])
    world.drain()
    assert world.outcomes[-1] is RoundOutcome.OK
    assert world.counters()["watchdog_skipped_unknown_ring"] == 1
