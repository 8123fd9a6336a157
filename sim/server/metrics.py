"""The engine's counters under vLLM's metric names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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


_GAUGES: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda engine: len(engine.scheduler.running)),
    ("num_requests_waiting", "Requests waiting.", lambda engine: engine.waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0..1.", lambda engine: engine.kv_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Engine], float]], ...] = (
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda engine: engine.counters.prefix_queries,
    ),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda engine: engine.counters.prefix_hits),
    (
        "external_prefix_cache_hits",
        "Prompt tokens whose KV came from another engine.",
        lambda engine: engine.counters.external_tokens,
    ),
    (
        "prompt_tokens",
        "Prompt tokens of requests that got their first token.",
        lambda engine: engine.counters.prompt_tokens,
    ),
    ("generation_tokens", "Generated tokens.", lambda engine: engine.counters.generation_tokens),
    ("num_preemptions", "Preemptions.", lambda engine: engine.counters.preemptions),
    (
        "mooncake_num_kv_expired_reqs",
        "Held KV that no engine pulled in time.",
        lambda engine: engine.holds.expired,
    ),
)


class EngineMetrics:
    """GET /metrics of one process, its data-parallel ranks by the label ``engine``. Times are engine seconds."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, engines: Sequence[Engine], settings: ServerSettings) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(_EngineCollector(engines, settings))
        ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time to first token, in engine seconds.",
            _LABELS,
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._ttft = [ttft.labels(settings.model, str(rank)) for rank in range(len(engines))]

    def first_token(self, seconds: float, rank: int) -> None:
        """Record one time to first token."""
        self._ttft[rank].observe(seconds)

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """Reads the engine's state on scrape, so that steps spend no time on metrics."""

    def __init__(self, engines: Sequence[Engine], settings: ServerSettings) -> None:
        self._engines = engines
        self._model = settings.model
        config = settings.config
        self._cache_config = {
            "block_size": str(config.block_tokens),
            # The sum over the ranks, on each rank's line, as vLLM writes it.
            "num_gpu_blocks": str(config.num_blocks * len(engines)),
            "enable_prefix_caching": "True",
            "cache_dtype": "auto",
        }

    def collect(self) -> Iterator[Metric]:
        pool = GaugeMetricFamily(
            "vllm:cache_config_info", "KV cache configuration.", labels=[*self._cache_config, "engine"]
        )
        for rank in range(len(self._engines)):
            pool.add_metric([*self._cache_config.values(), str(rank)], 1)
        yield pool
        for name, text, value in _GAUGES:
            yield self._filled(GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS), value)
        for name, text, value in _COUNTERS:
            yield self._filled(CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS), value)
        success = CounterMetricFamily(
            "vllm:request_success", "Finished requests by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for rank, engine in enumerate(self._engines):
            for reason in ("stop", "length", "abort", "error"):
                success.add_metric([self._model, str(rank), reason], engine.counters.finished.get(reason, 0))
        yield success

    def _filled(
        self, family: GaugeMetricFamily | CounterMetricFamily, value: Callable[[Engine], float]
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for rank, engine in enumerate(self._engines):
            family.add_metric([self._model, str(rank)], value(engine))
        return family
