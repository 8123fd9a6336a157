"""Request classes by new tokens: one definition for routing, offload, metrics and reports."""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import RequestClass


@dataclass(frozen=True, slots=True)
class ClassThresholds:
    """WARM < ``medium_tokens`` <= MEDIUM < ``heavy_tokens`` <= HEAVY, in new tokens.

    Source: the agentic-kvc reports, WARM below 5k, MEDIUM 5 to 20k, HEAVY above 20k. They leave both edges open; here a
    threshold belongs to the class above it, so that both edges follow one rule. At exactly 20,000 new tokens their
    prototype does not offload and `threshold` does.
    """

    medium_tokens: int = 5_000
    heavy_tokens: int = 20_000

    def __post_init__(self) -> None:
        if not 0 < self.medium_tokens < self.heavy_tokens:
            raise ValueError(
                f"thresholds must satisfy 0 < medium_tokens < heavy_tokens, "
                f"got medium_tokens={self.medium_tokens}, heavy_tokens={self.heavy_tokens}"
            )

    def classify(self, new_tokens: int) -> RequestClass:
        """Request class for ``new_tokens`` tokens to compute."""
        if new_tokens < self.medium_tokens:
            return RequestClass.WARM
        return RequestClass.MEDIUM if new_tokens < self.heavy_tokens else RequestClass.HEAVY
