"""Paths of the client side: those with full routing, and those passed on to the least loaded instance."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType

COUNT_TOKENS = "/v1/messages/count_tokens"
STORED = "/v1/responses/{response_id}"
CANCEL = "/v1/responses/{response_id}/cancel"
GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses")
"""POST requests that generate."""
HANDED_OFF = frozenset(("/v1/completions", "/v1/chat/completions"))
"""Those that take ``kv_transfer_params`` in every supported version of vLLM."""
PASSED_ON = frozenset(
    (
        *("/v1/embeddings", "/v2/embed", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"),
        *("/pooling", "/classify", "/tokenize", "/detokenize"),
        *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
        *("/v1/images/generations", "/v1/images/edits"),
        *("/v1/chat/completions/render", "/v1/completions/render"),
    )
)
"""POST requests that the least loaded instance answers."""
PING = "/ping"
DASHBOARD_PAGES = frozenset(("/ui", "/ui/", "/docs"))
DASHBOARD_FILES = "/ui/static/"
"""Pages of the admin side without any data, and the folder of their files."""
MODEL = "/v1/models/{model_id:path}"
READ = ("/v1/models", "/version", "/load")
"""GET requests that the proxy answers itself."""
CLIENT_PATHS = frozenset((*GENERATION_PATHS, COUNT_TOKENS, *PASSED_ON, *READ))
"""Paths without an id in them that clients may use."""

POST_PATHS = MappingProxyType({path.encode(): path for path in (*GENERATION_PATHS, COUNT_TOKENS, *sorted(PASSED_ON))})
"""Paths of POST requests, as in the request line."""

OTHER_METHODS = ("GET", "POST")
"""Methods of further paths that are passed on."""
_PROBES = frozenset(("/health", "/ready"))
OPEN_PATHS = _PROBES | {PING}
"""Paths that need no key: liveness and readiness."""
_STORED_PATHS = MappingProxyType(
    {
        b"GET": (re.compile(rb"/v1/responses/[^/]+"), STORED),
        b"POST": (re.compile(rb"/v1/responses/[^/]+/cancel"), CANCEL),
    }
)
_SLASHES = re.compile("/+")
_MODELS_BELOW = "/v1/models/"
_RESPONSE_ACTION = re.compile(r"/v1/responses/([^/]+)(/input_items)?")
_RESPONSE_ACTIONS = frozenset(("compact", "input_tokens"))
_RESPONSES_SERVED = "Served are POST /v1/responses, GET /v1/responses/ID and POST /v1/responses/ID/cancel"
_SEGMENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._~:@-]+")
_EVERYTHING_BELOW = "*"


def stored_path(path: bytes, method: bytes) -> str | None:
    """The pattern of a path that names a stored response, or None."""
    pattern, name = _STORED_PATHS.get(method, (None, None))
    return name if pattern is not None and pattern.fullmatch(path) else None


def methods_of(path: str) -> tuple[str, ...]:
    """Methods of a path that clients may use; empty for an unknown path."""
    if path in _PROBES:
        return ("GET", "HEAD")
    if path in READ:
        return ("GET",)
    if path == PING:
        return ("GET", "POST")
    if path in CLIENT_PATHS:
        return ("POST",)
    if path.startswith(_MODELS_BELOW) and path != _MODELS_BELOW:
        return ("GET",)
    encoded = path.encode("utf-8", "replace")
    return tuple(method.decode() for method in _STORED_PATHS if stored_path(encoded, method))


def no_response_action(path: str, method: str) -> str | None:
    """Explanation of a request of the Responses API that vLLM does not have; None for any other request."""
    match = _RESPONSE_ACTION.fullmatch(path)
    if match is None:
        return None
    name, below = match.groups()
    if below is None and method == "DELETE":
        return f"vLLM cannot delete a stored response, it keeps it until the engine ends. {_RESPONSES_SERVED}"
    if below is not None or (method == "POST" and name in _RESPONSE_ACTIONS):
        lacking = below or f"/{name}"
        return (
            f"vLLM does not have {lacking} of the Responses API. {_RESPONSES_SERVED}; pass_through.paths adds paths "
            "that other engines have"
        )
    return None


def mistaken_path(path: str) -> str | None:
    """Explanation of a client's path in other case, with ``/v1`` missing or twice, or with more slashes, else None."""
    if path in CLIENT_PATHS:
        return None
    plain = _SLASHES.sub("/", path).rstrip("/")
    if plain != path and (mistake := mistaken_path(plain)) is not None:
        return mistake
    below = plain.startswith("/v1/") and "//" not in path.strip("/")  # inside it, an id may be missing
    if plain != path and (plain.encode() in POST_PATHS or (below and methods_of(plain))):
        return f"the path here is {plain}, without doubled slashes or one at its end"
    lower = path.lower()
    if lower != path and (lower in CLIENT_PATHS or lower in OPEN_PATHS):
        return f"paths are case-sensitive, the one here is {lower}"
    if lower != path and first_part(path) == "v1" and not path.startswith("/v1/"):
        return "paths are case-sensitive, the API of the engines begins with /v1/"
    if f"/v1{path}" in CLIENT_PATHS or path.startswith("/models/"):
        return f"the path here is /v1{path}: the client's base URL lacks /v1 at its end"
    inner = path.removeprefix("/v1")
    if inner != path and (inner in CLIENT_PATHS or inner.startswith("/v1/models/")):
        return f"the path here is {inner}: the client adds /v1 itself, so its base URL must end before that"
    return None


NO_ADMIN_ENDPOINT = "no admin endpoint has the path: GET /docs lists them (see 'Endpoints' in docs/proxy.md)"


def not_served() -> str:
    """Explanation of a path that is none of the proxy's."""
    return (
        f"this proxy does not serve the path. It serves {', '.join(sorted(CLIENT_PATHS))}; "
        "pass_through.paths adds others below /v1/. See 'Endpoints' in docs/proxy.md"
    )


def first_part(path: str) -> str:
    """The first part of a path, in lower case; empty for the root."""
    return path.strip("/").partition("/")[0].lower()


class OtherPaths:
    """Allow-list of further paths below ``/v1/``: exact ones, and ``/v1/NAME/*`` for everything below one.

    Raises:
        ValueError: an entry has another form.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._exact: dict[str, str] = {}
        self._below: dict[str, str] = {}
        for entry in entries:
            head, version, *rest = entry.split("/")
            below = len(rest) > 1 and rest[-1] == _EVERYTHING_BELOW
            names = rest[:-1] if below else rest
            if head or version != "v1" or not names or not all(_SEGMENT.fullmatch(name) for name in names):
                raise ValueError(f"{entry!r}: give a path like /v1/NAME, or /v1/NAME/* for everything below it")
            if below:
                self._below[entry.removesuffix(_EVERYTHING_BELOW)] = entry
            else:
                self._exact[entry] = entry

    def entry(self, path: bytes) -> str | None:
        """The entry that allows a path of the request line, or None."""
        if not self._exact and not self._below:
            return None
        text = path.decode("latin-1")
        if (found := self._exact.get(text)) is not None:
            return found
        for start, entry in self._below.items():
            # Neither dots nor escapes: an engine's gateway could resolve them to another path.
            if text.startswith(start) and all(_SEGMENT.fullmatch(name) for name in text[len(start) :].split("/")):
                return entry
        return None
