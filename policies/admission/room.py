"""Room for sessions: the instances that can be chosen, and the parts of a fleet that are judged apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

Part = frozenset[str]
"""Instances that are judged apart from the others."""
WHOLE: Part = frozenset()
"""The whole fleet."""


_Group = tuple[set[str], list[str]]
"""Models and instances of a part."""


def _joined(one: _Group, other: _Group) -> _Group:
    """Both as one; the larger is changed."""
    if len(one[0]) < len(other[0]):
        one, other = other, one
    one[0].update(other[0])
    one[1].extend(other[1])
    return one


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
        """Divide a fleet. O(instances times parts + models of all instances).

        Args:
            models: what each instance serves; one that serves none, as after a restart, belongs to no part.
        """
        groups: list[_Group] = []
        for name, served in models.items():
            if not served:
                continue
            mine: _Group = set(served), [name]
            apart: list[_Group] = []
            for group in groups:
                if group[0].isdisjoint(served):
                    apart.append(group)
                else:
                    mine = _joined(mine, group)
            groups = [*apart, mine]
        if len(groups) < 2:
            return ONE_PART
        of_model: dict[str, Part] = {}
        for served, instances in groups:
            of_model |= dict.fromkeys(served, frozenset(instances))
        return cls(tuple(dict.fromkeys(of_model.values())), of_model)

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
