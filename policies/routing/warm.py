"""Warm, our own: the instance where a request costs everybody the least seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.costs import PrefillModel
from policies.routing.base import lowest, require
from policies.types import CandidateScore, Choice, FleetSnapshot, InstanceView, Reason, RequestView

_PUBLISHED = PrefillModel()


@dataclass(frozen=True, slots=True)
class Warm:
    """``score = queue + own + others + room``, all in seconds; lowest wins.

    With ``T(new, context)`` the learned time of a prefill (`policies.costs.PrefillModel`), ``r`` the requests in flight
    on the instance and ``q`` of them still in prefill:

    - ``queue = (q - 1/2) x t``: what is queued there, ``t`` being ``T`` of a mean queued prefill less its fixed part
      (short prefills share a step). The ledger knows its new tokens; its context is taken to be that of the requests
      decoding there (``queue_context``).
    - ``own = T(prompt - cached, cached)``: this prefill, attention over the cached prefix included.
    - ``others = own x r ^ crowd_exponent``: it stalls everybody else there. Exponent 1 is the sum of all waiting, which
      would leave a long prompt in a long queue to spare many streams a little; 0 counts any crowd as one request. Half
      way, on a scale of factors, is the default.
    - ``room = hold_s x (over + min(over, prompt / pool) x r)``: ``over`` is by how much of a pool the contexts in
      flight and this prompt exceed it. A pool's worth leaves in the time a request holds its KV, ``hold_s``: so long
      this request waits for room, and the room it takes makes all others wait.

    What makes a session stay: elsewhere it pays ``own + others`` for its whole history, so it leaves only to save more
    than that. Nothing is pinned: a prefix counts for what it saves, whoever computed it. Ties go by ``tie_break``.

    Sources: pending + new as the measure is LPWL's (agentic-kvc reports), the quadratic load SMetric's
    (arXiv 2607.08565), the factor for others what LMetric's batch size does (arXiv 2603.15202); seconds throughout, the
    exponent, the queue's context and the room are ours. `others_weight` 0, `hold_s` 0, ``queue_context`` false and
    ``learned`` false (the published constants only) switch one idea off each. Complexity: O(n).
    """

    others_weight: float = 1.0
    crowd_exponent: float = 0.5
    hold_s: float = 30.0
    queue_context: bool = True
    learned: bool = True
    name: ClassVar[str] = "warm"

    def __post_init__(self) -> None:
        require(self.others_weight >= 0, "warm: others_weight must not be negative")
        require(0 <= self.crowd_exponent <= 1, "warm: crowd_exponent must be between 0 and 1")
        require(self.hold_s >= 0, "warm: hold_s must not be negative")

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        """See the class."""
        model = fleet.costs.prefill if fleet.costs is not None and self.learned else _PUBLISHED
        prompt = request.prompt_tokens
        own: dict[int, float] = {}
        scores = []
        for view in fleet.instances:
            cached = view.cached_tokens
            own_s = own.get(cached)
            if own_s is None:
                own_s = own[cached] = model.predict(prompt - cached, cached).seconds
            queue_s = self._queue_s(view, model) if view.prefilling else 0.0
            others_s = self.others_weight * own_s * view.requests**self.crowd_exponent if view.requests else 0.0
            room_s = self._room_s(view, prompt)
            scores.append(
                CandidateScore(
                    view.instance,
                    queue_s + own_s + others_s + room_s,
                    {
                        "queue_s": queue_s,
                        "own_s": own_s,
                        "others_s": others_s,
                        "room_s": room_s,
                        "cached_tokens": cached,
                    },
                )
            )
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, tuple(scores))

    def _queue_s(self, view: InstanceView, model: PrefillModel) -> float:
        """Seconds to work off what is queued, half of one prefill done already."""
        new = view.pending_prefill_tokens / view.prefilling
        if not new:
            return 0.0
        streams = view.requests - view.prefilling
        context = max(0.0, view.decoding_tokens / streams - new) if self.queue_context and streams else 0.0
        work_s = model.s_per_token * new + model.s_per_token_squared * new * (context + new / 2)
        learned = model.predict(new, context).seconds / (model.fixed_s + work_s)
        return (view.prefilling - 0.5) * learned * work_s

    def _room_s(self, view: InstanceView, prompt_tokens: int) -> float:
        """Seconds that this and other requests wait for KV blocks; 0 where the pool's size is unknown."""
        pool = view.kv_capacity_tokens
        over = view.kv_used_tokens + view.kv_promised_tokens + prompt_tokens - pool
        if not pool or over <= 0:
            return 0.0
        return self.hold_s / pool * (over + min(over, prompt_tokens) * view.requests)
