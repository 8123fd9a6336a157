"""A simulation as plain data: the checked command-line options, in a form that other processes can receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S, AdmissionRule
from policies.offload.base import OffloadPlanner
from policies.registry import PolicyParameterError, make_admission, make_planner, make_routing
from policies.routing.base import RoutingPolicy
from policies.types import Role
from replayer.replay.plan import PlanOptions
from replayer.traces.loading import LoadOptions
from sim.offline.options import Noise, SimOptions, SimulationError
from warmroute_yaml import load_yaml

_PLANNING = frozenset({"joint", "migrate"})
"""Policies that choose P themselves."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trace, policy, planner, fleet and load of one simulation. Times are engine seconds."""

    trace: str
    policy: str = "warm"
    policy_params: dict[str, Any] = {}
    planner: str = "never"
    planner_params: dict[str, Any] = {}
    admission: str = DEFAULT_RULE
    admission_params: dict[str, Any] = {}
    max_hold_s: float = MAX_HOLD_S
    instances: int = 8
    prefill_instances: int = 0
    role: Role | None = None
    """None: ``kv_both`` where the policy or the planner may hand over KV, else ``none``."""
    profile: str = "h200"
    pool_tokens: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    max_model_len: int | None = None
    transport: str | None = None
    time_scale: float = 1.0
    think_scale: float | None = None
    request_limit: int | None = None
    idle_gap_cap_s: float = 60.0
    block_tokens: int | None = None
    time_unit: Literal["auto", "s", "ms", "us"] = "auto"
    sessions: Literal["derived", "single"] = "derived"
    chain: Literal["repair", "keep", "error"] = "repair"
    allow_deltas: bool = False
    max_inflight_sessions: int | None = None
    seed: int = 0
    arrival_jitter_s: float = 0.0
    speed_sigma: float = 0.0
    slowdown: float = 1.0
    speeds: tuple[float, ...] = ()
    """Separated by commas, as in ``SimOptions``."""
    label: str = ""
    """Empty: the policy's name."""

    def routing(self) -> RoutingPolicy:
        """The policy; raises UnknownPolicyError or PolicyParameterError."""
        return make_routing(self.policy, self.policy_params, modules=True)

    def offload(self) -> OffloadPlanner:
        """The planner; raises UnknownPolicyError or PolicyParameterError."""
        return make_planner(self.planner, self.planner_params, modules=True)

    def admission_rule(self) -> AdmissionRule:
        """The admission rule; raises UnknownPolicyError or PolicyParameterError."""
        return make_admission(self.admission, self.admission_params, modules=True)

    def load_options(self) -> LoadOptions:
        """Reading of the trace."""
        return LoadOptions(
            block_tokens=self.block_tokens,
            time_unit=self.time_unit,
            sessions=self.sessions,
            chain=self.chain,
            idle_gap_cap_s=self.idle_gap_cap_s,
            allow_deltas=self.allow_deltas,
        )

    def plan_options(self) -> PlanOptions:
        """Scaling and cutting of the trace."""
        return PlanOptions(
            time_scale=self.time_scale,
            think_scale=self.think_scale,
            request_limit=self.request_limit,
            idle_gap_cap_s=self.idle_gap_cap_s,
        )

    def options(self) -> SimOptions:
        """The simulation's options, checked; raises SimulationError."""
        role = self.role
        if role is None:
            hands_over = self.planner != "never" or self.policy in _PLANNING
            role = Role.KV_BOTH if hands_over and not self.prefill_instances else Role.NONE
        options = SimOptions(
            instances=self.instances,
            prefill_instances=self.prefill_instances,
            role=role,
            profile=self.profile,
            pool_tokens=self.pool_tokens,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=self.scheduling_policy,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_model_len=self.max_model_len,
            transport=self.transport,
            plan=self.plan_options(),
            max_inflight_sessions=self.max_inflight_sessions,
            seed=self.seed,
            noise=Noise(arrival_jitter_s=self.arrival_jitter_s, speed_sigma=self.speed_sigma),
            slowdown=self.slowdown,
            speeds=self.speeds,
            max_hold_s=self.max_hold_s,
            label=self.label or self.policy,
        )
        options.check()
        return options

    def check(self) -> None:
        """Reject a setup that cannot be simulated, before anything is read.

        Raises:
            SimulationError, UnknownPolicyError, PolicyParameterError: names the setting that is wrong.
        """
        self.routing()
        self.offload()
        self.admission_rule()
        if not Path(self.trace).exists():
            raise SimulationError(f"{self.trace}: no such trace")
        options = self.options()
        for role in dict.fromkeys(options.roles()):
            options.engine(role, 1)


_OF_THE_TRACE = {"trace", "idle_gap_cap_s", "block_tokens", "time_unit", "sessions", "chain", "allow_deltas"}
_NOT_SWEPT = _OF_THE_TRACE | {"policy_params", "planner_params", "admission_params", "label"}
"""Settings that all points of a sweep share, or that a sweep sets itself."""
_WITH_PARAMETERS = ("policy", "planner", "admission")
SETTING_OF_OPTION = {"arrival_speed": "time_scale", "think_speed": "think_scale"}
"""Option -> setting, where their names differ: settings are kept as recorded in sweep.json."""


def changed(setup: Setup, settings: Mapping[str, Any]) -> Setup:
    """The setup with other settings, by name; ``policy.NAME``, ``planner.NAME`` and ``admission.NAME`` are
    parameters.

    Another policy or planner starts with its own defaults: parameters of the old one are dropped.

    Raises:
        SimulationError: no such setting, or a value of another type.
    """
    plain = msgspec.to_builtins(setup)
    options = {name.replace("-", "_"): value for name, value in settings.items()}
    names = {SETTING_OF_OPTION.get(name, name): value for name, value in options.items()}
    for kind in _WITH_PARAMETERS:
        if kind in names and names[kind] != plain[kind]:
            plain[f"{kind}_params"] = {}
    for name, value in names.items():
        kind, dot, parameter = name.partition(".")
        if dot and kind in _WITH_PARAMETERS:
            plain[f"{kind}_params"] = {**plain[f"{kind}_params"], parameter: value}
        elif name in plain and name not in _NOT_SWEPT:
            plain[name] = value
        else:
            known = sorted({*plain, *SETTING_OF_OPTION} - _NOT_SWEPT - {*SETTING_OF_OPTION.values()})
            raise SimulationError(
                f"{name!r} cannot be swept; choose one of {', '.join(known)}, policy.PARAMETER, planner.PARAMETER or "
                "admission.PARAMETER"
            )
    try:
        return msgspec.convert(plain, Setup)
    except msgspec.ValidationError as error:
        raise SimulationError(f"{', '.join(f'{key}={value}' for key, value in names.items())}: {error}") from error


def parsed_params(pairs: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` pairs with values as in YAML: ``true``, ``3``, ``0.5``, text.

    Raises:
        PolicyParameterError: a pair without ``=``, or a value that is not YAML.
    """
    params: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not found or not key:
            raise PolicyParameterError(f"{pair!r}: give parameters as KEY=VALUE")
        params[key] = parsed_value(value, pair)
    return params


def parsed_speeds(text: str) -> tuple[float, ...]:
    """Numbers separated by commas; raises SimulationError."""
    try:
        return tuple([float(each) for each in text.split(",")]) if text else ()
    except ValueError as error:
        raise SimulationError(f"--speeds {text}: give numbers separated by commas, such as 1,0.5") from error


def parsed_value(text: str, where: str) -> Any:
    """A value as YAML has it; raises PolicyParameterError."""
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        raise PolicyParameterError(f"{where!r}: the value is not YAML ({error})") from error
