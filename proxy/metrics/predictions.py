"""Errors of the predicted cached tokens, per index and instance."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.types import CachePrediction, IndexSource


@dataclass(slots=True)
class SourceError:
    """Prediction errors of one index for one instance against the engine's reports. Sums of tokens."""

    requests: int = 0
    wrong: int = 0
    """Requests whose prediction was not exact."""
    absolute_error_tokens: int = 0
    over_tokens: int = 0
    """Predicted as cached, but not cached."""
    actual_cached_tokens: int = 0

    def add(self, predicted_tokens: int, actual_tokens: int) -> None:
        """Add one request."""
        error = predicted_tokens - actual_tokens
        self.requests += 1
        self.actual_cached_tokens += actual_tokens
        if error:
            self.wrong += 1
            self.absolute_error_tokens += abs(error)
            self.over_tokens += max(error, 0)


class PredictionErrors:
    """Prediction errors of both indexes, and of both over the same requests where both could answer."""

    def __init__(self) -> None:
        self.by_source: dict[tuple[str, IndexSource], SourceError] = {}
        self._side_by_side = {source: SourceError() for source in IndexSource}
        self._used = dict.fromkeys(IndexSource, 0)

    def record(self, instance: str, prediction: CachePrediction, actual_tokens: int) -> None:
        """Add the cached tokens that the engine which computed a prompt reported."""
        self._used[prediction.source] += 1
        shadow, exact = prediction.shadow_tokens, prediction.exact_tokens
        self._of(instance, IndexSource.SHADOW).add(shadow, actual_tokens)
        if exact is not None:
            self._of(instance, IndexSource.EXACT).add(exact, actual_tokens)
            self._side_by_side[IndexSource.SHADOW].add(shadow, actual_tokens)
            self._side_by_side[IndexSource.EXACT].add(exact, actual_tokens)

    def forget(self, instance: str) -> None:
        """Remove an instance that has left the fleet."""
        self.by_source = {key: error for key, error in self.by_source.items() if key[0] != instance}

    def as_dict(self) -> dict[str, object]:
        """JSON-ready totals."""
        return {
            "used": {source.value: count for source, count in self._used.items()},
            "side_by_side": {source.value: asdict(error) for source, error in self._side_by_side.items()},
            "instances": {
                instance: {
                    source.value: asdict(error) for (name, source), error in self.by_source.items() if name == instance
                }
                for instance in sorted({name for name, _ in self.by_source})
            },
        }

    def _of(self, instance: str, source: IndexSource) -> SourceError:
        known = self.by_source.get((instance, source))
        if known is None:
            known = self.by_source[instance, source] = SourceError()
        return known
