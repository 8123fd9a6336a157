"""The simulated engines of an offline run: made from a profile, totalled at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from policies.types import Role
from sim.core.engine import Engine
from sim.core.timing import StepTiming
from sim.hardware import HardwareProfile
from sim.offline.options import SimOptions
from sim.virtual import VirtualFleet


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceTotals:
    """Totals of one instance in a run. Times are engine seconds, sizes tokens unless the name says otherwise."""

    instance: str
    role: str
    slowness: float
    """Its step times over the profile's (noise, slowdown and speed)."""
    busy_s: float
    """Time in steps."""
    prefill_s: float
    """Part of it in steps that computed prompts."""
    requests: int
    """Requests finished here, prefill legs included."""
    prompt_tokens: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Part of them that was found."""
    external_tokens: int
    """Prompt tokens whose KV came from another instance."""
    generation_tokens: int
    evictions: int
    """Cached blocks that were overwritten."""
    preemptions: int
    total_blocks: int
    cached_blocks: int
    """Distinct blocks in the prefix cache at the end."""


def make_fleet(options: SimOptions, block_tokens: int) -> tuple[VirtualFleet, dict[str, Role], HardwareProfile]:
    """Engines ``inst-0`` and on, their roles, and the hardware they run on.

    Raises:
        SimulationError: the options do not make an engine.
    """
    draw = random.Random(f"{options.seed}/speeds")
    engines: dict[str, Engine] = {}
    roles: dict[str, Role] = {}
    configured = {role: options.engine(role, block_tokens) for role in dict.fromkeys(options.roles())}
    for number, role in enumerate(options.roles()):
        name = f"inst-{number}"
        config, profile = configured[role]
        config = replace(config, engine_id=name)
        speed = options.speeds[number % len(options.speeds)] if options.speeds else 1.0
        timing = slowed(profile.timing, options.slowdown * options.noise.slowness(draw) / speed)
        transfer_seconds = profile.transfer_seconds(options.transport, f"{options.seed}/transfers/{name}")
        engines[name] = Engine(config, timing, transfer_seconds, report_progress=False)
        roles[name] = role
    return VirtualFleet(engines), roles, profile


def slowed(timing: StepTiming, factor: float) -> StepTiming:
    """Every time of a step multiplied by ``factor``."""
    if factor == 1.0:
        return timing
    times = {name: value * factor for name, value in timing._asdict().items() if name != "expert_miss"}
    return timing._replace(**times)


def totals(fleet: VirtualFleet, roles: dict[str, Role], timing: StepTiming) -> list[InstanceTotals]:
    """Totals of every instance so far; ``timing`` is the profile's."""
    rows = []
    for name, engine in fleet.engines.items():
        counters = engine.counters
        rows.append(
            InstanceTotals(
                instance=name,
                role=roles[name].value,
                slowness=engine.timing.decode_s / timing.decode_s,
                busy_s=engine.busy_s,
                prefill_s=engine.prefill_s,
                requests=sum(counters.finished.values()),
                prompt_tokens=counters.prompt_tokens,
                prefix_queries=counters.prefix_queries,
                prefix_hits=counters.prefix_hits,
                external_tokens=counters.external_tokens,
                generation_tokens=counters.generation_tokens,
                evictions=engine.scheduler.pool.evictions,
                preemptions=counters.preemptions,
                total_blocks=engine.config.num_blocks,
                cached_blocks=engine.scheduler.pool.cached_blocks,
            )
        )
    return rows
