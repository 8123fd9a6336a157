"""Published end-to-end results of eight H20s against offline simulations with the h20 profile.

Published: the agentic-kvc reports; their trace is not public. Our trace, ``derived_glm_like_2h``, has its published
mean and quantiles of prompt lengths, but longer outputs (median 215 against 80), so only orderings and ratios can be
compared. No parameter was fitted to these results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from policies.registry import make_planner, make_routing
from policies.types import Role
from replayer.replay.plan import PlanOptions
from replayer.traces.trace import Trace
from sim.offline.simulate import SimOptions, simulate

PROFILE = "h20"
INSTANCES = 8
TIME_SCALE = 20.0
SESSIONS = (8, 24)
"""Sessions in progress at once: the published number, and one that gives a TPOT p90 near the published one."""


NAN = float("nan")
"""Marks a value that is not published."""
NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})


class ArmFigures(NamedTuple):
    """Figures of one configuration; ``ok`` is a share of all requests."""

    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p90_s: float
    e2e_p50_s: float
    ok: float = 1.0
    apc: float = NAN


class PublishedArm(NamedTuple):
    """A published configuration and the closest configuration of this project."""

    name: str
    policy: str
    planner: str = "never"
    policy_params: Mapping[str, Any] = NO_PARAMETERS
    planner_params: Mapping[str, Any] = NO_PARAMETERS
    role: Role = Role.NONE
    prefill_instances: int = 0


LINEAR = PublishedArm("linear, co-located", "linear")
LMETRIC = PublishedArm("LMetric", "lmetric")
ELASTIC = PublishedArm(
    "elastic, 20k, cap 4",
    "linear",
    "threshold",
    planner_params={"min_decode_requests": 0, "check_room": False},
    role=Role.KV_BOTH,
)
STATIC = PublishedArm("static 4P + 4D", "linear", "static_pd", prefill_instances=4)
HYBRID = PublishedArm("sticky with override", "session_sticky")
STRICT = PublishedArm("strictly sticky", "session_sticky", policy_params={"overload_factor": 1e9})

SMALL = (
    (LINEAR, ArmFigures(1.075, 9.384, 0.076, 5.075, 198 / 200)),
    (LMETRIC, ArmFigures(1.099, 9.392, 0.073, 5.205, 198 / 200)),
    (ELASTIC, ArmFigures(1.018, 11.312, 0.085, 6.977, 195 / 200)),
)
"""200 requests."""
LARGE = (
    (LINEAR._replace(name="cache-aware (linear)"), ArmFigures(0.731, NAN, 0.073, 4.480, NAN, 0.447)),
    (HYBRID, ArmFigures(0.737, NAN, 0.072, 4.487, NAN, 0.494)),
    (STRICT, ArmFigures(0.953, NAN, 0.079, 5.520, NAN, 0.487)),
)
"""1,000 requests."""
STATIC_TTFT_RATIO = 62.0
STATIC_OK = 0.52


def simulated(arm: PublishedArm, trace: Trace, requests: int, sessions: int) -> ArmFigures:
    """Figures of a configuration in the simulator."""
    options = SimOptions(
        profile=PROFILE,
        instances=INSTANCES,
        prefill_instances=arm.prefill_instances,
        role=arm.role,
        max_inflight_sessions=sessions,
        plan=PlanOptions(time_scale=TIME_SCALE, request_limit=requests),
    )
    policy = make_routing(arm.policy, dict(arm.policy_params))
    planner = make_planner(arm.planner, dict(arm.planner_params))
    records = simulate(trace, options, policy, planner).run.records
    done = [record for record in records if record.ok]

    def quantile(values: Sequence[float | None], share: float) -> float:
        return float(np.quantile([value for value in values if value is not None], share))

    ttft = [record.ttft_s for record in done]
    return ArmFigures(
        quantile(ttft, 0.5),
        quantile(ttft, 0.9),
        quantile([record.tpot_s for record in done], 0.9),
        quantile([record.e2e_s for record in done], 0.5),
        len(done) / len(records),
        sum(record.cached_tokens or 0 for record in done) / sum(record.prompt_tokens or 0 for record in done),
    )


_HEADER = "| configuration | TTFT p50 | TTFT p90 | TPOT p90 | E2E p50 | ok | APC |"
_RULE = "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"


def _row(name: str, figures: ArmFigures, base: ArmFigures) -> str:
    def cell(value: float, against: float, unit: str) -> str:
        if np.isnan(value):
            return ""
        shown = f"{value * 1e3:.0f} ms" if unit == "ms" else f"{value:.2f} s"
        return shown if value == against else f"{shown} ({value / against - 1:+.0%})"

    cells = [
        name,
        cell(figures.ttft_p50_s, base.ttft_p50_s, "s"),
        cell(figures.ttft_p90_s, base.ttft_p90_s, "s"),
        cell(figures.tpot_p90_s, base.tpot_p90_s, "ms"),
        cell(figures.e2e_p50_s, base.e2e_p50_s, "s"),
        "" if np.isnan(figures.ok) else f"{figures.ok:.1%}",
        "" if np.isnan(figures.apc) else f"{figures.apc:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def tables(trace: Trace) -> str:
    """Both published tables, and static disaggregation; changes are against the first row of each group."""
    lines: list[str] = []
    for title, requests, arms in (("200 requests", 200, SMALL), ("1,000 requests", 1_000, LARGE)):
        lines += [f"**{title}, time scale 20**", "", _HEADER, _RULE]
        base = arms[0][1]
        lines += [_row(f"published: {arm.name}", figures, base) for arm, figures in arms]
        for sessions in SESSIONS:
            ours = [(arm, simulated(arm, trace, requests, sessions)) for arm, _ in arms]
            base = ours[0][1]
            lines += [_row(f"{sessions} sessions: {arm.name}", figures, base) for arm, figures in ours]
        lines.append("")
    lines += ["| static 4P + 4D against co-location, 200 requests | TTFT p50 | ok |", "| --- | ---: | ---: |"]
    lines.append(f"| published | {STATIC_TTFT_RATIO:.0f}x | {STATIC_OK:.0%} |")
    for sessions in SESSIONS:
        whole, split = (simulated(arm, trace, 200, sessions) for arm in (LINEAR, STATIC))
        lines.append(f"| {sessions} sessions | {split.ttft_p50_s / whole.ttft_p50_s:.1f}x | {split.ok:.0%} |")
    return "\n".join(lines)
