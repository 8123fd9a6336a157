"""``warmroute measure transfer``: KV transfers from one engine to another, idle and under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.analysis.output import Figures, Json, Markdown, folder, show, stop
from bench.analysis.words import integers
from bench.instruments.commands import options

if TYPE_CHECKING:
    from bench.instruments.prompts import Prompts
    from bench.instruments.record import EngineNote
    from bench.instruments.targets import EngineAddress, Targets
    from bench.instruments.transfer import TransferPlan, TransferRow


def transfer(
    fleet: options.FleetArgument = None,
    overrides: options.Overrides = None,
    urls: options.Urls = None,
    source: Annotated[
        str | None, typer.Option("--from", help="P, by name or URL. Default: the first engine.", show_default=False)
    ] = None,
    target: Annotated[
        str | None, typer.Option("--to", help="D, by name or URL. Default: the second engine.", show_default=False)
    ] = None,
    from_bootstrap: Annotated[
        str | None,
        typer.Option(help="Bootstrap URL of P, as D reaches it. Default: the fleet file's.", show_default=False),
    ] = None,
    connector: Annotated[
        Literal["mooncake", "nixl"],
        typer.Option(metavar="mooncake|nixl", help="KV connector of the engines given by --url."),
    ] = "mooncake",
    tokens: Annotated[str, typer.Option(help="Prompt lengths, tokens, comma-separated.")] = (
        "2048,8192,32768,65536,131072"
    ),
    concurrent: Annotated[str, typer.Option(help="Hand-offs whose D legs begin together, comma-separated.")] = "1",
    background: Annotated[str, typer.Option(help="Background streams on each side, comma-separated.")] = "0",
    background_kind: Annotated[
        Literal["decode", "prefill"],
        typer.Option(metavar="decode|prefill", help="Load: streams that decode, or prefill one prompt after another."),
    ] = "decode",
    background_tokens: Annotated[int, typer.Option(min=1, help="Prompt of a background stream, tokens.")] = 1_024,
    kv_bytes_per_token: options.KvBytesPerToken = None,
    repeats: options.Repeats = 5,
    model: options.Model = None,
    api_key_env: options.ApiKeyEnv = None,
    token_low: options.TokenLow = 1_000,
    token_high: options.TokenHigh = 100_000,
    timeout_s: options.TimeoutS = 600.0,
    seed: options.Seed = 0,
    hardware: options.Hardware = "",
    output: options.Output = None,
    figures: Figures = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """KV transfer: time and bandwidth of hand-offs from P to D, idle and with background streams on both.

    Each hand-off is verified: D must report the prompt as pulled, and its text is compared with P's.
    """
    from bench.instruments.record import InstrumentRecord
    from bench.instruments.transfer import TransferPlan
    from bench.instruments.transfer_tables import parts_sheet, transfer_sheet

    targets = options.chosen_targets(fleet, overrides, urls)
    size = options.kv_bytes_of(kv_bytes_per_token, targets)
    plan = TransferPlan(
        tokens=tuple(integers(tokens, "--tokens", least=128)),
        concurrent=tuple(integers(concurrent, "--concurrent", least=1)),
        background=tuple(integers(background, "--background", least=0)),
        background_kind=background_kind,
        background_tokens=background_tokens,
        repeats=repeats,
    )
    prompts = options.prompts_of(token_low, token_high, seed)
    record = InstrumentRecord(
        instrument="transfer", hardware=hardware, fleet=targets.fleet, seed=seed, nonce=prompts.nonce, plan=plan
    )
    pair = _pair(targets, source, target, from_bootstrap, connector)
    record.engines, rows = options.measured(
        _measure(targets, pair, plan, prompts, size, model, options.api_key_from(api_key_env), timeout_s)
    )
    record.rows = rows
    different = sum(not row.same_text for row in rows)
    if different:
        record.warnings.append(f"{different} of {len(rows)} hand-offs: D's text is not P's")
    options.written(output, record)
    if figures is not None:
        _draw(rows, folder(figures))
    show(record, [transfer_sheet(rows), parts_sheet(rows)], as_json=as_json, as_markdown=as_markdown)


def _pair(
    targets: Targets, source: str | None, target: str | None, bootstrap: str | None, connector: str
) -> tuple[EngineAddress, EngineAddress]:
    """P and D; ends the command if there are not two."""
    import msgspec

    from bench.instruments.engine import InstrumentError
    from policies.types import Connector

    try:
        if len(targets.engines) < 2:
            raise InstrumentError("a transfer needs two engines")
        p = targets.engines[0] if source is None else targets.named(source)
        others = [each for each in targets.engines if each != p]
        d = others[0] if target is None else targets.named(target)
        if p == d:
            raise InstrumentError("--from and --to are the same engine")
    except InstrumentError as error:
        stop(error)
    changes = {} if bootstrap is None else {"bootstrap_url": bootstrap.rstrip("/")}
    return msgspec.structs.replace(p, connector=Connector(connector), **changes), d


async def _measure(
    targets: Targets,
    pair: tuple[EngineAddress, EngineAddress],
    plan: TransferPlan,
    prompts: Prompts,
    kv_bytes_per_token: int,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
) -> tuple[list[EngineNote], list[TransferRow]]:
    from bench.instruments.engine import refuse_busy
    from bench.instruments.targets import notes_of, opened
    from bench.instruments.transfer import measure_transfers

    async with opened(pair, model or targets.model, api_key, timeout_s) as engines:
        await refuse_busy(engines)
        notes = await notes_of(engines, targets)
        source, target = engines
        longest = await source.max_model_len()
        plan.background_output = options.fitting(plan.background_output, plan.background_tokens, longest)
        return notes, await measure_transfers(source, target, plan, prompts, kv_bytes_per_token, options.progress)


def _draw(rows: list[TransferRow], to: Path) -> None:
    from statistics import median

    from bench.analysis.figures import Line, lines
    from bench.instruments.transfer_tables import by_load, typical

    times, rates = [], []
    groups = by_load(rows)
    for background, concurrent in sorted({(key.background, key.concurrent) for key in groups}):
        found = {
            key.tokens: typical(each)
            for key, each in groups.items()
            if (key.background, key.concurrent) == (background, concurrent)
        }
        name = f"{background} streams a side, {concurrent} at once"
        sizes = [each[0].size_bytes / 1e9 for each in found.values()]
        seconds = [median(row.transfer_s for row in each) * 1000 for each in found.values()]
        speeds = [median(row.bytes_per_s for row in each) / 1e9 for each in found.values()]
        seen = [place for place, each in enumerate(seconds) if each > 0 and speeds[place] != float("inf")]
        times.append(Line(name, [sizes[place] for place in seen], [seconds[place] for place in seen]))
        rates.append(Line(name, [sizes[place] for place in seen], [speeds[place] for place in seen]))
    axis = "KV of the prompt [GB]"
    lines(to / "transfer_time.svg", times, x=axis, y="transfer [ms]", log_x=True, log_y=True)
    lines(to / "transfer_bandwidth.svg", rates, x=axis, y="GB/s, all transfers at once", log_x=True, log_y=True)
