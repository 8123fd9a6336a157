"""The immutable snapshot of the fleet that a routing policy and an offload planner decide on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from policies.costs.formulas import Costs
from policies.types import Connector, ContextsView, HotspotView, InstanceView, Role, Transport


class FleetSnapshot(NamedTuple):
    """The fleet at one instant, for one request. Contains only instances that may be chosen."""

    instances: tuple[InstanceView, ...]
    sequence: int = 0
    """Number of the decision, from which turns and seeds derive."""
    pinned: str | None = None
    """Instance of the request's session, candidate or not."""
    hotspot: HotspotView = HotspotView()
    offloads_in_flight: int = 0
    broken_pairs: frozenset[tuple[str, str]] = frozenset()
    """(P, D) pairs whose breaker is open."""
    prefill_instances: tuple[InstanceView, ...] = ()
    """Instances that may prefill for another, where roles separate them; empty: any of ``instances``."""
    costs: Costs | None = None
    """Cost models at this moment; None if nothing is learned."""
    specialists: Mapping[str, float] = {}
    """By the name of each instance designated for long prefills (`policies.offload.specialists`), candidate or not, the
    oldest first: how many times longer an answer takes there for these, 1 / (1 - their share of its time).
    """
    contexts: ContextsView = ContextsView()
    """Empty if there is no specialist."""
    held: float = 0.0
    """Requests that the admission rule holds, per candidate: each waits for what candidates compute."""
    evicted_s: Mapping[str, float] = {}
    """Expected seconds to compute again what this request's KV evicts of kept contexts, by candidate; without those
    where it evicts nothing. Empty if no admission rule holds requests.
    """

    @property
    def senders(self) -> tuple[InstanceView, ...]:
        """Those that may prefill for another."""
        return self.prefill_instances or self.instances

    def view(self, instance: str) -> InstanceView | None:
        """The candidate of that name, or None."""
        return _named(self.instances, instance)

    def prefill_view(self, instance: str) -> InstanceView | None:
        """The instance of that name among those that may prefill for another, or None."""
        return _named(self.senders, instance)

    def cached_elsewhere(self, instance: str) -> int:
        """Largest number of prompt tokens predicted to be cached on an instance other than this one. O(n)."""
        most = 0
        for view in self.senders:
            if view[1] > most and view[0] != instance:  # cached tokens and name, as in ``_named``
                most = view[1]
        return most


class FleetColumns(NamedTuple):
    """The first fields of all candidates' views, each as one tuple in the order of the fleet.

    A loop over columns takes a third of the time of a loop over views, whose every field is an attribute to look up.
    """

    instance: tuple[str, ...]
    cached_tokens: tuple[int, ...]
    requests: tuple[int, ...]
    pending_prefill_tokens: tuple[int, ...]
    decoding_tokens: tuple[int, ...]
    recent_tokens: tuple[float, ...]
    sessions: tuple[int, ...]
    kv_capacity_tokens: tuple[int, ...]
    kv_used_tokens: tuple[int, ...]
    kv_promised_tokens: tuple[int, ...]
    role: tuple[Role, ...]
    holds_class: tuple[bool, ...]
    prefilling: tuple[int, ...]
    host: tuple[str, ...]
    transport: tuple[Transport | None, ...]
    connector: tuple[Connector, ...]

    @classmethod
    def of(cls, views: Sequence[InstanceView]) -> FleetColumns:
        """FleetColumns of these views, of which there must be one at least."""
        return tuple.__new__(cls, islice(zip(*views, strict=True), _COLUMNS))


_COLUMNS = len(FleetColumns._fields)


def _named(views: tuple[InstanceView, ...], instance: str) -> InstanceView | None:
    for view in views:
        if view[0] == instance:  # the name, a third faster than by the field's own
            return view
    return None
