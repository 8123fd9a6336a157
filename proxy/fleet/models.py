"""Models and adapters that engines list under ``GET /v1/models``, and the index of which instance lacks which."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import msgspec

from policies.admission.room import Part, Parts

_NOBODY: frozenset[str] = frozenset()
_LENGTH = itemgetter(0)


class NoModelListError(ValueError):
    """An answer to ``GET /v1/models`` that is not a list of models."""


@dataclass(frozen=True)
class ModelList:
    """One engine's list. An adapter's card names its parent; an alias (``--served-model-name``) has its own."""

    cards: tuple[dict[str, Any], ...] = ()
    names: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()

    @classmethod
    def read(cls, content: bytes) -> ModelList:
        """Read an engine's answer; cards without a name are ignored. Raises NoModelListError."""
        try:
            answer = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NoModelListError(f"what is not JSON ({error})") from error
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list):
            raise NoModelListError("no list of models")
        cards = tuple(card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str))
        names = frozenset(card["id"] for card in cards)
        return cls(cards, names, frozenset(card["id"] for card in cards if card.get("parent") is not None))

    @cached_property
    def base(self) -> frozenset[str]:
        """Names of models that are not adapters."""
        return self.names - self.adapters

    @cached_property
    def lengths(self) -> dict[str, int]:
        """Longest context (prompt and output) in tokens of each model that reports it, or whose base model does."""
        own = {card["id"]: n for card in self.cards if isinstance(n := card.get("max_model_len"), int)}
        parents = {card["id"]: card.get("parent") for card in self.cards if card["id"] not in own}
        return own | {name: own[parent] for name, parent in parents.items() if parent in own}

    @property
    def offer(self) -> tuple[frozenset[str], frozenset[str], dict[str, int]]:
        """All that routing reads of it."""
        return self.names, self.adapters, self.lengths

    def without(self, model: str) -> ModelList:
        """The list without one model."""
        cards = tuple(card for card in self.cards if card["id"] != model)
        return ModelList(cards, self.names - {model}, self.adapters - {model})


class ServedModels:
    """Index over the lists of a fleet; immutable in effect: a change of a list or of the fleet makes a new one.

    Args:
        lists: name of an instance to its list; None: it has never listed its models, so it may serve any.
    """

    def __init__(self, lists: Mapping[str, ModelList | None]) -> None:
        self._lists = {name: models for name, models in lists.items() if models is not None}
        self._lacking: dict[str, frozenset[str]] = {}
        self.names: frozenset[str] = _NOBODY.union(*(models.names for models in self._lists.values()))
        """Models and adapters that an instance lists."""
        self._adapters = _NOBODY.union(*(models.adapters for models in self._lists.values()))
        self._lengths = {name: models.lengths for name, models in self._lists.items()}
        self._shorter: dict[str, list[tuple[int, frozenset[str]]]] = {}
        self._longest: dict[str, int | None] = {}
        self.listed: Set[str] = self._lists.keys()
        """Instances that have listed their models."""
        self._complete = len(self._lists) == len(lists)
        base = self.names - self._adapters
        self.sole_model = next(iter(base)) if len(base) == 1 else None
        """The one base model that all lists together have; None: several, or none."""

    def lacking(self, model: str, tokens: int = 0) -> frozenset[str]:
        """Instances that list their models, but not this one. O(1), for a model's first request O(instances).

        With ``tokens``, also those that refuse a context of that length, but never all.
        """
        steps = self._shorter.get(model)
        if steps is None and model in self.names:  # at its first request: engines may have thousands of adapters
            steps = self._shorter[model] = self._steps(model)
        if steps and (longer := bisect_left(steps, tokens, key=_LENGTH)):
            return steps[longer - 1][1]
        found = self._lacking.get(model)
        if found is None:
            found = frozenset(name for name, models in self._lists.items() if model not in models.names)
            if model in self.names:  # a name that a client made up is not kept
                self._lacking[model] = found
        return found

    @cached_property
    def parts(self) -> Parts:
        """Parts of the fleet that have no model in common, of those that list their models."""
        # By base models first: adapters, which may be thousands, can only join parts, and seldom do.
        by_base = Parts.of_fleet({name: models.base or models.names for name, models in self._lists.items()})
        if not by_base.each:
            return by_base
        served = [(part, _NOBODY.union(*[self._lists[name].names for name in part])) for part in by_base.each]
        if sum([len(names) for _, names in served]) > len(self.names):
            return Parts.of_fleet({name: models.names for name, models in self._lists.items()})
        of_model: dict[str, Part] = {}
        for part, names in served:
            of_model |= dict.fromkeys(names, part)
        return Parts(by_base.each, of_model)

    def longest(self, model: str) -> int | None:
        """The longest context in tokens that an instance accepts; None: one that may serve the model reports none.

        O(1), for a model's first request O(instances).
        """
        if model not in self._longest:
            own = [self._lengths[name].get(model) for name, each in self._lists.items() if model in each.names]
            known = [length for length in own if length is not None]
            found = max(known) if known and len(known) == len(own) and self._complete else None
            if model not in self.names:  # a name that a client made up is not kept
                return found
            self._longest[model] = found
        return self._longest[model]

    def _steps(self, model: str) -> list[tuple[int, frozenset[str]]]:
        """By context length, ascending: the instances that are no longer, or lack the model; without one of all."""
        known = {name: own[model] for name, own in self._lengths.items() if model in own}
        if len(set(known.values())) < 2 and len(known) in (0, len(self._lists)):
            return []
        lacking = frozenset(name for name, models in self._lists.items() if model not in models.names)
        steps = [
            (length, lacking.union(name for name, own in known.items() if own <= length))
            for length in sorted(set(known.values()))
        ]
        return [step for step in steps if len(step[1]) < len(self._lists)]

    def is_base(self, model: str) -> bool:
        """True if every instance that lists the model lists it as a base model and not as an adapter.

        Where two disagree, KV events of one could be taken for blocks of the other.
        """
        return model in self.names and model not in self._adapters
