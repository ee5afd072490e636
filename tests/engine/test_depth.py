"""The depth policy: what it takes for a policy, and what it verifies."""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farspark.engine.depth import (
    Costs,
    DepthPolicy,
    Mode,
    NOut,
    Resolved,
    choose_depths,
    parse_policy,
    plan_n_out,
    policy_from_file,
    refuse_local_table,
    resolve,
    survival,
)
from farspark.engine.depth_control import DepthControl
from farspark.stats import Stats

Floats = npt.NDArray[np.floating[Any]]


def fixed_costs(num_drafts: int, step: float = 0.5) -> Costs:
    return Costs(tuple(8 + step * depth for depth in range(num_drafts + 1)), 1.5)


def chosen(text: str, confidences: Any, *, costs: Costs | None = None, limit: int | None = None, ok: Any = None) -> Any:
    known = np.asarray(confidences, dtype=np.float32)
    n, num_drafts = known.shape
    resolved = resolve(parse_policy(text), num_drafts, costs or fixed_costs(num_drafts), own_table=True)
    usable = [True] * n if ok is None else list(ok)
    return choose_depths(resolved, known.tolist(), usable, num_drafts if limit is None else limit)


# Parsing.


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("off", DepthPolicy(Mode.OFF)),
        (" OFF ", DepthPolicy(Mode.OFF)),
        ("fixed:0", DepthPolicy(Mode.FIXED, depth=0)),
        ("fixed: 3", DepthPolicy(Mode.FIXED, depth=3)),
        ("conf", DepthPolicy(Mode.CONF)),
        ("conf:7,7.5, 8", DepthPolicy(Mode.CONF, ms=(7.0, 7.5, 8.0))),
        ("confb", DepthPolicy(Mode.CONFB)),
        ("confb:1,1", DepthPolicy(Mode.CONFB, ms=(1.0, 1.0))),
        ("confr:1=7,8=9.5", DepthPolicy(Mode.CONFR, rows_ms=((1, 7.0), (8, 9.5)))),
    ],
)
def test_a_policy_is_read_and_written_back(text: str, policy: DepthPolicy) -> None:
    assert parse_policy(text) == policy
    assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no mode; expected off, fixed:DEPTH"),
        ("confidence", "'confidence' is no mode"),
        ("off:1", "off takes nothing"),
        ("fixed", "expected fixed:DEPTH"),
        ("fixed:-1", "expected fixed:DEPTH"),
        ("fixed:1.5", "expected fixed:DEPTH"),
        ("conf:", "nothing after the colon"),
        ("conf:1,x", "'x': expected a finite number of milliseconds above 0"),
        ("conf:1,nan", "'nan': expected a finite"),
        ("conf:1,inf", "'inf': expected a finite"),
        ("conf:0,1", "'0': expected a finite"),
        ("conf:1,,2", "'': expected a finite"),
        ("conf:2,1", "1 follows 2; verifying more never takes less time"),
        ("confr", "expected ROWS=MS"),
        ("confr:1,2", "'1': expected ROWS=MS"),
        ("confr:0=1", "'0=1': expected ROWS=MS"),
        ("confr:4=1,4=2", "the rows must ascend"),
        ("confr:1=2,2=1", "1 follows 2"),
    ],
)
def test_a_bad_policy_is_refused_with_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("'", "['\"]").replace("(", r"\(")):
        parse_policy(text)


def test_a_depth_file_is_one_line_and_comments() -> None:
    assert policy_from_file("# measured at night\n\nconf  # one depth\n") == DepthPolicy(Mode.CONF)
    for text, why in (("", "0 lines"), ("# off\n", "0 lines"), ("off\nconf\n", "2 lines"), ("nonsense", "is no mode")):
        with pytest.raises(ValueError, match=why):
            policy_from_file(text)


def test_a_policy_must_fit_the_number_of_drafts() -> None:
    with pytest.raises(ValueError, match=r"the engine drafts 5 tokens; depth 6 is more"):
        resolve(parse_policy("fixed:6"), 5, None, own_table=False)
    with pytest.raises(ValueError, match=r"5 values, but the engine drafts 5 tokens; expected 6"):
        resolve(parse_policy("conf"), 5, fixed_costs(4), own_table=False)
    with pytest.raises(ValueError, match=r"conf needs VLLM_DSPARK_REMOTE_ROUND_MS"):
        resolve(parse_policy("conf"), 5, None, own_table=False)
    with pytest.raises(ValueError, match=r"measured with the local drafter; use conf or confb"):
        refuse_local_table(parse_policy("confr:1=2"))


def test_depth_d_is_priced_as_round_ms_plus_draft_ms_and_an_own_table_counts_where_it_may() -> None:
    policy = parse_policy("conf:1,1,1")
    of_costs = resolve(policy, 2, Costs((8, 9, 10), 1.5), own_table=False).ms
    of_its_own = resolve(policy, 2, Costs((8, 9, 10), 1.5), own_table=True).ms
    assert (of_costs, of_its_own) == ((9.5, 10.5, 11.5), (2.5, 2.5, 2.5))


# Confidences.


def test_conf_math_the_chance_of_a_prefix_is_the_product_of_its_confidences() -> None:
    assert survival([0.5, 0.5, 0.5]) == [0.5, 0.25, 0.125]
    assert survival([1, 0, 1]) == [1, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, -1.0, -1e-9, 1.0001, np.inf, -np.inf])
def test_conf_math_what_is_no_probability_counts_as_none_and_ends_the_prefix(bad: float) -> None:
    assert survival([0.5, bad, 1.0]) == [0.5, 0, 0]
    for text in ("conf", "confb", "confr:1=8,2=8"):
        assert chosen(text, [[1.0, bad, 1.0]]) == [1], text


@pytest.mark.parametrize("text", ["off", "fixed:2", "conf", "confb", "confr:1=8,64=8"])
@pytest.mark.parametrize("n", [0, 1, 8])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_conf_math_every_policy_answers_any_batch(text: str, n: int, value: float) -> None:
    depths = chosen(text, np.full((n, 4), value))
    assert len(depths) == n
    expected = {"off": 4, "fixed:2": 2}.get(text)
    if expected is not None:
        assert depths == [expected] * n
    elif value == 0:
        assert depths == [0] * n
    elif value == 1:
        assert depths == [4] * n


@pytest.mark.parametrize("text", ["off", "fixed:2", "conf", "confb", "confr:1=8,64=8"])
def test_a_failed_round_verifies_nothing(text: str) -> None:
    assert chosen(text, np.zeros((3, 4)), ok=[False] * 3) == [0, 0, 0]


@pytest.mark.parametrize("text", ["off", "fixed:4", "conf", "confb", "confr:1=8,64=8"])
def test_nothing_past_the_limit_is_verified(text: str) -> None:
    assert chosen(text, np.ones((2, 4)), limit=3) == [3, 3]
    assert chosen(text, np.ones((2, 4)), limit=0) == [0, 0]


def test_conf_takes_the_depth_with_the_most_tokens_per_millisecond() -> None:
    costs = Costs((8, 8.5, 9, 9.5), 2)
    # Tokens 1, 1.9, 2.71, 3.439 by depth; per millisecond .1, .181, .246, .299.
    assert chosen("conf", [[0.9, 0.9, 0.9]], costs=costs) == [3]
    # Tokens 1, 1.9, 1.99, 1.999.
    assert chosen("conf", [[0.9, 0.1, 0.1]], costs=costs) == [1]
    # A dear third draft.
    assert chosen("conf", [[0.9, 0.9, 0.9]], costs=Costs((8, 8.5, 9, 20), 2)) == [2]
    # One depth for all: the certain one carries the doubtful one, but not past what cannot be accepted.
    assert chosen("conf", [[1, 1, 1], [0.5, 0.5, 0]], costs=costs) == [3, 2]


def test_confb_spends_the_budget_of_one_depth_where_it_is_worth_most() -> None:
    costs = Costs((8, 8.5, 20, 21), 2)
    # Depth 1 is what a millisecond buys: two drafts, both of them the certain request's.
    assert chosen("conf", [[1, 1, 1], [0.2, 0.2, 0.2]], costs=costs) == [1, 1]
    assert chosen("confb", [[1, 1, 1], [0.2, 0.2, 0.2]], costs=costs) == [2, 0]


def test_confr_prices_live_rows() -> None:
    certain = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    # Up to four rows cost the same, the fifth doubles it.
    assert chosen("confr:4=8,5=16", certain) == [1, 1]
    assert chosen("confr:1=8,8=8", certain) == [3, 3]
    # Past the table on the line of its last two values: from 2 rows on each costs 4.
    assert chosen("confr:1=4,2=8", certain) == [0, 0]
    assert chosen("confr:1=8,2=30,3=30", [[1, 1, 1]]) == [3]
    # Among equals the earlier position is first.
    assert chosen("confr:4=8,5=16", [[1, 1, 1], [1, 0, 0]]) == [1, 1]


confidences_of = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    elements=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1, width=32)),
)
increments = st.lists(st.floats(0, 3), min_size=3, max_size=3)


def tokens(confidences: Floats, depths: Any) -> float:
    """Expected, counted the long way."""
    total = 0.0
    for row, depth in zip(confidences.astype(np.float64), depths, strict=True):
        total += 1
        for end in range(1, depth + 1):
            total += float(np.prod(row[:end]))
    return total


@given(confidences_of, increments, st.floats(0, 5))
def test_conf_agrees_with_trying_every_depth(confidences: Floats, steps: list[float], draft_ms: float) -> None:
    n, num_drafts = confidences.shape
    ms = np.cumsum([4.0, *steps[:num_drafts]])
    depths = chosen("conf", confidences, costs=Costs(tuple(ms), draft_ms))
    worth = [tokens(confidences, [depth] * n) / (ms[depth] + draft_ms) for depth in range(num_drafts + 1)]
    common = max(depths)
    # What is cut for its own sake had nothing to give.
    assert tokens(confidences, depths) == pytest.approx(tokens(confidences, [common] * n))
    assert tokens(confidences, depths) / (ms[common] + draft_ms) == pytest.approx(max(worth))


@given(confidences_of, increments, st.floats(0, 5))
def test_confb_agrees_with_trying_all_depths_of_all_requests(
    confidences: Floats, steps: list[float], draft_ms: float
) -> None:
    n, num_drafts = confidences.shape
    ms = np.cumsum([4.0, *steps[:num_drafts]])
    depths = chosen("confb", confidences, costs=Costs(tuple(ms), draft_ms))
    best = max(
        tokens(confidences, tried) / (ms[-(-sum(tried) // n)] + draft_ms)
        for tried in itertools.product(range(num_drafts + 1), repeat=n)
    )
    assert tokens(confidences, depths) / (ms[-(-sum(depths) // n)] + draft_ms) == pytest.approx(best)


@given(confidences_of, increments)
def test_confr_agrees_with_trying_all_depths_of_all_requests(confidences: Floats, steps: list[float]) -> None:
    n, num_drafts = confidences.shape
    known = np.array([1, 4, 8, 12])
    ms = np.cumsum([4.0, *steps])
    text = "confr:" + ",".join(f"{rows}={cost!r}" for rows, cost in zip(known.tolist(), ms.tolist(), strict=True))
    depths = chosen(text, confidences)

    def worth(tried: Any) -> float:
        return tokens(confidences, tried) / float(np.interp(n + sum(tried), known, ms))

    best = max(worth(tried) for tried in itertools.product(range(num_drafts + 1), repeat=n))
    assert worth(depths) == pytest.approx(best)


@given(confidences_of, st.sampled_from(["conf", "confb", "confr:1=4,4=6,12=9"]), st.integers(0, 3), st.data())
def test_conf_math_cuts_are_prefixes_within_bounds_and_never_take_what_cannot_be_accepted(
    confidences: Floats, text: str, limit: int, data: st.DataObject
) -> None:
    n, num_drafts = confidences.shape
    ok = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    depths = chosen(text, confidences, limit=min(limit, num_drafts), ok=ok)
    for row, depth, is_ok in zip(confidences.tolist(), depths, ok, strict=True):
        assert 0 <= depth <= min(limit, num_drafts)
        assert is_ok or depth == 0
        assert all(row[:depth])


@given(confidences_of, st.sampled_from([0, 1, 2]), st.floats(0, 1, width=32))
def test_conf_math_a_last_draft_that_is_likelier_is_never_verified_less(
    confidences: Floats, row: int, value: float
) -> None:
    """The last position's confidence belongs to that draft alone: raising it makes every greater depth worth more."""
    row %= len(confidences)
    raised = confidences.copy()
    raised[row, -1] = max(raised[row, -1], np.float32(value))
    for text in ("conf", "confb"):
        assert chosen(text, raised)[row] >= chosen(text, confidences)[row], text


# The policy in force.


def control(policy: str, file: Path | None = None, stats: Stats | None = None) -> DepthControl:
    return DepthControl(parse_policy(policy), num_drafts=3, costs=Costs((8, 9, 10, 11), 1), file=file, stats=stats)


def depths_of(one: DepthControl, confidence: float = 1.0) -> list[int]:
    one.look()
    return one.choose(np.full((2, 3), confidence, dtype=np.float32), np.array([True, False]), 3)


def test_a_depth_file_is_read_again_when_it_changes_and_a_bad_one_keeps_the_last_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file, stats = tmp_path / "depth", Stats()
    one = control("fixed:1", file, stats)

    def write(text: str) -> None:
        # As a careful writer does it: never half a file.
        (tmp_path / "next").write_text(text, encoding="utf-8")
        os.replace(tmp_path / "next", file)

    assert depths_of(one) == [1, 0]
    assert (stats.count("depth_file_changes"), stats.count("depth_file_errors")) == (1, 1)
    write("fixed:2\n")
    assert [depths_of(one), depths_of(one)] == [[2, 0], [2, 0]]
    for bad in ("fixed:4", "confr:1=2", "conf:1,2", "sometimes", "\n", "x" * 70000):
        write(bad)
        assert [depths_of(one), depths_of(one)] == [[2, 0], [2, 0]], bad
    write("conf:1,1,1,1")
    assert depths_of(one, 0.5) == [3, 0]
    file.unlink()
    assert [depths_of(one, 0.5), depths_of(one, 0.5)] == [[3, 0], [3, 0]]
    assert (stats.count("depth_file_changes"), stats.count("depth_file_errors")) == (10, 8)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 8
    assert "the engine drafts 3 tokens" in said[1]
    assert "fixed:2 stays in force" in said[1]
    snapshot = one.snapshot()
    assert snapshot["policy"] == "conf:1,1,1,1"
    assert snapshot["source"] == str(file)
    assert snapshot["ms_by_depth"] == [2, 2, 2, 2]
    assert snapshot["last_file_error"] == "No such file or directory"


def test_the_remote_costs_replace_a_table_of_the_settings() -> None:
    assert control("conf:1,1,1,1").snapshot()["ms_by_depth"] == [9, 10, 11, 12]


def test_the_depths_that_were_chosen_are_counted() -> None:
    one = control("fixed:2")
    depths_of(one)
    depths_of(one)
    assert one.snapshot()["chosen"] == [2, 0, 2, 0]


def test_without_confidences_a_fixed_depth_still_holds() -> None:
    assert control("fixed:2").without_confidences == 2
    assert control("conf").without_confidences == 3


# Positions to ask for.


def n_out(policy: str = "conf", caps: Any = (0, 5, 5, 4, 4), **how: bool) -> NOut:
    known = {"has_file": False, "is_shadow": False, "is_allowed": True} | how
    return plan_n_out(parse_policy(policy), caps=caps, num_drafts=5, **known)


def test_the_schedule_5_5_4_4_asks_for_that_many_positions() -> None:
    for policy in ("conf", "confb", "confr:1=2"):
        plan = n_out(policy)
        assert plan.by_requests == (0, 5, 5, 4, 4)
        assert "schedule's cap" in plan.reason
        assert [plan.of(n, 5) for n in (1, 2, 3, 4, 9)] == [5, 5, 4, 4, 5]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (n_out(is_shadow=True), "shadow compares every position"),
        (n_out(is_allowed=False), "_N_OUT=0"),
        (n_out(has_file=True), "VLLM_DSPARK_DEPTH_FILE may switch"),
        (n_out("off"), "VLLM_DSPARK_DEPTH_POLICY=off reads every position"),
        (n_out("fixed:2"), "VLLM_DSPARK_DEPTH_POLICY=fixed reads every position"),
        (n_out(caps=None), "no dynamic speculation schedule"),
        (n_out(caps=(0, 5, 5, 7)), "caps nothing"),
    ],
)
def test_every_position_is_asked_for_where_one_could_be_read(plan: NOut, reason: str) -> None:
    assert plan.by_requests is None
    assert reason in plan.reason
    assert plan.of(3, 5) == 5


def test_a_resolved_policy_of_no_drafts_at_all() -> None:
    empty = Resolved(parse_policy("conf"), (1.0,))
    assert choose_depths(empty, [[], []], [True, True], 0) == [0, 0]
