"""The rotating file of rows: bounds, a full disk, torn lines, and what a new process reads back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from policies.row import RequestOutcome, Row
from proxy.breakdown import Breakdown
from proxy.records.files import RecordFiles, older_file, record_files
from proxy.records.past import past_rows
from tests.proxy.conftest import StartProxy

LINE = b'{"request_id": "%04d", "pad": "' + b"x" * 965 + b'"}'
BODY = {"model": "stub", "prompt": list(range(40)), "max_tokens": 4}


def ids(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_bytes().splitlines()]


def end(breakdown: Breakdown, request_id: str, outcome: RequestOutcome = RequestOutcome.OK) -> None:
    breakdown.close_row(breakdown.open_row(Row(request_id, "/v1/completions", 1.0, outcome=outcome)))


def test_a_full_file_is_rotated_and_the_oldest_removed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    older_file(path, 3).write_text("of a process that kept more files\n")
    older_file(path, 1).touch()
    older_file(path, 2).touch()
    written = RecordFiles(path, max_bytes=10_000, files=3)
    for number in range(45):
        written.write(LINE % number)
        written.flush()
    written.close()
    kept = record_files(path)
    assert kept == [path, older_file(path, 1), older_file(path, 2)]
    assert not older_file(path, 3).exists()
    assert all(file.stat().st_size <= 10_000 for file in kept)
    found = [each for file in reversed(kept) for each in ids(file)]
    assert found == [f"{number:04}" for number in range(45 - len(found), 45)]
    assert 20 <= len(found) <= 30
    assert written.dropped == 0


def test_the_thread_writes_without_a_call(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = RecordFiles(path, 10_000, 2)
    written.open()
    written.write(LINE % 7)
    written.close()
    assert ids(path) == ["0007"]


def test_rows_that_do_not_fit_the_buffer_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = RecordFiles(path, 1_000_000, 2, buffer_bytes=3_500)
    for number in range(10):
        written.write(LINE % number)
    written.close()
    assert ids(path) == ["0000", "0001", "0002"]
    assert written.dropped == 7


def test_a_file_that_another_program_renamed_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    written = RecordFiles(path, 1_000_000, 2)
    written.write(LINE % 1)
    written.flush()
    path.rename(tmp_path / "elsewhere")
    written.write(LINE % 2)
    written.close()
    assert (ids(tmp_path / "elsewhere"), ids(path)) == (["0001"], ["0002"])


def test_a_full_disk_delays_rows_and_leaves_no_part_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    written = RecordFiles(path, 1_000_000, 2, buffer_bytes=4_500)
    written.write(LINE % 0)
    written.flush()
    real = os.write
    room = [1500]

    def write(descriptor: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = real(descriptor, bytes(data)[: room[0]])
        room[0] -= size
        return size

    monkeypatch.setattr("proxy.records.files.os.write", write)
    for number in range(1, 4):
        written.write(LINE % number)
    written.flush()
    assert written.error is not None
    assert "No space left" in written.error
    assert ids(path) == ["0000"]
    for number in range(4, 9):
        written.write(LINE % number)
    assert written.dropped == 4
    room[0] = 1_000_000
    written._retry_s = 0.0
    written.flush()
    assert written.error is None
    assert ids(path) == ["0000", "0001", "0002", "0003", "0004"]
    written.close()


@pytest.mark.parametrize(
    ("tail", "kept"),
    [(b'{"request_id": "torn", "pad', ["0001"]), (b'{"request_id": "whole"}', ["0001", "whole"])],
    ids=["torn", "only the line end missing"],
)
def test_a_line_that_a_crash_left_incomplete_spoils_no_other(tmp_path: Path, tail: bytes, kept: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE % 1 + b"\n" + tail)
    written = RecordFiles(path, 1_000_000, 2)
    written.write(LINE % 2)
    written.close()
    assert ids(path) == [*kept, "0002"]


def test_past_rows_are_bounded_in_number_and_bytes_and_skip_damage(tmp_path: Path) -> None:
    newer, older = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.1"
    older.write_bytes(b"".join(LINE % number + b"\n" for number in range(10)))
    newer.write_bytes(b"".join(LINE % number + b"\n" for number in range(10, 20)) + b'[1]\nnoise\n{"row": 1}\n')
    found = past_rows([newer, older], 15)
    assert [json.loads(row.line)["request_id"] for row in found.rows] == [f"{number:04}" for number in range(5, 20)]
    assert [row.number for row in found.rows] == list(range(1, 16))
    assert [json.loads(row.line)["row"] for row in found.rows] == list(range(1, 16))
    assert found.damaged == 3
    assert [row.number for row in past_rows([newer, older], 100, most_bytes=4_500).rows] == [1, 2, 3, 4]
    assert past_rows([newer], 100, most_s=0.0).rows == []


def test_a_new_process_has_the_rows_of_the_last_one_and_continues_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = Breakdown(5, path, jsonl_max_bytes=65_536, jsonl_files=2, rejected_to_file=True)
    first.open()
    for number in range(8):
        end(first, f"r{number}")
    end(first, "bad", RequestOutcome.REJECTED)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"row": 10, "reque')
    second = Breakdown(5, path, jsonl_max_bytes=65_536, jsonl_files=2)
    second.started_unix_s = first.started_unix_s + 60
    second.open()
    assert (second.number, second.finished, second.outcomes) == (9, 0, {})
    end(second, "new")
    rows = list(second.select(10))
    assert [row["request_id"] for row in rows] == ["r4", "r5", "r6", "r7", "bad", "new"]
    assert [row["row"] for row in rows] == [5, 6, 7, 8, 9, 10]
    assert {row["proxy_started_unix_s"] for row in rows[:-1]} == {first.started_unix_s}
    assert rows[-1]["proxy_started_unix_s"] == second.started_unix_s
    second.close()


async def test_rows_survive_a_restart_of_the_proxy(start_proxy: StartProxy, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    before = Breakdown(10, path)
    end(before, "earlier")
    before.close()
    proxy = await start_proxy(1, breakdown={"jsonl_path": str(path)})
    await proxy.client.post("/v1/completions", json=BODY)
    answer = (await proxy.client.get("/breakdown")).json()
    assert answer["rows"][0]["request_id"] == "earlier"
    assert [row["proxy_started_unix_s"] == answer["proxy_started_unix_s"] for row in answer["rows"]] == [False, True]
    assert (await proxy.settled())["requests"]["finished"] == 1
