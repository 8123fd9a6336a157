"""A state that is entered and left only after it has been observed for some time, so that it does not flap."""

from __future__ import annotations


class Latch:
    """Off until the observation was true for ``raise_s`` seconds, then on until it was false for ``clear_s``."""

    __slots__ = ("_since_s", "on")

    def __init__(self) -> None:
        self.on = False
        self._since_s: float | None = None

    def update(self, observed: bool, now_s: float, raise_s: float, clear_s: float) -> bool:
        """Take one observation; returns the state. ``now_s`` must not decrease between calls."""
        if observed is self.on:
            self._since_s = None
            return self.on
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (clear_s if self.on else raise_s):
            self.on, self._since_s = observed, None
        return self.on
