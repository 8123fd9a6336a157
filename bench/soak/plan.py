"""Settings of a soak run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """One run. All random choices are drawn from ``seed``; their timing is not repeatable."""

    duration_s: float = 1200.0
    streams: int = 200
    """Requests in flight: the number of workers, each with one request at a time."""
    engines: int = 4
    kill_every_s: float = 5.0
    """Mean time between two engines killed."""
    down_s: float = 2.0
    """Mean time from the kill to the restart."""
    leave_share: float = 0.15
    """Share of requests whose client disconnects before the end."""
    stream_share: float = 0.8
    """Share of requests that are streamed."""
    prompts: int = 48
    """Distinct requests; their answers are known before the first engine is killed."""
    max_output_tokens: int = 256
    time_scale: float = 1.0
    """Engine seconds per wall second."""
    flush_ms: float = 50.0
    """Milliseconds for which engines gather tokens for one event."""
    rss_growth_mb: float = 16.0
    """Most that the proxy's memory may grow by its slope over the measured window."""
    warm_up_share: float = 0.35
    """Share of the run that is left out of the slopes: rings, index and pools fill."""
    drain_s: float = 30.0
    """Seconds that requests may take to end once no new ones are sent."""
    seed: int = 1
