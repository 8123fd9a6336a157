"""Tenants: the one whose share a request uses, and the request's places in the limits of its key.

A request's tenant is its key. Where a trusted front door stands before the proxy, ``fairness.tenant_header`` names it.
"""

from __future__ import annotations

import re
import time

from policies.types import NO_TENANT, Tenant
from proxy.access.keys import KeyName, Keys
from proxy.access.quotas import Quota
from proxy.settings import FairnessSettings

_NAME = re.compile(rb"[A-Za-z0-9._@-]{1,64}")
"""The form of a key's name: tenants' names end up in logs, records and metrics."""


class Visit:
    """One request of a tenant, from its headers to its end; ``close`` returns its places in the key's limits."""

    __slots__ = ("_counted", "_prompt_tokens", "_quota", "_session", "_single", "allows_priority", "tenant")

    def __init__(self, tenant: Tenant, quota: Quota | None) -> None:
        self.tenant = tenant
        self.allows_priority = quota is not None and quota.allow_priority
        """True if the key permits the body field ``priority``."""
        self._quota = quota
        self._session = ""
        self._single = False
        self._counted = False
        self._prompt_tokens = 0

    def begin(self, session_id: str | None, request_id: str, prompt_tokens: int) -> None:
        """Count session and prompt; a request without a session is a session of its own until it ends.

        Raises:
            KeyLimitError: as many sessions of the key are active as permitted.
        """
        quota = self._quota
        if quota is None:
            return
        now_s = time.monotonic()
        self._prompt_tokens = prompt_tokens  # also if it is refused now: then nothing of it is counted at its end
        self._single = session_id is None
        # Separate names, so that no request id can be taken for a session.
        self._session = f"request {request_id}" if session_id is None else f"session {session_id}"
        self._counted = quota.begin(self._session, now_s)
        quota.spend(prompt_tokens, now_s)

    def close(self, tokens: int) -> None:
        """End the request, which had so many tokens, its prompt's among them; those counted before are taken off.

        An estimate of the prompt that was too high is given back.
        """
        quota = self._quota
        if quota is None:
            return
        now_s = time.monotonic()
        quota.leave()
        if self._counted:
            quota.end(self._session, now_s, keep=not self._single)
        if uncounted := tokens - self._prompt_tokens:
            quota.spend(uncounted, now_s)


_ANYBODY = Visit(NO_TENANT, None)
"""All requests without key and tenant: without a quota a visit keeps nothing."""


class Tenants:
    """Tenants of one proxy."""

    def __init__(self, settings: FairnessSettings, keys: Keys) -> None:
        self._keys = keys
        self.apply(settings)

    def apply(self, settings: FairnessSettings) -> None:
        """Apply another header; requests in flight keep their tenants."""
        header = settings.tenant_header
        self._header = None if header is None else header.lower().encode("ascii")

    def of_request(self, key: KeyName | None, headers: dict[bytes, bytes]) -> Tenant:
        """The tenant of a request.

        Args:
            key: as returned by ``Keys.client``.
            headers: names in lower case to values.
        """
        if key is None:
            return NO_TENANT if self._header is None else self._named(headers) or NO_TENANT
        quota = self._keys.quota(key)
        named = self._named(headers) if quota.names_tenant and self._header is not None else None
        return named or quota.tenant

    def enter(self, key: KeyName | None, tenant: Tenant) -> Visit:
        """Count a request of a key and of its tenant; ``Visit.close`` must follow.

        Raises:
            KeyLimitError: a limit of the key is reached; the request is not counted.
        """
        if key is None:
            return _ANYBODY if tenant is NO_TENANT else Visit(tenant, None)
        quota = self._keys.quota(key)
        quota.enter(time.monotonic())
        return Visit(tenant, quota)

    def of_name(self, name: str) -> Tenant:
        """The tenant with a name: that of the key of this name, if there is one."""
        return self._keys.tenant(name) or Tenant(name)

    def _named(self, headers: dict[bytes, bytes]) -> Tenant | None:
        """The tenant that a front door names; None: none, or not in the form of a name."""
        assert self._header is not None
        value = headers.get(self._header)
        return self.of_name(value.decode("ascii")) if value is not None and _NAME.fullmatch(value) else None
