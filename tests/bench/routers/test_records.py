"""Records of finished runs: what they keep, when they are refused, and that a partial one does not count."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench.routers.records import (
    EngineCounters,
    RequestFigures,
    RouterRecordError,
    read_records,
    refuse_others,
    totals_of,
    write_record,
)
from tests.bench.routers.constructed import CONDITIONS, replayed, routed


def test_a_record_keeps_every_figure_that_is_compared() -> None:
    record = replayed(3, 2, 4.0, instance="inst-1", prefill_instance="inst-2")
    again = RequestFigures.of(record).record()
    for name in ("ttft_scheduled_s", "e2e_s", "e2e_scheduled_s", "tpot_s"):
        assert getattr(again, name) == pytest.approx(getattr(record, name), abs=1e-4)
    exact = [each for each in record.__struct_fields__ if not each.endswith("_s") and each != "http_status"]
    assert {name: getattr(again, name) for name in exact} == {name: getattr(record, name) for name in exact}


def test_a_request_that_failed_before_it_was_sent_stays_a_failure() -> None:
    gone = replayed(
        1, 1, 1.0, sent_s=None, first_token_s=None, finished_s=None, tpot_s=None, ok=False, error="connect: refused"
    )
    again = RequestFigures.of(gone).record()
    assert (again.ok, again.error, again.e2e_s, again.ttft_s) == (False, "connect: refused", None, None)


def test_a_record_is_read_back_as_it_was_written_and_is_small(tmp_path: Path) -> None:
    record = routed("warm", 0, 1.0)
    path = write_record(record, tmp_path, "tokens-x1-warm-r0")
    assert read_records(tmp_path) == {"tokens-x1-warm-r0": record}
    assert path.stat().st_size < 100 * len(record.requests)


def test_a_run_that_was_interrupted_while_it_was_written_does_not_count(tmp_path: Path) -> None:
    write_record(routed("warm", 0, 1.0), tmp_path, "a")
    (tmp_path / "b.partial").write_bytes((tmp_path / "a.json.gz").read_bytes()[:50])
    assert list(read_records(tmp_path)) == ["a"]


def test_a_broken_record_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(b"no record")
    with pytest.raises(RouterRecordError, match="delete it to repeat it"):
        read_records(tmp_path)


def test_records_of_other_conditions_are_not_continued() -> None:
    records = {"x": routed("warm", 0, 1.0)}
    refuse_others(records, CONDITIONS)
    with pytest.raises(RouterRecordError, match="seed = 0, now 1"):
        refuse_others(records, msgspec.structs.replace(CONDITIONS, seed=1))
    # A comparison of text prompts beside it is another one.
    refuse_others(records, msgspec.structs.replace(CONDITIONS, prompt_mode="text", token_low=0))


def test_a_run_that_was_cut_off_is_not_complete() -> None:
    whole = routed("warm", 0, 1.0)
    cut = msgspec.structs.replace(whole, requests=whole.requests[:5])
    assert not whole.cut
    assert whole.run().end is not None
    assert cut.cut
    assert cut.run().end is None


def test_the_hit_rate_counts_each_request_once_where_the_engines_do() -> None:
    waiting = EngineCounters(prompt_tokens=100, cached_tokens=80, lookup_tokens=3000, hit_tokens=0)
    assert totals_of([waiting]).hit_rate == 0.8
    older = EngineCounters(prompt_tokens=100, lookup_tokens=200, hit_tokens=100)
    assert totals_of([older]).hit_rate == 0.5
    assert older.since(older).cached_tokens is None
    assert totals_of([]).hit_rate == 0.0
