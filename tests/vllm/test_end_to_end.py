"""Real vLLM with a real worker, on the CPU: text, drafts, counters and memory under both policies and through failures.

Every engine is a process of its own; one run serves many tests, because a start takes longer than what is tested in it.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.vllm import tiny_pair
from tests.vllm.processes import Worker, run_engine

from farspark.engine.vllm.versions import CachedBlockDrop, record_for

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

N = 5
# Two steps of bf16 between 16 and 32, where the logits of the agreeable pair lie: a smaller margin is a tie.
BF16_TIE = 0.25
# In float32 the two drafters differ by the bf16 of the rows on the wire alone.
FLOAT32_TIE = 0.01


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(500) for _ in range(length)]


LONG = prompt(100, 150)
# Tokens per step: less than the long prompts, so that they are prefilled in chunks, also together with decodes.
BUDGET = 64
ENGINE: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "enable_prefix_caching": True, "block_size": 32}

CONCURRENT: dict[str, Any] = {
    "name": "concurrent",
    "prompts": [prompt(seed, length) for seed, length in enumerate([16, 5, 33, 1, 24, 7, 12])],
    "max_tokens": [40, 17, 33, 25, 30, 6, 28],
    "joins": {"4": 3, "5": 6},
}
CHUNKED: dict[str, Any] = {
    "name": "chunked",
    "prompts": [prompt(50, 200), prompt(51, 90), prompt(52, 8)],
    "max_tokens": 24,
    "joins": {"1": 2},
}
ABORTED: dict[str, Any] = {
    "name": "aborted",
    "prompts": [prompt(60 + i, 20) for i in range(7)],
    "max_tokens": 30,
    "aborts": {"3": 1, "5": 3, "6": 0},
}
CACHED_FIRST: dict[str, Any] = {"name": "cachedfirst", "prompts": [LONG], "max_tokens": 20}
CACHED_AGAIN: dict[str, Any] = {"name": "cachedagain", "prompts": [LONG, LONG[:100]], "max_tokens": 20}
PHASES = [CONCURRENT, CHUNKED, ABORTED, CACHED_FIRST, CACHED_AGAIN]
KILLED: dict[str, Any] = {
    "name": "killed",
    "prompts": [prompt(70 + i, 30 + i) for i in range(3)],
    "max_tokens": 90,
    "pauses": {"4": "kill", "9": "start"},
}
STALLED: dict[str, Any] = {
    "name": "stalled",
    "prompts": [prompt(80 + i, 10 + i) for i in range(2)],
    "max_tokens": 60,
    "pauses": {"3": "stop", "5": "continue"},
}
# Drafts after a prefix-cache hit are from the suffix only, so they are not the local drafter's.
SAME_DRAFTS = ("concurrent", "chunked", "aborted", "cachedfirst")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tiny_pair.TinyPair:
    return tiny_pair.make_tiny_pair(tmp_path_factory.mktemp("pair"), 0, agreeable=True)


def identity_of(pair: tiny_pair.TinyPair) -> str:
    program = "import sys; from farspark.cli.main import main; sys.exit(main())"
    arguments = [sys.executable, "-c", program, "identity", str(pair.drafter), "--target", str(pair.target)]
    said = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    return re.search(r"[0-9a-f]{64}", said)[0]  # type: ignore[index]


@pytest.fixture(scope="module")
def identity(pair: tiny_pair.TinyPair) -> str:
    return identity_of(pair)


@pytest.fixture(scope="module")
def worker(pair: tiny_pair.TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    one = Worker(pair.drafter, pair.target, tmp_path_factory.mktemp("worker"))
    one.start()
    yield one
    one.kill()


def remote(policy: str, endpoint: str, identity: str, stats: Path, **more: str) -> dict[str, str]:
    settings = {
        "": endpoint,
        "_POLICY": policy,
        "_IDENTITY": identity,
        "_STATS_FILE": str(stats),
        "_TIMEOUT_MS": "2000",
        "_CONNECT_TIMEOUT_MS": "10000",
        "_BACKOFF_MS": "50",
        "_BACKOFF_MAX_MS": "200",
        "_WANT_MARGIN": "1",
    }
    return {f"VLLM_DSPARK_REMOTE{suffix}": value for suffix, value in (settings | more).items()}


def job(pair: tiny_pair.TinyPair, *phases: dict[str, Any], drafts: bool = True, **engine: Any) -> dict[str, Any]:
    in_process = engine.get("tensor_parallel_size", 1) == 1
    return {
        "target": str(pair.target),
        "drafter": str(pair.drafter) if drafts else None,
        "num_drafts": N,
        "record_drafts": drafts and in_process,
        "engine": ENGINE | engine,
        "phases": list(phases),
    }


def failures(worker: Worker) -> Callable[[str], None]:
    """What happens to the worker at the pauses of `KILLED` and `STALLED`."""

    def start() -> None:
        worker.start()
        time.sleep(1.0)  # several back-offs: the connector thread runs while the engine pauses

    actions: dict[str, Callable[[], None]] = {
        "kill": worker.kill,
        "start": start,
        "stop": lambda: worker.signal(signal.SIGSTOP),
        "continue": lambda: worker.signal(signal.SIGCONT),
    }
    return lambda name: actions[name]()


def stats_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def alone(pair: tiny_pair.TinyPair) -> dict[str, Any]:
    """The target without speculation."""
    calm = [{name: value for name, value in phase.items() if name != "pauses"} for phase in (KILLED, STALLED)]
    # An abort comes at another place of the text where steps bring more tokens: here nobody is aborted.
    whole = {name: value for name, value in ABORTED.items() if name != "aborts"}
    return run_engine(job(pair, CONCURRENT, CHUNKED, whole, CACHED_FIRST, CACHED_AGAIN, *calm, drafts=False))


@pytest.fixture(scope="module")
def local(pair: tiny_pair.TinyPair) -> dict[str, Any]:
    """vLLM's own DSpark."""
    return run_engine(job(pair, *PHASES))


@pytest.fixture(scope="module")
def capacity(pair: tiny_pair.TinyPair, worker: Worker, identity: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("capacity") / "stats.json"
    settings = remote("capacity", worker.endpoint, identity, path)
    result = run_engine(job(pair, *PHASES, KILLED, STALLED), settings, on_pause=failures(worker))
    return result | {"stats": stats_of(path)}


@pytest.fixture(scope="module")
def shadow(pair: tiny_pair.TinyPair, worker: Worker, identity: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("shadow") / "stats.json"
    settings = remote("shadow", worker.endpoint, identity, path)
    result = run_engine(job(pair, *PHASES, KILLED), settings, on_pause=failures(worker))
    return result | {"stats": stats_of(path)}


def assert_same_text(run: dict[str, Any], alone: dict[str, Any], phase: str) -> None:
    expected = alone["phases"][phase]["tokens"]
    for name, tokens in run["phases"][phase]["tokens"].items():
        if phase == "aborted":  # what was aborted has the beginning of its text
            assert tokens == expected[name][: len(tokens)], name
        else:
            assert tokens == expected[name], name


def drafts_by_place(run: dict[str, Any], phase: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(one["request"], one["position"]): one for one in run["phases"][phase]["drafts"]}


def share_equal(blocks: Iterable[tuple[list[int], dict[str, Any]]], tie: float) -> float:
    """The share of equal blocks among (reference drafts, record of the worker's), all others being near ties.

    Up to and including the first difference both chains saw the same tokens, so there the worker's margin must be a tie's.
    """
    equal = []
    for reference, one in blocks:
        differing = [position for position in range(N) if reference[position] != one["remote"][position]]
        assert not differing or one["margins"][differing[0]] <= tie, f"local drafts {reference}, worker's {one}"
        equal.append(not differing)
    assert len(equal) >= 6
    return sum(equal) / len(equal)


TEXT_PHASES = [phase["name"] for phase in PHASES]


@pytest.mark.parametrize("phase", [*TEXT_PHASES, "killed", "stalled"])
def test_capacity_text_is_the_targets_own(capacity: dict[str, Any], alone: dict[str, Any], phase: str) -> None:
    assert_same_text(capacity, alone, phase)


@pytest.mark.parametrize("phase", [*TEXT_PHASES, "killed"])
def test_shadow_text_is_the_targets_own(shadow: dict[str, Any], alone: dict[str, Any], phase: str) -> None:
    assert_same_text(shadow, alone, phase)


@pytest.mark.parametrize("phase", SAME_DRAFTS)
def test_capacity_drafts_are_those_of_vllms_own_dspark(
    capacity: dict[str, Any], local: dict[str, Any], phase: str
) -> None:
    ours, theirs = drafts_by_place(capacity, phase), drafts_by_place(local, phase)
    shared = sorted(ours.keys() & theirs.keys())
    assert len(shared) >= 0.9 * len(theirs)
    assert share_equal(((theirs[place]["drafts"], ours[place]) for place in shared), BF16_TIE) >= 0.8


@pytest.mark.parametrize("phase", [*SAME_DRAFTS, "killed"])
def test_shadow_sees_the_local_drafts_from_the_worker(shadow: dict[str, Any], phase: str) -> None:
    answered = [one for one in shadow["phases"][phase]["drafts"] if one["ok"]]
    assert share_equal(((one["drafts"], one) for one in answered), BF16_TIE) >= 0.8


def test_shadow_returns_the_local_drafts_unchanged(shadow: dict[str, Any], local: dict[str, Any]) -> None:
    for phase in TEXT_PHASES:
        assert [one["drafts"] for one in shadow["phases"][phase]["drafts"]] == [
            one["drafts"] for one in local["phases"][phase]["drafts"]
        ]
        assert shadow["phases"][phase]["steps"] == local["phases"][phase]["steps"]


def test_shadow_statistics_agree_and_hold_no_divergence(shadow: dict[str, Any]) -> None:
    found = shadow["stats"]["shadow"]
    assert found["blocks"] > 100
    assert found["equal_or_tie_rate"] >= 0.995
    assert found["far_diverged"] == 0
    assert found["full_block_agree_rate"] >= 0.9
    assert shadow["stats"]["counters"]["shadow_partial_windows"] == len(shadow["phases"]["cachedagain"]["drafts"])
    assert shadow["stats"]["latency"]["local_propose_us"]["count"] > 0
    lengths = found["accepted_lengths"]
    assert lengths["blocks"] > 50
    # Some drafts are accepted, some are not, and alike.
    assert 0.2 < lengths["local"] < 4.8
    assert abs(lengths["difference"]) < 0.1


def test_apc_gap_drafts_after_a_cache_hit_come_from_the_suffix(capacity: dict[str, Any], alone: dict[str, Any]) -> None:
    assert capacity["phases"]["cachedagain"]["cached"]["0"] >= 128
    drafts = capacity["phases"]["cachedagain"]["drafts"]
    assert drafts
    assert all(one["ok"] for one in drafts)


def test_apc_loss_capacity_finds_as_many_cached_tokens_as_no_speculation(
    capacity: dict[str, Any], local: dict[str, Any], alone: dict[str, Any]
) -> None:
    for phase in TEXT_PHASES:
        assert capacity["phases"][phase]["cached"] == alone["phases"][phase]["cached"]
    # What capacity would lose if it left vLLM's rule alone.
    drops = record_for(local["facts"]["version"]).cached_block_drop is not CachedBlockDrop.NONE
    lost = alone["phases"]["cachedagain"]["cached"]["0"] - local["phases"]["cachedagain"]["cached"]["0"]
    assert (lost > 0) == drops


def test_capacity_accepts_as_much_as_the_local_drafter(capacity: dict[str, Any], local: dict[str, Any]) -> None:
    for phase in ("concurrent", "chunked", "cachedfirst"):
        assert abs(capacity["phases"][phase]["steps"] - local["phases"][phase]["steps"]) <= 1


def test_capacity_has_no_draft_model_no_draft_layer_and_no_draft_cache(
    capacity: dict[str, Any], local: dict[str, Any]
) -> None:
    facts = capacity["facts"]
    assert "vllm.v1.worker.gpu.model_runner" in facts["runner"]
    assert facts["speculator"] == "CapacitySpeculator"
    assert "DraftModelSpeculator" not in facts["speculator_parents"]
    assert facts["draft_parameters"] == 0
    assert facts["attention_layers"] == [f"model.layers.{i}.self_attn.attn" for i in range(tiny_pair.TARGET_LAYERS)]
    assert facts["kv_cache_tensors"] == tiny_pair.TARGET_LAYERS
    assert len(local["facts"]["attention_layers"]) == tiny_pair.TARGET_LAYERS + tiny_pair.DRAFT_LAYERS
    freed = capacity["stats"]["not_allocated"]
    values = 2 * tiny_pair.KV_HEADS * tiny_pair.HEAD_DIM * tiny_pair.DRAFT_LAYERS
    assert freed["draft_kv_bytes_per_token_per_rank"] == 2 * values
    assert freed["draft_weight_bytes_all_ranks"] > 2 * local["facts"]["draft_parameters"] * 0.9


@pytest.mark.parametrize("policy", ["capacity", "shadow"])
def test_a_worker_killed_and_restarted_in_mid_run_drafts_again(
    capacity: dict[str, Any], shadow: dict[str, Any], policy: str
) -> None:
    run = {"capacity": capacity, "shadow": shadow}[policy]
    ok = [one["ok"] for one in run["phases"]["killed"]["drafts"]]
    first_failed = ok.index(False)
    resumed = ok.index(True, first_failed)
    assert first_failed > 0
    assert all(ok[resumed:])
    counters = run["stats"]["counters"]
    assert counters["hellos"] == 2
    assert counters["disconnects"] >= 1
    assert counters["fallback_not_ready"] >= 1
    assert counters["resync_rounds"] >= 1
    assert counters["resync_rows"] >= 3 * 30
    assert counters.get("stale_generation_new_sessions", 0) == 0
    assert "internal_error" not in counters


def test_half_open_a_stopped_worker_costs_its_deadline_and_no_more(capacity: dict[str, Any]) -> None:
    counters = capacity["stats"]["counters"]
    assert counters["fallback_timeout"] == 2
    assert [one["ok"] for one in capacity["phases"]["stalled"]["drafts"]][-1]
    assert capacity["phases"]["stalled"]["seconds"] < 30


def test_failed_rounds_bring_legal_ids_and_no_confidence(capacity: dict[str, Any]) -> None:
    failed = [one for phase in ("killed", "stalled") for one in capacity["phases"][phase]["drafts"] if not one["ok"]]
    assert failed
    assert all(one["drafts"] == [0] * N for one in failed)
    assert all(one["confidences"] == [0.0] * N for one in failed)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Random models in float32, a cache too small for four requests, a restart of the worker: shadow, resilience, and the
    target alone.

    These drafts follow from the context, not from the Markov head as the agreeable pair's do: wrong rows show.
    """
    folder = tmp_path_factory.mktemp("exact")
    pair = tiny_pair.make_tiny_pair(folder, 1, dtype=torch.float32)
    engine: dict[str, Any] = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 13,
        "max_model_len": 256,
    }
    crowd: dict[str, Any] = {"name": "crowd", "prompts": [prompt(200 + i, 60) for i in range(4)], "max_tokens": 50}
    restart = KILLED | {"prompts": KILLED["prompts"][:2], "max_tokens": 40}
    calm = {name: value for name, value in restart.items() if name != "pauses"}
    alone = run_engine(job(pair, crowd, calm, drafts=False, **engine))
    worker = Worker(pair.drafter, pair.target, folder, dtype="float32")
    worker.start()
    try:
        settings = remote("shadow", worker.endpoint, identity_of(pair), folder / "stats.json")
        run = run_engine(job(pair, crowd, restart, **engine), settings, on_pause=failures(worker))
        again = folder / "resilience.json"
        settings = remote("resilience", worker.endpoint, identity_of(pair), again)
        resilience = run_engine(job(pair, restart, **engine), settings, on_pause=failures(worker))
    finally:
        worker.kill()
    return {
        "run": run | {"stats": stats_of(folder / "stats.json")},
        "resilience": resilience | {"stats": stats_of(again)},
        "alone": alone,
    }


def test_drafts_in_float32_are_the_local_ones_through_preemptions(exact: dict[str, Any]) -> None:
    run = exact["run"]
    assert run["metrics"]["vllm:num_preemptions"] > 0
    assert_same_text(run, exact["alone"], "crowd")
    drafts = run["phases"]["crowd"]["drafts"]
    assert len(drafts) >= 190
    assert all(one["ok"] for one in drafts)
    assert share_equal(((one["drafts"], one) for one in drafts), FLOAT32_TIE) >= 0.98
    assert run["stats"]["counters"].get("req_status_partial_window", 0) == 0


def test_drafts_in_float32_are_the_local_ones_after_the_windows_were_sent_again(exact: dict[str, Any]) -> None:
    run = exact["run"]
    assert_same_text(run, exact["alone"], "killed")
    drafts = run["phases"]["killed"]["drafts"]
    first_failed = [one["ok"] for one in drafts].index(False)
    resumed = [one for one in drafts[first_failed:] if one["ok"]]
    assert len(resumed) >= 30
    assert run["stats"]["counters"]["resync_rows"] >= 2 * 30
    assert share_equal(((one["drafts"], one) for one in resumed), FLOAT32_TIE) >= 0.98


def test_resilience_drafts_locally_and_exactly_what_the_worker_does_not_bring(exact: dict[str, Any]) -> None:
    run = exact["resilience"]
    assert_same_text(run, exact["alone"], "killed")
    drafts = run["phases"]["killed"]["drafts"]
    # What the worker brought is what was verified.
    assert all(one["drafts"] == one["remote"] for one in drafts if one["ok"])
    # What it did not bring is what vLLM's own drafter says there: its context was kept current through the remote rounds.
    local = drafts_by_place(exact["run"], "killed")
    stood_in = [(one, local[one["request"], one["position"]]) for one in drafts if not one["ok"]]
    assert len(stood_in) >= 4
    assert all(one["drafts"] == reference["drafts"] for one, reference in stood_in)
    counters = run["stats"]["counters"]
    assert counters["local_fallback_rounds"] >= 2
    assert counters["rounds_ok"] > counters["local_fallback_rounds"]
    assert counters["hellos"] == 2
    assert "internal_error" not in counters


def test_an_absent_worker_costs_nothing_but_the_drafts(
    pair: tiny_pair.TinyPair, identity: str, alone: dict[str, Any], tmp_path: Path
) -> None:
    settings = remote("capacity", "tcp://127.0.0.1:1", identity, tmp_path / "stats.json")
    run = run_engine(job(pair, CONCURRENT, CHUNKED), settings)
    assert_same_text(run, alone, "concurrent")
    assert_same_text(run, alone, "chunked")
    counters = stats_of(tmp_path / "stats.json")["counters"]
    assert counters["rounds_failed"] == counters["fallback_not_ready"]
    assert counters.get("rounds_ok", 0) == 0
    assert "worker not reached" in run["log"]


@pytest.fixture(scope="module")
def alone_tp2(pair: tiny_pair.TinyPair) -> dict[str, Any]:
    return run_engine(job(pair, CONCURRENT, CHUNKED, drafts=False, tensor_parallel_size=2), TP2)


TP2 = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "0|1",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.parametrize("policy", ["capacity", "shadow"])
def test_tp_agree_two_ranks_keep_the_text_through_a_restart_of_the_worker(
    policy: str, pair: tiny_pair.TinyPair, worker: Worker, identity: str, alone_tp2: dict[str, Any], tmp_path: Path
) -> None:
    concurrent = CONCURRENT | {"pauses": {"4": "kill", "8": "start"}}
    settings = TP2 | remote(policy, worker.endpoint, identity, tmp_path / "stats.json")
    phases = (concurrent, CHUNKED)
    run = run_engine(job(pair, *phases, tensor_parallel_size=2), settings, on_pause=failures(worker))
    assert_same_text(run, alone_tp2, "concurrent")
    assert_same_text(run, alone_tp2, "chunked")
    stats = stats_of(tmp_path / "stats.json")
    assert stats["counters"]["hellos"] == 2  # both from rank 0: the other rank never connects
    assert stats["counters"]["rounds_ok"] > 10
    assert stats["counters"]["fallback_not_ready"] >= 1
    assert run["log"].count("remote drafter chosen") == 2
    assert run["log"].count("worker ready") == 2
    if policy == "shadow":
        assert stats["shadow"]["diverged"] == 0
        assert stats["shadow"]["unjudged"] == stats["counters"].get("judge_failures", 0)
    else:
        assert run["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 30


def test_a_worker_with_another_drafter_disables_the_remote_and_says_so(
    pair: tiny_pair.TinyPair, worker: Worker, alone: dict[str, Any], tmp_path: Path
) -> None:
    settings = remote("capacity", worker.endpoint, "ab" * 32, tmp_path / "stats.json")
    run = run_engine(job(pair, CONCURRENT), settings)
    assert_same_text(run, alone, "concurrent")
    assert stats_of(tmp_path / "stats.json")["worker"]["state"] == "disabled"
    assert "ab" * 32 in run["log"]
    assert "disabled" in run["log"]


def test_plugin_load_a_setting_that_is_wrong_stops_the_start(pair: tiny_pair.TinyPair, tmp_path: Path) -> None:
    wrong = remote("capacity", "tcp://127.0.0.1:1", "00" * 32, tmp_path / "stats.json")
    with pytest.raises(RuntimeError, match="VLLM_DSPARK_REMOTE_POLCY is not a setting"):
        run_engine(job(pair, CONCURRENT), wrong | {"VLLM_DSPARK_REMOTE_POLCY": "capacity"})


def test_unset_vllm_runs_its_own_code_and_nothing_of_ours_is_loaded(local: dict[str, Any]) -> None:
    assert local["facts"]["speculator_module"] == "vllm.v1.worker.gpu.spec_decode.dspark.speculator"
    assert local["facts"]["farspark_modules"] == [
        "farspark.engine",
        "farspark.engine.vllm",
        "farspark.engine.vllm.plugin",
    ]
