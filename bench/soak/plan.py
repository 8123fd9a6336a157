"""Settings of a soak run, and what the proxy and all clients of a run agree on."""

from __future__ import annotations

from dataclasses import dataclass

MODEL = "warm-sim"
POLITE_KEY = "wr-soak-polite-clients-of-one-run-0000000000"
TENANT_KEY = "wr-soak-hostile-tenant-of-one-run-0000000000"
"""Key of hostile clients that have one."""


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
    hostile_share: float = 0.0
    """Share of requests that hostile clients send, in every second slice of the run; 0: no hostile clients."""
    hostile_workers: int = 32
    """Most connections of hostile clients at a time."""
    body_bytes: int = 32 * 1024 * 1024
    """``limits.body_bytes`` of the proxy, and about the largest body of a hostile client."""
    slice_pairs: int = 4
    """Slices without hostile clients, each followed by one with them, so that noise of the machine affects both."""
    settle_share: float = 0.05
    """Share of a slice at its beginning whose requests are in no comparison."""
    ttft_ratio: float = 2.0
    """Most that polite clients' TTFT p99 with hostile clients may be, as a multiple of that without."""
    seed: int = 1

    @property
    def slice_s(self) -> float:
        """Seconds of a slice."""
        return self.duration_s / (2 * self.slice_pairs)

    @property
    def polite_prefix(self) -> str:
        """Start of all request ids of polite clients, and of no other's."""
        return f"soak-{self.seed}-"
