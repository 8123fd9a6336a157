"""How far the predictions of cached tokens were off, per index and instance."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from policies.types import IndexSource
from proxy.breakdown import Row


@dataclass(slots=True)
class SourceError:
    """One index's predictions for one instance against what the engine reported. Sums of tokens."""

    requests: int = 0
    wrong: int = 0
    """Requests whose prediction was not exactly right."""
    absolute_error_tokens: int = 0
    over_tokens: int = 0
    """Predicted, but not there."""
    actual_cached_tokens: int = 0

    def add(self, predicted_tokens: int, actual_tokens: int) -> None:
        """Take one request in."""
        error = predicted_tokens - actual_tokens
        self.requests += 1
        self.wrong += error != 0
        self.absolute_error_tokens += abs(error)
        self.over_tokens += max(error, 0)
        self.actual_cached_tokens += actual_tokens


class PredictionErrors:
    """Both indexes' errors, whichever was used; where both could be asked, over the same requests too."""

    def __init__(self) -> None:
        self.by_source: dict[tuple[str, IndexSource], SourceError] = {}
        self._side_by_side = {source: SourceError() for source in IndexSource}
        self._used = dict.fromkeys(IndexSource, 0)

    def record(self, row: Row) -> None:
        """Take a finished request in, if its engine reported cached tokens."""
        prediction, actual = row.prediction, row.actual_cached_tokens
        if prediction is None or actual is None or row.decision is None:
            return
        instance = row.prefill_instance or row.decision.decode_on
        self._used[prediction.source] += 1
        self._of(instance, IndexSource.SHADOW).add(prediction.shadow_tokens, actual)
        if prediction.exact_tokens is not None:
            self._of(instance, IndexSource.EXACT).add(prediction.exact_tokens, actual)
            self._side_by_side[IndexSource.SHADOW].add(prediction.shadow_tokens, actual)
            self._side_by_side[IndexSource.EXACT].add(prediction.exact_tokens, actual)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready."""
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
        return self.by_source.setdefault((instance, source), SourceError())
