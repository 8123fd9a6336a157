"""State of discovery, for conditions, metrics and ``GET /stats``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Reading(StrEnum):
    """Result of one reading of the source."""

    APPLIED = "applied"
    """The fleet was changed."""
    UNCHANGED = "unchanged"
    EMPTY = "empty"
    """The source has no instance; the last set was kept."""
    FAILED = "failed"
    """The source could not be read; the last set was kept."""


@dataclass(slots=True)
class DiscoveryStatus:
    """State of one source; written by the task that applies it."""

    source: str
    origin: str = ""
    instances: int = 0
    """Size of the set in use."""
    readings: dict[Reading, int] = field(default_factory=lambda: dict.fromkeys(Reading, 0))
    last: Reading | None = None
    """Result of the last reading; None: there was none."""
    failures_in_a_row: int = 0
    last_error: str | None = None
    problems: tuple[str, ...] = ()
    """Reasons for which instances of the set in use are not in the fleet."""
    read_unix_s: float | None = None
    """Time of the last successful reading."""

    def read(self, reading: Reading) -> None:
        """Count a successful reading."""
        self._count(reading)
        self.failures_in_a_row, self.last_error = 0, None
        self.read_unix_s = round(time.time(), 3)

    def failed(self, error: str) -> None:
        """Count a failed reading."""
        self._count(Reading.FAILED)
        self.failures_in_a_row += 1
        self.last_error = error

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "source": self.source,
            "origin": self.origin,
            "instances": self.instances,
            "last": None if self.last is None else self.last.value,
            "readings": {reading.value: count for reading, count in self.readings.items()},
            "failures_in_a_row": self.failures_in_a_row,
            "last_error": self.last_error,
            "problems": list(self.problems),
            "read_unix_s": self.read_unix_s,
        }

    def _count(self, reading: Reading) -> None:
        self.readings[reading] += 1
        self.last = reading
