"""The immutable snapshot of the fleet that a routing policy and an offload planner decide on."""

from __future__ import annotations

from typing import NamedTuple

from policies.costs.formulas import Costs
from policies.types import HotspotView, InstanceView


class FleetSnapshot(NamedTuple):
    """The fleet at one instant, for one request. Only instances that may be chosen are in it."""

    instances: tuple[InstanceView, ...]
    sequence: int = 0
    """Number of the decision: turns and seeds derive from it."""
    pinned: str | None = None
    """Instance of the request's session, whether or not it is still a candidate."""
    hotspot: HotspotView = HotspotView()
    offloads_in_flight: int = 0
    broken_pairs: frozenset[tuple[str, str]] = frozenset()
    """(P, D) pairs whose breaker is open."""
    prefill_instances: tuple[InstanceView, ...] = ()
    """Instances that may take a prefill for another, where roles separate them; empty: any of ``instances``."""
    costs: Costs | None = None
    """What prefills and transfers take, as learned so far; None: nobody learns."""

    def view(self, instance: str) -> InstanceView | None:
        """The candidate of that name; None where there is none."""
        return _named(self.instances, instance)

    def prefill_view(self, instance: str) -> InstanceView | None:
        """The instance of that name among those that may prefill for another."""
        return _named(self.prefill_instances or self.instances, instance)


def _named(views: tuple[InstanceView, ...], instance: str) -> InstanceView | None:
    for view in views:
        if view.instance == instance:
            return view
    return None
