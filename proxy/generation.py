"""The generation endpoints as a raw ASGI application: body in, exchange, one breakdown row out."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from proxy.breakdown import Outcome, Row
from proxy.core import Core
from proxy.errors import RequestError
from proxy.exchange import Exchange, Receive, Send
from proxy.parse import Endpoint, Parsed

log = logging.getLogger("warmroute.proxy")

_MAX_REQUEST_ID = 128


class ClientGoneError(Exception):
    """The client left before its body was complete."""


class GenerationApp:
    """Serves POSTs to the paths of ``Endpoint``."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One request. Never raises for what a client or an engine did."""
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")[:_MAX_REQUEST_ID]
        row = Row(given or f"req-{uuid.uuid4().hex}", scope["path"], time.time())
        breakdown = self._core.breakdown
        breakdown.open_row(row)
        try:
            await self._serve(Endpoint(scope["path"]), headers, row, receive, send)
        except RequestError as error:
            row.status, row.error = error.status, error.message
            await _send_error(send, error, row.request_id)
        except ClientGoneError:
            row.outcome = Outcome.CLIENT_GONE
        except Exception as error:
            log.exception("request %s failed", row.request_id)
            row.error = repr(error)
            if row.status:  # part of the answer is out: all that is left is to cut the connection
                raise
            row.status = 500
            told = RequestError(500, "internal error; see the proxy's log", kind="server_error", code="internal_error")
            await _send_error(send, told, row.request_id)
        finally:
            breakdown.close_row(row)
            self._core.metrics.record(row)

    async def _serve(
        self, endpoint: Endpoint, headers: dict[bytes, bytes], row: Row, receive: Receive, send: Send
    ) -> None:
        exchange = Exchange(self._core, row, headers, receive, send)
        try:
            if self._core.draining:
                row.outcome = Outcome.NO_INSTANCE
                raise RequestError(
                    503, "the proxy is shutting down", kind="service_unavailable", code="draining", retry_after_s=1
                )
            body = await self._read_body(headers, receive)
            parsed = self._core.router.parse(endpoint, body)
            self._check_model(parsed)
        except RequestError:
            if row.outcome is Outcome.INTERNAL_ERROR:
                row.outcome = Outcome.REJECTED
            raise
        await exchange.run(parsed)

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body. Raises RequestError 413 or 408, or ClientGoneError."""
        limit = self._core.settings.limits.body_bytes
        too_large = RequestError(
            413, f"the body is larger than {limit} bytes (limits.body_bytes)", code="body_too_large"
        )
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._core.settings.timeouts.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body"):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError as error:
            raise RequestError(408, "the body did not arrive in time (timeouts.body_s)", code="body_timeout") from error

    def _check_model(self, parsed: Parsed) -> None:
        known = {str(model.get("id")) for instance in self._core.instances for model in instance.models}
        if known and parsed.fields.model not in known:
            raise RequestError(
                404,
                f"the model {parsed.fields.model!r} does not exist; served here: {', '.join(sorted(known))}",
                kind="not_found_error",
                code="model_not_found",
                param="model",
            )


async def _send_error(send: Send, error: RequestError, request_id: str) -> None:
    body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode("latin-1")),
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
