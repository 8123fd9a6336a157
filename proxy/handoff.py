"""The hand-off of a prefilled KV cache: the P leg and P's identity."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from typing import NamedTuple

import httpx
import msgspec

from policies.types import OffloadReason
from proxy.bodies import decode_leg, prefill_leg
from proxy.instances import Instance
from proxy.settings import OffloadSettings
from proxy.upstream import Upstream, UpstreamError
from proxy.usage import Usage, usage_of_answer


class OffloadFailedError(Exception):
    """The P leg did not end with a KV cache that D may pull."""

    def __init__(self, reason: OffloadReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class HandedOff(NamedTuple):
    """A P leg that went well: the body for D, and what P computed."""

    body: bytes
    usage: Usage | None


class HandOff:
    """Runs P legs. The D leg is an ordinary request with the body this returns."""

    def __init__(self, settings: OffloadSettings, upstream: Upstream, control: httpx.AsyncClient) -> None:
        self._settings = settings
        self._upstream = upstream
        self._control = control

    async def prefill(self, prefill: Instance, path: str, body: bytes, headers: Mapping[str, str]) -> HandedOff:
        """Prefill on P under its bound, then make sure P is still the engine that did it.

        Raises:
            OffloadFailedError: with the reason; D has not been touched.
        """
        transfer_id = f"xfer-{uuid.uuid4().hex}"
        engine_id = prefill.engine_id or await self._identity(prefill)
        try:
            async with asyncio.timeout(self._settings.prefill_timeout_s):
                answer = await self._upstream.post(prefill.url + path, prefill_leg(body, transfer_id), headers)
                try:
                    status, content = answer.status, await answer.read()
                finally:
                    answer.close()
        except TimeoutError as error:
            raise OffloadFailedError(
                OffloadReason.FELL_BACK_P_TIMEOUT, f"P leg took over {self._settings.prefill_timeout_s} s"
            ) from error
        except UpstreamError as error:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_ERROR, str(error)) from error
        if status != 200:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_ERROR, f"P answered {status}")
        if await self._identity(prefill) != engine_id:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_IDENTITY, "P restarted during the hand-off")
        assert prefill.settings.bootstrap_url is not None
        return HandedOff(
            decode_leg(body, transfer_id, engine_id, prefill.settings.bootstrap_url), usage_of_answer(content)
        )

    async def _identity(self, prefill: Instance) -> str:
        if prefill.settings.bootstrap_url is None:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_IDENTITY, f"{prefill.name} has no bootstrap_url")
        try:
            return await query_engine_id(self._control, prefill.settings.bootstrap_url, self._settings.query_timeout_s)
        except (httpx.HTTPError, ValueError) as error:
            raise OffloadFailedError(OffloadReason.FELL_BACK_P_IDENTITY, f"/query of P: {error}") from error


async def query_engine_id(control: httpx.AsyncClient, bootstrap_url: str, timeout_s: float) -> str:
    """Engine id from a bootstrap server's ``/query`` (data-parallel rank 0).

    Raises:
        httpx.HTTPError: no answer.
        ValueError: an answer of another shape.
    """
    answer = await control.get(f"{bootstrap_url}/query", timeout=timeout_s)
    answer.raise_for_status()
    try:
        engine_id = msgspec.json.decode(answer.content)["0"]["engine_id"]
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise ValueError(f"unexpected /query answer from {bootstrap_url}: {error!r}") from error
    return str(engine_id)
