"""Generation endpoints: from a complete request body to the exchange and one breakdown row."""

from __future__ import annotations

import asyncio
import logging
import time
from types import MappingProxyType

from policies.row import RequestOutcome, Row
from policies.types import Tenant
from proxy.access.forwarding import request_id_of
from proxy.access.keys import KeyName
from proxy.clients.inbound import Inbound
from proxy.clip import clip
from proxy.core import Core
from proxy.errors import RequestError, dialect_of, draining_error
from proxy.exchange.answer_headers import id_headers
from proxy.exchange.charges import output_tokens
from proxy.exchange.exchange import Exchange
from proxy.exchange.outcomes import outcome_of
from proxy.exchange.short import ShortExchange
from proxy.logs import redact, request_id
from proxy.paths import GENERATION_PATHS, OTHER_METHODS
from proxy.request.bodies import as_utf8
from proxy.request.parse import AT_ONCE_BYTES, Endpoint, Parsed

_OTHER_METHODS = frozenset(method.encode() for method in OTHER_METHODS)
_ENDPOINTS = MappingProxyType({path: Endpoint(path) for path in GENERATION_PATHS})

log = logging.getLogger("warmroute.proxy")


class Generation:
    """``proxy.clients.inbound.Handler``: generation, and short requests, which generate nothing."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.bounds = core.clients
        self.cors = core.cors

    def other_path(self, path: bytes, method: bytes) -> str | None:
        return self._core.other_paths.entry(path) if method in _OTHER_METHODS else None

    def opened(self, inbound: Inbound) -> Row:
        row = Row(request_id_of(inbound.headers), inbound.path, inbound.arrived_unix_s)
        row.trace = self._core.tracing.begin(inbound.headers, inbound.arrived_s)
        return self._core.breakdown.open_row(row)

    def admit(self, inbound: Inbound) -> None:
        self._identify(inbound)

    async def serve(self, inbound: Inbound) -> None:
        """Serve one request. Failures of clients and engines do not raise."""
        row = inbound.row
        request_id.set(row.request_id)
        try:
            await self._serve(inbound, row)
        except RequestError as error:
            row.status, row.error = error.status, error.message
            if row.outcome is RequestOutcome.REJECTED:
                self._log_rejected(inbound, error)
            _send_error(inbound, error, row)
        except Exception as error:
            log.exception("request %s failed", row.request_id)
            row.error = redact(repr(error))
            if inbound.started:  # part of the answer is sent: the only option is to cut the connection
                inbound.abandon()
            else:
                row.status = 500
                answer = RequestError(
                    500, "internal error; see the proxy's log", kind="server_error", code="internal_error"
                )
                _send_error(inbound, answer, row)
        finally:
            self._close_row(row)

    def refuse(self, inbound: Inbound, error: RequestError) -> None:
        row = inbound.row
        row.outcome, row.status, row.error = RequestOutcome.REJECTED, error.status, error.message
        self._log_rejected(inbound, error)
        _send_error(inbound, error, row)
        self._close_row(row)

    def left(self, inbound: Inbound) -> None:
        row = inbound.row
        row.outcome = RequestOutcome.CLIENT_GONE
        self._close_row(row)

    async def _serve(self, inbound: Inbound, row: Row) -> None:
        core = self._core
        try:
            key, tenant = self._identify(inbound)
            if core.draining:  # served: a load balancer may not have noticed yet
                inbound.keep_alive = False
            visit = core.tenants.enter(key, tenant)
        except RequestError:
            if row.outcome is RequestOutcome.INTERNAL_ERROR:
                row.outcome = RequestOutcome.REJECTED
            raise
        endpoint = _ENDPOINTS.get(inbound.path)
        answered: int | None = None
        try:
            if endpoint is not None:
                parsed = await self._parsed(endpoint, inbound, row, allow_priority=visit.allows_priority)
                if row.trace is not None:
                    row.trace.named(parsed.fields.model)
                exchange = Exchange(core, row, inbound, visit)
                try:
                    await exchange.run(parsed)
                finally:
                    whole_tokens = exchange.whole_bytes / core.router.text_ratios.of(endpoint)
                    answered = output_tokens(row, parsed, whole_tokens)
                if endpoint is not Endpoint.COMPLETIONS:
                    self._compare_turns(parsed, row)
            else:
                await ShortExchange(core, row, inbound, allow_priority=visit.allows_priority).run()
        finally:
            visit.close((row.prompt_tokens or 0) + (row.completion_tokens or 0 if answered is None else answered))

    def _identify(self, inbound: Inbound) -> tuple[KeyName | None, Tenant]:
        """Key and tenant. The row has the tenant from here on, also if the request is refused. Raises RequestError."""
        key = self._core.keys.client(inbound.headers)
        tenant = self._core.tenants.of_request(key, inbound.headers)
        inbound.row.tenant = tenant.name or None
        return key, tenant

    def _log_rejected(self, inbound: Inbound, error: RequestError) -> None:
        self._core.rejections.warning(
            f"{error.status} {error.code}" if error.code else str(error.status),
            "rejected %s from %s: %d %s",
            inbound.path,
            inbound.peer,
            error.status,
            clip(error.message, 300),
        )

    def _log_failed(self, row: Row) -> None:
        if row.outcome is RequestOutcome.REJECTED:  # in the log of rejections
            return
        kind = f"{row.status} {row.outcome.value}"
        message = "request %s failed: %s, %s: %s"
        self._core.failures.warning(kind, message, row.request_id, kind, _where(row), clip(row.error or "", 300))

    async def _parsed(self, endpoint: Endpoint, inbound: Inbound, row: Row, *, allow_priority: bool) -> Parsed:
        try:
            given = as_utf8(inbound.body)
            body, row.normalized = self._core.normalizer.normalized(inbound.path, inbound.headers, given)
            router = self._core.router
            if len(body) <= AT_ONCE_BYTES:
                parsed = router.parse(endpoint, body, allow_priority=allow_priority)
            else:
                parsed = await router.parse_fairly(endpoint, body, allow_priority=allow_priority)
            row.stream = parsed.stream
            self._core.check_model(parsed.fields.model)
            if endpoint is Endpoint.RESPONSES:
                parsed = self._core.responses.continued(parsed, time.monotonic())
        except RequestError as error:
            row.outcome = outcome_of(error)
            raise
        except asyncio.CancelledError as error:
            row.outcome = RequestOutcome.SHUTDOWN
            raise draining_error() from error
        return parsed

    def _compare_turns(self, parsed: Parsed, row: Row) -> None:
        """Look for cache killers, after the answer, which they must not fail."""
        if row.outcome is not RequestOutcome.OK:
            return
        try:
            found = self._core.cache_killers.observe(parsed, row)
        except Exception:
            log.exception("request %s could not be compared with the turn before", row.request_id)
        else:
            row.cache_killer = found.rule.value if found else None

    def _close_row(self, row: Row) -> None:
        self._core.breakdown.close_row(row)
        self._core.metrics.record(row)
        self._core.access_log.record(row)
        if row.trace is not None:
            self._core.tracing.finished(row, time.perf_counter())
        if row.status >= 500 or row.outcome is RequestOutcome.STREAM_BROKEN:
            self._log_failed(row)
        elif log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %d %s, %s", row.request_id, row.status, row.outcome.value, _where(row))


def _where(row: Row) -> str:
    """Instance of a request and the failures before it, for the log."""
    where = "not routed" if row.instance is None else f"on {row.instance}"
    return f"{where} after {len(row.attempts)} failed attempt(s)" if row.attempts else where


def _send_error(inbound: Inbound, error: RequestError, row: Row) -> None:
    body = dialect_of(inbound.path).body(error)
    headers = [(b"content-type", b"application/json"), *id_headers(row)]
    if row.held_s:
        headers.append((b"x-warmroute-held-s", b"%.3f" % row.held_s))
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    inbound.start(error.status, headers, len(body))
    inbound.finish(body)
