"""Settings of the meters and of the conditions that they raise."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from proxy.settings.section import Seconds, Section


class MeterSettings(Section):
    """Meters of hits, predictions and engines, and the bounds of their conditions."""

    enabled: bool = Field(
        default=True, description="measure every request; without it the conditions below are never raised"
    )
    window_s: Seconds = Field(default=300.0, description="sliding window of rates and errors")
    interval_s: Seconds = Field(default=1.0, description="interval between two examinations of the conditions")
    raise_s: float = Field(
        default=2.0, ge=0, description="time for which a fault must last before its condition is raised"
    )
    clear_s: float = Field(
        default=10.0, ge=0, description="time without the fault after which the condition is ok again"
    )
    min_requests: int = Field(
        default=20, ge=1, description="fewest requests of an instance in the window that a condition is based on"
    )
    prediction_error: float = Field(
        default=0.2, gt=0, le=1, description="share of the prompt tokens predicted wrongly that raises prediction_drift"
    )
    transfer_error: float = Field(
        default=2.0,
        gt=0,
        description="error of predicted hand-off times, relative to the shorter ones, that raises transfer_drift",
    )
    ledger_requests: int = Field(
        default=8, ge=1, description="difference between ledger and engine, in requests, that raises ledger_drift"
    )
    ledger_share: float = Field(
        default=0.25, ge=0, le=1, description="the same as a share of the larger of both; the larger bound counts"
    )
    events_silent_s: Seconds = Field(
        default=2.0, description="time without KV events, although prompts are computed, that raises kv_events"
    )
    equal_hash_seeds: Literal["auto", "always", "never"] = Field(
        default="auto", description="engines must hash blocks alike; auto: once two of them have done so"
    )
    ceiling_blocks: int = Field(
        default=2_000_000, ge=1_000, description="blocks of the infinite cache behind the ceiling, 8 bytes each"
    )
