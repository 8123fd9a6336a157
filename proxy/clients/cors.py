"""Cross-origin headers (Fetch standard) for pages of the allowed origins; none unless ``cors.allowed_origins`` is set.

Requests with cookies are not supported: the client side has none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from proxy.settings import CorsSettings

_ANY = "*"
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_VARY = (b"vary", b"origin")
_EXPOSED = (b"access-control-expose-headers", b"*")
_PREFLIGHT_S = b"600"


class Cors:
    """Allowed origins of one proxy."""

    enabled: bool
    """True if pages of some origin are allowed."""

    def __init__(self, settings: CorsSettings) -> None:
        self.apply(settings)

    def apply(self, settings: CorsSettings) -> None:
        """Apply other origins."""
        self._any = _ANY in settings.allowed_origins
        self._origins = frozenset(origin.encode("utf-8") for origin in settings.allowed_origins)
        self.enabled = bool(self._origins)

    def headers(self, request: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Headers to add to an answer.

        Args:
            request: headers of the request, names in lower case.
        """
        if not self.enabled:
            return []
        origin = request.get(b"origin")
        if self._any:
            return [] if origin is None else [(b"access-control-allow-origin", b"*"), _EXPOSED]
        if origin is None or origin.lower() not in self._origins:
            return [_VARY]
        return [(b"access-control-allow-origin", origin), _VARY, _EXPOSED]

    def preflight(self, request: Mapping[bytes, bytes], methods: Sequence[str]) -> list[tuple[bytes, bytes]]:
        """Headers of the answer to ``OPTIONS`` for a path that has ``methods``."""
        allowed = ", ".join((*methods, "OPTIONS")).encode()
        answer = [(b"allow", allowed), *self.headers(request)]
        if b"access-control-request-method" not in request or answer[-1] is not _EXPOSED:
            return answer
        answer += [(b"access-control-allow-methods", allowed), (b"access-control-max-age", _PREFLIGHT_S)]
        asked = request.get(b"access-control-request-headers", b"")
        if _NAMES.fullmatch(asked):
            answer.append((b"access-control-allow-headers", asked))
        return answer
