"""API keys, stored as SHA-256 only and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from typing import NewType

from policies.types import Tenant
from proxy.access.quotas import Quota
from proxy.errors import RequestError
from proxy.settings import KeyLists, KeySettings, SettingsError

log = logging.getLogger("warmroute.keys")

KeyName = NewType("KeyName", str)
"""The configured name of a key; never the key."""

KEY_PREFIX = "wr-"
"""Prefix of every generated key, so that logs and secret scanners recognise one."""
_SCHEME = b"bearer "


class Keys:
    """API keys of both sides: ``client`` for ``/v1/*``, ``admin`` for everything else. Only ``read`` does I/O.

    A client key's ``quota`` survives a reload that keeps its name.
    """

    def __init__(self, settings: KeySettings) -> None:
        self._quotas: dict[KeyName, Quota] = {}
        self._removed: dict[KeyName, Quota] = {}
        """Those of removed keys with requests in flight, which count again if the key returns."""
        self._take(settings.lists())

    def client(self, headers: dict[bytes, bytes]) -> KeyName | None:
        """Name of the client key of a request; None if no client keys are configured.

        Args:
            headers: header names in lower case to values, as in ASGI.

        Raises:
            RequestError: 401, no key or an unknown one.
        """
        if not self._client:
            return None
        if b"authorization" not in headers:
            key = headers.get(b"x-api-key")  # Anthropic's clients send it this way
            if key is None:
                raise _refused("no API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
            return _holder_of(self._client, key)
        return _holder(self._client, headers)

    def admin(self, headers: dict[bytes, bytes]) -> KeyName | None:
        """Name of the admin key of a request; None if no admin keys are configured. Raises as ``client``."""
        if not self._admin:
            return None
        return _holder(self._admin, headers)

    @property
    def for_clients(self) -> bool:
        """True if clients need a key; their ``Authorization`` is then not forwarded."""
        return bool(self._client)

    @property
    def for_admins(self) -> bool:
        """True if admin keys are configured."""
        return bool(self._admin)

    def quota(self, name: KeyName) -> Quota:
        """Limits of a client key, and its use of them."""
        return self._quotas[name]

    def quotas(self) -> Mapping[KeyName, Quota]:
        """Those of all client keys, by name."""
        return self._quotas

    def tenant(self, name: str) -> Tenant | None:
        """The tenant of the client key with this name; None if there is none."""
        quota = self._quotas.get(KeyName(name))
        return None if quota is None else quota.tenant

    def read(self, settings: KeySettings) -> KeyLists:
        """Read the keys of other settings and check that they may replace the present ones.

        Raises:
            SettingsError: the file is invalid, or removes the last key of a side, which would open it.
        """
        try:
            lists = settings.lists()
        except ValueError as error:
            raise SettingsError(str(error)) from error
        for side, before, after in (("client", self._client, lists.client), ("admin", self._admin, lists.admin)):
            if before and not after:
                raise SettingsError(f"keys.{side}: a reload must not remove the last key: restart the proxy to do that")
        return lists

    def apply(self, lists: KeyLists) -> None:
        """Replace the keys by those that were read."""
        self._take(lists)
        log.info("keys: %d for clients, %d for admins", len(self._client), len(self._admin))

    def _take(self, lists: KeyLists) -> None:
        self.lists = lists
        """Effective keys of both sides, those of the file among them."""
        self._client = tuple((KeyName(key.name), bytes.fromhex(key.sha256)) for key in lists.client)
        self._admin = tuple((KeyName(key.name), bytes.fromhex(key.sha256)) for key in lists.admin)
        now_s, before = time.monotonic(), {**self._removed, **self._quotas}
        self._quotas = {}
        for key in lists.client:
            name = KeyName(key.name)
            quota = self._quotas[name] = before.get(name) or Quota(key, now_s)
            quota.apply(key, now_s)
        self._removed = {name: quota for name, quota in before.items() if name not in self._quotas and quota.in_flight}


def new_key() -> str:
    """Generate a random key with 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    """SHA-256 of a key in hex, which is stored. Unsalted and fast is right for random keys, wrong for passwords."""
    return hashlib.sha256(key.encode()).hexdigest()


def _holder(known: tuple[tuple[KeyName, bytes], ...], headers: dict[bytes, bytes]) -> KeyName:
    given = headers.get(b"authorization")
    if given is None:
        raise _refused("no API key: send it as 'Authorization: Bearer KEY'")
    if given[: len(_SCHEME)].lower() != _SCHEME:
        raise _refused("the Authorization header is not 'Bearer KEY'")
    return _holder_of(known, given[len(_SCHEME) :])


def _holder_of(known: tuple[tuple[KeyName, bytes], ...], key: bytes) -> KeyName:
    digest = hashlib.sha256(key.strip()).digest()
    holder: KeyName | None = None
    for name, expected in known:
        # No early exit: the duration must not depend on the position of the matching key.
        if hmac.compare_digest(digest, expected):
            holder = name
    if holder is None:
        raise _refused("unknown API key")
    return holder


def _refused(message: str) -> RequestError:
    return RequestError(401, message, code="invalid_api_key")
