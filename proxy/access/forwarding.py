"""Which of a client's headers reach an engine, and what an engine is shown instead of the client's key."""

from __future__ import annotations

import re
import uuid

from proxy.access.keys import Keys
from proxy.settings import InstanceSettings, Settings

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# RFC 9110 5.5: visible characters, space, tab, and bytes above ASCII; above all no line end.
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")


class Forwarding:
    """An allow-list: a header that is not on it stays here."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Take over another list, or other keys of engines."""
        self._settings = settings
        self._names = tuple((name.encode("ascii"), name) for name in settings.forward_headers)

    def headers(self, client: dict[bytes, bytes], instance: InstanceSettings) -> dict[str, str]:
        """What an engine is sent of a client's headers, and the key it wants.

        The client's ``Authorization`` goes on only where neither the proxy nor the engine has keys of its own.

        Args:
            client: names in lower case to values.
            instance: the engine.
        """
        # A header that Connection names is meant for this hop only (RFC 9110 7.6.1).
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
        """``Authorization`` of the proxy's own requests to an engine; None where it wants no key."""
        key = self._settings.engine_key_for(instance)
        return None if key is None else f"Bearer {key.get_secret_value()}"

    def replaces_authorization(self, instance: InstanceSettings) -> bool:
        """Whether an engine never sees a client's ``Authorization``: if it refuses the key, it is not the client's."""
        return self._keys.for_clients or self.authorization(instance) is not None

    def probe_headers(self, instance: InstanceSettings) -> dict[str, str]:
        """Headers of the proxy's own requests to an engine."""
        authorization = self.authorization(instance)
        return {} if authorization is None else {"authorization": authorization}


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The client's ``x-request-id`` if it is short, printable ASCII without spaces, else a new one.

    It goes into logs, records, answers and engines' logs, so nothing else may be in it.
    """
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{uuid.uuid4().hex}"
