"""Settings of serving: timeouts, health, limits, records."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from proxy.settings.section import Seconds, Section


class TimeoutSettings(Section):
    """Bounds on every wait for an engine or a client."""

    connect_s: Seconds = Field(
        default=2.0, description="opening a TCP connection, the lookup of its host name included"
    )
    first_byte_s: Seconds = Field(default=600.0, description="first byte of a streamed answer")
    idle_s: Seconds = Field(default=120.0, description="silence between two pieces of a stream")
    total_s: Seconds = Field(default=3600.0, description="one whole request, and a non-streamed answer")
    body_s: Seconds = Field(default=60.0, description="receiving the client's request body")
    header_s: Seconds = Field(default=10.0, description="receiving the request line and headers of a client's request")
    client_stall_s: Seconds = Field(default=60.0, description="time a client may leave a pending answer unread")


class HealthSettings(Section):
    """Active probes and the passive circuit breaker."""

    interval_s: Seconds = Field(default=2.0, description="interval between two probes of an instance")
    timeout_s: Seconds = Field(default=2.0, description="bound on one probe")
    unhealthy_after: int = Field(
        default=3, ge=1, description="consecutive failed probes, or failed requests, that take an instance out"
    )
    healthy_after: int = Field(
        default=1, ge=1, description="consecutive successful probes that take it back, or to trial"
    )
    stalled_after_s: float = Field(
        default=180.0,
        ge=0,
        allow_inf_nan=False,
        description="time after which an engine that answers its probes is not used if it computes nothing while "
        "requests wait; 0: never",
    )
    failure_ratio: float = Field(
        default=0.5, gt=0, le=1, description="share of failed requests within the window that takes an instance out"
    )
    window_s: Seconds = Field(default=30.0, description="length of the sliding window of failure_ratio")
    window_min_requests: int = Field(default=10, ge=1, description="fewest requests for failure_ratio to apply")
    open_s: Seconds = Field(default=5.0, description="time the circuit breaker stays open before trial requests")
    open_max_s: Seconds = Field(default=120.0, description="maximum of open_s after doubling")
    flap_window_s: Seconds = Field(
        default=120.0,
        description="a failure this soon after a successful trial doubles open_s; each such time without one halves it",
    )
    trial_requests: int = Field(default=3, ge=1, description="concurrent requests sent to an instance on trial")

    @model_validator(mode="after")
    def _ordered(self) -> HealthSettings:
        if self.open_max_s < self.open_s:
            raise ValueError(f"open_max_s ({self.open_max_s:g}) must not be less than open_s ({self.open_s:g})")
        return self


class LimitSettings(Section):
    """Bounds on client requests, on requests in flight, and on retries."""

    body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="largest request body")
    prompts: int = Field(default=1024, ge=1, description="most prompts in one completion request")
    header_bytes: int = Field(
        default=32 * 1024, ge=1024, description="largest request line and headers of a client's request"
    )
    admin_body_bytes: int = Field(
        default=1024 * 1024, ge=1024, description="largest body of a request that is not for generation"
    )
    buffered_bytes: int = Field(
        default=512 * 1024 * 1024,
        ge=1024,
        description="request bodies held in memory, over all connections, until they are answered; above it 503",
    )
    connections: int | None = Field(
        default=None,
        ge=1,
        description="open connections of clients; above it generation requests get 503. none: three quarters of the "
        "process's limit on open files, less 64",
    )
    max_in_flight: int | None = Field(
        default=None, ge=1, description="concurrent requests sent to the fleet; none: unlimited"
    )
    max_in_flight_per_instance: int | None = Field(
        default=None, ge=1, description="concurrent legs of requests on one instance, P legs included; none: unlimited"
    )
    queue_size: int = Field(default=1000, ge=0, description="requests that may wait in the queue; 0: no queue")
    queue_timeout_s: Seconds = Field(default=30.0, description="maximum time in the queue")
    max_attempts: int = Field(
        default=3, ge=1, description="instances tried for one request, before its first byte only; 1: no retries"
    )
    retry_ratio: float = Field(
        default=0.2, ge=0, le=1, description="retries allowed per request of the last retry_window_s"
    )
    retry_min_per_s: float = Field(default=1.0, ge=0, description="additional retries allowed per second")
    retry_window_s: Seconds = Field(default=60.0, description="window over which requests and retries are counted")
    slow_decision_s: Seconds = Field(
        default=0.05, description="routing decisions that take longer are counted as slow, and reported"
    )


class LogSettings(Section):
    """Log of requests, apart from the log of the process (``log_level``, ``log_format``)."""

    access: str | None = Field(
        default=None, min_length=1, description="file to append one JSON line per request to; -: standard output"
    )
    access_buffer: int = Field(
        default=10_000, ge=1, description="requests that may wait to be written; those above are dropped and counted"
    )


class BreakdownSettings(Section):
    """Per-request records."""

    capacity: int = Field(default=10_000, ge=1, description="rows kept in memory")
    rejected_capacity: int = Field(
        default=1_000, ge=1, description="rows of rejected requests kept in memory, apart from the others"
    )
    jsonl_path: Path | None = Field(
        default=None, description="also append every row to this file, except those of rejected requests"
    )
    jsonl_max_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=64 * 1024,
        description="size at which jsonl_path is renamed to jsonl_path.1, that to jsonl_path.2 and so on",
    )
    jsonl_files: int = Field(
        default=4, ge=1, le=1000, description="files kept, the current one included; the oldest is removed"
    )
    max_followers: int = Field(
        default=16, ge=0, description="concurrent streams of GET /breakdown?follow=true; above it 503"
    )
    rejected_to_jsonl: bool = Field(
        default=False, description="append rows of rejected requests too: clients without a key can then fill the disk"
    )
