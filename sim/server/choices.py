"""Answers with several choices: of one prompt (``n``), or of a list of prompts. Each is a request of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sim.server.answers import AnswerBuilder
from sim.server.asgi import Send
from sim.server.driver import Delivery
from sim.server.parsing import ApiError


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
