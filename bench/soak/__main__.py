"""``python -m bench.soak``: streams through a real proxy for a long time while engines are killed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from bench.figures.result_file import writable
from bench.soak.plan import SoakPlan
from bench.soak.processes import SoakError
from bench.soak.run import SoakResult, soak

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes during which requests are sent.")] = 20.0,
    streams: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 200,
    engines: Annotated[int, typer.Option(min=2, max=16, help="Simulated engines, one process each.")] = 4,
    kill_every_s: Annotated[float, typer.Option(min=0.1, help="Mean time between two engines killed.")] = 5.0,
    leave_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests whose client disconnects.")
    ] = 0.15,
    time_scale: Annotated[float, typer.Option("--engine-speed", min=0.1, help="Engine seconds per wall second.")] = 1.0,
    rss_growth_mb: Annotated[
        float, typer.Option(min=0, help="Most that memory may grow, by its slope, over the measured window.")
    ] = 16.0,
    hostile: Annotated[bool, typer.Option("--hostile", help="Add hostile clients in every second slice.")] = False,
    hostile_share: Annotated[float, typer.Option(min=0.01, max=0.9, help="Share of requests that they send.")] = 0.1,
    ttft_ratio: Annotated[
        float, typer.Option(min=1, help="Most that polite clients' TTFT p99 may be with them, in multiples of without.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of requests, disconnects and kills.")] = 1,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Write all results to this JSON file.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and the proxy's records in this folder.")] = None,
) -> None:
    """Verify every answer byte by byte while engines die; then the ledger, the records, memory and descriptors.

    Exits with 1 if a check fails, with 2 if the run could not be made.
    """
    plan = SoakPlan(
        duration_s=60 * minutes,
        streams=streams,
        engines=engines,
        kill_every_s=kill_every_s,
        leave_share=leave_share,
        time_scale=time_scale,
        rss_growth_mb=rss_growth_mb,
        hostile_share=hostile_share if hostile else 0.0,
        ttft_ratio=ttft_ratio,
        seed=seed,
    )
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() if keep is None else nullcontext(str(keep)) as folder:
        try:
            result = asyncio.run(soak(plan, Path(folder)))
        except SoakError as error:
            typer.secho(str(error), fg="red", err=True)
            raise typer.Exit(2) from error
    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    show(result)
    raise typer.Exit(1 if result.violations else 0)


def show(result: SoakResult) -> None:
    """Print the result of a run."""
    figures = result.figures
    table = Table(show_header=False, box=None)
    for name, value in (
        ("requests", f"{result.requests} in {result.duration_s:g} s ({result.requests / result.duration_s:.1f}/s)"),
        ("ended", ", ".join(f"{count} {end}" for end, count in sorted(result.ends.items()))),
        ("by the proxy", ", ".join(f"{count} {end}" for end, count in sorted(result.outcomes.items()))),
        ("engines killed", str(result.kills)),
        ("events, answers", f"{result.events}, {result.answer_mb} MB"),
        (
            "memory",
            f"{figures.rss_mb.first:.1f} -> {figures.rss_mb.last:.1f} MB after warm-up, "
            f"slope {figures.rss_mb.per_hour:+.1f} MB/h, peak {figures.rss_peak_mb:.1f} MB",
        ),
        (
            "descriptors",
            f"{figures.descriptors_before} before, {figures.descriptors_after} after, "
            f"slope {figures.descriptors.per_hour:+.1f}/h under load",
        ),
        ("threads", f"{figures.threads_after} after, slope {figures.threads.per_hour:+.1f}/h"),
        ("proxy CPU", f"{figures.cpu_s:.1f} s, {1e3 * figures.cpu_s / max(1, result.requests):.2f} ms a request"),
        *_hostile_rows(result),
    ):
        table.add_row(name, value)
    console = Console(width=160, soft_wrap=True)
    console.print(table)
    for violation in result.violations:
        console.print(f"[red]VIOLATED[/red] {violation}", highlight=False)
    if not result.violations:
        console.print("[green]all holds[/green]")


def _hostile_rows(result: SoakResult) -> Iterator[tuple[str, str]]:
    for kind, ends in result.hostile.items():
        yield f"hostile: {kind}", ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    if result.comparison is None:
        return
    for name, phase in (("without", result.comparison.without), ("with", result.comparison.with_hostile)):
        yield (
            f"polite, {name} hostile",
            f"{phase.requests} requests, {phase.refused} refused, TTFT p50 {phase.ttft_p50_ms:.1f} ms, "
            f"p99 {phase.ttft_p99_ms:.1f} ms",
        )
    yield "TTFT with / without", f"p50 {result.comparison.ttft_p50_ratio}, p99 {result.comparison.ttft_p99_ratio}"


if __name__ == "__main__":
    app()
