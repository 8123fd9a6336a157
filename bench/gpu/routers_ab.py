"""Routers head to head on the same running engines: the same trace, caches proven empty before each run.

Arms are warmroute's policies, vLLM Router's (``vllm:``) and those of SGLang's gateway (``sglang:``, text prompts only),
each with its documented settings. They rotate over the repeats; every finished run is one small file, and a run whose
file exists is not made again, so that a comparison can take several sessions on a machine::

    MODEL=DIR LOAD_FORMAT=dummy bench/gpu/small_engines.sh fleet
    python -m bench.gpu.routers_ab run TRACE --config fleet/proxy.yaml -o DIR --load 1 --load 1.5 --plan
    python -m bench.gpu.routers_ab run TRACE --config fleet/proxy.yaml -o DIR --load 1 --load 1.5 --budget-s 1500
    python -m bench.gpu.routers_ab table DIR

Needs warmroute with its extra ``lab`` and, for the peers, vllm-router 0.1.17 and sglang-router 0.3.2:
``python -m bench.data_plane.peers``, then ``--peer-python .venv-peers/bin/python``; or a folder of unpacked wheels of
both with orjson, setproctitle, fastapi, uvicorn and aiohttp, then ``--peer-path FOLDER``. docs/head-to-head.md.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import uvloop
import yaml

from bench.routers.arms import RouterArm, chosen_arms
from bench.routers.engines import EngineSetError
from bench.routers.launches import PeerEnvironment, RouterLaunchError, check_arm
from bench.routers.measure import RoutersSetup
from bench.routers.plan import estimates_of, order_of, plan_lines
from bench.routers.records import RouterRecordError, RoutersConditions, read_records
from bench.routers.session import kept, run_all, spans
from bench.routers.short_steps import step_lines
from bench.routers.slowness import slowness_lines
from bench.routers.table import lines_of
from launch.hardware.gpus import read_inventory
from replayer.records.classes import PlannedClass
from replayer.traces.loading import load_trace
from replayer.traces.shorten import shortened
from replayer.traces.trace import TraceError
from warmroute_yaml import load_yaml

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)

EXIT_INTERRUPTED = 130
TOKEN_RANGES = {"tokens": (1000, 100_000), "text": (0, 105)}
"""Ids that prompts are made of: in text below 105, so that a token of the trace is a word of two letters, which common
tokenizers keep as one or two tokens."""


class ComparedPrompts(StrEnum):
    """Form of the prompts, the same for all arms of a comparison."""

    TOKENS = "tokens"
    TEXT = "text"


@app.command()
def run(
    trace: Annotated[Path, typer.Argument(help="Trace of any known format.")],
    config: Annotated[Path, typer.Option(help="Settings of a warmroute proxy, with the engines as its instances.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the records.")],
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="[PRODUCT:]POLICY[,KEY=VALUE...][@ENGINES]. Repeatable. Default: the core of the comparison."
        ),
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FILE: settings of a proxy in front of as many other engines, for arms that end in @NAME. "
            "Repeatable."
        ),
    ] = None,
    load: Annotated[
        list[float] | None, typer.Option(help="Sessions arrive this many times faster. Repeatable. Default: 1.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every arm is run.")] = 3,
    first_repeat: Annotated[int, typer.Option(min=0, help="Number of the first repeat.")] = 0,
    prompt_mode: Annotated[
        ComparedPrompts, typer.Option(help="text: needed for SGLang's gateway, and for all arms beside it.")
    ] = ComparedPrompts.TOKENS,
    think_speed: Annotated[float, typer.Option(help="Think times pass this many times faster.")] = 1.0,
    idle_gap_cap_s: Annotated[float, typer.Option(min=0, help="Longest think time, seconds.")] = 10.0,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many requests.")] = None,
    length_scale: Annotated[float, typer.Option(min=0, help="Multiplies prompt lengths.")] = 1.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Timeout of one request in seconds.")] = 600.0,
    arm_limit_s: Annotated[
        float, typer.Option(min=1, help="A replay is cut off after this many seconds; what has ended counts.")
    ] = 300.0,
    seed: Annotated[int, typer.Option(help="Seed of the tokens that hash ids stand for.")] = 0,
    token_low: Annotated[int | None, typer.Option(min=0, help="Smallest token id in prompts.")] = None,
    token_high: Annotated[int | None, typer.Option(min=1, help="One more than the largest token id.")] = None,
    engine_speed: Annotated[float, typer.Option(help="Simulated engines: engine seconds per wall second.")] = 1.0,
    peer_python: Annotated[
        str | None, typer.Option(help="Python that has vLLM Router and SGLang's gateway. Default: this one.")
    ] = None,
    peer_path: Annotated[
        Path | None, typer.Option(help="Folder of their unpacked wheels, put before PYTHONPATH for them.")
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Hardware of the engines, for the table. Default: this machine's GPUs.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print the runs in order with expected seconds, and end.")
    ] = False,
    budget_s: Annotated[
        float | None, typer.Option(min=1, help="End within this many seconds; run again to continue.")
    ] = None,
) -> None:
    """Make every run that is missing. Exit status 1 if one failed or was not started, 130 if interrupted."""
    low, high = TOKEN_RANGES[prompt_mode.value]
    try:
        arms = chosen_arms(arm or [], prompt_mode.value)
        whole = load_trace(trace)
        base = _settings(config)
        setup = RoutersSetup(
            trace=whole if length_scale == 1.0 else shortened(whole, length_scale),
            base=base,
            others=_others(engines or [], base, arms),
            conditions=RoutersConditions(
                trace_sha256=whole.sha256,
                prompt_mode=prompt_mode.value,
                think_speed=think_speed,
                idle_gap_cap_s=idle_gap_cap_s,
                request_limit=limit,
                length_scale=length_scale,
                seed=seed,
                token_low=low if token_low is None else token_low,
                token_high=high if token_high is None else token_high,
                engine_speed=engine_speed,
                engines=len(base["instances"]),
            ),
            peers=PeerEnvironment(peer_python or sys.executable, peer_path),
            timeout_s=timeout_s,
            limit_s=arm_limit_s,
            hardware=read_inventory().kinds() if hardware is None else hardware,
            output=output,
        )
        for each in arms:
            check_arm(each, setup.on(each.engines).base)
        loads = load or [1.0]
        runs = list(order_of(arms, loads, range(first_repeat, first_repeat + repeats), prompt_mode.value))
        records = kept(setup)
        spans_s = spans(setup, loads)
    except (TraceError, RouterLaunchError, RouterRecordError, ValueError, OSError, yaml.YAMLError) as error:
        _stop(error)
    if plan:
        estimates_s = estimates_of(runs, [record.length for record in records.values()], spans_s)
        for line in plan_lines(runs, estimates_s, frozenset(records), budget_s):
            typer.echo(line)
        return
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            missing = runner.run(run_all(runs, setup, budget_s, typer.echo))
    except (EngineSetError, RouterRecordError) as error:
        _stop(error)
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo("interrupted; the same command continues with the run that was in progress", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if missing:
        typer.echo(f"not run: {', '.join(missing)}")
    raise typer.Exit(1 if missing else 0)


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="Folder of records.")],
    base: Annotated[str, typer.Option(help="The arm that others are compared with.")] = "warm",
    skip_first_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Leave out what was planned in the first seconds, such as warming. Default: a tenth of the tokens.",
        ),
    ] = None,
    only_class: Annotated[
        PlannedClass | None,
        typer.Option(
            "--class",
            case_sensitive=False,
            help="Show and compare requests of one class only, by their new tokens in the trace: "
            "WARM below 5,000, HEAVY from 20,000, MEDIUM between. Default: all.",
        ),
    ] = None,
    only_repeats: Annotated[
        list[int] | None,
        typer.Option(
            "--repeat",
            min=0,
            help="Show only this run of each arm, numbered from 0 as in the files' names. Repeatable. Default: all.",
        ),
    ] = None,
) -> None:
    """Print the comparison as Markdown: what was measured, and differences with paired 95 % intervals."""
    try:
        records = list(read_records(folder).values())
        if only_repeats:
            made = sorted({each.repeat for each in records})
            if absent := sorted(set(only_repeats) - set(made)):
                raise RouterRecordError(f"{folder}: no run {_listed(absent)}; there are {_listed(made)}")
            records = [each for each in records if each.repeat in only_repeats]
        for line in lines_of(records, base, skip_first_s, only_class):
            typer.echo(line)
    except RouterRecordError as error:
        _stop(error)


@app.command()
def steps(folder: Annotated[Path, typer.Argument(help="Folder of records.")]) -> None:
    """Print by how much a step with a short prefill took longer in each run, learned as ``warm`` learns it."""
    try:
        records = list(read_records(folder).values())
        if not records:
            raise RouterRecordError(f"{folder}: no records")
        for line in step_lines(records):
            typer.echo(line)
    except RouterRecordError as error:
        _stop(error)


@app.command()
def slowness(folder: Annotated[Path, typer.Argument(help="Folder of records.")]) -> None:
    """Print how slow each engine was in each run, learned as a proxy learns it."""
    try:
        records = list(read_records(folder).values())
        if not records:
            raise RouterRecordError(f"{folder}: no records")
        for line in slowness_lines(records):
            typer.echo(line)
    except RouterRecordError as error:
        _stop(error)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _settings(config: Path) -> dict[str, Any]:
    settings = load_yaml(config.read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or not settings.get("instances"):
        raise ValueError(f"{config}: no instances; give the settings of a proxy in front of the engines")
    instances = [{"url": each} if isinstance(each, str) else each for each in settings["instances"]]
    return {**settings, "instances": instances}


def _others(texts: Sequence[str], base: dict[str, Any], arms: Sequence[RouterArm]) -> dict[str, dict[str, Any]]:
    """Settings of every other set of engines by its name.

    Raises:
        ValueError: one is not NAME=FILE, named twice, of another size, or the one of an arm is missing.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path or name in found:
            raise ValueError(f"--engines {text}: give NAME=FILE, each name once")
        found[name] = _settings(Path(path))
        count, others = len(base["instances"]), len(found[name]["instances"])
        if others != count:
            raise ValueError(f"--engines {text}: {others} instances, but {count} in --config: arms need as many")
    for arm in arms:
        if arm.engines and arm.engines not in found:
            raise ValueError(f"arm {arm.label}: give its engines with --engines {arm.engines}=FILE")
    return found


def _stop(error: object) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(2)


if __name__ == "__main__":
    app()
