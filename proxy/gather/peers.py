"""Requests of one worker to all, itself included, over their Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from proxy.errors import RequestError
from proxy.gather.place import Place
from proxy.sharing.line import LineError

log = logging.getLogger("warmroute.workers")

ADMIN_KEY = "x-warmroute-admin-key"
"""Header with the name of the admin key that a worker has checked, on these sockets only."""
READ_S = 10.0
"""Bound on an answer that changes nothing."""
PROBE_S = 0.5
"""Bound on another worker's part in an answer to a probe: load balancers wait 1 s and more for theirs."""


class PeerAnswer(NamedTuple):
    """Answer of one worker."""

    worker: int
    status: int
    content_type: str
    body: bytes

    @property
    def ok(self) -> bool:
        """True unless it is an error."""
        return self.status < 400

    def json(self) -> Any:
        """Its body. Raises msgspec.MsgspecError."""
        return msgspec.json.decode(self.body)


class Peers:
    """Clients of all workers' sockets. ``close`` ends their connections."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._clients: dict[int, httpx.AsyncClient] = {}
        self._silent: dict[int, float] = {}

    def silent_s(self, worker: int) -> float:
        """Time since the first question of the worker's silence; 0 if its last answer came."""
        return time.monotonic() - self._silent.get(worker, time.monotonic())

    async def listed(self) -> list[int]:
        """Workers that can be asked. Raises RequestError (503) without the parent."""
        try:
            return [each.worker for each in await self._place.roster() if each.listed]
        except LineError as error:
            raise RequestError(503, str(error), kind="service_unavailable", code="workers_unknown") from error

    async def ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        within_s: float = READ_S,
        others_within_s: float | None = None,
    ) -> list[PeerAnswer]:
        """Answers of all workers in the order of their numbers, without those that have ended or do not answer.

        Args:
            method, target, headers, body: the request.
            within_s: bound on each answer.
            others_within_s: bound on those of the other workers; None: the same.
        """
        own, others = self._place.number, within_s if others_within_s is None else others_within_s
        asked = (
            self.ask_one(number, method, target, headers, body, within_s if number == own else others)
            for number in await self.listed()
        )
        answers = [each for each in await asyncio.gather(*asked) if each is not None]
        if not answers:
            raise RequestError(503, "no worker answers", kind="service_unavailable", code="workers_unknown")
        return answers

    async def ask_one(
        self, worker: int, method: str, target: str, headers: Mapping[str, str], body: bytes, within_s: float
    ) -> PeerAnswer | None:
        """Answer of one worker; None if it has ended or does not answer in time."""
        try:
            async with asyncio.timeout(within_s):
                answer = await self._client(worker).request(method, target, headers=dict(headers), content=body)
        except TimeoutError:
            self._silent_now(worker, method, target, f"no answer within {within_s:g} s")
            return None
        except httpx.HTTPError as error:
            self._silent_now(worker, method, target, str(error) or type(error).__name__)
            return None
        if worker in self._silent:
            log.info("worker %d answers again, after %.1f s", worker, self.silent_s(worker))
            del self._silent[worker]
        return PeerAnswer(worker, answer.status_code, answer.headers.get("content-type", ""), answer.content)

    @contextlib.asynccontextmanager
    async def stream(self, worker: int, target: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """An answer that does not end soon. Raises httpx.HTTPError."""
        async with self._client(worker).stream("GET", target, headers=dict(headers)) as answer:
            yield answer

    async def close(self) -> None:
        """Close all connections."""
        clients, self._clients = list(self._clients.values()), {}
        for each in clients:
            await each.aclose()

    def _silent_now(self, worker: int, method: str, target: str, reason: str) -> None:
        """Log the beginning of a silence: probes would repeat it every few seconds."""
        if worker not in self._silent:
            self._silent[worker] = time.monotonic()
            log.warning("worker %d does not answer %s %s: %s", worker, method, target.partition("?")[0], reason)

    def _client(self, worker: int) -> httpx.AsyncClient:
        client = self._clients.get(worker)
        if client is None:
            # Connections are not kept: the worker at the other end may be another process by the next request.
            transport = httpx.AsyncHTTPTransport(
                uds=str(self._place.socket(worker)), limits=httpx.Limits(max_keepalive_connections=0)
            )
            client = self._clients[worker] = httpx.AsyncClient(
                transport=transport, base_url="http://worker", timeout=httpx.Timeout(None, connect=5.0)
            )
        return client


def answered(answers: Sequence[PeerAnswer], number: int) -> PeerAnswer:
    """The answer of worker ``number``, or the first."""
    return next((each for each in answers if each.worker == number), answers[0])
