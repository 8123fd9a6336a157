"""Redis or Valkey as the store. Keys, all with an expiry, below ``sharing.prefix``:

- ``replicas``: set of names; ``replica:NAME``: the last full message of one, for ``ttl_s``.
- ``pins:NUMBER``: hash of session id to pin; a new one is begun ``_PIN_HASHES`` times per ``sessions.ttl_s``, and each
  expires when its last pins do. A session's pin in a later hash replaces that in an earlier one.
- ``changes``: channel of the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from proxy.settings import SharingSettings
from proxy.sharing.store import StoreError
from proxy.sharing.wire import Message, Pin, SharedResponse, WireError, decode, decode_pin, encode

log = logging.getLogger("warmroute.sharing")

_PIN_HASHES = 8
_BATCH = 1000
_CLOSE_S = 1.0


class RedisStore:
    """`proxy.sharing.store.SharedStore` over two connections: commands and the subscription."""

    def __init__(self, settings: SharingSettings, session_ttl_s: float) -> None:
        assert settings.url is not None
        password = settings.store_password()
        options: dict[str, Any] = {} if password is None else {"password": password.get_secret_value()}
        self._timeout_s = settings.timeout_s
        self._client: Redis = Redis.from_url(
            settings.url,
            socket_timeout=settings.timeout_s,
            socket_connect_timeout=settings.timeout_s,
            retry=Retry(NoBackoff(), 0),
            **options,
        )
        self._subscription: PubSub = self._client.pubsub(ignore_subscribe_messages=True)
        self._refused = _login_refused(settings)
        self._prefix = settings.prefix
        self._ttl_ms = max(1, int(settings.ttl_s * 1e3))
        self._pin_hash_s = max(1.0, session_ttl_s / _PIN_HASHES)
        self._pins_expire_s = int(session_ttl_s + self._pin_hash_s) + 1

    async def open(self) -> None:
        async with self._bounded():
            await self._subscription.subscribe(self._key("changes"))

    async def replicas(self) -> list[tuple[Message, float]]:
        async with self._bounded():
            members = await cast(Awaitable[set[bytes]], self._client.smembers(self._key("replicas")))
            names = sorted(name.decode(errors="replace") for name in members)
            pipeline = self._client.pipeline(transaction=True)
            for name in names:
                pipeline.get(self._key(f"replica:{name}"))
                pipeline.pttl(self._key(f"replica:{name}"))
            answers: list[Any] = await pipeline.execute() if names else []
            found = list(zip(names, answers[::2], answers[1::2], strict=True))
            expired = [name for name, raw, _ in found if raw is None]
            if expired:
                await self._client.srem(self._key("replicas"), *expired)
        read = [
            (_message(raw), max(0.0, (self._ttl_ms - left_ms) / 1e3)) for _, raw, left_ms in found if raw is not None
        ]
        return [(message, age_s) for message, age_s in read if message is not None]

    async def pins(self) -> AsyncIterator[Sequence[Pin]]:
        number = self._pin_hash(time.time())
        for each in range(number - _PIN_HASHES - 1, number + 2):  # one more each way: hosts' clocks differ
            cursor = 0
            while True:
                async with self._bounded():
                    scanned = self._client.hscan(self._key(f"pins:{each}"), cursor, count=_BATCH)
                    cursor, found = await cast(Awaitable[tuple[int, dict[bytes, bytes]]], scanned)
                if found:
                    yield list(_pins(found))
                if not cursor:
                    break

    async def responses(self) -> AsyncIterator[Sequence[SharedResponse]]:
        """None: they are too large to keep; a replica that joins later learns those that are stored from then on."""
        nothing: tuple[Sequence[SharedResponse], ...] = ()
        for each in nothing:
            yield each

    async def publish(self, message: Message) -> None:
        raw = encode(message)
        async with self._bounded():
            pipeline = self._client.pipeline(transaction=False)
            if message.gone:
                pipeline.delete(self._key(f"replica:{message.replica}"))
                pipeline.srem(self._key("replicas"), message.replica)
            elif message.full:
                pipeline.set(self._key(f"replica:{message.replica}"), raw, px=self._ttl_ms)
                pipeline.sadd(self._key("replicas"), message.replica)
                pipeline.pexpire(self._key("replicas"), 10 * self._ttl_ms)
            if message.pins:
                key = self._key(f"pins:{self._pin_hash(time.time())}")
                pipeline.hset(key, mapping={pin.session: encode(pin) for pin in message.pins})
                pipeline.expire(key, self._pins_expire_s)
            pipeline.publish(self._key("changes"), raw)
            answers = await pipeline.execute(raise_on_error=False)  # which would add the message's bytes to the error
            if refused := next((each for each in answers if isinstance(each, RedisError)), None):
                raise refused

    async def received(self, timeout_s: float) -> Message | None:
        async with self._bounded(timeout_s):
            message = await self._subscription.get_message(timeout=timeout_s)
        return _message(message["data"]) if message is not None and message["type"] == "message" else None

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                try:
                    await self._subscription.aclose()  # type: ignore[no-untyped-call]
                finally:
                    await self._client.aclose()

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _pin_hash(self, unix_s: float) -> int:
        return int(unix_s // self._pin_hash_s)

    @contextlib.asynccontextmanager
    async def _bounded(self, more_s: float = 0.0) -> AsyncIterator[None]:
        """Bound a call, and turn every failure of the client into StoreError."""
        try:
            async with asyncio.timeout(self._timeout_s + more_s):
                yield
        except TimeoutError as error:
            raise StoreError(f"no answer within {self._timeout_s:g} s") from error
        except AuthenticationError as error:
            raise StoreError(f"{self._refused}: {error}") from error
        except (RedisError, OSError) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error


def _login_refused(settings: SharingSettings) -> str:
    """Sentence for a login that the store refuses, with the setting to change."""
    if settings.store_password() is None:
        return "the store asks for a password: give sharing.password_env"
    variable = settings.password_env
    given = "sharing.password" if variable is None else f"the environment variable {variable} (sharing.password_env)"
    user = "" if settings.url is None or urlsplit(settings.url).username is None else ", or the user in sharing.url"
    return f"the store refuses the password: correct {given}{user}"


def _message(raw: bytes) -> Message | None:
    """The message, or None if another program uses the keys, or a version that does not fit."""
    try:
        return decode(raw)
    except WireError as error:
        log.warning("an unreadable message of another replica is ignored: %s", error)
        return None


def _pins(found: dict[bytes, bytes]) -> Iterator[Pin]:
    for raw in found.values():
        with contextlib.suppress(WireError):
            yield decode_pin(raw)
