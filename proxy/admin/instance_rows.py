"""Rows of ``GET /instances``."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.core import Core
from proxy.fleet.breaker import BreakerState
from proxy.fleet.instances import Instance
from proxy.operations.fleet_changes import Departure, FleetChanges


def instance_rows(core: Core, fleet: FleetChanges) -> list[dict[str, Any]]:
    """Every instance: health, identity, load, cache."""
    now_s = time.monotonic()
    classes = _classes_in_flight(core)
    return [_row(core, fleet, instance, now_s, classes) for instance in core.instances]


def _classes_in_flight(core: Core) -> dict[str, Counter[str]]:
    """Requests that are decided and not finished, by instance and class."""
    found: dict[str, Counter[str]] = {}
    for row in core.breakdown.open_rows:
        if row.decision is not None:
            found.setdefault(row.decision.decode_on, Counter())[row.decision.request_class.value] += 1
    return found


def _row(
    core: Core, fleet: FleetChanges, instance: Instance, now_s: float, classes: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    state = core.router.state
    load, slowness = state.ledger.load(instance.name, now_s), state.costs.slowness.measured.get(instance.name)
    return {
        "name": instance.name,
        "url": instance.url,
        "data_parallel_rank": instance.rank,
        "role": instance.settings.role.value,
        "source": instance.source.value,
        "healthy": instance.healthy,
        "draining": instance.draining,
        "leaving": fleet.leaving(instance),
        "last_error": instance.last_error or instance.list_refused,
        "breaker": _breaker(instance, now_s),
        "engine_id": instance.engine_id,
        "started_unix_s": instance.started_unix_s,
        "restarts": instance.restarts,
        "models": None if instance.models is None else sorted(instance.models.names),
        "recycle_wanted": instance.recycle_wanted,
        "host": instance.settings.host,
        "connector": instance.settings.connector.value,
        "transport": instance.settings.transport.value if instance.settings.transport else None,
        "priority_scheduling": instance.settings.priority_scheduling,
        "requests": load.requests,
        "prefilling": load.prefilling,
        "in_flight": dict(classes.get(instance.name, {})),
        "held_tokens": state.holds.tokens(instance.name, now_s),
        "pending_prefill_tokens": load.pending_prefill_tokens,
        "decoding_tokens": load.decoding_tokens,
        "specialist": instance.name in state.specialists.names,
        "slowness": round(slowness, 3) if slowness else None,
        "recent_tokens": round(load.recent_tokens, 1),
        "sessions": state.sessions.count(instance.name),
        "index_blocks": state.index.blocks(instance.name),
        "index_capacity_blocks": state.index.capacity(instance.name),
        "kv_events": _kv_events(core, instance.name),
        "engine": {
            **instance.reported._asdict(),
            "kv_capacity_tokens": instance.kv_capacity_tokens,
            "block_tokens": instance.block_tokens,
        },
    }


def engine_row(core: Core, fleet: FleetChanges, name: str, ranks: Sequence[Instance]) -> dict[str, Any]:
    """Row of what a name means: an instance, or an engine with the rows of its data-parallel ranks."""
    now_s, classes = time.monotonic(), _classes_in_flight(core)
    rows = [_row(core, fleet, instance, now_s, classes) for instance in ranks]
    if ranks[0].name == name:
        return rows[0]
    return {"name": name, "url": ranks[0].url, "ranks": rows}


def departure_row(departure: Departure) -> dict[str, Any]:
    """Row of one engine that is being removed."""
    return {
        "name": departure.instance.name,
        "url": departure.instance.url,
        "replaced": departure.replaced,
        "requests": departure.legs(),
        "held_tokens": departure.held(),
        "left_s": round(max(0.0, departure.deadline_s - asyncio.get_running_loop().time()), 1),
    }


def _breaker(instance: Instance, now_s: float) -> dict[str, Any]:
    """Breaker state of an instance. ``until_unix_s``: no trial before that time; None unless open."""
    breaker = instance.breaker
    is_open = breaker.state is BreakerState.OPEN
    return {
        "state": breaker.state.value,
        "why": breaker.why,
        "until_unix_s": round(time.time() + breaker.until_s - now_s, 3) if is_open else None,
        "failures_in_a_row": breaker.failures_in_a_row,
        "trial_requests": breaker.trials,
        "openings": breaker.openings,
        "doublings": breaker.doublings,
    }


def _kv_events(core: Core, name: str) -> dict[str, Any] | None:
    """State of an instance's exact index; None if its events are not followed."""
    if name not in core.events.streams:
        return None
    exact = core.router.state.predictor.exact
    return {
        **core.events.figures(name),
        "trusted": exact.trusted(name),
        "partial": name in exact.partial_instances,
        "not_trusted_because": exact.reason(name),
    }
