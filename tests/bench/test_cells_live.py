"""``bench.cells.live``: the requests of a simulated cell as a trace for real engines."""

from __future__ import annotations

import os
import re
from array import array
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cells.live import app, live_requests
from bench.routers.records import read_records
from bench.tournament.workload import CellWorkload
from replayer.traces.loading import load_trace
from replayer.traces.trace import Trace, TraceRequest

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def request(chat_id: int, at_s: float, output_length: int) -> TraceRequest:
    return TraceRequest(
        chat_id=chat_id,
        session_id=f"s{chat_id}",
        timestamp_s=at_s,
        input_length=100,
        output_length=output_length,
        hash_ids=array("q", [chat_id]),
    )


WORKLOAD = CellWorkload(
    trace=Trace(
        requests=[
            request(0, 0.0, 1),
            request(1, 8.0, 1),
            request(2, 20.0, 50),
            request(3, 26.0, 900),
            request(4, 40.0, 5),
        ],
        block_tokens=100,
        name="cell",
    ),
    judged=frozenset({3, 4}),
    whole=frozenset(),
    warming=2,
    copies=1,
    stretch_s=30.0,
    settle_s=5.0,
    time_scale=1.0,
)


def test_warming_is_faster_and_what_follows_keeps_its_distances() -> None:
    found = live_requests(WORKLOAD, judged_s=60, output_tokens=1000, warming_load=1.0)
    assert [each.timestamp_s for each in found] == [0.0, 4.0, 10.0, 16.0, 30.0]


def test_a_run_ends_after_the_judged_seconds_and_answers_are_cut() -> None:
    found = live_requests(WORKLOAD, judged_s=10, output_tokens=64, warming_load=0.5)
    assert [(each.chat_id, each.timestamp_s, each.output_length) for each in found] == [
        (0, 0.0, 1),
        (1, 8.0, 1),
        (2, 20.0, 50),
        (3, 26.0, 64),
    ]


@pytest.mark.traces
@pytest.mark.parametrize(
    ("results", "load", "fleet", "seed", "judged_s", "judged_from", "warming_load", "output_tokens"),
    [
        ("hand-offs-h100-4x", "0.8", 4, 1, 150, "78.3", "0.5", "4096"),
        ("hand-offs-h100-4x-second", "0.8", 4, 2, 225, "90.1", "0.5", "4096"),
        ("hand-offs-h100-4x-third", "0.8", 4, 2, 110, "90.1", "0.5", "4096"),
        ("hand-offs-h100-4x-fourth", "0.8", 4, 2, 225, "90.1", "0.5", "4096"),
        ("hand-offs-h200-mps", "0.8", 4, 4, 180, "116.0", "1", "2048"),
        ("hand-offs-h200-2x-mps", "0.9", 8, 4, 150, "132.8", "1", "2048"),
    ],
)
def test_the_commands_of_the_page_write_the_traces_of_its_records(
    results: str,
    load: str,
    fleet: int,
    seed: int,
    judged_s: int,
    judged_from: str,
    warming_load: str,
    output_tokens: str,
    tmp_path: Path,
) -> None:
    folder = Path(os.environ.get("WARMROUTE_TRACES") or Path(__file__).parents[3] / "shared" / "traces")
    if not folder.is_dir():
        pytest.skip(f"public traces not found at {folder}; set WARMROUTE_TRACES")
    output = tmp_path / "cell.jsonl"
    cell = ["--trace", "kct_raw", "--load", load, "--pool", "4", "--fleet", str(fleet), "--seed", str(seed)]
    cut = ["--warming-load", warming_load, "--output-tokens", output_tokens, "--judged-s", str(judged_s)]
    engines = RESULTS / re.sub("third|fourth", "second", results) / "engines.yaml"
    profile = ["--profile", str(engines)]
    done = CliRunner().invoke(app, [str(folder), str(output), *cell, *profile, *cut])
    assert done.exit_code == 0, done.output
    assert f"judged from {judged_from} s on" in done.output
    sent = {(each.session_id, each.turn): each.input_length for each in load_trace(output).requests}
    for run in read_records(RESULTS / results).values():
        records = [each.record() for each in run.requests]
        assert {(each.session_id, each.turn): each.input_length for each in records} == sent


def test_an_unknown_profile_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(tmp_path), str(tmp_path / "cell.jsonl"), "--profile", "nope"])
    assert done.exit_code == 2
    assert "nope" in done.output
