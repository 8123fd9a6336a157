"""Data types of a decision: inputs of policies and planners, and their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class RequestClass(StrEnum):
    """Class of a request by its new tokens (prompt - cached on the chosen instance)."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY = "HEAVY"


class Role(StrEnum):
    """KV role of an instance (vLLM's ``kv_role``; ``NONE`` runs without a connector)."""

    KV_BOTH = "kv_both"
    KV_PRODUCER = "kv_producer"
    KV_CONSUMER = "kv_consumer"
    NONE = "none"


class Connector(StrEnum):
    """vLLM's KV connector of an instance, which determines the hand-off parameters."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"


class Transport(StrEnum):
    """Transport of KV between instances."""

    TCP = "tcp"
    RDMA = "rdma"
    EFA = "efa"
    NVLINK = "nvlink"
    """Between GPUs of one host only."""


class IndexSource(StrEnum):
    """Index that predicts the cached tokens of an instance."""

    SHADOW = "shadow"
    """The router's own record of the requests it sent there."""
    EXACT = "exact"
    """The engine's reports in its KV events."""


class Reason(StrEnum):
    """Reason for the choice of D: closed set used in decisions, headers and metric labels."""

    ONLY_CANDIDATE = "only_candidate"
    NEXT_IN_TURN = "next_in_turn"
    DRAWN = "drawn"
    LEAST_LOADED = "least_loaded"
    LOWEST_SCORE = "lowest_score"
    HOTSPOT_AVOIDED = "hotspot_avoided"
    SESSION_PINNED = "session_pinned"
    SESSION_PLACED = "session_placed"
    SESSION_OVERLOADED = "session_overloaded"
    SESSION_INSTANCE_GONE = "session_instance_gone"
    SESSION_MIGRATED = "session_migrated"
    AFFINITY = "affinity"
    AFFINITY_OVERLOADED = "affinity_overloaded"


class OffloadReason(StrEnum):
    """Result of the offload planner, and (from ``FELL_BACK_*`` on) the failure of an attempted offload."""

    PLANNER_NEVER = "planner_never"
    PLANNER_FAILED = "planner_failed"
    """The planner raised an error or returned an invalid plan."""
    REQUEST_SHAPE = "request_shape"
    BELOW_THRESHOLD = "below_threshold"
    ROLE_FORBIDS = "role_forbids"
    NO_PREFILL_CANDIDATE = "no_prefill_candidate"
    NO_SPECIALIST = "no_specialist"
    """No instance is designated for long prefills, and none only prefills."""
    CAP_REACHED = "cap_reached"
    PAIR_BROKEN = "pair_broken"
    NO_ROOM_ON_D = "no_room_on_d"
    NOTHING_TO_PROTECT = "nothing_to_protect"
    DOES_NOT_PAY = "does_not_pay"
    UNSURE = "unsure"
    """Pays by the estimate, but not within the estimate's usual error."""
    CHOSEN = "chosen"
    FELL_BACK_P_TIMEOUT = "fell_back_p_timeout"
    FELL_BACK_P_ERROR = "fell_back_p_error"
    FELL_BACK_P_IDENTITY = "fell_back_p_identity"
    FELL_BACK_P_GONE = "fell_back_p_gone"
    """P left the fleet while D pulled."""
    FELL_BACK_D_TIMEOUT = "fell_back_d_timeout"
    FELL_BACK_D_ERROR = "fell_back_d_error"


class Tenant(NamedTuple):
    """Those who share one part of the fleet: holders of an API key, or those whom a trusted front door names."""

    name: str = ""
    """Empty for requests without a tenant, which count as one tenant together."""
    weight: float = 1.0
    """Its share relative to the other tenants' weights; positive."""
    priority: int = 0
    """Its waiting requests go ahead of those of tenants with a lower one."""


NO_TENANT = Tenant()


CONTEXT_SEPARATOR = "\x1f"
"""Between session and model in the key of a context."""


class RequestView(NamedTuple):
    """Properties of a request that policies may use."""

    request_id: str
    prompt_tokens: int
    """Tokens of the prompt; exact for token-id prompts, learned estimate for text."""
    block_hashes: Sequence[int] = ()
    """Chained hash of every full prefix block, first block first."""
    block_tokens: float = 16.0
    """Tokens per block."""
    session_id: str | None = None
    max_tokens: int = 16
    """Upper bound of output tokens the client requested."""
    exact: bool = True
    """True when ``prompt_tokens`` and the blocks come from token ids."""
    may_offload: bool = True
    """False for requests a hand-off cannot carry: some APIs, several prompts or choices, output about the prompt."""
    plain: bool = True
    """True if KV events can report these blocks: token ids for a base model, no adapter, no cache salt."""
    tenant: Tenant = NO_TENANT
    agent: str | None = None
    """Kind of the agent that sent it, in the client's words; None if it gave none."""
    parent_session_id: str | None = None
    """Session whose sub-agent sent the request, if it is one."""
    has_priority: bool = True
    """False for an API without the field ``priority``: engines that order their prefills compute it first."""
    model: str | None = None
    """Model or adapter that it asks for; None: not known, as in traces."""

    @property
    def context_id(self) -> str | None:
        """Key of the session's context; None without a session.

        A session that uses several models, as Claude Code's do, has a context with each: it sends each another prompt.
        """
        if self.model is None or not self.session_id:
            return self.session_id
        return f"{self.session_id}{CONTEXT_SEPARATOR}{self.model}"


class QueuedPrefill(NamedTuple):
    """A prefill that waits in an engine or is computed there, where the engine orders them (`policies.costs.order`)."""

    due_s: float
    """Its place in the order; monotonic or virtual time."""
    seconds: float
    """Predicted time of the prefill alone."""


class InstanceView(NamedTuple):
    """One instance as one request sees it. Token counts are sums over whole requests in flight."""

    instance: str
    cached_tokens: int = 0
    """Prompt tokens of *this* request predicted to be in the instance's prefix cache."""
    requests: int = 0
    """Requests in flight (queued, in prefill or in decode)."""
    pending_prefill_tokens: int = 0
    """New tokens of requests without a first token yet."""
    decoding_tokens: int = 0
    """Context tokens of requests that are past their first token."""
    recent_tokens: float = 0.0
    """Recently assigned new tokens, decayed exponentially: load that in-flight counters no longer show."""
    sessions: int = 0
    """Live sessions pinned to the instance."""
    kv_capacity_tokens: int = 0
    """KV pool of the instance in tokens; 0 when unknown."""
    kv_used_tokens: int = 0
    """KV in use as the engine last reported it."""
    kv_promised_tokens: int = 0
    """Change of that by requests in flight: those decided since the report will need more, those that ended since freed
    theirs. May be negative; the sum with ``kv_used_tokens`` never is.
    """
    role: Role = Role.NONE
    holds_class: bool = False
    """True if the instance holds the prefix class (the first few blocks) of this request."""
    prefilling: int = 0
    """Those of ``requests`` without a first token yet."""
    host: str = ""
    """Host name of the machine it runs on."""
    transport: Transport | None = None
    """Proven KV transport of its connector; None if unknown."""
    connector: Connector = Connector.MOONCAKE
    index_source: IndexSource = IndexSource.SHADOW
    """Index that ``cached_tokens`` comes from."""
    shadow_cached_tokens: int = 0
    """Prediction of the shadow index."""
    exact_cached_tokens: int | None = None
    """Prediction of the exact index; None where it is not available."""
    queue: tuple[QueuedPrefill, ...] = ()
    """Prefills of this proxy there, the one that is computed and those that wait, where the engine orders them."""

    @property
    def decode_streams(self) -> int:
        """Requests past their first token."""
        return self.requests - self.prefilling

    @property
    def ongoing_tokens(self) -> int:
        """Prefill still to do plus context being decoded, in tokens."""
        return self.pending_prefill_tokens + self.decoding_tokens


class ContextsView(NamedTuple):
    """Contexts of the last minutes that other requests may need again."""

    tokens: Mapping[str, int] = {}
    """By the instance that they were sent to, less the request's own. Instances without any may be missing."""
    return_share: float = 1.0
    """Share of contexts that a further request follows."""


class HotspotView(NamedTuple):
    """The request's prefix class in the hotspot detector (LMetric, arXiv 2603.15202)."""

    share: float = 0.0
    """Arrival share x of the class among the last requests, 0..1."""
    streak: int = 0
    """Consecutive requests of the class that were sent to a holder while it was alarmed."""
    window: int = 0
    """Number of requests the share is computed over."""


class CandidateScore(NamedTuple):
    """One candidate's score (lower is better) and its inputs."""

    instance: str
    score: float
    inputs: Mapping[str, float]
    skipped: bool = False
    """True if a rule excluded the candidate although its score may be lowest."""
    cached_tokens: int | None = None
    """Prompt tokens predicted to be cached there; filled in by ``decide`` for every policy."""


class OffloadPlan(NamedTuple):
    """Instance to prefill on, or the reason for none: the answer of an offload planner, or of a policy that plans."""

    prefill_on: str | None
    reason: OffloadReason
    inputs: Mapping[str, float] = {}


class Choice(NamedTuple):
    """Result of a routing policy: decode instance, reason, and all candidates' scores."""

    instance: str
    reason: Reason
    scores: tuple[CandidateScore, ...]
    plan: OffloadPlan | None = None
    """Plan of the prefill, if the policy decides on that too; None: the planner does."""


class CachePrediction(NamedTuple):
    """Cached tokens of one request on one instance, as predicted by each index."""

    source: IndexSource
    """The index that was used."""
    shadow_tokens: int
    exact_tokens: int | None = None
    """None where the exact index was not available."""

    @classmethod
    def of(cls, view: InstanceView) -> CachePrediction:
        """Prediction in an instance's view."""
        return cls(view.index_source, view.shadow_cached_tokens, view.exact_cached_tokens)


_PACKAGE = __file__.removesuffix("types.py")
_DECIDE = f"{_PACKAGE}decide.py:"
_TRACE_CALLS = 20
"""Calls kept of a failure, innermost last: a recursion has a thousand."""


class PolicyPart(StrEnum):
    """Part of a decision that a plug-in can provide."""

    POLICY = "policy"
    PLANNER = "planner"
    ADMISSION = "admission"


class PolicyFailure(NamedTuple):
    """A policy, planner or admission rule that raised an error or gave an invalid answer, and so was replaced."""

    part: PolicyPart
    name: str
    error: str
    """Type and text of the error, cut to 500 characters."""
    trace: tuple[str, ...] = ()
    """The calls that led to it, outermost first. The error itself would keep the decision's own frames alive."""

    @classmethod
    def of(cls, part: PolicyPart, name: str, error: Exception) -> PolicyFailure:
        """The failure of a part by an error, which must have been raised."""
        trace, step = [], error.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            trace.append(f"{code.co_filename}:{step.tb_lineno} {code.co_name}")
            step = step.tb_next
        return cls(part, name, f"{type(error).__name__}: {error}"[:500], tuple(trace[-_TRACE_CALLS:]))

    @property
    def place(self) -> str:
        """File and line of the last call outside this package, else of the last one; empty for an invalid answer."""
        inside = [call for call in self.trace if not call.startswith(_DECIDE)]
        outside = [call for call in inside if not call.startswith(_PACKAGE)]
        return (outside or inside or ("",))[-1].rpartition(" ")[0]


class PolicyFailedError(ValueError):
    """A policy, planner or admission rule failed, and its failure must not be hidden; the cause is its own error."""

    def __init__(self, failure: PolicyFailure, request_id: str | None) -> None:
        super().__init__(failure, request_id)  # both, so that it can be sent to another process
        self.failure = failure
        self.request_id = request_id
        """None: it was not asked about a single request."""

    def __str__(self) -> str:
        part, name, text, _ = self.failure
        error = " ".join(text.split())
        what = "admission rule" if part is PolicyPart.ADMISSION else part.value
        at = "" if self.request_id is None else f" at request {self.request_id!r}"
        place = f" ({self.failure.place})" if self.failure.place else ""
        return f"{what} {name!r} failed{at}: {error}{place}"


class Decision(NamedTuple):
    """Decision for one request: D, optionally P, and the reasons."""

    request_id: str
    decode_on: str
    prefill_on: str | None
    request_class: RequestClass
    reason: Reason
    offload: OffloadPlan
    scores: tuple[CandidateScore, ...]
    policy: str
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens predicted to be cached on ``decode_on``."""
    decode_prediction: CachePrediction | None = None
    prefill_prediction: CachePrediction | None = None
    """The prediction on ``prefill_on``."""
    failures: tuple[PolicyFailure, ...] = ()
    """Policy and planner that failed and were replaced for this request; ``policy`` is the one that decided."""
    planned: bool = False
    """``offload`` is the policy's own plan, so the planner was not asked."""

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that ``decode_on`` would have to compute."""
        return self.prompt_tokens - self.cached_tokens


class NoCandidateError(Exception):
    """No instance may take the request (all down, draining or full)."""
