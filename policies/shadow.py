"""Shadow decisions: another policy, planner or admission rule on the snapshot of a live decision, and the comparison.

Pure: nothing is counted here. ``proxy.shadow`` calls it between requests.
"""

from __future__ import annotations

from typing import NamedTuple

from policies.admission.base import AdmissionRule, AdmissionView, Admit, Hold, SessionView, checked_answer
from policies.classes import ClassThresholds
from policies.decide import chosen_by, planned_by
from policies.offload.base import OffloadPlanner
from policies.offload.cost_model import CostModel
from policies.routing.base import ColumnPolicy, RoutingPolicy
from policies.routing.warm import Prices, Warm
from policies.snapshot import FleetColumns, FleetSnapshot
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


def _verdict(fields: tuple[str | None, str, bool, float, int, str]) -> ShadowVerdict:
    return tuple.__new__(ShadowVerdict, fields)  # a third of the time of the class's own call


class LiveDecision:
    """A live decision with what its shadows share: the fleet's columns, and prices of candidates."""

    __slots__ = ("_known", "_prices", "columns", "decision", "fleet", "request")

    def __init__(self, request: RequestView, fleet: FleetSnapshot, decision: Decision) -> None:
        self.request = request
        self.fleet = fleet
        self.decision = decision
        self.columns = FleetColumns.of(fleet.instances)
        """The candidates by field."""
        self._prices: Prices | None = None
        self._known: dict[int, float] = {}

    def price(self, place: int) -> float:
        """Seconds that the request costs all requests, for the candidate at this place: the score of ``warm``.

        The live decision's own if ``warm`` decided, with its parameters, else that with the defaults. Each is computed
        once, and only for candidates that somebody chose.
        """
        decision, price_s = self.decision, self._known.get(place)
        if price_s is None:
            if decision.policy == Warm.name:
                price_s = decision.scores[place].score
            else:
                prices = self._prices or Warm().prices(self.request, self.fleet, self.columns)
                self._prices, price_s = prices, prices.of(place)
            self._known[place] = price_s
        return price_s

    def routed_by(self, policy: RoutingPolicy) -> ShadowVerdict:
        """Decision of another routing policy. Raises ValueError for an invalid choice, and what the policy raises."""
        columns, decision = self.columns, self.decision
        names, live_name = columns.instance, decision.decode_on
        if isinstance(policy, ColumnPolicy):
            place, reason, _ = policy.quick(self.request, self.fleet, columns)
            instance = names[place]
        else:
            choice, _ = chosen_by(self.request, self.fleet, policy)
            instance, reason = choice.instance, choice.reason
            place = names.index(instance)
        if instance == live_name:
            return _verdict((instance, reason, True, 0.0, 0, ""))
        live_s, shadow_s = self.price(names.index(live_name)), self.price(place)
        lost = columns.cached_tokens[place] - decision.cached_tokens
        return _verdict((instance, reason, False, live_s - shadow_s, lost, ""))

    def planned_by(self, planner: OffloadPlanner, thresholds: ClassThresholds) -> ShadowVerdict | None:
        """Plan of another planner for the live D; None if a hand-off cannot carry the request.

        Raises:
            ValueError: an invalid plan; the planner's own errors pass through.
        """
        request, fleet, decision = self.request, self.fleet, self.decision
        names = self.columns.instance
        if not request.may_offload or decision.decode_on not in names:
            return None
        decode = fleet.instances[names.index(decision.decode_on)]
        columns = None if fleet.prefill_instances else self.columns
        request_class = thresholds.classify(decision.new_tokens)
        plan, prefill = planned_by(request, decode, request_class, fleet, planner, columns)
        shadow_p, live_p = plan.prefill_on, decision.prefill_on
        answer = STAYED if shadow_p is None else OFFLOADED
        if shadow_p == live_p:
            return _verdict((shadow_p, plan.reason, True, 0.0, 0, answer))
        shadow_s, live_s, yardstick = 0.0, 0.0, CostModel()
        if prefill is not None:
            shadow_s = yardstick.saving_in(planner, plan, request, decode, prefill, fleet)
        if live_p is not None and (live := fleet.prefill_view(live_p)) is not None:
            live_s = yardstick.saving_s(request, decode, live, fleet)
        return _verdict((shadow_p, plan.reason, False, shadow_s - live_s, 0, answer))


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
