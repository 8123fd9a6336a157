"""Policies and planners by name: the built-in ones, and third-party ones found through entry points."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from policies.admission.base import AdmissionRule
from policies.admission.never_hold import NeverHold
from policies.admission.session_cap import SessionCap
from policies.admission.working_set import WorkingSet
from policies.baselines.aibrix_prefix import AibrixPrefix
from policies.baselines.dynamo_cost import DynamoCost
from policies.baselines.llmd_affinity import LlmdAffinity
from policies.baselines.lpwl import Lpwl
from policies.baselines.pinned_linear import PinnedLinear
from policies.baselines.sglang_cache_aware import SglangCacheAware
from policies.baselines.smetric import Smetric
from policies.baselines.vllm_cache_aware import VllmCacheAware
from policies.baselines.vllm_kv_aware import VllmKvAware
from policies.offload.base import OffloadPlanner
from policies.offload.cost_model import CostModel
from policies.offload.never import Never
from policies.offload.static_pd import StaticPd
from policies.offload.threshold import Threshold
from policies.routing.base import RoutingPolicy
from policies.routing.joint import Joint
from policies.routing.least_loaded import LeastLoaded
from policies.routing.linear import Linear
from policies.routing.lmetric import LMetric
from policies.routing.migrate import Migrate
from policies.routing.random_choice import RandomChoice
from policies.routing.round_robin import RoundRobin
from policies.routing.session_sticky import SessionSticky
from policies.routing.unified import Unified
from policies.routing.warm import Warm

ROUTING_GROUP = "warmroute.routing"
OFFLOAD_GROUP = "warmroute.offload"
ADMISSION_GROUP = "warmroute.admission"

_ROUTING: tuple[type[RoutingPolicy], ...] = (
    *(Joint, LeastLoaded, Linear, LMetric, Migrate, RandomChoice, RoundRobin, SessionSticky, Unified, Warm),
    *(
        AibrixPrefix,
        DynamoCost,
        LlmdAffinity,
        Lpwl,
        PinnedLinear,
        SglangCacheAware,
        Smetric,
        VllmCacheAware,
        VllmKvAware,
    ),
)
_OFFLOAD: tuple[type[OffloadPlanner], ...] = (CostModel, Never, StaticPd, Threshold)
_ADMISSION: tuple[type[AdmissionRule], ...] = (NeverHold, SessionCap, WorkingSet)
BUILT_IN: Mapping[str, Mapping[str, type]] = MappingProxyType(
    {
        ROUTING_GROUP: MappingProxyType({policy.name: policy for policy in _ROUTING}),
        OFFLOAD_GROUP: MappingProxyType({planner.name: planner for planner in _OFFLOAD}),
        ADMISSION_GROUP: MappingProxyType({rule.name: rule for rule in _ADMISSION}),
    }
)
"""Policies, planners and admission rules of this package, by entry-point group and name."""

_OURS = "warmroute"
"""Distribution whose entry points are skipped: metadata of an older editable install may have the built-in ones."""

_METHODS: Mapping[str, str] = MappingProxyType(
    {"routing policy": "choose", "offload planner": "plan", "admission rule": "admit"}
)
_ACCEPTED: Mapping[str, tuple[str, tuple[type, ...]]] = MappingProxyType(
    {
        "bool": ("true or false", (bool,)),
        "int": ("an integer", (int,)),
        "float": ("a number", (int, float)),
        "str": ("a string", (str,)),
    }
)
_WHERE = (
    "it is looked for in the folder that the command runs in and on PYTHONPATH: run the command in the folder that has "
    "{0}.py or {0}/, or add that folder to PYTHONPATH"
)
"""Remedy for a module of ``MODULE:Class`` that is not found."""


class UnknownPolicyError(ValueError):
    """No policy of that name is installed; the message lists the installed ones."""


class PolicyLoadError(UnknownPolicyError):
    """An installed package's policy cannot be imported or built; the message names the package and the error."""


class PolicyNameTakenError(UnknownPolicyError):
    """An installed package declares a policy under a name that is already taken; the message names both."""


class PolicyParameterError(ValueError):
    """A parameter the policy does not have, or a value it rejects."""


def routing_policies() -> list[str]:
    """Names of all routing policies, built-in and installed, sorted.

    Raises:
        PolicyNameTakenError: an installed package declares a name that is taken.
    """
    return sorted(_found(ROUTING_GROUP))


def offload_planners() -> list[str]:
    """Names of all offload planners, built-in and installed, sorted; errors as ``routing_policies``."""
    return sorted(_found(OFFLOAD_GROUP))


def admission_rules() -> list[str]:
    """Names of all admission rules, built-in and installed, sorted; errors as ``routing_policies``."""
    return sorted(_found(ADMISSION_GROUP))


def make_routing(name: str, params: Mapping[str, Any] | None = None, *, modules: bool = False) -> RoutingPolicy:
    """Build a routing policy.

    Args:
        name: of a policy.
        params: other values than its defaults.
        modules: accept ``MODULE:Class`` as a name too. Not where others give it: the module is imported.

    Raises:
        UnknownPolicyError: no such policy.
        PolicyLoadError: an installed package's policy cannot be imported or built.
        PolicyNameTakenError: an installed package declares a name that is taken.
        PolicyParameterError: an unknown parameter or a refused value.
    """
    return cast(RoutingPolicy, _make(_known(ROUTING_GROUP, name, modules), "routing policy", name, params or {}))


class InstalledPolicies(NamedTuple):
    """The installed routing policies."""

    usable: dict[str, RoutingPolicy]
    """With default parameters, by name."""
    broken: dict[str, str]
    """Name -> reason, for those that cannot be imported or built. Those without default parameters are in neither."""


def all_routing() -> InstalledPolicies:
    """All installed routing policies. Reads the entry points once; a broken one does not prevent the use of others."""
    found = _found(ROUTING_GROUP)
    installed = InstalledPolicies({}, {})
    for name in sorted(found):
        try:
            installed.usable[name] = cast(RoutingPolicy, _make(found, "routing policy", name, {}))
        except PolicyParameterError:
            continue
        except PolicyLoadError as error:
            installed.broken[name] = str(error)
    return installed


def make_planner(name: str, params: Mapping[str, Any] | None = None, *, modules: bool = False) -> OffloadPlanner:
    """Build an offload planner, as ``make_routing``."""
    return cast(OffloadPlanner, _make(_known(OFFLOAD_GROUP, name, modules), "offload planner", name, params or {}))


def make_admission(name: str, params: Mapping[str, Any] | None = None, *, modules: bool = False) -> AdmissionRule:
    """Build an admission rule, as ``make_routing``."""
    return cast(AdmissionRule, _make(_known(ADMISSION_GROUP, name, modules), "admission rule", name, params or {}))


def parameters(policy: object) -> dict[str, Any]:
    """Parameters of a policy or planner with their values."""
    return dataclasses.asdict(policy) if dataclasses.is_dataclass(policy) and not isinstance(policy, type) else {}


def _found(group: str) -> dict[str, type | EntryPoint]:
    """Built-in classes, and entry points of other distributions, not loaded yet."""
    found: dict[str, type | EntryPoint] = dict(BUILT_IN[group])
    for point in entry_points(group=group):
        if _distribution(point) == _OURS:
            continue
        other = found.get(point.name)
        if isinstance(other, type) or (other is not None and other != point):
            owner = "warmroute itself" if isinstance(other, type) else f"{_distribution(other)} ({other.value})"
            raise PolicyNameTakenError(
                f"{_distribution(point)} declares {point.name!r} in the entry points {group!r} ({point.value}), "
                f"but that name is taken by {owner}: rename or uninstall one of them"
            )
        found[point.name] = point
    return found


def _known(group: str, name: str, modules: bool) -> dict[str, type | EntryPoint]:
    """Result of ``_found``, and with ``modules`` the class that a name ``MODULE:Class`` stands for."""
    found = _found(group)
    if modules and ":" in name:
        found[name] = EntryPoint(name, name, group)
    return found


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "a package"


def _check_types(what: str, factory: Any, params: Mapping[str, Any]) -> None:
    """Reject a value that is not of its field's plain type: the string ``"false"`` would otherwise count as true."""
    for field in dataclasses.fields(factory):
        declared = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
        if field.name not in params or declared not in _ACCEPTED:
            continue
        wanted, types = _ACCEPTED[declared]
        value = params[field.name]
        if not isinstance(value, types) or isinstance(value, bool) is not (declared == "bool"):
            raise PolicyParameterError(f"{what}: {field.name} must be {wanted}, got {value!r}")


def _make(found: Mapping[str, type | EntryPoint], kind: str, name: str, params: Mapping[str, Any]) -> object:
    if name not in found:
        raise UnknownPolicyError(f"unknown {kind} {name!r}; known: {', '.join(sorted(found))}")
    entry = found[name]
    factory: Any = entry if isinstance(entry, type) else _load(entry, kind)
    known = [field.name for field in dataclasses.fields(factory)] if dataclasses.is_dataclass(factory) else None
    unknown = [key for key in params if known is not None and key not in known]
    if unknown:
        has = ", ".join(known or []) or "none"
        raise PolicyParameterError(f"{kind} {name!r} has no parameter {', '.join(map(repr, unknown))}; it has: {has}")
    if known is not None:
        _check_types(f"{kind} {name!r}", factory, params)
    try:
        made = factory(**params)
    except (TypeError, ValueError) as error:
        # Built directly, as in a simulation, the error has to name the class itself.
        reason = str(error).removeprefix(f"{name}: ")
        raise PolicyParameterError(f"{kind} {name!r}: {reason}") from error
    except Exception as error:
        raise PolicyLoadError(f"{kind} {name!r} cannot be built: {type(error).__name__}: {error}") from error
    method = _METHODS[kind]
    if not isinstance(getattr(made, "name", None), str) or not callable(getattr(made, method, None)):
        raise PolicyLoadError(f"{kind} {name!r} has no attribute 'name' that is a string, or no method {method!r}")
    if kind == "admission rule" and not isinstance(getattr(made, "keep_s", None), int | float):
        raise PolicyLoadError(f"{kind} {name!r} has no attribute 'keep_s' that is a number of seconds")
    return made


def _load(point: EntryPoint, kind: str) -> object:
    """The class of an entry point; whatever its import raises becomes one error that names the package."""
    if EntryPoint.pattern.match(point.value) is None:
        raise PolicyLoadError(f"{kind} {point.value!r}: write MODULE:CLASS, such as acme_routing:FewestSessions")
    try:
        return point.load()
    except Exception as error:
        given = point.name == point.value
        owner = "" if given else f" of {_distribution(point)} ({point.value})"
        remedy = ""
        if given and isinstance(error, ModuleNotFoundError) and f"{point.module}.".startswith(f"{error.name}."):
            remedy = f"; {_WHERE.format(error.name)}"
            if point.module.endswith(".py"):
                remedy = f"; write the module without .py: {point.module.removesuffix('.py')}:{point.attr}"
        raise PolicyLoadError(
            f"{kind} {point.name!r}{owner} cannot be loaded: {type(error).__name__}: {error}{remedy}"
        ) from error
