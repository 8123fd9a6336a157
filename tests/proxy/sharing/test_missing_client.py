"""Shared state without the extra `redis`: the proxy does not start, and the error has the remedy."""

from __future__ import annotations

import sys

import pytest

from proxy.core import Core
from proxy.settings import SettingsError, load_settings


def test_a_store_without_its_client_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "proxy.sharing.redis_store", raising=False)
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    settings = load_settings(None, instances="http://127.0.0.1:8000", sharing={"url": "redis://127.0.0.1"})
    with pytest.raises(SettingsError, match=r"pip install 'warmroute\[redis\]'"):
        Core(settings)
