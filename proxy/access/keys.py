"""API keys: who is asking. Known by their SHA-256 only, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections import Counter
from typing import NewType

from proxy.errors import RequestError
from proxy.settings import KeyLists, KeySettings, SettingsError

log = logging.getLogger("warmroute.keys")

KeyName = NewType("KeyName", str)
"""The name a key was configured with; never the key."""

KEY_PREFIX = "wr-"
"""Starts every key made here, so that logs and secret scanners recognise one."""
_SCHEME = b"bearer "


class Keys:
    """The keys of both sides: ``client`` for ``/v1/*``, ``admin`` for everything else. Only ``reload`` does I/O."""

    def __init__(self, settings: KeySettings) -> None:
        self._settings = settings
        self._in_flight: Counter[KeyName] = Counter()
        self._take(settings.lists())

    def client(self, headers: dict[bytes, bytes]) -> KeyName | None:
        """Whose key a request to the OpenAI API carries; None where no client keys are configured.

        Args:
            headers: header names in lower case to values, as ASGI has them.

        Raises:
            RequestError: 401, no key or an unknown one.
        """
        if not self._client:
            return None
        return _holder(self._client, headers)

    def admin(self, headers: dict[bytes, bytes]) -> KeyName | None:
        """The same for the admin side."""
        if not self._admin:
            return None
        return _holder(self._admin, headers)

    @property
    def for_clients(self) -> bool:
        """Whether clients need a key, in which case their ``Authorization`` ends at the proxy."""
        return bool(self._client)

    @property
    def for_admins(self) -> bool:
        """Whether admin keys are configured."""
        return bool(self._admin)

    def max_concurrent(self, name: KeyName) -> int | None:
        """Requests that the holder of a client key may have in flight; None: no bound."""
        return self._max_concurrent.get(name)

    def enter(self, name: KeyName | None) -> None:
        """Count a request among those its key's holder has in flight; ``leave`` must follow.

        Raises:
            RequestError: 429, it would be one more than the key's ``max_concurrent``; it is not counted.
        """
        if name is None:
            return
        bound = self._max_concurrent.get(name)
        if bound is not None and self._in_flight[name] >= bound:
            raise RequestError(
                429,
                f"{bound} requests with this API key are in flight, which is its bound (max_concurrent)",
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self._in_flight[name] += 1

    def leave(self, name: KeyName | None) -> None:
        """A request that entered has ended."""
        if name is not None:
            self._in_flight[name] -= 1

    def reload(self, settings: KeySettings | None = None, *, dry_run: bool = False) -> None:
        """Read the keys anew, from ``settings`` or those given before; keeps the old ones when that fails.

        With ``dry_run`` it keeps them anyway.

        Raises:
            SettingsError: the file cannot be used, or leaves a side without keys that has some, which would open it.
        """
        settings = settings or self._settings
        try:
            lists = settings.lists()
        except ValueError as error:
            raise SettingsError(str(error)) from error
        for side, before, after in (("client", self._client, lists.client), ("admin", self._admin, lists.admin)):
            if before and not after:
                raise SettingsError(f"keys.{side}: a reload must not take the last key away; restart to do that")
        if dry_run:
            return
        self._settings = settings
        self._take(lists)
        log.info("keys: %d for clients, %d for admins", len(self._client), len(self._admin))

    def _take(self, lists: KeyLists) -> None:
        self._client = tuple((KeyName(key.name), bytes.fromhex(key.sha256)) for key in lists.client)
        self._admin = tuple((KeyName(key.name), bytes.fromhex(key.sha256)) for key in lists.admin)
        self._max_concurrent = {
            KeyName(key.name): key.max_concurrent for key in lists.client if key.max_concurrent is not None
        }


def new_key() -> str:
    """A random key with 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """What is kept of a key: its SHA-256 in hex. Unsalted and fast is right for random keys, wrong for passwords."""
    return hashlib.sha256(key.encode()).hexdigest()


def _holder(known: tuple[tuple[KeyName, bytes], ...], headers: dict[bytes, bytes]) -> KeyName:
    given = headers.get(b"authorization")
    if given is None:
        raise _refused("no API key: send it as 'Authorization: Bearer KEY'")
    if given[: len(_SCHEME)].lower() != _SCHEME:
        raise _refused("the Authorization header is not 'Bearer KEY'")
    digest = hashlib.sha256(given[len(_SCHEME) :].strip()).digest()
    holder: KeyName | None = None
    for name, expected in known:
        # No early end: how long this takes says nothing about which key came close.
        if hmac.compare_digest(digest, expected):
            holder = name
    if holder is None:
        raise _refused("this API key is not known here")
    return holder


def _refused(message: str) -> RequestError:
    return RequestError(401, message, code="invalid_api_key")
