from __future__ import annotations

import dataclasses

from farspark.demo.report import Report

REPORT = Report(
    engine="vLLM 0.32.0",
    dtype="bfloat16",
    prompts=2,
    tokens=100,
    text_equal=True,
    near_ties=1,
    differences=[],
    drafts=40,
    accepted=60,
    accepted_by_position=[0.8, 0.5, 0.2],
    remote_tokens_per_s=9.87,
    alone_tokens_per_s=5.0,
    stats={
        "counters": {"rounds_decode": 40, "rounds_prefill": 2, "rounds_ok": 41},
        "latency": {"rtt_us_decode": {"p50": 1500.0}, "worker_us": {"p50": 1200.0}},
    },
    not_allocated={"draft_weight_bytes_all_ranks": 3 << 20, "draft_kv_bytes_per_token_per_rank": 3072},
)


def test_the_json_has_the_promised_keys() -> None:
    data = REPORT.as_json()
    assert data["text_equal"] is True
    assert data["tokens_per_round"] == 2.5
    assert (data["near_ties"], data["rounds"], data["rounds_ok"]) == (1, 42, 41)
    assert (data["rtt_us_p50"], data["worker_us_p50"], data["engine"]) == (1500.0, 1200.0, "vLLM 0.32.0")


def test_the_text_says_whether_it_is_the_targets_own() -> None:
    assert "yes: all 100 tokens are what the target alone says, 1 near ties" in REPORT.as_text()
    assert "draft weights 3.0 MiB, draft KV cache 3.0 KiB" in REPORT.as_text()
    failed = dataclasses.replace(REPORT, text_equal=False, differences=["prompt 1: token 3 is 9"])
    assert "NO: prompt 1: token 3 is 9" in failed.as_text()


def test_METRICS_without_a_single_draft_there_is_no_division_by_zero() -> None:
    empty = dataclasses.replace(REPORT, drafts=0, accepted=0, stats={}, not_allocated={}, accepted_by_position=[])
    assert empty.tokens_per_round == 1.0
    assert "not known" in empty.as_text()
