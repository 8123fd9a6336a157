"""Settings of serving: timeouts, health, limits, records."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from proxy.settings.section import Seconds, Section


class TimeoutSettings(Section):
    """Bounds on every wait for an engine."""

    connect_s: Seconds = Field(default=2.0, description="TCP connect")
    first_byte_s: Seconds = Field(default=600.0, description="first byte of a streamed answer")
    idle_s: Seconds = Field(default=120.0, description="silence between two pieces of a stream")
    total_s: Seconds = Field(default=3600.0, description="one whole request, and a non-streamed answer")
    body_s: Seconds = Field(default=60.0, description="receiving the client's request body")


class HealthSettings(Section):
    """Active probes and the passive breaker."""

    interval_s: Seconds = Field(default=2.0, description="between two probes of an instance")
    timeout_s: Seconds = Field(default=2.0, description="bound on one probe")
    unhealthy_after: int = Field(
        default=3, ge=1, description="failed probes or requests in a row that take an instance out"
    )
    healthy_after: int = Field(default=1, ge=1, description="good probes in a row that take it back")


class LimitSettings(Section):
    """Bounds on what a client may send and on retries."""

    body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="largest request body")
    max_attempts: int = Field(
        default=3, ge=1, description="instances tried for one request, before its first byte only"
    )


class BreakdownSettings(Section):
    """Per-request records."""

    capacity: int = Field(default=10_000, ge=1, description="rows kept in memory")
    jsonl_path: Path | None = Field(default=None, description="also append every row to this file")
