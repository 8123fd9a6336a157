"""Room for sessions: the instances that can be chosen, and the parts of a fleet that are judged apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

Part = frozenset[str]
"""Instances that are judged apart from the others."""
WHOLE: Part = frozenset()
"""The whole fleet."""


class Parts(NamedTuple):
    """Parts of a fleet whose instances serve no model of another part.

    A session's context takes room only on instances that serve its model, so overload of one part is no reason to hold
    requests for another. Instances with a common model, such as engines with the same base model and different
    adapters, are one part.
    """

    each: tuple[Part, ...] = ()
    """Empty: the fleet is one part."""
    of_model: Mapping[str, Part] = MappingProxyType({})

    @classmethod
    def of_fleet(cls, models: Mapping[str, Collection[str]]) -> Parts:
        """Divide a fleet. O(models of all instances).

        Args:
            models: what each instance serves; one that serves none, as after a restart, belongs to no part.
        """
        first: dict[str, str] = {}
        """One instance of each model."""
        next_of: dict[str, str] = {}
        """Another instance of the same part, closer to its last one."""

        def last(name: str) -> str:
            while name in next_of:
                name = next_of[name]
            return name

        for name, served in models.items():
            for model in served:
                mine, other = last(name), last(first.setdefault(model, name))
                if mine != other:
                    next_of[mine] = other
        groups: dict[str, list[str]] = {}
        for name, served in models.items():
            if served:
                groups.setdefault(last(name), []).append(name)
        if len(groups) < 2:
            return ONE_PART
        parts = {root: frozenset(group) for root, group in groups.items()}
        return cls(tuple(parts.values()), {model: parts[last(name)] for model, name in first.items()})

    def of(self, model: str | None) -> Part:
        """Part that serves a model. ``WHOLE``: there is one part only, or the model is not known."""
        return self.of_model.get(model, WHOLE) if model is not None else WHOLE


ONE_PART = Parts()


class Room(NamedTuple):
    """The instances that can be chosen, as a whole."""

    pool_tokens: int
    """Their KV pools; 0: unknown."""
    instances: int
    prefilling: int = 0
    """Requests in flight on them without a first token yet."""
    each: tuple[tuple[str, int, int], ...] = ()
    """Name, KV pool (0: unknown) and ``prefilling`` of each."""
    part: Part = WHOLE
    """Part of the fleet that they are the candidates of."""
    parts: Parts = ONE_PART
    """Parts of the whole fleet."""

    def within(self, part: Part) -> Room:
        """Those of a part. O(instances)."""
        if part is WHOLE:
            return self
        each = tuple([one for one in self.each if one[0] in part])
        pools = [pool for _, pool, _ in each]
        prefilling = sum([waiting for _, _, waiting in each])
        return Room(sum(pools) if all(pools) else 0, len(each), prefilling, each, part, self.parts)
