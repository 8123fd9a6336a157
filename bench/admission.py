"""Admission rules against never holding, in the cells of the tournament, in virtual time.

For every cell and seed the same requests run once without holding and once with each rule. E2E and session completion
count from when a turn was *due*, so waiting at the router is included. Intervals are paired bootstraps over sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer

from bench.cells.arenas import chosen_traces, prepared
from bench.cells.options import Fleets, Jobs, Loads, Pools, Seeds, TraceDir, Traces
from bench.cells.ratios import BEYOND, RESAMPLES, Interval, four_digits, geometric_mean, interval, with_interval
from bench.figures.machine import machine
from bench.figures.result_file import writable
from bench.tournament.arena import FAILED_S, PreparedCell
from bench.tournament.results import GridCell
from bench.tournament.settings import TournamentError
from policies.admission.base import MAX_HOLD_S
from policies.registry import PolicyParameterError, UnknownPolicyError, make_admission, make_routing
from replayer.compare.statistics.bootstrap import FloatArray
from sim.offline.setup import parsed_params
from sim.offline.simulate import SimResult

SCHEMA = 1


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One run: means over judged turns and sessions, in seconds from when they were due."""

    e2e_mean_s: float
    e2e_p50_s: float
    ttft_mean_s: float
    completion_mean_s: float
    """From a session's first judged turn being due to the end of its last."""
    hit_rate: float
    held: int
    """Judged turns that were held."""
    longest_hold_s: float


class RuleAgainstNever(msgspec.Struct, frozen=True, kw_only=True):
    """A rule against never holding in one cell; ratios below 1: the rule is better."""

    rule: str
    figures: RunFigures
    e2e: Interval
    """Ratio of mean E2E."""
    completion: Interval
    """Ratio of mean session completion."""


class AdmissionCell(msgspec.Struct, frozen=True, kw_only=True):
    """All rules in one cell with one seed."""

    cell: GridCell
    seed: int
    sessions: int
    turns: int
    never_hold: RunFigures
    rules: list[RuleAgainstNever]


class CellWork(msgspec.Struct, frozen=True, kw_only=True):
    """One cell to run, as plain data for another process."""

    folder: str
    cell: GridCell
    seed: int
    policy: str
    rules: list[tuple[str, dict[str, Any]]]
    max_hold_s: float


class _Run(NamedTuple):
    figures: RunFigures
    e2e: FloatArray
    """Sum over the judged turns of each session, seconds."""
    turns: FloatArray
    completion: FloatArray


def report(work: CellWork) -> AdmissionCell:
    """Run one cell with all rules.

    Raises:
        TournamentError: no such trace, or no request to judge.
    """
    stage = prepared(work.folder, work.cell, work.seed)
    stage.options = replace(stage.options, max_hold_s=work.max_hold_s)
    base = _run(stage, stage.simulated(make_routing(work.policy)))
    rules = []
    for name, params in work.rules:
        run = _run(stage, stage.simulated(make_routing(work.policy), make_admission(name, params)))
        rules.append(
            RuleAgainstNever(
                rule=_label(name, params),
                figures=run.figures,
                e2e=_ratio(run.e2e, base.e2e, work.seed),
                completion=_ratio(run.completion, base.completion, work.seed),
            )
        )
    return AdmissionCell(
        cell=work.cell,
        seed=work.seed,
        sessions=len(base.turns),
        turns=int(base.turns.sum()),
        never_hold=base.figures,
        rules=rules,
    )


def _label(name: str, params: dict[str, Any]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in params.items())])


def _run(stage: PreparedCell, result: SimResult) -> _Run:
    judged = sorted(
        (each for each in result.run.records if each.chat_id in stage.workload.judged),
        key=lambda each: (each.session_id, each.chat_id),
    )
    names = {name: number for number, name in enumerate(dict.fromkeys(each.session_id for each in judged))}
    session = np.array([names[each.session_id] for each in judged])
    due = np.array([each.scheduled_s for each in judged])
    e2e = np.array([FAILED_S if each.e2e_scheduled_s is None else each.e2e_scheduled_s for each in judged])
    ttft = np.array([FAILED_S if each.ttft_scheduled_s is None else each.ttft_scheduled_s for each in judged])
    waited = np.array([result.held_s.get(each.request_id, 0.0) for each in judged])
    first, last = np.full(len(names), np.inf), np.full(len(names), -np.inf)
    np.minimum.at(first, session, due)
    np.maximum.at(last, session, due + e2e)
    prompt = sum(each.prompt_tokens or 0 for each in judged)
    figures = RunFigures(
        e2e_mean_s=four_digits(e2e.mean()),
        e2e_p50_s=four_digits(np.median(e2e)),
        ttft_mean_s=four_digits(ttft.mean()),
        completion_mean_s=four_digits((last - first).mean()),
        hit_rate=four_digits(sum(each.cached_tokens or 0 for each in judged) / prompt) if prompt else 0.0,
        held=int((waited > 0).sum()),
        longest_hold_s=four_digits(waited.max()),
    )
    return _Run(
        figures, np.bincount(session, e2e).astype(np.float64), np.bincount(session).astype(np.float64), last - first
    )


def _ratio(candidate: FloatArray, base: FloatArray, seed: int) -> Interval:
    """Ratio of two means over the same sessions, with its bootstrap interval."""
    draw = np.random.default_rng(seed).integers(0, base.size, size=(RESAMPLES, base.size))
    return interval(candidate.sum() / base.sum(), candidate[draw].sum(axis=1) / base[draw].sum(axis=1))


def lines_of(cells: Sequence[AdmissionCell]) -> Iterator[str]:
    """A Markdown table, a row per cell and rule."""
    yield "| trace | load | pool | fleet | seed | rule | mean E2E | session completion | hit rate | held | longest |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |"
    for each in cells:
        cell = each.cell
        for rule in each.rules:
            hits = f"{each.never_hold.hit_rate:.2f} → {rule.figures.hit_rate:.2f}"
            yield (
                f"| {cell.trace} | {cell.load:g} | {cell.pool:g} | {cell.fleet} | {each.seed} | {rule.rule} "
                f"| {with_interval(rule.e2e)} | {with_interval(rule.completion)} | {hits} | {rule.figures.held} "
                f"| {rule.figures.longest_hold_s:.0f} s |"
            )


def summary_of(cells: Sequence[AdmissionCell]) -> list[str]:
    """A Markdown table, a row per trace, pool and rule: geometric means and extremes over loads, fleets and seeds."""
    lines = [
        "| trace | pool | rule | runs | held in | mean E2E: mean, min, max | session completion: mean, min, max |",
        "| --- | ---: | --- | ---: | ---: | --- | --- |",
    ]
    groups: dict[tuple[str, float, str], list[RuleAgainstNever]] = {}
    for each in cells:
        for rule in each.rules:
            groups.setdefault((each.cell.trace, each.cell.pool, rule.rule), []).append(rule)
    for (trace, pool, label), found in groups.items():
        holding = sum(each.figures.held > 0 for each in found)
        figures = [_spread([each.e2e[0] for each in found]), _spread([each.completion[0] for each in found])]
        lines.append(f"| {trace} | {pool:g} | {label} | {len(found)} | {holding} | {' | '.join(figures)} |")
    return lines


def _spread(ratios: Sequence[float]) -> str:
    return f"{geometric_mean(ratios)}, {min(ratios):.2f}, {max(ratios):.2f}"


def harmed(cells: Sequence[AdmissionCell]) -> list[str]:
    """Cells in which a rule is more than 3 % worse beyond its interval."""
    return [
        f"{each.cell}, seed {each.seed}, {rule.rule}: {name} {with_interval(found)}"
        for each in cells
        for rule in each.rules
        for name, found in (("mean E2E", rule.e2e), ("session completion", rule.completion))
        if found[1] > BEYOND
    ]


def main(
    trace_dir: TraceDir,
    trace: Traces = None,
    load: Loads = None,
    pool: Pools = None,
    fleet: Fleets = None,
    seed: Seeds = None,
    rule: Annotated[str, typer.Option(help="Admission rule.")] = "working_set",
    param: Annotated[list[str] | None, typer.Option(help="KEY=VALUE: parameter of the rule. Repeatable.")] = None,
    cap: Annotated[list[int] | None, typer.Option(help="Also session_cap with this many sessions. Repeatable.")] = None,
    policy: Annotated[str, typer.Option(help="Routing policy.")] = "warm",
    max_hold_s: Annotated[float, typer.Option(help="Most seconds for which a request is held.")] = MAX_HOLD_S,
    jobs: Jobs = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", callback=writable, help="Also write all figures to this file.")
    ] = None,
) -> None:
    """Compare an admission rule with never holding, in virtual time. Exits with 1 if a cell is harmed."""
    try:
        rules = [(rule, parsed_params(param or [])), *(("session_cap", {"sessions": each}) for each in cap or [])]
        for name, params in rules:
            make_admission(name, params)
        traces = chosen_traces(trace_dir, trace or [])
    except (TournamentError, UnknownPolicyError, PolicyParameterError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    works = [
        CellWork(
            folder=str(trace_dir),
            cell=GridCell(trace=name, load=share, pool=hot_sets, fleet=instances),
            seed=number,
            policy=policy,
            rules=rules,
            max_hold_s=max_hold_s,
        )
        for name in traces
        for hot_sets in pool or [0.25, 0.5, 1.0, 4.0]
        for share in load or [0.5, 0.8, 1.0, 1.2, 1.5]
        for instances in fleet or [8]
        for number in seed or [1]
    ]
    with ProcessPoolExecutor(min(jobs, len(works)), mp_context=get_context("spawn")) as pool_of_processes:
        cells = list(pool_of_processes.map(report, works))
    for line in [*lines_of(cells), "", *summary_of(cells)]:
        typer.echo(line)
    found = harmed(cells)
    typer.echo(f"\n{len(cells)} cells, {len(found)} figures more than 3 % worse beyond their interval")
    for line in found:
        typer.echo(line)
    if output is not None:
        document = {"kind": "admission", "schema": SCHEMA, "machine": machine(), "policy": policy, "cells": cells}
        output.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    raise typer.Exit(1 if found else 0)


if __name__ == "__main__":
    typer.run(main)
