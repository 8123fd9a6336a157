"""Residency of sessions: how much of a prompt the instance of its session still has in its KV pool."""

from __future__ import annotations

from policies.predict.predictor import Predictor
from policies.sessions import SessionTable
from policies.types import RequestView

RESIDENT_SHARE = 0.5
"""Share of what the fleet computed of a prompt before that must still be cached for its session to be resident."""


class Residency:
    """Reads one instance of the prefix indexes: O(log blocks), and O(instances) where the exact index is trusted."""

    def __init__(self, predictor: Predictor, sessions: SessionTable) -> None:
        self._predictor = predictor
        self._sessions = sessions

    def evicted(self, request: RequestView, before_tokens: int, now_s: float) -> bool:
        """True if the session's instance has evicted over half of the first ``before_tokens`` tokens of its prompt."""
        instance = self._sessions.instance_of(request.context_id or "", now_s)
        if instance is None or not before_tokens:
            return False
        blocks = self._predictor.match_one(instance, request)
        return blocks * request.block_tokens < RESIDENT_SHARE * before_tokens
