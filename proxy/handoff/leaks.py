"""Finds engines that keep KV nobody asked for, and asks for their restart.

vLLM 0.18.1 never frees the blocks of a pull that hung and was abandoned: ``kv_cache_usage_perc`` climbs while neither
the running nor the waiting count shows why. Nothing but a restart gives the room back.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from proxy.fleet.instances import Instance, Instances

log = logging.getLogger("warmroute.leaks")

_READINGS = 5
"""Probes in a row that must all show the leak: a request that has just ended explains one."""


class LeakWatch:
    """Per instance, the KV in use that neither requests in flight nor holds explain, while a pull was abandoned there.

    One instance at a time is asked to be restarted, so that a fault that hits all of them never empties the fleet.
    """

    def __init__(self, instances: Instances, leak_share: float) -> None:
        self._instances = instances
        self._leak_share = leak_share
        self._abandoned: dict[str, int] = {}
        self._unexplained: dict[str, deque[int]] = {}

    def abandoned(self, name: str) -> None:
        """A pull on this instance was given up before its first token."""
        if self._instances.get(name) is not None:
            self._abandoned[name] = self._abandoned.get(name, 0) + 1

    def restarted(self, instance: Instance) -> None:
        """The engine is new: nothing is held against it."""
        self._abandoned.pop(instance.name, None)
        self._unexplained.pop(instance.name, None)
        instance.recycle_wanted = None

    def apply(self, leak_share: float) -> None:
        """Take over another share."""
        self._leak_share = leak_share

    def forget(self, name: str) -> None:
        """The instance has left the fleet, or another engine has its name."""
        self._abandoned.pop(name, None)
        self._unexplained.pop(name, None)

    def observe(self, instance: Instance, used_tokens: int, expected_tokens: int) -> None:
        """Take in one reading of the engine's KV use."""
        if not self._abandoned.get(instance.name) or not instance.kv_capacity_tokens:
            return
        readings = self._unexplained.setdefault(instance.name, deque(maxlen=_READINGS))
        readings.append(max(0, used_tokens - expected_tokens))
        leaked = min(readings)
        if len(readings) < _READINGS or leaked < self._leak_share * instance.kv_capacity_tokens:
            return
        if instance.recycle_wanted is None and all(other.recycle_wanted is None for other in self._instances):
            instance.recycle_wanted = (
                f"{leaked} tokens of KV are in use that no request explains, after "
                f"{self._abandoned[instance.name]} abandoned pull(s)"
            )
            instance.recycle_wanted_at_s = time.monotonic()
            log.warning("%s should be restarted: %s", instance.name, instance.recycle_wanted)
