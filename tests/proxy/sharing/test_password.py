"""A store that refuses the password: the error names the setting to change."""

from __future__ import annotations

import pytest
from redis import Redis

from proxy.settings import load_settings
from proxy.sharing.sharing import replicas_now
from proxy.sharing.store import StoreError
from tests.proxy.sharing.store_server import StoreServer, needs_store

pytestmark = needs_store


@pytest.mark.parametrize(
    ("user", "given", "words"),
    [
        ("", {}, "asks for a password: give sharing.password_env"),
        ("", {"password_env": "STORE_PASSWORD"}, r"environment variable STORE_PASSWORD \(sharing.password_env\): "),
        ("", {"password": "wrong"}, "correct sharing.password: "),
        ("somebody@", {"password": "right"}, "sharing.password, or the user in sharing.url"),
    ],
)
async def test_a_refused_password_names_its_setting(
    store: StoreServer, monkeypatch: pytest.MonkeyPatch, user: str, given: dict[str, str], words: str
) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "wrong")
    with Redis(port=store.port) as client:
        client.config_set("requirepass", "right")
    url = store.url.replace("//", f"//{user}")
    settings = load_settings(None, instances="http://127.0.0.1:8000", sharing={"url": url, **given})
    with pytest.raises(StoreError, match=words):
        await replicas_now(settings)
