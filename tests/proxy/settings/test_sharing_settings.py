"""Settings of shared state: what is accepted, and that passwords stay out of files and sight."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.settings import SettingsError, load_settings

FLEET: dict[str, Any] = {"instances": "http://127.0.0.1:8000"}


@pytest.mark.parametrize("url", ["redis://store:6379/0", "rediss://user@store/1", "unix:///run/redis.sock"])
def test_urls_of_stores_are_accepted(url: str) -> None:
    assert load_settings(None, **FLEET, sharing={"url": url}).sharing.url == url


@pytest.mark.parametrize(
    ("sharing", "problem"),
    [
        ({"url": "http://store"}, "give redis://"),
        ({"url": "redis://"}, "give redis://"),
        ({"url": "redis://:secret@store"}, "password_env"),
        ({"replica": "a b"}, "letters, digits"),
        ({"ttl_s": 1.0, "publish_interval_s": 0.5}, "a quarter of ttl_s"),
        ({"password": "one", "password_env": "HOME"}, "give one of them"),
        ({"password_env": "NO_SUCH_VARIABLE"}, "is not set; set it to the store's password"),
    ],
)
def test_settings_that_cannot_work_are_refused(sharing: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as error:
        load_settings(None, **FLEET, sharing=sharing)
    assert "secret" not in str(error.value)


def test_the_password_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "open-sesame")
    settings = load_settings(None, **FLEET, sharing={"url": "redis://store", "password_env": "STORE_PASSWORD"})
    password = settings.sharing.store_password()
    assert password is not None
    assert password.get_secret_value() == "open-sesame"
    assert "open-sesame" not in repr(settings)
