"""Circuit breaker per (P, D) pair: no hand-offs over a pair for a while after repeated failures."""

from __future__ import annotations


class PairBreaker:
    """Opens a (P, D) pair for ``cooldown_s`` after ``failures`` failed hand-offs in a row."""

    def __init__(self, failures: int = 3, cooldown_s: float = 30.0) -> None:
        if failures < 1 or cooldown_s <= 0:
            raise ValueError(f"failures must be at least 1 and cooldown_s positive, got {failures} and {cooldown_s}")
        self._limit = failures
        self._cooldown_s = cooldown_s
        self._failures: dict[tuple[str, str], int] = {}
        self._open_until_s: dict[tuple[str, str], float] = {}

    def record(self, pair: tuple[str, str], ok: bool, now_s: float) -> None:
        """Count one hand-off; after the cooldown a single further failure opens the pair again."""
        if ok:
            self._failures.pop(pair, None)
            self._open_until_s.pop(pair, None)
            return
        self._failures[pair] = self._failures.get(pair, 0) + 1
        if self._failures[pair] >= self._limit:
            self._open_until_s[pair] = now_s + self._cooldown_s

    def forget(self, instance: str) -> None:
        """Remove all pairs of an instance that left the fleet."""
        self._failures = {pair: count for pair, count in self._failures.items() if instance not in pair}
        self._open_until_s = {pair: until_s for pair, until_s in self._open_until_s.items() if instance not in pair}

    def broken(self, now_s: float) -> frozenset[tuple[str, str]]:
        """Pairs whose breaker is open at ``now_s``."""
        if not self._open_until_s:
            return frozenset()
        return frozenset(pair for pair, until_s in self._open_until_s.items() if now_s < until_s)
