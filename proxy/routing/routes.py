"""The router as admission uses it."""

from __future__ import annotations

from typing import Protocol

from policies.admission.base import NO_INSTANCES
from policies.session import Routed
from policies.types import RequestView


class Routes(Protocol):
    """Routes and leases in one step, as ``Router.route`` does."""

    def route(self, request: RequestView, available: set[str], room_on: frozenset[str] = NO_INSTANCES) -> Routed:
        """Route and lease a request to one of ``available``, of ``room_on`` if possible. Raises NoCandidateError."""
        ...
