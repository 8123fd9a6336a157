"""Interface of a store that carries messages between replicas and keeps the latest state for those that join later."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from proxy.sharing.wire import Message, Pin, SharedResponse


class StoreError(Exception):
    """The store did not answer in time, or refused; the connection is of no further use."""


class ResponseTable(Protocol):
    """The engines of stored responses, as this process knows them."""

    def share(self) -> None:
        """Keep what is learned from now on for ``take_learned``."""

    def take_learned(self, limit: int) -> list[tuple[str, str, str, float | None, bytes, int, str]]:
        """The oldest responses learned here and not taken: the fields of `SharedResponse`."""
        ...

    def learn_elsewhere(self, response: SharedResponse, now_s: float) -> None:
        """Take a response that another replica has learned."""


class SharedStore(Protocol):
    """One connection. Every call is bounded in time and raises StoreError; after that only ``close`` may be called."""

    async def open(self) -> None:
        """Connect and subscribe: messages published from now on are returned by ``received``."""

    async def replicas(self) -> list[tuple[Message, float]]:
        """Last full message of every replica that has sent one within the TTL, and its age in seconds."""
        ...

    def pins(self) -> AsyncIterator[Sequence[Pin]]:
        """Yield pins that have not expired, in batches, the oldest first."""
        ...

    def responses(self) -> AsyncIterator[Sequence[SharedResponse]]:
        """Yield stored responses, in batches, the oldest first, if the store keeps them."""
        ...

    async def publish(self, message: Message) -> None:
        """Send a message to all replicas, this one included; keep it if it is full, and its pins."""

    async def received(self, timeout_s: float) -> Message | None:
        """Next message; None if none comes in time or one is unreadable."""

    async def close(self) -> None:
        """Close the connection. Never fails."""
