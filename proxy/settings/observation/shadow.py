"""Settings of shadow decisions: the policies, planners and admission rules that decide without effect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, field_validator, model_validator

from policies.admission.base import AdmissionRule
from policies.offload.base import OffloadPlanner
from policies.registry import PolicyParameterError, make_planner, make_routing
from policies.routing.base import RoutingPolicy
from policies.types import PolicyPart
from proxy.settings.routing import admission_rule
from proxy.settings.section import Section

MOST_SHADOWS = 16
"""Shadows at once; each has series of its own in the metrics."""


class ShadowEntry(Section):
    """One shadow by registered name."""

    name: str = Field(description="registered name")
    params: dict[str, Any] = Field(default_factory=dict, description="its parameters; the others take their defaults")
    label: str = Field(
        default="",
        pattern=r"^([A-Za-z0-9_.-]{1,60})?$",
        description="its name in figures and metrics, if one name is used more than once; by default the name",
    )

    @property
    def shown_as(self) -> str:
        """Its name in figures and metrics."""
        return self.label or self.name


class ShadowParts(NamedTuple):
    """The built policies, planners and admission rules by label, with their settings."""

    policies: dict[str, tuple[ShadowEntry, RoutingPolicy]]
    planners: dict[str, tuple[ShadowEntry, OffloadPlanner]]
    admission: dict[str, tuple[ShadowEntry, AdmissionRule]]


_FIELDS: Mapping[str, PolicyPart] = {
    "policies": PolicyPart.POLICY,
    "planners": PolicyPart.PLANNER,
    "admission": PolicyPart.ADMISSION,
}


class ShadowSettings(Section):
    """Decisions without effect beside the live ones (docs/shadow.md)."""

    policies: tuple[ShadowEntry, ...] = Field(
        default=(), description="routing policies: names, or {name, params, label}; none: no cost"
    )
    planners: tuple[ShadowEntry, ...] = Field(default=(), description="offload planners, likewise")
    admission: tuple[ShadowEntry, ...] = Field(default=(), description="admission rules, likewise")
    queue: int = Field(
        default=256, ge=1, le=65_536, description="live decisions that wait for the shadows; above it, they are skipped"
    )

    @field_validator(*_FIELDS, mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return [{"name": each} if isinstance(each, str) else each for each in value] if _is_list(value) else value

    @model_validator(mode="after")
    def _exist(self) -> ShadowSettings:
        labels = [entry.shown_as for field in _FIELDS for entry in getattr(self, field)]
        if twice := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"given more than once: {', '.join(twice)}; set label to distinguish them")
        if len(labels) > MOST_SHADOWS:
            raise ValueError(f"{len(labels)} shadows; at most {MOST_SHADOWS} are permitted")
        self.built()
        return self

    def built(self) -> ShadowParts:
        """Build every part; raises ValueError for an unknown name or an unusable parameter."""
        return ShadowParts(
            {each.shown_as: (each, make_routing(each.name, _finite(each))) for each in self.policies},
            {each.shown_as: (each, make_planner(each.name, _finite(each))) for each in self.planners},
            {each.shown_as: (each, admission_rule(each.name, _finite(each))) for each in self.admission},
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _finite(entry: ShadowEntry) -> dict[str, Any]:
    endless = [key for key, value in entry.params.items() if isinstance(value, float) and not math.isfinite(value)]
    if endless:
        raise PolicyParameterError(f"shadow {entry.shown_as!r}: {', '.join(endless)}: give finite numbers")
    return entry.params
