"""Checks across requests: chained ids, turns against time, deltas."""

from __future__ import annotations

import json
import tracemalloc
from array import array
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayer.traces.formats.checks import Rechainer
from replayer.traces.ideal import cached_tokens
from replayer.traces.loading import LoadOptions, load, stream
from replayer.traces.trace import TraceError, TraceRequest

PROMPTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=12)


def requests_of(prompts: list[list[int]], offset: int = 0) -> list[TraceRequest]:
    return [
        TraceRequest(chat_id=i, input_length=16 * len(ids), hash_ids=array("q", [offset + value for value in ids]))
        for i, ids in enumerate(prompts)
    ]


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(prompts=PROMPTS, offset=st.sampled_from([0, 1 << 30]))
def test_after_rechaining_an_id_has_one_parent_and_prefixes_are_shared_as_before(
    prompts: list[list[int]], offset: int
) -> None:
    requests = requests_of(prompts, offset)
    rechainer = Rechainer()
    for request in requests:
        rechainer.apply(request)
    parents: dict[int, int] = {}
    for request in requests:
        parent = -1
        for block in request.hash_ids:
            assert parents.setdefault(block, parent) == parent
            parent = block
    for i, a in enumerate(requests):
        for j, b in enumerate(requests):
            assert shared(list(a.hash_ids), list(b.hash_ids)) == shared(prompts[i], prompts[j])


@given(prompts=PROMPTS)
def test_bisection_finds_the_longest_seen_prefix_of_chained_ids(prompts: list[list[int]]) -> None:
    requests = requests_of(prompts)
    rechainer = Rechainer()
    for request in requests:
        rechainer.apply(request)
    expected = [
        16 * max((shared(prompt, earlier) for earlier in prompts[:index]), default=0)
        for index, prompt in enumerate(prompts)
    ]
    assert cached_tokens(requests, 16, lambda _index, _request: 0) == expected


def test_chained_ids_are_left_alone() -> None:
    rechainer = Rechainer()
    for request in requests_of([[0, 1, 2], [0, 1, 3], [0, 1, 2, 4]]):
        before = list(request.hash_ids)
        rechainer.apply(request)
        assert list(request.hash_ids) == before
    assert (rechainer.requests, rechainer.ids) == (0, 0)


def test_ids_that_are_far_apart_take_little_memory_and_keep_their_parents_when_there_are_more() -> None:
    """Ids of copies are millions apart: a table of a gibibyte for two requests would take seconds to fill."""
    far = 70_000
    rechainer = Rechainer()
    tracemalloc.start()
    for request in requests_of([[0, far], [100_000_000, 100_000_001]]):
        rechainer.apply(request)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    many, other, again = requests_of([[*range(20_000)], [0, 1, far], [0, far]])
    for request in (many, other, again):
        rechainer.apply(request)
    assert list(many.hash_ids) == [*range(20_000)]
    assert list(other.hash_ids[:2]) == [0, 1]
    assert (rechainer.ids, far in other.hash_ids) == (1, False)
    assert list(again.hash_ids) == [0, far]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def turn(chat_id: int, ids: list[int], **changes: object) -> dict[str, object]:
    base: dict[str, object] = {
        "chat_id": chat_id,
        "timestamp": chat_id,
        "input_length": 64 * len(ids),
        "output_length": 1,
        "hash_ids": ids,
        "session_id": "a",
        "turn": chat_id + 1,
    }
    return base | changes


def test_unchained_ids_are_renumbered_noted_kept_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [turn(0, [1, 2]), turn(1, [1, 3, 2, 4])])
    repaired = load(path)
    assert list(repaired.requests[1].hash_ids[:2]) == [1, 3]
    assert repaired.requests[1].hash_ids[2] != 2
    assert any("different parents" in note for note in repaired.notes)
    assert list(load(path, LoadOptions(chain="keep")).requests[1].hash_ids) == [1, 3, 2, 4]
    with pytest.raises(TraceError, match="--chain repair"):
        load(path, LoadOptions(chain="error"))


def test_a_child_before_its_parent_is_refused(tmp_path: Path) -> None:
    rows = [turn(0, [1], timestamp=5), turn(1, [1, 2], timestamp=3, parent_chat_id=0)]
    with pytest.raises(TraceError, match="before its parent"):
        load(write(tmp_path / "t.jsonl", rows))


def test_files_out_of_order_are_sorted_and_broken_turn_numbers_counted_again(tmp_path: Path) -> None:
    rows = [
        turn(0, [1], timestamp=9, turn=1),
        turn(1, [2], timestamp=4, turn=7, session_id="b"),
        turn(2, [1, 3], turn=1, timestamp=12),
    ]
    trace = load(write(tmp_path / "t.jsonl", rows))
    assert [request.chat_id for request in trace.requests] == [1, 0, 2]
    assert [request.turn for request in trace.requests] == [7, 1, 2]


def test_deltas_are_distinguished_from_cumulative_prompts(tmp_path: Path) -> None:
    deltas = [turn(i, [2 * i, 2 * i + 1]) for i in range(30)]
    path = write(tmp_path / "d.jsonl", deltas)
    with pytest.raises(TraceError, match="deltas"):
        load(path)
    assert any("deltas" in note for note in load(path, LoadOptions(allow_deltas=True)).notes)
    cumulative = [turn(i, list(range(i + 1))) for i in range(30)]
    assert load(write(tmp_path / "c.jsonl", cumulative)).notes == []


@pytest.mark.parametrize("stray_s", [-3.0, 0.0])
@pytest.mark.parametrize("others", [1, 12, 300])
def test_a_time_that_is_no_date_among_dates_is_named(tmp_path: Path, stray_s: float, others: int) -> None:
    # Read as microseconds, as the error advised, 13 requests come in half an hour.
    dated = [turn(i, [i], session_id=i, turn=1, timestamp=1.7e9 + i) for i in range(others)]
    stray = turn(900, [900], session_id=900, turn=1, timestamp=stray_s)
    error = f"request 900 has the time {stray_s:g} s and request {{}} {{}} s, which is a date; correct the one"
    with pytest.raises(TraceError, match=error.format(others - 1, 1700000000 + others - 1)):
        load(write(tmp_path / "t.jsonl", [*dated, stray]))
    with pytest.raises(TraceError, match=error.format(0, 1700000000)):
        list(stream(write(tmp_path / "t.jsonl", [stray, *dated])).requests)


@pytest.mark.parametrize(("scale", "unit"), [(1e3, "ms"), (1e6, "us")])
def test_dates_of_another_unit_are_refused_at_a_plausible_rate_too(
    tmp_path: Path, scale: float, unit: Literal["ms", "us"]
) -> None:
    # 100 requests per second in milliseconds are one in ten seconds, read as seconds.
    rows = [turn(i, [i], session_id=i, turn=1, timestamp=(1.7e9 + i * 0.01) * scale) for i in range(12)]
    path = write(tmp_path / "t.jsonl", rows)
    for reading in (load, lambda path: list(stream(path).requests)):
        with pytest.raises(TraceError, match=f"centuries from now if that is a date; use --time-unit {unit} "):
            reading(path)
    assert load(path, LoadOptions(time_unit=unit)).requests[-1].timestamp_s == pytest.approx(0.11, abs=1e-5)
    assert load(path, LoadOptions(time_unit="s")).requests[-1].timestamp_s == pytest.approx(0.11 * scale)
