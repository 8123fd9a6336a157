"""Fleets whose instances differ in speed: found out, and routed accordingly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.registry import make_routing
from sim.offline.options import SimOptions, SimulationError
from sim.offline.setup import Setup, parsed_speeds
from sim.offline.simulate import OfflineRun, simulate
from sim.offline.sweeps.sweep import points_of
from tests.sim.offline.offline_runs import ROOMY_TOKENS, agents, run

TRACE = agents(900, rate_per_s=4.0, seed=5)


def learned(speeds: tuple[float, ...], policy: str = "warm") -> dict[str, float]:
    """Slowness of four instances after a trace."""
    options = SimOptions(instances=4, pool_tokens=ROOMY_TOKENS, speeds=speeds)
    offline = OfflineRun.of_trace(TRACE, options, make_routing(policy))
    offline.run(lambda _: None)
    return dict(offline._router.state.costs.slowness.measured)


def test_the_slowness_of_each_instance_is_learned() -> None:
    found = learned((1.0, 1.0, 1.0, 0.25), "round_robin")
    assert found["inst-3"] == pytest.approx(4.0, rel=0.3)
    for number in range(3):
        assert found[f"inst-{number}"] == pytest.approx(1.0, rel=0.3)


@pytest.mark.parametrize("policy", ["warm", "joint", "session_sticky"])
def test_equal_instances_stay_equal(policy: str) -> None:
    assert learned((), policy) == {}


def test_requests_wait_less_where_the_slowness_is_known() -> None:
    options = SimOptions(instances=4, pool_tokens=ROOMY_TOKENS, speeds=(1.0, 1.0, 1.0, 0.25))
    means = []
    for learns in (True, False):
        records = simulate(TRACE, options, make_routing("warm", {"learned_slowness": learns})).run.records
        assert all(record.ok for record in records)
        means.append(sum(record.ttft_s or 0.0 for record in records) / len(records))
    assert means[0] < 0.9 * means[1]


def test_every_instance_has_its_speed_in_turn() -> None:
    rows = run(agents(20), speeds=(1.0, 0.5), instances=5).instances
    assert [row.slowness for row in rows] == [1.0, 2.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("speeds", [(1.0, 0.0), (-1.0,), (float("inf"),), (1.0,) * 5])
def test_impossible_speeds_are_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(SimulationError, match="--speeds"):
        SimOptions(instances=4, speeds=speeds).check()


def test_speeds_are_numbers_separated_by_commas() -> None:
    assert parsed_speeds("1,0.5") == (1.0, 0.5)
    assert parsed_speeds("") == ()
    with pytest.raises(SimulationError, match=r"such as 1,0\.5"):
        parsed_speeds("1;2")


def test_speeds_are_swept_as_lists(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").touch()
    base = Setup(trace=str(tmp_path / "trace.jsonl"), instances=4)
    points = points_of(base, ["speeds=[1],[1,0.5],[1, 1, 1, 0.25]", "policy=warm,lmetric"])
    assert [point.name for point in points][:3] == [
        "speeds=[1] policy=warm",
        "speeds=[1] policy=lmetric",
        "speeds=[1,0.5] policy=warm",
    ]
    assert [point.setup.options().speeds for point in points][::2] == [(1.0,), (1.0, 0.5), (1.0, 1.0, 1.0, 0.25)]
    for sweep, reason in (("speeds=1", "array"), ("speeds=[1,x]", "float"), ("speeds=[1,1,1,1,1]", "--speeds")):
        with pytest.raises(SimulationError, match=reason):
            points_of(base, [sweep])


def test_a_slow_instance_gets_little_and_is_tried_again_and_again() -> None:
    options = SimOptions(instances=4, pool_tokens=ROOMY_TOKENS, speeds=(1.0, 1.0, 1.0, 0.125))
    trace = agents(2_000, rate_per_s=2.0, seed=5)
    sent = [
        each.sent_s for each in simulate(trace, options, make_routing("warm")).run.records if each.instance == "inst-3"
    ]
    assert len(sent) < 0.1 * 2_000
    late = [at_s for at_s in sent if at_s is not None and at_s > 400]
    assert late


def test_an_instance_that_is_slow_no_longer_gets_its_share_again() -> None:
    options = SimOptions(instances=4, pool_tokens=ROOMY_TOKENS, speeds=(1.0, 1.0, 1.0, 0.125))
    offline = OfflineRun.of_trace(agents(2_000, rate_per_s=2.0, seed=5), options, make_routing("warm"))
    engines, state = offline._fleet.engines, offline._router.state
    commit, late = state.commit, list[str]()

    def repaired(request: Any, fleet: Any, decision: Any, now_s: float, slowdown: float = 0.0) -> Any:
        if now_s > 60:
            engines["inst-3"].timing = engines["inst-0"].timing
        if now_s > 700:
            late.append(decision.decode_on)
        return commit(request, fleet, decision, now_s, slowdown)

    state.commit = repaired  # type: ignore[method-assign]
    offline.run(lambda _: None)
    assert late.count("inst-3") > 0.1 * len(late) > 30
