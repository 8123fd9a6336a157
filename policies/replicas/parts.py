"""Parts of a large fleet: each replica places new work on its own, so that replicas with stale views do not collide.

Replicas that see the same fleet, each a little late, all choose the same best instance for what they receive meanwhile.
With parts they choose among different ones; prefixes that an instance alone has still count wherever it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xxhash import xxh3_64_intdigest

LEAST_INSTANCES = 8
"""Fewest instances of a part; smaller ones would leave too little choice, so such a fleet is not divided."""


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


def _hashed(instance: str) -> tuple[int, str]:
    return xxh3_64_intdigest(instance.encode()), instance
