"""Read the conditions of a running proxy."""

from __future__ import annotations

import asyncio

import httpx
import msgspec

from launch.doctor.facts import ProxyCondition, ProxyConditions
from launch.fleet.file import FleetFile
from launch.run.proxy_access import ProxyAccess

_TIMEOUT_S = 2.0


class _Answer(msgspec.Struct):
    conditions: list[ProxyCondition]


def ask_proxy(fleet: FleetFile | None, url: str | None) -> ProxyConditions | None:
    """Conditions of the proxy at ``url``, else of the fleet's proxy; None without either."""
    if url is None and fleet is None:
        return None
    return asyncio.run(_ask(fleet, url))


async def _ask(fleet: FleetFile | None, url: str | None) -> ProxyConditions:
    if url is not None or fleet is None:
        client, base = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False), url or ""
    else:
        access = ProxyAccess(fleet)
        access.read_certificate()
        client, base = access.client(_TIMEOUT_S), fleet.proxy_url()
    async with client:
        try:
            answer = await client.get(f"{base.rstrip('/')}/ready?verbose")
            found = msgspec.json.decode(answer.content, type=_Answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return ProxyConditions(url=base, error=f"does not answer ({type(error).__name__})")
        except msgspec.MsgspecError:
            return ProxyConditions(url=base, error=f"answered {answer.status_code} without conditions")
    return ProxyConditions(url=base, conditions=found.conditions)
