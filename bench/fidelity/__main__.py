"""``python -m bench.fidelity``: the tables of docs/simulator.md on the accuracy of the simulator, and that of
docs/policies.md on the router's own predictions.

Without a sub-command it prints them all: the published ones and those of recordings are computed (seconds), those of
the real-time runs are read from the kept figures. ``real-time`` measures these again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from bench.fidelity import end_to_end, first_tokens, profiles, published, real_time
from bench.figures.machine import machine
from bench.figures.result_file import writable
from bench.home_case.cut import SessionCut, cut_trace
from bench.home_case.record import BREAKDOWN
from launch.arm import ArmError
from launch.fleet.file import FleetError
from launch.freshness.proof import StaleEngineError
from launch.run.processes import StartError
from replayer.replay.plan import PlanOptions
from replayer.traces.loading import load_trace
from replayer.traces.trace import TraceError
from sim.fidelity.comparison import compare, markdown
from sim.fidelity.recording import Recording, find_recordings, read_recording
from sim.fidelity.resimulate import resimulate

REPOSITORY = Path(__file__).resolve().parents[2]
TRACES = REPOSITORY.parent / "shared" / "traces" / "agentic"
END_TO_END_TRACE = "derived_glm_like_2h.jsonl.zst"
RESULTS = REPOSITORY / "docs" / "results"


class RecordedRuns(NamedTuple):
    """Runs of one trace on real engines."""

    trace: str
    """File of the trace."""
    kept: Path
    group: str
    """Name in the table of profiles."""
    cut: SessionCut | None = None
    """Part of the trace that was replayed; None: all of it."""


RECORDED = {
    "recordings": RecordedRuns("derived_glm_like_sample1k.jsonl.gz", RESULTS / "elastic-h200-4x", "short sessions"),
    "recordings-long": RecordedRuns("kct_v6_sample1k.jsonl.gz", RESULTS / "elastic-h200-4x-long", "long sessions"),
    "recordings-home": RecordedRuns(
        "kct_v6_sample1k.jsonl.gz",
        RESULTS / "home-case-h200-4x" / "sustained",
        "home case, blocks of 128",
        SessionCut(copies=4, turns=28, max_tokens=80_000),
    ),
}
RECORDED_PROFILE = "h200"
PAGE = REPOSITORY / "docs" / "simulator.md"
PAGES = {"first-tokens": REPOSITORY / "docs" / "policies.md"}
"""Pages of the sections that are not on ``PAGE``."""
KEPT = RESULTS / "simulator-real-time.json"
SECTIONS = (
    "interference",
    "transfers",
    "end-to-end",
    *RECORDED,
    "profiles",
    "profile-parts",
    "real-time",
    "first-tokens",
)
TRACES_OF = (
    {"end-to-end": (END_TO_END_TRACE,)}
    | {name: (each.trace,) for name, each in RECORDED.items()}
    | dict.fromkeys(("profiles", "profile-parts"), tuple(dict.fromkeys(each.trace for each in RECORDED.values())))
)
"""The sections that need traces."""

app = typer.Typer(add_completion=False, help=__doc__)


def section(name: str, traces: Path = TRACES) -> str:
    """One of ``SECTIONS`` as Markdown.

    Raises:
        TraceError: it needs a trace that is not in ``traces``.
    """
    if name == "interference":
        return published.interference_table()
    if name == "transfers":
        return published.transfer_table()
    if name == "end-to-end":
        return end_to_end.tables(load_trace(traces / END_TO_END_TRACE))
    if name in RECORDED:
        return markdown(
            [compare(each, resimulate(each, RECORDED_PROFILE, each.note.transport)) for each in recorded(name, traces)]
        )
    if name == "profiles":
        return profiles.profile_table(grouped(traces), {each: each for each in profiles.PROFILES})
    if name == "profile-parts":
        return profiles.part_table(grouped(traces))
    if name == "first-tokens":
        folders = [folder for runs in RECORDED.values() for folder in find_recordings([runs.kept])]
        return first_tokens.table(
            {str(folder.relative_to(RESULTS)): first_tokens.first_tokens(folder / BREAKDOWN) for folder in folders}
        )
    return real_time.table(json.loads(KEPT.read_text(encoding="utf-8")))


def recorded(name: str, traces: Path) -> list[Recording]:
    """The recordings of real engines of one of ``RECORDED``. Raises TraceError as ``section``."""
    runs = RECORDED[name]
    loaded = load_trace(traces / runs.trace)
    if runs.cut is not None:
        loaded = cut_trace(loaded, runs.cut)
    folders = find_recordings([runs.kept])
    return [read_recording(folder, loaded, f"{folder.parent.name}/{folder.name}") for folder in folders]


def grouped(traces: Path) -> dict[str, list[Recording]]:
    """All recordings, those without a hand-off apart."""
    found: dict[str, list[Recording]] = {}
    for name, runs in RECORDED.items():
        for each in recorded(name, traces):
            moved = any(sent.record.prefill_instance for sent in each.sent)
            found.setdefault(f"{runs.group}, {'with' if moved else 'without'} hand-offs", []).append(each)
    return found


def put(page: str, name: str, table: str) -> str:
    """The page with another table between the markers of section ``name``. Raises BadParameter without markers."""
    before, found, rest = page.partition(f"<!-- fidelity: {name} -->\n")
    _, ended, after = rest.partition(f"<!-- end of {name} -->")
    if not (found and ended):
        raise typer.BadParameter(f"the page has no markers for {name}")
    return f"{before}{found}{table.strip()}\n{ended}{after}"


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    traces: Annotated[Path, typer.Option(help="Folder with the agentic traces.")] = TRACES,
    only: Annotated[str, typer.Option(help=f"One of: {', '.join(SECTIONS)}; default: all.")] = "",
    write: Annotated[bool, typer.Option("--write", help="Also write them to their pages.")] = False,
) -> None:
    """Print the tables."""
    if context.invoked_subcommand is not None:
        return
    if only and only not in SECTIONS:
        raise typer.BadParameter(f"--only takes one of: {', '.join(SECTIONS)}")
    for name in [only] if only else SECTIONS:
        typer.echo(f"## {name}\n")
        try:
            table = section(name, traces)
        except TraceError as error:
            typer.echo(f"left out: {error}\n")
            continue
        typer.echo(table + "\n")
        if write:
            page = PAGES.get(name, PAGE)
            page.write_text(put(page.read_text(encoding="utf-8"), name, table), encoding="utf-8")


@app.command("real-time")
def measure(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.")],
    clock_scale: Annotated[
        float, typer.Option("--engine-speed", min=0.01, help="Engine seconds per wall second.")
    ] = 10.0,
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 400,
    time_scale: Annotated[float, typer.Option("--arrival-speed", min=0.01, help="Factor on the arrival rate.")] = 1.0,
    instances: Annotated[int, typer.Option(min=1, help="Number of engines.")] = 8,
    profile: Annotated[str, typer.Option(help="Hardware profile.")] = "h200",
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies; may be repeated. Default: session_sticky.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE that overrides the fleet file; may be repeated.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Write the figures to this JSON file.")
    ] = None,
) -> None:
    """Run a fleet of simulated engines, the proxy and the replayer in real time, and the same offline; compare.

    Exit status 1 when TTFT p50 or p90 differ by more than 5 %.
    """
    plan, found = PlanOptions(time_scale=time_scale, request_limit=requests), []
    try:
        loaded = load_trace(trace)
        for name in policy or ["session_sticky"]:
            settings = [f"proxy.policy.name={name}", *(override or [])]
            with tempfile.TemporaryDirectory() as folder:
                compared = real_time.compare(loaded, plan, clock_scale, profile, instances, Path(folder), settings)
            found.append(compared)
    except (TraceError, FleetError, StartError, StaleEngineError, ArmError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    kept = {
        "kind": "simulator-real-time",
        "schema": 1,
        "machine": machine(),
        "comparisons": [real_time.to_json(each) for each in found],
    }
    typer.echo(real_time.table(kept))
    if output is not None:
        output.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    raise typer.Exit(0 if all(each.alike for each in found) else 1)


if __name__ == "__main__":
    app(prog_name="python -m bench.fidelity")
