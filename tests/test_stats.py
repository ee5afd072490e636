from __future__ import annotations

from farspark.stats import WINDOW, Latency, Stats


def test_percentiles_are_of_the_newest_samples_and_the_maximum_of_all() -> None:
    latency = Latency()
    latency.record(10_000)
    for us in range(WINDOW):
        latency.record(us)
    snapshot = latency.snapshot()
    assert snapshot["count"] == WINDOW + 1
    assert snapshot["max"] == 10_000
    assert snapshot["p50"] == WINDOW // 2
    assert snapshot["p99"] == int(0.99 * WINDOW)


def test_METRICS_without_a_sample_everything_is_zero() -> None:
    assert Latency().snapshot() == {"p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0, "count": 0}


def test_the_snapshot_has_sorted_names_and_is_a_copy() -> None:
    stats = Stats()
    stats.add("rounds_ok", 2)
    stats.add("hellos")
    stats.record_us("rtt_us", 5)
    snapshot = stats.snapshot()
    stats.add("hellos")
    assert list(snapshot["counters"].items()) == [("hellos", 1), ("rounds_ok", 2)]
    assert snapshot["latency"]["rtt_us"]["p50"] == 5
    assert stats.count("hellos") == 2
    assert stats.count("never") == 0
