"""``warmroute measure transfer``: KV transfers from one engine to another, idle and under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bench.analysis.output import Figures, Json, Markdown, folder, show, stop
from bench.analysis.words import integers
from bench.instruments.commands import options

if TYPE_CHECKING:
    from bench.instruments.hooked.hook_file import HookFile
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
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(min=1, help="KV of one token, bytes. Default: from the model's dimensions.", show_default=False),
    ] = None,
    give_up_s: Annotated[
        float, typer.Option(min=1, help="Longest D leg, seconds; a longer one is recorded as a failure.")
    ] = 120.0,
    hook_records: Annotated[
        Path | None,
        typer.Option(
            help="Records of the connector's hooks (`measure hooks`), for the stages of hand-offs. Default: none.",
            show_default=False,
        ),
    ] = None,
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
    from bench.instruments.hooked.hook_file import HookFile
    from bench.instruments.record import InstrumentRecord
    from bench.instruments.transfer import TransferPlan
    from bench.instruments.transfer_tables import hooks_sheet, parts_sheet, transfer_sheet

    if output is not None and hook_records is not None:
        options.refuse_overwriting(output, hook_records)
    targets = options.chosen_targets(fleet, overrides, urls)
    size = options.kv_bytes_of(kv_bytes_per_token, targets)
    plan = TransferPlan(
        tokens=tuple(integers(tokens, "--tokens", least=128)),
        concurrent=tuple(integers(concurrent, "--concurrent", least=1)),
        background=tuple(integers(background, "--background", least=0)),
        background_kind=background_kind,
        background_tokens=background_tokens,
        repeats=repeats,
        give_up_s=give_up_s,
    )
    prompts = options.prompts_of(token_low, token_high, seed)
    record = InstrumentRecord(
        instrument="transfer", hardware=hardware, fleet=targets.fleet, seed=seed, nonce=prompts.nonce, plan=plan
    )
    pair = _pair(targets, source, target, from_bootstrap, connector)
    record.engines, rows = options.measured(
        _measure(
            targets,
            pair,
            plan,
            prompts,
            size,
            model,
            options.api_key_from(api_key_env),
            timeout_s,
            None if hook_records is None else HookFile(hook_records),
            record.warnings,
        )
    )
    record.rows = rows
    unrecorded = sum(row.stages is None for row in rows)
    if hook_records is not None and unrecorded:
        record.warnings.append(
            f"{unrecorded} of {len(rows)} hand-offs lack records in {hook_records}: do both engines have hooks?"
        )
    different = sum(not row.same_text for row in rows)
    if different:
        record.warnings.append(f"{different} of {len(rows)} hand-offs: D's text is not P's")
    options.written(output, record)
    if figures is not None:
        from bench.instruments.figures import draw_transfers

        draw_transfers(rows, folder(figures))
    sheets = [transfer_sheet(rows, record.warnings), parts_sheet(rows) if hook_records is None else hooks_sheet(rows)]
    show(record, sheets, as_json=as_json, as_markdown=as_markdown)


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
    hooks: HookFile | None,
    failures: list[str],
) -> tuple[list[EngineNote], list[TransferRow]]:
    from bench.instruments.engine import refuse_busy
    from bench.instruments.targets import notes_of, opened
    from bench.instruments.transfer import measure_transfers

    async with opened(pair, model or targets.model, api_key, timeout_s) as engines:
        await refuse_busy(engines)
        if hooks is not None:
            hooks.read()  # an engine with hooks has made the file when it started
        notes = await notes_of(engines, targets)
        source, target = engines
        longest = await source.max_model_len()
        plan.background_output = options.fitting(plan.background_output, plan.background_tokens, longest)
        rows = await measure_transfers(source, target, plan, prompts, kv_bytes_per_token, options.progress, failures)
        if hooks is not None:
            found = await hooks.of([row.transfer_id for row in rows if row.transfer_id is not None])
            for row in rows:
                row.stages = found.complete.get(row.transfer_id or "")
        return notes, rows
