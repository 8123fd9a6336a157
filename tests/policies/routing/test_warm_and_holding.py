"""``warm`` where an admission rule holds requests: those that wait, and contexts that a placement evicts."""

from __future__ import annotations

import pytest

from policies.costs.formulas import Costs, PrefillModel
from policies.routing.warm import Warm
from policies.snapshot import FleetColumns, FleetSnapshot
from policies.types import InstanceView
from tests.policies.builders import ask, fleet_of

COSTS = Costs(PrefillModel(fixed_s=0.0, s_per_token=1e-4, s_per_token_squared=0.0))
REQUEST = ask(40_000)
HOME = InstanceView("home", cached_tokens=39_000, requests=1, prefilling=1, pending_prefill_tokens=90_000)
FREE = InstanceView("free")
"""4 s of prefill, where ``home`` has a queue of 4.5 s, counted 1.25 times."""


def fleet(held: float = 0.0, **evicted_s: float) -> FleetSnapshot:
    return fleet_of(HOME, FREE, costs=COSTS)._replace(held=held, evicted_s=evicted_s)


def chosen(snapshot: FleetSnapshot, policy: Warm) -> str:
    choice = policy.choose(REQUEST, snapshot)
    columns = FleetColumns.of(snapshot.instances)
    assert columns.instance[policy.quick(REQUEST, snapshot, columns).place] == choice.instance
    return choice.instance


def test_a_session_leaves_its_queue_where_nobody_is_harmed() -> None:
    assert chosen(fleet(), Warm()) == "free"


@pytest.mark.parametrize("harm", [fleet(held=1.0), fleet(free=4.0)])
def test_a_session_stays_where_moving_costs_others_more(harm: FleetSnapshot) -> None:
    assert chosen(harm, Warm()) == "home"
    assert chosen(harm, Warm(others_weight=0.0)) == "free"


def test_the_score_shows_what_it_counts() -> None:
    scores = {score.instance: score for score in Warm().choose(REQUEST, fleet(held=0.5, free=1.0)).scores}
    assert scores["free"].inputs["others_s"] == pytest.approx(0.5 * 4.0 + 1.0)
    assert (scores["free"].inputs["held"], scores["free"].inputs["evicted_s"]) == (0.5, 1.0)
    assert scores["home"].inputs["evicted_s"] == 0.0
    assert "held" not in Warm().choose(REQUEST, fleet()).scores[0].inputs
