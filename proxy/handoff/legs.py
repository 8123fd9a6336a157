"""Hand-off of a prefilled KV cache: the P leg, P's identity, and monitoring P while D pulls."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from policies.types import OffloadReason
from proxy.access.forwarding import Forwarding
from proxy.engines.control import Control
from proxy.engines.shortage import own_shortage
from proxy.engines.status import is_failure
from proxy.engines.upstream import NoSocketError, Upstream, UpstreamError
from proxy.fleet.instances import Instance
from proxy.fleet.model_lists import is_model_missing
from proxy.handoff.connectors import DIALECTS, engine_ids_of
from proxy.request.bodies import (
    NO_PRIORITIES,
    Priorities,
    decode_leg,
    finish_reason_of,
    prefill_leg,
    transfer_params_of,
)
from proxy.request.usage import Usage, usage_of_answer
from proxy.settings import OffloadSettings

_NOTHING_SENT = frozenset(("stop", "abort"))
"""Finish reasons of a P leg whose KV was freed: D would wait for it. Connectors send only what ended by length."""


class OffloadFailedError(Exception):
    """A failed hand-off."""

    def __init__(
        self,
        reason: OffloadReason,
        message: str,
        *,
        by_prefill: bool = False,
        received: bool = False,
        lacks_model: bool = False,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.by_prefill = by_prefill
        """P failed as it would have failed any request: not connected, broken off, late, or 5xx."""
        self.received = received
        """P failed after it had received the request."""
        self.lacks_model = lacks_model
        """P does not serve the request's model any more."""
        self.refused = refused
        """P or D refused the request: its client may be at fault."""


class HandedOff(NamedTuple):
    """A successful P leg: the body for D, P's usage, and P's engine id."""

    body: bytes
    usage: Usage | None
    engine_id: str | None


class HandOff:
    """Runs P legs and monitors P. The D leg is an ordinary request with the returned body."""

    def __init__(self, settings: OffloadSettings, upstream: Upstream, control: Control, forwarding: Forwarding) -> None:
        self._forwarding = forwarding
        self._settings = settings
        self._upstream = upstream
        self._control = control

    def apply(self, settings: OffloadSettings) -> None:
        """Apply other settings to hand-offs that begin from now on."""
        self._settings = settings

    async def prefill(
        self,
        prefill: Instance,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        priorities: Priorities = NO_PRIORITIES,
    ) -> HandedOff:
        """Prefill on P within its bound, then verify that P is still the same engine.

        Raises:
            OffloadFailedError: with the reason; D has not received anything.
        """
        dialect = DIALECTS[prefill.settings.connector]
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        engine_id = (prefill.engine_id if dialect.needs_bootstrap else None) or await self._identity(prefill)
        try:
            async with asyncio.timeout(self._settings.prefill_timeout_s):
                leg = prefill_leg(body, dialect.prefill_params(transfer_id), priorities.prefill)
                answer = await self._upstream.post(prefill.url + path, leg, headers)
                try:
                    status, content = answer.status, await answer.read()
                finally:
                    answer.close()
        except TimeoutError as error:
            raise OffloadFailedError(
                OffloadReason.FELL_BACK_P_TIMEOUT,
                f"P leg took over {self._settings.prefill_timeout_s} s",
                by_prefill=True,
                received=True,
            ) from error
        except UpstreamError as error:
            own = isinstance(error, NoSocketError)
            raise OffloadFailedError(
                OffloadReason.FELL_BACK_P_ERROR, str(error), by_prefill=not own, received=error.seen
            ) from error
        if status != 200:
            failed = is_failure(status)
            raise OffloadFailedError(
                OffloadReason.FELL_BACK_P_ERROR,
                f"P answered {status}",
                by_prefill=failed,
                received=failed,
                lacks_model=status == 404 and is_model_missing(content),
                refused=not failed,
            )
        if (reason := finish_reason_of(content)) in _NOTHING_SENT:
            raise OffloadFailedError(
                OffloadReason.FELL_BACK_P_ERROR, f"P ended with '{reason}', after which it does not send"
            )
        await self._check_unchanged(prefill, engine_id)
        try:
            params = dialect.decode_params(
                transfer_id, transfer_params_of(content), engine_id, prefill.settings.bootstrap_url
            )
        except ValueError as error:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_ERROR, str(error)) from error
        return HandedOff(decode_leg(body, params, priorities.decode), usage_of_answer(content), engine_id)

    async def _check_unchanged(self, prefill: Instance, engine_id: str | None) -> None:
        """Raise OffloadFailedError unless P, which has answered, is still the same engine."""
        try:
            now = await self._identity(prefill)
        except OffloadFailedError as error:
            error.received = True
            raise
        if now != engine_id:
            raise OffloadFailedError(
                OffloadReason.FELL_BACK_P_IDENTITY, "P restarted during the hand-off", received=True
            )

    async def watch(self, prefill: Instance, engine_id: str | None) -> str:
        """Return a description once P is no longer the engine that holds the KV; else wait forever.

        An engine that died or restarted will never send, and D would not notice for minutes. One refused connection is
        sufficient; a slow answer is not, because a long prefill may hold a live engine's interpreter for seconds.
        """
        while True:
            await asyncio.sleep(self._settings.watch_interval_s)
            try:
                if await self._identity(prefill) != engine_id:
                    return "P restarted while D pulled"
            except OffloadFailedError as error:
                if isinstance(error.__cause__, httpx.ConnectError) and own_shortage(error.__cause__) is None:
                    return f"P disappeared while D pulled: {error}"

    async def alive(self, instance: Instance) -> bool:
        """True if an instance's ``/health`` answers 200 within ``offload.query_timeout_s``, or cannot be asked."""
        try:
            answer = await self._health(instance)
        except httpx.HTTPError as error:
            return own_shortage(error) is not None
        return answer.status_code == 200

    async def _health(self, instance: Instance) -> httpx.Response:
        headers = self._forwarding.probe_headers(instance.settings)
        return await self._control.get(f"{instance.url}/health", headers, self._settings.query_timeout_s)

    async def _identity(self, prefill: Instance) -> str | None:
        """P's engine id; for a connector without a bootstrap server None, once P's ``/health`` answers.

        Raises:
            OffloadFailedError: no answer, or an invalid one.
        """
        bootstrap_url = prefill.settings.bootstrap_url
        try:
            if not DIALECTS[prefill.settings.connector].needs_bootstrap:
                (await self._health(prefill)).raise_for_status()
                return None
            if bootstrap_url is None:
                raise OffloadFailedError(OffloadReason.FELL_BACK_P_IDENTITY, f"{prefill.name} has no bootstrap_url")
            bound_s = self._settings.query_timeout_s
            return await query_engine_id(self._control, bootstrap_url, bound_s, prefill.rank)
        except (httpx.HTTPError, ValueError) as error:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_IDENTITY, f"P's identity is unknown: {error}") from error


async def query_engine_ids(control: Control, bootstrap_url: str, timeout_s: float) -> dict[int, str]:
    """Engine ids by data-parallel rank, from a bootstrap server's ``/query``.

    Raises:
        httpx.HTTPError: no answer.
        ValueError: an unexpected answer.
    """
    answer = await control.get(f"{bootstrap_url}/query", timeout_s=timeout_s)
    answer.raise_for_status()
    try:
        return engine_ids_of(answer.content)
    except ValueError as error:
        raise ValueError(f"unexpected /query answer from {bootstrap_url}: {error}") from error


async def query_engine_id(control: Control, bootstrap_url: str, timeout_s: float, rank: int | None = None) -> str:
    """Engine id of one data-parallel rank (None: the first). Raises as ``query_engine_ids``."""
    found = (await query_engine_ids(control, bootstrap_url, timeout_s)).get(rank or 0)
    if found is None:
        raise ValueError(f"no data-parallel rank {rank or 0} in the /query answer from {bootstrap_url}")
    return found
