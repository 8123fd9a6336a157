"""Metric names: those that a PromQL expression uses, and those that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

OF_ENGINES = frozenset(
    {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_queries_total",
        "vllm:num_preemptions_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
    }
)
"""Metrics of vLLM 0.20 that rules and dashboard may use."""
OF_PROMETHEUS = frozenset({"up"})
OF_RULES = frozenset({"warmroute:instance_first_token_ratio:median10m"})
"""Recorded by a rule of configs/monitoring/alerts.yml."""

_NAME = re.compile(r"\b(?:warmroute[_:]|process_|vllm:)[a-zA-Z0-9_:]+|\bup\b(?=[{\s])")
_ROW = re.compile(r"^\| `((?:warmroute|process)_\w+)` \| (\w+) \|", re.MULTILINE)


def metrics_in(expression: str) -> set[str]:
    """Names of the metrics that an expression reads."""
    return set(_NAME.findall(re.sub(r'"[^"]*"', '""', expression)))


def known_metrics() -> set[str]:
    """Every name under which a documented metric has series, and those of engines and of Prometheus."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    names = set()
    for name, kind in _ROW.findall(page):
        names |= {f"{name}_{part}" for part in ("bucket", "sum", "count")} if kind == "histogram" else {name}
    return names | OF_ENGINES | OF_PROMETHEUS | OF_RULES
