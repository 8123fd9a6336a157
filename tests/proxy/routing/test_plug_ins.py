"""Installed packages whose policy cannot be loaded: a clear error if it is the configured one, else a warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from policies.registry import PolicyLoadError
from proxy.routing.router import Router
from proxy.settings import SettingsError, load_settings
from tests.policies.test_registry import declare

INSTANCES = [{"url": "http://a"}]


@pytest.fixture
def _broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that declares a policy and a planner ``broken``, whose module does not exist."""
    entries = "[warmroute.routing]\nbroken = acme_lost:Policy\n[warmroute.offload]\nbroken = acme_lost:Planner\n"
    declare(tmp_path, "acme-lost", entries)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_broken")
def test_the_settings_name_package_module_and_error_of_the_configured_policy() -> None:
    for section, key, kind in (("policy", "name", "routing policy"), ("offload", "planner", "offload planner")):
        with pytest.raises(SettingsError) as caught:
            load_settings(None, instances=INSTANCES, **{section: {key: "broken"}})
        says = str(caught.value)
        assert f"{section}: " in says
        assert f"{kind} 'broken' of acme-lost (acme_lost:" in says
        assert "cannot be loaded: ModuleNotFoundError: No module named 'acme_lost'" in says


@pytest.mark.usefixtures("_broken")
def test_a_proxy_with_another_policy_starts_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "warmroute.policy")
    router = Router(load_settings(None, instances=INSTANCES))
    assert list(router.broken_policies) == ["broken"]
    assert caplog.messages == [router.broken_policies["broken"]]
    with pytest.raises(PolicyLoadError, match="cannot be loaded"):
        router.switch("broken", {}, None, {})
    assert router.policy.name == "warm"
