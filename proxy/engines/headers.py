"""Headers of an engine's answer that reach the client: all but those withheld here.

Withheld are hop-by-hop headers and those that the engine's ``Connection`` names, framing, what the proxy writes itself,
digests of a body that it may change, and what would have a browser act on the proxy's origin: cookies, redirects,
policies.
"""

from __future__ import annotations

import re

_WITHHELD = frozenset(
    (
        *(b"keep-alive", b"te", b"trailer", b"trailers", b"transfer-encoding", b"upgrade", b"content-length"),
        *(b"date", b"server", b"via", b"x-request-id", b"request-id", b"age"),
        *(b"content-digest", b"content-md5", b"digest", b"repr-digest", b"want-content-digest", b"want-repr-digest"),
        *(b"set-cookie", b"set-cookie2", b"location", b"content-location", b"refresh", b"link", b"clear-site-data"),
        *(b"alt-svc", b"strict-transport-security", b"public-key-pins", b"expect-ct", b"nel", b"report-to"),
        *(b"reporting-endpoints", b"service-worker-allowed", b"timing-allow-origin", b"origin-agent-cluster"),
        *(b"x-accel-redirect", b"x-sendfile"),
    )
)
_WITHHELD_PREFIXES = (b"proxy-", b"x-warmroute-", b"access-control-")
# RFC 9110 5.5, like `proxy.access.forwarding`; bounded, because an answer's head is kept until it is sent.
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]{1,4096}")
_MAX_HEADERS = 64

_DEFAULT_TYPE = "application/json"


class AnswerHeaders:
    """Headers of one answer as they arrive."""

    __slots__ = ("_hop", "_typed", "content_type", "encoded", "passed")

    content_type: str
    """The first of them: what comes before the engine may add another."""
    passed: list[tuple[bytes, bytes]]
    """Headers for the client, besides the content type: names in lower case."""
    encoded: bool
    """True if the body is compressed, although the proxy requested ``identity``."""
    _hop: frozenset[bytes]
    _typed: bool

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all headers: those of an interim answer (1xx) are not the answer's."""
        self.content_type = _DEFAULT_TYPE
        self._typed = False
        self.passed = []
        self.encoded = False
        self._hop = frozenset()

    def add(self, name: bytes, value: bytes) -> None:
        """Accept one header; ``name`` in lower case."""
        if name == b"content-type":
            if not self._typed and _VALUE.fullmatch(value):
                self.content_type = value.decode("latin-1")
                self._typed = True
        elif name == b"connection":
            self._hop |= {each.strip() for each in value.lower().split(b",")}
        elif (
            name not in _WITHHELD
            and not name.startswith(_WITHHELD_PREFIXES)
            and len(self.passed) < _MAX_HEADERS
            and _VALUE.fullmatch(value)
        ):
            self.passed.append((name, value))
            if name == b"content-encoding" and value.strip().lower() != b"identity":
                self.encoded = True

    def end(self) -> None:
        """Remove those that the engine declared to be about its connection."""
        if self._hop:
            self.passed = [header for header in self.passed if header[0] not in self._hop]
            self.encoded = self.encoded and b"content-encoding" not in self._hop
