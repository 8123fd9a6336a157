"""Headers sent to an engine: the allowed ones of the client's, and the engine's key instead of the client's."""

from __future__ import annotations

import re
import uuid

from proxy.access.keys import Keys
from proxy.settings import InstanceSettings, Settings

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# RFC 9110 5.5: visible characters, space, tab, and bytes above ASCII; in particular no line ends.
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class Forwarding:
    """Allow-list of headers: all others are not forwarded."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Apply another allow-list and other engine keys."""
        self._settings = settings
        self._names = tuple((name.encode("ascii"), name) for name in settings.forward_headers)

    def headers(self, client: dict[bytes, bytes], instance: InstanceSettings) -> dict[str, str]:
        """Headers for an engine: the allowed ones of the client's, and the engine's key.

        The client's ``Authorization`` is forwarded only if neither the proxy nor the engine has keys configured.

        Args:
            client: names in lower case to values.
            instance: the engine.
        """
        # A header named by Connection applies to this hop only (RFC 9110 7.6.1).
        hop = client.get(b"connection")
        own = () if hop is None or hop == b"keep-alive" else {name.strip().lower() for name in hop.split(b",")}
        forwarded = {
            text: client[name].decode("latin-1")
            for name, text in self._names
            if name in client and name not in own and _VALUE.fullmatch(client[name])
        }
        authorization = self.authorization(instance)
        if authorization is not None:
            forwarded["authorization"] = authorization
        elif not self._keys.for_clients:
            given = client.get(b"authorization")
            if given is not None and _VALUE.fullmatch(given):
                forwarded["authorization"] = given.decode("latin-1")
        return forwarded

    def authorization(self, instance: InstanceSettings) -> str | None:
        """``Authorization`` of the proxy's own requests to an engine; None if it has no key."""
        key = self._settings.engine_key_for(instance)
        return None if key is None else f"Bearer {key.get_secret_value()}"

    def replaces_authorization(self, instance: InstanceSettings) -> bool:
        """True if an engine never receives a client's ``Authorization``: a 401 is then not about the client's key."""
        return self._keys.for_clients or self.authorization(instance) is not None

    def probe_headers(self, instance: InstanceSettings) -> dict[str, str]:
        """Headers of the proxy's own requests to an engine."""
        authorization = self.authorization(instance)
        return {} if authorization is None else {"authorization": authorization}


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The client's ``x-request-id`` if it is short, printable ASCII without spaces, else a new one.

    It is written to logs, records, answers and engines' logs, so other characters are rejected.
    """
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{uuid.uuid4().hex}"
