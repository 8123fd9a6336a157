"""One request from its body to its last byte: route, send, relay, learn. The hot path."""

from __future__ import annotations

import asyncio
import time

from policies.row import RequestOutcome, Row
from policies.session import Routed
from policies.types import NoCandidateError, RequestView
from proxy.access.quotas import KeyLimitError
from proxy.access.tenants import Visit
from proxy.clients.inbound import Inbound
from proxy.core import Core
from proxy.engines.status import is_failure, may_be_the_requests_fault
from proxy.engines.upstream import Answer, NoSocketError, NotAcceptedError, NotConnectedError, UpstreamError
from proxy.errors import AttemptFailedError, dialect_of, draining_error
from proxy.exchange.answer_headers import answer_headers
from proxy.exchange.attempts import Attempts
from proxy.exchange.bound import Bound
from proxy.exchange.first_token import FirstTokenWatch, opens_early
from proxy.exchange.offloading import hand_over
from proxy.exchange.outcomes import note_reported
from proxy.exchange.priority import priorities_of
from proxy.exchange.reading import EventFilter, check_first, echoed, event_filter, further_sequences, usage_of
from proxy.exchange.relay import stream_relay
from proxy.exchange.while_connected import while_connected
from proxy.fleet.instances import Instance
from proxy.request.agent import agent_of
from proxy.request.bodies import Priorities, extended
from proxy.request.parse import Parsed
from proxy.request.stream_filter import StreamFilter, Unread
from proxy.request.usage import Usage, with_cached_tokens
from proxy.resume.plan import ResumeResult
from proxy.resume.run import Resuming
from proxy.routing.admission import Seat
from proxy.routing.refusals import QueueError


class Exchange:
    """Serves one client request. Owns its leases and its upstream answer and releases both on every path."""

    _decode: Instance
    """D of the current attempt; its name may belong to another engine, or none, by the time it answers."""
    _seat: Seat

    def __init__(self, core: Core, row: Row, inbound: Inbound, visit: Visit) -> None:
        self._core = core
        self._visit = visit
        self._row = row
        self._loop = asyncio.get_running_loop()
        self._inbound = inbound
        self._headers = inbound.headers
        self._sent_s = 0.0
        self._attempts = Attempts(core, row, inbound.headers)
        self._encoded = False
        self._echoed: bool | None = None
        self.whole_bytes = 0
        """Length in bytes of a whole answer that was relayed."""

    async def run(self, parsed: Parsed) -> None:
        """Serve a parsed request until it is answered or its client leaves.

        Raises:
            RequestError: nothing was sent yet and no instance could serve it.
        """
        try:
            await while_connected(self._inbound, self._row, self._serve(parsed), self._cut_short)
        finally:
            self._row.stages_ms["total"] = self._elapsed_ms()

    def _cut_short(self) -> None:
        """End an answer at shutdown so that the client cannot take it for complete."""
        inbound = self._inbound
        if not inbound.started:
            raise draining_error()
        if self._row.stream and not self._encoded and not inbound.response_complete:
            event = dialect_of(inbound.path).event
            inbound.finish(b"\n\n" + event("the proxy is shutting down", "draining", self._row.events))
        elif not inbound.response_complete:
            inbound.abandon()

    async def _serve(self, parsed: Parsed) -> None:
        core, row = self._core, self._row
        row.session_id, row.session_source, row.parent_session_id = core.identify(self._headers, parsed)
        if core.tokens.enabled:
            parsed = await core.tokenized(parsed)
        request = core.router.view(
            parsed, row.request_id, row.session_id, self._visit.tenant, agent_of(self._headers), row.parent_session_id
        )
        row.prompt_tokens = request.prompt_tokens
        row.stages_ms["parse"] = self._elapsed_ms()
        core.retries.arrived(time.monotonic())
        seat = self._seat = core.admission.seat(parsed.fields.model)
        seat.only, seat.tokens = parsed.only, parsed.context_tokens(request.prompt_tokens)
        further = 0 if request.may_offload else further_sequences(parsed)
        core.meters.further_sequences += further
        try:
            self._visit.begin(row.session_id, row.request_id, request.prompt_tokens)
            await self._serve_seated(parsed, request, seat)
            core.meters.served(request, row, self._sent_s, self._echoed)
        except (KeyLimitError, QueueError) as error:
            row.outcome = error.outcome
            raise
        finally:
            core.meters.further_sequences -= further
            seat.close()
            if seat.queued_s:
                row.stages_ms["queued"] = seat.queued_s * 1e3

    async def _serve_seated(self, parsed: Parsed, request: RequestView, seat: Seat) -> None:
        core, row = self._core, self._row
        attempts = self._attempts
        failure: AttemptFailedError | None = None
        for _ in range(core.settings.limits.max_attempts):
            if failure is not None and not await attempts.may_follow(failure, seat.model):
                break
            try:
                if failure is None and (held := core.holding.enter(request, seat, row)) is not None:
                    await held
                routed = seat.route(request, attempts.tried) or await seat.wait()
            except NoCandidateError:
                break
            row.stages_ms["decide"] = seat.decided_s * 1e3
            self._note(routed)
            try:
                self._decode = core.instances.chosen(routed.decision.decode_on)
                await self._attempt(parsed, request, routed)
            except AttemptFailedError as error:
                failure = attempts.failed(error, after=failure)
                routed.commitment.retract(error.instance)
            except asyncio.CancelledError:
                if "first_byte" not in row.stages_ms:
                    # The part of the prompt that was computed is unknown, so none is assumed.
                    routed.commitment.retract(routed.decision.decode_on)
                raise
            else:
                return
            finally:
                routed.commitment.release(time.monotonic(), core.settings.offload.hold_s, row.actual_cached_tokens)
        try:
            raise await attempts.give_up(failure)
        finally:
            del failure  # it references this frame

    def _note(self, routed: Routed) -> None:
        row, decision = self._row, routed.decision
        row.decision = decision
        row.planner = decision.policy if decision.planned else self._core.router.planner.name
        if row.trace is not None:
            row.trace.routed(decision, self._seat.decided_s)
        row.offload_reason, row.prefill_instance = decision.offload.reason, decision.prefill_on
        prefill = routed.prefill_view
        row.predicted_cached_tokens = prefill.cached_tokens if prefill else decision.cached_tokens

    async def _attempt(self, parsed: Parsed, request: RequestView, routed: Routed) -> None:
        decision = routed.decision
        drop_usage = self._core.settings.inject_usage and parsed.hides_usage
        resuming = Resuming.of(self._core.settings.resume, self._row, parsed, self._headers, with_usage=drop_usage)
        body = (resuming.body if resuming else b"") or parsed.body
        add_usage = drop_usage and body is parsed.body
        priorities = self._priorities(parsed, routed)
        prefill_usage: Usage | None = None
        opened: tuple[Answer, bytes] | None = None
        refused = False
        if decision.prefill_on is not None:
            opened, prefill_usage, refused = await hand_over(
                self._core,
                self._row,
                routed,
                parsed.endpoint.value,
                extended(body, usage=add_usage),
                self._upstream_headers(self._core.instances.chosen(decision.prefill_on), "prefill"),
                priorities,
                lambda leg, bound_s: self._open(decision.decode_on, parsed, leg, bound_s, pulling=True),
                self._pull_bound(parsed),
                self._attempts.guard,
            )
        started_s: float | None = None
        if opened is None:
            body = extended(body, usage=add_usage, priority=priorities.decode)
            started_s = time.perf_counter()
            opened = await self._open(decision.decode_on, parsed, body, self._first_byte_bound(parsed))
            if refused and opened[0].status < 400:
                self._core.router.routing.pair_failed(routed.commitment, time.monotonic())
        answer, first = opened
        self._echoed = echoed(parsed.endpoint, self._row.request_id, answer, first)
        try:
            self._row.stages_ms["first_byte"] = self._elapsed_ms()
            streamed = answer.status == 200 and parsed.stream
            first_token = FirstTokenWatch(self._core.router.routing, self._row, routed.commitment, started_s)
            late = first_token.late if streamed and opens_early(parsed, answer) else None
            if late is None:
                first_token.came(streamed=streamed and not parsed.several)
            cached_on_prefill = prefill_usage.cached_tokens if prefill_usage else None
            if streamed:
                keep = event_filter(self._core, parsed, self._decode, drop_usage, cached_on_prefill, late)
                self._encoded = answer.headers.encoded
                resuming = None if self._encoded else resuming
                usage = await self._relay_stream(answer, first, request, routed, keep, resuming, first_token)
            else:
                if cached_on_prefill is not None:
                    first = with_cached_tokens(first, cached_on_prefill)
                self._relay_whole(answer, first, routed)
                usage = usage_of(self._core, parsed, self._decode, first)
        finally:
            answer.close()
        # P's cached tokens do not describe the engine that continued the stream.
        self._learn(parsed, usage, None if self._row.resumed else prefill_usage, routed)

    async def _open(
        self, instance: str, parsed: Parsed, body: bytes, bound_s: float, *, pulling: bool = False
    ) -> tuple[Answer, bytes]:
        """Send to one instance and wait for the first piece of the answer's body (the whole of it unless streamed).

        While D pulls KV, a timeout is not counted as its failure: P may be the one that does not send.

        Raises:
            AttemptFailedError: refused, broken, late, or answered 5xx other than 501.
        """
        core, decode = self._core, self._decode  # an abandoned pull outlives its attempt
        answer: Answer | None = None
        opened = streamed = False
        first = b""
        sent_s = self._sent_s = time.monotonic()
        try:
            with Bound(self._loop, bound_s):
                url = decode.url + parsed.endpoint
                headers = self._upstream_headers(decode, "decode" if pulling else "co-located")
                if query := self._inbound.query:
                    answer = await core.upstream.send("POST", f"{url}?{query}", body, headers)
                else:
                    answer = await core.upstream.post(url, body, headers)
                streamed = parsed.stream and answer.status == 200
                first = await (answer.chunk() if streamed else answer.read())
            if is_failure(answer.status, first) or (
                answer.status == 401 and core.forwarding.replaces_authorization(decode.settings)
            ):
                raise UpstreamError(f"answered {answer.status}: {first[:200].decode('utf-8', 'replace')}")
            check_first(answer, first, streamed=streamed)
            opened = True
        except TimeoutError as error:
            self._attempts.guard.suspect(decode)
            if not pulling:
                core.instances.failed(decode, f"no first byte within {bound_s:g} s", sent_s=sent_s)
            raise AttemptFailedError(instance, f"no first byte within {bound_s:g} s", timed_out=True) from error
        except UpstreamError as error:
            refused, own = isinstance(error, NotConnectedError), isinstance(error, NoSocketError)
            late = isinstance(error, NotAcceptedError)
            if not own and not (late and core.lag.explains(core.settings.timeouts.connect_s)):
                fault = answer is not None and may_be_the_requests_fault(answer.status, first, streamed=streamed)
                self._attempts.count(decode, str(error), sent_s, self._seat.model, refused=refused, fault=fault)
            if error.seen:
                self._attempts.guard.suspect(decode)
            raise AttemptFailedError(instance, str(error), seen=error.seen, own=own) from error
        finally:
            if answer is not None and not opened:
                answer.close()
        self._attempts.answered()
        core.instances.succeeded(decode, sent_s, complete=not streamed)
        if answer.status == 404:
            core.model_lists.not_found(decode, parsed.fields.model, first)
        return answer, first

    def _priorities(self, parsed: Parsed, routed: Routed) -> Priorities:
        found = priorities_of(parsed, routed.commitment, time.time() - time.monotonic())
        self._row.priority = found.decode if found.prefill is None else found.prefill
        return found

    def _first_byte_bound(self, parsed: Parsed) -> float:
        timeouts = self._core.settings.timeouts
        return timeouts.first_byte_s if parsed.stream else timeouts.total_s

    def _pull_bound(self, parsed: Parsed) -> float:
        """Bound in seconds on D's first byte after a hand-off; includes generation of an unstreamed answer."""
        settings = self._core.settings.offload
        first_s = settings.first_token_timeout_s
        making_s = 0.0 if parsed.stream else min(parsed.max_tokens * settings.token_timeout_s, 10 * first_s)
        return first_s + making_s

    def _relay_whole(self, answer: Answer, content: bytes, routed: Routed) -> None:
        row = self._row
        row.status = answer.status
        row.outcome = RequestOutcome.OK if answer.status < 400 else RequestOutcome.ENGINE_REFUSED
        if answer.status >= 400:
            routed.commitment.retract(routed.decision.decode_on)
        self.whole_bytes = len(content) if answer.status < 400 else 0
        self._start(answer, routed, len(content))
        self._inbound.finish(content)

    async def _relay_stream(
        self,
        answer: Answer,
        chunk: bytes,
        request: RequestView,
        routed: Routed,
        keep: EventFilter,
        resuming: Resuming | None,
        first_token: FirstTokenWatch,
    ) -> Usage | None:
        """Relay the stream; if the engine breaks it off, resume it or end it with an error event."""
        row, inbound, timeouts = self._row, self._inbound, self._core.settings.timeouts
        row.status, row.outcome = 200, RequestOutcome.OK
        self._start(answer, routed, None)
        watched = Unread() if self._encoded else resuming.watch(keep) if resuming else keep
        relay, closing = stream_relay(answer, inbound, watched, timeouts, timeouts.total_s), b""
        try:
            await relay.run(chunk, first_token.learn)
            note_reported(row, routed.decision.decode_on, relay.reported)
            if resuming:
                closing = resuming.missing_end()
            self._core.instances.completed(self._decode)
            tokens = keep.usage.completion_tokens if keep.usage else None
            self._core.router.routing.answered(routed.commitment, tokens, time.monotonic())
        except UpstreamError as error:
            row.events = keep.events
            closing = self._break_stream(routed.decision.decode_on, str(error))
            if resuming:
                answer.close()
                routed.commitment.release(time.monotonic())
                closing = await resuming.run(self, request, routed.decision.decode_on, closing)
        finally:
            row.events = keep.events
        if closing and self._encoded:
            inbound.abandon()  # an event would not be readable in it
        inbound.finish(closing)
        return None if resuming and resuming.usage_unknown else keep.usage

    async def resume_refusal(self, tried: set[str]) -> ResumeResult | None:
        """Check fleet, deaths and retry budget before resuming; None if a stream may be resumed, else the reason."""
        core = self._core
        if await self._attempts.guard.dead():
            return ResumeResult.POISON
        if core.instances.healthy(self._seat.model) <= tried:
            return ResumeResult.NO_INSTANCE
        return None if core.retries.take(time.monotonic(), seen=True) else ResumeResult.BUDGET

    async def route_again(self, request: RequestView, tried: set[str]) -> Routed:
        """Choose the instance that continues; the request keeps its place in flight, but may have to wait for room."""
        routed = self._seat.route(request, tried) or await self._seat.wait()
        self._note(routed)
        return routed

    async def open_again(self, routed: Routed, parsed: Parsed, body: bytes) -> tuple[Answer, bytes]:
        """Send the continuation to the chosen instance."""
        self._decode = self._core.instances.chosen(routed.decision.decode_on)
        body = extended(body, priority=self._priorities(parsed, routed).decode)
        return await self._open(routed.decision.decode_on, parsed, body, self._first_byte_bound(parsed))

    async def relay_again(self, answer: Answer, first: bytes, keep: StreamFilter) -> None:
        """Relay the continuing engine's stream."""
        timeouts = self._core.settings.timeouts
        left_s = max(1.0, timeouts.total_s - self._elapsed_ms() / 1e3)
        await stream_relay(answer, self._inbound, keep, timeouts, left_s).run(first)
        self._core.instances.completed(self._decode)

    def broken(self, instance: str, what: str) -> bytes:
        """Record that the continuing stream broke as well; returns the error event for the client."""
        return self._break_stream(instance, what)

    def model_tokens(self, model: str) -> int | None:
        """Smallest context length in tokens that an engine reports for the model; None if unknown."""
        return self._core.context_tokens(model)

    def _break_stream(self, instance: str, what: str) -> bytes:
        """Record a stream that broke, of which whole events were sent; returns the error event for the client."""
        row = self._row
        row.outcome, row.error = RequestOutcome.STREAM_BROKEN, what
        row.note_failed(instance, what)
        self._attempts.guard.suspect(self._decode)
        self._core.instances.failed(self._decode, what, sent_s=self._sent_s, answered=True)
        event = dialect_of(self._inbound.path).event
        return event(f"the stream from {instance} broke off: {what}", "stream_broken", row.events)

    def _start(self, answer: Answer, routed: Routed, length: int | None) -> None:
        headers = answer_headers(answer, self._row, routed.decision)
        self._inbound.start(answer.status, headers, length)

    def _learn(self, parsed: Parsed, usage: Usage | None, prefill_usage: Usage | None, routed: Routed) -> None:
        row = self._row
        if usage is None:
            return
        # After a hand-off D reports all pulled tokens as cached; P's usage has those that were really reused.
        row.actual_cached_tokens = (prefill_usage or usage).cached_tokens
        row.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens:
            row.prompt_tokens = usage.prompt_tokens
            self._core.router.learn(parsed, usage, None if row.resumed else routed.commitment)
            self._core.tokens.check(parsed, usage.prompt_tokens)

    def _upstream_headers(self, instance: Instance, leg: str) -> dict[str, str]:
        forwarded = self._core.forwarded_headers(self._headers, instance)
        forwarded["content-type"] = "application/json"
        forwarded["x-request-id"] = self._row.request_id
        if self._row.trace is not None:
            self._row.trace.leg(leg, instance.name, instance.url, forwarded)
        return forwarded

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._inbound.arrived_s) * 1e3
