"""Meaning of an engine's status for the instance that sent it."""

from __future__ import annotations

_NOT_IMPLEMENTED = 501
"""vLLM's answer to what the request asks for and the engine lacks: the endpoint, a ``tool_choice``, a kind of URL."""


def is_failure(status: int) -> bool:
    """True if an engine has failed, so that another one is tried; False for 501: another would answer the same."""
    return status >= 500 and status != _NOT_IMPLEMENTED
