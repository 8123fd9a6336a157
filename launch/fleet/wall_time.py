"""Conversion of a proxy's time settings to wall time, for engines whose clock runs faster than the wall's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S
from policies.registry import PolicyParameterError, UnknownPolicyError, make_admission, make_routing, parameters
from proxy.settings.prediction import LedgerSettings

_SECONDS = re.compile(r"_s(_per_|$)")
"""Parameters of policies that are times: ``hold_s``, ``ttft_slo_s_per_1k_tokens``."""
_RATES = frozenset({"slowdown"})
"""Parameters of policies per second: times the square of a prefill's seconds, a slowdown gives seconds."""


def in_wall_time(proxy: dict[str, Any], clock_scale: float) -> dict[str, Any]:
    """A proxy's settings with its times divided by ``clock_scale``: load's half-life, bound on holding, and the
    parameters of policy and admission rule; parameters per second are multiplied.

    Args:
        proxy: Settings by section, times in engine seconds; omitted keys have their defaults.
        clock_scale: Speed of the engines' clock relative to the wall's.
    """
    if clock_scale == 1.0:
        return proxy
    ledger = dict(proxy.get("ledger") or {})
    ledger["recent_half_life_s"] = (
        float(ledger.get("recent_half_life_s", LedgerSettings().recent_half_life_s)) / clock_scale
    )
    scaled = {**proxy, "ledger": ledger}
    policy = dict(proxy.get("policy") or {})
    if policy.get("name"):
        scaled["policy"] = {**policy, "params": _faster(make_routing, policy, clock_scale)}
    admission = {"name": DEFAULT_RULE, **(proxy.get("admission") or {})}
    bound_s = float(admission.get("max_hold_s", MAX_HOLD_S)) / clock_scale
    params = _faster(make_admission, admission, clock_scale)
    scaled["admission"] = {**admission, "params": params, "max_hold_s": bound_s}
    return scaled


def _faster(make: Callable[..., object], section: dict[str, Any], clock_scale: float) -> dict[str, Any]:
    params = section.get("params") or {}
    try:
        made = parameters(make(section["name"], params))
        wall = {key: value / clock_scale for key, value in made.items() if _SECONDS.search(key)}
        wall |= {key: value * clock_scale for key, value in made.items() if key in _RATES}
    except (PolicyParameterError, UnknownPolicyError):
        return params  # refused with a better message where the fleet is read
    return {**params, **wall}
