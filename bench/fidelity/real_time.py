"""One trace twice: through the HTTP simulator in real time (fleet, proxy, replayer), and offline in virtual time.

The same engine model, policy and plan are on both sides; what can differ is what HTTP, the proxy and timers take, and
what follows from it for later decisions. Under load a request that comes a few milliseconds later may be placed
elsewhere, and so on from there; so the real run's requests are also simulated when and where they were really sent.
A busy machine shows in the real-time side: its mean processor use is kept.
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
"""How often the proxy asks its engines for their KV usage, by default."""
RECENT_HALF_LIFE_S = 30.0
TOLERANCE = 0.05
"""Of TTFT p50 and p90: what the two sides are held to."""


class Side(NamedTuple):
    """One side's figures, engine seconds."""

    requests: int
    ok: int
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    e2e_p50_s: float
    hit_rate: float


class Comparison(NamedTuple):
    """Both sides of one run."""

    trace: str
    policy: str
    profile: str
    instances: int
    clock_scale: float
    time_scale: float
    real: Side
    virtual: Side
    placed: Side
    """Virtual, with the times and instances of the real run."""
    same_instance: int
    """Requests that went to the same instance in ``real`` and ``virtual``."""
    processor_use: float
    """Mean share of the machine's processors in use during the replay, by whomever."""

    @property
    def alike(self) -> bool:
        """Whether TTFT p50 and p90 are within the tolerance."""
        return (
            max(
                abs(self.virtual.ttft_p50_s / self.real.ttft_p50_s - 1),
                abs(self.virtual.ttft_p90_s / self.real.ttft_p90_s - 1),
            )
            <= TOLERANCE
        )


def fleet_file(clock_scale: float, profile: str, instances: int, overrides: list[str]) -> FleetFile:
    """The shipped fleet at another speed."""
    half_life_s = RECENT_HALF_LIFE_S / clock_scale
    settings = [
        f"count={instances}",
        f"sim.time_scale={clock_scale}",
        f"sim.profile={profile}",
        f"proxy.ledger.recent_half_life_s={half_life_s}",
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
) -> Comparison:
    """Run both sides; the real one leaves its records in ``folder``.

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
    return Comparison(
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
    """The offline simulation of what ``fleet`` does."""
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


def _placed(folder: Path, trace: Trace, fleet: FleetFile) -> Side:
    """The real run's requests in virtual time, sent when and where they were sent."""
    recording = read_recording(folder, trace)
    outcomes = resimulate(recording, fleet.sim.profile, None, fleet.sim.kv_capacity_tokens)
    records = []
    for sent in recording.sent:
        outcome = outcomes[sent.record.request_id]
        figures = {name: getattr(outcome, name) for name in ("ttft_s", "tpot_s", "e2e_s", "cached_tokens")}
        records.append(msgspec.structs.replace(sent.record, **figures))
    return side(records)


def side(records: list[RequestRecord]) -> Side:
    """The figures of one side."""
    done = [record for record in records if record.ok]

    def quantile(name: str, share: float) -> float:
        values = [getattr(record, name) for record in done]
        return float(np.quantile([value for value in values if value is not None], share))

    prompt = sum(record.prompt_tokens or 0 for record in done)
    return Side(
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


def _row(what: str, shown: Side, real: Side) -> str:
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


def from_json(values: dict[str, Any]) -> Comparison:
    """A comparison as ``Comparison._asdict`` wrote it."""
    sides = {name: Side(**values[name]) for name in ("real", "virtual", "placed")}
    return Comparison(**{**values, **sides})


def to_json(comparison: Comparison) -> dict[str, Any]:
    """JSON-ready."""
    sides = {name: getattr(comparison, name)._asdict() for name in ("real", "virtual", "placed")}
    return comparison._asdict() | sides
