"""Headers sent to an engine: the client's without withheld ones, and the engine's key instead of the client's."""

from __future__ import annotations

import re
from os import urandom

from proxy.access.keys import Keys
from proxy.settings import InstanceSettings, Settings
from proxy.settings.security import ALL_HEADERS, NEVER_FORWARDED

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# RFC 9110 5.5: visible characters, space, tab, and bytes above ASCII; in particular no line ends.
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")

WITHHELD = frozenset(
    name.encode("ascii")
    for name in (
        *NEVER_FORWARDED,
        # Secrets and accounts at other parties.
        *("cookie2", "x-goog-api-key", "x-litellm-api-key", "ocp-apim-subscription-key"),
        *("openai-organization", "openai-project"),
        # Claims about the client's address and connection: uvicorn believes them from this machine.
        *("forwarded", "client-ip", "true-client-ip", "x-real-ip", "x-client-ip", "via", "from", "max-forwards"),
        # Other targets and methods than those of the request line.
        *("x-http-method", "x-http-method-override", "x-method-override", "x-original-url", "x-rewrite-url"),
        *("alt-used", "http2-settings", "content-location", "priority"),
        # Partial and conditional answers: the proxy reads whole ones.
        *("range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since", "if-range"),
        *("cache-control", "pragma", "expires", "date", "warning", "content-md5", "content-digest", "digest"),
        # About the browser or the library, on nearly every request, and of no use to an engine.
        *("user-agent", "accept", "accept-charset", "accept-language", "content-language", "dnt", "origin", "referer"),
        *("front-end-https", "upgrade-insecure-requests", "save-data"),
        *(f"x-stainless-{what}" for what in ("arch", "async", "lang", "os", "package-version", "retry-count")),
        *(f"x-stainless-{what}" for what in ("read-timeout", "runtime", "runtime-version", "timeout")),
        *("x-stainless-helper-method", "x-stainless-raw-response", "x-stainless-helper"),
    )
)
"""Headers that ``*`` does not forward."""
RANK_HEADER = "x-data-parallel-rank"
"""Chooses the data-parallel rank within an engine (vLLM)."""
WITHHELD_PREFIXES = (b"x-warmroute-", b"x-forwarded-", b"proxy-", b"sec-", b"cf-", b"access-control-")


class Forwarding:
    """Headers of clients that engines receive."""

    def __init__(self, settings: Settings, keys: Keys) -> None:
        self._keys = keys
        self.apply(settings)

    def apply(self, settings: Settings) -> None:
        """Apply another list of headers and other engine keys."""
        self._settings = settings
        named = [name for name in settings.forward_headers if name != ALL_HEADERS]
        self._names = tuple((name.encode("ascii"), name) for name in named)
        self._all = len(named) < len(settings.forward_headers)
        self._withheld = WITHHELD.difference(name for name, _ in self._names)
        self._named = frozenset(name for name, _ in self._names)

    def headers(self, client: dict[bytes, bytes], instance: InstanceSettings) -> dict[str, str]:
        """Headers for an engine: the forwarded ones of the client's, its data-parallel rank, and the engine's key.

        The client's ``Authorization`` is forwarded only if neither the proxy nor the engine has keys configured.

        Args:
            client: names in lower case to values.
            instance: the engine.
        """
        # A header named by Connection applies to this hop only (RFC 9110 7.6.1).
        hop = client.get(b"connection")
        own = () if hop is None or hop == b"keep-alive" else {name.strip().lower() for name in hop.split(b",")}
        if self._all:
            withheld, named = self._withheld, self._named
            forwarded = {
                name.decode("latin-1"): client[name].decode("latin-1")
                for name in client
                if name not in withheld
                and (name in named or not name.startswith(WITHHELD_PREFIXES))
                and name not in own
                and _VALUE.fullmatch(client[name])
            }
        else:
            forwarded = {
                text: client[name].decode("latin-1")
                for name, text in self._names
                if name in client and name not in own and _VALUE.fullmatch(client[name])
            }
        if instance.data_parallel_rank is not None:
            forwarded[RANK_HEADER] = str(instance.data_parallel_rank)
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


def is_value(value: bytes) -> bool:
    """True if a header may have this value."""
    return _VALUE.fullmatch(value) is not None


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The client's ``x-request-id`` if it is short, printable ASCII without spaces, else a new one.

    It is written to logs, records, answers and engines' logs, so other characters are rejected.
    """
    given = headers.get(b"x-request-id")
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return f"req-{urandom(16).hex()}"
