"""The environment of a CPU engine."""

import os

import pytest

from farspark_vllm_cpu_engine import environment


def test_ranks_and_threads_take_cores_in_turn() -> None:
    cores = sorted(os.sched_getaffinity(0))
    found = environment(1, ranks=2)
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == f"{cores[0]}|{cores[1 % len(cores)]}"


def test_the_default_leaves_half_of_the_cores_to_others() -> None:
    assert int(environment()["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


@pytest.mark.parametrize(("threads", "ranks"), [(0, 1), (1, 0)])
def test_no_threads_or_no_ranks_is_an_error(threads: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        environment(threads, ranks=ranks)
