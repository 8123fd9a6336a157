"""The leak watch with sequences of readings."""

from __future__ import annotations

import pytest

from proxy.fleet.instances import RECYCLE_PATIENCE_S, Instance, Instances
from proxy.handoff.leaks import LeakWatch
from proxy.settings import HealthSettings, InstanceSettings

POOL = 100_000
LEAKED = 20_000
READINGS = 5


@pytest.fixture
def fleet() -> Instances:
    instances = Instances(
        tuple(InstanceSettings(url=f"http://127.0.0.1:{port}", name=name) for port, name in enumerate("abc", 1)),
        HealthSettings(),
    )
    for instance in instances:
        instance.kv_capacity_tokens = POOL
        instance.healthy = True
    return instances


def show(watch: LeakWatch, instance: Instance, *used: int, expected: int = 0) -> str | None:
    for tokens in used:
        watch.observe(instance, tokens, expected)
    return instance.recycle_wanted


def test_kv_that_nothing_explains_after_an_abandoned_pull_is_a_leak(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("a")
    watch.abandoned("a")
    assert show(watch, fleet["a"], *[LEAKED] * (READINGS - 1)) is None
    assert show(watch, fleet["a"], LEAKED) == (
        "20000 tokens of KV are in use without a request, after 2 abandoned pull(s)"
    )
    assert fleet.healthy() == {"b", "c"}


def test_without_an_abandoned_pull_no_reading_means_anything(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("b")
    assert show(watch, fleet["a"], *[POOL] * 50) is None


def test_a_pool_of_unknown_size_cannot_leak(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("a")
    fleet["a"].kv_capacity_tokens = 0
    assert show(watch, fleet["a"], *[LEAKED] * 50) is None


def test_what_requests_and_holds_explain_is_no_leak(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("a")
    assert show(watch, fleet["a"], *[70_000] * 20, expected=60_001) is None
    assert show(watch, fleet["a"], *[70_000] * READINGS, expected=60_000) is not None


def test_one_explained_reading_resets_the_count(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("a")
    for _ in range(5):
        assert show(watch, fleet["a"], *[LEAKED] * (READINGS - 1), 5_000) is None
    assert show(watch, fleet["a"], *[LEAKED] * READINGS) is not None


def test_a_small_share_is_tolerated(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.5)
    watch.abandoned("a")
    assert show(watch, fleet["a"], *[49_999] * 20) is None
    assert show(watch, fleet["a"], *[50_000] * READINGS) is not None


def test_one_instance_at_a_time_is_asked_to_restart(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    for name in "abc":
        watch.abandoned(name)
    assert show(watch, fleet["b"], *[LEAKED] * READINGS) is not None
    assert show(watch, fleet["a"], *[LEAKED] * 20) is None
    assert fleet.healthy() == {"a", "c"}
    watch.restarted(fleet["b"])
    assert fleet["b"].recycle_wanted is None
    assert show(watch, fleet["a"], LEAKED) is not None


def test_a_restart_forgets_the_leak_and_the_abandoned_pulls(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("a")
    show(watch, fleet["a"], *[LEAKED] * READINGS)
    watch.restarted(fleet["a"])
    assert show(watch, fleet["a"], *[LEAKED] * 20) is None
    assert fleet.healthy() == {"a", "b", "c"}
    watch.abandoned("a")
    assert show(watch, fleet["a"], *[LEAKED] * (READINGS - 1)) is None


def test_an_instance_that_is_not_restarted_serves_again_after_a_while(fleet: Instances) -> None:
    watch = LeakWatch(fleet, 0.1)
    watch.abandoned("a")
    show(watch, fleet["a"], *[LEAKED] * READINGS)
    fleet["a"].recycle_wanted_at_s -= RECYCLE_PATIENCE_S
    assert fleet.healthy() == {"a", "b", "c"}
    assert fleet["a"].recycle_wanted is not None
