"""One reading of an engine's ``/metrics``: the figures of the engine, or of each of its data-parallel ranks.

vLLM labels its metrics with ``engine``, the rank; behind one of several API servers of a deployment, the ranks of this
server. ``num_gpu_blocks`` of ``vllm:cache_config_info`` is the sum over them, on every rank's line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from proxy.meters.engine import COUNTERS

_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_USAGE, _CONFIG = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"
_STARTED = "process_start_time_seconds"
_GENERATED = "vllm:generation_tokens"
_WANTED = (_RUNNING, _WAITING, _USAGE, _CONFIG, _STARTED, _GENERATED, *COUNTERS)


class EngineFigures(NamedTuple):
    """Figures of one engine or rank; None: not reported."""

    started_unix_s: float | None
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """Share of the KV pool, 0 to 1."""
    block_tokens: int | None = None
    blocks: int | None = None
    """Size of the KV pool."""
    caching: str | None = None
    """``enable_prefix_caching`` as it is written."""
    counters: Mapping[str, float] = MappingProxyType({})
    """By the names of `COUNTERS`."""
    generated_tokens: float | None = None

    @property
    def of_steps(self) -> tuple[object, ...]:
        """All that changes with the engine's steps; empty where it does not report its output."""
        if self.generated_tokens is None:
            return ()
        return self.running, self.waiting, self.kv_usage, self.generated_tokens, *self.counters.values()


class MetricsReading:
    """A reading, parsed once for all ranks.

    Raises:
        ValueError: not Prometheus' text format.
    """

    def __init__(self, text: str) -> None:
        # An engine exposes hundreds of lines; only these few are parsed on the event loop.
        lines = [line for line in text.splitlines() if line.startswith(_WANTED)]
        families = text_string_to_metric_families("\n".join(lines) + "\n")
        self._samples = [sample for family in families for sample in family.samples]
        labels = {sample.labels.get("engine", "") for sample in self._samples}
        self._labels = sorted((label for label in labels if label.isdigit()), key=int)

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks; 0: not known."""
        return len(self._labels)

    def figures(self, rank: int | None = None) -> EngineFigures:
        """Figures of one rank, none but the start where the engine has no such rank; None: of all of them together."""
        started = _values(self._samples, _STARTED)
        figures = EngineFigures(started[-1] if started else None)
        if rank is None:
            return _complete(figures, self._samples, 1)
        if rank >= self.ranks:
            return figures
        label = self._labels[rank]
        own = [sample for sample in self._samples if sample.labels.get("engine") == label]
        return _complete(figures, own, self.ranks)


def _complete(figures: EngineFigures, samples: Iterable[Sample], ranks: int) -> EngineFigures:
    running, waiting = _values(samples, _RUNNING), _values(samples, _WAITING)
    usage, generated = _values(samples, _USAGE), _values(samples, f"{_GENERATED}_total")
    config = next((sample.labels for sample in samples if sample.name == _CONFIG), {})
    size, blocks = config.get("block_size", ""), config.get("num_gpu_blocks", "")
    known = size.isdigit() and blocks.isdigit()
    counters = {name: _values(samples, f"{key}_total") for key, name in COUNTERS.items()}
    return figures._replace(
        running=int(sum(running)) if running else None,
        waiting=int(sum(waiting)) if waiting else None,
        kv_usage=sum(usage) / len(usage) if usage else None,
        block_tokens=int(size) if known else None,
        blocks=int(blocks) // ranks if known else None,
        caching=config.get("enable_prefix_caching"),
        counters={name: sum(values) for name, values in counters.items() if values},
        generated_tokens=sum(generated) if generated else None,
    )


def _values(samples: Iterable[Sample], name: str) -> list[float]:
    return [sample.value for sample in samples if sample.name == name]
