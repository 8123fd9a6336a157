"""Targets of the proxy, as data, and their check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.data_plane.launches import OURS
from bench.data_plane.quantities import QuantitySample
from bench.data_plane.report.ratios import medians, ratios


class Target(NamedTuple):
    """An upper limit of one of our quantities, absolute or as a ratio to a peer's."""

    quantity: str
    limit: float
    peer: str = ""
    """Empty: an absolute limit."""

    def __str__(self) -> str:
        return f"{self.quantity} <= {self.limit:g}" + (f"x {self.peer}" if self.peer else "")


TARGETS = (
    Target("cpu_ms_130k", 0.6, "sglang-ca"),
    Target("cpu_ms_130k", 0.1, "vllm-router-ca"),
    Target("cpu_ms_130k", 0.8, "vllm-router-rr"),
    Target("cpu_ms_2k", 1.0, "vllm-router-rr"),
    Target("added_p50_ms_130k", 0.8),
    Target("added_p50_ms_130k", 0.1, "vllm-router-ca"),
    Target("added_p99_ms_130k", 1.0, "vllm-router-rr"),
    Target("added_p99_ms_130k", 1.0, "vllm-router-ca"),
    Target("added_p99_ms_130k", 1.0, "sglang-ca"),
    Target("cpu_us_event", 12.0),
    Target("cpu_us_event", 0.7, "vllm-router-rr"),
    Target("many_errors", 0.0),
    Target("abort_prefill_p99_ms", 50.0),
    Target("abort_stream_p99_ms", 50.0),
)


class TargetFinding(NamedTuple):
    """A target and the measured value: the median over the rounds, of ratios if the target is one."""

    target: Target
    value: float | None
    """None: not measured."""

    @property
    def met(self) -> bool:
        """True if it was measured and is within the limit."""
        return self.value is not None and self.value <= self.target.limit

    def __str__(self) -> str:
        found = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{self.target}: {found}, {'met' if self.met else 'missed'}"


def check(samples: Sequence[QuantitySample], targets: Sequence[Target] = TARGETS) -> list[TargetFinding]:
    """Compare the samples of a run with the targets; any error in a round misses ``many_errors``."""
    found = []
    for target in targets:
        if target.peer:
            ratio = ratios(samples, target.quantity, OURS, target.peer)
            found.append(TargetFinding(target, ratio.median if ratio else None))
        elif target.quantity == "many_errors":
            errors = [s.values["many_errors"] for s in samples if s.stack == OURS and "many_errors" in s.values]
            found.append(TargetFinding(target, max(errors) if errors else None))
        else:
            found.append(TargetFinding(target, medians(samples).get((target.quantity, OURS))))
    return found
