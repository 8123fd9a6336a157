"""Bytes of text per token, learned per endpoint from the engines' token counts."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.request.parse import Endpoint

_WEIGHT = 0.1
_FULL_TOKENS = 1_000
"""Tokens from which a request has the whole weight. Shorter ones have a part of it by their length, as a mean over
tokens: one client's many tiny prompts must not set the ratio by which the prompts of all others are counted."""
_MAX_CHANGE = 0.05
"""Largest share by which one request moves the ratio: ten outliers in a row change it by a factor of 1.6."""
LEAST, MOST = 1.0, 16.0
"""Bounds on a request's ratio. A token has at least one byte; indented code and escaped CJK text reach about ten."""


class TextRatios:
    """The ratio of each endpoint: exponential averages, weighted by length, with bounded steps."""

    def __init__(self, initial: float) -> None:
        self._initial = initial
        self._learned: dict[Endpoint, float] = {}

    def of(self, endpoint: Endpoint) -> float:
        """Bytes per token of an endpoint's text; the initial ratio until something was learned."""
        return self._learned.get(endpoint, self._initial)

    def learn(self, endpoint: Endpoint, text_bytes: int, prompt_tokens: int) -> None:
        """Move an endpoint's ratio towards one request's; an implausible one is ignored."""
        if text_bytes <= 0 or prompt_tokens <= 0:
            return
        seen = text_bytes / prompt_tokens
        if LEAST <= seen <= MOST:
            ratio = self.of(endpoint)
            change = _WEIGHT * min(1.0, prompt_tokens / _FULL_TOKENS) * (seen - ratio)
            self._learned[endpoint] = ratio + min(_MAX_CHANGE * ratio, max(-_MAX_CHANGE * ratio, change))

    @property
    def learned(self) -> Mapping[str, float]:
        """Ratios of the endpoints that something was learned of."""
        return {endpoint.value: ratio for endpoint, ratio in self._learned.items()}

    def start(self, learned: Mapping[str, float]) -> None:
        """Start from ratios that another process has learned. Raises ValueError for what cannot be one."""
        if not all(LEAST <= ratio <= MOST for ratio in learned.values()):
            raise ValueError(f"no bytes per token: {dict(learned)}")
        self._learned = {Endpoint(name): ratio for name, ratio in learned.items()}

    def as_dict(self) -> Mapping[str, float]:
        """JSON-ready ratios."""
        return {endpoint.value: round(self.of(endpoint), 4) for endpoint in Endpoint}
