"""The Grafana dashboard of configs/monitoring, generated from a table: ``python -m tests.monitoring.dashboard``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

from policies.row import FAILED_OUTCOMES, RequestOutcome
from tests.monitoring.names import ROOT

PATH = ROOT / "configs" / "monitoring" / "grafana-dashboard.json"

_COLUMNS = 24
_HEIGHT = 8
_FLEET = 'proxy=~"$proxy"'
_EACH = 'proxy=~"$proxy", instance=~"$instance"'
_RATE = "[$__rate_interval]"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One panel: queries by their legends."""

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    description: str = ""


def _rate(metric: str, by: str, labels: str = _FLEET) -> str:
    return f"sum by ({by}) (rate({metric}{{{labels}}}{_RATE}))"


def _quantiles(metric: str, by: str = "") -> dict[str, str]:
    """50th, 90th and 99th percentile of a histogram."""
    grouped = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{share * 100:g}{legend}": f"histogram_quantile({share}, {_rate(f'{metric}_bucket', grouped)})"
        for share in (0.5, 0.9, 0.99)
    }


def _hit_rate(kind: str) -> str:
    cached = f'sum(rate(warmroute_cached_tokens_total{{{_FLEET}, kind="{kind}"}}{_RATE}))'
    return f"{cached} / sum(rate(warmroute_reported_prompt_tokens_total{{{_FLEET}}}{_RATE}))"


_FAILED = "|".join(each.value for each in RequestOutcome if each in FAILED_OUTCOMES)

ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Overview": (
        Panel(
            "Healthy instances",
            {"healthy": f"sum(warmroute_instance_healthy{{{_FLEET}}})"},
            kind="stat",
            width=4,
        ),
        Panel("In flight", {"in flight": f"sum(warmroute_in_flight{{{_FLEET}}})"}, kind="stat", width=4),
        Panel("Hit rate", {"hit rate": _hit_rate("actual")}, "percentunit", "stat", 4),
        Panel(
            "Failed requests",
            {
                "failed": f'sum(rate(warmroute_requests_total{{{_FLEET}, outcome=~"{_FAILED}"}}{_RATE})) or vector(0)',
            },
            "reqps",
            "stat",
            4,
        ),
        Panel("Held", {"held": f"sum(warmroute_held_requests{{{_FLEET}}})"}, kind="stat", width=4),
        Panel(
            "Conditions that are not ok",
            {"not ok": f"count(warmroute_condition{{{_FLEET}}} == 0) or vector(0)"},
            kind="stat",
            width=4,
            description="GET /ready?verbose has each with its remedy.",
        ),
        Panel("Requests by outcome", {"{{outcome}}": _rate("warmroute_requests_total", "outcome")}, "reqps", width=12),
        Panel("Alerts", {"{{alertname}}": 'sum by (alertname) (ALERTS{alertname=~"Warmroute.*"})'}, width=12),
    ),
    "Latency": (
        Panel("Time to first byte", _quantiles("warmroute_first_byte_seconds"), "s"),
        Panel(
            "Time to first byte, p90 by class",
            {
                "{{request_class}}": "histogram_quantile(0.9, "
                + _rate("warmroute_first_byte_seconds_bucket", "le, request_class")
                + ")"
            },
            "s",
        ),
        Panel("Whole request", _quantiles("warmroute_request_seconds"), "s"),
        Panel("Time per output token", _quantiles("warmroute_output_token_seconds"), "s"),
        Panel(
            "Time to first byte, p90 by instance",
            {
                "{{instance}}": "histogram_quantile(0.9, "
                + _rate("warmroute_instance_first_byte_seconds_bucket", "le, instance", _EACH)
                + ")"
            },
            "s",
        ),
        Panel(
            "CPU of the proxy",
            {"{{proxy}}": _rate("process_cpu_seconds_total", "proxy")},
            "percentunit",
            description="Share of one core: the event loop has one.",
        ),
        Panel(
            "Time to first token over the predicted one, median by instance",
            {
                "{{instance}}": "histogram_quantile(0.5, "
                + _rate("warmroute_instance_first_token_actual_to_predicted_ratio_bucket", "le, instance", _EACH)
                + ")"
            },
            description="Predicted from new tokens and queue, fleet-wide. An instance above its peers is slow.",
        ),
        Panel("Routing decision", _quantiles("warmroute_decide_seconds"), "s"),
        Panel("Wait in the queue", _quantiles("warmroute_queue_wait_seconds"), "s"),
        Panel(
            "Event loop late",
            {"{{proxy}}": f"warmroute_event_loop_late_seconds{{{_FLEET}}}"},
            "s",
            description="Within the last 10 s, without delays below 50 ms.",
        ),
    ),
    "Routing": (
        Panel(
            "Decisions by reason", {"{{reason}}": _rate("warmroute_decisions_total", "reason")}, "reqps", stacked=True
        ),
        Panel(
            "Decisions by class",
            {"{{request_class}}": _rate("warmroute_decisions_total", "request_class")},
            "reqps",
            stacked=True,
        ),
        Panel(
            "Requests by instance",
            {"{{instance}}": _rate("warmroute_requests_total", "instance", _EACH)},
            "reqps",
            stacked=True,
        ),
        Panel("Failed attempts by result", {"{{result}}": _rate("warmroute_retries_total", "result")}, "reqps"),
        Panel("Retry budget", {"{{proxy}}": f"warmroute_retry_budget{{{_FLEET}}}"}),
        Panel(
            "Failing policies",
            {"{{part}} {{name}}": _rate("warmroute_policy_failures_total", "part, name")},
            "reqps",
        ),
    ),
    "Cache": (
        Panel(
            "Hit rate, actual and predicted", {kind: _hit_rate(kind) for kind in ("actual", "predicted")}, "percentunit"
        ),
        Panel(
            "Hit rate: achieved, reachable, ceiling",
            {"{{kind}}": f"warmroute_hit_ratio{{{_FLEET}}}"},
            "percentunit",
            description="Reachable: the best instance for each request. Ceiling: one infinite cache.",
        ),
        Panel(
            "Lost hits by cause",
            {"{{cause}}": f"warmroute_hit_loss_ratio{{{_FLEET}}}"},
            "percentunit",
            stacked=True,
        ),
        Panel(
            "Prediction error by instance",
            {
                "{{instance}}": _rate("warmroute_cache_prediction_error_tokens_total", "instance", _EACH)
                + " / "
                + _rate("warmroute_reported_prompt_tokens_total", "instance", _EACH)
            },
            "percentunit",
            description="Share of the prompt tokens.",
        ),
        Panel("Recomputation", {"{{proxy}}": f"warmroute_recomputation_ratio{{{_FLEET}}}"}, "percentunit"),
        Panel("Cache killers", {"{{rule}}": _rate("warmroute_cache_killers_total", "rule")}, "reqps"),
        Panel("Exact index trusted", {"{{instance}}": f"warmroute_exact_index_trusted{{{_EACH}}}"}),
        Panel("Batches of KV events", {"{{instance}}": _rate("warmroute_kv_event_batches_total", "instance", _EACH)}),
    ),
    "Admission": (
        Panel(
            "Held and queued",
            {
                "held": f"sum(warmroute_held_requests{{{_FLEET}}})",
                "queued": f"sum(warmroute_queue_requests{{{_FLEET}}})",
            },
        ),
        Panel("Time held", _quantiles("warmroute_hold_seconds"), "s"),
        Panel("Sent by reason", {"{{reason}}": _rate("warmroute_admissions_total", "reason")}, "reqps", stacked=True),
        Panel(
            "Working set and pools",
            {
                "{{state}}": f"sum by (state) (warmroute_working_set_tokens{{{_FLEET}}})",
                "pools": f"sum(warmroute_pool_tokens{{{_FLEET}}})",
            },
        ),
        Panel("Tokens in flight by tenant", {"{{tenant}}": f"warmroute_tenant_in_flight_tokens{{{_FLEET}}}"}),
        Panel("Not admitted", {"{{reason}}": _rate("warmroute_queue_refused_total", "reason")}, "reqps"),
    ),
    "Hand-off": (
        Panel("Results by reason", {"{{reason}}": _rate("warmroute_offloads_total", "reason")}, "reqps", stacked=True),
        Panel(
            "Failed share of hand-offs",
            {
                "failed": f'sum(rate(warmroute_offloads_total{{{_FLEET}, reason=~"fell_back_.*"}}{_RATE})) / '
                f'sum(rate(warmroute_offloads_total{{{_FLEET}, reason=~"chosen|fell_back_.*"}}{_RATE}))'
            },
            "percentunit",
        ),
        Panel(
            "Actual over predicted time, median",
            {
                "{{leg}}": "histogram_quantile(0.5, "
                + _rate("warmroute_leg_actual_to_predicted_ratio_bucket", "le, leg")
                + ")"
            },
        ),
    ),
    "Engines": (
        Panel("KV pool in use", {"{{instance}}": f"warmroute_instance_kv_usage_ratio{{{_EACH}}}"}, "percentunit"),
        Panel("Requests in flight", {"{{instance}}": f"warmroute_instance_requests{{{_EACH}}}"}),
        Panel(
            "Tokens that wait for prefill", {"{{instance}}": f"warmroute_instance_pending_prefill_tokens{{{_EACH}}}"}
        ),
        Panel(
            "Circuit breakers that are not closed",
            {"{{instance}} {{state}}": f'warmroute_instance_breaker{{{_EACH}, state!="closed"}} == 1'},
        ),
        Panel("Waiting in the engines", {"{{engine_name}}": "vllm:num_requests_waiting"}),
        Panel(
            "Hit rate as the engines count it",
            {
                "{{engine_name}}": "sum by (engine_name) (rate(vllm:prefix_cache_hits_total[$__rate_interval])) / "
                "sum by (engine_name) (rate(vllm:prefix_cache_queries_total[$__rate_interval]))"
            },
            "percentunit",
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard's model, as Grafana imports it."""
    return {
        "uid": "warmroute",
        "title": "warmroute",
        "description": "Requests, latency, routing, cache, admission, hand-off and engines of warmroute",
        "tags": ["warmroute", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                _variable("proxy", "Proxy", "label_values(warmroute_in_flight, proxy)"),
                _variable(
                    "instance", "Instance", 'label_values(warmroute_instance_healthy{proxy=~"$proxy"}, instance)'
                ),
            ]
        },
        "panels": list(_panels()),
    }


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    ids, top = count(1), 0
    for title, panels in ROWS.items():
        yield {
            "id": next(ids),
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        top, left, lowest = top + 1, 0, 0
        for panel in panels:
            if left + panel.width > _COLUMNS:
                top, left, lowest = top + lowest, 0, 0
            height = 4 if panel.kind == "stat" else _HEIGHT
            yield _panel(panel, next(ids), {"x": left, "y": top, "w": panel.width, "h": height})
            left, lowest = left + panel.width, max(lowest, height)
        top += lowest


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    custom = {"fillOpacity": 10, "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, **({"custom": custom} if panel.kind == "timeseries" else {})},
            "overrides": [],
        },
        "options": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
        if panel.kind == "stat"
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
