"""Comparison of the engines' own hashes of equal blocks: engines with one hash seed give a block the same hash.

Engines derive block hashes from a seed (vLLM: ``PYTHONHASHSEED``; random where it is not set). Caches that engines
share by hash (an external KV store) never hit across engines of different seeds, without any error.
"""

from __future__ import annotations

from collections import OrderedDict

_SINGLE, _SHARED = 4_096, 256
"""First blocks kept of those that one instance has stored, and of those that several have."""


class EngineHashes:
    """First blocks of prompts -> each instance's own hash of it. O(1) per block; ``groups`` O(shared blocks)."""

    def __init__(self) -> None:
        self._single: OrderedDict[int, tuple[str, int | bytes]] = OrderedDict()
        self._shared: OrderedDict[int, dict[str, int | bytes]] = OrderedDict()
        self._groups: list[set[str]] | None = []
        self.agreed = False
        """True once two instances had the same hash of a block: seeds are set on purpose. Random ones never agree."""

    def note(self, instance: str, block: int, engine_hash: int | bytes) -> None:
        """Record a first block that an instance has stored."""
        known = self._shared.get(block)
        if known is None:
            other = self._single.get(block)
            if other is None or other[0] == instance:
                self._single[block] = (instance, engine_hash)
                if len(self._single) > _SINGLE:
                    self._single.popitem(last=False)
                return
            del self._single[block]
            known = self._shared[block] = {other[0]: other[1]}
            if len(self._shared) > _SHARED:
                self._shared.popitem(last=False)
        known[instance] = engine_hash
        self._groups = None
        if not self.agreed and list(known.values()).count(engine_hash) > 1:
            self.agreed = True

    def forget(self, instance: str) -> None:
        """Drop the hashes of an instance that restarted or left: its seed may be another one now."""
        for block in [block for block, (holder, _) in self._single.items() if holder == instance]:
            del self._single[block]
        for block, known in list(self._shared.items()):
            if known.pop(instance, None) is not None:
                self._groups = None
            if not known:
                del self._shared[block]

    def groups(self) -> list[set[str]]:
        """Instances by seed, the largest group first; only those that stored a block which another one stored too."""
        if self._groups is None:
            joined: dict[str, set[str]] = {}
            for known in self._shared.values():
                if len(known) > 1:
                    _join(known, joined)
            distinct = {min(members): members for members in joined.values()}
            self._groups = sorted(distinct.values(), key=lambda members: (-len(members), min(members)))
        return self._groups


def _join(known: dict[str, int | bytes], joined: dict[str, set[str]]) -> None:
    """Merge the groups of the instances that have one hash of a block."""
    by_hash: dict[int | bytes, set[str]] = {}
    for instance, engine_hash in known.items():
        by_hash.setdefault(engine_hash, set()).add(instance)
    for same in by_hash.values():
        merged = same.union(*(joined[each] for each in same if each in joined))
        joined.update(dict.fromkeys(merged, merged))
