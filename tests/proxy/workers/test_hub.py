"""The parent's state: what later workers get, and what stays of ended ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.gather.families import MetricFamily, decode_families, encode_families
from proxy.settings import load_settings
from proxy.sharing.frames import Ask, ChangeRequest, Question
from proxy.sharing.wire import Message, Pin, SharedResponse
from proxy.workers.hub import Hub, KeptState
from proxy.workers.own_settings import own_settings


@pytest.fixture
def hub() -> Hub:
    return Hub(KeptState(3, 60.0, 2, 60.0), tuple)


def pins_of(hub: Hub, now_s: float) -> list[bytes]:
    hub.answer(0, Ask(1, Question.REPLICAS), now_s)
    return [pin.session for pin in hub.answer(0, Ask(2, Question.PINS), now_s).pins]


def with_pins(*sessions: bytes) -> Message:
    return Message("worker-1", 5, pins=tuple(Pin(session, "a", 1, 0.0) for session in sessions))


def test_a_worker_that_starts_gets_the_newest_pins_and_full_messages(hub: Hub) -> None:
    hub.publish(Message("worker-1", 5, full=True, held=2), 0.0)
    hub.publish(with_pins(b"1", b"2", b"3", b"1", b"4"), 1.0)
    assert pins_of(hub, 2.0) == [b"3", b"1", b"4"]
    assert hub.answer(0, Ask(2, Question.PINS), 2.0).pins == ()
    message, age_s = hub.answer(0, Ask(3, Question.REPLICAS), 3.0).replicas[0]
    assert (message.held, age_s) == (2, 3.0)


def test_pins_expire(hub: Hub) -> None:
    hub.publish(with_pins(b"1"), 0.0)
    hub.publish(with_pins(b"2"), 61.0)
    assert pins_of(hub, 61.0) == [b"2"]


def test_a_worker_that_starts_gets_the_newest_stored_responses(hub: Hub) -> None:
    stored = [SharedResponse(f"resp_{number}", "a", "http://a", None, b"", 0) for number in range(3)]
    hub.publish(Message("worker-1", 5, responses=tuple(stored)), 0.0)
    hub.answer(0, Ask(1, Question.REPLICAS), 1.0)
    assert hub.answer(0, Ask(2, Question.RESPONSES), 1.0).responses == tuple(stored[1:])
    assert hub.answer(0, Ask(3, Question.RESPONSES), 1.0).responses == ()


def test_the_others_hear_the_farewell_of_a_killed_worker(hub: Hub) -> None:
    hub.publish(Message("worker-1", 5, full=True), 0.0)
    assert [(each.replica, each.run, each.gone) for each in hub.lost(1)] == [("worker-1", 5, True)]
    assert hub.answer(0, Ask(1, Question.REPLICAS), 1.0).replicas == ()


def test_counters_of_ended_workers_add_up(hub: Hub) -> None:
    for value in (3.0, 4.0):
        hub.shown(1, encode_families([MetricFamily("x", "counter", "", [("x_total", (), value)])]))
        hub.lost(1)
    ended = decode_families(hub.answer(0, Ask(1, Question.ENDED), 0.0).ended)
    assert ended[0].samples == [("x_total", (), 7.0)]


def changes_of(hub: Hub) -> list[str]:
    return [each.target for each in hub.answer(0, Ask(1, Question.CHANGES), 0.0).changes]


def test_changes_are_kept_in_order_until_the_settings_replace_them(hub: Hub) -> None:
    for method, target in (("POST", "/instances"), ("PUT", "/policy"), ("PUT", "/admission"), ("PUT", "/policy")):
        hub.changed(ChangeRequest(method, target, b"{}", "op"))
    assert changes_of(hub) == ["/instances", "/admission", "/policy"]
    hub.reloaded(["policy.name", "timeouts.idle_s"])
    assert changes_of(hub) == ["/instances", "/admission"]


FILE_ENGINE = {"url": "http://127.0.0.1:9001"}


@pytest.mark.parametrize(
    ("method", "target", "name"),
    [
        ("DELETE", "/instances/e1?grace_s=0", "e1"),
        ("PUT", "/instances/e1", "e1"),
        ("POST", "/instances", "e1"),
        ("POST", "/instances", ""),
        ("DELETE", "/instances/127.0.0.1%3A9001", ""),
    ],
)
@pytest.mark.parametrize("field", ["", ".url", ".source", "/0", "/1.host"])
def test_a_change_of_an_instance_is_dropped_once_the_file_replaces_it(
    hub: Hub, method: str, target: str, name: str, field: str
) -> None:
    body = b"" if method == "DELETE" else json.dumps({**FILE_ENGINE, "name": name}).encode()
    hub.changed(ChangeRequest(method, target, body, "op"))
    for other in ("e", "e1.x", "e10", "e1/x", "f1"):
        hub.reloaded([f"instances.{other}.url", f"instances.{other}", "policy.name"])
        assert changes_of(hub) == [target], f"{other} is another instance"
    hub.reloaded([f"instances.{name or '127.0.0.1:9001'}{field}"])
    assert changes_of(hub) == []


def test_a_reload_replaces_policy_planner_rule_and_bound_one_by_one(hub: Hub) -> None:
    policy = {"name": "linear", "params": {"alpha": 2.0}, "planner": "cost_model", "planner_params": {}}
    admission = {"name": "session_cap", "params": {"sessions": 7}, "max_hold_s": 5.0}

    def bodies_after(*keys: str) -> list[dict[str, Any]]:
        for target, body in (("/policy", policy), ("/admission", admission)):
            hub.changed(ChangeRequest("PUT", target, json.dumps(body).encode(), "op"))
        hub.reloaded(keys)
        kept = hub.answer(0, Ask(1, Question.CHANGES), 0.0).changes
        hub.reloaded(["policy.name", "offload.planner", "admission.name", "admission.max_hold_s"])
        assert changes_of(hub) == []
        return [json.loads(each.body) for each in kept]

    planner = {key: policy[key] for key in ("planner", "planner_params")}
    assert bodies_after("policy.params.alpha", "admission.reject_above_s") == [planner, admission]
    rule = {key: admission[key] for key in ("name", "params")}
    assert bodies_after("offload.hold_s", "admission.max_hold_s") == [policy, rule]
    named = {key: policy[key] for key in ("name", "params")}
    assert bodies_after("offload.params.margin", "admission.params.sessions") == [named, {"max_hold_s": 5.0}]


def test_a_change_that_every_worker_refuses_stays_and_a_reload_is_no_fault(hub: Hub) -> None:
    for target, body in (("/instances", b"{"), ("/policy", b"[]"), ("/admission", b"no JSON")):
        hub.changed(ChangeRequest("PUT", target, body, "op"))
    hub.reloaded(["policy.name", "admission.name", "instances.e1"])
    assert changes_of(hub) == ["/instances", "/policy", "/admission"]


def test_a_worker_has_files_and_a_name_of_its_own() -> None:
    settings = load_settings(
        None,
        instances=[{"url": "http://127.0.0.1:9"}],
        workers=2,
        breakdown={"jsonl_path": "/var/log/rows.jsonl"},
        snapshot={"path": "/var/lib/snapshot"},
        sharing={"replica": "east"},
    )
    own = own_settings(settings, 1, 9090, None)
    assert str(own.breakdown.jsonl_path) == "/var/log/rows.worker-1.jsonl"
    assert str(own.snapshot.path) == "/var/lib/snapshot.worker-1"
    assert own.sharing.replica == "worker-1"
    stored = settings.model_copy(update={"sharing": settings.sharing.model_copy(update={"url": "redis://s:1/0"})})
    assert own_settings(stored, 1, 9090, None).sharing.replica == "east-1"
