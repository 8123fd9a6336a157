"""The parent process of the workers as the store of their shared state."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from proxy.sharing.frames import Publish, Question
from proxy.sharing.line import LineError, ParentLine
from proxy.sharing.store import StoreError
from proxy.sharing.wire import Message, Pin, SharedResponse


class LocalStore:
    """`proxy.sharing.store.SharedStore` over the line to the parent, which outlives the store."""

    def __init__(self, line: ParentLine) -> None:
        self._line = line

    async def open(self) -> None:
        self._line.forget_messages()

    async def replicas(self) -> list[tuple[Message, float]]:
        try:
            return list((await self._line.ask(Question.REPLICAS)).replicas)
        except LineError as error:
            raise StoreError(str(error)) from error

    async def pins(self) -> AsyncIterator[Sequence[Pin]]:
        while True:
            try:
                pins = (await self._line.ask(Question.PINS)).pins
            except LineError as error:
                raise StoreError(str(error)) from error
            if not pins:
                return
            yield pins

    async def responses(self) -> AsyncIterator[Sequence[SharedResponse]]:
        while True:
            try:
                responses = (await self._line.ask(Question.RESPONSES)).responses
            except LineError as error:
                raise StoreError(str(error)) from error
            if not responses:
                return
            yield responses

    async def publish(self, message: Message) -> None:
        self._line.send(Publish(message))

    async def received(self, timeout_s: float) -> Message | None:
        return await self._line.message(timeout_s)

    async def close(self) -> None:
        """Nothing to close: the line belongs to the worker."""
