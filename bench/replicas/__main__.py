"""``python -m bench.replicas``: the table of docs/replicas.md."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.figures.machine import machine
from bench.replicas.arms import NoStoreError, ReplicaArm, ReplicaFigures, ReplicaLoad, run_arm
from replayer.traces.formats import bailian
from replayer.traces.loading import load as load_trace
from replayer.traces.synth import SynthOptions, synthesise


class ReplicaReport(msgspec.Struct, frozen=True):
    """Everything that was measured, and on what."""

    machine: dict[str, str]
    load: ReplicaLoad
    requests: int
    rate_per_s: float
    seed: int
    arms: list[ReplicaFigures]


def measure(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for runs and replicas.json.")] = Path(
        "runs/replicas"
    ),
    replicas: Annotated[str, typer.Option(help="Numbers of replicas, comma-separated.")] = "1,2,4,8",
    engines: Annotated[int, typer.Option(min=1, help="Simulated engines.")] = 4,
    requests: Annotated[int, typer.Option(min=10, help="Requests of the generated trace.")] = 520,
    rate_per_s: Annotated[float, typer.Option(help="Arrivals per engine second.")] = 0.5,
    engine_speed: Annotated[float, typer.Option(help="Engine seconds per wall second (factor).")] = 10.0,
    profile: Annotated[str, typer.Option(help="Hardware profile.")] = "h20",
    policy: Annotated[str, typer.Option(help="Routing policy.")] = "warm",
    seed: Annotated[int, typer.Option(help="Seed of the trace.")] = 7,
) -> None:
    """Run every arm, write replicas.json, print the table as Markdown."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the processes of the arm
    output.mkdir(parents=True, exist_ok=True)
    trace_path = output / "trace.jsonl"
    bailian.write(trace_path, synthesise(SynthOptions(requests=requests, rate_per_s=rate_per_s, seed=seed)))
    trace = load_trace(trace_path)
    load = ReplicaLoad(engines, profile, engine_speed, policy)
    figures: list[ReplicaFigures] = []
    for arm in arms_of([int(each) for each in replicas.split(",")]):
        try:
            measured = run_arm(arm, load, trace, output / arm.label)
        except (NoStoreError, TimeoutError) as error:
            typer.echo(f"error: {arm.label}: {error}", err=True)
            raise typer.Exit(1) from error
        figures.append(measured)
        typer.echo(f"{arm.label}: {msgspec.json.encode(measured).decode()}", err=True)
        report = ReplicaReport(machine(), load, requests, rate_per_s, seed, figures)
        (output / "replicas.json").write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    for line in table(figures):
        typer.echo(line)


def arms_of(counts: list[int]) -> list[ReplicaArm]:
    """Both indexes; one replica has nothing to share."""
    return [
        ReplicaArm(count, events, sharing)
        for events in (False, True)
        for count in counts
        for sharing in ((False, True) if count > 1 else (False,))
    ]


def table(figures: list[ReplicaFigures]) -> list[str]:
    """Markdown: hit rate and TTFT by number of replicas, the state shared or not."""
    lines = [
        "| index | replicas | hit rate alone | hit rate shared | TTFT p90 alone | TTFT p90 shared |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_arm = {each.arm: each for each in figures}
    for events in (False, True):
        for count in sorted({each.arm.replicas for each in figures}):
            alone = by_arm.get(ReplicaArm(count, events, False))
            shared = by_arm.get(ReplicaArm(count, events, True), alone if count == 1 else None)
            hits = [f"{each.hit_rate:.1%}" if each else "" for each in (alone, shared)]
            times = [f"{each.ttft_p90_s:.2f} s" if each else "" for each in (alone, shared)]
            name = "KV events" if events else "shadow"
            lines.append(f"| {name} | {count} | {' | '.join((*hits, *times))} |")
    return lines


if __name__ == "__main__":
    typer.run(measure)
