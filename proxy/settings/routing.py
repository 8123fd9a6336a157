"""Settings of what decides: policy, offload, classes."""

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
    """Whether heavy prefills run elsewhere, and how long each leg may take."""

    planner: str = Field(default="never", description="registered offload planner")
    params: dict[str, Any] = Field(default_factory=dict, description="parameters of that planner")
    prefill_timeout_s: Seconds = Field(default=120.0, description="bound on the P leg")
    first_token_timeout_s: Seconds = Field(
        default=60.0, description="bound on the D leg's first token after a hand-off"
    )
    token_timeout_s: Seconds = Field(
        default=0.25, description="further time per token allowed, for answers that are not streamed"
    )
    abandoned_s: Seconds = Field(
        default=120.0,
        description="how long a pull that was given up stays open: closing one that D still has queued ends "
        "vLLM 0.18.1's engine core",
    )
    query_timeout_s: Seconds = Field(default=5.0, description="bound on one bootstrap /query")
    watch_interval_s: Seconds = Field(
        default=2.0, description="while D pulls, how often P is asked whether it is still the same engine"
    )
    hold_s: Seconds = Field(
        default=480.0,
        description="how long an engine keeps KV nobody pulls (its VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT)",
    )
    leak_share: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.1,
        description="share of D's KV pool that abandoned pulls may keep occupied before the instance is recycled",
    )

    @model_validator(mode="after")
    def _exists(self) -> OffloadSettings:
        make_planner(self.planner, self.params)
        return self


class ClassSettings(Section):
    """Request classes by new tokens: WARM < medium_tokens <= MEDIUM < heavy_tokens <= HEAVY."""

    medium_tokens: int = Field(default=5_000, description="from here on a request is MEDIUM")
    heavy_tokens: int = Field(default=20_000, description="from here on a request is HEAVY")

    @model_validator(mode="after")
    def _ordered(self) -> ClassSettings:
        self.thresholds()
        return self

    def thresholds(self) -> ClassThresholds:
        """The same as the policies take it."""
        return ClassThresholds(self.medium_tokens, self.heavy_tokens)
