"""Detection of engines that answer their probes and compute nothing.

vLLM's API server answers ``/health`` and ``/metrics`` by itself. What it reports there comes from the engine's core
with every step: the KV in use, requests running and waiting, tokens generated and looked up. When the core hangs, in a
collective operation of its GPUs or a KV transfer, all of it stays as it was, and requests wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from proxy.fleet.instances import Instance, Instances

log = logging.getLogger("warmroute.stalls")

Figures = tuple[object, ...]
"""All that an engine's core reports, to be compared for equality."""


class _Seen(NamedTuple):
    figures: Figures
    since_s: float
    """Since then they are the same, while requests wait for a first token."""
    moved: bool
    """They have changed before: where none ever does, their being the same says nothing."""


class StallWatch:
    """Per instance, the time since its figures changed while a request waits for its first token.

    After ``after_s`` its breaker opens, its requests are cut, so that those without a first byte are sent to another
    engine, and a restart is requested. If no other engine could serve them, only a restart is. Those of an engine with
    data-parallel ranks are not cut, as other ranks may compute.
    """

    def __init__(self, instances: Instances, after_s: float, cut: Callable[[str, str], None]) -> None:
        """``cut`` aborts all requests to a URL, for a reason."""
        self._instances = instances
        self._after_s = after_s
        self._cut = cut
        self._seen: dict[str, _Seen] = {}
        self._requested: dict[str, str] = {}
        """Restarts that were requested here, with the reason."""

    def apply(self, after_s: float) -> None:
        """Set the time after which an engine counts as stalled; 0: never."""
        self._after_s = after_s

    def restarted(self, name: str) -> None:
        """Reset the state of an engine that restarted, or has left the fleet."""
        self._seen.pop(name, None)
        self._requested.pop(name, None)

    def observe(self, instance: Instance, figures: Figures, pending_tokens: int) -> None:
        """Process one reading.

        Args:
            instance: the instance.
            figures: empty: it does not report them.
            pending_tokens: tokens that it is to compute for this proxy's requests without a first token.
        """
        now_s, name = time.monotonic(), instance.name
        seen = self._seen.get(name)
        changed = seen is not None and seen.figures != figures
        if not figures or seen is None or changed or not pending_tokens:
            self._seen[name] = _Seen(figures, now_s, changed or (seen is not None and seen.moved))
            if changed:
                self._computes_again(instance)
            return
        if self._after_s and seen.moved and now_s - seen.since_s >= self._after_s:
            self._seen[name] = seen._replace(since_s=now_s)
            self._stalled(instance, f"it has computed nothing for {now_s - seen.since_s:.0f} s while requests wait")

    def _computes_again(self, instance: Instance) -> None:
        reason = self._requested.pop(instance.name, None)
        if reason is not None and instance.recycle_wanted == reason:
            instance.recycle_wanted = None
            log.info("%s computes again", instance.name)

    def _stalled(self, instance: Instance, reason: str) -> None:
        log.error("%s answers its probes, but %s", instance.name, reason)
        if self._instances.request_restart(instance, reason):
            self._requested[instance.name] = reason
        own = {each.name for each in self._instances.ranks(instance)}
        # By model, as the others may serve other ones.
        models: list[str | None] = [str(card.get("id")) for card in instance.cards] or [None]
        if all(self._instances.healthy(model) - own for model in models):
            self._instances.stopped(instance, reason)
            if instance.rank is None:
                self._cut(instance.url, reason)
