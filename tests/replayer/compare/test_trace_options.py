"""The trace of a run is read again as the run read it: with other options it has other sessions, units and blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from replayer.compare.freshness import stale_reasons
from replayer.records.runs import Run, read_run
from replayer.report.cli import register
from replayer.report.inputs import read_inputs
from replayer.traces.loading import LoadOptions, load
from sim.offline.cli import simulate_command

BLOCK_TOKENS = 512


def app() -> typer.Typer:
    made = typer.Typer()
    register(made)
    made.command("simulate")(simulate_command)
    return made


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app(), [str(each) for each in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def mooncake(path: Path, *, spacing: float = 4000.0) -> Path:
    """Conversations whose turns continue each other, which `load` makes sessions of by default."""
    with path.open("w") as file:
        for index in range(60):
            talk, turn = index % 20, index // 20
            ids = [talk * 100 + block for block in range(2 + 2 * turn)]
            row = {"timestamp": index * spacing, "input_length": len(ids) * BLOCK_TOKENS, "output_length": 20}
            file.write(json.dumps({**row, "hash_ids": ids}) + "\n")
    return path


def simulated(trace: Path, folder: Path, *options: object) -> list[Path]:
    outputs = [folder / "linear.jsonl", folder / "warm.jsonl"]
    for output in outputs:
        call("simulate", trace, "-o", output, "--policy", output.stem, "--instances", 2, *options)
    return outputs


@pytest.mark.parametrize("streamed", [(), ("--stream",)])
def test_runs_with_a_session_for_each_request_are_not_called_warm(tmp_path: Path, streamed: tuple[str, ...]) -> None:
    trace = mooncake(tmp_path / "trace.jsonl")
    runs = simulated(trace, tmp_path, "--sessions", "single", *streamed)
    run = read_run(runs[0])
    assert sum(record.cached_tokens or 0 for record in run.records) > 0
    assert run.header.options["trace_options"] == {"sessions": "single"}
    assert "warm against linear" in call("compare", *runs, "--trace", trace)
    again = read_inputs(runs, trace=trace).trace
    assert again is not None
    assert keys(run) == {(one.session_id, one.turn, one.chat_id) for one in again.requests}


@pytest.mark.usefixtures("undrawn")
def test_the_loader_s_other_options_are_kept_too(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl", spacing=0.1)
    options = ["--time-unit", "ms", "--block-tokens", BLOCK_TOKENS, "--chain", "keep"]
    runs = simulated(trace, tmp_path, *options)
    assert "warm against linear" in call("compare", *runs, "--trace", trace)
    assert "Open the report" in call("report", *runs, "--trace", trace, "-o", tmp_path / "report.html")


def test_a_run_that_does_not_say_how_it_read_its_trace_is_not_held_against_other_sessions(tmp_path: Path) -> None:
    trace = mooncake(tmp_path / "trace.jsonl")
    run = read_run(simulated(trace, tmp_path, "--sessions", "single")[0])
    assert stale_reasons(run, trace=load(trace)) == []
    assert stale_reasons(run, trace=load(trace, LoadOptions(sessions="single"))) == []


def keys(run: Run) -> set[tuple[str, int, int]]:
    return {(record.session_id, record.turn, record.chat_id) for record in run.records}
