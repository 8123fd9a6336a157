"""The meter of one engine: its counters over restarts, its load against the ledger, silent events, lost headers."""

from __future__ import annotations

from proxy.meters.engine import EngineMeter, EngineSums, LoadReading


def test_counters_grow_from_the_first_reading_and_over_a_restart() -> None:
    meter = EngineMeter(60.0)
    assert meter.engine_hits(0.0) is None
    for second, hits in enumerate((1_000.0, 1_500.0, 200.0, 250.0)):
        meter.count({"prefix_query_tokens": 2 * hits, "prefix_hit_tokens": hits}, float(second))
    assert meter.counted == {"prefix_query_tokens": 1_500.0, "prefix_hit_tokens": 750.0}
    assert meter.engine_hits(3.0) == (1_500.0, 750.0)
    assert meter.engine_hits(100.0) == (0.0, 0.0)


def readings(*pairs: tuple[int, int]) -> EngineMeter:
    meter = EngineMeter(60.0)
    meter.readings.extend(LoadReading(*pair) for pair in pairs)
    return meter


def test_ledger_and_engine_must_differ_in_every_reading() -> None:
    assert readings((20, 0), (20, 0)).drift(8, 0.25, 0) is None
    assert readings((20, 0), (20, 12), (20, 0)).drift(8, 0.25, 0) is None
    assert readings((20, 0), (20, 11), (21, 0)).drift(8, 0.25, 0) == LoadReading(21, 0)
    assert readings((0, 30), (1, 10), (0, 9)).drift(8, 0.25, 0) == LoadReading(0, 9)
    assert readings((20, 0), (0, 20), (20, 0)).drift(8, 0.25, 0) is None


def test_the_larger_bound_counts_and_hand_offs_elsewhere_explain_leases() -> None:
    assert readings(*[(100, 80)] * 3).drift(8, 0.25, 0) is None
    assert readings(*[(100, 70)] * 3).drift(8, 0.25, 0) is not None
    assert readings(*[(100, 70)] * 3).drift(8, 0.25, 10) is None


def test_only_requests_sent_after_the_last_batch_count_as_unreported() -> None:
    meter = EngineMeter(60.0)
    meter.saw_batches(3, 10.0)
    meter.computed(9.0, 11.0)
    assert meter.unreported == 0
    meter.computed(10.5, 12.0)
    meter.saw_batches(3, 13.0)
    meter.computed(12.5, 14.0)
    assert (meter.unreported, meter.unreported_since_s) == (2, 12.0)
    meter.saw_batches(4, 15.0)
    assert meter.unreported == 0


def test_a_restart_begins_again_but_keeps_totals() -> None:
    meter = EngineMeter(60.0)
    meter.count({"prefix_hit_tokens": 1.0}, 0.0)
    meter.count({"prefix_hit_tokens": 5.0}, 1.0)
    meter.add(EngineSums(1, 100, 50, 0, 50, 1), 1.0)
    meter.answered(True)
    assert meter.sums(1.0).prediction_error() == 0.5
    meter.restart()
    assert meter.sums(1.0) == EngineSums()
    assert meter.sums(1.0).prediction_error() is None
    assert (meter.counted, meter.echoed) == ({"prefix_hit_tokens": 4.0}, True)


def test_answers_without_the_id_are_counted_since_the_last_one_with_it() -> None:
    meter = EngineMeter(60.0)
    for echoed in (True, False, False):
        meter.answered(echoed)
    assert (meter.echoed, meter.not_echoed) == (True, 2)
    meter.answered(True)
    assert meter.not_echoed == 0
