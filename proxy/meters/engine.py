"""Meter of one instance: what the proxy assumes about its engine against what the engine reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from policies.meters.window import SlidingSums

_READINGS = 3
"""Consecutive readings that must all show a difference: a single one may be due to requests that have just begun."""
COUNTERS = {
    "vllm:prefix_cache_queries": "prefix_query_tokens",
    "vllm:prefix_cache_hits": "prefix_hit_tokens",
    "vllm:external_prefix_cache_queries": "external_query_tokens",
    "vllm:external_prefix_cache_hits": "external_hit_tokens",
}
"""The engines' counters of cache hits, in tokens -> their names here."""


class EngineSums(NamedTuple):
    """Sums over the requests of one instance in the window; tokens and seconds."""

    requests: float = 0
    prompt_tokens: float = 0
    predicted_tokens: float = 0
    reported_tokens: float = 0
    error_tokens: float = 0
    """Sum of |predicted - reported|."""
    repeats: float = 0
    """Requests of which a part was predicted to be cached."""
    exact_requests: float = 0
    """Repeats predicted from KV events."""
    exact_tokens: float = 0
    exact_over_tokens: float = 0
    """Tokens predicted from KV events that were not cached."""
    transfers: float = 0
    transfer_error_s: float = 0
    """Sum of |predicted - measured| seconds of the hand-offs to it."""
    transfer_s: float = 0

    def prediction_error(self) -> float | None:
        """Share of the prompt tokens that was predicted wrongly; None without requests."""
        return round(self.error_tokens / self.prompt_tokens, 6) if self.prompt_tokens else None

    def transfer_error(self) -> float | None:
        """Error of the predicted times of hand-offs relative to the measured ones; None without any."""
        return round(self.transfer_error_s / self.transfer_s, 6) if self.transfer_s else None


class LoadReading(NamedTuple):
    """Requests of one instance at one moment."""

    ledger: int = 0
    """In flight by the proxy's ledger."""
    engine: int = 0
    """Running and waiting by the engine's own report."""


class EngineMeter:
    """Figures of one instance; ``restart`` begins again for a new process of its engine."""

    def __init__(self, window_s: float) -> None:
        self._window = SlidingSums(len(EngineSums._fields), window_s)
        self._hits = SlidingSums(2, window_s)
        self._raw: dict[str, float] = {}
        self.counted: dict[str, float] = {}
        """Sums of the engine's own counters since the proxy's start, over restarts of the engine, by name."""
        self.caching_off = False
        """The engine reports that its prefix cache is disabled."""
        self.readings: deque[LoadReading] = deque(maxlen=_READINGS)
        self.batches = 0
        self.batches_since_s = float("-inf")
        """Since when no batch of KV events has come."""
        self.unreported = 0
        """Requests sent since then that computed new blocks and have ended."""
        self.unreported_since_s = 0.0
        self.echoed = False
        """It has answered with the id of the request's ``x-request-id`` header."""
        self.not_echoed = 0
        """Consecutive answers without it, the last ones."""

    def restart(self) -> None:
        """Forget what described the process before; counters and the echo, which show how it is reached, stay."""
        self._window.clear()
        self._hits.clear()
        self.readings.clear()
        self.caching_off = False
        self.unreported = 0

    def add(self, sums: EngineSums, now_s: float) -> None:
        """Add one request."""
        self._window.add(sums, now_s)

    def sums(self, now_s: float) -> EngineSums:
        """Sums over the window."""
        return EngineSums(*self._window.totals(now_s))

    def engine_hits(self, now_s: float) -> tuple[float, float] | None:
        """Tokens that the engine's own counters count as looked up and as found in the window; None: it has none."""
        if "prefix_hit_tokens" not in self._raw:
            return None
        queries, hits = self._hits.totals(now_s)
        return queries, hits

    def count(self, values: Mapping[str, float], now_s: float) -> None:
        """Take a reading of the engine's counters, by their names here. A smaller value is that of a new process."""
        grown = {}
        for name, value in values.items():
            before = self._raw.get(name)
            grown[name] = 0.0 if before is None else value - before if value >= before else value
            self.counted[name] = self.counted.get(name, 0.0) + grown[name]
            self._raw[name] = value
        if grown:
            self._hits.add((grown.get("prefix_query_tokens", 0.0), grown.get("prefix_hit_tokens", 0.0)), now_s)

    def drift(self, least: int, share: float, away: int) -> LoadReading | None:
        """The last reading if ledger and engine differ by more than the larger bound in all of the last ones.

        Args:
            least: bound in requests.
            share: bound as a share of the larger of both.
            away: requests that the ledger may rightly count here while another instance computes them.
        """
        if len(self.readings) < _READINGS:
            return None
        over = [each.ledger - each.engine > max(least, share * each.ledger) + away for each in self.readings]
        under = [each.engine - each.ledger > max(least, share * each.engine) for each in self.readings]
        return self.readings[-1] if all(over) or all(under) else None

    def saw_batches(self, batches: int, now_s: float) -> None:
        """Take the number of batches of KV events received so far."""
        if batches != self.batches:
            self.batches, self.batches_since_s, self.unreported = batches, now_s, 0

    def computed(self, sent_s: float, now_s: float) -> None:
        """Count a request that computed new blocks; one sent before the last batch may be reported by that."""
        if sent_s > self.batches_since_s:
            if not self.unreported:
                self.unreported_since_s = now_s
            self.unreported += 1

    def answered(self, echoed: bool) -> None:
        """Count an answer that could have the request's id, with it or without it."""
        self.echoed = self.echoed or echoed
        self.not_echoed = 0 if echoed else self.not_echoed + 1
