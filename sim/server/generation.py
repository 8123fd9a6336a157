"""The generation endpoints: parse, submit, relay tokens, detect a client that disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sim.core.types import EngineDeadError
from sim.server.answers import AnswerBuilder, Answers, Api
from sim.server.asgi import ClientGone, Receive, Scope, Send, answer, break_connection, read_body, until_disconnect
from sim.server.driver import Delivery, Driver
from sim.server.faults import Fault, Faults, end_at_first_token
from sim.server.parsing import ApiError, GenerationCall
from sim.server.settings import ServerSettings

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationHandler:
    """The generation endpoints of one engine."""

    def __init__(self, settings: ServerSettings, driver: Driver, faults: Faults) -> None:
        self._settings = settings
        self._driver = driver
        self._faults = faults

    async def handle(self, scope: Scope, receive: Receive, send: Send, api: Api) -> None:
        """Answer one request in its API's shape. It arrives, in engine time, before the body is read and parsed."""
        arrived_s = self._driver.clock.now()
        try:
            body = await read_body(receive)
        except ClientGone:
            return
        try:
            call, shape = self._parse(scope, body, api)
        except ApiError as error:
            await answer(send, error.status, api.error(error))
            return
        gone = asyncio.ensure_future(until_disconnect(receive))
        try:
            await self._answer(call, shape, api, arrived_s, receive, send, gone)
        finally:
            gone.cancel()
            for request in call.requests:
                self._driver.abort(request.request_id)

    def _parse(self, scope: Scope, body: bytes, api: Api) -> tuple[GenerationCall, Answers]:
        request_id = None
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                request_id = value.decode("latin-1")
            elif name == b"content-type" and value.split(b";")[0].strip().lower() != b"application/json":
                raise ApiError(400, "Unsupported Media Type: Only 'application/json' is allowed")
        return api.begin(body, self._settings, request_id)

    async def _answer(
        self,
        call: GenerationCall,
        shape: Answers,
        api: Api,
        arrived_s: float,
        receive: Receive,
        send: Send,
        gone: asyncio.Future[None],
    ) -> None:
        fault = self._faults.for_request(call.request.kv_transfer)
        if fault is not None:
            if fault.mode in {"refuse", "hang", "error"}:
                await fail(fault, receive, send, gone)
                return
            if fault.mode == "slow":
                done, _ = await asyncio.wait([gone], timeout=fault.delay_s / self._driver.clock.time_scale)
                if done:
                    return
                arrived_s += fault.delay_s
            elif fault.mode == "p_eos":
                call = call._replace(request=end_at_first_token(call.request, fault.force))
        try:
            deliveries = [self._driver.submit(request, arrived_s, call.stream) for request in call.requests]
        except ValueError as error:
            refusal = ApiError(400, str(error))
            await answer(send, refusal.status, api.error(refusal))
            return
        except EngineDeadError as error:
            refusal = ApiError(500, str(error), "InternalServerError")
            await answer(send, refusal.status, api.error(refusal))
            return
        for delivery in deliveries:
            gone.add_done_callback(lambda _, delivery=delivery: delivery.cut())  # type: ignore[misc]
        if call.others and call.stream and isinstance(shape, AnswerBuilder):
            await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
            if fault is not None and fault.mode == "hang_mid_stream":
                await gone
            elif fault is not None and fault.mode == "reset_mid_stream":
                await _break_off(send, receive, gone, reset=True)
            elif not await stream_choices(shape, deliveries, send, _kv_load_error()):
                await self._hang_up(send, receive)
        elif call.stream:
            await self._stream(shape, deliveries[0], fault, receive, send, gone)
        else:
            await self._whole(shape, api, deliveries, fault, receive, send, gone)

    async def _whole(
        self,
        shape: Answers,
        api: Api,
        deliveries: Sequence[Delivery],
        fault: Fault | None,
        receive: Receive,
        send: Send,
        gone: asyncio.Future[None],
    ) -> None:
        await all_tokens(deliveries)
        delivery = deliveries[0]
        if any(each.cut_off for each in deliveries):
            await self._hang_up(send, receive)
        elif fault is not None and fault.mode == "hang_mid_stream":
            await gone
        elif fault is not None and fault.mode == "reset_mid_stream":
            await _break_off(send, receive, gone, reset=True)
        elif delivery.finish_reason == "error":
            await answer(send, 500, api.error(_kv_load_error()))
        elif isinstance(shape, AnswerBuilder):
            await answer(send, 200, shape.whole_of(deliveries))
        else:
            await answer(send, 200, shape.whole(delivery))

    async def _stream(
        self,
        shape: Answers,
        delivery: Delivery,
        fault: Fault | None,
        receive: Receive,
        send: Send,
        gone: asyncio.Future[None],
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        if begun := shape.before_prefill():
            await send({"type": "http.response.body", "body": begun, "more_body": True})
        opened = False
        breaks = fault if fault is not None and fault.mode in {"hang_mid_stream", "reset_mid_stream"} else None
        while True:
            count = await delivery.tokens()
            if delivery.cut_off:
                await self._hang_up(send, receive)
                return
            end = delivery.sent
            opening = b"" if opened else shape.opening(delivery)
            opened = True
            if breaks is not None and end >= breaks.after_tokens:
                events = opening + shape.event(end - count, max(breaks.after_tokens, end - count), None)
                await send({"type": "http.response.body", "body": events, "more_body": True})
                if breaks.mode == "hang_mid_stream":
                    await gone
                else:
                    # Bytes already sent must leave the socket before the reset discards them.
                    await asyncio.sleep(0.01)
                    await _break_off(send, receive, gone, reset=True)
                return
            if delivery.finish_reason == "error":
                events = opening + shape.failure(_kv_load_error())
            else:
                events = opening + shape.event(end - count, end, delivery.finish_reason)
                if delivery.ended:
                    events += shape.ending(delivery)
            await send({"type": "http.response.body", "body": events, "more_body": not delivery.ended})
            if delivery.ended:
                return

    async def _hang_up(self, send: Send, receive: Receive) -> None:
        """End a request that was cut off: by its client, which needs no answer, or by the end of the server."""
        if self._driver.closed:
            await break_connection(send, receive, reset=False)


async def fail(fault: Fault, receive: Receive, send: Send, gone: asyncio.Future[None]) -> None:
    """Answer a request with a fault that does not involve the engine."""
    if fault.mode == "error":
        kind = "InternalServerError" if fault.status >= 500 else "BadRequestError"
        await answer(send, fault.status, ApiError(fault.status, "simulated failure", kind).body)
    elif fault.mode == "refuse":
        await _break_off(send, receive, gone, reset=False)
    else:
        await gone


async def _break_off(send: Send, receive: Receive, gone: asyncio.Future[None], *, reset: bool) -> None:
    gone.cancel()
    await break_connection(send, receive, reset=reset)


def _kv_load_error() -> ApiError:
    return ApiError(500, "KV load failure: the transfer from the remote engine failed", "InternalServerError")


async def all_tokens(deliveries: Sequence[Delivery]) -> None:
    """Wait until every choice has ended; for requests that are not streamed."""
    for delivery in deliveries:
        await delivery.tokens()


async def stream_choices(shape: AnswerBuilder, deliveries: Sequence[Delivery], send: Send, error: ApiError) -> bool:
    """Send the events of all choices as their tokens come, and the end of the stream; False if one was cut off.

    Args:
        shape: builds the events.
        deliveries: of the choices, by index.
        send: to the client; the head of the answer has been sent.
        error: event of a choice that failed.
    """
    waiting = {asyncio.create_task(delivery.tokens()): index for index, delivery in enumerate(deliveries)}
    opened: set[int] = set()
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            events = b""
            for task in done:
                index = waiting.pop(task)
                delivery = deliveries[index]
                if delivery.cut_off:
                    return False
                if index not in opened:
                    opened.add(index)
                    events += shape.opening(delivery, index)
                if delivery.finish_reason == "error":
                    events += shape.failure(error)
                    await send({"type": "http.response.body", "body": events})
                    return True
                # More tokens may have arrived since the task ended; the last event is the one that leaves none behind.
                ended = delivery.ended and not delivery.pending
                reason = delivery.finish_reason if ended else None
                events += shape.event(delivery.sent - task.result(), delivery.sent, reason, index)
                if not ended:
                    waiting[asyncio.create_task(delivery.tokens())] = index
            if not waiting:
                events += shape.ending_of(deliveries)
            await send({"type": "http.response.body", "body": events, "more_body": bool(waiting)})
        return True
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
