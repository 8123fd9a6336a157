"""``warmroute measure overhead``: the cost of loading a KV connector, and of having used it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bench.analysis.output import Json, Markdown, show, stop
from bench.analysis.words import integers
from bench.instruments.commands import options
from bench.instruments.commands.hooks import VARIABLE

if TYPE_CHECKING:
    from bench.instruments.engine import MeasuredEngine
    from bench.instruments.overhead import ConnectorArm, OverheadPlan, OverheadRow
    from bench.instruments.prompts import Prompts
    from bench.instruments.record import InstrumentRecord
    from launch.fleet.file import FleetFile

HOOK_RECORDS = "hook_records.jsonl"


def overhead(
    fleet: Annotated[Path, typer.Argument(metavar="FLEET", help="Fleet file, or a shipped one's name. Not running.")],
    overrides: options.Overrides = None,
    arms: Annotated[
        str,
        typer.Option(
            help="Arms, comma-separated: none (no connector), idle, used (after hand-offs), hooked (used, with hooks)."
        ),
    ] = "none,idle,used",
    prefill_tokens: Annotated[str, typer.Option(help="Prompt lengths, tokens, comma-separated.")] = "1024,8192",
    streams: options.Streams = "1,8",
    context_tokens: options.ContextTokens = 1_024,
    hand_off_tokens: Annotated[
        int, typer.Option(min=128, help="Prompt of a hand-off in arms used and hooked, tokens.")
    ] = 2_048,
    hand_offs: Annotated[int, typer.Option(min=2, help="Hand-offs of a start in these arms.")] = 5,
    starts: Annotated[int, typer.Option(min=1, help="Starts of every arm.")] = 3,
    run_dir: Annotated[Path, typer.Option(help="Folder for the engines' logs, one each start.")] = Path(
        "runs/overhead"
    ),
    token_low: options.TokenLow = 1_000,
    token_high: options.TokenHigh = 100_000,
    timeout_s: options.TimeoutS = 600.0,
    seed: options.Seed = 0,
    hardware: options.Hardware = "",
    output: options.Output = None,
    as_json: Json = False,
    as_markdown: Markdown = False,
) -> None:
    """Overhead of the KV connector: TTFT, TPOT, KV pool, start time without it, with it, after its use.

    Starts and stops the engines itself, every arm afresh, the arms in turns.
    """
    from bench.instruments.overhead import ConnectorArm, OverheadPlan, overhead_sheet
    from bench.instruments.record import InstrumentRecord
    from bench.instruments.steps import StepsPlan
    from launch.fleet.file import FleetError, find_fleet, load_fleet

    try:
        path = find_fleet(fleet)
        chosen = tuple(ConnectorArm(word.strip()) for word in arms.split(",") if word.strip())
        base = load_fleet(path, overrides or ())
        files = {arm: load_fleet(path, [*(overrides or ()), *_changes(arm, base.kind, run_dir)]) for arm in chosen}
    except FleetError as error:
        stop(error)
    except ValueError:
        stop(f"--arms {arms!r}: choose among {', '.join(ConnectorArm)}")
    if not chosen:
        stop("--arms: give at least one arm")
    plan = OverheadPlan(
        arms=chosen,
        repeats=starts,
        steps=StepsPlan(
            prefills=tuple((tokens, 0) for tokens in integers(prefill_tokens, "--prefill-tokens", least=2)),
            decodes=tuple((count, context_tokens) for count in integers(streams, "--streams", least=1)),
        ),
        hand_off_tokens=hand_off_tokens,
        hand_offs=hand_offs,
    )
    prompts = options.prompts_of(token_low, token_high, seed)
    record = InstrumentRecord(
        instrument="overhead", hardware=hardware, fleet=path.stem, seed=seed, nonce=prompts.nonce, plan=plan
    )
    rows = options.measured(_measure(files, plan, prompts, run_dir, timeout_s, record, output))
    show(record, [overhead_sheet(rows)], as_json=as_json, as_markdown=as_markdown)


def _changes(arm: ConnectorArm, kind: str, run_dir: Path) -> list[str]:
    """Overrides of the fleet file in one arm."""
    if arm.value == "hooked":
        return [f"env.{VARIABLE}={(run_dir / HOOK_RECORDS).absolute()}"]
    if arm.value != "none":
        return []
    settings = ["role=none", "proxy.offload={planner: never}"]
    return [*settings, "vllm.transfer={}"] if kind == "vllm" else settings


async def _measure(
    files: dict[ConnectorArm, FleetFile],
    plan: OverheadPlan,
    prompts: Prompts,
    run_dir: Path,
    timeout_s: float,
    record: InstrumentRecord,
    output: Path | None,
) -> list[OverheadRow]:
    from bench.instruments.engine import InstrumentError
    from bench.instruments.hooked.hook_file import HookFile
    from bench.instruments.overhead import ConnectorArm, measure_overhead
    from bench.instruments.targets import fleet_targets, notes_of, opened
    from launch.run.processes import StartError
    from launch.run.supervisor import Fleet

    hooks = HookFile(run_dir / HOOK_RECORDS)

    @asynccontextmanager
    async def start(arm: ConnectorArm, number: int) -> AsyncIterator[list[MeasuredEngine]]:
        file = files[arm]
        targets = fleet_targets(file, record.fleet)
        try:
            async with (
                Fleet(file, run_dir / f"{number}-{arm.value}", with_proxy=False),
                opened(targets.engines, targets.model, None, timeout_s) as engines,
            ):
                record.engines = record.engines or await notes_of(engines, targets)
                yield list(engines)
        except StartError as error:
            raise InstrumentError(f"arm {arm.value}: {error}") from error

    rows: list[OverheadRow] = []
    record.rows = rows
    async for row in measure_overhead(plan, start, prompts, options.progress):
        if row.arm is ConnectorArm.HOOKED and len(hooks.read().complete) < plan.hand_offs:
            raise InstrumentError(f"arm hooked: {hooks.path} lacks hand-offs; apply the hooks (`measure hooks apply`)")
        rows.append(row)
        options.written(output, record)  # an arm takes minutes: what is measured is kept if a later one fails
    return rows
