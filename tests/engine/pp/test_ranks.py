"""The handler over real Gloo ranks, each a process: random steps, and everything that can go wrong between two of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.vllm.processes import end_keeper, end_with_us

from farspark.engine.vllm.pp.faults import EXIT_STATUS

pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]


@dataclass
class Ended:
    status: int
    said: dict[str, Any]  # the JSON lines, put together
    log: str


class Ranks:
    """Where ranks are forked."""

    def __init__(self) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.pp.rank"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._keeper = end_with_us(self._process)

    def run(self, folder: Path, world: int, **job: Any) -> list[Ended]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job | {"world": world, "folder": str(folder)}) + "\n")
        self._process.stdin.flush()
        statuses = json.loads(self._process.stdout.readline())
        ended = []
        for rank, status in enumerate(statuses):
            said: dict[str, Any] = {}
            for line in (folder / f"{rank}.out").read_text().splitlines():
                said |= json.loads(line)
            ended.append(Ended(status, said, (folder / f"{rank}.log").read_text()))
        return ended

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        end_keeper(self._keeper)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    one = Ranks()
    yield one
    one.close()


def assert_all_alike(ended: list[Ended], steps: int) -> None:
    for rank in ended:
        assert rank.status == 0, rank.log
    assert len({(rank.said["consumed"], rank.said["digest"]) for rank in ended}) == 1
    assert ended[0].said["consumed"] > steps / 4


@pytest.mark.parametrize(("world", "steps"), [(2, 1000), (4, 400)])
def test_random_steps_give_every_rank_the_same_log(world: int, steps: int, tmp_path: Path, ranks: Ranks) -> None:
    assert_all_alike(ranks.run(tmp_path, world, steps=steps), steps)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(11, 21))
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_hundred_thousand_random_steps(world: int, seed: int, tmp_path: Path, ranks: Ranks) -> None:
    assert_all_alike(ranks.run(tmp_path, world, steps=10_000, seed=seed), 10_000)


FAULTS = [
    ("skip", "last"),
    ("skip", "first"),
    ("double", "last"),
    ("stale", "last"),
    ("wide", "last"),
    ("narrow", "last"),
    ("dead", "first"),
    ("dead", "last"),
]


def slowest_raise(ended: list[Ended], faulty: int, fault: str) -> float:
    """Seconds from the fault until the last of the other ranks had raised; each must have, and ended with its report."""
    planted = ended[faulty].said["planted"]
    waited = []
    for number, rank in enumerate(ended):
        if number == faulty and fault == "dead":
            assert rank.status == -signal.SIGKILL
            continue
        if fault == "wide" and rank.status == -signal.SIGABRT:
            continue  # Gloo itself aborts a receiver whose message is too long
        assert rank.status == EXIT_STATUS, (number, rank.status, rank.log[-2000:])
        assert f"stage {number}: {rank.said['error']}" in rank.log
        assert "steps with tokens, newest last" in rank.log
        if number != faulty:
            waited.append(rank.said["raised"] - planted)
    return max(waited, default=0.0)


LIMIT_S = 1.0
LIMIT_STEPS = 30  # of a healthy pipeline, on a machine so busy that these take longer than a second


def assert_raised_everywhere_at_once(
    ranks: Ranks, folder: Path, world: int, fault: str, where: str, attempts: int = 3
) -> None:
    """Within a second. A busy machine may take longer to give every rank its turn: the best of some attempts counts, and a second
    is never less than some steps before the fault took."""
    faulty = {"last": world - 1, "first": 0, "middle": world // 2}[where]
    waited = []
    for attempt in range(attempts):
        mine = folder / str(attempt)
        mine.mkdir()
        ended = ranks.run(mine, world, steps=100_000, fault=fault, fault_at=60, fault_rank=faulty)
        limit = max(LIMIT_S, LIMIT_STEPS * ended[faulty].said["step_s"])
        waited.append((slowest_raise(ended, faulty, fault), limit))
        print(f"{world} stages, {fault} of the {where}: raised after {waited[-1][0]:.3f} s, limit {limit:.2f} s")
        if waited[-1][0] < limit:
            return
    pytest.fail(f"{fault} of the {where} stage: raised after (s, limit) {waited}")


@pytest.mark.parametrize(("fault", "where"), FAULTS)
def test_a_fault_raises_on_every_other_rank_within_a_second(
    fault: str, where: str, tmp_path: Path, ranks: Ranks
) -> None:
    assert_raised_everywhere_at_once(ranks, tmp_path, 2, fault, where)


@pytest.mark.slow
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize(("fault", "where"), [*FAULTS, ("dead", "middle"), ("skip", "middle")])
def test_a_fault_raises_on_every_other_rank_of_a_longer_pipeline(
    fault: str, where: str, world: int, tmp_path: Path, ranks: Ranks
) -> None:
    assert_raised_everywhere_at_once(ranks, tmp_path, world, fault, where)


def test_a_step_that_is_never_consumed_is_found_before_its_buffers_are_used_again(tmp_path: Path, ranks: Ranks) -> None:
    ended = ranks.run(tmp_path, 2, steps=100_000, fault="forget", fault_at=60, fault_rank=0)
    assert re.fullmatch(r"step \d+ was never consumed", ended[0].said["error"])
    assert [rank.status for rank in ended] == [EXIT_STATUS, EXIT_STATUS]


def test_stages_that_disagree_about_the_shape_do_not_start(tmp_path: Path, ranks: Ranks) -> None:
    ended = ranks.run(tmp_path, 2, steps=10, each={"1": {"max_reqs": 9}})
    for rank in ended:
        assert rank.status == EXIT_STATUS
        assert "the stages differ in max_num_seqs: [6, 9]" in rank.log
