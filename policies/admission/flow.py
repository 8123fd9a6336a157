"""Flow of admitted tokens, from which a held request's wait is estimated."""

from __future__ import annotations

from collections import deque

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
