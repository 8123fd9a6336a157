"""Turns and the sessions that they belong to, as `policies.admission.accounts` counts them."""

from __future__ import annotations

from policies.admission.homes import Home
from policies.admission.prompt_ends import PromptEnd, continued, end_of
from policies.costs.formulas import PrefillModel
from policies.types import RequestView

REMEMBERED_TURNS = 4
"""Last prompts of a session by which a longer one is recognised: sub-agents of one session take turns."""


class SessionAccount:
    """One session."""

    __slots__ = (
        "before_tokens",
        "context_tokens",
        "ends",
        "expired",
        "gap_s",
        "home",
        "in_flight",
        "request_id",
        "since_s",
        "turns",
    )

    def __init__(self) -> None:
        self.home: Home
        """Contexts of the instance that its last request was sent to."""
        self.context_tokens = 0
        self.in_flight = 0
        self.turns = 0
        self.since_s = 0.0
        """When its last request ended."""
        self.request_id: str | None = None
        """Its last request."""
        self.before_tokens = 0
        """Tokens of that one's prompt that had been computed before."""
        self.gap_s: float | None = None
        """Seconds between its last request's end and one that was held or has yet to be sent."""
        self.expired = False
        """It was kept to the end and had not returned."""
        self.ends: tuple[PromptEnd, ...] = ()
        """Of the last prompts."""

    def computed_before(self, request: RequestView) -> int:
        """Tokens at the beginning of a prompt that the fleet has computed for this session before; remembers the
        prompt.

        A further attempt of the same request gets the answer of its first: that one may not have computed anything.
        """
        request_id, hashes, ends = request.request_id, request.block_hashes, self.ends
        if self.request_id == request_id:
            return self.before_tokens
        self.request_id, self.before_tokens = request_id, 0
        if not hashes:
            return 0
        new = end_of(hashes)
        found = continued(ends, hashes) if ends else None
        if found is None:
            self.ends = (*ends, new)[-REMEMBERED_TURNS:] if ends else (new,)
            return 0
        blocks, repeated = found
        if repeated is ends[-1]:
            self.ends = (*ends[:-1], new) if len(ends) > 1 else (new,)
        else:
            self.ends = (*[end for end in ends if end is not repeated], new)
        self.before_tokens = before_tokens = int(blocks * request.block_tokens)
        return before_tokens


class Turn:
    """One attempt of a request, from when it is sent until it has ended."""

    __slots__ = (
        "account",
        "before_tokens",
        "cached_tokens",
        "elsewhere_tokens",
        "instance",
        "model",
        "request",
        "sent_s",
    )

    # No constructor: setting the attributes takes half of the time of its call.
    request: RequestView
    instance: str
    """Instance that computes its answer, and has its session's context then."""
    cached_tokens: int
    """Predicted to be cached where its prompt is computed."""
    elsewhere_tokens: int
    """The most predicted to be cached on another instance."""
    model: PrefillModel
    sent_s: float
    account: SessionAccount
    """Set when it is counted, as ``before_tokens`` is."""
    before_tokens: int
    """Tokens of its prompt that the fleet had computed for this session before."""


TurnEnd = tuple[Turn, float | None, int | None, PrefillModel]
"""A turn that has ended, when, the cached tokens as reported, and the model then."""
