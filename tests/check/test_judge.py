"""Every bound of a check, from both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farspark.check import judge
from farspark.check.findings import Finding, Verdict, exit_code
from farspark.check.measurement import Answer, Measurement, read_measurement
from farspark.check.metrics import Memory, Metrics, parse_memory, parse_metrics
from farspark.errors import ConfigError

READY = {"state": "ready", "name": "farspark"}


def stats(latency: dict[str, float] | None = None, /, **counters: int) -> dict[str, Any]:
    return {
        "policy": "shadow",
        "worker": READY,
        "off_because": None,
        "counters": counters,
        "latency": {name: {"p50": us, "count": 9} for name, us in (latency or {}).items()},
    }


def measurement(**changes: Any) -> Measurement:
    metrics = Metrics(drafts=200, drafted=1000, accepted=400, generated=600, kv_tokens=10_240)
    answers = [Answer([5, 6, 7], "abc", 1.0, "stop", [3.0, 3.0, 0.1], [1, 2, 3])]
    found = Measurement(
        model="m", max_model_len=1024, questions="q", answers=answers, seconds=2.0, metrics=metrics, cached_tokens=96
    )
    return replace(found, **changes)


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.verdict.value for finding in findings}


def only(findings: list[Finding], what: str) -> Finding:
    return next(finding for finding in findings if finding.what == what)


def test_the_exit_code_is_the_worst_that_was_found() -> None:
    found = {verdict: Finding("x", verdict, "") for verdict in Verdict}
    assert exit_code([found[Verdict.PASS], found[Verdict.SKIP], found[Verdict.NOTE]]) == 0
    assert exit_code([found[Verdict.PASS], found[Verdict.FAIL]]) == 1
    assert exit_code([found[Verdict.SKIP], found[Verdict.NOTE]]) == 2
    assert exit_code([]) == 2


@pytest.mark.parametrize(("ok", "failed", "verdict"), [(99, 1, "PASS"), (98, 2, "FAIL"), (10, 0, "SKIP")])
def test_rounds_are_judged_by_those_of_the_check_alone(ok: int, failed: int, verdict: str) -> None:
    before = stats(rounds_ok=1000, rounds_failed=500, fallback_not_ready=500)
    after = stats(rounds_ok=1000 + ok, rounds_failed=500 + failed, fallback_not_ready=500, fallback_timeout=failed)
    found = only(judge.health(before, after), "rounds that succeeded")
    assert found.verdict.value == verdict
    assert ("fallback_timeout" in found.measured) == (failed > 0)
    assert "not_ready" not in found.measured


def test_a_worker_that_is_not_ready_a_stale_generation_and_a_bug_of_ours_fail() -> None:
    before, good = stats(), stats(rounds_ok=50)
    assert set(verdicts(judge.health(before, good)).values()) == {"PASS"}
    for bad, what in (
        (good | {"worker": {"state": "disabled"}}, "worker"),
        (stats(rounds_ok=50, stale_generation_new_sessions=1), "stale generations"),
        (good | {"off_because": "internal_error"}, "no internal error"),
    ):
        found = verdicts(judge.health(before, bad))
        assert [name for name, verdict in found.items() if verdict == "FAIL"] == [what]


def shadow(**changes: Any) -> dict[str, Any]:
    found = {
        "blocks": 1000,
        "full_block_agree_rate": 0.3,
        "steps": 5000,
        "equal": 4900,
        "ties": 75,
        "diverged": 25,
        "far_diverged": 0,
        "unjudged": 0,
        "equal_or_tie_rate": 0.995,
        "largest_gap_ulps": 7.5,
        "largest_confidence_difference": 0.01,
        "bounds": {"equal_or_tie_rate": 0.995, "confidence_difference": 0.01},
        "has_router": False,
        "routing_ambiguous": 0,
    }
    return {"shadow": found | changes}


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, set()),
        ({"equal_or_tie_rate": 0.9949}, {"equal or a near tie"}),
        ({"equal_or_tie_rate": None}, {"equal or a near tie"}),
        ({"far_diverged": 1}, {"drafts far off"}),
        ({"unjudged": 1}, {"blocks that were not judged"}),
        ({"largest_confidence_difference": 0.0101}, {"confidences"}),
        # The engine's own bounds.
        ({"bounds": {"equal_or_tie_rate": 0.996, "confidence_difference": 0.01}}, {"equal or a near tie"}),
        ({"bounds": {"equal_or_tie_rate": 0.995, "confidence_difference": 0.005}}, {"confidences"}),
    ],
)
def test_parity_passes_at_its_bounds_and_fails_behind_them(changes: dict[str, Any], failing: set[str]) -> None:
    found = verdicts(judge.parity(shadow(**changes)))
    assert {name for name, verdict in found.items() if verdict == "FAIL"} == failing


def test_parity_of_few_blocks_or_without_local_confidences_is_skipped() -> None:
    few = judge.parity(shadow(blocks=49))
    assert verdicts(few) == {"drafts compared": "SKIP"}
    assert few[0].measured == "49 blocks are too few"
    assert verdicts(judge.parity({})) == {"drafts compared": "SKIP"}
    assert only(judge.parity(shadow(largest_confidence_difference=None)), "confidences").verdict is Verdict.SKIP


ROUTED = {
    "has_router": True,
    "routing_ambiguous": 930,
    "bounds": {"equal_or_tie_rate": 0.995, "confidence_difference": 0.03, "routing_margin": 2**-7},
}


def test_parity_of_a_drafter_with_a_router_says_what_was_kept_out_and_judges_the_rest_by_its_bounds() -> None:
    found = judge.parity(shadow(**ROUTED, largest_confidence_difference=0.03))
    kept_out = only(found, "blocks kept out: a router near a tie")
    assert (kept_out.verdict, kept_out.measured) == (Verdict.NOTE, "930 of 1,000, with a margin below 0.0078125")
    assert "FAIL" not in verdicts(found).values()
    assert verdicts(judge.parity(shadow(**ROUTED, largest_confidence_difference=0.0301)))["confidences"] == "FAIL"


def test_parity_of_few_blocks_that_no_router_kept_out_is_skipped_and_says_what_else_to_do() -> None:
    found = judge.parity(shadow(**ROUTED | {"routing_ambiguous": 951}))
    assert verdicts(found) == {"blocks kept out: a router near a tie": "NOTE", "drafts compared": "SKIP"}
    said = only(found, "drafts compared").measured
    assert said == (
        "49 blocks are too few: in 951 more a router was near a tie. Let it run longer; accepted drafts judge all of them"
    )


def test_parity_of_a_drafter_with_a_router_is_judged_by_accepted_drafts_once_they_are_enough() -> None:
    lengths = {
        "blocks": 9_999,
        "enough_blocks": 10_000,
        "local": 1.5,
        "remote": 1.47,
        "difference": -0.02,
        "bound": 0.02,
    }
    what = "drafts accepted of a block, local and remote"
    for routed, passes, verdict in (
        (True, None, "SKIP"),
        (True, True, "PASS"),
        (True, False, "FAIL"),
        (False, None, "NOTE"),
    ):
        routing = ROUTED | {"routing_ambiguous": 990} if routed else {}
        found = judge.parity(shadow(**routing, accepted_lengths=lengths | {"passes": passes}))
        assert verdicts(found)[what] == verdict
        assert only(found, what).measured.startswith("1.500 and 1.470 (-2.00%) of 9,999 blocks")
    nothing = lengths | {"blocks": 0, "local": None, "remote": None, "difference": None, "passes": None}
    assert what not in verdicts(judge.parity(shadow(accepted_lengths=nothing)))


def test_parity_with_a_worker_that_is_too_old_to_say_is_judged_as_a_dense_drafters() -> None:
    found = judge.parity(shadow(has_router=None))
    assert only(found, "routing").verdict is Verdict.NOTE
    assert "too old to say" in only(found, "routing").measured
    assert "FAIL" not in verdicts(found).values()
    assert verdicts(judge.parity(shadow(has_router=None, largest_confidence_difference=0.02)))["confidences"] == "FAIL"
    assert "routing" not in verdicts(judge.parity(shadow()))


def test_acceptance_is_judged_by_what_so_many_rounds_let_one_expect() -> None:
    base = measurement()
    # 40 % of 1000 in 200 rounds each: three standard errors are 14.7 points.
    for accepted, verdict in ((400, "PASS"), (540, "PASS"), (555, "FAIL"), (260, "PASS"), (240, "FAIL")):
        now = measurement(metrics=replace(base.metrics, accepted=accepted))
        assert verdicts(judge.acceptance(now, base)) == {"accepted drafts": verdict}, accepted
    many = replace(base.metrics, drafts=20_000, drafted=100_000, accepted=40_000)
    fewer = replace(many, accepted=38_000)
    assert verdicts(judge.acceptance(measurement(metrics=fewer), measurement(metrics=many))) == {
        "accepted drafts": "FAIL"
    }
    few = measurement(metrics=replace(base.metrics, drafts=49))
    assert verdicts(judge.acceptance(few, base)) == {"accepted drafts": "SKIP"}


TIMED = {"rank0_round_us": 1234.5, "local_propose_us": 2500.0}


def test_the_cost_settings_are_what_was_measured() -> None:
    after = stats(TIMED)
    assert judge.cost_settings(after, [8.0, 8.5, 9.25]) == {
        "VLLM_DSPARK_REMOTE_DRAFT_MS": "1.234",
        "VLLM_DSPARK_REMOTE_ROUND_MS": "5.500,6.000,6.750",
    }
    assert set(verdicts(judge.timing(after, [8.0, 8.5, 9.25])).values()) == {"PASS"}


def test_timing_says_what_is_missing() -> None:
    assert judge.cost_settings(stats(TIMED), None) == {"VLLM_DSPARK_REMOTE_DRAFT_MS": "1.234"}
    found = only(judge.timing(stats(TIMED), None), "VLLM_DSPARK_REMOTE_ROUND_MS")
    assert found.verdict is Verdict.SKIP
    assert "--round-ms" in found.measured
    assert set(verdicts(judge.timing(stats(), [8.0])).values()) == {"SKIP"}
    assert judge.cost_settings(stats(), [8.0]) == {}


@pytest.mark.parametrize("table", [[2.5, 8.0], [2.0, 8.0], [8.0, 7.9]])
def test_a_live_table_that_cannot_be_of_this_drafter_fails(table: list[float]) -> None:
    assert only(judge.timing(stats(TIMED), table), "VLLM_DSPARK_REMOTE_ROUND_MS").verdict is Verdict.FAIL


def test_memory_is_compared_rank_by_rank() -> None:
    base = measurement(memory=Memory({"TP0": 10.0, "TP1": 10.0}, {"TP0": 1.0}))
    good = measurement(memory=Memory({"TP0": 8.0, "TP1": 8.0}, {"TP0": 1.0}))
    bad = measurement(memory=Memory({"TP0": 8.0, "TP1": 10.0}, {"TP0": 1.5}))
    after = stats() | {
        "not_allocated": {"draft_weight_bytes_all_ranks": 1 << 20, "draft_kv_bytes_per_token_per_rank": None}
    }
    saved = judge.saved_memory(after, good, base)
    assert "FAIL" not in verdicts(saved).values()
    assert only(saved, "load size, TP0").bound == "below the baseline"
    assert only(saved, "graph memory, TP0").bound == "not above the baseline"
    found = verdicts(judge.saved_memory(after, bad, base))
    assert found["load size, TP0"] == "PASS"
    assert found["load size, TP1"] == "FAIL"
    assert found["graph memory, TP0"] == "FAIL"
    assert found["not allocated: draft_weight_bytes_all_ranks"] == "NOTE"
    assert verdicts(judge.saved_memory(stats(), measurement(), base))["load size"] == "SKIP"
    of_cpu = measurement(memory=Memory({"TP0": 8.0}, {}, True))
    found = verdicts(judge.saved_memory(after, of_cpu, of_cpu))
    assert (found["load size"], found["KV cache"]) == ("SKIP", "PASS")


def test_a_larger_kv_cache_is_larger() -> None:
    base = measurement()
    more = measurement(metrics=replace(base.metrics, kv_tokens=10_241))
    assert verdicts(judge.more_kv(more, base)) == {"KV cache": "PASS", "concurrency": "PASS"}
    assert verdicts(judge.more_kv(base, base)) == {"KV cache": "FAIL", "concurrency": "FAIL"}
    assert verdicts(judge.more_kv(base, base, or_equal=True)) == {"KV cache": "PASS", "concurrency": "PASS"}
    assert verdicts(judge.more_kv(replace(more, max_model_len=None), base))["concurrency"] == "SKIP"
    unknown = measurement(metrics=replace(base.metrics, kv_tokens=None))
    assert verdicts(judge.more_kv(unknown, base)) == {"KV cache": "SKIP"}


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        ([5, 6, 7], "PASS"),
        ([5, 6, 3], "PASS"),  # the target's second choice where it hardly knew
        ([5, 6, 4], "FAIL"),  # no choice of the target's
        ([5, 2, 7], "FAIL"),  # its second choice where it knew
        ([5, 6], "FAIL"),
        ([5, 6, 7, 8], "FAIL"),
    ],
)
def test_text_may_part_only_where_the_target_hardly_knew(tokens: list[int], verdict: str) -> None:
    now = measurement(answers=[Answer(tokens, "abc", 1.0, "stop")])
    assert verdicts(judge.same_text(now, measurement())) == {"text": verdict}


def test_text_without_logprobs_or_of_other_questions_is_not_judged() -> None:
    silent = measurement(answers=[Answer([5, 6, 7], "abc", 1.0, "stop")])
    other = measurement(answers=[Answer([5, 6, 3], "abc", 1.0, "stop")])
    assert verdicts(judge.same_text(other, silent)) == {"text": "SKIP"}
    assert verdicts(judge.same_text(silent, silent)) == {"text": "PASS"}
    assert verdicts(judge.same_text(replace(other, questions="else"), silent)) == {"text": "SKIP"}


def test_one_answer_that_cannot_be_judged_does_not_hide_one_that_is_wrong() -> None:
    silent, wrong = Answer([5, 6, 7], "abc", 1.0, "stop"), Answer([5, 2, 7], "abc", 1.0, "stop")
    before = measurement(answers=[silent, *measurement().answers])
    assert verdicts(judge.same_text(measurement(answers=[wrong, wrong]), before)) == {"text": "FAIL"}


@pytest.mark.parametrize(("gap", "verdict"), [(0.25, "PASS"), (0.2501, "FAIL")])
def test_a_near_tie_is_as_wide_as_its_bound(gap: float, verdict: str) -> None:
    before = measurement(answers=[Answer([5], "a", 1.0, "stop", [gap], [1])])
    now = measurement(answers=[Answer([1], "a", 1.0, "stop")])
    assert verdicts(judge.same_text(now, before)) == {"text": verdict}


@pytest.mark.parametrize(
    ("text", "finished", "verdict"), [("a", "length", "PASS"), (" ", "stop", "FAIL"), ("a", "abort", "FAIL")]
)
def test_an_answer_has_text_and_an_end(text: str, finished: str, verdict: str) -> None:
    assert verdicts(judge.sane(measurement(answers=[Answer([1], text, 1, finished)]))) == {"answers": verdict}


PROMPT = 100  # tokens, in blocks of 16: 96 of them can be found again


@pytest.mark.parametrize(
    ("cached", "of_baseline", "drafts_of_baseline", "expected"),
    [
        (96, 96, 0, ("PASS", "PASS")),
        (96, 80, 200, ("PASS", "PASS")),
        # As many as a baseline whose local drafter cost it a block, and fewer than one without speculation.
        (80, 80, 200, ("PASS", "FAIL")),
        (80, 96, 0, ("FAIL", "NOTE")),
        (80, 96, 200, ("FAIL", "FAIL")),
        # Nothing is found again where the baseline found something.
        (0, 96, 200, ("FAIL", "FAIL")),
        (96, 0, 200, ("PASS", "PASS")),
        # A target that finds no more even without speculation.
        (80, 80, 0, ("PASS", "NOTE")),
    ],
)
def test_APC_LOSS_a_block_that_is_computed_again_fails_whatever_the_baseline_has_lost(
    cached: int, of_baseline: int, drafts_of_baseline: int, expected: tuple[str, str]
) -> None:
    base, blocks = measurement(), replace(measurement().metrics, block_tokens=16)
    now = replace(base, metrics=blocks, cached_tokens=cached, long_prompt_tokens=PROMPT)
    before = replace(base, metrics=replace(blocks, drafts=drafts_of_baseline), cached_tokens=of_baseline)
    found = judge.prefix_cache(now, before)
    assert verdicts(found) == dict(zip(("cached tokens", "the last block"), expected, strict=True))
    assert all("C-capacity-nodrop" in finding.bound for finding in found if finding.verdict is not Verdict.NOTE)


def test_APC_LOSS_what_was_not_measured_is_not_judged() -> None:
    base = measurement()
    assert verdicts(judge.prefix_cache(base, base)) == {"cached tokens": "PASS", "the last block": "SKIP"}
    sized = replace(base, long_prompt_tokens=PROMPT)
    assert verdicts(judge.prefix_cache(sized, base)) == {"cached tokens": "PASS", "the last block": "SKIP"}
    for other in ({"cached_tokens": None}, {"questions": "others"}):
        assert verdicts(judge.prefix_cache(replace(base, **other), base)) == {"cached tokens": "SKIP"}
    nothing = measurement(cached_tokens=0)
    assert verdicts(judge.prefix_cache(nothing, nothing)) == {"cached tokens": "SKIP"}


@pytest.mark.parametrize(("tokens", "holds"), [(96, True), (97, True), (111, True), (112, True), (113, False)])
def test_only_the_block_with_the_prompts_last_token_is_computed_again(tokens: int, holds: bool) -> None:
    """Blocks of 16, of which six were found."""
    metrics = replace(measurement().metrics, block_tokens=16)
    now = measurement(metrics=metrics, long_prompt_tokens=tokens)
    assert (only(judge.prefix_cache(now, now), "the last block").verdict is Verdict.PASS) == holds


def test_speed_is_told_and_not_judged() -> None:
    found = judge.speed(measurement(seconds=1.0), measurement())
    assert verdicts(found) == {"speed": "NOTE"}
    assert "2.00 times" in found[0].measured


def test_FAIL_LIFETIME_an_outage_is_counted_and_output_goes_on() -> None:
    before = stats(rounds_ok=10)
    down = stats(rounds_ok=10, rounds_failed=1, fallback_not_ready=1, local_fallback_rounds=1)
    assert set(verdicts(judge.outage("resilience", before, down, generated=1)).values()) == {"PASS"}
    assert verdicts(judge.outage("resilience", before, stats(rounds_failed=7), generated=9))["local rounds"] == "FAIL"
    assert "local rounds" not in verdicts(judge.outage("capacity", before, down, generated=9))
    found = verdicts(judge.outage("capacity", before, before, generated=0))
    assert found == {"rounds without the worker": "FAIL", "output while it is gone": "FAIL"}


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({}, None),
        ({"hellos": 1}, "sessions after its return"),
        ({"hellos": 3}, "sessions after its return"),
        ({"rounds_ok": 10}, "rounds that succeed again"),
        ({"resync_rounds": 0}, "windows sent again"),
        ({"stale_generation_new_sessions": 1}, "stale generations"),
    ],
)
def test_a_recovery_is_one_session_resyncs_and_successes(changes: dict[str, int], failing: str | None) -> None:
    down = stats(rounds_ok=10, hellos=1)
    after = stats(**{"rounds_ok": 11, "hellos": 2, "resync_rounds": 1} | changes)
    found = verdicts(judge.recovery(down, after))
    assert [name for name, verdict in found.items() if verdict == "FAIL"] == ([failing] if failing else [])


def test_one_failed_request_fails_the_drill() -> None:
    assert verdicts(judge.nobody_failed(5, [])) == {"requests during the drill": "PASS"}
    assert verdicts(judge.nobody_failed(5, ["500"])) == {"requests during the drill": "FAIL"}
    assert verdicts(judge.nobody_failed(0, [])) == {"requests during the drill": "FAIL"}


def test_counters_are_summed_over_engines_and_subtracted() -> None:
    page = "\n".join(
        [
            "# HELP x y",
            'vllm:spec_decode_num_drafts_total{engine="0",model_name="a}b"} 7.0',
            'vllm:spec_decode_num_drafts_total{engine="1"} 5.0 1700000000',
            'vllm:generation_tokens_total{engine="0"} 1e3',
            'vllm:num_requests_running{engine="0"} nonsense',
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0',
        ]
    )
    found = parse_metrics(page)
    assert (found.drafts, found.generated, found.kv_tokens, found.block_tokens) == (12, 1000, 1600, 16)
    assert found.since(replace(found, drafts=2)).drafts == 10
    assert (found.since(found).kv_tokens, found.since(found).block_tokens) == (1600, 16)
    told = parse_metrics('vllm:cache_config_info{block_size="128",kv_cache_size_tokens="20480",num_gpu_blocks="1"} 1.0')
    assert told.kv_tokens == 20480
    assert parse_metrics("nothing").kv_tokens is parse_metrics("nothing").block_tokens is None


def test_the_log_of_vllm_names_the_memory_of_every_rank() -> None:
    log = """(Worker_TP0 pid=1) INFO 11-29 19:51:26 [model_runner.py:424] Model loading took 1.59 GiB memory and 17.4 seconds
(Worker_TP1 pid=2) INFO 11-29 19:51:26 [model_runner.py:424] Model loading took 1.60 GiB memory and 17.4 seconds
(Worker_TP0 pid=1) INFO 11-29 19:51:40 [model_runner.py:1128] Graph capturing finished in 4 secs, took 0.42 GiB
"""
    assert parse_memory(log) == Memory({"Worker_TP0": 1.59, "Worker_TP1": 1.60}, {"Worker_TP0": 0.42})
    assert parse_memory("Model loading took 2.00 GiB").load_gib == {"engine": 2.0}
    assert parse_memory("CPU KV cache size: 21,824 tokens").is_of_cpu


def test_a_measurement_is_read_as_it_was_saved(tmp_path: Path) -> None:
    saved = measurement(memory=Memory({"TP0": 1.0}, {}))
    saved.save(tmp_path / "a.json")
    assert read_measurement(tmp_path / "a.json") == saved


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not one that this version"),
        ('{"kind": "farspark-check", "version": 2}', "not one that this version"),
        ('{"kind": "farspark-check", "version": 1, "model": "m"}', "is not as `farspark check` saved it"),
    ],
)
def test_a_baseline_that_is_none_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_measurement(tmp_path / "b.json")
    with pytest.raises(ConfigError, match="farspark check baseline --save"):
        read_measurement(tmp_path / "nothing")
