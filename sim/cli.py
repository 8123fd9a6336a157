"""Commands of the simulator: ``engine`` runs one simulated instance, ``fit`` refits a hardware profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def engine(
    port: Annotated[int, typer.Option(help="Port of the OpenAI API.")] = 8101,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    bootstrap_port: Annotated[
        int | None,
        typer.Option(help="Port of the KV bootstrap server; default: 1000 above --port. Unused with role none."),
    ] = None,
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h20",
    model: Annotated[str, typer.Option(help="Model name to serve under.")] = "warm-sim",
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.", min=1)] = 64,
    kv_capacity_tokens: Annotated[
        int | None, typer.Option(help="KV pool in tokens; default: the profile's, less the connector's share.", min=1)
    ] = None,
    role: Annotated[str, typer.Option(help="kv_both, kv_producer, kv_consumer or none.")] = "kv_both",
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step; default: the profile's.", min=1)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most requests running; default: the profile's.", min=1)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt plus output; default: what profile and pool allow.", min=2)
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Engine seconds per wall second.", min=1e-6)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the generated text; give every engine of a fleet the same.")] = 0,
    stream_interval: Annotated[
        int, typer.Option(help="Fewest tokens in one streamed event after the first.", min=1)
    ] = 1,
    flush_ms: Annotated[
        float, typer.Option(help="Wall milliseconds over which streamed tokens are gathered into one event.", min=0.1)
    ] = 8.0,
    transport: Annotated[
        str | None, typer.Option(help="How KV moves; default: the profile's default transport.")
    ] = None,
    connector_kv_fraction: Annotated[
        float | None,
        typer.Option(
            help="Share of the KV pool the connector takes; default: the profile's, 0 with --kv-capacity-tokens."
        ),
    ] = None,
    kv_load_failure_policy: Annotated[
        str, typer.Option(help="When a KV pull fails: hang (as vLLM 0.18.1), fail (500) or recompute.")
    ] = "hang",
    abort_timeout_s: Annotated[
        float,
        typer.Option(
            help="Engine seconds that P holds blocks that are not pulled, and that D waits for an unknown transfer."
        ),
    ] = 480.0,
    access_log: Annotated[bool, typer.Option(help="Log every HTTP request.")] = False,
    kv_events_port: Annotated[
        int | None, typer.Option(help="Publish KV events as vLLM does (ZMQ) on this port; default: none.", min=1)
    ] = None,
    kv_events_replay_port: Annotated[
        int | None, typer.Option(help="Also replay past KV events on this port.", min=1)
    ] = None,
) -> None:
    """Run one simulated engine: vLLM's OpenAI API, metrics and KV hand-off, timed by a hardware profile."""
    from sim.hardware import ProfileError
    from sim.server.main import run
    from sim.server.settings import EngineSettingsError, ServerSettings

    try:
        settings = ServerSettings.resolve(
            port=port,
            host=host,
            bootstrap_port=bootstrap_port,
            profile=profile,
            model=model,
            block_size=block_size,
            kv_capacity_tokens=kv_capacity_tokens,
            role=role,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            time_scale=time_scale,
            seed=seed,
            stream_interval=stream_interval,
            flush_s=flush_ms / 1000,
            transport=transport,
            connector_kv_fraction=connector_kv_fraction,
            kv_load_failure_policy=kv_load_failure_policy,
            abort_timeout_s=abort_timeout_s,
            access_log=access_log,
            kv_events_port=kv_events_port,
            kv_events_replay_port=kv_events_replay_port,
        )
    except (EngineSettingsError, ProfileError) as error:
        typer.echo(f"engine: {error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(run(settings))


def fit(
    profile: Annotated[str, typer.Argument(help="Name of the profile: h20 or h200, or another with a points file.")],
    points: Annotated[
        Path | None, typer.Option(help="Points file; default: configs/hardware/PROFILE_points.yaml.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write configs/hardware/PROFILE.yaml.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the residuals as Markdown.")] = False,
) -> None:
    """Refit a hardware profile from measured points; print each point's error, the median and the worst."""
    from rich.console import Console
    from rich.table import Table

    from sim import fit_report
    from sim.fit import fit as fit_points
    from sim.hardware import HARDWARE_FOLDER, ProfileError
    from sim.points import load_points

    try:
        result = fit_points(load_points(points or HARDWARE_FOLDER / f"{profile}_points.yaml"))
    except ProfileError as error:
        typer.echo(f"fit: {error}", err=True)
        raise typer.Exit(2) from error
    if markdown:
        typer.echo(fit_report.markdown(result))
    else:
        table = Table("what", "point", "measured", "model", "error", "note")
        for row in fit_report.rows(result):
            table.add_row(*row)
        Console().print(table)
    typer.echo(fit_report.summary(result))
    for kind, (count, middle, worst) in fit_report.by_kind(result.residuals).items():
        typer.echo(f"  {kind}: {count} points, median {middle:.1%}, worst {worst:.1%}")
    if write:
        path = HARDWARE_FOLDER / f"{result.profile.name}.yaml"
        path.write_text(fit_report.profile_yaml(result.profile), encoding="utf-8")
        typer.echo(f"wrote {path}")


def register(app: typer.Typer) -> None:
    """Add the simulator's commands to an application."""
    from sim.fidelity import cli as fidelity_cli
    from sim.offline import cli as offline_cli

    offline_cli.register(app)
    fidelity_cli.register(app)
    app.command("engine")(engine)
    app.command("fit")(fit)
