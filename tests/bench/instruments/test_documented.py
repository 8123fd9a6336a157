"""Tables of docs/instruments-h100.md, against the records that they come from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import pytest

from tests.bench.instruments.documented import RECORDS, STAGES, Row, about, number, rows_of, sends, shown, table

ONE_RUN = "h100-one-run"


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
    runs = [{row["arm"]: row for row in rows_of(f"{folder}/overhead")} for folder in ("h100", ONE_RUN)]
    arm = ""
    for number_of_row, row in enumerate(table("Overhead", "| arm | start")):
        arm = row[0].strip("`") or arm
        one = runs[number_of_row % 2].pop(arm)
        assert shown(row[1], one["start_s"])
        assert number(row[2]) == one["pool_tokens"]
        assert all(
            shown(cell, median(found["ttft_s"]) * 1e3) for cell, found in zip(row[3:5], one["prefills"], strict=True)
        )
        assert all(shown(cell, found["step_s"] * 1e3) for cell, found in zip(row[5:7], one["decodes"], strict=True))
        if one["hand_offs_s"]:
            assert shown(row[7], one["hand_offs_s"][0] * 1e3)
            assert shown(row[8], median(one["hand_offs_s"][1:]) * 1e3)
    assert not any(runs)


def test_steps_of_the_run_of_everything() -> None:
    lines = (RECORDS / ONE_RUN / "steps.txt").read_text(encoding="utf-8").splitlines()
    begins = [1_070 - int(re.findall(r"\((\d+) s left\)", line)[0]) for line in lines]
    last = json.loads((RECORDS / ONE_RUN / "transfer-tcp-prefills.json").read_text(encoding="utf-8"))
    end = begins[-1] + int(last["finished_unix_s"] - last["started_unix_s"])
    took = [later - begin for begin, later in zip(begins, [*begins[1:], end], strict=True)]
    rows = table("One run of everything", "| step | s |")
    left, right = [number(row[1]) for row in rows], [number(row[3]) for row in rows]
    assert left == [*took[:5], took[5] + took[6]]
    assert right == [*took[7:10], took[10] + took[11], *took[12:]]
    assert end == 1_041


def test_transfers_of_the_run_of_everything() -> None:
    measured = {(row["background"], row["tokens"]): row for row in rows_of(f"{ONE_RUN}/transfer-nvlink")}
    for row in table("One run of everything", "| tokens | idle: D leg"):
        tokens = int(number(row[0]))
        for streams, cells in zip((0, 4, 12), (row[1:4], row[4:7], row[7:10]), strict=True):
            one = measured.pop((streams, tokens))
            for cell, value in zip(
                cells, (one["d_leg_s"] * 1e3, one["stages"]["pieces"], one["stages"]["wire_s"] * 1e3), strict=True
            ):
                assert shown(cell, value), (streams, tokens)
            if not streams:
                assert shown(row[10], one["p_leg_s"] * 1e3)
    assert not measured


def test_pulls_over_tcp() -> None:
    outcomes = {row["pieces"]: row["outcome"] for row in sends("h100/hooks-tcp")}
    for row in table("TCP: pulls that fail", "| tokens | pieces"):
        assert outcomes[int(number(row[1]))].startswith(row[3])


class Pull(NamedTuple):
    """One pull over TCP between engines under load."""

    streams: int
    tokens: int
    pieces: int
    wire_s: float
    size_bytes: int


def pulls(folder: str) -> list[Pull]:
    """Those of a run, the last one among prefills, which is the slowest by the hooks."""
    found = [
        Pull(
            one["background"],
            one["tokens"],
            one["stages"]["pieces"],
            one["stages"]["wire_s"],
            one["stages"]["size_bytes"],
        )
        for one in rows_of(f"{folder}/transfer-tcp-loaded")
    ]
    last = max(sends(f"{folder}/hooks-tcp-prefills"), key=lambda row: row["wire_end_s"] - row["wire_begin_s"])
    return [*found, Pull(4, 2_048, last["pieces"], last["wire_end_s"] - last["wire_begin_s"], last["size_bytes"])]


@pytest.mark.parametrize(("folder", "header"), [("h100-128", "| on each side"), (ONE_RUN, "| less worn, on each side")])
def test_pulls_between_busy_engines_over_tcp(folder: str, header: str) -> None:
    rows = table("TCP between busy engines", header)
    assert [row[0] for row in rows if row[0]] == [
        "nothing",
        "4 decoding streams",
        "12 decoding streams",
        "4 clients with prefills of 16k",
    ]
    for row, pull in zip(rows, pulls(folder), strict=True):
        assert not row[0] or (pull.streams == number(row[0]) if pull.streams else row[0] == "nothing")
        assert (number(row[1]), number(row[3])) == (pull.tokens, pull.pieces)
        assert shown(row[2], pull.size_bytes / 2**20)
        assert shown(row[4], pull.wire_s)
        rate, wait = (row[place].removeprefix("below ").removeprefix("above ") for place in (5, 6))
        assert about(rate, pull.size_bytes / pull.wire_s / 1e6)
        assert about(wait, 1e3 * pull.wire_s / pull.pieces)


def test_between_busy_engines_the_pieces_decide() -> None:
    measured = [pull for folder in ("h100-128", ONE_RUN) for pull in pulls(folder)[:-1]]
    for streams, (shortest, longest) in {4: (8.6, 11.0), 12: (11.6, 24.1)}.items():
        beside = [pull for pull in measured if pull.streams == streams]
        assert len(beside) == 4
        assert max(pull.size_bytes / pull.pieces for pull in beside) > 8 * min(
            pull.size_bytes / pull.pieces for pull in beside
        )
        waits = [1e3 * pull.wire_s / pull.pieces for pull in beside]
        assert (min(waits), max(waits)) == pytest.approx((shortest, longest), abs=0.05)
        by_bytes = [pull.wire_s / pull.size_bytes for pull in beside]
        assert max(by_bytes) / min(by_bytes) > 2 * max(waits) / min(waits)
