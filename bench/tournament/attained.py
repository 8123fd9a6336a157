"""Check of the computed saturation: the throughput of one overloaded instance.

With one instance there is nothing to route, so the figure does not depend on a policy.
"""

from __future__ import annotations

import msgspec

from bench.tournament.capacity import mean_work, saturation
from bench.tournament.settings import TournamentSettings
from bench.tournament.timeline import Timeline
from bench.tournament.workload import build
from policies.routing.round_robin import RoundRobin
from replayer.replay.plan import PlanOptions
from sim.hardware import HardwareProfile
from sim.offline.simulate import SimOptions, simulate

OVERLOAD = 1.5
"""Offered load over the computed saturation."""
AMPLE_TOKENS = 200_000_000
"""A KV pool large enough that a run of this length evicts nothing."""
COUNTED = (0.2, 0.8)
"""Part of the arrival period during which completed requests are counted."""


def attained(line: Timeline, rate: float, settings: TournamentSettings, profile: HardwareProfile) -> float:
    """Throughput of one overloaded instance over the saturation computed for the requests that it finished.

    Args:
        line: The trace at the pace of `OVERLOAD`.
        rate: Saturation computed for the trace, requests per second and instance.
        settings: Source of the profile and of the sizes of a cell.
        profile: The hardware.
    """
    sizes = msgspec.structs.replace(settings.sizes, requests=settings.sizes.overload_requests)
    workload = build(line, OVERLOAD * rate, 1, 0, sizes, "one instance, overloaded")
    options = SimOptions(
        instances=1,
        profile=settings.profile,
        pool_tokens=AMPLE_TOKENS,
        plan=PlanOptions(time_scale=1.0, think_scale=1.0, idle_gap_cap_s=None),
    )
    records = simulate(workload.trace, options, RoundRobin()).run.records
    sent = [record.sent_s or 0.0 for record in records if record.chat_id in workload.judged]
    begin_s, end_s = (min(sent) + share * (max(sent) - min(sent)) for share in COUNTED)
    ended = [record for record in records if begin_s <= (record.finished_s or 0.0) < end_s]
    rows = ((each.prompt_tokens or 0, each.cached_tokens or 0, each.completion_tokens or 0) for each in ended)
    if not ended:
        return 0.0
    return len(ended) / (end_s - begin_s) / saturation(mean_work(rows, profile), profile)
