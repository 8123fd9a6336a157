"""All runs of a comparison in their order: those that are kept already are skipped, the others fit a budget."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

from bench.routers.engines import EngineSetError, ServedModel
from bench.routers.launches import RouterLaunchError
from bench.routers.measure import BudgetSpentError, RoutersSetup, measured, preflight
from bench.routers.plan import RoutersRun, estimates_of
from bench.routers.records import RouterRecord, read_records, refuse_others, totals_of, write_record

Report = Callable[[str], None]
_END_S = 5.0
"""Of a budget, left to end the router of a run that is late."""


def kept(setup: RoutersSetup) -> dict[str, RouterRecord]:
    """Records made so far, by name. Raises RouterRecordError if one was made under other conditions."""
    records = read_records(setup.output)
    refuse_others(records, setup.conditions)
    return records


def spans(setup: RoutersSetup, loads: Sequence[float]) -> dict[float, float]:
    """Expected wall seconds of a replay at each load, by the plan and the limit of a run."""
    return {load: min(setup.span_s(load), setup.limit_s) for load in loads}


async def run_all(runs: Sequence[RoutersRun], setup: RoutersSetup, budget_s: float | None, report: Report) -> list[str]:
    """Make every run that is not kept, in order, and keep its record. SIGTERM cancels it as Ctrl-C does.

    Args:
        runs: in order.
        setup: what they have in common.
        budget_s: wall seconds for all; a run that is not expected to fit is not started.
        report: takes a line for each run.

    Returns:
        Names of the runs that are missing at the end.

    Raises:
        EngineSetError: the engines cannot be used at all.
        RouterRecordError: a kept record was made under other conditions.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await _run_all(runs, setup, budget_s, report)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _run_all(
    runs: Sequence[RoutersRun], setup: RoutersSetup, budget_s: float | None, report: Report
) -> list[str]:
    began_s = time.monotonic()
    records = kept(setup)
    spans_s = spans(setup, sorted({run.load for run in runs}))
    served: dict[str, ServedModel] = {}
    for name in dict.fromkeys(run.arm.engines for run in runs):
        chosen = setup.on(name)
        served[name], prompts = await preflight(chosen)
        shown = f"{name}: " if name else ""
        report(f"{shown}{len(chosen.engines)} engines serve {served[name].name}; {prompts}")
        if any(run.arm.policy == "joint" for run in runs if run.arm.engines == name) and not chosen.hands_over:
            report(f"note: {shown}no instance has a role: joint cannot hand over")
    missing: list[str] = []
    for run in runs:
        if run.name in records:
            continue
        left_s = None if budget_s is None else budget_s - (time.monotonic() - began_s)
        [estimate_s] = estimates_of([run], [record.length for record in records.values()], spans_s)
        if left_s is not None and estimate_s + _END_S > left_s:
            report(f"{run.name}: not started, {estimate_s:.0f} s expected, {max(left_s, 0.0):.0f} s left")
            missing.append(run.name)
            continue
        try:
            engines = run.arm.engines
            record = await measured(
                run, setup.on(engines), served[engines], None if left_s is None else left_s - _END_S
            )
        except (EngineSetError, RouterLaunchError, BudgetSpentError) as error:
            report(f"error: {run.name}: {error}")
            missing.append(run.name)
            continue
        write_record(record, setup.output, run.name)
        records[run.name] = record
        report(f"{time.strftime('%H:%M:%S')} {run.name}: {_outcome(record)}")
    return missing


def _outcome(record: RouterRecord) -> str:
    good = [each.record() for each in record.requests if each.error is None]
    e2e_s = sum(each.e2e_scheduled_s or 0.0 for each in good) / max(1, len(good))
    cut = ", cut off" if record.cut else ""
    return (
        f"{len(good)}/{record.planned} ok{cut}, {record.total_s:.0f} s, mean E2E {e2e_s:.2f} s, "
        f"hit rate {totals_of(record.counters).hit_rate:.3f}"
    )
