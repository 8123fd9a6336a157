"""Tables of docs/instruments.md about four H200s, against the records that they come from."""

from __future__ import annotations

import re
from collections.abc import Callable
from statistics import median

import pytest

from tests.bench.instruments.documented import PAGE, STAGES, Row, about, number, rows_of, sends, shown, table

FOLDER = "h200-128"
INTERFERENCE = "Interference on H200"
NVLINK = "Transfers over NVLink"
TCP = "Transfers over TCP"


def typical(record: str, pick: Callable[[Row], float], **only: float) -> float:
    """Median over the rows of a record that have these values."""
    return median(pick(row) for row in rows_of(record) if only.items() <= row.items())


def transfer_s(row: Row) -> float:
    return max(0.0, float(row["d_leg_s"]) - float(row["cached_leg_s"]))


def gb_per_s(row: Row) -> float:
    together_s = float(row["together_s"]) - float(row["cached_leg_s"])
    return float(row["concurrent"]) * float(row["size_bytes"]) / together_s / 1e9


def wire_gb_per_s(row: Row) -> float:
    return float(row["stages"]["size_bytes"]) / float(row["stages"]["wire_s"]) / 1e9


def penalty(row: Row) -> float:
    return float(row["during"]["tpot_s"]) / float(row["before"]["tpot_s"])


def test_interference() -> None:
    record = f"{FOLDER}/interference"
    rows = table(INTERFERENCE, "| prefill tokens")
    assert len(rows) == 4
    for row in rows:
        tokens = int(number(row[0]))
        assert about(row[1], typical(record, lambda one: one["ttft_s"], streams=1, prefill_tokens=tokens))
        for streams, cell in zip((1, 4, 8, 16), row[2:6], strict=True):
            only = {"streams": streams, "prefill_tokens": tokens}
            assert shown(cell, typical(record, lambda one: one["during"]["tpot_s"] * 1e3, **only))
            found = re.search(r"\((.+)x\)", cell)
            assert found, cell
            assert shown(found[1], typical(record, penalty, **only))
        only = {"streams": 8, "prefill_tokens": tokens}
        assert about(
            row[6], typical(record, lambda one: one["streams"] * one["ttft_s"] * (1 - 1 / penalty(one)), **only)
        )


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (f"{FOLDER}/interference", "1 stream: {} before | 4: {} | 8: {} | 16: {} | lost"),
        ("interference", "TPOT before was {}, {}, {} and {} ms with 1, 4, 8 and 16 streams"),
    ],
    ids=["128", "16"],
)
def test_decode_speed_by_size_of_blocks(record: str, text: str) -> None:
    before = [typical(record, lambda one: one["before"]["tpot_s"] * 1e3, streams=count) for count in (1, 4, 8, 16)]
    assert text.format(*(f"{each:.1f}" for each in before)) in PAGE


def test_bandwidth_over_nvlink() -> None:
    rows = table(NVLINK, "| tokens | GiB")
    assert len(rows) == 5
    for row in rows:
        tokens = int(number(row[0]))
        record = f"{FOLDER}/transfer-nvlink"
        cells = [(record, load, cell) for load, cell in zip((0, 4, 12), row[2:5], strict=True)]
        for name, load, cell in [*cells, ("transfer-nvlink", 0, row[6])]:
            only = {"tokens": tokens, "background": load}
            assert shown(cell, typical(name, gb_per_s, **only))
            assert shown(cell.split("(")[1].rstrip(")"), typical(name, lambda one: transfer_s(one) * 1e3, **only))
        assert shown(row[5], typical(record, lambda one: one["p_leg_s"] * 1e3, tokens=tokens, background=0))


def test_stages_over_nvlink() -> None:
    rows = table(NVLINK, "| tokens | streams a side")
    assert [row[1] for row in rows] == ["0", "4", "12"] * 3
    record = f"{FOLDER}/transfer-nvlink"
    tokens = 0
    for row in rows:
        tokens = int(number(row[0])) if row[0] else tokens
        only = {"tokens": tokens, "background": int(row[1])}
        assert shown(row[2], typical(record, lambda one: one["stages"]["pieces"], **only))
        for cell, stage in zip(row[3:9], STAGES, strict=True):
            in_ms = typical(record, lambda one, stage=stage: one["stages"][stage] * 1e3, **only)  # type: ignore[misc]
            assert about(cell, in_ms), (tokens, row[1], stage, in_ms)
        assert shown(row[9], typical(record, wire_gb_per_s, **only))
        assert shown(row[10], typical(record, lambda one: one["d_leg_s"] * 1e3, **only))


def test_pulls_between_idle_engines_over_tcp() -> None:
    rows = table(TCP, "| tokens | pieces")
    assert len(rows) == 5
    record = f"{FOLDER}/transfer-tcp"
    for row in rows:
        tokens = int(number(row[0]))
        assert shown(row[1], typical(record, lambda one: one["stages"]["pieces"], tokens=tokens))
        assert shown(row[2], typical(record, gb_per_s, tokens=tokens))
        assert shown(row[3], typical(record, lambda one: one["stages"]["wire_s"], tokens=tokens))
        assert shown(row[4], typical(record, lambda one: one["d_leg_s"], tokens=tokens))
        assert shown(row[5], typical(record, lambda one: one["p_leg_s"], tokens=tokens))


@pytest.mark.parametrize(
    ("record", "heading", "rates"),
    [("transfer-nvlink-shared", NVLINK, "48, 38, 44 and 66"), ("transfer-tcp-shared", TCP, "1.6, 1.7, 1.8 and 1.9")],
)
def test_several_at_once(record: str, heading: str, rates: str) -> None:
    assert f"share {rates} GB/s" in " ".join(PAGE.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0].split())
    for at_once, rate in zip((1, 2, 4, 8), re.findall(r"[\d.]+", rates), strict=True):
        assert shown(rate, typical(f"{FOLDER}/{record}", gb_per_s, concurrent=at_once))


def test_pulls_between_busy_engines_over_tcp() -> None:
    rows = table(TCP, "| on each side")
    assert [row[0] for row in rows if row[0]] == [
        "nothing",
        "4 clients with prefills of 16k",
        "nothing",
        "4 decoding streams",
    ]
    recorded = [one["stages"] for one in rows_of(f"{FOLDER}/transfer-tcp-prefills")]
    measured = {one["pieces"]: (one["wire_s"], one["size_bytes"], "done") for one in recorded}
    for one in sends(f"{FOLDER}/hooks-tcp"):
        measured[one["pieces"]] = (one["wire_end_s"] - one["wire_begin_s"], one["size_bytes"], one["outcome"])
    for row in rows:
        wire_s, size_bytes, outcome = measured.pop(int(number(row[2])))
        assert shown(row[3], wire_s)
        assert outcome.startswith(re.split(r"[,; ]", row[5])[0])
        if row[4] != "–":
            assert about(row[4].removeprefix("below "), size_bytes / wire_s / 1e6)
    assert not measured
