"""One request under way: what was decided, which leg runs where, and what has been seen of it so far."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from policies.session import LegTime
from policies.state import Commitment
from policies.types import Decision, RequestView
from replayer.replay.plan import Step
from sim.offline.sessions import Session


class Leg(IntEnum):
    """Which leg of a request is under way."""

    WHOLE = 0
    """The request as it is, co-located."""
    PREFILL = 1
    """On P, one token."""
    DECODE = 2
    """On D, which pulls what P computed."""


class Exchange:
    """From the decision to the last token. All times are engine seconds."""

    __slots__ = (
        "actual_cached_tokens",
        "attempts",
        "commitment",
        "completion_tokens",
        "decision",
        "due_s",
        "error",
        "first_token_s",
        "leg",
        "leg_sent_s",
        "legs",
        "offload_reason",
        "predicted_cached_tokens",
        "prefill_instance",
        "request",
        "sent_s",
        "serial",
        "session",
        "stages_s",
        "step",
    )

    def __init__(
        self,
        session: Session,
        step: Step,
        request: RequestView,
        decision: Decision,
        commitment: Commitment,
        due_s: float,
        sent_s: float,
    ) -> None:
        self.session = session
        self.step = step
        self.request = request
        self.decision = decision
        self.commitment = commitment
        self.due_s = due_s
        self.sent_s = sent_s
        self.leg = Leg.WHOLE
        self.leg_sent_s = sent_s
        self.serial = 0
        """Goes up with every leg, so that a timer of an earlier one is known to be stale."""
        self.first_token_s: float | None = None
        self.completion_tokens = 0
        self.actual_cached_tokens: int | None = None
        """What the engine that computed the prompt had cached."""
        self.predicted_cached_tokens = decision.cached_tokens
        self.prefill_instance: str | None = None
        self.offload_reason: str = decision.offload.reason.value
        self.error: str | None = None
        self.attempts: list[dict[str, Any]] | None = None
        """Hand-offs that failed, as the proxy's rows name them."""
        self.legs: dict[str, LegTime] = {}
        self.stages_s: dict[str, float] = {}

    @property
    def leg_id(self) -> str:
        """The id under which the leg under way is at its engine."""
        return self.request.request_id + _SUFFIXES[self.leg]

    @property
    def leg_instance(self) -> str:
        """The engine that leg is at."""
        if self.leg is Leg.PREFILL:
            assert self.decision.prefill_on is not None
            return self.decision.prefill_on
        return self.decision.decode_on


_SUFFIXES = ("", "/prefill", "/decode")
