"""Histograms of latency: per instance, per output token, and under OpenTelemetry's names for generative AI servers."""

from __future__ import annotations

from types import MappingProxyType

from prometheus_client import CollectorRegistry

from policies.row import RequestOutcome, Row
from policies.types import RequestClass
from proxy.metrics.tallies import Spread

# Few, because every instance has them.
_INSTANCE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
# The bounds that the semantic conventions for generative AI metrics recommend.
_DURATION_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_OUTPUT_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

_OPERATIONS = MappingProxyType({"/v1/completions": ("text_completion",)})
_CHAT = ("chat",)
"""``gen_ai.operation.name`` of every other generation endpoint."""


class LatencyHistograms:
    """LatencyHistograms of routed requests. Times to the first and per output token are those of complete streams."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._instance_first = Spread(
            registry,
            "warmroute_instance_first_byte_seconds",
            "Time from arrival to first byte of streams, by instance that answered",
            ["instance"],
            _INSTANCE_SECONDS,
        )
        self._instance_total = Spread(
            registry,
            "warmroute_instance_request_seconds",
            "Time from arrival to last byte, by instance that answered",
            ["instance"],
            _INSTANCE_SECONDS,
        )
        self._output_token = Spread(
            registry,
            "warmroute_output_token_seconds",
            "Time per output token after the first (TPOT), mean of each stream",
            ["request_class"],
            _OUTPUT_TOKEN_SECONDS,
        )
        operation = ["gen_ai_operation_name"]
        self._otel_first = Spread(
            registry,
            "gen_ai_server_time_to_first_token_seconds",
            "OpenTelemetry gen_ai.server.time_to_first_token: arrival to first byte of streams",
            operation,
            _FIRST_TOKEN_SECONDS,
        )
        self._otel_output_token = Spread(
            registry,
            "gen_ai_server_time_per_output_token_seconds",
            "OpenTelemetry gen_ai.server.time_per_output_token: after the first, mean of each stream",
            operation,
            _OUTPUT_TOKEN_SECONDS,
        )
        self._otel_total = Spread(
            registry,
            "gen_ai_server_request_duration_seconds",
            "OpenTelemetry gen_ai.server.request.duration; error_type is the outcome, empty if it is ok",
            [*operation, "error_type"],
            _DURATION_SECONDS,
        )

    def record(self, row: Row, instance: str, request_class: RequestClass) -> None:
        """Count one finished request that was routed to ``instance``."""
        stages = row.stages_ms
        total_ms = stages.get("total")
        if total_ms is None:
            return
        operation = _OPERATIONS.get(row.endpoint, _CHAT)
        if row.outcome is not RequestOutcome.OK:
            self._otel_total.observe((*operation, row.outcome), total_ms / 1e3)
            return
        of_instance = (instance,)
        self._instance_total.observe(of_instance, total_ms / 1e3)
        self._otel_total.observe((*operation, ""), total_ms / 1e3)
        first_ms = stages.get("first_byte")
        if first_ms is None or not row.stream:
            return
        self._instance_first.observe(of_instance, first_ms / 1e3)
        self._otel_first.observe(operation, first_ms / 1e3)
        tokens = row.completion_tokens
        if tokens is not None and tokens > 1:
            per_token_s = (total_ms - first_ms) / 1e3 / (tokens - 1)
            self._output_token.observe((request_class,), per_token_s)
            self._otel_output_token.observe(operation, per_token_s)

    def forget(self, instance: str) -> None:
        """Remove the series of an instance that left the fleet."""
        self._instance_first.forget("instance", instance)
        self._instance_total.forget("instance", instance)
