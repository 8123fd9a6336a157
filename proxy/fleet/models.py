"""Models and adapters that engines list under ``GET /v1/models``, and the index of which instance lacks which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

_NOBODY: frozenset[str] = frozenset()


class NoModelListError(ValueError):
    """An answer to ``GET /v1/models`` that is not a list of models."""


class ModelList(NamedTuple):
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

    @property
    def base(self) -> frozenset[str]:
        """Names of models that are not adapters."""
        return self.names - self.adapters

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
        base = self.names - self._adapters
        self.sole_model = next(iter(base)) if len(base) == 1 else None
        """The one base model that all lists together have; None: several, or none."""

    def lacking(self, model: str) -> frozenset[str]:
        """Instances that list their models, but not this one. O(1), for a model's first request O(instances)."""
        found = self._lacking.get(model)
        if found is None:
            found = frozenset(name for name, models in self._lists.items() if model not in models.names)
            if model in self.names:  # a name that a client made up is not kept
                self._lacking[model] = found
        return found

    def is_base(self, model: str) -> bool:
        """True if every instance that lists the model lists it as a base model and not as an adapter.

        Where two disagree, KV events of one could be taken for blocks of the other.
        """
        return model in self.names and model not in self._adapters
