"""Arms, their order over repeats, expected durations, and what fits a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.routers.arms import RouterArm, RouterProduct, chosen_arms
from bench.routers.launches import (
    DOCUMENTED,
    PeerEnvironment,
    RouterLaunchError,
    check_arm,
    installed_peer,
    launch_of,
    settings_of,
)
from bench.routers.plan import SETUP_S, RunLength, estimates_of, order_of, plan_lines

BASE = {"port": 9090, "policy": {"name": "linear"}, "grace_s": 2.0, "instances": [{"url": "http://127.0.0.1:1"}]}


def test_an_arm_is_a_product_a_policy_and_options() -> None:
    assert RouterArm.parse("warm") == RouterArm(RouterProduct.WARMROUTE, "warm")
    peer = RouterArm.parse("vllm:cache_aware,balance-abs-threshold=8")
    assert peer == RouterArm(RouterProduct.VLLM, "cache_aware", ("balance-abs-threshold=8",))
    assert peer.label == "vllm:cache_aware,balance-abs-threshold=8"
    assert peer.slug == "vllm-cache_aware-balance-abs-threshold-8"


def test_an_arm_may_name_its_engines() -> None:
    arm = RouterArm.parse("warm,slowdown=0@bounded")
    assert arm == RouterArm(RouterProduct.WARMROUTE, "warm", ("slowdown=0",), "bounded")
    assert arm.label == "warm,slowdown=0@bounded"
    assert arm.slug == "warm-slowdown-0-bounded"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("warm@", "no name of engines"),
        ("nginx:x", "no router nginx"),
        ("vllm:warm", "has no policy warm"),
        ("warm,queue_crowd", "not KEY=VALUE"),
    ],
)
def test_a_wrong_arm_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RouterArm.parse(text)


def test_the_gateway_that_takes_text_only_is_in_comparisons_of_text_only() -> None:
    assert "sglang:cache_aware" in [arm.label for arm in chosen_arms([], "text")]
    assert "sglang:cache_aware" not in [arm.label for arm in chosen_arms([], "tokens")]
    with pytest.raises(ValueError, match="takes text prompts only"):
        chosen_arms(["warm", "sglang:cache_aware"], "tokens")
    with pytest.raises(ValueError, match="given twice"):
        chosen_arms(["warm", "warm"], "tokens")


def test_each_repeat_of_a_load_starts_with_another_arm() -> None:
    arms = chosen_arms(["warm", "joint", "vllm:cache_aware"], "tokens")
    runs = list(order_of(arms, [1.0, 1.5], range(2), "tokens"))
    assert [run.name for run in runs if run.load == 1.5] == [
        "tokens-x1_5-warm-r0",
        "tokens-x1_5-joint-r0",
        "tokens-x1_5-vllm-cache_aware-r0",
        "tokens-x1_5-joint-r1",
        "tokens-x1_5-vllm-cache_aware-r1",
        "tokens-x1_5-warm-r1",
    ]
    assert [run.repeat for run in runs] == [0] * 6 + [1] * 6
    assert len({run.name for run in runs}) == len(runs)


def test_a_repeat_that_is_continued_keeps_its_order() -> None:
    arms = chosen_arms(["warm", "joint"], "tokens")
    whole = list(order_of(arms, [1.0], range(3), "tokens"))
    assert list(order_of(arms, [1.0], range(2, 3), "tokens")) == whole[4:]


def test_a_run_is_expected_to_take_as_long_as_the_longest_of_its_kind() -> None:
    runs = list(order_of(chosen_arms(["warm", "joint"], "tokens"), [1.0, 2.0], range(1), "tokens"))
    known = [RunLength(1.0, "warm", 110.0), RunLength(1.0, "warm", 100.0), RunLength(1.0, "other", 130.0)]
    # warm and joint at load 1, then both at load 2, of which nothing is known.
    assert estimates_of(runs, known, {1.0: 90.0, 2.0: 50.0}) == [110.0, 130.0, 50.0 + SETUP_S, 50.0 + SETUP_S]


def test_the_plan_shows_what_is_done_and_where_the_budget_ends() -> None:
    runs = list(order_of(chosen_arms(["warm", "joint", "lmetric"], "tokens"), [1.0], range(1), "tokens"))
    lines = plan_lines(runs, [100.0] * 3, frozenset({"tokens-x1-warm-r0"}), 150.0)
    assert [line.split(": ")[1] for line in lines] == ["done", "100 s, 100 s in all", "100 s, past the budget"]
    assert all("past" not in line for line in plan_lines(runs, [100.0] * 3, frozenset(), None))


def test_settings_of_an_arm_keep_those_of_the_config() -> None:
    settings = settings_of(RouterArm.parse("warm,queue_crowd=0.5,learned=false"), BASE, 1234)
    assert settings["policy"] == {"name": "warm", "params": {"queue_crowd": 0.5, "learned": False}}
    assert (settings["port"], settings["grace_s"]) == (1234, 2.0)


def test_a_router_does_not_replay_the_events_of_earlier_runs() -> None:
    events = {"url": "http://127.0.0.1:1", "events_url": "tcp://127.0.0.1:2", "events_replay_url": "tcp://127.0.0.1:3"}
    settings = settings_of(RouterArm.parse("warm"), {"instances": [events]}, 1234)
    assert settings["instances"] == [{"url": "http://127.0.0.1:1", "events_url": "tcp://127.0.0.1:2"}]


def test_what_an_arm_lacks_is_reported_before_anything_starts() -> None:
    with pytest.raises(RouterLaunchError, match="unknown"):
        check_arm(RouterArm.parse("no_such_policy"), BASE)
    with pytest.raises(RouterLaunchError, match="events_url"):
        check_arm(RouterArm.parse("vllm:kv_aware"), BASE)
    with pytest.raises(RouterLaunchError, match="peer-path"):
        installed_peer(PeerEnvironment().python, "no-such-router", PeerEnvironment().variables())


def test_a_peer_is_started_with_its_documented_options_and_those_of_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.routers.launches.installed_peer", lambda *_: "1.2")
    arm = RouterArm.parse("vllm:cache_aware,balance-abs-threshold=8")
    launch = launch_of(arm, BASE, tmp_path, PeerEnvironment("python9", tmp_path), "q")
    options = dict(zip(launch.command, launch.command[1:], strict=False))
    assert options["--cache-threshold"] == DOCUMENTED[RouterProduct.VLLM, "cache_aware"]["cache-threshold"]
    assert options["--balance-abs-threshold"] == "8"
    assert launch.command[-1] == "http://127.0.0.1:1"
    assert launch.environment["PYTHONPATH"].split(":")[0] == str(tmp_path)


def test_kv_events_of_the_engines_are_named_to_the_router_that_follows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.routers.launches.installed_peer", lambda *_: "1.2")
    base = {"instances": [{"url": "http://127.0.0.1:1", "events_url": "tcp://127.0.0.1:2"}]}
    launch = launch_of(RouterArm.parse("vllm:kv_aware"), base, tmp_path, PeerEnvironment(), "q")
    options = dict(zip(launch.command, launch.command[1:], strict=False))
    assert options["--kv-event-source"] == "http://127.0.0.1:1=tcp://127.0.0.1:2"
    assert options["--kv-event-model"] == "q"
