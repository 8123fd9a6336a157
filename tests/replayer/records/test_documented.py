"""The code in docs/replayer.md that gives records to other programs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from replayer.records.runs import read_run
from tests.replayer.constructed_runs import make_run, write_run

PAGE = Path(__file__).parents[3] / "docs" / "replayer.md"


def test_the_documented_lines_write_every_record_as_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    write_run(tmp_path / "run.jsonl", make_run(fail_every=7))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    records = read_run(tmp_path / "run.jsonl").records
    assert [row["request_id"] for row in rows] == [record.request_id for record in records]
    assert [row["ttft_s"] for row in rows] == ["" if one.ttft_s is None else str(one.ttft_s) for one in records]
