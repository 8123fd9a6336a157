"""Failures of requests that no engine can answer, by their words."""

from __future__ import annotations

from collections import OrderedDict

KEPT_S = 60.0
"""Seconds for which such words are known after the last failure in them."""
_MOST = 64


class CommonFailures:
    """Words in which every engine that a request was sent to has failed lately. At most 64; O(1) per call."""

    def __init__(self) -> None:
        self._seen_s: OrderedDict[str, float] = OrderedDict()

    def add(self, error: str, now_s: float) -> None:
        """Two engines have failed at one request in these words."""
        self._seen_s[error] = now_s
        self._seen_s.move_to_end(error)
        if len(self._seen_s) > _MOST:
            self._seen_s.popitem(last=False)

    def known(self, error: str, now_s: float) -> bool:
        """True if engines failed at one request in these words within ``KEPT_S``."""
        seen_s = self._seen_s.get(error)
        return seen_s is not None and now_s - seen_s < KEPT_S
