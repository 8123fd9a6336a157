"""Flow of admitted tokens, from which a held request's wait is estimated."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from policies.admission.room import Part, Parts

RATE_WINDOW_S = 60.0
"""Seconds over which the flow is measured."""
LEAST_WINDOW_S = 15.0
"""Seconds after which it is known."""


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
