"""One soak run from the first process to the verdict."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from bench.soak.hostile import HostileCounts, HostileOrder, hostile_slice
from bench.soak.load import Clients
from bench.soak.phases import SliceComparison, compare
from bench.soak.plan import SoakPlan
from bench.soak.processes import Reaper, SoakError, engine_process, free_port, proxy_process, stop, until_ready
from bench.soak.requests import known_requests
from bench.soak.samples import ProcessSample, Sampler
from bench.soak.verdict import SoakTrends, breakdown_ids, figures, hostile_violations, violations
from launch.run.processes import ManagedProcess

_IDLE_S = 4.0
"""After the last request: longer than the proxy keeps idle connections to engines."""


class SoakResult(msgspec.Struct):
    """Counts, trends and violated checks of a run."""

    plan: dict[str, Any]
    duration_s: float
    requests: int
    ends: dict[str, int]
    statuses: dict[str, int]
    events: int
    answer_mb: float
    kills: int
    outcomes: dict[str, int]
    """Requests by outcome, as counted by the proxy."""
    hostile: HostileCounts
    comparison: SliceComparison | None
    """Polite clients without and with hostile ones; None for a run without, or one too short."""
    figures: SoakTrends
    stats: dict[str, Any]
    violations: list[str]
    wrong: list[str]
    samples: list[ProcessSample]


async def soak(plan: SoakPlan, folder: Path) -> SoakResult:
    """Run it; logs and the proxy's records are kept in ``folder``.

    Raises:
        SoakError: a process did not come up, or the proxy ended.
    """
    draw = random.Random()
    engines = [engine_process(number, free_port(draw), plan, folder) for number in range(plan.engines)]
    proxy = proxy_process(free_port(draw), engines, plan, folder)
    try:
        for engine in engines:
            engine.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(*(until_ready(engine, session) for engine in engines))
            known = await known_requests(session, engines[0].spec.url, plan)
            proxy.start()
            await until_ready(proxy, session, "/ready")
            # From here on this session sends the proxy one request at a time, so it has one connection to it.
            await _stats(session, proxy)
            return await _measured(plan, folder, session, engines, proxy, Clients(proxy.spec.url, known, plan))
    finally:
        await stop([proxy, *engines])


async def _process_of(proxy: ManagedProcess) -> psutil.Process:
    """The proxy's process. A look may miss it where the clock is set meanwhile; raises SoakError if all do."""
    for _ in range(50):
        if tree := proxy.tree():
            return tree[0]
        await asyncio.sleep(0.1)
    raise SoakError(f"the proxy's process is not found:\n{proxy.log_tail(30)}")


async def _measured(
    plan: SoakPlan,
    folder: Path,
    session: aiohttp.ClientSession,
    engines: list[ManagedProcess],
    proxy: ManagedProcess,
    clients: Clients,
) -> SoakResult:
    sampler = Sampler(await _process_of(proxy))
    before = sampler.now()
    reaper = Reaper(engines, plan)
    started_s = time.monotonic()
    hostile: HostileCounts = {}
    slices = _hostile_slices(plan, int(proxy.spec.url.rpartition(":")[2]), clients, hostile)
    beside = [asyncio.create_task(work) for work in (sampler.run(), reaper.run(), slices)]
    try:
        await clients.run(plan.duration_s)
    finally:
        for task in beside:
            task.cancel()
        ended = await asyncio.gather(*beside, return_exceptions=True)
    for error in ended:
        if isinstance(error, Exception) and not isinstance(error, asyncio.CancelledError):
            raise error
    if proxy.exited():
        raise SoakError(f"the proxy ended:\n{proxy.log_tail(30)}")
    duration_s = time.monotonic() - started_s
    await asyncio.gather(*(until_ready(engine, session) for engine in engines))
    stats = await _drained(session, proxy, plan.drain_s)
    await asyncio.sleep(_IDLE_S)
    after = sampler.now()
    await stop([proxy])
    seen, measured = clients.seen, figures(sampler.samples, before, after, plan)
    rows, comparison = breakdown_ids(folder / "breakdown.jsonl"), compare(seen.phases)
    return SoakResult(
        {name: getattr(plan, name) for name in plan.__slots__},
        round(duration_s, 1),
        sum(seen.ends.values()),
        dict(seen.ends),
        {str(status): count for status, count in seen.statuses.items()},
        seen.events,
        round(seen.answer_bytes / 1e6, 1),
        reaper.kills,
        stats["requests"]["outcomes"],
        hostile,
        comparison,
        measured,
        stats,
        [
            *violations(seen, reaper.kills, stats, rows, measured, plan, proxy.log_text()),
            *hostile_violations(hostile, comparison, plan),
        ],
        seen.wrong,
        sampler.samples,
    )


async def _hostile_slices(plan: SoakPlan, port: int, clients: Clients, counts: HostileCounts) -> None:
    """Send hostile clients in every second slice, as many a second as their share of the slice before makes."""
    if not plan.hostile_share:
        return
    started_s = time.monotonic()
    for number in range(plan.slice_pairs):
        sent, from_s = clients.seen.sent, time.monotonic()
        await asyncio.sleep((2 * number + 1) * plan.slice_s - (from_s - started_s))
        polite_per_s = (clients.seen.sent - sent) / (time.monotonic() - from_s)
        per_s = plan.hostile_share / (1 - plan.hostile_share) * polite_per_s
        left_s = (2 * number + 2) * plan.slice_s - (time.monotonic() - started_s)
        seed = f"{plan.seed}-{number}"
        order = HostileOrder(port, left_s, max(per_s, 0.1), plan.hostile_workers, plan.body_bytes, seed)
        for kind, ends in (await hostile_slice(order)).items():
            of_kind = counts.setdefault(kind, {})
            for end, count in ends.items():
                of_kind[end] = of_kind.get(end, 0) + count


async def _stats(session: aiohttp.ClientSession, proxy: ManagedProcess) -> dict[str, Any]:
    async with session.get(f"{proxy.spec.url}/stats") as answer:
        stats: dict[str, Any] = await answer.json()
        return stats


async def _drained(session: aiohttp.ClientSession, proxy: ManagedProcess, within_s: float) -> dict[str, Any]:
    """Statistics once nothing is in flight, or after ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while True:
        stats = await _stats(session, proxy)
        if not stats["requests"]["in_flight"] or time.monotonic() > deadline_s:
            return stats
        await asyncio.sleep(0.2)
