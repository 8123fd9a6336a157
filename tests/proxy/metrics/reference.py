"""Every metric of the proxy and of `warmroute telemetry` as a Markdown page, read from their registries.

``python -m tests.proxy.metrics.reference`` prints the page; it is kept in ``docs/reference/metrics.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from launch.hardware.telemetry import TelemetryCollector, TelemetrySampler
from proxy.app import ProxyApp
from proxy.gather.families import GAUGES, GaugeRule
from proxy.gather.restarts import restarts
from proxy.settings import load_settings

_INTRODUCTION = """# Reference: metrics

Generated from the code by `make reference`. Histograms also have `_bucket`, `_sum` and `_count` series. Labels are
closed sets: instances, policies, classes, reasons, outcomes. When an instance leaves the fleet, its series are removed.
The first 100 tenants have series of their own, all others share those of `(others)`.
"""
_HEADER = "| metric | type | unit | labels | help |\n| --- | --- | --- | --- | --- |"
_OF_WORKERS = "| metric | type | unit | labels | workers | help |\n| --- | --- | --- | --- | --- | --- |"
_UNITS = {
    "seconds": "seconds",
    "bytes": "bytes",
    "tokens": "tokens",
    "blocks": "blocks",
    "ratio": "ratio",
    "hertz": "hertz",
    "watts": "watts",
    "celsius": "degrees Celsius",
    "second": "bytes per second",
}
"""Last word of a metric's name -> its unit; any other word means a count or a 0/1 state."""


def proxy_registry() -> CollectorRegistry:
    """Registry of a proxy with one instance that publishes KV events, before its first request."""
    instance = {"url": "http://127.0.0.1:8000", "name": "a", "events_url": "tcp://127.0.0.1:5701"}
    return ProxyApp(load_settings(None, instances=[instance])).core.metrics.registry


class _OfParent(Collector):
    def collect(self) -> Iterator[Metric]:
        yield restarts(())


def parent_registry() -> CollectorRegistry:
    """Registry of what the parent of several workers counts."""
    registry = CollectorRegistry()
    registry.register(_OfParent())
    return registry


def telemetry_registry() -> CollectorRegistry:
    """Registry of the GPU sampler, before its first sample."""
    registry = CollectorRegistry()
    registry.register(TelemetryCollector(TelemetrySampler(None)))
    return registry


def families(registry: CollectorRegistry) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Every family of a registry with the names of its labels, also of those that have no series yet.

    The client library has no public way to ask for label names; its private attribute is only read here, in the tests.
    """
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            owner = family if "_labelnames" in vars(family) else collector
            yield family, tuple(vars(owner)["_labelnames"])


def table(registry: CollectorRegistry, *, of_workers: bool = False) -> str:
    """Markdown table of a registry's metrics, sorted by name; ``of_workers``: with the column of workers."""
    rows = []
    for family, labels in families(registry):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        unit = _UNITS.get(family.name.rpartition("_")[2], "–")
        shown = ", ".join(f"`{label}`" for label in labels) or "–"
        workers = f" {GAUGES.get(family.name, GaugeRule.SUM)} |" if of_workers else ""
        help_text = family.documentation.replace("|", chr(92) + "|")
        rows.append(f"| `{name}` | {family.type} | {unit} | {shown} |{workers} {help_text} |")
    return "\n".join([_OF_WORKERS if of_workers else _HEADER, *sorted(rows)])


def reference() -> str:
    """The page ``docs/reference/metrics.md``."""
    return (
        f"{_INTRODUCTION}\n"
        "## Proxy\n\n"
        "`GET /metrics` of `warmroute serve`; who may read it: [security](../security.md).\n\n"
        "Column `workers`: what [several workers](../workers.md#metrics) make of their values: their sum, the largest, "
        "the smallest, or the mean.\n\n"
        f"{table(proxy_registry(), of_workers=True)}\n\n"
        "With several workers also:\n\n"
        f"{table(parent_registry())}\n\n"
        "## GPUs\n\n"
        "`warmroute telemetry --prometheus-port PORT`; the same values as a file: "
        "[fleets](../fleet.md#gpu-telemetry).\n\n"
        f"{table(telemetry_registry())}\n"
    )


if __name__ == "__main__":
    sys.stdout.write(reference())
