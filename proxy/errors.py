"""Errors for clients, in the shape of the API that they speak: OpenAI's, its Responses, or Anthropic's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from proxy.clip import clip


class RequestError(Exception):
    """A request that cannot be served, with the status and message for the client, which is cut if it is long.

    ``headers`` are those that go with it: ``retry-after``, for a method that a path lacks ``allow``, and with a 401
    ``www-authenticate``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: Sequence[str] = (),
    ) -> None:
        message = clip(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param if param is None else clip(param)
        self.retry_after_s = retry_after_s
        self.headers = {} if retry_after_s is None else {"retry-after": str(retry_after_s)}
        if allow:
            self.headers["allow"] = ", ".join(allow)
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def body(self) -> bytes:
        """The error object as JSON."""
        return error_body(self.message, self.kind, self.code, self.param)


def method_error(method: str, path: str, methods: Sequence[str], why: str = "") -> RequestError:
    """Error for a known path that has only other ``methods``, or for another reason lacks this one."""
    message = f"{method} {clip(path, 200)}: " + (why or f"this path has {', '.join(methods)} only")
    return RequestError(405, message, code="method_not_allowed", allow=methods)


def draining_error() -> RequestError:
    """Error for requests that arrive while the proxy shuts down."""
    return RequestError(503, "the proxy is shutting down", kind="service_unavailable", code="draining", retry_after_s=1)


def encoding_error(content_encoding: str) -> RequestError | None:
    """Error for a body that is encoded, as compressed; None for one as it is.

    Args:
        content_encoding: value of the header ``Content-Encoding``; empty without one.
    """
    if all(each.strip().lower() in {"", "identity"} for each in content_encoding.split(",")):
        return None
    return RequestError(
        415,
        f"Content-Encoding: {clip(content_encoding, 100)}: compressed request bodies are not supported",
        code="encoding_unsupported",
    )


def no_instance_error(probed_every_s: float, outage: str | None = None) -> RequestError:
    """Error for requests that no instance may take now; one may be able to after the next probes.

    Args:
        probed_every_s: interval of the probes, in seconds.
        outage: reasons, if no instance at all can be sent requests.
    """
    return RequestError(
        503,
        outage or "no healthy instance serves the model: all that do are down or draining; see GET /instances",
        kind="service_unavailable",
        code="no_instance",
        retry_after_s=max(1, round(probed_every_s)),
    )


def out_of_sockets_error(message: str) -> RequestError:
    """Error for a request that could not be sent to any engine because the proxy cannot open connections."""
    return RequestError(503, message, kind="service_unavailable", code="out_of_sockets", retry_after_s=1)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` as JSON; a long message is cut."""
    return msgspec.json.encode({"error": {"message": clip(message), "type": kind, "param": param, "code": code}})


def stream_error_event(message: str, code: str) -> bytes:
    """The error object as a server-sent event, for a stream that breaks after it began."""
    return b"data: " + error_body(message, "upstream_error", code) + b"\n\n"


class ErrorDialect(NamedTuple):
    """Shape of one API's errors."""

    body: Callable[[RequestError], bytes]
    """JSON of an error answer."""
    event: Callable[[str, str, int], bytes]
    """(message, code, events before it) -> server-sent event that ends a stream which broke after it began."""


def dialect_of(path: str) -> ErrorDialect:
    """The dialect of a path's API; OpenAI's for unknown paths."""
    if path.startswith("/v1/messages"):
        return _ANTHROPIC
    return _RESPONSES if path.startswith("/v1/responses") else _OPENAI


_ANTHROPIC_TYPES = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)
"""Anthropic's error types by HTTP status; other 4xx are ``invalid_request_error``, other 5xx ``api_error``."""


def _anthropic_body(error: RequestError) -> bytes:
    kind = _ANTHROPIC_TYPES.get(error.status) or ("invalid_request_error" if error.status < 500 else "api_error")
    return _anthropic_error(error.message, kind)


def _anthropic_error(message: str, kind: str) -> bytes:
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": clip(message)}})


def _anthropic_event(message: str, _code: str, _events: int) -> bytes:
    return b"event: error\ndata: " + _anthropic_error(message, "api_error") + b"\n\n"


def _responses_event(message: str, code: str, events: int) -> bytes:
    # The fields of the API's error event; OpenAI's libraries raise an exception if there is an "error" beside them.
    message = clip(message)
    event = {
        "type": "error",
        "sequence_number": events,
        "code": code,
        "message": message,
        "param": None,
        "error": {"message": message, "type": "upstream_error", "param": None, "code": code},
    }
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


_OPENAI = ErrorDialect(RequestError.body, lambda message, code, _: stream_error_event(message, code))
_RESPONSES = ErrorDialect(RequestError.body, _responses_event)
_ANTHROPIC = ErrorDialect(_anthropic_body, _anthropic_event)


class AttemptFailedError(Exception):
    """One instance did not produce a first byte; another may be tried."""

    def __init__(
        self,
        instance: str,
        message: str,
        *,
        timed_out: bool = False,
        seen: bool = True,
        own: bool = False,
        refusal: RequestError | None = None,
    ) -> None:
        super().__init__(clip(message))
        self.instance = instance
        self.timed_out = timed_out
        self.seen = seen
        """False if no engine has worked on the request: its connection was refused, or it lacks the model."""
        self.refusal = refusal
        """Answer for the client if no other instance can be tried; None: 502 or 504."""
        self.own = own
        """True if the proxy itself is out of sockets."""
