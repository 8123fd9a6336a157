"""Settings of serving: timeouts, health, limits, records."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from proxy.settings.section import Seconds, Section


class TimeoutSettings(Section):
    """Bounds on every wait for an engine."""

    connect_s: Seconds = Field(default=2.0, description="TCP connect")
    first_byte_s: Seconds = Field(default=600.0, description="first byte of a streamed answer")
    idle_s: Seconds = Field(default=120.0, description="silence between two pieces of a stream")
    total_s: Seconds = Field(default=3600.0, description="one whole request, and a non-streamed answer")
    body_s: Seconds = Field(default=60.0, description="receiving the client's request body")
    header_s: Seconds = Field(default=10.0, description="receiving the request line and headers of a client's request")
    client_stall_s: Seconds = Field(
        default=60.0, description="how long a client may read nothing of an answer that waits for it"
    )


class HealthSettings(Section):
    """Active probes and the passive breaker."""

    interval_s: Seconds = Field(default=2.0, description="between two probes of an instance")
    timeout_s: Seconds = Field(default=2.0, description="bound on one probe")
    unhealthy_after: int = Field(
        default=3, ge=1, description="failed probes in a row, or failed requests in a row, that take an instance out"
    )
    healthy_after: int = Field(default=1, ge=1, description="good probes in a row that take it back, or to trial")
    failure_ratio: float = Field(
        default=0.5, gt=0, le=1, description="share of failed requests within the window that takes an instance out"
    )
    window_s: Seconds = Field(default=30.0, description="the sliding window of that share")
    window_min_requests: int = Field(default=10, ge=1, description="requests in the window below which it says nothing")
    open_s: Seconds = Field(default=5.0, description="how long failed requests keep an instance out before its trial")
    open_max_s: Seconds = Field(default=120.0, description="most that doubling makes of it")
    flap_window_s: Seconds = Field(
        default=120.0,
        description="failing again this soon after a good trial doubles the time out; as long without takes one back",
    )
    trial_requests: int = Field(default=3, ge=1, description="requests at a time that an instance on trial is sent")

    @model_validator(mode="after")
    def _ordered(self) -> HealthSettings:
        if self.open_max_s < self.open_s:
            raise ValueError(f"open_max_s ({self.open_max_s:g}) must not be less than open_s ({self.open_s:g})")
        return self


class LimitSettings(Section):
    """Bounds on what a client may send, on what is in flight, and on retries."""

    body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="largest request body")
    header_bytes: int = Field(
        default=32 * 1024, ge=1024, description="largest request line and headers of a client's request"
    )
    max_in_flight: int | None = Field(default=None, ge=1, description="requests sent to the fleet at a time; none: any")
    max_in_flight_per_instance: int | None = Field(
        default=None, ge=1, description="legs of requests on one instance at a time, P legs included; none: any"
    )
    queue_size: int = Field(default=1000, ge=0, description="requests that may wait for a place; 0: none waits")
    queue_timeout_s: Seconds = Field(default=30.0, description="how long a request waits for a place")
    max_attempts: int = Field(
        default=3, ge=1, description="instances tried for one request, before its first byte only; 1: no retries"
    )
    retry_ratio: float = Field(
        default=0.2, ge=0, le=1, description="retries allowed per request of the last retry_window_s"
    )
    retry_min_per_s: float = Field(default=1.0, ge=0, description="retries allowed beside those, per second")
    retry_window_s: Seconds = Field(default=60.0, description="what requests and retries are counted over")


class BreakdownSettings(Section):
    """Per-request records."""

    capacity: int = Field(default=10_000, ge=1, description="rows kept in memory")
    jsonl_path: Path | None = Field(default=None, description="also append every row to this file")
