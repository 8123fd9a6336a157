"""Jobs of the load generator and their results: one JSON line each way."""

from __future__ import annotations

from typing import Literal

import msgspec

from bench.data_plane.load.client import LoadTarget


class LoadWorkload(msgspec.Struct, kw_only=True, frozen=True):
    """Requests of one kind; request ``number`` is the same in every run with the same seed."""

    kind: Literal["text", "ids", "sessions"]
    seed: int
    size_bytes: int = 0
    """Bytes of the prompt; sessions grow by their own plan."""
    events: int = 80
    """Events that the engine stub is set to send and every answer must have."""


class LoadJob(msgspec.Struct, kw_only=True, tag_field="job"):
    """Fields of all jobs."""

    targets: list[LoadTarget]
    """Equivalent addresses; requests go to each in turn."""
    workload: LoadWorkload
    first: int = 0
    """Number of the first request."""
    pids: list[int] = []
    """Processes whose CPU time is read just before and just after the counted requests."""
    timeout_s: float = 60.0
    """Timeout of one answer."""


class ClosedLoopJob(LoadJob, kw_only=True, tag="closed"):
    """``concurrency`` requests in flight at all times."""

    concurrency: int
    requests: int = 0
    """Counted requests; 0: as many as fit in ``seconds``."""
    seconds: float = 0.0
    warmup: int = 0
    """Requests sent before, not counted."""


class Paired(LoadJob, kw_only=True, tag="paired"):
    """One request at a time, to the router and straight to an engine in turn; the order is random."""

    direct: list[LoadTarget]
    pairs: int
    gap_s: float = 0.004
    """Pause between two requests."""
    warmup: int = 5


class Streams(LoadJob, kw_only=True, tag="streams"):
    """``streams`` paced streams side by side; counted for ``window_s``, ``settle_s`` after the last has begun."""

    streams: int
    settle_s: float
    window_s: float


class Aborts(LoadJob, kw_only=True, tag="aborts"):
    """Clients that disconnect: with ``after_event`` during the stream, else while they wait for the first event."""

    requests: int
    concurrency: int
    after_event: bool
    wait_s: tuple[float, float] = (0.005, 0.25)
    """Range from which the time of the disconnect is drawn, in seconds after the request or the first event."""


AnyJob = ClosedLoopJob | Paired | Streams | Aborts


class LatencySpread(msgspec.Struct, kw_only=True):
    """Percentiles of milliseconds."""

    p50: float
    p99: float
    max: float
    count: int


class JobResult(msgspec.Struct, kw_only=True):
    """Result of a job. Times are wall-clock seconds unless the name says otherwise."""

    requests: int
    """Counted requests with a correct answer."""
    errors: dict[str, int]
    """Error message -> count."""
    seconds: float
    cpu_s: float
    """CPU seconds of ``pids`` while the counted requests ran."""
    load_cpu_s: float
    events: int = 0
    """Events relayed while ``cpu_s`` was counted."""
    reconnects: int = 0
    ttft_ms: LatencySpread | None = None
    direct_ttft_ms: LatencySpread | None = None
    added_ms: LatencySpread | None = None
    """p50 of paired differences; p99 and max of the router's times less the median of the direct ones."""
    left: dict[str, float] = {}
    """Tag of an aborted request -> ``CLOCK_MONOTONIC`` second at which the client closed."""
