"""Shadow decisions: another policy, planner or admission rule on the snapshot of a live decision, and the comparison.

Pure: nothing is counted here. ``proxy.shadow`` calls it between requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.admission.base import AdmissionRule, AdmissionView, Admit, Hold, SessionView
from policies.admission.gate import checked_answer
from policies.classes import ClassThresholds
from policies.decide import chosen_by, planned_by
from policies.offload.base import OffloadPlanner
from policies.offload.cost_model import CostModel
from policies.routing.base import RoutingPolicy
from policies.routing.warm import Warm
from policies.snapshot import FleetSnapshot
from policies.types import Decision, RequestView

SENT = "sent"
HELD = "held"
OFFLOADED = "offloaded"
STAYED = "stayed"


class ShadowVerdict(NamedTuple):
    """A shadow's decision beside the live one."""

    instance: str | None
    """D of a policy; P of a planner, None if it would not offload; None of an admission rule."""
    reason: str
    """Value of ``Reason``, ``OffloadReason`` or ``AdmissionReason``."""
    agreed: bool
    """Same D, same P (or none), or both sent or both held."""
    regret_s: float = 0.0
    """Estimated cost of the live decision less that of the shadow's, seconds. Positive: the live one cost more."""
    hit_tokens: int = 0
    """Cached tokens on the shadow's D less those on the live D. Positive: the live decision gave hits away."""
    answer: str = ""
    """Of a planner ``OFFLOADED`` or ``STAYED``, of an admission rule ``SENT`` or ``HELD``."""


class LiveDecision:
    """A live decision with the prices of its candidates, which all shadows share."""

    __slots__ = ("_prices", "decision", "fleet", "request")

    def __init__(self, request: RequestView, fleet: FleetSnapshot, decision: Decision) -> None:
        self.request = request
        self.fleet = fleet
        self.decision = decision
        self._prices: Mapping[str, float] | None = None

    @property
    def has_prices(self) -> bool:
        """True if the live decision's scores are the prices, so that ``price`` costs nothing."""
        return self.decision.policy == Warm.name

    def price(self) -> Mapping[str, float]:
        """Seconds that the request costs all requests by candidate: the scores of ``warm``, computed once.

        The live decision's own if ``warm`` decided, with its parameters, else those with the defaults.
        """
        if self._prices is None:
            decision = self.decision
            scores = decision.scores if self.has_prices else Warm().choose(self.request, self.fleet).scores
            self._prices = {score.instance: score.score for score in scores}
        return self._prices

    def routed_by(self, policy: RoutingPolicy) -> ShadowVerdict:
        """Decision of another routing policy. Raises ValueError for an invalid choice, and what the policy raises."""
        choice, shadow = chosen_by(self.request, self.fleet, policy)
        decision = self.decision
        if shadow.instance == decision.decode_on:
            return ShadowVerdict(shadow.instance, choice.reason.value, True)
        prices = self.price()
        return ShadowVerdict(
            shadow.instance,
            choice.reason.value,
            False,
            prices[decision.decode_on] - prices[shadow.instance],
            shadow.cached_tokens - decision.cached_tokens,
        )

    def planned_by(self, planner: OffloadPlanner, thresholds: ClassThresholds) -> ShadowVerdict | None:
        """Plan of another planner for the live D; None if a hand-off cannot carry the request.

        Raises:
            ValueError: an invalid plan; the planner's own errors pass through.
        """
        request, fleet, decision = self.request, self.fleet, self.decision
        decode = fleet.view(decision.decode_on)
        if decode is None or not request.may_offload:
            return None
        plan, prefill = planned_by(request, decode, thresholds.classify(decision.new_tokens), fleet, planner)
        shadow_p, live_p = plan.prefill_on, decision.prefill_on
        answer = STAYED if shadow_p is None else OFFLOADED
        if shadow_p == live_p:
            return ShadowVerdict(shadow_p, plan.reason.value, True, answer=answer)
        live_prefill = None if live_p is None else fleet.prefill_view(live_p)
        saved_s = [
            0.0 if view is None else CostModel().saving_s(request, decode, view, fleet)
            for view in (prefill, live_prefill)
        ]
        return ShadowVerdict(shadow_p, plan.reason.value, False, saved_s[0] - saved_s[1], answer=answer)


def admitted_by(
    rule: AdmissionRule, request: RequestView, session: SessionView, fleet: AdmissionView, live: Admit | Hold
) -> ShadowVerdict:
    """Answer of another admission rule to a new request; it has no price, so no regret.

    Raises:
        ValueError: an invalid answer; the rule's own errors pass through.
    """
    answer = checked_answer(rule.name, rule.admit(request, session, fleet))
    sent = isinstance(answer, Admit)
    return ShadowVerdict(None, answer.reason.value, sent is isinstance(live, Admit), answer=SENT if sent else HELD)
