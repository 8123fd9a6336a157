"""Differences of settings: every key by its name, secrets masked."""

from __future__ import annotations

from typing import Any

from proxy.settings import Settings, load_settings
from proxy.settings.diff import differences, effective_settings, instance_differences


def settings_of(**more: Any) -> Settings:
    return load_settings(None, **{"instances": [{"url": "http://127.0.0.1:1", "name": "a"}], **more})


def test_differences_name_each_key_and_none_where_nothing_differs() -> None:
    old = settings_of(policy={"name": "linear", "params": {"alpha": 1.0}})
    assert differences(old, settings_of(policy={"name": "linear", "params": {"alpha": 1.0}})) == []
    new = settings_of(policy={"name": "linear"}, sessions={"headers": ("x-a",)}, tokenizer={"threads": 9})
    assert [(each.key, each.old, each.new, each.live) for each in differences(old, new)] == [
        ("policy.params.alpha", 1.0, None, True),
        ("tokenizer.threads", 2, 9, False),
        ("sessions.headers", None, ["x-a"], True),
    ]
    kept = effective_settings(old, new)
    assert (kept.tokenizer.threads, kept.sessions.headers, kept.policy.params) == (2, ("x-a",), {})
    assert [each.key for each in differences(kept, new)] == ["tokenizer.threads"]


def test_differences_of_a_fleet_name_the_instances() -> None:
    (a,) = settings_of().instances
    (b,) = settings_of(instances=[{"url": "http://127.0.0.1:2", "name": "a", "api_key": "s3cret"}]).instances
    assert [each.key for each in instance_differences({"a": a}, {"a": b})] == ["instances.a.url", "instances.a.api_key"]
    assert [str(each) for each in instance_differences({"a": a}, {})] == [
        "instances.a: http://127.0.0.1:1 -> none (applied)"
    ]
    [change] = instance_differences({"a": a}, {})
    assert change.would_be() == "instances.a: http://127.0.0.1:1 -> none (would be applied)"
    assert "s3cret" not in str(instance_differences({"a": a}, {"a": b}))
