"""The commands, as a user types them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from replayer import cli
from replayer.records.runs import read_run
from replayer.replay.plan import PlanOptions, make_plan
from replayer.traces.formats import bailian
from replayer.traces.loading import load
from tests.replayer.conftest import Stub, make_trace

RUNNER = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def app() -> typer.Typer:
    built = typer.Typer()
    cli.register(built)
    return built


def test_every_command_has_help(app: typer.Typer) -> None:
    for command in ("replay", "summary", "compare", "report"):
        result = RUNNER.invoke(app, [command, "--help"])
        assert result.exit_code == 0, result.output
    for command in ("synth", "sample", "repeat"):
        result = RUNNER.invoke(app, ["trace", command, "--help"])
        assert result.exit_code == 0, result.output


def test_synth_sample_summary_work_together(app: typer.Typer, tmp_path: Path) -> None:
    made, picked = tmp_path / "made.jsonl.gz", tmp_path / "picked.jsonl"
    result = RUNNER.invoke(
        app, ["trace", "synth", "-o", str(made), "--requests", "300", "--duration-s", "60", "--length-scale", "0.1"]
    )
    assert result.exit_code == 0, result.output
    assert "Target against generated" in result.output
    result = RUNNER.invoke(app, ["trace", "sample", str(made), "-o", str(picked), "--target-requests", "50"])
    assert result.exit_code == 0, result.output
    assert "shared_apc" in result.output
    assert 40 <= len(picked.read_text().splitlines()) <= 60


@pytest.mark.parametrize("verb", ["sample", "repeat"])
def test_a_trace_is_not_replaced_by_one_made_from_it(app: typer.Typer, tmp_path: Path, verb: str) -> None:
    made, link = tmp_path / "made.jsonl", tmp_path / "link.jsonl"
    bailian.write(made, make_trace().requests)
    link.symlink_to(made)
    before = made.read_bytes()
    for output in (made, link):
        result = RUNNER.invoke(app, ["trace", verb, str(made), "-o", str(output)])
        assert result.exit_code == 2
        assert "is an input and would be overwritten" in result.output
    assert made.read_bytes() == before


@pytest.mark.parametrize("verb", ["synth", "sample", "repeat"])
def test_a_trace_replaces_no_other_file(app: typer.Typer, tmp_path: Path, verb: str) -> None:
    made, other, new = tmp_path / "made.jsonl", tmp_path / "other.jsonl", tmp_path / "new.jsonl"
    bailian.write(made, make_trace().requests)
    other.write_text("of another experiment")
    new.touch()  # as mktemp does
    source = ["--requests", "20"] if verb == "synth" else [str(made)]
    refused = RUNNER.invoke(app, ["trace", verb, *source, "-o", str(other)])
    assert refused.exit_code == 2
    assert refused.output == f"error: {other}: already exists; give another name, or remove it\n"
    assert other.read_text() == "of another experiment"
    for output in (str(new), "/dev/null"):
        written = RUNNER.invoke(app, ["trace", verb, *source, "-o", output])
        assert written.exit_code == 0, written.output
    assert load(new).requests


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "nowhere.jsonl"],
        ["summary", "nowhere.jsonl"],
        ["trace", "sample", "nowhere.jsonl", "-o", "x.jsonl"],
        ["trace", "synth", "-o", "x.jsonl", "--rate-per-s", "1", "--duration-s", "5"],
        ["trace", "synth", "-o", "x.jsonl", "--rate-per-s", "-1"],
    ],
)
def test_mistakes_exit_2_with_one_clear_line(app: typer.Typer, arguments: list[str], tmp_path: Path) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.output.startswith("error: ")
    assert "Traceback" not in result.output


ENDS_IN_S = 50.0
"""Bound on a command, below pytest's on a test: that one ends the whole process, and other tests with it."""


async def command(*arguments: str) -> asyncio.subprocess.Process:
    """Start ``python -m replayer``; its caller waits for it."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "replayer", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"COLUMNS": "200", "PYTHONFAULTHANDLER": "1"},
    )  # fmt: skip


async def finished(process: asyncio.subprocess.Process) -> tuple[str, str]:
    """Output of a command. One that does not end is aborted: the test fails with its errors, and where it stood."""
    output = asyncio.create_task(process.communicate())
    done, _ = await asyncio.wait([output], timeout=ENDS_IN_S)
    if not done:
        process.send_signal(signal.SIGABRT)
    out, err = await output
    assert done, f"no end within {ENDS_IN_S:g} s: {err.decode()}"
    return out.decode(), err.decode()


async def test_the_command_replays_prints_the_load_first_and_the_summary_after(stub: Stub, tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "run.jsonl"
    bailian.write(trace, make_trace(2, 2).requests)
    process = await command(str(trace), "-o", str(output), "--endpoint", stub.url, "--arrival-speed", "1000000")
    text, err = await finished(process)
    assert process.returncode == 0, err
    assert text.index("Offered load") < text.index("4 requests of 4 planned, 4 ok, complete")
    assert read_run(output).end is not None


async def test_a_replay_without_any_success_exits_1(stub: Stub, tmp_path: Path) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "run.jsonl"
    bailian.write(trace, make_trace(2, 2).requests)
    sessions = make_plan(load(trace), PlanOptions()).sessions
    stub.faults = {step.request_id: "busy" for session in sessions for step in session.steps}
    process = await command(str(trace), "-o", str(output), "--endpoint", stub.url, "--arrival-speed", "1000000")
    text, err = await finished(process)
    assert process.returncode == 1, text + err
    assert "error: none of 4 requests succeeded" in err
    assert read_run(output).end is not None  # recorded like any other run


@pytest.mark.parametrize(
    ("stop", "status"), [(signal.SIGINT, cli.EXIT_INTERRUPTED), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
async def test_a_stopped_replay_closes_its_file_and_names_resume_which_continues_it(
    stub: Stub, tmp_path: Path, stop: signal.Signals, status: int
) -> None:
    trace, output = tmp_path / "t.jsonl", tmp_path / "run.jsonl"
    bailian.write(trace, make_trace(3, 2).requests)
    arguments = [str(trace), "-o", str(output), "--endpoint", stub.url, "--arrival-speed", "1000000"]
    arguments += ["--max-inflight-sessions", "1"]
    stub.hold_after = 3
    process = await command(*arguments)
    async with asyncio.timeout(ENDS_IN_S):
        await stub.held.wait()
    process.send_signal(stop)
    _, err = await finished(process)
    assert (process.returncode, err.count("\n")) == (status, 1), err
    assert "--resume" in err
    assert (len(read_run(output).records), read_run(output).end) == (3, None)
    stub.hold_after = None
    process = await command(*arguments, "--resume")
    _, err = await finished(process)
    assert process.returncode == 0, err
    run = read_run(output)
    assert run.end is not None
    assert len(run.records) == 6


def test_summary_prints_json(app: typer.Typer, tmp_path: Path) -> None:
    from replayer.records.runs import RunHeader, encode_line

    path = tmp_path / "run.jsonl"
    path.write_bytes(encode_line(RunHeader(label="x")))
    result = RUNNER.invoke(app, ["summary", str(path), "--json"])
    assert json.loads(result.output)["label"] == "x"


@pytest.mark.parametrize(
    ("name", "reason"), [("none.jsonl", "No such file or directory"), (".", "a folder; give one of its run files")]
)
def test_summary_names_a_run_that_cannot_be_read(app: typer.Typer, tmp_path: Path, name: str, reason: str) -> None:
    result = RUNNER.invoke(app, ["summary", str(tmp_path / name)])
    assert result.exit_code == 2
    assert f"error: {tmp_path / name}: {reason}" in " ".join(result.output.split())


def test_a_key_that_cannot_be_sent_is_blamed_and_not_shown(app: typer.Typer, tmp_path: Path) -> None:
    given = ["replay", "none.jsonl", "--endpoint", "http://127.0.0.1:9", "--output", str(tmp_path / "run")]
    result = RUNNER.invoke(app, given, env={"WARMROUTE_API_KEY": "secret\nx"})
    assert result.exit_code == 2
    assert "--api-key" in result.output
    assert "no header can carry" in result.output
    assert "secret" not in result.output
