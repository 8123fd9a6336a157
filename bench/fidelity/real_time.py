"""One trace run twice: through the HTTP simulator in real time (fleet, proxy, replayer), and offline in virtual time.

Both sides use the same engine model, policy and plan; differences come from the time of HTTP, the proxy and timers, and
from their effect on later decisions. Under load a request that arrives a few milliseconds later may be placed
elsewhere, with further consequences; so the real run's requests are also simulated at their actual times and instances.
A busy machine affects the real-time side: its mean processor use is kept.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from launch.arm import run_arm
from launch.fleet.file import FleetFile, load_fleet
from policies.registry import make_routing
from policies.types import Role
from replayer.records.runs import RequestRecord, Run
from replayer.replay.plan import PlanOptions
from replayer.replay.replay import ReplayOptions
from replayer.traces.trace import Trace
from sim.fidelity.recording import read_recording
from sim.fidelity.resimulate import resimulate
from sim.offline.simulate import HandOffBounds, SimOptions, simulate

FLEET = Path("sim-8x-roomy")
PROBE_WALL_S = 2.0
"""The proxy's default interval between readings of its engines' KV usage."""
RECENT_HALF_LIFE_S = 30.0
TOLERANCE = 0.05
"""Largest relative difference of TTFT p50 and p90 between the two sides."""


class MeasuredSide(NamedTuple):
    """One side's figures, engine seconds."""

    requests: int
    ok: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    e2e_p50_s: float
    hit_rate: float


class RealTimeComparison(NamedTuple):
    """Both sides of one run."""

    trace: str
    policy: str
    profile: str
    instances: int
    clock_scale: float
    time_scale: float
    real: MeasuredSide
    virtual: MeasuredSide
    placed: MeasuredSide
    """Virtual time, with the send times and instances of the real run."""
    same_instance: int
    """Requests that went to the same instance in ``real`` and ``virtual``."""
    processor_use: float
    """Mean share of the machine's processors in use during the replay, by any process."""

    @property
    def alike(self) -> bool:
        """True if TTFT p50 and p90 are within the tolerance."""
        return (
            max(
                abs(self.virtual.ttft_p50_s / self.real.ttft_p50_s - 1),
                abs(self.virtual.ttft_p90_s / self.real.ttft_p90_s - 1),
            )
            <= TOLERANCE
        )


def fleet_file(clock_scale: float, profile: str, instances: int, overrides: list[str]) -> FleetFile:
    """The shipped fleet at another speed, under a policy without times among its parameters unless one is given."""
    half_life_s = RECENT_HALF_LIFE_S / clock_scale
    settings = [
        f"count={instances}",
        f"sim.time_scale={clock_scale}",
        f"sim.profile={profile}",
        f"proxy.ledger.recent_half_life_s={half_life_s}",
        "proxy.policy={name: session_sticky}",
    ]
    return load_fleet(FLEET, [*settings, *overrides])


def compare(
    trace: Trace,
    plan: PlanOptions,
    clock_scale: float,
    profile: str,
    instances: int,
    folder: Path,
    overrides: list[str],
) -> RealTimeComparison:
    """Run both sides; the real one writes its records to ``folder``.

    Raises:
        StartError, StaleEngineError, ArmError: the fleet did not run.
    """
    fleet = fleet_file(clock_scale, profile, instances, overrides)
    name = fleet.proxy["policy"]["name"]
    replay = ReplayOptions(plan=plan, clock_scale=clock_scale, timeout_s=3_600.0)
    result = asyncio.run(run_arm("real", fleet, trace, replay, folder / "real"))
    virtual = virtual_run(trace, plan, clock_scale, fleet)
    placed = {record.request_id: record.instance for record in virtual.records}
    same = sum(record.instance == placed[record.request_id] for record in result.run.records)
    return RealTimeComparison(
        trace.name,
        name,
        profile,
        instances,
        clock_scale,
        plan.time_scale,
        side(result.run.records),
        side(virtual.records),
        _placed(folder / "real", trace, fleet),
        same,
        round(result.processors.mean, 2),
    )


def virtual_run(trace: Trace, plan: PlanOptions, clock_scale: float, fleet: FleetFile) -> Run:
    """The offline simulation of ``fleet``."""
    options = SimOptions(
        instances=fleet.instances,
        profile=fleet.sim.profile,
        pool_tokens=fleet.sim.kv_capacity_tokens,
        role=Role.KV_BOTH,
        plan=plan,
        recent_half_life_s=RECENT_HALF_LIFE_S,
        probe_interval_s=PROBE_WALL_S * clock_scale,
        bounds=HandOffBounds(),
    )
    return simulate(trace, options, make_routing(fleet.proxy["policy"]["name"], {})).run


def _placed(folder: Path, trace: Trace, fleet: FleetFile) -> MeasuredSide:
    """The real run's requests in virtual time, at their actual times and instances."""
    recording = read_recording(folder, trace)
    outcomes = resimulate(recording, fleet.sim.profile, None, fleet.sim.kv_capacity_tokens)
    records = []
    for sent in recording.sent:
        outcome = outcomes[sent.record.request_id]
        figures = {**outcome.latencies._asdict(), "cached_tokens": outcome.cached_tokens}
        records.append(msgspec.structs.replace(sent.record, **figures))
    return side(records)


def side(records: list[RequestRecord]) -> MeasuredSide:
    """The figures of one side."""
    done = [record for record in records if record.ok]

    def quantile(name: str, share: float) -> float:
        values = [getattr(record, name) for record in done]
        return float(np.quantile([value for value in values if value is not None], share))

    prompt = sum(record.prompt_tokens or 0 for record in done)
    return MeasuredSide(
        len(records),
        len(done),
        quantile("ttft_s", 0.5),
        quantile("ttft_s", 0.9),
        quantile("tpot_s", 0.5),
        quantile("e2e_s", 0.5),
        sum(record.cached_tokens or 0 for record in done) / prompt,
    )


def table(kept: dict[str, Any]) -> str:
    """Kept comparisons as Markdown."""
    lines = [
        "| run | requests | TTFT p50 | TTFT p90 | TPOT p50 | E2E p50 | hit rate |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in map(from_json, kept["comparisons"]):
        what = f"{each.policy}, {each.profile}, time scale {each.time_scale:g}"
        placed = f"virtual; {each.same_instance} of {each.real.requests} placed alike"
        busy = f"real time, clock scale {each.clock_scale:g}; processors {each.processor_use:.0%} in use"
        lines.append(_row(f"**{what}**: {busy}", each.real, each.real))
        lines.append(_row(placed, each.virtual, each.real))
        lines.append(_row("virtual, sent when and where the real run did", each.placed, each.real))
    return "\n".join(lines)


def _row(what: str, shown: MeasuredSide, real: MeasuredSide) -> str:
    cells = []
    for name, scale, digits, unit in (
        ("ttft_p50_s", 1.0, 3, "s"),
        ("ttft_p90_s", 1.0, 3, "s"),
        ("tpot_p50_s", 1e3, 2, "ms"),
        ("e2e_p50_s", 1.0, 2, "s"),
    ):
        value = getattr(shown, name)
        change = "" if shown is real else f" ({value / getattr(real, name) - 1:+.1%})"
        cells.append(f"{value * scale:.{digits}f} {unit}{change}")
    return f"| {what} | {shown.ok}/{shown.requests} | {' | '.join(cells)} | {shown.hit_rate:.3f} |"


def from_json(values: dict[str, Any]) -> RealTimeComparison:
    """A comparison as ``RealTimeComparison._asdict`` wrote it."""
    sides = {name: MeasuredSide(**values[name]) for name in ("real", "virtual", "placed")}
    return RealTimeComparison(**{**values, **sides})


def to_json(comparison: RealTimeComparison) -> dict[str, Any]:
    """A comparison as JSON-ready values."""
    sides = {name: getattr(comparison, name)._asdict() for name in ("real", "virtual", "placed")}
    return comparison._asdict() | sides
