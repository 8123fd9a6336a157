"""Comparison of offload planners: the same trace at several loads, each planner on a fleet started and proven fresh.

``python -m bench.elastic_ab run TRACE --fleet elastic-4x-kv-both --output DIR`` runs every (load, planner) arm: starts
the fleet, checks that it is fresh, replays, keeps the raw records and the proxy's own rows, stops it.
``python -m bench.elastic_ab table DIR`` prints the comparison of those records as Markdown, without engines.
``bench/gpu/elastic_ab.sh`` runs everything on a machine with GPUs.
"""

from __future__ import annotations

import asyncio
import gzip
import platform
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from bench.elastic_table import ARM_FILE, ArmNote, markdown
from launch.arm import BREAKDOWN_FILE, RUN_FILE, ArmError, ArmResult, run_arm
from launch.fleet.file import FleetError, FleetFile, find_fleet, load_fleet
from launch.freshness.proof import FRESH_FILE, StaleEngineError
from launch.hardware.telemetry import TELEMETRY_FILE
from launch.run.processes import StartError
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions
from replayer.traces.shorten import shortened
from replayer.traces.trace import Trace, TraceError, load_trace

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

KEPT_FOLDER = "kept"


def cut_trace(trace: Trace, window_s: float, max_output: int) -> Trace:
    """The calls of the first ``window_s`` seconds of a trace, outputs cut to ``max_output`` tokens.

    Sessions that continue after the window lose their later turns, so that every arm ends soon after the arrivals do.

    Raises:
        TraceError: nothing is left.
    """
    kept = [
        msgspec.structs.replace(request, output_length=min(request.output_length, max_output))
        for request in trace.requests
        if request.timestamp_s < window_s
    ]
    if not kept:
        raise TraceError(f"{trace.name}: no request within the first {window_s:g} s")
    return msgspec.structs.replace(trace, requests=kept)


def arms_of(loads: Iterable[float], planners: list[str]) -> list[tuple[float, str]]:
    """(load, planner) in the order they run: each load starts with a different planner, so that no planner is always
    first."""
    return [
        (load, planners[(number + turn) % len(planners)])
        for number, load in enumerate(loads)
        for turn in range(len(planners))
    ]


def arm_fleet(base: FleetFile, policy: str, planner: str, params: dict[str, Any]) -> FleetFile:
    """The fleet with another policy and planner and otherwise equal settings."""
    offload = {**base.proxy.get("offload", {}), "planner": planner, "params": params.get(planner, {})}
    proxy = {**base.proxy, "policy": {"name": policy}, "offload": offload}
    return base.model_copy(update={"proxy": proxy})


def keep(result: ArmResult, note: ArmNote, arm_dir: Path, kept: Path) -> None:
    """Copy the files from which the figures can be checked, compressed, into ``kept``."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in (RUN_FILE, BREAKDOWN_FILE):
        with gzip.GzipFile(kept / f"{name}.gz", "wb", mtime=0) as packed:
            packed.write((arm_dir / name).read_bytes())
    shutil.copy(arm_dir / FRESH_FILE, kept / FRESH_FILE)
    if (arm_dir / TELEMETRY_FILE).exists():
        with gzip.GzipFile(kept / f"{TELEMETRY_FILE}.gz", "wb", mtime=0) as packed:
            packed.write((arm_dir / TELEMETRY_FILE).read_bytes())
    note.warnings = result.warnings
    (kept / ARM_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(note), indent=1))


@app.command()
def run(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the arms; the records to keep in kept/.")],
    fleet: Annotated[Path, typer.Option(help="Fleet file, or the name of a shipped one.")] = Path("elastic-4x-kv-both"),
    override: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE that overrides the fleet file; may be repeated.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Routing policy of every arm.")] = "linear",
    planner: Annotated[list[str] | None, typer.Option(help="Planners; the first is the baseline.")] = None,
    load: Annotated[list[float] | None, typer.Option(help="Time scales of the trace, one load each.")] = None,
    window_s: Annotated[float, typer.Option(min=1, help="Seconds of the trace that are replayed.")] = 240.0,
    max_output: Annotated[int, typer.Option(min=1, help="Outputs are cut to this many tokens.")] = 512,
    idle_gap_cap: Annotated[float, typer.Option(min=0, help="Longest think time, seconds of the trace.")] = 10.0,
    skip_first_s: Annotated[
        float, typer.Option(min=0, help="Start of each run left out of the comparison: kernels compile then.")
    ] = 10.0,
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of one request in seconds.")] = 300.0,
    token_low: Annotated[int, typer.Option(min=0, help="Smallest token id in prompts.")] = 1000,
    token_high: Annotated[int, typer.Option(min=1, help="One more than the largest token id.")] = 100_000,
    length_scale: Annotated[float, typer.Option(help="Multiplies prompt lengths, for small engines.")] = 1.0,
    clock_scale: Annotated[float, typer.Option(help="Simulated engines: engine seconds per wall second.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the tokens that ids stand for.")] = 0,
    hardware: Annotated[str, typer.Option(help="Hardware of the engines, for the table.")] = "",
) -> None:
    """Run every arm and print the table. An arm that fails is reported and left out; exit status 1 if any did."""
    planners = planner or ["never", "threshold", "cost_model"]
    loads = load or [2.5, 5.0]
    try:
        base = load_fleet(find_fleet(fleet), override or [])
        cut = cut_trace(load_trace(trace), window_s, max_output)
    except (FleetError, TraceError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if length_scale != 1.0:
        cut = shortened(cut, length_scale)
    kept = output / KEPT_FOLDER
    failures: list[str] = []
    previous: set[str] = set()
    for load_scale, name in arms_of(loads, planners):
        label = f"{name}-x{load_scale:g}"
        options = ReplayOptions(
            plan=PlanOptions(time_scale=load_scale, idle_gap_cap_s=idle_gap_cap),
            clock_scale=clock_scale,
            timeout_s=timeout,
            seed=seed,
            token_low=token_low,
            token_high=token_high,
        )
        note = ArmNote(
            label=label,
            planner=name,
            load=load_scale,
            policy=policy,
            fleet=fleet.stem,
            instances=len(base.members),
            hardware=hardware or platform.machine(),
            skip_first_s=skip_first_s,
            started_unix_s=time.time(),
            transport=_transport(base),
        )
        typer.echo(f"{time.strftime('%H:%M:%S')} {label}: starting {note.instances} instances")
        began_s = time.monotonic()
        try:
            result = asyncio.run(
                run_arm(
                    label,
                    arm_fleet(base, policy, name, {}),
                    cut,
                    options,
                    output / label,
                    previous_engine_ids=previous,
                    on_phase=lambda phase: typer.echo(f"{time.strftime('%H:%M:%S')}   {phase}"),
                )
            )
        except (StartError, StaleEngineError, ArmError) as error:
            failures.append(label)
            typer.echo(f"error: {label}: {error}", err=True)
            continue
        previous |= result.proof.engine_ids
        keep(result, note, output / label, kept / label)
        ok = sum(record.ok for record in result.run.records)
        typer.echo(f"  {ok}/{len(result.run.records)} ok, {time.monotonic() - began_s:.0f} s in all")
    if kept.exists():
        typer.echo(markdown(kept))
    raise typer.Exit(1 if failures else 0)


def _transport(fleet: FleetFile) -> str:
    vllm = fleet.members[0].vllm if fleet.kind == "vllm" else None
    return vllm.transfer.protocol.value if vllm else (fleet.sim.transport or "profile's default")


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="Folder of kept arms, one sub-folder each.")],
) -> None:
    """Print the comparison of kept records as Markdown."""
    typer.echo(markdown(folder))


if __name__ == "__main__":
    app()
