"""Never hold: every request is sent at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.admission.base import AdmissionReason, AdmissionView, Admit, Hold, SessionView
from policies.types import RequestView

_SENT = Admit(AdmissionReason.NEVER_HOLDS)


@dataclass(frozen=True, slots=True)
class NeverHold:
    """Sends every request at once. Complexity: O(1)."""

    name: ClassVar[str] = "never_hold"

    @property
    def keep_s(self) -> float:
        """Thirty seconds, for the figures only."""
        return 30.0

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        return _SENT
