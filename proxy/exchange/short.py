"""Requests that generate no text: passed on to the least loaded instance, or to the one that stored a response."""

from __future__ import annotations

import asyncio
import time

import httpx

from policies.row import RequestOutcome, Row
from proxy.access.forwarding import is_value
from proxy.clients.inbound import Inbound
from proxy.clip import clip
from proxy.core import Core
from proxy.engines.status import is_failure
from proxy.engines.upstream import Answer, NoSocketError, NotAcceptedError, NotConnectedError, UpstreamError
from proxy.errors import AttemptFailedError, RequestError, dialect_of, draining_error
from proxy.exchange.answer_headers import id_headers
from proxy.exchange.attempts import Attempts
from proxy.exchange.outcomes import outcome_of
from proxy.exchange.relay import PlainRelay, stream_relay
from proxy.exchange.while_connected import while_connected
from proxy.fleet.instances import Instance
from proxy.paths import CANCEL, COUNT_TOKENS, PASSED_ON, STORED
from proxy.request.addressed import Addressed
from proxy.request.bodies import as_utf8
from proxy.request.parse import Endpoint
from proxy.request.stream_filter import Unread
from proxy.request.typed_events import RESPONSE_EVENTS, TypedEvents
from proxy.request.usage import usage_of_answer

_JSON = b"application/json"
_OF_STORED = frozenset((STORED, CANCEL))


class ShortExchange:
    """Serves one such request. It is on no ledger, takes no place in flight, and waits in no queue."""

    def __init__(self, core: Core, row: Row, inbound: Inbound, *, allow_priority: bool = False) -> None:
        self._core = core
        self._row = row
        self._inbound = inbound
        self._allow_priority = allow_priority
        self._stored = inbound.path in _OF_STORED
        self._body = inbound.body
        self._content_type = _JSON
        self._ended_without_events = False

    async def run(self) -> None:
        """Serve the request until it is answered or its client leaves.

        Raises:
            RequestError: it is refused, or no instance could serve it.
        """
        serving = self._of_stored() if self._stored else self._of_any()
        try:
            await while_connected(self._inbound, self._row, serving, self._cut_short)
        finally:
            self._row.stages_ms["total"] = (time.perf_counter() - self._inbound.arrived_s) * 1e3

    def _cut_short(self) -> None:
        if not self._inbound.started:
            raise draining_error()
        if not self._inbound.response_complete:
            self._inbound.abandon()

    async def _of_any(self) -> None:
        """Have the least loaded instance that serves the model answer; another one if it fails."""
        core, row = self._core, self._row
        try:
            model, self._body = await self._addressed()
            if model is not None:
                core.check_model(model)
        except RequestError as error:
            row.outcome = outcome_of(error)
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
            name = core.short_load.least_loaded(candidates)
            instance = core.instances.chosen(name)
            try:
                with core.short_load.on(name):
                    await self._pass_on(instance, model)
            except AttemptFailedError as error:
                if error.seen:
                    attempts.guard.suspect(instance)
                failure = attempts.failed(error, after=failure)
            else:
                return
        try:
            raise await attempts.give_up(failure)
        finally:
            del failure  # it references this frame

    async def _addressed(self) -> Addressed:
        """Model and body; sets the content type for the engine. Raises RequestError."""
        inbound, router = self._inbound, self._core.router
        if inbound.path == COUNT_TOKENS:
            body = as_utf8(inbound.body)
            parsed = await router.parse_fairly(Endpoint.MESSAGES, body, allow_priority=self._allow_priority)
            return Addressed(parsed.fields.model, parsed.body)
        given = inbound.headers.get(b"content-type", b"")
        kind = given.lower()
        known = inbound.path in PASSED_ON
        if not is_value(given):
            raise RequestError(400, "the content type is not valid", code="invalid_http")
        if not known or kind.startswith(b"multipart/"):
            self._content_type = given
        # Libraries send their content type without a body too, as OpenAI's with POST /v1/batches/ID/cancel.
        typed = b"json" in kind or kind.startswith(b"multipart/")
        if not known and not (typed and inbound.body):
            return Addressed(None, inbound.body)
        body = inbound.body if kind.startswith(b"multipart/") else as_utf8(inbound.body)
        if body is not inbound.body:
            self._content_type = _JSON  # its own may name the encoding
        return await router.addressed(body, given, allow_priority=self._allow_priority, model_required=known)

    async def _of_stored(self) -> None:
        """Pass a request for a stored response to the engine that has it."""
        response_id = self._inbound.target.partition("?")[0].split("/")[3]
        try:
            instance = self._core.responses.instance_of(response_id, "response_id", time.monotonic())
        except RequestError as error:
            self._row.outcome = outcome_of(error)
            raise
        attempts = Attempts(self._core, self._row, self._inbound.headers)
        try:
            await self._pass_on(instance)
        except AttemptFailedError as error:
            if self._ended_without_events:
                error.refusal = await self._not_streamed(instance, response_id)
            raise await attempts.give_up(attempts.failed(error, after=None)) from error

    async def _not_streamed(self, instance: Instance, response_id: str) -> RequestError | None:
        """Error for a stream that ended before its first event, though the engine has the response; else None.

        vLLM begins its answer before it finds that it has kept no events, and can then only close the connection.
        """
        try:
            found = await self._core.get(instance, f"/v1/responses/{response_id}")
        except httpx.HTTPError:
            return None
        if found.status_code != 200:
            return None
        return RequestError(
            400,
            f"{instance.name} has the response {clip(response_id, 100)!r}, but ended its stream before the first "
            "event: vLLM streams a stored response only if it was created with 'background' and 'stream'. Read it "
            "without 'stream'",
            code="response_not_streamed",
            param="stream",
        )

    async def _pass_on(self, instance: Instance, model: str | None = None) -> None:
        """Send the request to one instance and its answer to the client. Raises AttemptFailedError."""
        self._row.passed_to = instance.name
        answer, first = await self._open(instance)
        try:
            row, inbound = self._row, self._inbound
            if answer.status == 404 and model is not None:
                self._core.model_lists.not_found(instance, model, first)
            streamed = self._is_stream(answer)
            row.status, row.stream = answer.status, streamed
            row.outcome = RequestOutcome.OK if answer.status < 400 else RequestOutcome.ENGINE_REFUSED
            headers = [
                (b"content-type", answer.headers.content_type.encode("latin-1")),
                *answer.headers.passed,
                *id_headers(row),
                (b"x-warmroute-instance", instance.name.encode("latin-1")),
            ]
            inbound.start(answer.status, headers, None if streamed else len(first))
            if not streamed:
                inbound.finish(first)
                self._note_usage(answer, first)
            elif self._stored and not answer.headers.encoded:
                inbound.finish(await self._relay(answer, first, instance))
            else:
                await self._relay_plain(answer, first, instance)
        finally:
            answer.close()

    def _note_usage(self, answer: Answer, content: bytes) -> None:
        """Record the tokens that the engine reports, as for embeddings. Those of a stored response were counted."""
        if self._stored or answer.status != 200 or answer.headers.encoded:
            return
        usage = usage_of_answer(content)
        if usage is not None:
            self._row.prompt_tokens, self._row.completion_tokens = usage.prompt_tokens, usage.completion_tokens

    async def _open(self, instance: Instance) -> tuple[Answer, bytes]:
        """Head and first piece of the answer, the whole of it unless it is a stream. Raises AttemptFailedError.

        Only a refused connection counts against the instance: such requests say little about generation.
        """
        core, inbound = self._core, self._inbound
        timeouts = core.settings.timeouts
        bound_s = timeouts.total_s if inbound.path in PASSED_ON else timeouts.first_byte_s
        answer: Answer | None = None
        opened = False
        sent_s = time.monotonic()
        try:
            async with asyncio.timeout(bound_s):
                answer = await core.upstream.send(
                    inbound.method, instance.url + inbound.target, self._body, self._headers(instance)
                )
                first = await (answer.chunk() if self._is_stream(answer) else answer.read())
            if is_failure(answer.status, first) or (
                answer.status == 401 and core.forwarding.replaces_authorization(instance.settings)
            ):
                raise UpstreamError(f"answered {answer.status}: {first[:200].decode('utf-8', 'replace')}")
            opened = True
        except TimeoutError as error:
            raise AttemptFailedError(instance.name, f"no answer within {bound_s:g} s", timed_out=True) from error
        except UpstreamError as error:
            if isinstance(error, NotConnectedError) and not isinstance(error, NoSocketError | NotAcceptedError):
                core.instances.failed(instance, str(error), refused=True, sent_s=sent_s)
            self._ended_without_events = self._stored and answer is not None and self._is_stream(answer)
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

    async def _relay_plain(self, answer: Answer, first: bytes, instance: Instance) -> None:
        """Relay a body as it comes: events that are not read, audio. Raises ClientStalledError."""
        row, inbound, timeouts = self._row, self._inbound, self._core.settings.timeouts
        relay = PlainRelay(answer, inbound, Unread(), timeouts.idle_s, timeouts.client_stall_s, timeouts.total_s)
        try:
            await relay.run(first)
        except UpstreamError as error:
            row.outcome, row.error = RequestOutcome.STREAM_BROKEN, str(error)
            if answer.headers.encoded or not _has_events(answer):
                inbound.abandon()  # nothing in it could be read as an error
                return
            message = f"the stream from {instance.name} broke off: {error}"
            inbound.finish(b"\n\n" + dialect_of(inbound.path).event(message, "stream_broken", 0))
        else:
            inbound.finish()

    def _is_stream(self, answer: Answer) -> bool:
        """True for an answer that is relayed as it comes: events, and any other than JSON and text if passed on."""
        if answer.status != 200:
            return False
        if self._stored:
            return _has_events(answer) and not answer.headers.encoded
        kind = answer.headers.content_type.lower()
        return not ("json" in kind or kind.startswith("text/")) or _has_events(answer)

    def _headers(self, instance: Instance) -> dict[str, str]:
        headers = self._core.forwarded_headers(self._inbound.headers, instance)
        headers["x-request-id"] = self._row.request_id
        if self._row.trace is not None:
            self._row.trace.leg("short", instance.name, instance.url, headers)
        if self._inbound.method == "POST" and self._content_type:
            headers["content-type"] = self._content_type.decode("latin-1")
        return headers


def _has_events(answer: Answer) -> bool:
    return answer.headers.content_type.lower().startswith("text/event-stream")
