"""The engine's counters under vLLM's metric names."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from sim.core.engine import Engine
from sim.server.settings import ServerSettings

_TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_LABELS = ["model_name", "engine"]


class EngineMetrics:
    """GET /metrics of one engine. Times are engine seconds."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(engine, settings))
        ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token, in engine seconds.",
            _LABELS,
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._ttft = ttft.labels(settings.model, "0")

    def first_token(self, seconds: float) -> None:
        """Record one time to first token."""
        self._ttft.observe(seconds)

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's state on scrape, so that steps spend no time on metrics."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._labels = [settings.model, "0"]
        config = settings.config
        self._cache_config = {
            "block_size": str(config.block_tokens),
            "num_gpu_blocks": str(config.num_blocks),
            "enable_prefix_caching": "True",
            "cache_dtype": "auto",
            "engine": "0",
        }

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        counters = engine.counters
        pool = GaugeMetricFamily("vllm:cache_config_info", "KV cache configuration.", labels=list(self._cache_config))
        pool.add_metric(list(self._cache_config.values()), 1)
        yield pool
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", len(engine.scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting.", engine.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0..1.", engine.kv_usage)
        for name, text, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", counters.prefix_hits),
            (
                "external_prefix_cache_hits",
                "Prompt tokens whose KV came from another engine.",
                counters.external_tokens,
            ),
            ("prompt_tokens", "Prompt tokens of requests that got their first token.", counters.prompt_tokens),
            ("generation_tokens", "Generated tokens.", counters.generation_tokens),
            ("num_preemptions", "Preemptions.", counters.preemptions),
            ("mooncake_num_kv_expired_reqs", "Held KV that no engine pulled in time.", engine.holds.expired),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric([*self._labels, reason], counters.finished.get(reason, 0))
        yield success

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family
