"""Totals of a run, updated request by request: for runs too long to keep their records in memory."""

from __future__ import annotations

from array import array

import numpy as np

from replayer.records.idle import IdleCosts
from replayer.records.runs import RequestRecord
from replayer.records.sessions import SessionTally

_LATENCIES = ("ttft_s", "ttft_scheduled_s", "tpot_s", "e2e_s", "e2e_scheduled_s")


class SimulatedOutcome:
    """Counts and latencies of a run; 40 bytes a request and 16 a completed session.

    Args:
        costs: for the idle times of sessions.
    """

    def __init__(self, costs: IdleCosts | None = None) -> None:
        self.requests = 0
        self.ok = 0
        self.offloaded = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.error_tokens = 0
        """Sum of |predicted - actual| cached tokens."""
        self.short_outputs = 0
        """Successful requests with fewer output tokens than the trace has."""
        self._errors: dict[str, tuple[str, int]] = {}
        self.finished_s = 0.0
        self.sessions = SessionTally(costs or IdleCosts())
        """Times of sessions; the owner of the run reports to it which sessions are over."""
        self._values = {name: array("d") for name in _LATENCIES}

    def add(self, record: RequestRecord) -> None:
        """Add a request."""
        self.requests += 1
        self.finished_s = max(self.finished_s, record.finished_s or 0.0)
        self.sessions.add(record)
        if not record.ok:
            error = record.error or "unknown"
            kind = error.partition(":")[0]
            first, count = self._errors.get(kind, (error, 0))
            self._errors[kind] = first, count + 1
            return
        self.ok += 1
        self.short_outputs += (record.completion_tokens or 0) < record.output_length
        cached = record.cached_tokens or 0
        self.prompt_tokens += record.prompt_tokens or 0
        self.cached_tokens += cached
        self.error_tokens += abs((record.predicted_cached_tokens or 0) - cached)
        self.offloaded += record.prefill_instance is not None
        for name, values in self._values.items():
            value = getattr(record, name)
            if value is not None:
                values.append(value)

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by reason: the first error of a kind, and the number of all of that kind."""
        return dict(self._errors.values())

    def figures(self) -> dict[str, float | int | None]:
        """All figures by name (None: no value): counts, ``apc``, latencies and times of sessions.

        Of each latency its mean, p50, p90 and p99 in seconds: ``ttft_mean_s``, ``ttft_p50_s``; from when the turn was
        due, ``ttft_scheduled_mean_s``. Of completed sessions mean, p50 and p90 of ``session_completion`` in seconds and
        of ``session_slowdown``, a factor (`replayer.records.sessions`).
        """
        found: dict[str, float | int | None] = {
            "requests": self.requests,
            "ok": self.ok,
            "offloaded": self.offloaded,
            "span_s": self.finished_s,
            "apc": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "prediction_error_tokens": self.error_tokens / self.ok if self.ok else None,
        }
        for name, values in self._values.items():
            stem = name.removesuffix("_s")
            found[f"{stem}_mean_s"] = float(np.mean(values)) if values else None
            quantiles = np.quantile(values, (0.5, 0.9, 0.99)) if values else (None, None, None)
            for share, value in zip(("p50", "p90", "p99"), quantiles, strict=True):
                found[f"{stem}_{share}_s"] = None if value is None else float(value)
        sessions = self.sessions.figures()
        for count in ("sessions", "completed", "failed", "cut"):
            found["sessions" if count == "sessions" else f"sessions_{count}"] = getattr(sessions, count)
        for share in ("mean", "p50", "p90"):
            found[f"session_completion_{share}_s"] = getattr(sessions.completion_s, share)
            found[f"session_slowdown_{share}"] = getattr(sessions.slowdown, share)
        return found
