"""Requests that generate nothing: counting the tokens of a message, reading and cancelling a stored response."""

from __future__ import annotations

import asyncio
import time

from policies.row import RequestOutcome, Row
from proxy.clients.inbound import Inbound
from proxy.clients.protocol import CANCEL, COUNT_TOKENS, STORED
from proxy.core import Core
from proxy.engines.upstream import Answer, NoSocketError, NotAcceptedError, NotConnectedError, UpstreamError
from proxy.errors import AttemptFailedError, RequestError, dialect_of, draining_error
from proxy.exchange.attempts import Attempts
from proxy.exchange.relay import stream_relay
from proxy.exchange.while_connected import while_connected
from proxy.fleet.instances import Instance
from proxy.request.parse import Endpoint
from proxy.request.typed_events import RESPONSE_EVENTS, TypedEvents

SHORT_PATHS = frozenset((COUNT_TOKENS, STORED, CANCEL))


class ShortExchange:
    """Serves one such request. It is on no ledger, takes no place in flight, and waits in no queue."""

    def __init__(self, core: Core, row: Row, inbound: Inbound) -> None:
        self._core = core
        self._row = row
        self._inbound = inbound

    async def run(self) -> None:
        """Serve the request until it is answered or its client leaves.

        Raises:
            RequestError: it is refused, or no instance could serve it.
        """
        serving = self._count() if self._inbound.path == COUNT_TOKENS else self._of_stored()
        try:
            await while_connected(self._inbound, self._row, serving, self._cut_short)
        finally:
            self._row.stages_ms["total"] = (time.perf_counter() - self._inbound.arrived_s) * 1e3

    def _cut_short(self) -> None:
        if not self._inbound.started:
            raise draining_error()
        if not self._inbound.response_complete:
            self._inbound.abandon()

    async def _count(self) -> None:
        """Have the least loaded instance that serves the model count; another one if it fails."""
        core, row = self._core, self._row
        try:
            model = (await core.router.parse_fairly(Endpoint.MESSAGES, self._inbound.body)).fields.model
            core.check_model(model)
        except RequestError:
            row.outcome = RequestOutcome.REJECTED
            raise
        core.retries.arrived(time.monotonic())
        attempts = Attempts(core, row, self._inbound.headers)
        failure: AttemptFailedError | None = None
        for _ in range(core.settings.limits.max_attempts):
            if failure is not None and not await attempts.may_follow(failure, model):
                break
            candidates = core.instances.candidates(model) - attempts.tried
            if not candidates:
                break
            name = min(sorted(candidates), key=core.router.state.ledger.requests)
            try:
                await self._pass_on(core.instances.chosen(name))
            except AttemptFailedError as error:
                failure = attempts.failed(error, after=failure)
            else:
                return
        try:
            raise await attempts.give_up(failure)
        finally:
            del failure  # it references this frame

    async def _of_stored(self) -> None:
        """Pass a request for a stored response to the engine that has it."""
        response_id = self._inbound.target.partition("?")[0].split("/")[3]
        try:
            instance = self._core.responses.instance_of(response_id, "response_id", time.monotonic())
        except RequestError as error:
            self._row.outcome = RequestOutcome.NO_INSTANCE if error.status == 503 else RequestOutcome.REJECTED
            raise
        attempts = Attempts(self._core, self._row, self._inbound.headers)
        try:
            await self._pass_on(instance)
        except AttemptFailedError as error:
            raise await attempts.give_up(attempts.failed(error, after=None)) from error

    async def _pass_on(self, instance: Instance) -> None:
        """Send the request to one instance and its answer to the client. Raises AttemptFailedError."""
        answer, first = await self._open(instance)
        try:
            row, inbound = self._row, self._inbound
            streamed = _is_stream(answer)
            row.status, row.stream = answer.status, streamed
            row.outcome = RequestOutcome.OK if answer.status < 400 else RequestOutcome.ENGINE_REFUSED
            headers = [
                (b"content-type", answer.headers.content_type.encode("latin-1")),
                *answer.headers.passed,
                (b"x-request-id", row.request_id.encode("latin-1")),
                (b"x-warmroute-instance", instance.name.encode("latin-1")),
            ]
            inbound.start(answer.status, headers, None if streamed else len(first))
            closing = await self._relay(answer, first, instance) if streamed else first
            inbound.finish(closing)
        finally:
            answer.close()

    async def _open(self, instance: Instance) -> tuple[Answer, bytes]:
        """Head and first piece of the answer, the whole of it unless it is a stream. Raises AttemptFailedError.

        Only a refused connection counts against the instance: such requests say little about generation.
        """
        core, inbound = self._core, self._inbound
        bound_s = core.settings.timeouts.first_byte_s
        answer: Answer | None = None
        opened = False
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(bound_s):
                answer = await core.upstream.send(
                    inbound.method, instance.url + inbound.target, inbound.body, self._headers(instance)
                )
                first = await (answer.chunk() if _is_stream(answer) else answer.read())
            if answer.status >= 500 or (
                answer.status == 401 and core.forwarding.replaces_authorization(instance.settings)
            ):
                raise UpstreamError(f"answered {answer.status}: {first[:200].decode('utf-8', 'replace')}")
            opened = True
        except TimeoutError as error:
            raise AttemptFailedError(instance.name, f"no answer within {bound_s:g} s", timed_out=True) from error
        except UpstreamError as error:
            if isinstance(error, NotConnectedError) and not isinstance(error, NoSocketError | NotAcceptedError):
                core.instances.failed(instance, str(error), refused=True, sent_s=sent_s)
            own = isinstance(error, NoSocketError)
            raise AttemptFailedError(instance.name, str(error), seen=error.seen, own=own) from error
        finally:
            if answer is not None and not opened:
                answer.close()
        return answer, first

    async def _relay(self, answer: Answer, first: bytes, instance: Instance) -> bytes:
        """Relay a stream; returns the error event for the client if it breaks off."""
        row, timeouts = self._row, self._core.settings.timeouts
        keep = TypedEvents(RESPONSE_EVENTS)
        try:
            await stream_relay(answer, self._inbound, keep, timeouts, timeouts.total_s).run(first)
        except UpstreamError as error:
            row.outcome, row.error = RequestOutcome.STREAM_BROKEN, str(error)
            message = f"the stream from {instance.name} broke off: {error}"
            return dialect_of(self._inbound.path).event(message, "stream_broken", keep.events)
        finally:
            row.events = keep.events
        return b""

    def _headers(self, instance: Instance) -> dict[str, str]:
        headers = self._core.forwarded_headers(self._inbound.headers, instance)
        headers["x-request-id"] = self._row.request_id
        if self._inbound.method == "POST":
            headers["content-type"] = "application/json"
        return headers


def _is_stream(answer: Answer) -> bool:
    headers = answer.headers
    return answer.status == 200 and headers.content_type.lower().startswith("text/event-stream") and not headers.encoded
