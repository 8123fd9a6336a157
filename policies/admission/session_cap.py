"""Session cap: at most a fixed number of sessions at a time; one that uses several models counts with each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.routing.base import require
from policies.types import RequestView


@dataclass(frozen=True, slots=True)
class SessionCap:
    """Holds a session while ``sessions`` others are in flight or ended a request less than ``keep_s`` seconds ago.

    In a fleet of several models that is a number for each part of it (`policies.admission.room.Parts`).

    The right number depends on fleet and traffic and must be found by trial; it is the yardstick for rules that find
    their limit themselves. Complexity: O(1).
    """

    sessions: int = 64
    keep_s: float = 60.0
    name: ClassVar[str] = "session_cap"

    def __post_init__(self) -> None:
        require(self.sessions >= 1, "session_cap: sessions must be at least 1")
        require(self.keep_s >= 0, "session_cap: keep_s must not be negative")

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        if session.resident:
            return Admit(AdmissionReason.RESIDENT)
        if fleet.active_sessions + fleet.kept_sessions < self.sessions:
            return Admit(AdmissionReason.BELOW_CAP)
        return Hold(AdmissionReason.AT_CAP)
