"""The words a decision is made of: what a policy is shown and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class RequestClass(StrEnum):
    """How much of a request must be computed: by new tokens (prompt - cached on the chosen instance)."""

    WARM = "WARM"
    MEDIUM = "MEDIUM"
    HEAVY = "HEAVY"


class Role(StrEnum):
    """What an instance may do with KV caches (vLLM's ``kv_role``; ``NONE`` runs without a connector)."""

    KV_BOTH = "kv_both"
    KV_PRODUCER = "kv_producer"
    KV_CONSUMER = "kv_consumer"
    NONE = "none"


class Connector(StrEnum):
    """vLLM's KV connector of an instance: how a hand-off is spelt."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"


class Transport(StrEnum):
    """What a KV cache travels over."""

    TCP = "tcp"
    RDMA = "rdma"
    EFA = "efa"
    NVLINK = "nvlink"
    """Between GPUs of one host only."""


class IndexSource(StrEnum):
    """Who predicts what an instance has cached."""

    SHADOW = "shadow"
    """The router's own memory of what it sent there."""
    EXACT = "exact"
    """What the engine reports in its KV events."""


class Reason(StrEnum):
    """Why this instance: the closed vocabulary of decisions, headers and metric labels."""

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
    AFFINITY = "affinity"
    AFFINITY_OVERLOADED = "affinity_overloaded"


class OffloadReason(StrEnum):
    """What the offload planner said, and (from ``FELL_BACK_*`` on) what became of an offload that was tried."""

    PLANNER_NEVER = "planner_never"
    REQUEST_SHAPE = "request_shape"
    BELOW_THRESHOLD = "below_threshold"
    ROLE_FORBIDS = "role_forbids"
    NO_PREFILL_CANDIDATE = "no_prefill_candidate"
    CAP_REACHED = "cap_reached"
    PAIR_BROKEN = "pair_broken"
    NO_ROOM_ON_D = "no_room_on_d"
    NOTHING_TO_PROTECT = "nothing_to_protect"
    DOES_NOT_PAY = "does_not_pay"
    UNSURE = "unsure"
    """It would pay if the estimate were right, but not if it is wrong by what estimates were wrong so far."""
    CHOSEN = "chosen"
    FELL_BACK_P_TIMEOUT = "fell_back_p_timeout"
    FELL_BACK_P_ERROR = "fell_back_p_error"
    FELL_BACK_P_IDENTITY = "fell_back_p_identity"
    FELL_BACK_P_GONE = "fell_back_p_gone"
    """P vanished while D pulled."""
    FELL_BACK_D_TIMEOUT = "fell_back_d_timeout"
    FELL_BACK_D_ERROR = "fell_back_d_error"


class RequestView(NamedTuple):
    """What a policy may know of a request."""

    request_id: str
    prompt_tokens: int
    """Tokens of the prompt; exact for token-id prompts, learned estimate for text."""
    block_hashes: Sequence[int] = ()
    """Chained hash of every full prefix block, first block first."""
    block_tokens: float = 16.0
    """Tokens one block stands for."""
    session_id: str | None = None
    max_tokens: int = 16
    """Upper bound of output tokens the client asked for."""
    exact: bool = True
    """True when ``prompt_tokens`` and the blocks come from token ids."""
    may_offload: bool = True
    """False for what one hand-off cannot carry: several prompts or choices, log probabilities of the prompt."""
    plain: bool = True
    """True when KV events tell of these very blocks: token ids for a base model, no adapter, no cache salt."""


class InstanceView(NamedTuple):
    """One instance as one request sees it. Token counts are whole requests' sums over work in flight."""

    instance: str
    cached_tokens: int = 0
    """Prompt tokens of *this* request predicted to be in the instance's prefix cache."""
    requests: int = 0
    """Requests in flight (queued, in prefill or in decode)."""
    pending_prefill_tokens: int = 0
    """New tokens of requests that have not answered their first token yet."""
    decoding_tokens: int = 0
    """Context tokens of requests that are past their first token."""
    recent_tokens: float = 0.0
    """New tokens assigned lately, decayed exponentially: load that in-flight counters no longer show."""
    sessions: int = 0
    """Live sessions pinned to the instance."""
    kv_capacity_tokens: int = 0
    """KV pool of the instance in tokens; 0 when unknown."""
    kv_used_tokens: int = 0
    """KV in use as the engine last reported it."""
    kv_promised_tokens: int = 0
    """What requests in flight change of that: those decided on since the report will need more, those that have ended
    since gave theirs back. May be negative; with ``kv_used_tokens`` it never is."""
    role: Role = Role.NONE
    holds_class: bool = False
    """Whether the instance holds the prefix class (the first few blocks) of this request."""
    prefilling: int = 0
    """Of ``requests``, those whose first token is still to come."""
    host: str = ""
    """The machine it runs on."""
    transport: Transport | None = None
    """What its connector moves KV over, where that is proven."""
    connector: Connector = Connector.MOONCAKE
    index_source: IndexSource = IndexSource.SHADOW
    """Whose prediction ``cached_tokens`` is."""
    shadow_cached_tokens: int = 0
    """What the shadow index predicts."""
    exact_cached_tokens: int | None = None
    """What the exact index predicts; None where it cannot be asked."""

    @property
    def decode_streams(self) -> int:
        """Requests past their first token."""
        return self.requests - self.prefilling

    @property
    def ongoing_tokens(self) -> int:
        """Prefill still to do plus context being decoded, in tokens."""
        return self.pending_prefill_tokens + self.decoding_tokens


class HotspotView(NamedTuple):
    """The request's prefix class as the hotspot detector sees it (LMetric, arXiv 2603.15202)."""

    share: float = 0.0
    """Arrival share x of the class among the last requests, 0..1."""
    streak: int = 0
    """Consecutive requests of the class that were sent to a holder while it was alarmed."""
    window: int = 0
    """How many requests the share is taken over."""


class CandidateScore(NamedTuple):
    """One candidate's score (lower is better) and everything it was computed from."""

    instance: str
    score: float
    inputs: Mapping[str, float]
    skipped: bool = False
    """True when a rule took the candidate out although its score may be lowest."""
    cached_tokens: int | None = None
    """Prompt tokens predicted to be cached there; filled in by ``decide``, whatever the policy reports as inputs."""


class Choice(NamedTuple):
    """A routing policy's answer: where to decode, why, and how every candidate scored."""

    instance: str
    reason: Reason
    scores: tuple[CandidateScore, ...]


class OffloadPlan(NamedTuple):
    """An offload planner's answer: the instance to prefill on, or why none."""

    prefill_on: str | None
    reason: OffloadReason
    inputs: Mapping[str, float] = {}


class Prediction(NamedTuple):
    """Cached tokens of one request on one instance, as predicted by either index."""

    source: IndexSource
    """Which of the two was used."""
    shadow_tokens: int
    exact_tokens: int | None = None
    """None where the exact index could not be asked."""

    @classmethod
    def of(cls, view: InstanceView) -> Prediction:
        """What an instance's view predicts."""
        return cls(view.index_source, view.shadow_cached_tokens, view.exact_cached_tokens)


class Decision(NamedTuple):
    """What is done with a request: D, perhaps P, and why."""

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
    decode_prediction: Prediction | None = None
    prefill_prediction: Prediction | None = None
    """The same for ``prefill_on``."""

    @property
    def new_tokens(self) -> int:
        """Prompt tokens that ``decode_on`` would have to compute."""
        return self.prompt_tokens - self.cached_tokens


class NoCandidateError(Exception):
    """No instance may take the request (all down, draining or full)."""
