"""The router's predictions of first tokens, made again from records."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bench.fidelity.first_tokens import FirstToken, errors, first_tokens, learned, table


def request(arrived_s: float, took_s: float, new_tokens: int = 200, expected_s: float = 0.1) -> FirstToken:
    return FirstToken(arrived_s, took_s, expected_s, new_tokens, warm=new_tokens < 5_000)


def test_a_prediction_knows_only_the_first_tokens_that_came_before_it() -> None:
    requests = [request(0.0, 0.2), request(0.1, 0.2), request(0.25, 0.2), request(1.0, 0.2)]
    predicted = learned(requests)
    assert predicted[:2] == [0.1, 0.1]
    assert 0.1 < predicted[2] < predicted[3] < 0.2


def test_long_prefills_are_predicted_as_they_were() -> None:
    requests = [request(float(second), 0.5, new_tokens=1_024) for second in range(5)]
    assert learned(requests) == [0.1] * 5


def test_factors_are_above_one_whichever_is_longer_and_count_warm_requests_only() -> None:
    requests = [request(0.0, 0.2), request(0.0, 0.05), request(0.0, 0.2), request(0.0, 9.0, new_tokens=20_000)]
    found = errors(requests, [each.expected_s for each in requests])
    assert found.requests == 3
    assert found.half == pytest.approx(2.0)
    assert found.ratio == pytest.approx(2.0)


def test_rows_without_a_first_token_are_left_out(tmp_path: Path) -> None:
    row = {"arrived_unix_s": 5.0, "class": "WARM", "prompt_tokens": 900, "actual_cached_tokens": 800, "row": 1}
    times = {"predicted_s": 0.1, "actual_s": 0.3}
    rows = [
        row | {"legs": {"first_token": times}},
        row | {"legs": {"prefill": times, "transfer": times}},
        row | {"legs": {}, "class": None, "prompt_tokens": None, "actual_cached_tokens": None},
        row | {"legs": {"first_token": times}, "arrived_unix_s": 4.0, "class": "HEAVY", "actual_cached_tokens": None},
    ]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in rows).encode()))
    assert first_tokens(path) == [
        FirstToken(4.0, 0.3, 0.1, 900, warm=False),
        FirstToken(5.0, 0.3, 0.1, 100, warm=True),
    ]


def test_the_table_counts_the_recordings_that_got_closer() -> None:
    slow = [request(float(second), 0.2) for second in range(20)]
    exact = [request(float(second), 0.1) for second in range(20)]
    lines = table({"slow": slow, "exact": exact}).splitlines()
    assert lines[2].startswith("| slow | 20 | x 2.00 / 1.")
    assert lines[3] == "| exact | 20 | x 1.00 / 1.00 | x 1.00 / 1.00 | 1.00 / 1.00 |"
    assert lines[4].startswith("| median; closer in 1 of 2 | 20 |")
