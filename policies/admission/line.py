"""The line of held requests: places, counts, and the flow of admitted tokens, from which waits are estimated."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from policies.admission.base import Admit, Hold
from policies.admission.elsewhere import rank
from policies.admission.room import Part, Parts
from policies.types import RequestView, Tenant

RATE_WINDOW_S = 60.0
"""Seconds over which the flow is measured."""
LEAST_WINDOW_S = 15.0
"""Seconds after which it is known."""


class Held:
    """A held request."""

    __slots__ = ("admitted", "hold", "number", "request", "since_s")

    def __init__(self, request: RequestView, since_s: float, hold: Hold) -> None:
        self.request = request
        self.since_s = since_s
        self.hold = hold
        """Reason for its wait, as of the offer; ``AdmissionGate.reasons`` has that of now."""
        self.admitted: Admit | None = None
        """Set when it may be sent."""
        self.number = 0
        """Unique among those of its gate."""


NOBODY = frozenset[Held]()


class LinePlace(NamedTuple):
    """Requests before one in line, of the same part of the fleet."""

    ahead: int = 0
    tokens: int = 0
    """Their prompt tokens."""
    of_tenant: int = 0
    """Those of its own tenant."""


FIRST = LinePlace()


class Places:
    """Places of the requests of a line, asked for in its order."""

    def __init__(self) -> None:
        self._ahead = Counter[Part]()
        self._tokens = Counter[Part]()
        self._of_tenant = Counter[tuple[Part, str]]()

    def next(self, request: RequestView, part: Part) -> LinePlace:
        """The place of the next one."""
        key = part, request.tenant.name
        place = LinePlace(self._ahead[part], self._tokens[part], self._of_tenant[key])
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
        self.by_model[held.request.model] += 1
        self.by_part[part] += 1

    def remove(self, held: Held, part: Part) -> None:
        """It is held no longer."""
        model = held.request.model
        self.by_model[model] -= 1
        if not self.by_model[model]:
            del self.by_model[model]
        self.by_part[part] -= 1
        if not self.by_part[part]:
            del self.by_part[part]

    def divide(self, parts: Parts) -> None:
        """The parts have changed."""
        self.by_part.clear()
        for model, number in self.by_model.items():
            self.by_part[parts.of(model)] += number


class AdmittedFlow:
    """Tokens admitted while requests were held."""

    def __init__(self, since_s: float) -> None:
        """``since_s``: the time since which requests are held."""
        self._admitted: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._since_s = since_s

    def copy(self) -> AdmittedFlow:
        """A copy."""
        made = AdmittedFlow(self._since_s)
        made._admitted, made._tokens = self._admitted.copy(), self._tokens
        return made

    def add(self, tokens: int, now_s: float) -> None:
        """A request of so many tokens is admitted."""
        self._admitted.append((now_s, tokens))
        self._tokens += tokens

    def wait_s(self, tokens: int, now_s: float) -> float:
        """Seconds until ``tokens`` have been admitted at the flow of the last minute; 0 while that is unknown."""
        admitted, oldest_s = self._admitted, now_s - RATE_WINDOW_S
        while admitted and admitted[0][0] < oldest_s:
            self._tokens -= admitted.popleft()[1]
        window_s = min(RATE_WINDOW_S, now_s - self._since_s)
        return 0.0 if window_s < LEAST_WINDOW_S else tokens * window_s / max(1, self._tokens)


class Flows:
    """Flows of the parts of a fleet that have held requests."""

    def __init__(self) -> None:
        self._of: dict[Part, AdmittedFlow] = {}

    def begin(self, part: Part, now_s: float) -> None:
        """The first request of a part is held."""
        self._of[part] = AdmittedFlow(now_s)

    def end(self, part: Part) -> None:
        """None of its requests is held any more."""
        self._of.pop(part, None)

    def add(self, part: Part, tokens: int, now_s: float) -> None:
        """A request of so many tokens is admitted; counted while others of its part are held."""
        if (flow := self._of.get(part)) is not None:
            flow.add(tokens, now_s)

    def wait_s(self, part: Part, tokens: int, now_s: float) -> float:
        """As that of the part's flow; 0 while none of its requests is held."""
        flow = self._of.get(part)
        return 0.0 if flow is None else flow.wait_s(tokens, now_s)

    def divide(self, before: Parts, parts: Parts, models: Iterable[str | None]) -> None:
        """The fleet has other parts: each begins with the flow of one that its held requests were of.

        Args:
            before: the former parts.
            parts: the new ones.
            models: those of the held requests.
        """
        former, self._of = self._of, {}
        for model in models:
            part, flow = parts.of(model), former.get(before.of(model))
            if flow is not None and part not in self._of:
                self._of[part] = flow.copy()


def in_parts(line: Iterable[Held], parts: Parts) -> dict[Part, list[Held]]:
    """The requests of each part, in the order of the line."""
    found: dict[Part, list[Held]] = {}
    for held in line:
        found.setdefault(parts.of(held.request.model), []).append(held)
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
