"""Load of an engine as its own metrics report it."""

from __future__ import annotations

from typing import NamedTuple


class ReportedLoad(NamedTuple):
    """Figures of the last reading of an engine's metrics; None: it reports none, or is down."""

    running: int | None = None
    """Requests that it computes."""
    waiting: int | None = None
    """Requests that wait in it."""
    kv_usage: float | None = None
    """Share of its KV pool in use, 0..1."""

    @property
    def requests(self) -> int | None:
        """Requests in the engine; None: it does not report both kinds."""
        return None if self.running is None or self.waiting is None else self.running + self.waiting


NOT_REPORTED = ReportedLoad()
