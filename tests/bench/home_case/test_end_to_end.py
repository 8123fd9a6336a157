"""A started fleet of two simulated engines: its run, the files, the table, and runs that are refused or cut."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from typer.testing import CliRunner, Result

from bench.home_case.__main__ import app
from bench.home_case.fleet import running_fleet
from bench.home_case.idle import until_idle
from bench.home_case.pages import ProxyPages
from bench.home_case.record import BREAKDOWN, NAMES, RUN, SUSTAINED, read_files
from launch.__main__ import app as launch_app
from tests.bench.routers.test_end_to_end import trace
from tests.launch.conftest import REPOSITORY, fleet_values

pytestmark = pytest.mark.fleet


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run directory of a detached fleet whose engines run 20 times faster than real time."""
    folder = tmp_path_factory.mktemp("fleet")
    fleet, run_dir = folder / "two.yaml", folder / "run"
    fleet.write_text(yaml.safe_dump(fleet_values(role="kv_both", sim={"time_scale": 20.0})))
    command = [sys.executable, "-m", "launch", "up", str(fleet), "--run-dir", str(run_dir), "--detach"]
    try:
        started = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
        assert started.returncode == 0, started.stdout + started.stderr
        yield run_dir
    finally:
        CliRunner().invoke(launch_app, ["down", "--run-dir", str(run_dir)])


@pytest.fixture
def command(run_dir: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run of twelve requests; the files go to ``out``."""
    arguments = ["run", str(trace(tmp_path / "t.jsonl")), "--run-dir", str(run_dir), "-o", str(tmp_path / "out")]
    return [*arguments, "--engine-speed", "20", "--hardware", "simulated"]


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_becomes_files_and_a_table(command: list[str], run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == sorted([BREAKDOWN, RUN, SUSTAINED]), "no GPU, nothing partial"

    record, run, rows, telemetry = read_files(out)
    assert [each.ok for each in run.records] == [True] * 12
    assert {row["request_id"] for row in rows} == {each.request_id for each in run.records}
    assert (record.cut, record.leaks, record.problems, telemetry) == (False, [], [], None)
    assert [(each.name, each.role) for each in record.engines] == [("inst-0", "kv_both"), ("inst-1", "kv_both")]
    assert sum(each.counters.prompt_tokens for each in record.engines) == sum(
        each.prompt_tokens or 0 for each in run.records
    )
    assert record.proxy.counters['warmroute_requests_total{instance="inst-0",outcome="ok"}'] > 0
    assert record.proxy.policy["name"] == running_fleet(run_dir).settings.get("policy", {}).get("name", "warm")
    first, last = record.proxy.samples[0], record.proxy.samples[-1]
    assert first.rss_bytes > 10 * 2**20
    assert (last.held, last.queued, last.in_flight) == (0, 0, 0)

    table = invoke("table", str(out))
    assert table.exit_code == 0, table.output
    assert "12 requests of 4 sessions" in table.output
    assert "| all | 12/12 |" in table.output
    assert "| leaks | none |" in table.output


def test_a_second_run_replaces_the_files_and_counts_its_own_rows_only(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert invoke(*command).exit_code == 0
    assert invoke(*command, "--request-limit", "5").exit_code == 0
    record, run, rows, _ = read_files(out)
    assert len(run.records) == len(rows) == 5
    assert sum(each.counters.prompt_tokens for each in record.engines) == sum(
        each.prompt_tokens or 0 for each in run.records
    )


def test_a_run_past_its_limit_keeps_what_has_ended(command: list[str], tmp_path: Path) -> None:
    done = invoke(*command, "--limit-s", "1", "--think-speed", "0.02", "--idle-gap-cap-s", "1000")
    assert done.exit_code == 0, done.output
    record, run, _, _ = read_files(tmp_path / "out")
    assert record.cut
    assert 0 < len(run.records) < 12
    assert not record.leaks
    assert "cut off by the limit" in invoke("table", str(tmp_path / "out")).output


def test_requests_that_are_left_are_named_where_they_are(run_dir: Path) -> None:
    fleet = running_fleet(run_dir)
    body = {"model": "warm-sim", "prompt": list(range(2000)), "max_tokens": 20_000, "ignore_eos": True, "stream": True}

    async def left_and_then() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            pages = ProxyPages(fleet.admin_url, http)
            async with http.stream("POST", f"{fleet.url}/v1/completions", json=body) as answer:
                pieces = answer.aiter_bytes()  # kept: the answer is closed with it
                await anext(pieces)
                left = await until_idle(pages, fleet.engines, "warm-sim", http, limit_s=0.0)
            return left.leaks, (await until_idle(pages, fleet.engines, "warm-sim", http)).leaks

    leaks, afterwards = asyncio.run(left_and_then())
    assert "proxy: warmroute_in_flight is 1" in leaks
    served = next(each for each in leaks if "running requests is 1" in each).split(":")[0]
    assert any(each.startswith(f"{served}: share of KV blocks in use is 0.0") for each in leaks)
    assert afterwards == []


def test_an_interrupted_run_writes_nothing(command: list[str], tmp_path: Path) -> None:
    slow = [sys.executable, "-u", "-m", "bench.home_case", *command, "--arrival-speed", "0.01"]
    with subprocess.Popen(slow, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        assert "12 requests" in process.stdout.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert "interrupted; nothing was written" in process.communicate(timeout=30)[0]
    assert process.returncode == 128 + signal.SIGTERM
    assert not any((tmp_path / "out" / name).exists() for name in NAMES)
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_without_a_fleet_is_refused(tmp_path: Path) -> None:
    done = invoke("run", str(trace(tmp_path / "t.jsonl")), "--run-dir", str(tmp_path), "-o", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "warmroute up" in done.output


def test_an_output_that_cannot_be_written_is_refused_before_the_run(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = invoke(*command)
    assert done.exit_code == 2
    assert "requests of" not in done.output
