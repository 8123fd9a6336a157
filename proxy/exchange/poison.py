"""Guard against requests that kill engines: at most two engines, whatever ``limits.max_attempts`` permits.

A request whose engine failed is retried, because the cause is usually the engine. If a second engine fails under it,
both are asked if they still serve: no first retry is delayed, and an engine that only broke its connection is no death.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import NamedTuple

import httpx

from proxy.core import Core
from proxy.fleet.instances import Instance
from proxy.handoff.legs import query_engine_id

log = logging.getLogger("warmroute.poison")

_STARTED = re.compile(r"^process_start_time_seconds\s+(\S+)", re.MULTILINE)
_DEATHS = 2
"""Deaths that make a request one that kills engines; one may be a coincidence."""


class _Suspected(NamedTuple):
    """An engine that failed under the request, as it was known at that moment."""

    instance: Instance
    restarts: int
    engine_id: str | None
    started_unix_s: float | None


class PoisonGuard:
    """The engines that failed after they had received one request."""

    def __init__(self, core: Core, request_id: str) -> None:
        self._core = core
        self._request_id = request_id
        self._suspected: dict[str, _Suspected] = {}
        self._asked = 0
        self._dead: list[str] = []

    def suspect(self, instance: Instance) -> None:
        """Record that an attempt or a leg failed on an engine that had received the request."""
        if instance.url not in self._suspected:  # ranks of one engine die together
            self._suspected[instance.url] = _Suspected(
                instance, instance.restarts, instance.engine_id, instance.started_unix_s
            )

    async def dead(self) -> list[str]:
        """Names of the engines that the request probably killed; empty unless it killed two.

        Waits for the engines' answers, at most ``health.timeout_s`` each.
        """
        if len(self._suspected) < _DEATHS or self._asked == len(self._suspected):
            return self._dead
        self._asked = len(self._suspected)
        suspected = list(self._suspected.values())
        died = await asyncio.gather(*(self._died(each) for each in suspected))
        dead = [each.instance.name for each, is_dead in zip(suspected, died, strict=True) if is_dead]
        if len(dead) >= _DEATHS and not self._dead:
            self._dead = dead
            log.warning(
                "request %s is not sent to another engine: %s died while serving it",
                self._request_id,
                " and ".join(dead),
            )
        return self._dead

    async def _died(self, before: _Suspected) -> bool:
        """True if the engine is down or another process; an engine that is only slow is not."""
        instance = before.instance
        if instance.restarts != before.restarts:
            return True
        try:
            async with asyncio.timeout(self._core.settings.health.timeout_s):
                if (await self._get(instance, "/health")).is_error:
                    return True
                return await self._replaced(before)
        except (TimeoutError, httpx.TimeoutException, ValueError):
            return False
        except httpx.HTTPError:
            return True

    async def _replaced(self, before: _Suspected) -> bool:
        """True if the engine reports another start, or where it reports none, another id."""
        instance = before.instance
        if before.started_unix_s is not None:
            started = _STARTED.search((await self._get(instance, "/metrics")).text)
            return started is not None and float(started[1]) != before.started_unix_s
        url = instance.settings.bootstrap_url
        if url is None or before.engine_id is None:
            return False
        bound_s = self._core.settings.offload.query_timeout_s
        return await query_engine_id(self._core.control, url, bound_s, instance.rank) != before.engine_id

    async def _get(self, instance: Instance, path: str) -> httpx.Response:
        headers = self._core.forwarding.probe_headers(instance.settings)
        return await self._core.control.get(instance.url + path, headers)
