"""Tables of docs/instruments.md about two H100s, against the records that they come from."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest

from tests.bench.instruments.documented import STAGES, Row, about, number, rows_of, sends, shown, table


def idle(record: str, tokens: int, pick: Callable[[Row], float]) -> float:
    return median(pick(row) for row in rows_of(f"h100/{record}") if row["tokens"] == tokens and not row["background"])


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
            assert about(cell, in_ms), (tokens, row[1], stage, in_ms)
        rate = idle(record, tokens, lambda one: one["stages"]["size_bytes"] / one["stages"]["wire_s"] / 1e9)
        assert number(row[9]) == pytest.approx(rate, rel=0.02)
        assert number(row[10]) == pytest.approx(idle(record, tokens, lambda one: one["d_leg_s"] * 1e3), rel=0.01)


def test_interference() -> None:
    for row in table("Interference on H100", "| prefill tokens"):
        for streams, cell in ((1, row[2]), (8, row[3])):
            during = median(
                one["during"]["tpot_s"] * 1e3
                for one in rows_of("h100/interference")
                if one["streams"] == streams and one["prefill_tokens"] == number(row[0])
            )
            assert shown(cell, during)


def test_overhead() -> None:
    measured = {row["arm"]: row for row in rows_of("h100/overhead")}
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
    outcomes = {row["pieces"]: row["outcome"] for row in sends("h100/hooks-tcp")}
    for row in table("TCP: pulls that fail", "| tokens | pieces"):
        assert outcomes[int(number(row[1]))].startswith(row[3])


def test_pulls_between_busy_engines_over_tcp() -> None:
    [measured_last] = [
        row for row in sends("h100-128/hooks-tcp-prefills") if row["wire_end_s"] - row["wire_begin_s"] > 1
    ]
    wires = [
        (
            one["background"],
            one["tokens"],
            one["stages"]["pieces"],
            one["stages"]["wire_s"],
            one["stages"]["size_bytes"],
        )
        for one in rows_of("h100-128/transfer-tcp-loaded")
    ]
    last_s = measured_last["wire_end_s"] - measured_last["wire_begin_s"]
    wires.append((4, 2_048, measured_last["pieces"], last_s, measured_last["size_bytes"]))
    rows = table("TCP between busy engines", "| on each side")
    assert [row[0] for row in rows if row[0]] == [
        "nothing",
        "4 decoding streams",
        "12 decoding streams",
        "4 clients with prefills of 16k",
    ]
    for row, (streams, tokens, pieces, wire_s, size_bytes) in zip(rows, wires, strict=True):
        assert not row[0] or (streams == number(row[0]) if streams else row[0] == "nothing")
        assert (number(row[1]), number(row[3])) == (tokens, pieces)
        assert shown(row[2], size_bytes / 2**20)
        assert shown(row[4], wire_s)
        assert shown(row[5], size_bytes / wire_s / 1e6)
        assert shown(row[6], 1e3 * wire_s * 65_536 / size_bytes)
