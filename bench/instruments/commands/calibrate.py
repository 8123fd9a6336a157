"""``warmroute calibrate``: measure a fleet and write its hardware profile."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import typer

from bench.analysis.output import Sheet, show, stop
from bench.instruments.commands import options
from bench.instruments.commands.earlier import earlier_record, source_of

if TYPE_CHECKING:
    from bench.instruments.calibration import Calibrated
    from bench.instruments.facts import CalibratedEngine
    from bench.instruments.plans import EngineLimits
    from bench.instruments.prompts import Prompts
    from bench.instruments.record import InstrumentRecord
    from bench.instruments.targets import Targets
    from bench.instruments.transfer import TransferRow

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


def calibrate(
    fleet: options.FleetArgument = None,
    overrides: options.Overrides = None,
    urls: options.Urls = None,
    name: Annotated[str, typer.Option(help="Name of the profile.")] = "mine",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for NAME.yaml, NAME_points.yaml and NAME_record.json.")
    ] = Path("configs/hardware"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite files of that name.")] = False,
    records: Annotated[
        list[str] | None,
        typer.Option(
            "--record",
            metavar="[TRANSPORT=]PATH",
            help="Fit this earlier record, measure nothing. Repeatable: further ones replace parts of it.",
            show_default=False,
        ),
    ] = None,
    largest_tokens: Annotated[
        int, typer.Option(min=256, help="Longest prompt; a smaller one scales every size down, for small engines.")
    ] = 65_536,
    kv_bytes_per_token: options.KvBytesPerToken = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="The engines' token budget of a step. Default: the fleet file's, else 8192.", show_default=False
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="The engines' most running requests. Default: the fleet file's, else 256.", show_default=False
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            help="KV transport between the engines: nvlink, tcp, rdma, efa. Default: the fleet file's.",
            show_default=False,
        ),
    ] = None,
    transfers: Annotated[
        bool, typer.Option("--transfers/--no-transfers", help="Measure hand-offs, where the fleet has a pair for them.")
    ] = True,
    repeats: options.Repeats = 2,
    model: options.Model = None,
    api_key_env: options.ApiKeyEnv = None,
    token_low: options.TokenLow = 1_000,
    token_high: options.TokenHigh = 100_000,
    timeout_s: options.TimeoutS = 600.0,
    seed: options.Seed = 0,
    hardware: options.Hardware = "",
) -> None:
    """Measure a fleet for a few minutes and write its hardware profile.

    Prefills, decode steps and interference are measured on the first engine, transfers from it to the second. The
    profile times simulated engines (`simulate --profile`), and its constants are those that the proxy's cost models
    start from (`serve --hardware`). A fleet with requests is refused.

    With `--record` of an earlier calibration, further records of `measure interference` and of `measure transfer`
    replace its own rows; `--record tcp=PATH` adds transfers by another transport. All must be of the same hardware,
    model and engine version.
    """
    if not _NAME.fullmatch(name) or name.endswith("_points"):
        stop(f"--name {name!r}: lower-case letters, digits, dots, dashes and underscores, not ending in _points")
    files = [output / f"{name}.yaml", output / f"{name}_points.yaml", output / f"{name}_record.json"]
    sources = [source_of(text) for text in records or ()]
    there = [str(path) for path in files if path.exists() and path not in (each.path for each in sources)]
    if there and not force:
        stop(f"{', '.join(there)}: already there; give another --name, or --force")
    if sources:
        if fleet is not None or urls:
            stop("--record measures nothing: give no fleet file and no --url with it")
        record = earlier_record(sources, name)
        options.written(files[2], record)
        _fit(record, files)
        return
    targets = options.chosen_targets(fleet, overrides, urls)
    size = options.kv_bytes_of(kv_bytes_per_token, targets)
    wanted = _Wanted(
        name=name,
        kv_bytes_per_token=size,
        largest_tokens=largest_tokens,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        repeats=repeats,
        transport=_transport(targets, transport) if transfers else None,
    )
    prompts = options.prompts_of(token_low, token_high, seed)
    record = options.measured(
        _measure(targets, prompts, hardware, wanted, model, options.api_key_from(api_key_env), timeout_s)
    )
    options.written(files[2], record)  # before the fit: what was measured is not lost if that fails
    _fit(record, files)


def _fit(record: InstrumentRecord, files: list[Path]) -> None:
    """Fit a record, write its profile and points, and print the residuals."""
    try:
        from bench.instruments.calibration import fit_record, points_yaml
    except ModuleNotFoundError as error:
        stop(
            f"the fit needs {error.name}, which is not installed: `warmroute calibrate --record {files[2]}` where it is"
        )
    from sim.fit_report import profile_yaml

    try:
        found = fit_record(record)
    except msgspec.ValidationError as error:
        stop(f"not the record of a calibration: {error}")
    try:
        files[0].parent.mkdir(parents=True, exist_ok=True)
        files[0].write_text(profile_yaml(found.profile, "warmroute calibrate"), encoding="utf-8")
        files[1].write_text(points_yaml(found.points), encoding="utf-8")
    except OSError as error:
        stop(f"cannot write to {files[0].parent}: {error.strerror}; give another --output")
    show(record, _sheets(found), as_json=False, as_markdown=False)
    typer.echo(f"profile: {files[0]} (`warmroute serve --hardware {files[0]}`, `simulate --profile {files[0]}`)")


class _Wanted(NamedTuple):
    """Options that describe the engines and the extent of the measurement."""

    name: str
    kv_bytes_per_token: int
    largest_tokens: int
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    repeats: int
    transport: str | None
    """None: transfers are not measured."""


async def _measure(
    targets: Targets,
    prompts: Prompts,
    hardware: str,
    wanted: _Wanted,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
) -> InstrumentRecord:
    from bench.instruments.engine import refuse_busy
    from bench.instruments.interference import measure_interference
    from bench.instruments.plans import reduced
    from bench.instruments.record import InstrumentRecord
    from bench.instruments.steps import measure_decodes, measure_prefills
    from bench.instruments.targets import notes_of, opened
    from bench.instruments.transfer import measure_transfers

    record = InstrumentRecord(
        instrument="calibrate", hardware=hardware, fleet=targets.fleet, seed=prompts.seed, nonce=prompts.nonce
    )
    async with opened(targets.engines, model or targets.model, api_key, timeout_s) as engines:
        await refuse_busy(engines)
        record.engines = await notes_of(engines, targets)
        engine = engines[0]
        limits = _limits(targets, wanted, await engine.max_model_len(), record.engines[0].pool_tokens)
        plan = record.plan = reduced(limits, wanted.repeats)
        began_s = engine.now_s()
        prefills = await measure_prefills(engine, plan.steps, prompts, options.progress)
        decodes = await measure_decodes(engine, plan.steps, prompts, options.progress)
        rows = await measure_interference(engine, plan.interference, prompts, options.progress)
        moved: list[TransferRow] = []
        if wanted.transport is not None:
            target, size = engines[1], wanted.kv_bytes_per_token
            for transfers in (plan.transfer, plan.sharing):
                moved += await measure_transfers(
                    engine, target, transfers, prompts, size, options.progress, failures=record.warnings
                )
        record.rows = {"prefills": prefills, "decodes": decodes, "interference": rows, "transfers": moved}
        options.progress(f"measured in {engine.now_s() - began_s:.0f} s")
        record.facts = _facts(targets, wanted, limits, record)
        return record


def _transport(targets: Targets, given: str | None) -> str | None:
    """Transport between the first two engines; None where there is no pair that could hand over."""
    if len(targets.engines) < 2 or targets.engines[0].bootstrap_url is None:
        if given is not None:
            stop(
                "--transport: the fleet has no pair that hands over KV; give a fleet file of two engines with a KV role"
            )
        return None
    return given or targets.transport


def _limits(targets: Targets, wanted: _Wanted, reported: int | None, pool_tokens: int | None) -> EngineLimits:
    from bench.instruments.engine import InstrumentError
    from bench.instruments.plans import EngineLimits
    from bench.instruments.targets import VLLM_SEQUENCES

    if pool_tokens is None:
        raise InstrumentError("the engine does not report the size of its KV pool (vllm:cache_config_info)")
    return EngineLimits(
        max_model_len=reported or targets.max_model_len or pool_tokens,
        pool_tokens=pool_tokens,
        max_num_seqs=wanted.max_num_seqs or targets.max_num_seqs or VLLM_SEQUENCES,
        largest_tokens=wanted.largest_tokens,
    )


def _facts(targets: Targets, wanted: _Wanted, limits: EngineLimits, record: InstrumentRecord) -> CalibratedEngine:
    from bench.instruments.facts import CalibratedEngine
    from bench.instruments.targets import VLLM_BATCHED_TOKENS

    engine = record.engines[0]
    on = f" on {record.hardware}" if record.hardware else ""
    when = time.strftime("%Y-%m-%d", time.gmtime(record.started_unix_s))
    return CalibratedEngine(
        name=wanted.name,
        source=f"warmroute calibrate{on}: engine version {engine.version or 'unknown'}, model {engine.model}, {when}",
        pool_tokens=limits.pool_tokens,
        kv_bytes_per_token=wanted.kv_bytes_per_token,
        max_num_batched_tokens=wanted.max_num_batched_tokens or targets.max_num_batched_tokens or VLLM_BATCHED_TOKENS,
        max_num_seqs=limits.max_num_seqs,
        max_model_len=limits.max_model_len,
        expert_miss=targets.expert_miss,
        transport=wanted.transport,
    )


def _sheets(found: Calibrated) -> list[Sheet]:
    from sim.fit_report import by_kind, rows, summary

    columns = ("what", "point", "measured", "model", "error", "note")
    fit = found.fit
    notes = [summary(fit)]
    for kind, (count, middle, worst) in by_kind((*fit.residuals, *found.cost_residuals)).items():
        notes.append(f"{kind}: {count} points, median error {middle:.1%}, worst {worst:.1%}")
    everything = fit._replace(residuals=(*fit.residuals, *found.cost_residuals))
    return [Sheet(f"Fit of {found.profile.name}", columns, rows(everything), left=2, notes=notes)]
