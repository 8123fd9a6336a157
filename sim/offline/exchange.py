"""One request in flight: its decision, its current leg and instance, and its measurements so far."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from policies.admission.base import AdmissionReason
from policies.ledger import Lease
from policies.session import LegTime
from policies.state import Commitment
from policies.types import Decision, RequestView
from replayer.replay.plan import Step
from sim.offline.sessions import LiveSession


class SimulatedLeg(IntEnum):
    """The leg of a request that is in flight."""

    WHOLE = 0
    """The whole request, co-located."""
    PREFILL = 1
    """The prefill leg on P, one token."""
    DECODE = 2
    """The decode leg on D, which pulls the KV from P."""


class SimulatedExchange:
    """State of one request from the decision to the last token. All times are engine seconds."""

    __slots__ = (
        "actual_cached_tokens",
        "admission",
        "attempts",
        "commitment",
        "completion_tokens",
        "decision",
        "due_s",
        "error",
        "first_token_s",
        "held_s",
        "leg",
        "leg_sent_s",
        "legs",
        "offload_reason",
        "predicted_cached_tokens",
        "prefill_instance",
        "replica",
        "request",
        "sent_s",
        "serial",
        "session",
        "stages_s",
        "step",
    )

    def __init__(
        self,
        session: LiveSession,
        step: Step,
        request: RequestView,
        decision: Decision,
        commitment: Commitment,
        due_s: float,
        sent_s: float,
        replica: int = 0,
    ) -> None:
        self.session = session
        self.step = step
        self.request = request
        self.decision = decision
        self.commitment = commitment
        self.due_s = due_s
        self.sent_s = sent_s
        self.replica = replica
        """Number of the replica that decided."""
        self.leg = SimulatedLeg.WHOLE
        self.leg_sent_s = sent_s
        self.serial = 0
        """Increases with every leg, so that a timer of an earlier leg is recognised as stale."""
        self.first_token_s: float | None = None
        self.completion_tokens = 0
        self.actual_cached_tokens: int | None = None
        """Prompt tokens that the engine that computed the prompt had cached."""
        self.predicted_cached_tokens = decision.cached_tokens
        self.prefill_instance: str | None = None
        self.offload_reason: str = decision.offload.reason.value
        self.error: str | None = None
        self.admission = AdmissionReason.NEVER_HOLDS
        self.held_s = 0.0
        self.attempts: list[dict[str, Any]] | None = None
        """Hand-offs that failed, as the proxy's rows name them."""
        self.legs: dict[str, LegTime] = {}
        self.stages_s: dict[str, float] = {}

    @property
    def leg_id(self) -> str:
        """Request id of the current leg at its engine."""
        return self.request.request_id + _SUFFIXES[self.leg]

    @property
    def leg_instance(self) -> str:
        """Engine of the current leg."""
        if self.leg is SimulatedLeg.PREFILL:
            assert self.decision.prefill_on is not None
            return self.decision.prefill_on
        return self.decision.decode_on


def leg_priority(lease: Lease) -> int | None:
    """``priority`` of a leg: its due time in milliseconds, as the proxy sends it; None without an order."""
    return None if lease.due_s is None else round(lease.due_s * 1e3)


_SUFFIXES = ("", "/prefill", "/decode")
