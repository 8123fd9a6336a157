"""Restarts of the workers, which their parent counts, as a metric."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import CounterMetricFamily

from proxy.sharing.frames import WorkerStanding


def restarts(roster: Iterable[WorkerStanding]) -> CounterMetricFamily:
    """The family of all workers' restarts."""
    family = CounterMetricFamily(
        "warmroute_worker_restarts",
        "Workers started again; reason hung: killed after worker_silence_s without sign of life, ended: any other end",
        labels=["worker", "reason"],
    )
    for each in roster:
        family.add_metric([str(each.worker), "hung"], each.hung)
        family.add_metric([str(each.worker), "ended"], each.restarts - each.hung)
    return family
