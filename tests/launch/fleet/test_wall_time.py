"""Conversion of a proxy's time settings, for engines that run faster than the wall's clock."""

from __future__ import annotations

from typing import Any

import pytest

from launch.fleet.wall_time import in_wall_time
from policies.admission.base import DEFAULT_RULE, MAX_HOLD_S
from policies.costs.order import wait_s


def params(name: str, **given: Any) -> dict[str, Any]:
    found: dict[str, Any] = in_wall_time({"policy": {"name": name, "params": given}}, 20.0)["policy"]["params"]
    return found


def test_times_are_divided_and_nothing_else() -> None:
    assert params("warm", slowdown=0.0) == {"hold_s": 1.5, "step_s": 0.002, "slowdown": 0.0, "answer_s": 0.15}
    given = {"hold_s": 10.0, "pool_share": 0.5, "slowdown": 0.0}
    expected = {"hold_s": 0.5, "step_s": 0.002, "pool_share": 0.5, "slowdown": 0.0, "answer_s": 0.15}
    assert params("warm", **given) == expected
    assert params("smetric") == {"ttft_slo_s": 0.05, "ttft_slo_s_per_1k_tokens": pytest.approx(0.0625 / 20)}
    assert params("linear", alpha=2.0) == {"alpha": 2.0}


def test_an_order_of_prefills_stays_the_same() -> None:
    # A prefill of 2 engine seconds: 12 of them until it is due.
    slowdown = params("warm", slowdown=3.0)["slowdown"]
    assert wait_s(2.0 / 20, slowdown) * 20 == pytest.approx(wait_s(2.0, 3.0)) == pytest.approx(12.0)


def test_the_load_s_half_life_is_one_of_them() -> None:
    assert in_wall_time({}, 20.0)["ledger"] == {"recent_half_life_s": 1.5}
    reported = in_wall_time({"ledger": {"recent_half_life_s": 60.0}, "port": 1}, 2.0)
    assert (reported["ledger"], reported["port"]) == ({"recent_half_life_s": 30.0}, 1)


def test_at_the_wall_s_own_pace_nothing_is_spelt_out() -> None:
    proxy = {"policy": {"name": "warm", "params": {}}}
    assert in_wall_time(proxy, 1.0) is proxy


@pytest.mark.parametrize("policy", [{"name": "nonsense", "params": {"a": 1}}, {"name": "warm", "params": {"a": 1}}])
def test_what_the_fleet_file_will_refuse_is_left_as_it_is(policy: dict[str, Any]) -> None:
    assert in_wall_time({"policy": policy}, 2.0)["policy"] == policy


def test_times_of_an_admission_rule_and_its_bound_are_divided() -> None:
    section = {"name": "working_set", "params": {"fill": 0.9}}
    found = in_wall_time({"admission": section}, 10.0)["admission"]
    assert found == {"name": "working_set", "params": {"fill": 0.9, "keep_s": 3.0}, "max_hold_s": MAX_HOLD_S / 10}
    default = in_wall_time({}, 10.0)["admission"]
    assert default == {"name": DEFAULT_RULE, "params": {"keep_s": 3.0}, "max_hold_s": MAX_HOLD_S / 10}
