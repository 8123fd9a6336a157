"""Held requests, and their places in line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from policies.admission.base import Admit, Hold
from policies.admission.elsewhere import rank
from policies.admission.room import Part, Parts
from policies.types import RequestView, Tenant


class Held:
    """A held request."""

    __slots__ = ("admitted", "hold", "model", "number", "request", "since_s")

    def __init__(self, request: RequestView, since_s: float, hold: Hold, model: str | None = None) -> None:
        self.request = request
        self.model = model
        """Model that it asks for; None: not known."""
        self.since_s = since_s
        self.hold = hold
        """Reason for its wait, as of the offer; ``AdmissionGate.reasons`` has that of now."""
        self.admitted: Admit | None = None
        """Set when it may be sent."""
        self.number = 0
        """Unique among those of its gate."""


NOBODY = frozenset[Held]()


class Place(NamedTuple):
    """Requests before one in line, of the same part of the fleet."""

    ahead: int = 0
    tokens: int = 0
    """Their prompt tokens."""
    of_tenant: int = 0
    """Those of its own tenant."""


FIRST = Place()


class Places:
    """Places of the requests of a line, asked for in its order."""

    def __init__(self) -> None:
        self._ahead = Counter[Part]()
        self._tokens = Counter[Part]()
        self._of_tenant = Counter[tuple[Part, str]]()

    def next(self, request: RequestView, part: Part) -> Place:
        """Place of the next one."""
        key = part, request.tenant.name
        place = Place(self._ahead[part], self._tokens[part], self._of_tenant[key])
        self._ahead[part] += 1
        self._tokens[part] += request.prompt_tokens
        self._of_tenant[key] += 1
        return place


class HeldCounts:
    """Held requests by model, and by the part of the fleet that serves it; without those that have none."""

    def __init__(self) -> None:
        self.by_model = Counter[str | None]()
        self.by_part = Counter[Part]()

    def add(self, held: Held, part: Part) -> None:
        """It is held from now on."""
        self.by_model[held.model] += 1
        self.by_part[part] += 1

    def remove(self, held: Held, part: Part) -> None:
        """It is held no longer."""
        self.by_model[held.model] -= 1
        if not self.by_model[held.model]:
            del self.by_model[held.model]
        self.by_part[part] -= 1
        if not self.by_part[part]:
            del self.by_part[part]

    def divide(self, parts: Parts) -> None:
        """The parts have changed."""
        self.by_part.clear()
        for model, number in self.by_model.items():
            self.by_part[parts.of(model)] += number


def in_parts(line: Iterable[Held], parts: Parts) -> dict[Part, list[Held]]:
    """The requests of each part, in the order of the line."""
    found: dict[Part, list[Held]] = {}
    for held in line:
        found.setdefault(parts.of(held.model), []).append(held)
    return found


def rank_of(held: Held, now_s: float) -> float:
    """Sort key of the line, lowest first."""
    return rank(held.request.prompt_tokens, now_s - held.since_s)


def tenant_of(held: Held) -> Tenant:
    """Tenant of the request."""
    return held.request.tenant


def tokens_of(held: Held) -> int:
    """Tokens of its prompt."""
    return held.request.prompt_tokens
