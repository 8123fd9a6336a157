"""Input and answer of an admission rule."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar, NamedTuple, Protocol

from policies.costs.formulas import PrefillModel
from policies.types import RequestView

DEFAULT_RULE = "working_set"
"""Rule of a proxy or a simulation for which none is chosen."""
MAX_HOLD_S = 480.0
"""Default bound on holding, seconds: two minutes less than the ten that clients' libraries wait by default."""


NO_INSTANCES: frozenset[str] = frozenset()


class AdmissionReason(StrEnum):
    """Reason for sending or holding a request: closed set used in rows, headers and metric labels."""

    NEVER_HOLDS = "never_holds"
    RESIDENT = "resident"
    """The session is in flight, or was so short a time ago, and its context is still in a pool."""
    IDLE_FLEET = "idle_fleet"
    """Few requests wait for a first token, and an instance has none in flight: it would idle."""
    POOLS_UNKNOWN = "pools_unknown"
    """No engine has reported the size of its KV pool."""
    ROOM = "room"
    BELOW_CAP = "below_cap"
    HELD_LONG_ENOUGH = "held_long_enough"
    """The bound on holding was reached."""
    LINE_FULL = "line_full"
    """As many requests as permitted are held."""
    RULE_FAILED = "rule_failed"
    """The rule raised an error or returned an invalid answer."""
    AT_CAP = "at_cap"
    WORKING_SET = "working_set"
    """Contexts in use and this one exceed the pools."""


class SessionView(NamedTuple):
    """The request's session, without this request. A request without a session is a session of its own."""

    in_flight: int = 0
    """Its requests in flight."""
    context_tokens: int = 0
    """Longest prompt of its last requests, in tokens; 0: a new session."""
    idle_s: float = 0.0
    """Seconds since its last request ended; 0 while one is in flight."""
    turns: int = 0
    """Its requests so far."""
    waited_s: float = 0.0
    """Seconds for which this request has been held."""
    kept: bool = False
    """No request of it is in flight, it is not yet unlikely to return, and its context was not found evicted."""

    @property
    def resident(self) -> bool:
        """In flight or kept."""
        return self.in_flight > 0 or self.kept


class InstanceUse(NamedTuple):
    """Contexts on one instance that can be chosen. A session is where its last request was sent. Tokens."""

    instance: str
    pool_tokens: int
    """0: unknown."""
    active_sessions: int = 0
    """Sessions with a request in flight."""
    active_tokens: int = 0
    kept_sessions: int = 0
    """Sessions without a request in flight that may return, less those whose context was found evicted."""
    kept_tokens: int = 0
    prefilling: int = 0
    """Requests in flight without a first token yet."""


class AdmissionView(NamedTuple):
    """The fleet as admission sees it at one instant. Tokens are contexts of sessions, each counted once."""

    pool_tokens: int = 0
    """KV pools of all instances that can be chosen; 0: unknown."""
    active_sessions: int = 0
    """Sessions with a request in flight."""
    active_tokens: int = 0
    kept_sessions: int = 0
    """Sessions without a request in flight that may return, less those whose context was found evicted."""
    kept_tokens: int = 0
    lost_share: float = 0.0
    """Share of the fleet's time that went into recomputing evicted prefixes, lately."""
    return_share: float = 1.0
    """Share of turns that another one of the same session follows while it is kept, lately."""
    instances: int = 0
    """Instances that can be chosen."""
    prefilling: int = 0
    """Requests in flight without a first token yet."""
    held: int = 0
    """Requests held now, this one not counted."""
    expected_wait_s: float = 0.0
    """Seconds in which the held requests before this one and itself would be admitted at the last minute's flow of
    tokens; 0: unknown.
    """
    longest_hold_s: float = 0.0
    """The bound on holding, seconds."""
    by_instance: tuple[InstanceUse, ...] = ()
    """The same for each instance that can be chosen."""
    return_gap_s: float = 0.0
    """Mean time after which sessions that return have done so, seconds."""
    prefill: PrefillModel | None = None
    """Learned times of prefills, which price what is evicted; None: not known."""


class Admit(NamedTuple):
    """The request is sent now."""

    reason: AdmissionReason
    instances: frozenset[str] = NO_INSTANCES
    """Instances that have room for it, among which the routing policy chooses; empty: it chooses among all."""


class Hold(NamedTuple):
    """The request waits."""

    reason: AdmissionReason
    needed_tokens: int = 0
    """Contexts in use and its own."""
    pool_tokens: int = 0
    expected_wait_s: float = 0.0
    """Filled in by the gate; 0: unknown."""
    behind: int = 0
    """Held requests that would be sent before it; filled in by the gate."""
    tenant: str = ""
    """Name of its tenant; filled in by the gate."""
    behind_in_tenant: int = 0
    """Those of ``behind`` that are of its tenant; filled in by the gate."""
    own_tokens: int = 0
    """Its own context, where the rule looks for an instance with room for it; 0: it does not."""
    free_tokens: int = 0
    """Most room that an instance has."""


class AdmissionRule(Protocol):
    """Decides whether a request is sent now. A pure function of its arguments."""

    name: ClassVar[str]

    @property
    def keep_s(self) -> float:
        """Longest time for which a session counts as kept after its last request, seconds.

        What is learned of the gaps between turns shortens it (`policies.admission.return_gaps`).
        """
        ...

    def admit(self, request: RequestView, session: SessionView, fleet: AdmissionView) -> Admit | Hold:
        """Send or hold."""
        ...


def checked_answer(rule: str, answer: Admit | Hold) -> Admit | Hold:
    """The answer; raises ValueError for one that is none of the two, or whose fields are of other types."""
    if type(answer) is Admit and type(answer.reason) is AdmissionReason and type(answer.instances) is frozenset:
        return answer  # without the cost of the checks below, for most requests
    if not isinstance(answer, Admit | Hold) or type(answer.reason) is not AdmissionReason:
        raise ValueError(f"admission rule {rule!r} answered {answer!r}: neither Admit nor Hold with a reason")
    if isinstance(answer, Hold) and any(type(tokens) is not int for tokens in _tokens_in(answer)):
        raise ValueError(f"admission rule {rule!r} answered {answer!r}, whose tokens are no integers")
    if isinstance(answer, Admit) and type(answer.instances) is not frozenset:
        raise ValueError(f"admission rule {rule!r} answered {answer!r}, whose instances are no frozenset")
    return answer


def _tokens_in(hold: Hold) -> tuple[int, ...]:
    return hold.needed_tokens, hold.pool_tokens, hold.own_tokens, hold.free_tokens
