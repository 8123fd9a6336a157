"""Detection of engines that leak KV, and requests to restart them.

vLLM 0.18.1 never frees the blocks of a pull that hung and was abandoned: ``kv_cache_usage_perc`` rises without running
or waiting requests. Only a restart frees them.
"""

from __future__ import annotations

import logging
from collections import deque

from proxy.fleet.instances import Instance, Instances

log = logging.getLogger("warmroute.leaks")

_READINGS = 5
"""Consecutive probes that must all show the leak: a single one may be due to a request that has just ended."""


class LeakWatch:
    """Per instance, the KV in use that neither requests in flight nor holds account for, after an abandoned pull."""

    def __init__(self, instances: Instances, leak_share: float) -> None:
        self._instances = instances
        self._leak_share = leak_share
        self._abandoned: dict[str, int] = {}
        self._unexplained: dict[str, deque[int]] = {}

    def abandoned(self, name: str) -> None:
        """Record that a pull on this instance was abandoned before its first token."""
        if self._instances.get(name) is not None:
            self._abandoned[name] = self._abandoned.get(name, 0) + 1

    def restarted(self, instance: Instance) -> None:
        """Reset the state of an engine that restarted."""
        self._abandoned.pop(instance.name, None)
        self._unexplained.pop(instance.name, None)
        instance.recycle_wanted = None

    def apply(self, leak_share: float) -> None:
        """Set the share of the KV pool that counts as a leak."""
        self._leak_share = leak_share

    def forget(self, name: str) -> None:
        """Drop the state of an instance that has left the fleet or was replaced."""
        self._abandoned.pop(name, None)
        self._unexplained.pop(name, None)

    def observe(self, instance: Instance, used_tokens: int, expected_tokens: int) -> None:
        """Process one reading of the engine's KV use, in tokens."""
        if not self._abandoned.get(instance.name) or not instance.kv_capacity_tokens:
            return
        readings = self._unexplained.setdefault(instance.name, deque(maxlen=_READINGS))
        readings.append(max(0, used_tokens - expected_tokens))
        leaked = min(readings)
        if len(readings) < _READINGS or leaked < self._leak_share * instance.kv_capacity_tokens:
            return
        abandoned = self._abandoned[instance.name]
        reason = f"{leaked} tokens of KV are in use without a request, after {abandoned} abandoned pull(s)"
        if self._instances.request_restart(instance, reason):
            log.warning("%s should be restarted: %s", instance.name, reason)
