"""The demonstration: one trace, one fresh simulated fleet for each policy, one matrix of verdicts, one page."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from launch.arm import ArmResult, run_arm
from launch.demo.settings import DemoArmSettings, DemoSettings
from replayer.compare.runs import Comparison
from replayer.compare.tables import print_verdict
from replayer.records.counted import counted
from replayer.records.runs import RequestRecord
from replayer.replay.plan import Plan, PlanOptions
from replayer.replay.replay import ReplayOptions
from replayer.report.page import Arm, Extras, against_leader, compare_all, render, write_report
from replayer.traces.formats import bailian
from replayer.traces.loading import load
from replayer.traces.synth import SynthOptions, synthesise
from replayer.traces.trace import Trace

TRACE_FILE = "trace.jsonl"
REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.json"


async def run_demo(settings: DemoSettings, run_dir: Path, base_port: int, console: Console) -> int:
    """Run every arm, compare, report; the exit status.

    Raises:
        StartError, StaleEngineError, ArmError: an arm could not be measured; what ran before it stays in ``run_dir``.
    """
    began = time.monotonic()
    trace = await asyncio.to_thread(make_trace, settings, run_dir / TRACE_FILE)
    engines = settings.fleet_of(settings.arms[0]).instances
    console.print(
        f"{counted(len(trace.requests), 'request')} of {counted(len(trace.sessions()), 'session')}; "
        f"{counted(engines, 'simulated engine')} running {settings.clock_scale:g} times faster than real time; "
        f"{len(settings.arms)} policies",
        soft_wrap=True,
    )
    results: list[ArmResult] = []
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for arm in settings.arms:
            previous = results[-1].proof.engine_ids if results else set()
            results.append(await _measure(arm, settings, trace, run_dir, base_port, previous, progress))
    page = run_dir / REPORT_FILE
    shown = [Arm(result.label, result.run, result.breakdown, result.warnings) for result in results]
    extras = Extras(trace=trace, pool_tokens=results[0].kv_capacity_tokens)
    comparisons, among_the_best = await asyncio.to_thread(_report, shown, settings, run_dir, extras)
    console.print(f"took {time.monotonic() - began:.0f} s\n")
    if comparisons:
        print_verdict(console, comparisons, among_the_best)
        console.print(Text(f"Every metric and fine print: the report, or {run_dir / COMPARISON_FILE}"), style="dim")
    for line in _warnings(shown):
        console.print(Text(line), style="red")
    console.print(Text(f"Open the report: {page}"), soft_wrap=True)
    console.print(Text("See a fleet at work in the dashboard: warmroute demo --ui"), soft_wrap=True)
    return 0


def _warnings(arms: list[Arm]) -> list[str]:
    """The first warning and how many arms have one; the report has them all."""
    warned = [(arm.label, warning) for arm in arms for warning in arm.warnings]
    if not warned:
        return []
    labels = list(dict.fromkeys(label for label, _ in warned))
    more = f" (and {len(warned) - 1} more, in the report)" if len(warned) > 1 else ""
    return [f"warning for {len(labels)} of {len(arms)} arms: {warned[0][0]}: {warned[0][1]}{more}"]


async def _measure(
    arm: DemoArmSettings,
    settings: DemoSettings,
    trace: Trace,
    run_dir: Path,
    base_port: int,
    previous_engine_ids: set[str],
    progress: Progress,
) -> ArmResult:
    task: TaskID = progress.add_task(escape(arm.name), total=len(trace.requests))
    failed = 0

    def on_phase(phase: str) -> None:
        progress.update(task, description=f"{escape(arm.name)}: {phase}")

    def on_start(plan: Plan, recorded: int) -> None:
        progress.update(task, total=plan.requests, completed=recorded)

    def on_record(record: RequestRecord) -> None:
        nonlocal failed
        failed += not record.ok
        suffix = f", {failed} failed" if failed else ""
        progress.update(task, advance=1, description=f"{escape(arm.name)}: replaying{suffix}")

    result = await run_arm(
        arm.name,
        settings.fleet_of(arm, base_port),
        trace,
        replay_options(settings),
        run_dir / arm.name,
        previous_engine_ids=previous_engine_ids,
        on_phase=on_phase,
        on_start=on_start,
        on_record=on_record,
    )
    suffix = f", {failed} failed" if failed else ""
    progress.update(task, description=f"{escape(arm.name)}: done, processors {result.processors.mean:.0%}{suffix}")
    return result


def replay_options(settings: DemoSettings) -> ReplayOptions:
    """The replay's settings; endpoint, model and label belong to the arm."""
    load = settings.load
    return ReplayOptions(
        plan=PlanOptions(time_scale=load.time_scale, think_scale=load.think_scale),
        clock_scale=settings.clock_scale,
        max_inflight_sessions=load.max_inflight_sessions,
        timeout_s=load.timeout_s,
        seed=load.seed,
    )


def make_trace(settings: DemoSettings, path: Path) -> Trace:
    """Generate the trace and keep it beside the results, so that any arm can be replayed again."""
    chosen = settings.trace
    options = SynthOptions(
        requests=chosen.requests,
        seed=chosen.seed,
        rate_per_s=chosen.rate_per_s,
        length_scale=chosen.length_scale,
        block_tokens=settings.fleet_of(settings.arms[0]).sim.block_size,
    )
    bailian.write(path, synthesise(options))
    return load(path)


def _report(
    arms: list[Arm], settings: DemoSettings, run_dir: Path, extras: Extras
) -> tuple[list[Comparison], list[Comparison]]:
    comparisons, refusals = compare_all(arms, resamples=settings.resamples)
    among_the_best = against_leader(arms, resamples=settings.resamples)
    remarks = [
        *refusals,
        f"Engines are simulated from the hardware profile '{settings.fleet.get('sim', {}).get('profile', 'h20')}': "
        "the page compares routing policies on that model of an engine, it does not measure hardware.",
        "Every arm started from engines that proved fresh; the proofs are in fresh.json beside each run.",
    ]
    page = render(
        arms,
        comparisons,
        title="Routing policies compared",
        remarks=remarks,
        among_the_best=among_the_best,
        extras=extras,
    )
    write_report(run_dir / REPORT_FILE, page)
    encoded = msgspec.json.encode([comparison.as_json() for comparison in [*comparisons, *among_the_best]])
    (run_dir / COMPARISON_FILE).write_bytes(msgspec.json.format(encoded, indent=2) + b"\n")
    return comparisons, among_the_best
