"""The report command from end to end: an experiment's directory, run files with their trace, a simulated run."""

from __future__ import annotations

import html
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from policies.registry import make_routing
from replayer.compare.arms import ArmRun, ArmRuns
from replayer.records.runs import RequestRecord, Run, RunEnd, RunHeader
from replayer.report.anatomy import TracePaths, anatomy
from replayer.report.cli import register
from replayer.report.inputs import arm_of
from replayer.traces.formats import bailian
from replayer.traces.ideal import cached_tokens
from replayer.traces.loading import load
from replayer.traces.synth import SynthOptions, synthesise
from replayer.traces.trace import Trace
from sim.offline.simulate import SimOptions, simulate
from tests.replayer.constructed_runs import make_run, write_run

Store = Callable[[Run], Path]
INSTANCES = 3


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    application = typer.Typer()
    register(application)
    return application


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trace]:
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    bailian.write(path, synthesise(SynthOptions(requests=120, seed=3, length_scale=0.2)))
    return path, load(path)


def replayed(trace: Trace, label: str, *, scattered: bool, repeat: int = 1) -> Run:
    """Runs as engines that never evict would report them: sessions kept together, or requests scattered."""
    homes: dict[str, int] = {}

    def place(number: int, session: str) -> int:
        return number % INSTANCES if scattered else homes.setdefault(session, len(homes) % INSTANCES)

    places = [place(number, request.session_id) for number, request in enumerate(trace.requests)]
    cached = cached_tokens(trace.requests, trace.block_tokens, lambda number, _request: places[number])
    records = []
    for number, request in enumerate(trace.requests):
        ttft = 0.05 + (request.input_length - cached[number]) * 1e-4 * (1 + 0.01 * repeat)
        sent = request.timestamp_s
        records.append(
            RequestRecord(
                request_id=f"{label}-{repeat}-{number}",
                session_id=request.session_id,
                turn=request.turn,
                chat_id=request.chat_id,
                trace_timestamp_s=sent,
                scheduled_s=sent,
                sent_s=sent,
                first_token_s=sent + ttft,
                finished_s=sent + ttft + 1,
                ttft_s=ttft,
                tpot_s=0.01,
                e2e_s=ttft + 1,
                input_length=request.input_length,
                output_length=101,
                prompt_tokens=request.input_length,
                completion_tokens=101,
                cached_tokens=cached[number],
                ok=True,
                instance=f"inst-{places[number]}",
                reason="next_in_turn" if scattered else "session_pinned",
                predicted_cached_tokens=cached[number],
            )
        )
    header = RunHeader(label=label, trace=trace.name, trace_sha256=trace.sha256, warmroute_version="0.1.0")
    return Run(header, records, RunEnd(finished_unix_s=1.0, requests=len(records), ok=len(records)))


@pytest.fixture(scope="module")
def experiment(trace: tuple[Path, Trace], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two arms, two repeats, one of them refused for a stale fleet."""
    directory = tmp_path_factory.mktemp("experiment")
    (directory / "trace.jsonl").write_bytes(trace[0].read_bytes())
    planned: list[dict[str, Any]] = []
    for repeat in (1, 2, 3):
        for arm in ("sticky", "scattered"):
            folder = directory / "arms" / arm / str(repeat)
            folder.mkdir(parents=True)
            run = {"arm": arm, "repeat": repeat, "seed": 0, "order": len(planned), "path": f"arms/{arm}/{repeat}"}
            if repeat == 3:
                planned.append({**run, "state": "refused", "reasons": ["inst-0: prefix cache is not empty"]})
                continue
            planned.append({**run, "state": "done"})
            found = replayed(trace[1], arm, scattered=arm == "scattered", repeat=repeat)
            write_run(folder / "run.jsonl", found)
            rows = [
                {
                    "request_id": record.request_id,
                    "outcome": "ok",
                    "offload_reason": "planner_never",
                    "scores": [{"instance": f"inst-{one}", "inputs": {"cached_tokens": 0}} for one in range(INSTANCES)],
                }
                for record in found.records
            ]
            (folder / "breakdown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "fresh.json").write_text(json.dumps({"kind": "simulated", "reason": "a process of its own"}))
            (folder / "arm.json").write_text(json.dumps({"kv_capacity_tokens": 64_000_000, "warnings": []}))
    plan = {
        "schema": 1,
        "name": "tiny",
        "state": "stopped",
        "backend": "simulated",
        "baseline": "scattered",
        "arms": ["sticky", "scattered"],
        "config": {
            "arms": {"sticky": {"policy": "sticky"}, "scattered": {"policy": "scattered"}},
            "comparison": {"clock": "scheduled", "resamples": 1500, "slo": {"ttft_s": 0.5}},
        },
        "trace": {"path": "trace.jsonl", "sha256": trace[1].sha256, "requests": len(trace[1].requests)},
        "runs": planned,
    }
    (directory / "experiment.json").write_text(json.dumps(plan))
    hardware = {"hostname": "lab-1", "cpu": "EPYC", "memory_bytes": 2**34}
    (directory / "environment.json").write_text(json.dumps({"hardware": hardware, "software": {"python": "3.11.7"}}))
    return directory


@pytest.fixture(scope="module")
def reported(app: typer.Typer, experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """(what the command printed, the page's text, the folder of figures)."""
    out = tmp_path_factory.mktemp("out")
    options = ["--output", str(out / "deep" / "page.html"), "--figures", str(out / "figures"), "--resamples", "1000"]
    result = CliRunner().invoke(app, ["report", str(experiment), *options])
    assert result.exit_code == 0, result.output
    page = (out / "deep" / "page.html").read_text()
    assert not re.search(r"https?://", page)
    text = " ".join(re.sub(r"<style>.*?</style>|<svg.*?</svg>|<[^>]+>", " ", page, flags=re.DOTALL).split())
    return result.output, html.unescape(text), out / "figures"


def test_an_experiment_is_reported_with_its_baseline_repeats_and_verdict(reported: tuple[str, str, Path]) -> None:
    printed, text, _ = reported
    assert re.search(r"(?m)^sticky against scattered: better on \d+ and worse on none of \d+ metrics", printed)
    assert re.search(r"▲ \d+ better", printed)
    assert printed.splitlines()[-1].startswith("Open the report: ")
    assert re.search(r"sticky against scattered: .*% better on", text)
    assert "2 and 2 runs" in text
    assert "Replicates: differences between runs of one arm" in text
    assert "The figures show repeat 1; the table is the mean over repeats." in text


def test_an_experiments_own_settings_apply_unless_an_option_is_given(reported: tuple[str, str, Path]) -> None:
    printed, text, _ = reported
    sentence = "Settings of the experiment: clock scheduled, slo.ttft_s 0.5. Options override them."
    assert sentence in " ".join(printed.split())
    assert sentence in text
    assert "goodput" in text
    assert "1000 resamples" in text


def test_runs_that_are_not_done_are_left_out_by_name(reported: tuple[str, str, Path]) -> None:
    printed, text, _ = reported
    for found in (printed, text):
        assert "Run 3 of arm 'sticky' is refused: inst-0: prefix cache is not empty" in " ".join(found.split())


def test_machine_and_proofs_of_freshness_are_shown(reported: tuple[str, str, Path]) -> None:
    _, text, _ = reported
    for value in ("lab-1", "EPYC", "16.0 GiB", "3.11.7"):
        assert value in text
    assert text.count("fresh a process of its own") == 4


def test_the_anatomy_of_an_experiment_uses_its_own_trace_capacity_and_predictions(
    reported: tuple[str, str, Path], trace: tuple[Path, Trace]
) -> None:
    _, text, _ = reported
    runs = [replayed(trace[1], "x", scattered=scattered) for scattered in (True, False)]
    found = [anatomy(TracePaths(trace[1]), run.records, capacity_tokens=64_000_000) for run in runs]
    for one in found:
        # Nothing is evicted here, and the engines deliver what they hold: all that is lost, routing lost.
        lost = {part.name: part.tokens for part in one.losses}
        assert lost["eviction"] == lost["not delivered"] == 0
        assert f"{2 * lost['routing']:,}" in text
        assert f"{2 * one.tokens.prompt:,}" in text
    assert found[0].tokens.routed_finite is not None
    assert found[1].tokens.routed_finite is not None
    assert found[0].tokens.routed_finite < found[1].tokens.routed_finite
    assert f"{INSTANCES} × 64,000,000" in text
    # Every candidate was predicted to hold nothing: whatever routing lost, it did not know of.
    assert "routing, prediction error" in text


def test_every_figure_is_written_as_png_and_svg(reported: tuple[str, str, Path]) -> None:
    _, _, folder = reported
    stems = {path.stem for path in folder.iterdir()}
    assert {"cdf-TTFT", "hits", "load-sticky", "timeline-scattered"} <= stems
    for stem in stems:
        assert (folder / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(folder / f"{stem}.svg").getroot().tag.endswith("svg")


@pytest.mark.usefixtures("undrawn")
def test_run_files_with_a_breakdown_each(app: typer.Typer, stored: Store, tmp_path: Path) -> None:
    slow = make_run("slow", slower=1.3, noise_seed=2)
    paths = [str(stored(make_run())), str(stored(slow))]
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(
        msgspec.json.encode({"request_id": slow.records[0].request_id, "outcome": "ok", "stages_ms": {"total": 5}})
    )
    output = tmp_path / "report.html"
    options = ["--output", str(output), "--breakdown", f"slow={rows}", "--resamples", "1000"]
    result = CliRunner().invoke(app, ["report", *paths, *options])
    assert result.exit_code == 0, result.output
    assert re.search(r"slow against baseline: better on none and worse on \d+ of \d+ metrics", result.output)
    assert re.search(r"▲ \d+ worse", result.output)
    assert "Proxy breakdown: slow, 1 rows" in output.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--breakdown", "nobody=rows.jsonl"], "ARM one of baseline"),
        (["--session", "nowhere"], "--session nowhere: no run has a session of that id"),
        (["--trace", "OTHER"], "is not the trace that was replayed"),
        (["--baseline", "nobody"], "there is no such arm; there are baseline"),
        (["--keep-all", "--skip-first-s", "3"], "--keep-all leaves nothing out"),
        (["--arm", "two=missing.jsonl"], "missing.jsonl"),
        (["--arm", "a=x.jsonl", "--arm", "a=y.jsonl"], "separate the repeats of an arm by commas"),
    ],
)
def test_what_cannot_be_done_is_said(
    app: typer.Typer, stored: Store, trace: tuple[Path, Trace], options: list[str], message: str, tmp_path: Path
) -> None:
    options = [str(trace[0]) if option == "OTHER" else option for option in options]
    run = str(stored(make_run(sessions=3)))
    result = CliRunner().invoke(app, ["report", run, "-o", str(tmp_path / "x.html"), *options])
    assert result.exit_code == 2
    assert message in result.output


def test_a_directory_that_is_no_experiment_and_no_runs_at_all_are_refused(app: typer.Typer, tmp_path: Path) -> None:
    assert "experiment.json" in CliRunner().invoke(app, ["report", str(tmp_path)]).output
    nothing = CliRunner().invoke(app, ["report"])
    assert nothing.exit_code == 2
    assert "nothing to report on" in nothing.output


def test_a_simulated_run_is_explained_nearly_to_the_token(trace: tuple[Path, Trace]) -> None:
    """The simulator's engines and the anatomy's caches are written apart: they must agree on what is held."""
    pool = 40_000
    options = SimOptions(instances=INSTANCES, pool_tokens=pool)
    result = simulate(trace[1], options, make_routing("round_robin", {}))
    found = anatomy(TracePaths(trace[1]), result.run.records, capacity_tokens=pool)
    tokens = found.tokens
    assert tokens.actual is not None
    assert tokens.routed_finite is not None
    lost = {part.name: part.tokens for part in found.losses}
    assert lost["routing"] > 0.05 * tokens.prompt
    assert lost["eviction"] > 0
    assert abs(lost["not delivered"]) < 0.02 * tokens.prompt


def test_a_report_compares_with_the_warnings_that_the_experiment_recorded(trace: tuple[Path, Trace]) -> None:
    runs = [replayed(trace[1], "x", scattered=False, repeat=repeat) for repeat in (1, 2)]
    found = ArmRuns("x", [ArmRun(runs[0], warnings=("one failed",)), ArmRun(runs[1], invalid=("full",))])
    kept = arm_of(found).compared().runs
    assert [(one.invalid, one.warnings) for one in kept] == [((), ("one failed",)), (("full",), ())]


@pytest.mark.parametrize(
    "name", ["experiment.json", "environment.json", "trace.jsonl", "arms/sticky/2/run.jsonl", "arms/sticky/2/arm.json"]
)
def test_a_report_does_not_overwrite_what_it_is_made_from(app: typer.Typer, experiment: Path, name: str) -> None:
    before = (experiment / name).read_bytes()
    result = CliRunner().invoke(app, ["report", str(experiment), "--output", str(experiment / name)])
    assert result.exit_code == 2
    assert "is an input and would be overwritten" in result.output
    assert (experiment / name).read_bytes() == before


def test_a_report_overwrites_only_a_report(app: typer.Typer, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run.jsonl", make_run())
    measured = write_run(tmp_path / "measured.jsonl", make_run(noise_seed=1))
    (index := tmp_path / "index.html").write_text("<!DOCTYPE html>\n<title>Notes</title>\n")
    for other in (measured, index):
        before = other.read_bytes()
        result = CliRunner().invoke(app, ["report", str(run), "--output", str(other)])
        assert (result.exit_code, other.read_bytes()) == (2, before)
        assert f"{other.name}: already exists and was not written by warmroute report" in " ".join(
            result.output.split()
        )
    page = tmp_path / "page.html"
    page.touch()
    for title in ("first", "second"):
        result = CliRunner().invoke(app, ["report", str(run), "-o", str(page), "--title", title, "--resamples", "1000"])
        assert (result.exit_code, f"<h1>{title}</h1>" in page.read_text()) == (0, True), result.output


def test_an_environment_that_is_cut_is_refused_with_the_remedy(app: typer.Typer, experiment: Path) -> None:
    path = experiment / "environment.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:20])
    result = CliRunner().invoke(app, ["report", str(experiment), "--output", str(experiment / "page.html")])
    path.write_bytes(whole)
    assert result.exit_code == 2
    assert "environment.json: not a JSON object" in result.output
    assert "remove it to report without the machine" in " ".join(result.output.split())


def test_a_report_does_not_overwrite_files_that_its_options_name(app: typer.Typer, tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{number}.jsonl", make_run(noise_seed=number)) for number in range(4)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    options = ["--arm", f"x={paths[1]}", "--aa", f"{paths[2]},{paths[3]}", "--breakdown", f"x={rows}"]
    for path in (*paths, rows):
        before = path.read_bytes()
        result = CliRunner().invoke(app, ["report", str(paths[0]), *options, "--output", str(path)])
        assert result.exit_code == 2
        assert "is an input and would be overwritten" in result.output
        assert path.read_bytes() == before
