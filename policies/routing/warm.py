"""Warm, our own: the instance where a request costs everybody the least seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.costs import PrefillModel
from policies.routing.base import lowest, require
from policies.types import CandidateScore, Choice, FleetSnapshot, InstanceView, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Warm:
    """``score = queue + room + own + others``, all in seconds; lowest wins.

    With ``T(new, context)`` the learned time of a prefill (`policies.costs.PrefillModel`), ``r`` the requests in flight
    on the instance and ``q`` of them still in prefill:

    - ``queue = (q - 1/2) x t``: what is queued there, ``t`` being ``T`` of a mean queued prefill less its fixed part
      (short prefills share a step). The ledger knows its new tokens; its context is taken to be that of the requests
      decoding there (``queue_context``).
    - ``room = hold_s x over / pool``: ``over`` is by how many tokens the prompts in flight and this one exceed
      ``pool_share`` of the KV pool; outputs and partly filled blocks take the rest. A pool's worth leaves in the time a
      request holds its KV, so long this one waits for blocks.
    - ``own = T(prompt - cached, cached)``: this prefill, attention over the cached prefix included.
    - ``others = others_weight x own x r ^ crowd_exponent + hold_s x min(over, prompt) / pool x r``: while it is
      computed the streams there stand still, and the room it takes others wait for. Exponent 1 is the sum of all
      waiting, which would leave a long prompt in a long queue to spare many streams a little; 0 counts any crowd as one
      request. Half way, on a scale of factors, is the default.

    Nobody waits too long for others' sake: if the instance with the soonest first token (``queue + room + own``) has
    room, those more than ``patience`` times later are skipped. If it has none everybody waits, and the sum decides.

    What makes a session stay: elsewhere it pays ``own + others`` for its whole history, so it leaves only to save more
    than that. Nothing is pinned: a prefix counts for what it saves, whoever computed it. Ties go by ``tie_break``.

    Sources: pending + new as the measure is LPWL's (agentic-kvc reports), the quadratic load SMetric's
    (arXiv 2607.08565), a factor for the batch LMetric's (arXiv 2603.15202); seconds throughout, the exponent, the
    queue's context, the room and the patience are ours. ``others_weight`` 0, ``crowd_exponent`` 1, ``hold_s`` 0,
    ``pool_share`` 1, ``patience`` 1e9, ``queue_context`` false and ``learned`` false (published constants only) switch
    one idea off each. Complexity: O(n).
    """

    others_weight: float = 1.0
    crowd_exponent: float = 0.5
    hold_s: float = 30.0
    pool_share: float = 0.8
    patience: float = 3.0
    queue_context: bool = True
    learned: bool = True
    name: ClassVar[str] = "warm"

    def __post_init__(self) -> None:
        require(self.others_weight >= 0, "warm: others_weight must not be negative")
        require(0 <= self.crowd_exponent <= 1, "warm: crowd_exponent must be between 0 and 1")
        require(self.hold_s >= 0, "warm: hold_s must not be negative")
        require(0 < self.pool_share <= 1, "warm: pool_share must be above 0 and at most 1")
        require(self.patience >= 1, "warm: patience must be at least 1")

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        """See the class."""
        model = fleet.costs.prefill if fleet.costs is not None and self.learned else PrefillModel()
        prompt = request.prompt_tokens
        owns: dict[int, float] = {}
        """By cached tokens: mostly the same for many instances."""
        firsts: list[float] = []
        scores: list[CandidateScore] = []
        for view in fleet.instances:
            cached = view.cached_tokens
            own_s = owns.get(cached)
            if own_s is None:
                own_s = owns[cached] = model.predict(prompt - cached, cached).seconds
            queue_s = self._queue_s(view, model) if view.prefilling else 0.0
            others_s = self.others_weight * own_s * view.requests**self.crowd_exponent if view.requests else 0.0
            room_s = 0.0
            pool = view.kv_capacity_tokens
            over = view.kv_used_tokens + view.kv_promised_tokens + prompt - self.pool_share * pool
            if pool and over > 0:  # a pool of unknown size counts as having room
                room_s = self.hold_s * over / pool
                others_s += self.hold_s * min(over, prompt) / pool * view.requests
            first_s = queue_s + room_s + own_s
            firsts.append(first_s)
            scores.append(
                CandidateScore(
                    view.instance,
                    first_s + others_s,
                    {
                        "queue_s": queue_s,
                        "room_s": room_s,
                        "own_s": own_s,
                        "others_s": others_s,
                        "cached_tokens": cached,
                    },
                )
            )
        soonest_s = min(firsts)
        if not scores[firsts.index(soonest_s)].inputs["room_s"]:
            for place, first_s in enumerate(firsts):
                if first_s > self.patience * soonest_s:
                    scores[place] = scores[place]._replace(skipped=True)
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
