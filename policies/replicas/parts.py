"""Parts of a large fleet: each replica places new work on its own, so that replicas with stale views do not collide.

Replicas that see the same fleet, each a little late, all choose the same best instance for what they receive meanwhile.
With parts they choose among different ones; prefixes that an instance alone has still count wherever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xxhash import xxh3_64_intdigest

from policies.snapshot import FleetSnapshot

LEAST_INSTANCES = 8
"""Fewest instances of a part; smaller ones would leave too little choice, so such a fleet is not divided."""

LONE_HOLDERS = 2
"""Most instances that hold a prefix which only its own session has: where it ran, and where it ran before."""


def part_of(replica: str, others: Iterable[str], instances: Collection[str]) -> frozenset[str]:
    """Instances that a replica places new work on; empty: all of them.

    Instances in the order of their names' hashes are cut into one slice for each replica in the order of their names;
    slices differ by one instance at most. O(instances x log instances).
    """
    replicas = sorted({replica, *others})
    if len(replicas) < 2 or len(instances) < LEAST_INSTANCES * len(replicas):
        return frozenset()
    ordered = sorted(instances, key=_hashed)
    number, count = replicas.index(replica), len(replicas)
    return frozenset(ordered[number * len(ordered) // count : (number + 1) * len(ordered) // count])


def with_part(fleet: FleetSnapshot, part: frozenset[str]) -> FleetSnapshot:
    """The fleet less instances outside the part, except those that alone have more of the prompt cached.

    If more than ``LONE_HOLDERS`` instances outside have more of it than the best one inside, its beginning is one that
    many sessions share; then only the session's own instance remains. All of the fleet if fewer than
    ``LEAST_INSTANCES`` of the part are candidates: others are down, or serve another model.
    """
    own = [view.cached_tokens for view in fleet.instances if view.instance in part]
    if len(own) < LEAST_INSTANCES:
        return fleet
    most = max(own)
    longer = [view.instance for view in fleet.instances if view.cached_tokens > most and view.instance not in part]
    if len(longer) > LONE_HOLDERS:
        longer = [name for name in longer if name == fleet.pinned]
    kept = tuple([view for view in fleet.instances if view.instance in part or view.instance in longer])
    return fleet._replace(instances=kept)


def _hashed(instance: str) -> tuple[int, str]:
    return xxh3_64_intdigest(instance.encode()), instance
