"""Settings of the decision: policy, admission, offload, classes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any

import yaml
from pydantic import Field, model_validator

from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S, AdmissionRule
from policies.classes import ClassThresholds
from policies.costs.constants import CostConstants, constants_of
from policies.registry import PolicyLoadError, PolicyParameterError, make_admission, make_planner, make_routing
from proxy.settings.section import Seconds, Section
from warmroute_yaml import hardware_file, hardware_names, load_yaml

LONGEST_KEEP_S = 86_400
"""Longest ``keep_s`` of an admission rule."""


class PolicySettings(Section):
    """Routing policy by registered name."""

    name: str = Field(default="warm", description="registered routing policy")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that policy")

    @model_validator(mode="after")
    def _exists(self) -> PolicySettings:
        make_routing(self.name, self.params)
        return self


class AdmissionSettings(Section):
    """Admission rule by registered name, and bounds on the requests that it holds."""

    name: str = Field(default=DEFAULT_RULE, description="registered admission rule")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that rule")
    max_hold_s: Seconds = Field(
        default=MAX_HOLD_S, description="longest time a request is held, after which it is sent"
    )
    max_held: int = Field(
        default=1000,
        ge=0,
        description="requests held at once; above it, those that the rule would hold are sent at once",
    )
    reject_above_s: Seconds | None = Field(
        default=None,
        description="answer 429 with Retry-After if the expected wait is longer, instead of holding; none: always hold",
    )

    @model_validator(mode="after")
    def _exists(self) -> AdmissionSettings:
        admission_rule(self.name, self.params)
        return self


def admission_rule(name: str, params: Mapping[str, Any]) -> AdmissionRule:
    """Build an admission rule; raises ValueError if there is none, or a parameter or its ``keep_s`` is not usable."""
    endless = [key for key, value in params.items() if isinstance(value, float) and not math.isfinite(value)]
    if endless:
        raise PolicyParameterError(f"admission rule {name!r}: {', '.join(endless)}: give finite numbers")
    rule = make_admission(name, params)
    try:
        usable = 0 <= rule.keep_s <= LONGEST_KEEP_S
    except Exception as error:
        raise PolicyLoadError(f"admission rule {name!r}: keep_s: {type(error).__name__}: {error}") from error
    if not usable:
        raise PolicyLoadError(f"admission rule {name!r}: keep_s must be within 0..{LONGEST_KEEP_S} s")
    return rule


class OffloadSettings(Section):
    """Offloading of heavy prefills, and the bounds on each leg."""

    planner: str = Field(default="never", description="registered offload planner")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that planner")
    prefill_timeout_s: Seconds = Field(default=120.0, description="bound on the P leg")
    first_token_timeout_s: Seconds = Field(
        default=60.0, description="bound on the D leg's first token after a hand-off"
    )
    token_timeout_s: Seconds = Field(
        default=0.25, description="additional time per permitted output token, for answers that are not streamed"
    )
    abandoned_s: Seconds = Field(
        default=120.0,
        description="time an abandoned pull stays open: closing one that D still has queued crashes "
        "vLLM 0.18.1's engine core",
    )
    query_timeout_s: Seconds = Field(default=5.0, description="bound on one bootstrap /query")
    watch_interval_s: Seconds = Field(default=2.0, description="interval of checking P's identity while D pulls")
    hold_s: Seconds = Field(
        default=480.0,
        description="time an engine keeps KV that is not pulled (its VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)",
    )
    leak_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1,
        description="share of D's KV pool that abandoned pulls may occupy before the instance is recycled",
    )

    @model_validator(mode="after")
    def _exists(self) -> OffloadSettings:
        make_planner(self.planner, self.params)
        return self


class ClassSettings(Section):
    """Request classes by new tokens: WARM < medium_tokens <= MEDIUM < heavy_tokens <= HEAVY."""

    medium_tokens: int = Field(default=5_000, description="new tokens from which a request is MEDIUM")
    heavy_tokens: int = Field(default=20_000, description="new tokens from which a request is HEAVY")

    @model_validator(mode="after")
    def _ordered(self) -> ClassSettings:
        self.thresholds()
        return self

    def thresholds(self) -> ClassThresholds:
        """The thresholds as the policies' type."""
        return ClassThresholds(self.medium_tokens, self.heavy_tokens)


def hardware_constants(name: str) -> CostConstants:
    """The cost constants of a profile, by its name in configs/hardware or its path (``.yaml``).

    Raises:
        ValueError: no such profile, or one without usable constants; the message says what to do.
    """
    path = hardware_file(name)
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(_calibrated())
        raise ValueError(
            f"hardware profile {name!r}: there is no {path}; profiles with cost constants: {known}; "
            "or give the path of a .yaml file"
        ) from error
    except OSError as error:
        raise ValueError(f"hardware profile {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"hardware profile {path} is not YAML: {error}") from error
    costs = values.get("costs") if isinstance(values, dict) else None
    if costs is None:
        raise ValueError(
            f"hardware profile {path} has no section `costs`; `warmroute calibrate` writes one, and these have one: "
            f"{', '.join(_calibrated())}"
        )
    try:
        return constants_of(costs)
    except ValueError as error:
        raise ValueError(f"hardware profile {path}: {error}") from error


def _calibrated() -> list[str]:
    """Names of the shipped profiles that have cost constants."""
    return [
        name
        for name in hardware_names()
        if re.search(r"^costs:", hardware_file(name).read_text(encoding="utf-8"), re.M)
    ]
