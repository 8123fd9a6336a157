"""Command ``telemetry``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from launch.hardware.telemetry import TelemetrySampler


def telemetry(
    out: Annotated[Path | None, typer.Option(help="CSV file, one row per GPU and sample; overwritten.")] = None,
    interval: Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between two samples.")] = 1.0,
    prometheus_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Also serve the latest sample as /metrics on this port; 0 picks one."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address for /metrics.")] = "127.0.0.1",
) -> None:
    """Sample every NVIDIA GPU of this machine until Ctrl-C: use, memory, clock, power, temperature, PCIe, NVLink.

    Give --out, --prometheus-port or both. Exit status 2 where there is no GPU, 1 when sampling had to stop.
    """
    from launch.run.signals import run_until_signal

    if out is None and prometheus_port is None:
        typer.echo("error: nothing to do: give --out FILE, --prometheus-port N or both", err=True)
        raise typer.Exit(2)
    raise typer.Exit(run_until_signal(_sample(out, interval, host, prometheus_port)))


async def _sample(out: Path | None, interval_s: float, host: str, port: int | None) -> int:
    from launch.hardware.telemetry import TelemetrySampler

    async with TelemetrySampler(out, interval_s=interval_s) as sampler:
        if not sampler.running:
            typer.echo(f"error: no GPU telemetry: {sampler.problem}", err=True)
            return 2
        try:
            with _metrics_server(sampler, host, port) as url:
                typer.echo(
                    f"sampling every {interval_s:g} s" + (f" to {out}" if out else "") + (f", {url}" if url else "")
                )
                await sampler.finished()
        except OSError as error:
            typer.echo(f"error: /metrics cannot be served on {host}:{port} ({error.strerror})", err=True)
            return 2
    typer.echo(f"error: {sampler.problem}", err=True)
    return 1


@contextlib.contextmanager
def _metrics_server(sampler: TelemetrySampler, host: str, port: int | None) -> Iterator[str | None]:
    """The sampler's metrics over HTTP for the length of a block; the URL, or None without a port."""
    if port is None:
        yield None
        return
    from prometheus_client import CollectorRegistry, start_http_server

    from launch.hardware.telemetry import TelemetryCollector

    registry = CollectorRegistry()
    registry.register(TelemetryCollector(sampler))
    server, thread = start_http_server(port, host, registry)
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
