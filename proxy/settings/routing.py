"""Settings of the decision: policy, offload, classes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from policies.classes import ClassThresholds
from policies.registry import make_planner, make_routing
from proxy.settings.section import Seconds, Section


class PolicySettings(Section):
    """Routing policy by registered name."""

    name: str = Field(default="warm", description="registered routing policy")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that policy")

    @model_validator(mode="after")
    def _exists(self) -> PolicySettings:
        make_routing(self.name, self.params)
        return self


class OffloadSettings(Section):
    """Offloading of heavy prefills, and the bounds on each leg."""

    planner: str = Field(default="never", description="registered offload planner")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that planner")
    prefill_timeout_s: Seconds = Field(default=120.0, description="bound on the P leg")
    first_token_timeout_s: Seconds = Field(
        default=60.0, description="bound on the D leg's first token after a hand-off"
    )
    token_timeout_s: Seconds = Field(
        default=0.25, description="additional time per permitted output token, for answers that are not streamed"
    )
    abandoned_s: Seconds = Field(
        default=120.0,
        description="time an abandoned pull stays open: closing one that D still has queued crashes "
        "vLLM 0.18.1's engine core",
    )
    query_timeout_s: Seconds = Field(default=5.0, description="bound on one bootstrap /query")
    watch_interval_s: Seconds = Field(default=2.0, description="interval of checking P's identity while D pulls")
    hold_s: Seconds = Field(
        default=480.0,
        description="time an engine keeps KV that is not pulled (its VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)",
    )
    leak_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1,
        description="share of D's KV pool that abandoned pulls may occupy before the instance is recycled",
    )

    @model_validator(mode="after")
    def _exists(self) -> OffloadSettings:
        make_planner(self.planner, self.params)
        return self


class ClassSettings(Section):
    """Request classes by new tokens: WARM < medium_tokens <= MEDIUM < heavy_tokens <= HEAVY."""

    medium_tokens: int = Field(default=5_000, description="new tokens from which a request is MEDIUM")
    heavy_tokens: int = Field(default=20_000, description="new tokens from which a request is HEAVY")

    @model_validator(mode="after")
    def _ordered(self) -> ClassSettings:
        self.thresholds()
        return self

    def thresholds(self) -> ClassThresholds:
        """The thresholds as the policies' type."""
        return ClassThresholds(self.medium_tokens, self.heavy_tokens)
