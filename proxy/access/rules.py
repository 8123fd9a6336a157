"""Access rules: the sides of the API, and the checks before each."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.access.endpoints import Endpoints
from proxy.access.keys import KeyName, Keys
from proxy.clip import clip
from proxy.errors import RequestError, method_error
from proxy.logs import LimitedLog
from proxy.paths import (
    CLIENT_PATHS,
    DASHBOARD_FILES,
    DASHBOARD_PAGES,
    NO_ADMIN_ENDPOINT,
    OPEN_PATHS,
    mistaken_path,
    not_served,
)
from proxy.settings import Settings
from proxy.settings.urls import is_loopback

if TYPE_CHECKING:
    from starlette.requests import Request

log = logging.getLogger("warmroute.access")


class Listener(StrEnum):
    """The listener a request came in on."""

    MAIN = "main"
    ADMIN = "admin"


class Side(StrEnum):
    """Group of callers that a path is for."""

    OPEN = "open"
    """Everyone: liveness and readiness."""
    CLIENT = "client"
    """Holders of a client key, if any are configured: the API of the engines."""
    ADMIN = "admin"
    """Operators: everything else."""


_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
# Any other unsafe request is treated as changing the fleet and always needs an admin key.
_CHANGES_NO_FLEET = frozenset({("PUT", "/policy"), ("PUT", "/admission"), ("PUT", "/shadow"), ("POST", "/explain")})


def side_of(path: str) -> Side:
    """Side of a path; unknown paths belong to the operators."""
    if path in OPEN_PATHS:
        return Side.OPEN
    return Side.CLIENT if path == "/v1" or path.startswith("/v1/") or path in CLIENT_PATHS else Side.ADMIN


class Access:
    """Access rules of one proxy. ``check`` runs before every request except generation POSTs, which use ``Keys``."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self._admin = settings.admin
        self.endpoints = Endpoints()
        self._bound = {Listener.MAIN: settings.host, Listener.ADMIN: settings.admin.host}
        self.refusals = LimitedLog(log)
        """Guessing keys must not fill the disk."""

    def set_endpoints(self, registered: Iterable[tuple[str, Collection[str]]]) -> None:
        """Take all `Endpoints`; until then every path may be one."""
        self.endpoints = Endpoints(registered)

    def apply(self, settings: Settings) -> None:
        """Apply other rules; the listeners' addresses stay."""
        self._admin = settings.admin

    def check(
        self, listener: Listener, method: str, path: str, headers: dict[bytes, bytes], peer: str = "?"
    ) -> KeyName | None:
        """Allow a request or raise.

        Args:
            listener: the listener it came in on.
            method: in capitals.
            path: decoded, without the query.
            headers: names in lower case to values, as in ASGI.
            peer: address that it came from.

        Returns:
            The name of the key it carries, or None if no key is required.

        Raises:
            RequestError: 401 (key), 403 (not allowed here), 404 (not on this listener, or on none) or 405 (the method).
        """
        side = side_of(path)
        try:
            if path.startswith("//"):  # a base URL that ends with one: a mistake, not a matter of keys
                mistake = mistaken_path(clip(path, 200))
                message = f"{method} {clip(path, 200)}: {mistake or 'no path here begins with two slashes'}"
                raise RequestError(404, message, kind="not_found_error", code="unknown_path")
            if side is Side.ADMIN and (mistake := mistaken_path(clip(path, 200))) is not None:
                raise RequestError(
                    404, f"{method} {clip(path, 200)}: {mistake}", kind="not_found_error", code="unknown_path"
                )
            if side is Side.ADMIN and not self.endpoints.may_have(path):
                # Refused here, whatever the key: a path that is taken for unknown by mistake reaches no endpoint.
                message = f"{method} {clip(path, 200)}: {self._served(listener)}"
                raise RequestError(404, message, kind="not_found_error", code="unknown_path")
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
            self.refusals.warning(
                str(error.status), "refused %s %s from %s: %d %s", clip(method, 20), clip(path, 200), peer,
                error.status, clip(error.message, 300),
            )  # fmt: skip
            raise

    def _served(self, listener: Listener) -> str:
        """Explanation of a path that is none of the proxy's: the paths of this listener, or where to find them."""
        if listener is Listener.ADMIN:
            return f"{NO_ADMIN_ENDPOINT}; the OpenAI API is on the main listener (host, port)"
        return not_served() if self._admin.port is not None else f"{not_served()}; GET /docs lists the admin endpoints"

    def _check_admin(self, listener: Listener, method: str, path: str, headers: dict[bytes, bytes]) -> KeyName | None:
        if path == "/metrics" and method in _SAFE and self._admin.open_metrics:
            return None
        if method in _SAFE and (path in DASHBOARD_PAGES or path.startswith(DASHBOARD_FILES)):
            return None  # a browser sends no key with them, and they contain no data
        if method not in _SAFE:
            self._refuse_foreign_origin(headers)
        if self._keys.for_admins:
            name = self._keys.admin(headers)
            if method not in _SAFE:
                log.info("%s %s by admin key %s", clip(method, 20), clip(path, 200), name)
            return name
        if not is_loopback(self._bound[listener]):
            where = "host" if listener is Listener.MAIN else "admin.host"
            raise _forbidden(
                f"admin endpoints need a key here, because {where} is not loopback: configure keys.admin "
                "(`warmroute key new`), or set admin.port to give them their own listener"
            )
        self._refuse_foreign_host(listener, headers)
        if method not in _SAFE and (method, path) not in _CHANGES_NO_FLEET:
            methods = self.endpoints.methods(path)
            if methods and method not in methods:  # refused in any case: a key would not help
                raise method_error(method, path, methods)
            raise _forbidden(
                f"{method} {path} changes the fleet, which always needs an admin key: configure keys.admin "
                "(`warmroute key new`) and send 'Authorization: Bearer KEY'"
            )
        return None

    def _refuse_foreign_host(self, listener: Listener, headers: dict[bytes, bytes]) -> None:
        """Reject foreign Host headers: a page using DNS rebinding still sends its own host name."""
        host = _host_of(headers.get(b"host", b""))
        if not (is_loopback(host) or host == self._bound[listener].lower() or host in self._admin.allowed_hosts):
            raise _forbidden(
                f"the Host header names {host or 'nothing'!r}: without admin keys, admin endpoints accept only "
                "loopback names and admin.allowed_hosts"
            )

    def _refuse_foreign_origin(self, headers: dict[bytes, bytes]) -> None:
        """Reject foreign Origin headers: only pages served from here may change anything."""
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
            raise _forbidden("the Origin header names another site: admin requests must come from this one")


def admin_key_of(request: Request) -> KeyName:
    """Name of the admin key that authorized this request; for routes that always require one.

    Raises:
        RequestError: 403, no admin key.
    """
    name: KeyName | None = getattr(request.state, "admin_key", None)
    if name is None:
        raise _forbidden("this needs an admin key: configure keys.admin (`warmroute key new`)")
    return name


def _host_of(value: bytes) -> str:
    """Host of a Host header, without port and brackets, in lower case; empty if malformed."""
    try:
        return urlsplit("//" + value.decode("ascii")).hostname or ""
    except ValueError:
        return ""


def _elsewhere(method: str, path: str, where: str) -> RequestError:
    return RequestError(404, f"{method} {path}: not on this listener; {where}", code="wrong_listener")


def _forbidden(message: str) -> RequestError:
    return RequestError(403, message, kind="permission_error", code="admin_forbidden")
