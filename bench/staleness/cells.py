"""Cells of the study, and the simulation of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from policies.registry import make_routing
from replayer.traces.synth import SynthOptions, synthetic_trace
from sim.offline.options import Noise, SimOptions, SimulatedReplicas
from sim.offline.outcome import SimulatedOutcome
from sim.offline.simulate import OfflineRun

POLICIES = ("warm", "linear", "lmetric", "session_sticky", "vllm_cache_aware", "least_loaded", "round_robin")
BLIND = frozenset({"round_robin"})
"""Policies that read no state, so one delay is enough."""
WITHOUT_EVENTS = frozenset({"warm"})
"""Policies that are also simulated without KV events."""
WITH_PARTS = frozenset({"warm", "least_loaded"})
"""Policies that are also simulated with parts of the fleet."""


class StaleVariant(NamedTuple):
    """Replicas of one kind."""

    events: bool = True
    parts: bool = False

    @property
    def words(self) -> str:
        """Its difference from the first one, for tables; empty for that."""
        return ("" if self.events else ", no KV events") + (", own parts" if self.parts else "")


def variants_of(policy: str) -> list[StaleVariant]:
    """Variants that a policy is simulated in."""
    made = [StaleVariant()]
    if policy in WITH_PARTS:
        made.append(StaleVariant(parts=True))
    if policy in WITHOUT_EVENTS:
        made.append(StaleVariant(events=False))
    return made


class StalenessLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of all cells."""

    instances: int = 1_000
    replicas: int = 16
    profile: str = "h20"
    requests: int = 2_500
    rate_per_s: float = 200.0
    """Arrivals per engine second."""
    gap_scale: float = 200.0
    """Requests between two turns of a session, over the published ones: at 200/s a median of 2 s, p90 of 12 s."""
    block_tokens: int = 512
    speed_sigma: float = 0.05
    """Noise of the instances' speeds."""


class StaleCell(msgspec.Struct, frozen=True, kw_only=True):
    """Variables of one simulation."""

    policy: str
    replicas: int
    staleness_s: float
    """0 for one replica."""
    events: bool
    """Replicas follow the engines' KV events; else they know own requests and shared sessions."""
    seed: int
    parts: bool = False
    """Each replica places new work on its own part of the fleet."""


class StaleFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one simulation; times are engine seconds."""

    cell: StaleCell
    ok: int
    ttft_p50_s: float
    ttft_p90_s: float
    e2e_mean_s: float
    hit_rate: float
    """Share of prompt tokens that came from the engines' caches."""
    predicted_wrong_tokens: float
    """Mean of |predicted - actual| cached tokens."""


class StalenessReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the results file."""

    load: StalenessLoad
    figures: list[StaleFigures]


def cells(load: StalenessLoad, policies: Sequence[str], delays_s: Sequence[float], seeds: int) -> list[StaleCell]:
    """All cells; those of the first seed first."""
    made = []
    for seed in range(1, seeds + 1):
        for policy in policies:
            made.append(StaleCell(policy=policy, replicas=1, staleness_s=0.0, events=True, seed=seed))
            made += [
                StaleCell(
                    policy=policy,
                    replicas=load.replicas,
                    staleness_s=delay_s,
                    events=variant.events,
                    seed=seed,
                    parts=variant.parts,
                )
                for variant in variants_of(policy)
                for delay_s in (delays_s[-1:] if policy in BLIND else delays_s)
            ]
    return made


def simulate_cell(load: StalenessLoad, cell: StaleCell) -> StaleFigures:
    """Simulate one cell."""
    trace = synthetic_trace(
        SynthOptions(
            requests=load.requests,
            seed=cell.seed,
            rate_per_s=load.rate_per_s,
            gap_scale=load.gap_scale,
            block_tokens=load.block_tokens,
        )
    )
    options = SimOptions(
        instances=load.instances,
        profile=load.profile,
        seed=cell.seed,
        noise=Noise(speed_sigma=load.speed_sigma),
        replicas=SimulatedReplicas(
            count=cell.replicas,
            staleness_s=cell.staleness_s,
            events_s=0.05 if cell.events else None,
            parts=cell.parts,
        ),
    )
    outcome = SimulatedOutcome()
    run = OfflineRun.of_trace(trace, options, make_routing(cell.policy, {}))
    run.run(outcome.add)
    figures = outcome.figures()
    return StaleFigures(
        cell=cell,
        ok=outcome.ok,
        ttft_p50_s=_rounded(figures["ttft_p50_s"]),
        ttft_p90_s=_rounded(figures["ttft_p90_s"]),
        e2e_mean_s=_rounded(figures["e2e_mean_s"]),
        hit_rate=_rounded(figures["apc"]),
        predicted_wrong_tokens=_rounded(figures["prediction_error_tokens"]),
    )


def _rounded(value: float | None) -> float:
    return round(float(value or 0.0), 4)
