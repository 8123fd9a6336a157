"""The run: facts before, replay with samples, wait until idle, facts after."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import httpx
import msgspec
import psutil

from bench.home_case.fleet import HomeCaseError, RunningFleet, changes
from bench.home_case.idle import until_idle
from bench.home_case.pages import ProxyPages, increase
from bench.home_case.record import BREAKDOWN, RUN, TELEMETRY, FleetEngine, ProxyFacts, SustainedRecord, write_files
from bench.home_case.samples import ProxySampler, thinned, use_of
from bench.routers.engines import EngineSet, EngineSetError, ServedModel
from bench.routers.records import EngineCounters
from launch.hardware.gpus import read_inventory
from launch.hardware.telemetry import TelemetrySampler
from replayer.records.runs import read_run
from replayer.replay.plan import Plan, make_plan
from replayer.replay.replay import ReplayOptions, replay_trace
from replayer.traces.trace import Trace

_PROGRESS = 100
"""Requests between two lines of progress."""


class HomeCase(NamedTuple):
    """A run to be made."""

    trace: Trace
    run_dir: Path
    fleet: RunningFleet
    options: ReplayOptions
    """Endpoint and model are filled in."""
    limit_s: float
    hardware: str
    output: Path
    say: Callable[[str], None]


class _Replayed(NamedTuple):
    cut: bool
    took_s: float


async def sustained_run(case: HomeCase) -> SustainedRecord:
    """Make the run and write its files.

    Raises:
        HomeCaseError: the proxy or its settings cannot be read, or no request was answered.
        EngineSetError: an engine cannot be read.
    """
    with TemporaryDirectory(prefix="home-case-") as name:
        folder = Path(name)
        async with httpx.AsyncClient(trust_env=False) as http:
            record, rows = await _measured(case, folder, http)
        plain = {RUN: (folder / RUN).read_bytes(), BREAKDOWN: rows}
        if (folder / TELEMETRY).exists():
            plain[TELEMETRY] = (folder / TELEMETRY).read_bytes()
        write_files(case.output, record, plain)
    return record


async def _measured(case: HomeCase, folder: Path, http: httpx.AsyncClient) -> tuple[SustainedRecord, bytes]:
    fleet, plan = case.fleet, make_plan(case.trace, case.options.plan)
    engines, pages = EngineSet([each.url for each in fleet.engines], http), ProxyPages(fleet.admin_url, http)
    served = await engines.served()
    problems = _too_long(plan, served)
    policy, admission = await pages.report("/policy"), await pages.report("/admission")
    version = str((await pages.report("/version")).get("version", ""))
    counters, metrics, use = await engines.counters(), await pages.metrics(), use_of(fleet.proxy.pid)
    options = msgspec.structs.replace(case.options, endpoint=fleet.url, model=served.name)
    began_unix_s = time.time()
    telemetry = TelemetrySampler(folder / TELEMETRY)
    async with ProxySampler(fleet.proxy.pid, pages.gauges) as sampler:
        async with telemetry:
            replayed = await _replayed(case, options, folder / RUN, plan)
        cpu_s = None
        with suppress(psutil.Error):
            cpu_s = round(use_of(fleet.proxy.pid).cpu_s - use.cpu_s, 3)
        case.say(f"replayed in {replayed.took_s:.0f} s{', cut off' if replayed.cut else ''}; waiting until idle")
        idle = await until_idle(pages, fleet.engines, served.name, http)
        with suppress(psutil.Error):
            await sampler.sample()
    if sampler.problem:
        problems.append(sampler.problem)
    problems += changes(fleet.state, case.run_dir)
    # An expensive run is kept even where a page cannot be read any more: the record has the reason.
    after, metrics_after, rows = [EngineCounters()] * len(counters), metrics, b""
    ids = [step.request_id for session in plan.sessions for step in session.steps]
    try:
        after = [now.since(then) for now, then in zip(await engines.counters(), counters, strict=True)]
    except EngineSetError as error:
        problems.append(f"no engine counters: {error}")
    try:
        metrics_after = await pages.metrics()
        rows = await pages.rows(len(ids), began_unix_s, ids)
    except HomeCaseError as error:
        problems.append(f"the proxy's records are missing: {error}")
    found = read_run(folder / RUN).records
    if not any(each.ok for each in found):
        reason = next((each.error for each in found if each.error), "nothing ended in time")
        raise HomeCaseError(f"no request succeeded: {reason}")
    kept = rows.count(b"\n")
    if rows and kept < len(found):
        problems.append(f"the proxy kept rows of {kept} of {len(found)} requests: raise breakdown.capacity")
    return SustainedRecord(
        fleet=Path(fleet.state.fleet).stem,
        hardware=case.hardware,
        limit_s=case.limit_s,
        cut=replayed.cut,
        replay_s=round(replayed.took_s, 2),
        machine={"platform": platform.platform(), "processors": os.cpu_count(), "python": platform.python_version()},
        gpus=read_inventory(),
        model=served.name,
        context_tokens=served.max_tokens,
        engines=_engines(fleet, served, after),
        proxy=ProxyFacts(
            version=version,
            policy={name: value for name, value in policy.items() if not name.startswith(("known_", "broken_"))},
            admission={name: value for name, value in admission.items() if not name.startswith("known_")},
            settings=fleet.settings,
            counters=increase(metrics, metrics_after),
            cpu_s=cpu_s,
            rss_most_bytes=max((each.rss_bytes for each in sampler.samples), default=0),
            descriptors_most=max((each.descriptors for each in sampler.samples), default=0),
            samples=thinned(sampler.samples),
        ),
        idle_after_s=idle.after_s,
        leaks=idle.leaks,
        telemetry=telemetry.problem or "",
        problems=problems,
    ), rows


async def _replayed(case: HomeCase, options: ReplayOptions, path: Path, plan: Plan) -> _Replayed:
    """Replay until the end of the trace or the limit; requests in flight are cut off then."""
    planned, ended, began_s = plan.offered.requests, 0, time.monotonic()

    def count(_: object) -> None:
        nonlocal ended
        ended += 1
        if ended % _PROGRESS == 0:
            case.say(f"{ended}/{planned} requests after {time.monotonic() - began_s:.0f} s")

    case.say(f"{planned} requests of {plan.offered.sessions} sessions, {plan.offered.span_s:.0f} s by the trace")
    limit = asyncio.timeout(case.limit_s)
    try:
        async with limit:
            await replay_trace(case.trace, path, options, on_record=count)
    except TimeoutError:
        if not limit.expired():
            raise
    return _Replayed(limit.expired(), time.monotonic() - began_s)


def _too_long(plan: Plan, served: ServedModel) -> list[str]:
    if served.max_tokens is None:
        return []
    requests = [step.request for session in plan.sessions for step in session.steps]
    refused = sum(each.input_length + max(each.output_length, 1) > served.max_tokens for each in requests)
    return [f"{refused} requests are longer than the engines' {served.max_tokens} tokens"] if refused else []


def _engines(fleet: RunningFleet, served: ServedModel, counters: list[EngineCounters]) -> list[FleetEngine]:
    return [
        FleetEngine(
            name=each.name,
            kind=each.kind,
            version=version,
            role=each.role,
            transport=each.transport or each.configured_transport,
            devices=each.devices,
            pool_tokens=pool,
            counters=grown,
        )
        for each, version, pool, grown in zip(fleet.engines, served.versions, served.pool_tokens, counters, strict=True)
    ]
