"""Too few file descriptors for the connections that the settings allow: reported at the start."""

from __future__ import annotations

import logging
import resource

import pytest

from proxy import logs
from proxy.clients import bounds
from proxy.settings import Settings
from proxy.start import begin as starting
from proxy.start.begin import begin


def settings(connections: int | None) -> Settings:
    limits = {} if connections is None else {"connections": connections}
    return Settings.model_validate({"instances": [{"url": "http://127.0.0.1:9"}], "limits": limits})


@pytest.mark.parametrize(("connections", "warned"), [(5000, True), (705, True), (704, False), (None, False)])
def test_connections_beyond_the_descriptors_are_reported(
    connections: int | None, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (1024, 1024))
    monkeypatch.setattr(logs, "configure", lambda *_arguments: None)
    monkeypatch.setattr(starting, "check_addresses", lambda _settings: None)
    with caplog.at_level(logging.WARNING, "warmroute.server"):
        begin(settings(connections))
    found = [each for each in caplog.messages if each.startswith("limits.connections")]
    assert found == (
        [
            f"limits.connections is {connections}, but this process may have 1024 open files, enough for 704 clients "
            "beside the connections to engines: raise the limit (ulimit -n, LimitNOFILE= of a systemd unit) or lower "
            "limits.connections"
        ]
        if warned
        else []
    )


def test_nothing_is_reported_without_a_limit_on_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    unlimited = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (unlimited, unlimited))
    assert bounds.few_descriptors(settings(5000)) is None
