"""Totals of a run, updated request by request: for runs too long to keep their records in memory."""

from __future__ import annotations

from array import array

import numpy as np

from replayer.records.runs import RequestRecord


class SimulatedOutcome:
    """Counts and latencies of a run; 24 bytes a request."""

    def __init__(self) -> None:
        self.requests = 0
        self.ok = 0
        self.offloaded = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.error_tokens = 0
        """Sum of |predicted - actual| cached tokens."""
        self.errors: dict[str, int] = {}
        self.finished_s = 0.0
        self._ttft_s = array("d")
        self._tpot_s = array("d")
        self._e2e_s = array("d")

    def add(self, record: RequestRecord) -> None:
        """Add a request."""
        self.requests += 1
        self.finished_s = max(self.finished_s, record.finished_s or 0.0)
        if not record.ok:
            kind = (record.error or "unknown").split(":")[0]
            self.errors[kind] = self.errors.get(kind, 0) + 1
            return
        self.ok += 1
        cached = record.cached_tokens or 0
        self.prompt_tokens += record.prompt_tokens or 0
        self.cached_tokens += cached
        self.error_tokens += abs((record.predicted_cached_tokens or 0) - cached)
        self.offloaded += record.prefill_instance is not None
        for values, value in (
            (self._ttft_s, record.ttft_s),
            (self._tpot_s, record.tpot_s),
            (self._e2e_s, record.e2e_s),
        ):
            if value is not None:
                values.append(value)

    def figures(self) -> dict[str, float | int | None]:
        """All figures by name: counts, ``apc``, and p50, p90, p99 of each latency in seconds (None: no value)."""
        found: dict[str, float | int | None] = {
            "requests": self.requests,
            "ok": self.ok,
            "offloaded": self.offloaded,
            "span_s": self.finished_s,
            "apc": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None,
            "prediction_error_tokens": self.error_tokens / self.ok if self.ok else None,
        }
        for name, values in (("ttft", self._ttft_s), ("tpot", self._tpot_s), ("e2e", self._e2e_s)):
            quantiles = np.quantile(values, (0.5, 0.9, 0.99)) if values else (None, None, None)
            for share, value in zip(("p50", "p90", "p99"), quantiles, strict=True):
                found[f"{name}_{share}_s"] = None if value is None else float(value)
        return found
