"""Compare the clocks of a fleet's machines by the Date header of their HTTP answers."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC
from email.utils import parsedate_to_datetime

import httpx

from launch.doctor.facts import Clock
from launch.fleet.file import FleetFile
from launch.run.proxy_access import ProxyAccess

_TIMEOUT_S = 2.0
_RESOLUTION_S = 2.0
"""A Date header has whole seconds, and servers update it about once a second."""


def ask_clocks(fleet: FleetFile) -> list[Clock]:
    """The clocks of every engine, peer and of the proxy; most do not answer before the fleet runs."""
    targets = [(member.name, fleet.url(member.index)) for member in fleet.members]
    targets += [(peer.name or peer.url, peer.url) for peer in fleet.peers]
    return asyncio.run(_ask_all(targets, fleet))


async def _ask_all(engines: list[tuple[str, str]], fleet: FleetFile) -> list[Clock]:
    access = ProxyAccess(fleet)
    access.read_certificate()
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client, access.client(_TIMEOUT_S) as to_proxy:
        asked = [_ask(name, url, client) for name, url in engines]
        return list(await asyncio.gather(*asked, _ask("the proxy", fleet.proxy_url(), to_proxy)))


async def _ask(name: str, url: str, client: httpx.AsyncClient) -> Clock:
    sent = time.time()
    try:
        response = await client.get(f"{url.rstrip('/')}/health")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Clock(name=name, url=url, error=f"does not answer ({type(error).__name__})")
    received = time.time()
    date = response.headers.get("date")
    try:
        there = parsedate_to_datetime(date or "")
    except ValueError:
        return Clock(name=name, url=url, error="sends no Date header")
    if there.tzinfo is None:
        there = there.replace(tzinfo=UTC)
    return Clock(name=name, url=url, offset_s=certain_offset(there.timestamp(), sent, received))


def certain_offset(date_unix_s: float, sent_unix_s: float, received_unix_s: float) -> float:
    """Smallest possible offset of the other clock in seconds, ahead positive; 0 when it may be right.

    When it wrote the header its clock showed something in [date, date + resolution), at some moment between the local
    times of sending and receiving.
    """
    earliest, latest = date_unix_s - received_unix_s, date_unix_s + _RESOLUTION_S - sent_unix_s
    if earliest > 0:
        return earliest
    return min(0.0, latest)
