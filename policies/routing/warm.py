"""Warm, this project's policy: the instance with the lowest total cost in seconds over all requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.costs.formulas import PrefillModel
from policies.pool import POOL_SHARE, tokens_over
from policies.routing.base import lowest, require
from policies.snapshot import FleetSnapshot
from policies.types import CandidateScore, Choice, InstanceView, Reason, RequestView


@dataclass(frozen=True, slots=True)
class Warm:
    """``score = queue + crowd + room + own + others``, all in seconds; lowest wins.

    With ``T(new, context)`` the learned time of a prefill (`policies.costs.formulas.PrefillModel`), ``r`` the requests
    in flight on the instance, and ``q`` of them still in prefill:

    - ``queue = (q - 1/2) x t``: the prefill queued there, ``t`` being ``T`` of a mean queued prefill less its fixed
      part (short prefills share a step).
    - ``crowd = queue_crowd x r x queue``: extra weight of a queue on an instance with many requests.
    - ``room = hold_s x over / pool``: ``over`` is the number of tokens by which the prompts in flight and this one
      exceed ``pool_share`` of the KV pool (`policies.pool`). One pool's worth of tokens is freed in the time a request
      holds its KV, so this is the wait for blocks.
    - ``own = T(prompt - cached, cached)``: this prefill, attention over the cached prefix included.
    - ``others = others_weight x r x (own + alone) + hold_s x min(over, prompt) / pool x w``: the streams there stall
      while this prefill is computed, for ``alone = step_s`` longer if no prefill is queued whose steps it can share;
      and ``w`` requests wait for the room it takes: all ``r`` if no instance has room, since some request then always
      waits, else the ``q`` that wait now.

    Sessions stay because any other instance costs ``own + others`` for the whole history; a session moves only if that
    saves more. Nothing is pinned: a prefix counts by the time it saves. Ties go by ``tie_break``.

    Sources: pending + new as the measure is LPWL's (agentic-kvc reports), the quadratic load SMetric's (arXiv
    2607.08565), queue and batch as factors of each other LMetric's (arXiv 2603.15202); seconds throughout, the sum in
    place of the product, the shared steps and the room are ours; ``step_s`` is the difference between a step with a
    short prefill and one without, with about 20 streams (vLLM 0.20.2 on an H200: 48 ms and half a millisecond for each
    stream, against 9 to 22 ms: configs/hardware/h200.yaml). 0 for ``others_weight``, ``queue_crowd``, ``step_s`` and
    ``hold_s``, 1 for ``pool_share`` and false for ``learned`` (published constants only) disable one term each.
    Complexity: O(n).
    """

    others_weight: float = 1.0
    queue_crowd: float = 0.25
    step_s: float = 0.04
    hold_s: float = 30.0
    pool_share: float = POOL_SHARE
    learned: bool = True
    name: ClassVar[str] = "warm"

    def __post_init__(self) -> None:
        require(self.others_weight >= 0, "warm: others_weight must not be negative")
        require(self.queue_crowd >= 0, "warm: queue_crowd must not be negative")
        require(self.step_s >= 0, "warm: step_s must not be negative")
        require(self.hold_s >= 0, "warm: hold_s must not be negative")
        require(0 < self.pool_share <= 1, "warm: pool_share must be above 0 and at most 1")

    def choose(self, request: RequestView, fleet: FleetSnapshot) -> Choice:
        model = fleet.costs.prefill if fleet.costs is not None and self.learned else PrefillModel()
        prompt = request.prompt_tokens
        overs = [tokens_over(view, prompt, self.pool_share) for view in fleet.instances]
        nobody_has_room = min(overs) > 0
        owns: dict[int, float] = {}
        """By cached tokens, which are mostly equal across instances."""
        scores: list[CandidateScore] = []
        made = tuple.__new__  # a third of the time of the class's own call
        for view, over in zip(fleet.instances, overs, strict=True):
            cached, requests = view.cached_tokens, view.requests
            own_s = owns.get(cached)
            if own_s is None:
                own_s = owns[cached] = model.seconds(prompt - cached, cached)
            queue_s = _queue_s(view, model) if view.prefilling else 0.0
            crowd_s = self.queue_crowd * requests * queue_s
            alone_s = 0.0 if view.prefilling else self.step_s
            others_s = self.others_weight * requests * (own_s + alone_s)
            room_s = 0.0
            if over > 0:
                pool = view.kv_capacity_tokens
                room_s = self.hold_s * over / pool
                waiting = requests if nobody_has_room else view.prefilling
                others_s += self.hold_s * min(over, prompt) / pool * waiting
            scores.append(
                made(
                    CandidateScore,
                    (
                        view.instance,
                        queue_s + crowd_s + room_s + own_s + others_s,
                        {
                            "queue_s": queue_s,
                            "crowd_s": crowd_s,
                            "room_s": room_s,
                            "own_s": own_s,
                            "others_s": others_s,
                            "cached_tokens": cached,
                        },
                        False,
                        None,
                    ),
                )
            )
        return Choice(lowest(fleet, scores).instance, Reason.LOWEST_SCORE, tuple(scores))


def _queue_s(view: InstanceView, model: PrefillModel) -> float:
    """Seconds to finish the queued prefills, the first of them half done."""
    new = view.pending_prefill_tokens / view.prefilling
    if not new:
        return 0.0
    work_s = model.s_per_token * new + model.s_per_token_squared * new * (new / 2)
    learned = model.seconds(new, 0.0) / (model.fixed_s + work_s)
    return (view.prefilling - 0.5) * learned * work_s
