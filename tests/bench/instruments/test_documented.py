"""Tables of docs/instruments.md about two H100s, against the records that they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
RECORDS = REPOSITORY / "docs" / "results" / "instruments" / "h100"
PAGE = (REPOSITORY / "docs" / "instruments.md").read_text(encoding="utf-8")
STAGES = ("p_queue_s", "p_prefill_s", "d_queue_s", "control_s", "wire_s", "admission_s")


def rows_of(record: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((RECORDS / f"{record}.json").read_text(encoding="utf-8"))["rows"]
    return rows


def table(heading: str, header: str) -> list[list[str]]:
    """Cells of the table below a heading whose header begins with a text."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = section[section.index(header) :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    found = re.match(r"[\d,.]+", cell)
    assert found, cell
    return float(found[0].rstrip(",.").replace(",", ""))


def shown(cell: str, value: float) -> bool:
    """True if a cell shows a value, rounded to the digits that it has."""
    text = cell.split(maxsplit=1)[0]
    digits = len(text.partition(".")[2])
    return abs(number(text) - value) <= 0.5 * 10**-digits + 1e-9


def idle(record: str, tokens: int, pick: Callable[[dict[str, Any]], float]) -> float:
    return median(pick(row) for row in rows_of(record) if row["tokens"] == tokens and not row["background"])


def test_stages_by_size_of_blocks() -> None:
    rows = table("Stages, pieces and the size of blocks", "| tokens | block | pieces")
    assert [row[1] for row in rows] == ["16", "128"] * 5
    tokens = 0
    for row in rows:
        tokens = int(number(row[0])) if row[0] else tokens
        record = "transfer-nvlink" if row[1] == "16" else "transfer-nvlink-blocks"
        assert shown(row[2], idle(record, tokens, lambda one: one["stages"]["pieces"]))
        for cell, stage in zip(row[3:9], STAGES, strict=True):
            in_ms = idle(record, tokens, lambda one, stage=stage: one["stages"][stage] * 1e3)  # type: ignore[misc]
            # Three digits are shown of larger times.
            assert shown(cell, in_ms) or abs(number(cell) / in_ms - 1) < 0.005, (tokens, row[1], stage, in_ms)
        rate = idle(record, tokens, lambda one: one["stages"]["size_bytes"] / one["stages"]["wire_s"] / 1e9)
        assert number(row[9]) == pytest.approx(rate, rel=0.02)
        assert number(row[10]) == pytest.approx(idle(record, tokens, lambda one: one["d_leg_s"] * 1e3), rel=0.01)


def test_interference() -> None:
    for row in table("Interference on H100", "| prefill tokens"):
        for streams, cell in ((1, row[2]), (8, row[3])):
            during = median(
                one["during"]["tpot_s"] * 1e3
                for one in rows_of("interference")
                if one["streams"] == streams and one["prefill_tokens"] == number(row[0])
            )
            assert shown(cell, during)


def test_overhead() -> None:
    measured = {row["arm"]: row for row in rows_of("overhead")}
    for row in table("Overhead", "| arm | start"):
        one = measured.pop(row[0].strip("`"))
        assert shown(row[1], one["start_s"])
        assert number(row[2]) == one["pool_tokens"]
        assert all(
            shown(cell, median(found["ttft_s"]) * 1e3) for cell, found in zip(row[3:5], one["prefills"], strict=True)
        )
        assert all(shown(cell, found["step_s"] * 1e3) for cell, found in zip(row[5:7], one["decodes"], strict=True))
        if one["hand_offs_s"]:
            assert shown(row[7], one["hand_offs_s"][0] * 1e3)
            assert shown(row[8], median(one["hand_offs_s"][1:]) * 1e3)
    assert not measured


def test_pulls_over_tcp() -> None:
    lines = (RECORDS / "hooks-tcp.jsonl").read_text(encoding="utf-8").splitlines()
    sent = [row for row in map(json.loads, lines) if row["kind"] == "send"]
    outcomes = {row["pieces"]: row["outcome"] for row in sent}
    for row in table("TCP: pulls that fail", "| tokens | pieces"):
        assert outcomes[int(number(row[1]))].startswith(row[3])
