"""Policies and planners by name; built-in and third-party ones are found through the same entry points."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, cast

from policies.offload.base import OffloadPlanner
from policies.routing.base import RoutingPolicy

ROUTING_GROUP = "warmroute.routing"
OFFLOAD_GROUP = "warmroute.offload"

_ACCEPTED: Mapping[str, tuple[str, tuple[type, ...]]] = MappingProxyType(
    {
        "bool": ("true or false", (bool,)),
        "int": ("an integer", (int,)),
        "float": ("a number", (int, float)),
        "str": ("a string", (str,)),
    }
)


class UnknownPolicyError(ValueError):
    """No policy of that name is installed; the message lists the installed ones."""


class PolicyParameterError(ValueError):
    """A parameter the policy does not have, or a value it rejects."""


def routing_policies() -> list[str]:
    """Names of all installed routing policies, sorted."""
    return sorted(_found(ROUTING_GROUP))


def offload_planners() -> list[str]:
    """Names of all installed offload planners, sorted."""
    return sorted(_found(OFFLOAD_GROUP))


def make_routing(name: str, params: Mapping[str, Any] | None = None) -> RoutingPolicy:
    """Build a routing policy.

    Raises:
        UnknownPolicyError: no such policy.
        PolicyParameterError: an unknown parameter or a refused value.
    """
    return cast(RoutingPolicy, _make(_found(ROUTING_GROUP), "routing policy", name, params or {}))


def all_routing() -> dict[str, RoutingPolicy]:
    """All installed routing policies with default parameters, by name. Reads the entry points once."""
    found = _found(ROUTING_GROUP)
    return {name: cast(RoutingPolicy, _make(found, "routing policy", name, {})) for name in sorted(found)}


def make_planner(name: str, params: Mapping[str, Any] | None = None) -> OffloadPlanner:
    """Build an offload planner; errors as ``make_routing``."""
    return cast(OffloadPlanner, _make(_found(OFFLOAD_GROUP), "offload planner", name, params or {}))


def parameters(policy: object) -> dict[str, Any]:
    """Parameters of a policy or planner with their values."""
    return dataclasses.asdict(policy) if dataclasses.is_dataclass(policy) and not isinstance(policy, type) else {}


def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


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


def _make(found: Mapping[str, EntryPoint], kind: str, name: str, params: Mapping[str, Any]) -> object:
    if name not in found:
        raise UnknownPolicyError(f"unknown {kind} {name!r}; known: {', '.join(sorted(found))}")
    factory = found[name].load()
    known = [field.name for field in dataclasses.fields(factory)] if dataclasses.is_dataclass(factory) else None
    unknown = [key for key in params if known is not None and key not in known]
    if unknown:
        has = ", ".join(known or []) or "none"
        raise PolicyParameterError(f"{kind} {name!r} has no parameter {', '.join(map(repr, unknown))}; it has: {has}")
    if known is not None:
        _check_types(f"{kind} {name!r}", factory, params)
    try:
        return factory(**params)
    except (TypeError, ValueError) as error:
        raise PolicyParameterError(f"{kind} {name!r}: {error}") from error
