"""Options of an offline simulation: fleet, load, noise and the bounds on hand-offs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist

from policies.admission.base import MAX_HOLD_S
from policies.classes import ClassThresholds
from policies.types import Role, Transport
from replayer.replay.plan import PlanOptions
from replayer.traces.numbers import is_not_negative, is_positive
from replayer.traces.trace import TraceError
from sim.core.types import EngineConfig
from sim.hardware import HardwareProfile, ProfileError
from sim.server.settings import EngineSettingsError, ServerSettings

MOST_INSTANCES = 10_000
"""Instances of a simulation: ten times the largest fleet that was tried (docs/staleness.md)."""
LARGEST_SIGMAS = 4.0
"""A draw of noise lies within this many standard deviations."""


class SimulationError(ValueError):
    """Options with which a simulation cannot run; the message says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Random differences between repeats with different seeds. Normal draws, cut at four standard deviations."""

    arrival_jitter_s: float = 0.0
    """Standard deviation of the shift of a session's arrival, engine seconds."""
    speed_sigma: float = 0.0
    """Standard deviation of the logarithm of an instance's step time; drawn once per instance and run."""

    def shift_s(self, draw: random.Random) -> float:
        """One session's shift."""
        return self.arrival_jitter_s * _normal(draw) if self.arrival_jitter_s else 0.0

    def slowness(self, draw: random.Random) -> float:
        """One instance's step times over the profile's: log-normal with median 1."""
        return math.exp(self.speed_sigma * _normal(draw)) if self.speed_sigma else 1.0


def _normal(draw: random.Random) -> float:
    """A standard normal draw that no library's version changes: from one uniform double by the inverse distribution."""
    score = NormalDist().inv_cdf(min(max(draw.random(), 1e-12), 1 - 1e-12))
    return min(max(score, -LARGEST_SIGMAS), LARGEST_SIGMAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOffBounds:
    """Time bounds of an offload's legs, in engine seconds; defaults are those of the proxy's settings."""

    prefill_timeout_s: float = 120.0
    first_token_timeout_s: float = 60.0
    abandoned_s: float = 120.0
    """Time for which a pull that was given up stays open."""
    hold_s: float = 480.0
    """Time for which P keeps KV that no engine pulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedReplicas:
    """Replicas of the router in front of the fleet; requests reach them in turns. Times are engine seconds."""

    count: int = 1
    staleness_s: float = 0.05
    """Time after which a replica knows what another has decided: load in flight and session pins."""
    events_s: float | None = 0.05
    """Time after which all replicas know the blocks that an engine has computed; None: there are no KV events, and a
    replica knows the blocks of its own requests and the contexts of shared sessions."""
    parts: bool = True
    """Each replica places new work on its own part of the fleet, if that is large enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimOptions:
    """Everything but the trace, the policy and the planner. Times are engine seconds."""

    instances: int = 8
    profile: str = "h200"
    """Hardware profile: a name in configs/hardware, or a YAML file."""
    pool_tokens: int | None = None
    """KV pool of each instance; None: the profile's."""
    seed: int = 0
    """Seed of the noise; without noise it changes only the header."""
    plan: PlanOptions = field(default_factory=PlanOptions)
    role: Role = Role.NONE
    """Role of every instance; offloads need ``kv_both`` (or ``prefill_instances``)."""
    prefill_instances: int = 0
    """Above 0: this many instances only prefill (kv_producer), the others only decode (kv_consumer)."""
    max_inflight_sessions: int | None = None
    """Most sessions in progress at once, thinking ones included; None: no limit."""
    noise: Noise = field(default_factory=Noise)
    slowdown: float = 1.0
    """Factor on every step's time: a known effect, for testing whether a comparison finds it."""
    speeds: tuple[float, ...] = ()
    """Speed of each instance over the profile's, in turn: of ``(1, 0.5)`` every second one is half as fast."""
    label: str = ""
    thresholds: ClassThresholds = field(default_factory=ClassThresholds)
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    scheduling_policy: str = "fcfs"
    """``priority``: the engines compute waiting prompts by priority, and a policy may order them."""
    long_prefill_token_threshold: int = 0
    """Most tokens of a step for one request; 0: the whole budget."""
    transport: str | None = None
    """Transport of KV between instances; None: the profile's default."""
    recent_half_life_s: float = 30.0
    """Half-life of the ledger's recently-assigned term (the proxy's ``ledger.recent_half_life_s``)."""
    probe_interval_s: float = 2.0
    """Interval at which the router reads the engines' KV usage (the proxy's ``health.interval_s``)."""
    max_hold_s: float = MAX_HOLD_S
    """Most seconds for which the admission rule may hold a request (the proxy's ``admission.max_hold_s``)."""
    bounds: HandOffBounds = field(default_factory=HandOffBounds)
    replicas: SimulatedReplicas = field(default_factory=SimulatedReplicas)
    decisions: bool = False
    """Keep a row per request in the format of the proxy's /breakdown."""

    def check(self) -> None:
        """Reject options that are out of range or contradict each other.

        Raises:
            SimulationError: names the option and its valid range.
        """
        if not 1 <= self.instances <= MOST_INSTANCES:
            raise SimulationError(f"--instances must be within 1..{MOST_INSTANCES}")
        if not 0 <= self.prefill_instances < self.instances:
            raise SimulationError("--prefill-instances must leave at least one of --instances to decode")
        if self.prefill_instances and self.role not in {Role.NONE, Role.KV_BOTH}:
            raise SimulationError("--prefill-instances sets the roles itself: leave --role out")
        if self.role is Role.KV_PRODUCER:
            raise SimulationError(
                "--role kv_producer: no instance could decode; give --prefill-instances for instances that only prefill"
            )
        if self.max_inflight_sessions is not None and self.max_inflight_sessions < 1:
            raise SimulationError("--max-inflight-sessions must be at least 1")
        if self.pool_tokens is not None and self.pool_tokens < 1:
            raise SimulationError("--pool-tokens must be at least 1")
        if not is_not_negative(self.noise.arrival_jitter_s) or not 0 <= self.noise.speed_sigma <= 1:
            raise SimulationError("--arrival-jitter-s must be at least 0 and finite, and --speed-sigma be within 0..1")
        for name, value in (
            ("--slowdown", self.slowdown),
            ("--max-hold-s", self.max_hold_s),
            ("recent_half_life_s", self.recent_half_life_s),
            ("probe_interval_s", self.probe_interval_s),
        ):
            if not is_positive(value):
                raise SimulationError(f"{name} must be above 0 and finite")
        if len(self.speeds) > self.instances or not is_positive(*self.speeds):
            raise SimulationError("--speeds: numbers above 0, at most one for each of --instances")
        try:
            self.plan.check()
        except TraceError as error:
            raise SimulationError(str(error)) from error
        replicas = self.replicas
        if replicas.count < 1 or not is_not_negative(replicas.staleness_s, replicas.events_s or 0.0):
            raise SimulationError("replicas: count must be at least 1, staleness_s and events_s at least 0")

    def roles(self) -> list[Role]:
        """Role of each instance, in order."""
        if not self.prefill_instances:
            return [self.role] * self.instances
        decoding = self.instances - self.prefill_instances
        return [Role.KV_PRODUCER] * self.prefill_instances + [Role.KV_CONSUMER] * decoding

    def engine(self, role: Role, block_tokens: int) -> tuple[EngineConfig, HardwareProfile]:
        """Configuration of an engine of a role, as ``warmroute sim engine`` would resolve it, and its hardware.

        The engine id is for the caller to set: the random one that engines draw would differ from run to run.

        Raises:
            SimulationError: unknown profile or transport, or a pool too small for its blocks.
        """
        try:
            settings = ServerSettings.resolve(
                port=1,
                profile=self.profile,
                block_size=block_tokens,
                kv_capacity_tokens=self.pool_tokens,
                role=role.value,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
                max_model_len=self.max_model_len,
                scheduling_policy=self.scheduling_policy,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                transport=self.transport,
                abort_timeout_s=self.bounds.hold_s,
            )
        except (EngineSettingsError, ProfileError) as error:
            raise SimulationError(str(error)) from error
        return settings.config, settings.profile

    def proven_transport(self, profile: HardwareProfile) -> Transport | None:
        """The transport that the router assumes for KV; None if policies do not know the profile's."""
        name = self.transport or profile.default_transport
        return Transport(name) if name is not None and name in set(Transport) else None
