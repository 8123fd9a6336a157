"""Rules by which the answers of each admin endpoint are joined over the workers."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from proxy.gather.joining import (
    Join,
    any_of,
    average,
    chained,
    joined,
    largest,
    mean_by,
    newest,
    of_all,
    rows,
    smallest,
    total,
    union,
)

_SHOWN_LINE = 100
_LATEST_SHADOWS = 50
_STATES = ("closed", "half_open", "open")


def _worst_breaker(values: list[Any]) -> Any:
    """The breaker that is least closed, and all openings."""
    worst = max(values, key=lambda each: _STATES.index(each["state"]) if each["state"] in _STATES else 1)
    return {**worst, "openings": sum(each["openings"] for each in values)}


_INSTANCE = MappingProxyType(
    {
        "healthy": smallest,
        "draining": largest,
        "leaving": largest,
        "last_error": any_of,
        "recycle_wanted": any_of,
        "specialist": largest,
        "slowness": average,
        "breaker": _worst_breaker,
        "restarts": largest,
        "requests": total,
        "prefilling": total,
        "in_flight": {"*": total},
        "held_tokens": total,
        "pending_prefill_tokens": total,
        "decoding_tokens": total,
        "recent_tokens": total,
        "sessions": largest,
        "index_blocks": largest,
        "kv_events": of_all({"trusted": smallest, "partial": largest, "not_trusted_because": any_of}),
        "engine": {"*": largest},
    }
)
"""One instance: load is the sum of the workers' parts, state is the worst."""
_DEPARTURE = {"requests": total, "held_tokens": total, "left_s": largest}
_REMOVED = {"cut_requests": total, "requests": total, "held_tokens": total}

_TENANT = {
    "waiting": total,
    "in_flight_tokens": total,
    "deficit_tokens": total,
    "key": {"requests": total, "sessions": total, "refused": {"*": total}},
}
"""One tenant. A session whose requests reach several workers counts with each of them."""
_COUNTED = {"*": {"*": total}}
_DISCOVERY = {
    "instances": largest,
    "readings": {"*": total},
    "failures_in_a_row": largest,
    "last_error": any_of,
    "problems": union,
    "read_unix_s": smallest,
}

_STATS = {
    "requests": {"outcomes": {"*": total}, "*": total},
    "ledger": {"*": total},
    "admission": {"*": total},
    "holding": {
        "held": total,
        "longest_held_s": largest,
        "refused": total,
        "line": newest("held_s", _SHOWN_LINE),
        # Each worker counts the contexts of the others too, but its own held requests only.
        "parts": rows(("instances",), {"held": total, "*": largest}),
    },
    "tenants": {"*": _TENANT},
    "retries": {"*": total},
    "sessions": largest,
    "index": {"distinct_blocks": largest},
    "exact_index": {"distinct_blocks": largest, "promised_prompts": total},
    "discovery": _DISCOVERY,
    "tokenizer": {"endpoints": {"*": {"trusted": smallest, "*": total}}, "cache": of_all({"*": total})},
    "event_loop_late_s": largest,
    "prediction_error": {"used": {"*": total}, "side_by_side": _COUNTED, "instances": {"*": _COUNTED}},
    "policy_failures": {
        "failures": rows(("part", "name"), {"count": total, "last": any_of}),
        "slow_decisions": {"*": total},
    },
}

_METERED = {
    "window_requests": total,
    "prompt_tokens": total,
    "predicted_tokens": total,
    "reported_tokens": total,
    "ledger_requests": total,
    "engine_counters": {"*": largest},
    "drift": union,
    "*": largest,
}


def _metered(values: list[Any]) -> Any:
    """Instances by name."""
    names = dict.fromkeys(name for each in values for name in each)
    one = mean_by("window_requests", ("prediction_error", "transfer_error"), _METERED)
    return {name: one([each[name] for each in values if name in each]) for name in names}


_METERS = {
    "fleet": mean_by(
        "prompt_tokens",
        ("achieved", "reachable", "ceiling", "loss"),
        {"window_requests": total, "prompt_tokens": total, "ceiling_blocks": largest},
    ),
    "instances": _metered,
}

_SHADOWED = {
    "requests": total,
    "agreed": total,
    "regret_s": mean_by("total", (), {"*": total}),
    "hit_tokens_given_away": total,
    "hit_tokens_given_away_by_shadow": total,
    "answers": {"*": total},
    "failures": total,
    "last_error": any_of,
    "paused": largest,
    "decision_us_mean": largest,
}


def _shadowed(values: list[Any]) -> list[Any]:
    """Figures of every shadow; means are those of the sums."""
    found: list[Any] = rows(("part", "name"), _SHADOWED)(values)
    for each in found:
        requests = each["requests"]
        each["agreement"] = round(each["agreed"] / requests, 6) if requests else None
        each["regret_s"]["mean"] = round(each["regret_s"]["total"] / requests, 9) if requests else None
    return found


_SHADOW = {
    "requests": total,
    "skipped": total,
    "waiting": total,
    "request_us_mean": largest,
    "policies": _shadowed,
    "latest": newest("unix_s", _LATEST_SHADOWS),
}

_KILLERS = {
    "compared_turns": total,
    "conversations": total,
    "rules": {"*": {"turns": total, "lost_tokens": total}},
    "found": chained,
}


def _conditions(values: list[Any]) -> list[Any]:
    """Every condition, not ok if it is not with any worker, whose account is given."""
    same: dict[str, list[Any]] = {}
    for each in chained(values):
        same.setdefault(each["name"], []).append(each)
    return [next((each for each in some if not each["ok"]), some[0]) for some in same.values()]


def _healthy(values: list[Any]) -> list[Any]:
    """Instances that every worker can send requests to."""
    return [name for name in values[0] if all(name in each for each in values)]


_READY = {"ready": smallest, "healthy_instances": _healthy, "conditions": _conditions}

READS: MappingProxyType[str, Join] = MappingProxyType(
    {
        "/ready": of_all(_READY),
        "/load": of_all({"server_load": total}),
        "/stats": of_all(_STATS),
        "/meters": of_all(_METERS),
        "/shadow": of_all(_SHADOW),
        "/cache-killers": of_all(_KILLERS),
        "/instances": of_all({"instances": rows(("name",), _INSTANCE), "departing": rows(("name", "url"), _DEPARTURE)}),
    }
)
"""Path of a GET request -> join of the answers."""


def join_of(method: str, path: str) -> Join | None:
    """Join of the answers to a request; None: one worker answers for all."""
    if method == "GET" and path in READS:
        return READS[path]
    if path.startswith("/instances"):
        return _instance_answer
    if method == "PUT" and path == "/shadow":
        return READS["/shadow"]
    return None


def changes_workers(method: str, path: str) -> bool:
    """True for a request that changes every worker."""
    if path.startswith("/instances"):
        return method in {"POST", "PUT", "DELETE"}
    return (method, path) in {("PUT", "/policy"), ("PUT", "/admission"), ("PUT", "/shadow"), ("POST", "/reload")}


def _instance_answer(values: list[Any]) -> Any:
    """A row of one instance or of an engine with its ranks, or the result of a removal."""
    row = values[0]["ranks"][0] if values[0].get("ranks") else values[0]
    rules = _INSTANCE if "breaker" in row else _REMOVED
    return joined(values, {**rules, "ranks": rows(("name",), rules)})
