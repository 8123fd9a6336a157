"""Meaning of an engine's status for the instance that sent it."""

from __future__ import annotations

import msgspec

_NOT_IMPLEMENTED = 501
"""vLLM's answer to what the request asks for and the engine lacks: the endpoint, a ``tool_choice``, a kind of URL."""
_FAILED = 500
_CAUGHT = "internal_error"
_OWN_FAILURES = ("EngineCore", "Internal server error")
"""Beginnings of vLLM's messages about itself: its core has died, or a request ended with an error in it."""
_MAX_BYTES = 64 * 1024


class _Problem(msgspec.Struct):
    type: str
    message: str


class _MessagesError(msgspec.Struct):
    error: _Problem


_decode = msgspec.json.Decoder(_MessagesError).decode


def is_failure(status: int, content: bytes = b"") -> bool:
    """True if an engine has failed, so that another one is tried; False for a refusal: another would answer the same.

    Refusals are 4xx and 501, and vLLM 0.18's 500 to a request of the Messages API that it cannot serve (a prompt that
    is too long, an image for a model of text), for which the whole ``content`` of the answer is needed.
    """
    return status >= 500 and status != _NOT_IMPLEMENTED and not (status == _FAILED and _refuses_message(content))


def may_be_the_requests_fault(status: int, content: bytes, *, streamed: bool = False) -> bool:
    """True for a failure without vLLM's messages about itself: so it answers requests that its code does not expect.

    That is a 500, or of a ``streamed`` answer (status 200) an error at its beginning or an end before its first byte:
    there vLLM 0.18 closes a stream of the Responses API whose text format is a JSON schema.
    """
    if len(content) > _MAX_BYTES or any(message.encode() in content for message in _OWN_FAILURES):
        return False
    return status == _FAILED or (streamed and (not content or b'"error"' in content))


def _refuses_message(content: bytes) -> bool:
    if len(content) > _MAX_BYTES or _CAUGHT.encode() not in content:
        return False
    try:
        error = _decode(content).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return error.type == _CAUGHT and bool(error.message) and not error.message.startswith(_OWN_FAILURES)
