"""The breakdown row: one request's decision, outcome and times, written by the proxy and by the simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from policies.admission.base import AdmissionReason
from policies.types import CachePrediction, Decision


class RequestOutcome(StrEnum):
    """Outcome of a request."""

    OK = "ok"
    REJECTED = "rejected"
    """Rejected by the proxy: bad input."""
    ENGINE_REFUSED = "engine_refused"
    """The engine answered 4xx or 501, which was passed on."""
    CLIENT_GONE = "client_gone"
    NO_INSTANCE = "no_instance"
    QUEUE_FULL = "queue_full"
    """All instances were at their limits and the queue was full."""
    QUEUE_TIMEOUT = "queue_timeout"
    """Waited in the queue for the maximum time."""
    WAIT_TOO_LONG = "wait_too_long"
    """Admission would have held it, and its expected wait was above ``admission.reject_above_s``."""
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    POISON_REQUEST = "poison_request"
    """Two engines died while serving it, so it was not sent to a third."""
    STREAM_BROKEN = "stream_broken"
    """The engine's stream broke after its first byte had been sent to the client, or ended with an engine's error."""
    SHUTDOWN = "shutdown"
    """The proxy shut down before the request ended."""
    INTERNAL_ERROR = "internal_error"


FAILED_OUTCOMES = frozenset(
    {
        RequestOutcome.NO_INSTANCE,
        RequestOutcome.QUEUE_FULL,
        RequestOutcome.QUEUE_TIMEOUT,
        RequestOutcome.UPSTREAM_ERROR,
        RequestOutcome.UPSTREAM_TIMEOUT,
        RequestOutcome.POISON_REQUEST,
        RequestOutcome.STREAM_BROKEN,
        RequestOutcome.INTERNAL_ERROR,
    }
)
"""Those that the alert WarmrouteErrorShare, ``top`` and the dashboard count as failed: 5xx and broken streams, without
what a shutdown cut."""


class TraceNotes(Protocol):
    """Receiver of what happens to a traced request while it is served."""

    @property
    def recorded_id(self) -> str | None:
        """Trace id in hexadecimal digits; None: the trace is not recorded."""
        ...

    def named(self, model: str | None) -> None:
        """Note its model."""
        ...

    def routed(self, decision: Decision, took_s: float) -> None:
        """Note a routing decision that has just been taken, within ``took_s`` seconds."""
        ...

    def leg(self, kind: str, instance: str, url: str, headers: dict[str, str]) -> None:
        """Note that it is being sent to an engine with these headers, and add those of the trace to them."""
        ...

    def leg_ended(self, error: str | None = None) -> None:
        """Note the end of the last leg, with the reason if it failed."""
        ...

    def recorded(self, scores: bytes) -> None:
        """Note the scores of the last decision, as the JSON of the record."""
        ...


@dataclass(slots=True, eq=False)
class Row:
    """Record of one request, filled in while it is served or simulated. The one owner of the row's keys.

    Live, ``arrived_unix_s`` is wall-clock time; simulated, engine seconds from the start of the run.
    """

    request_id: str
    endpoint: str
    arrived_unix_s: float
    session_id: str | None = None
    session_source: str | None = None
    """Header or body field that named the session, or ``prefix``: it was recognised by its prompt."""
    parent_session_id: str | None = None
    normalized: tuple[str, ...] = ()
    """Rules that made parts of the prompt constant."""
    cache_killer: str | None = None
    """Kind of change since the session's turn before that ends the cached prefix, if one was found."""
    stream: bool = False
    status: int = 0
    outcome: RequestOutcome = RequestOutcome.INTERNAL_ERROR
    planner: str = ""
    decision: Decision | None = None
    passed_to: str | None = None
    """Instance to which it was passed on without a decision, the last one after failures; None: it was not."""
    offload_reason: str | None = None
    prefill_instance: str | None = None
    prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    actual_cached_tokens: int | None = None
    completion_tokens: int | None = None
    events: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)
    resumed: int = 0
    """Number of engines that continued the stream after another one broke it off."""
    resume: str | None = None
    """Result of resuming a broken stream (`proxy.resume.plan.ResumeResult`); None if resuming was not attempted."""
    legs: dict[str, dict[str, float]] = field(default_factory=dict)
    """``prefill``, ``transfer`` or ``first_token`` -> predicted and actual seconds."""
    error: str | None = None
    priority: int | None = None
    """Priority sent with the leg that was to compute the prompt, live; None: none."""
    admission: AdmissionReason | None = None
    """Reason for which it was sent when it was; None: it was not."""
    held_s: float = 0.0
    """Seconds for which admission held it."""
    held_because: str | None = None
    """Reason for holding it and its place in line, as a sentence; None: it was not held."""
    tenant: str | None = None
    """Name of its tenant; None: it has none."""
    trace: TraceNotes | None = None
    """Notes for its trace; None: it is not traced. Of these the record has the trace id only."""

    def note_leg(self, leg: str, predicted_s: float, actual_s: float) -> None:
        """Record predicted and actual seconds of a leg."""
        self.legs[leg] = {"predicted_s": round(predicted_s, 4), "actual_s": round(actual_s, 4)}

    def note_failed(self, instance: str, error: str, **more: str) -> None:
        """Record a failed attempt; it is also the end of its leg in the trace."""
        self.attempts.append({"instance": instance, "error": error, **more})
        if self.trace is not None:
            self.trace.leg_ended(error)

    @property
    def unserved(self) -> bool:
        """True if the proxy rejected the request, or its client left, before the request was understood."""
        return self.outcome is RequestOutcome.REJECTED or (
            self.outcome is RequestOutcome.CLIENT_GONE and self.prompt_tokens is None
        )

    @property
    def instance(self) -> str | None:
        """Instance that it ran on, or was last sent to; None: it was sent to none."""
        return self.decision.decode_on if self.decision is not None else self.passed_to

    @property
    def prediction(self) -> CachePrediction | None:
        """Both indexes' predictions for the instance that computed the prompt (P after a hand-off)."""
        if self.decision is None:
            return None
        return self.decision.prefill_prediction if self.prefill_instance else self.decision.decode_prediction

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict for msgspec; enumerations are left as they are."""
        decision, prediction = self.decision, self.prediction
        return {
            "request_id": self.request_id,
            "trace_id": self.trace.recorded_id if self.trace is not None else None,
            "session_id": self.session_id,
            "tenant": self.tenant,
            "session_source": self.session_source,
            "parent_session_id": self.parent_session_id,
            "normalized": self.normalized,
            "cache_killer": self.cache_killer,
            "arrived_unix_s": self.arrived_unix_s,
            "endpoint": self.endpoint,
            "stream": self.stream,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "policy": decision.policy if decision else None,
            "planner": self.planner,
            "class": decision.request_class if decision else None,
            "instance": self.instance,
            "prefill_instance": self.prefill_instance,
            "priority": self.priority,
            "admission": self.admission,
            "held_s": round(self.held_s, 3),
            "held_because": self.held_because,
            "reason": decision.reason if decision else None,
            "offload_reason": self.offload_reason,
            "prompt_tokens": self.prompt_tokens,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "actual_cached_tokens": self.actual_cached_tokens,
            "index_source": prediction.source if prediction else None,
            "predicted_by_shadow_tokens": prediction.shadow_tokens if prediction else None,
            "predicted_by_exact_tokens": prediction.exact_tokens if prediction else None,
            "completion_tokens": self.completion_tokens,
            "events": self.events,
            "scores": [
                {"instance": instance, "score": score, "inputs": inputs, "skipped": skipped, "cached_tokens": cached}
                for instance, score, inputs, skipped, cached in (decision.scores if decision else ())
            ],
            "offload_inputs": decision.offload.inputs if decision else {},
            "attempts": self.attempts,
            "resumed": self.resumed,
            "resume": self.resume,
            "legs": self.legs,
            "stages_ms": {name: round(value, 3) for name, value in self.stages_ms.items()},
        }
