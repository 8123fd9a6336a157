"""Commands of the simulator: ``simulate``, and the group ``sim`` with ``engine``, ``fit`` and ``fidelity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from replayer.traces.numbers import finite


def engine(
    port: Annotated[int, typer.Option(help="Port of the OpenAI API.")] = 8101,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    bootstrap_port: Annotated[
        int | None,
        typer.Option(help="Port of the KV bootstrap server. Default: --port + 1000.", show_default=False),
    ] = None,
    profile: Annotated[str, typer.Option(help="Hardware profile: a name in configs/hardware or a YAML file.")] = "h20",
    model: Annotated[str, typer.Option(help="Served model name.")] = "warm-sim",
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.", min=1)] = 64,
    kv_capacity_tokens: Annotated[
        int | None,
        typer.Option(
            help="KV pool in tokens. Default: the profile's, less the connector's share.", min=1, show_default=False
        ),
    ] = None,
    role: Annotated[str, typer.Option(help="kv_both, kv_producer, kv_consumer or none.")] = "kv_both",
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step. Default: the profile's.", min=1, show_default=False)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most running requests. Default: the profile's.", min=1, show_default=False)
    ] = None,
    scheduling_policy: Annotated[
        str, typer.Option(help="Order of waiting requests: fcfs, or priority (of each request, lower first).")
    ] = "fcfs",
    long_prefill_token_threshold: Annotated[
        int, typer.Option(help="Most tokens of a step for one request; 0: the whole budget.", min=0)
    ] = 0,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of prompt plus output. Default: the profile's limit, at most the pool.",
            min=2,
            show_default=False,
        ),
    ] = None,
    engine_speed: Annotated[
        float, typer.Option(callback=finite, help="Engine seconds per wall second (factor).", min=1e-6)
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the generated text; the same for all engines of a fleet.")] = 0,
    stream_interval: Annotated[
        int, typer.Option(help="Fewest tokens in one streamed event after the first.", min=1)
    ] = 1,
    flush_ms: Annotated[
        float,
        typer.Option(
            callback=finite, help="Wall milliseconds over which streamed tokens are batched into one event.", min=0.1
        ),
    ] = 8.0,
    transport: Annotated[
        str | None,
        typer.Option(help="KV transport of the profile. Default: the profile's default.", show_default=False),
    ] = None,
    connector_kv_fraction: Annotated[
        float | None,
        typer.Option(
            callback=finite,
            help="Share of the KV pool the connector takes. Default: the profile's; 0 with --kv-capacity-tokens.",
            show_default=False,
        ),
    ] = None,
    kv_load_failure_policy: Annotated[
        str, typer.Option(help="When a KV pull fails: hang (as vLLM 0.18.1), fail (500) or recompute.")
    ] = "hang",
    abort_timeout_s: Annotated[
        float,
        typer.Option(
            callback=finite, help="Limit for P to hold blocks that are not pulled and for D to wait, engine seconds."
        ),
    ] = 480.0,
    access_log: Annotated[bool, typer.Option(help="Log every HTTP request.")] = False,
    kv_events_port: Annotated[
        int | None,
        typer.Option(
            help="Publish KV events as vLLM does (ZMQ) on this port. Default: off.", min=1, show_default=False
        ),
    ] = None,
    kv_events_replay_port: Annotated[
        int | None,
        typer.Option(help="Also replay past KV events on this port. Default: off.", min=1, show_default=False),
    ] = None,
    hash_seed: Annotated[
        int, typer.Option(help="Seed of the block hashes in KV events; the same for all engines of a fleet.", min=0)
    ] = 0,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            help="Data-parallel ranks, each with its own KV pool; rank i publishes events i ports higher.", min=1
        ),
    ] = 1,
    check: Annotated[
        bool, typer.Option("--check", help="Only check the options: exit code 2 if they do not fit.")
    ] = False,
) -> None:
    """Run one simulated engine.

    It has vLLM's OpenAI API, metrics and KV hand-off, timed by a hardware profile.
    """
    from sim.hardware import ProfileError
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
            scheduling_policy=scheduling_policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_model_len=max_model_len,
            time_scale=engine_speed,
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
            hash_seed=hash_seed,
            data_parallel_size=data_parallel_size,
        )
    except (EngineSettingsError, ProfileError) as error:
        typer.echo(f"engine: {error}", err=True)
        raise typer.Exit(2) from error
    if check:
        return
    from sim.server.main import run

    raise typer.Exit(run(settings))


def fit(
    profile: Annotated[str, typer.Argument(help="Name of the profile: h20 or h200, or another with a points file.")],
    points: Annotated[
        Path | None,
        typer.Option(help="Points file. Default: configs/hardware/PROFILE_points.yaml.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="YAML file to write the profile to, or a folder for PROFILE.yaml. Default: print only.",
            show_default=False,
        ),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the residuals as Markdown.")] = False,
) -> None:
    """Refit a hardware profile from measured points.

    Prints every point's error, the median and the worst.
    """
    from rich.console import Console
    from rich.table import Table

    from replayer.records.outputs import OverwritesInputError, refuse_inputs
    from sim import fit_report
    from sim.fit import fit as fit_points
    from sim.hardware import ProfileError
    from sim.points import load_points, points_path

    try:
        source = points or points_path(profile)
        result = fit_points(load_points(source))
        path = output / f"{result.profile.name}.yaml" if output is not None and output.is_dir() else output
        if path is not None:
            refuse_inputs(path, [source])
    except (OverwritesInputError, ProfileError) as error:
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
    if path is not None:
        path.write_text(fit_report.profile_yaml(result.profile), encoding="utf-8")
        typer.echo(f"written: {path}")


def register(app: typer.Typer) -> None:
    """Add the simulator's commands to an application."""
    from sim.fidelity import cli as fidelity_cli
    from sim.offline import cli as offline_cli

    offline_cli.register(app)
    group = typer.Typer(no_args_is_help=True, help="Simulated engines and the hardware profiles that time them.")
    group.command("engine")(engine)
    group.command("fit")(fit)
    fidelity_cli.register(group)
    app.add_typer(group, name="sim")
