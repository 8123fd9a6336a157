"""The data-plane benchmark from end to end, at tiny counts: the proxy is real, peers are not needed."""

from __future__ import annotations

import pstats
import subprocess
import sys
from io import StringIO
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from bench.data_plane import launches, stacks
from bench.data_plane.launches import Launch, NotInstalledError, StackError
from bench.data_plane.load.client import LoadTarget
from bench.data_plane.measure import DataPlaneRecord, memory_after, orders, run
from bench.data_plane.quantities import Scale, measurements
from bench.data_plane.report.table import show
from bench.data_plane.report.watching import watching

pytestmark = pytest.mark.first

TINY = Scale(
    requests={"2k": 20, "130k": 10, "350k": 4, "ids": 4, "sessions": 12},
    pairs=5,
    window_s=0.2,
    saturation_s=0.2,
    many=24,
    many_requests=24,
    aborts=4,
    idle_s=0.1,
    warmup=2,
    streams={"event_1ms": 2, "event": 8, "event_many": 16},
    concurrency=2,
    saturation_concurrency=4,
)


@pytest.mark.fleet
@pytest.mark.timeout(300)
def test_a_run_measures_everything_and_leaves_nothing_behind(tmp_path: Path) -> None:
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    said: list[str] = []
    profile = tmp_path / "warmroute.prof"
    record = run(["direct", "warmroute"], TINY, 1, 3, ["2k", "130k"], profile=profile, progress=said.append)
    assert {child.pid for child in mine.children(recursive=True)} <= before

    assert [sample.errors for sample in record.samples if sample.errors] == []
    [order] = orders(3, 1, measurements(TINY, ["2k", "130k"]), ["direct", "warmroute"])
    assert [(each.measurement, each.stack) for each in record.samples] == [(each.name, stack) for each, stack in order]
    ours = [sample.measurement for sample in record.samples if sample.stack == "warmroute"]
    assert sorted(ours) == sorted(each.name for each in measurements(TINY, ["2k", "130k"]))
    direct = {sample.measurement for sample in record.samples if sample.stack == "direct"}
    assert direct == {name for name in ours if not name.startswith("ttft_")}
    assert len([line for line in said if line.startswith("round 1/1")]) == len(record.samples)
    found = {quantity for sample in record.samples if sample.stack == "warmroute" for quantity in sample.values}
    assert {"cpu_ms_2k", "added_p50_ms_130k", "cpu_us_event", "many_errors", "abort_stream_p99_ms"} <= found
    assert all(sample.values["many_errors"] == 0 for sample in record.samples if sample.measurement == "many")

    again = msgspec.json.decode(msgspec.json.encode(record), type=DataPlaneRecord)
    out = StringIO()
    show(again, Console(file=out, width=160))
    assert "CPU ms per request, 130 KB text" in out.getvalue()
    functions = pstats.Stats(str(profile)).stats  # type: ignore[attr-defined]
    assert any("proxy" in file for file, _, _ in functions)


@pytest.mark.fleet
@pytest.mark.xdist_group("fleet")
@pytest.mark.timeout(300)
def test_fresh_rounds_have_processes_of_their_own_and_show_the_cost_of_watching() -> None:
    mine = psutil.Process()
    before = {child.pid for child in mine.children(recursive=True)}
    said: list[str] = []
    names = ["warmroute-unobserved", "warmroute-traced"]
    record = run(names, TINY, 2, 3, ["2k"], only_measurements=["cpu_2k"], fresh=True, progress=said.append)
    assert {child.pid for child in mine.children(recursive=True)} <= before
    assert [line.split()[0] for line in said if " serves: " in line] == names * 2
    assert [sample.errors for sample in record.samples if sample.errors] == []
    assert sorted((sample.round, sample.stack) for sample in record.samples) == sorted(
        (number, name) for number in range(2) for name in names
    )
    assert any(line.startswith("warmroute_traces_total") for line in record.evidence["warmroute-traced"])
    table = watching(record)
    assert table is not None
    assert [column.header for column in table.columns] == ["quantity", "warmroute-traced"]


def test_every_round_has_an_order_of_its_own() -> None:
    chosen = measurements(TINY, ["2k", "130k"])
    stacks = ["direct", "warmroute", "nginx"]
    rounds = [[(each.name, stack) for each, stack in order] for order in orders(3, 3, chosen, stacks)]
    pairs = [(each.name, stack) for each in chosen for stack in stacks if stack != "direct" or each.direct]
    assert [sorted(order) for order in rounds] == [sorted(pairs)] * 3
    assert len({tuple(order) for order in rounds}) == 3
    measured = [[name for name, stack in order if stack == "nginx"] for order in rounds]
    assert len({tuple(names) for names in measured}) == 3
    assert len({tuple(stack for name, stack in order if name == "cpu_2k") for order in rounds}) > 1
    [again] = orders(3, 1, chosen, stacks)
    assert [(each.name, stack) for each, stack in again] == rounds[0]


def test_a_peer_that_is_not_installed_is_left_out_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "PEERS_BIN", tmp_path)
    monkeypatch.setattr("bench.data_plane.launches.shutil.which", lambda *arguments, **keywords: None)
    engines = [LoadTarget("127.0.0.1", 9)]
    for name, remedy in (
        ("vllm-router-rr", "python -m bench.data_plane.peers"),
        ("vllm-router-ca", "python -m bench.data_plane.peers"),
        ("sglang-ca", "python -m bench.data_plane.peers"),
        ("nginx", "apt-get install nginx-light"),
    ):
        with pytest.raises(NotInstalledError, match=remedy):
            stacks.start(name, engines, tmp_path)
    record = run(["direct", "nginx"], TINY, 1, 3, ["2k"], only_measurements=["cpu_2k"])
    assert list(record.stacks) == ["direct"]
    assert "apt-get" in record.left_out["nginx"]


@pytest.mark.fleet
def test_memory_is_measured_on_a_fresh_stack() -> None:
    (sample,) = memory_after(["direct", "warmroute"], 20, 1)
    assert sample.stack == "warmroute"
    assert sample.errors == {}
    assert sample.values["rss_mb"] >= sample.values["rss_start_mb"] > 10


@pytest.mark.fleet
def test_a_stack_that_ends_says_what_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["/bin/sh", "-c", "echo out of luck >&2; exit 3"]
    monkeypatch.setitem(launches.LAUNCHES, "nginx", lambda *given: Launch(command=command, note=""))
    with pytest.raises(StackError, match=r"(?s)it exited with 3.*out of luck"):
        stacks.start("nginx", [LoadTarget("127.0.0.1", 9)], tmp_path)


@pytest.mark.fleet
def test_a_terminated_run_stops_what_it_started() -> None:
    command = [sys.executable, "-m", "bench.data_plane", "--quick", "--only", "direct,warmroute"]
    run = subprocess.Popen([*command, "--rounds", "1000"], stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        while not (line := run.stdout.readline()).startswith("round 1/1000"):
            assert line, "the run ended by itself"
        started = psutil.Process(run.pid).children(recursive=True)
        assert len(started) == 3  # engine stub, load generator, proxy
        run.terminate()
        assert run.wait(30) == 143
    finally:
        run.kill()
        run.wait()
        if run.stdout is not None:
            run.stdout.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []
