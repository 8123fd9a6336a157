"""Time of shadow decisions: microseconds per policy, planner and admission rule and live decision.

``python -m bench.shadow [--instances 8 --instances 64] [--decisions 400]`` lets every built-in policy, planner and rule
decide, without effect, on the snapshots of a fleet under load, and prints the median of the fastest of five rounds (a
processor shared with others only adds time). A shadow that chooses another instance than the live decision prices both.
*columns* is the time of the form of the snapshot that all shadow policies share, *whole* that of all work for a
decision of ``warm`` with three shadows, in batches of ten, *append* the time that a live decision itself spends on its
shadows, *live* that of a policy's whole choice, with the scores of all candidates. Snapshots are drawn with a seed;
requests are heavy enough for planners to price a hand-off.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench.figures.machine import machine
from policies.admission.base import AdmissionReason, AdmissionView, Admit, SessionView
from policies.classes import ClassThresholds
from policies.costs.book import CostBook
from policies.decide import decide
from policies.offload.never import Never
from policies.offload.specialists import PER_INSTANCES
from policies.registry import (
    ADMISSION_GROUP,
    BUILT_IN,
    OFFLOAD_GROUP,
    ROUTING_GROUP,
    make_admission,
    make_planner,
    make_routing,
)
from policies.routing.joint import Joint
from policies.routing.least_loaded import LeastLoaded
from policies.routing.warm import Warm
from policies.session import RoutingSession
from policies.shadow import LiveDecision, admitted_by
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.state import FleetState
from policies.types import Decision, HotspotView, InstanceView, RequestView, Role
from proxy.settings import ShadowSettings
from proxy.shadow.shadows import Shadows

BUDGET_US = 50.0
"""Goal for one policy and request."""
_ROUNDS = 5
WHOLE = ("lmetric", "session_sticky", "least_loaded")
_THRESHOLDS = ClassThresholds(5_000, 20_000)


def live_decisions(instances: int, count: int, seed: int = 0) -> list[tuple[RequestView, FleetSnapshot, Decision]]:
    """Decisions of ``least_loaded`` for random requests on random snapshots of a loaded fleet."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        tokens = draw.randint(8_000, 60_000)
        warm = draw.randrange(instances)
        views = tuple(_view(draw, place, tokens, cached=place == warm) for place in range(instances))
        request = RequestView(
            f"request-{number}", tokens, tuple(range(tokens // 16)), 16.0, f"session-{number}", max_tokens=256
        )
        fleet = FleetSnapshot(
            views,
            sequence=number,
            pinned=views[warm].instance,
            hotspot=HotspotView(draw.random() / 10, 0, 1_000),
            costs=CostBook().at(float(number)),
            specialists={view.instance: 2.0 for view in views[: max(1, instances // PER_INSTANCES)]},
        )
        made.append((request, fleet, decide(request, fleet, LeastLoaded(), Never(), _THRESHOLDS)))
    return made


def _view(draw: random.Random, place: int, tokens: int, *, cached: bool) -> InstanceView:
    requests = draw.randint(1, 20)
    prefilling = draw.randint(0, min(3, requests))
    return InstanceView(
        f"inst-{place}",
        cached_tokens=tokens * 9 // 10 if cached else draw.choice((0, 0, 3_200)),
        requests=requests,
        pending_prefill_tokens=prefilling * draw.randint(2_000, 10_000),
        decoding_tokens=(requests - prefilling) * 25_000,
        recent_tokens=draw.random() * 50_000,
        sessions=draw.randint(0, 40),
        kv_capacity_tokens=738_432,
        kv_used_tokens=draw.randint(0, 600_000),
        role=Role.KV_BOTH,
        holds_class=cached,
        prefilling=prefilling,
        host=f"host-{place // 8}",
    )


def median_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median time of one call, in microseconds."""
    clock, times = time.perf_counter, []
    for call in calls:
        began_s = clock()
        call()
        times.append(clock() - began_s)
    return float(np.median(times)) * 1e6


def rows(instances: int, count: int) -> list[tuple[str, str, float]]:
    """Part, name and median microseconds of everything that is built in."""
    made = live_decisions(instances, count)
    table = [("shared", "columns", median_us([partial(FleetColumns.of, fleet.instances) for _, fleet, _ in made]))]
    for name in BUILT_IN[ROUTING_GROUP]:
        policy = make_routing(name)
        fresh = [LiveDecision(*each) for each in made]
        for live in fresh:
            _ = live.columns
        calls = [partial(live.routed_by, policy) for live in fresh]
        table.append(("policy", name, median_us(calls)))
    priced = [LiveDecision(*each) for each in made]
    for name in BUILT_IN[OFFLOAD_GROUP]:
        planner = make_planner(name)
        plans = [partial(live.planned_by, planner, _THRESHOLDS) for live in priced]
        table.append(("planner", name, median_us(plans)))
    for name in (Warm.name, Joint.name):
        policy = make_routing(name)
        table.append(("live", name, median_us([partial(policy.choose, request, fleet) for request, fleet, _ in made])))
    view = AdmissionView(738_432 * instances, 90, 3_000_000, 40, 900_000, 0.1, 0.9, instances, 12)
    for name in BUILT_IN[ADMISSION_GROUP]:
        rule, session, sent = make_admission(name), SessionView(turns=3), Admit(AdmissionReason.ROOM)
        asked = [partial(admitted_by, rule, live.request, session, view, sent) for live in priced]
        table.append(("admission", name, median_us(asked)))
    table.append(("whole", " + ".join(WHOLE), _whole_us(made)))
    table.append(("live path", "append", _append_us(made)))
    return table


def _whole_us(made: Sequence[tuple[RequestView, FleetSnapshot, Decision]]) -> float:
    """Time of all work for one decision of ``warm`` with three shadows: queue, decisions, figures, latest row."""
    routing = RoutingSession(FleetState(), Warm(), Never(), _THRESHOLDS)
    shadows = Shadows(ShadowSettings.model_validate({"policies": WHOLE}), routing)
    observer = routing.on_decided
    assert observer is not None
    took_us = []
    for start in range(0, len(made), 10):
        batch = made[start : start + 10]
        for request, fleet, _ in batch:
            observer(request, fleet, decide(request, fleet, Warm(), Never(), _THRESHOLDS))
        took_us.append(shadows.work_off(3600.0) / len(batch) * 1e6)
    return float(np.median(took_us))


def _append_us(made: Sequence[tuple[RequestView, FleetSnapshot, Decision]]) -> float:
    """Time that the routing step spends on its shadows."""
    routing = RoutingSession(FleetState(), LeastLoaded(), Never(), _THRESHOLDS)
    Shadows(ShadowSettings.model_validate({"policies": ["round_robin"], "queue": 65_536}), routing)
    observer = routing.on_decided
    assert observer is not None
    return median_us([partial(observer, *each) for each in made])


def main(
    instances: Annotated[list[int] | None, typer.Option(help="Size of the fleet. Repeatable.")] = None,
    decisions: Annotated[int, typer.Option(min=10, help="Live decisions for each.")] = 400,
) -> None:
    """Measure shadow decisions."""
    sizes = instances or [8, 64]
    columns = {}
    for size in sizes:
        rounds = [rows(size, decisions) for _ in range(_ROUNDS)]
        columns[size] = [(*each[0][:2], min(cost for _, _, cost in each)) for each in zip(*rounds, strict=True)]
    table = Table(title=f"Shadow decisions, µs (median of {decisions}, fastest of {_ROUNDS} rounds)")
    for head in ("part", "name", *(f"{size} instances" for size in sizes)):
        table.add_column(head, justify="left" if head in {"part", "name"} else "right")
    first = columns[sizes[0]]
    for place, (part, name, _) in enumerate(first):
        costs = [columns[size][place][2] for size in sizes]
        table.add_row(part, name, *(f"{cost:.1f}{' *' if cost > BUDGET_US else ''}" for cost in costs))
    Console().print(table)
    Console().print(f"* above {BUDGET_US:g} µs; " + ", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    typer.run(main)
