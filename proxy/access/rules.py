"""Who may call what: the sides of the API, and what stands before each."""

from __future__ import annotations

import logging
import time
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.access.keys import KeyName, Keys
from proxy.errors import RequestError
from proxy.settings import Settings
from proxy.settings.urls import is_loopback

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger("warmroute.access")


class Listener(StrEnum):
    """Where a request came in."""

    MAIN = "main"
    ADMIN = "admin"


class Side(StrEnum):
    """Whom a path is for."""

    OPEN = "open"
    """Everybody: liveness and readiness."""
    CLIENT = "client"
    """Holders of a client key, where there are any: the OpenAI API."""
    ADMIN = "admin"
    """Operators: all else."""


_OPEN = frozenset({"/health", "/ready"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# What is neither safe nor one of these changes the fleet, or is taken to: such a request always needs an admin key.
_CHANGES_NO_FLEET = frozenset({("PUT", "/policy"), ("POST", "/explain")})
_LOG_INTERVAL_S = 1.0


def side_of(path: str) -> Side:
    """Whom a path is for. What is not known is the operators'."""
    if path in _OPEN:
        return Side.OPEN
    return Side.CLIENT if path == "/v1" or path.startswith("/v1/") else Side.ADMIN


class Access:
    """The rules of one proxy. ``check`` stands before every request but the generation POSTs, which ask ``Keys``."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self._admin = settings.admin
        self._bound = {Listener.MAIN: settings.host, Listener.ADMIN: settings.admin.host}
        self._logged_s = float("-inf")

    def apply(self, settings: Settings) -> None:
        """Take over other rules; where the listeners are stays."""
        self._admin = settings.admin

    def check(self, listener: Listener, method: str, path: str, headers: dict[bytes, bytes]) -> KeyName | None:
        """Let a request through, with the name of the key it carries, if one was asked for.

        Args:
            listener: where it came in.
            method: in capitals.
            path: decoded, without the query.
            headers: names in lower case to values, as ASGI has them.

        Raises:
            RequestError: 401 (key), 403 (may not be done here) or 404 (not on this listener).
        """
        side = side_of(path)
        try:
            if side is Side.OPEN:
                return None
            if side is Side.CLIENT:
                if listener is Listener.ADMIN:
                    raise _elsewhere(method, path, "the OpenAI API is on the main listener (host, port)")
                return self._keys.client(headers)
            if listener is Listener.MAIN and self._admin.port is not None:
                raise _elsewhere(method, path, "admin endpoints are on the admin listener (admin.host, admin.port)")
            return self._check_admin(listener, method, path, headers)
        except RequestError as error:
            self._note(method, path, error)
            raise

    def _check_admin(self, listener: Listener, method: str, path: str, headers: dict[bytes, bytes]) -> KeyName | None:
        if path == "/metrics" and method in _SAFE and self._admin.open_metrics:
            return None
        if method not in _SAFE:
            self._refuse_foreign_origin(headers)
        if self._keys.for_admins:
            name = self._keys.admin(headers)
            if method not in _SAFE:
                log.info("%s %s by admin key %s", method, path, name)
            return name
        if not is_loopback(self._bound[listener]):
            where = "host" if listener is Listener.MAIN else "admin.host"
            raise _forbidden(
                f"admin endpoints need a key here, because {where} is not loopback: configure keys.admin "
                "(`warmroute key new`), or set admin.port to have them on a listener of their own"
            )
        self._refuse_foreign_host(listener, headers)
        if method not in _SAFE and (method, path) not in _CHANGES_NO_FLEET:
            raise _forbidden(
                f"{method} {path} changes the fleet, which always needs an admin key: configure keys.admin "
                "(`warmroute key new`) and send 'Authorization: Bearer KEY'"
            )
        return None

    def _refuse_foreign_host(self, listener: Listener, headers: dict[bytes, bytes]) -> None:
        """A page whose name was made to point here (DNS rebinding) still sends its own name."""
        host = _host_of(headers.get(b"host", b""))
        if not (is_loopback(host) or host == self._bound[listener].lower() or host in self._admin.allowed_hosts):
            raise _forbidden(
                f"the Host header names {host or 'nobody'!r}: without admin keys, admin endpoints answer to loopback "
                "names and admin.allowed_hosts only"
            )

    def _refuse_foreign_origin(self, headers: dict[bytes, bytes]) -> None:
        """Browsers say which page a request comes from; only one served from here may change anything."""
        origin = headers.get(b"origin")
        if origin is None:
            return
        text = origin.decode("latin-1").lower()
        try:
            parts = urlsplit(text)
            same = parts.netloc != "" and parts.netloc == headers.get(b"host", b"").decode("latin-1").lower()
            allowed = same or (parts.hostname or "") in self._admin.allowed_hosts
        except ValueError:
            allowed = False
        if not allowed:
            raise _forbidden("the Origin header names another site: admin requests must not come from foreign pages")

    def _note(self, method: str, path: str, error: RequestError) -> None:
        now_s = time.monotonic()
        # Whoever tries keys must not fill the disk.
        level = logging.WARNING if now_s - self._logged_s >= _LOG_INTERVAL_S else logging.DEBUG
        if level == logging.WARNING:
            self._logged_s = now_s
        log.log(level, "refused %s %s: %d %s", method, path[:200], error.status, error.message)


def admin_key_of(request: Request) -> KeyName:
    """Name of the admin key that let this request through; for routes that must never run without one.

    Raises:
        RequestError: 403, none did.
    """
    name: KeyName | None = getattr(request.state, "admin_key", None)
    if name is None:
        raise _forbidden("this needs an admin key: configure keys.admin (`warmroute key new`)")
    return name


def _host_of(value: bytes) -> str:
    """The host in a Host header, without port and brackets, in lower case; empty when it makes no sense."""
    try:
        return urlsplit("//" + value.decode("ascii")).hostname or ""
    except ValueError:
        return ""


def _elsewhere(method: str, path: str, where: str) -> RequestError:
    return RequestError(404, f"{method} {path}: not on this listener; {where}", code="wrong_listener")


def _forbidden(message: str) -> RequestError:
    return RequestError(403, message, kind="permission_error", code="admin_forbidden")
