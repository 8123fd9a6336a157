"""The page of incidents: its remedies against the access rules of a proxy without keys."""

from __future__ import annotations

import re

from proxy.access.keys import Keys
from proxy.access.rules import Access, Listener
from proxy.errors import RequestError
from proxy.settings import load_settings
from tests.monitoring.names import ROOT

CHANGING = re.compile(r"`(POST|PUT|DELETE) (/[^`?]*)[^`]*`")


def test_the_page_names_the_remedies_that_a_proxy_without_keys_refuses() -> None:
    introduction, first, sections = (
        (ROOT / "docs" / "incidents.md").read_text(encoding="utf-8").partition("\n## WarmrouteDown\n")
    )
    assert first
    remedies = set(CHANGING.findall(sections))
    assert set(CHANGING.findall(introduction)) == {each for each in remedies if refused(*each)}


def refused(method: str, path: str) -> bool:
    """True for a request that gets 403 on loopback from a proxy without keys."""
    settings = load_settings(None, instances=[{"url": "http://a"}])
    try:
        Access(settings, Keys(settings.keys)).check(Listener.MAIN, method, path, {b"host": b"127.0.0.1:9090"})
    except RequestError as error:
        return error.status == 403
    return False
