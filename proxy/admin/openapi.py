"""OpenAPI description of the generation endpoints, which are served outside of FastAPI.

Only the fields that routing reads are described; engines accept many more.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_FIELDS: dict[str, Any] = {
    "model": {"type": "string", "maxLength": 256},
    "stream": {"type": ["boolean", "null"], "default": False},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "n": {"type": ["integer", "null"], "minimum": 1},
    "prompt_cache_key": {"type": ["string", "null"], "description": "session id if no header gives it"},
    "user": {"type": ["string", "null"], "description": "session id if nothing else gives it"},
    "session_id": {"description": "session id if no header gives it, if it is a string"},
    "litellm_session_id": {"description": "session id, if it is a string"},
    "metadata": {"description": "its session_id, and the session's part of its user_id, are session ids"},
    "cache_salt": {"type": ["string", "null"]},
}
_TOKEN_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
_TEXT = {"type": "string", "minLength": 1}
_PROMPT = {
    "anyOf": [
        _TEXT,
        _TOKEN_IDS,
        {"type": "array", "minItems": 1, "items": _TEXT},
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
    ]
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}},
    },
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSALS = {
    "400": "invalid body",
    "401": "no valid key",
    "404": "no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "429": "the queue is full, the expected wait too long, or the key has too many requests running",
    "502": "all attempted instances failed",
    "503": "no instance, queue timeout, or the proxy is shutting down",
    "504": "no answer in time",
}


def generation_paths() -> dict[str, Any]:
    """``paths`` of an OpenAPI 3.1 document."""
    return {
        "/v1/completions": {"post": _operation("Complete a prompt", "prompt", _PROMPT)},
        "/v1/chat/completions": {"post": _operation("Answer a conversation", "messages", _MESSAGES)},
    }


def describe_generation(app: FastAPI) -> None:
    """Add the generation endpoints to the application's OpenAPI document."""
    of_routes = app.openapi

    def openapi() -> dict[str, Any]:
        document = of_routes()
        document["paths"] = {**generation_paths(), **document["paths"]}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _operation(summary: str, field: str, schema: dict[str, Any]) -> dict[str, Any]:
    body = {"type": "object", "required": ["model", field], "properties": {**_FIELDS, field: schema}}
    answers: dict[str, Any] = {
        "200": {
            "description": "the engine's answer, whole or as server-sent events",
            "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
        }
    }
    for status, description in _REFUSALS.items():
        answers[status] = {"description": description, "content": {"application/json": {"schema": _ERROR}}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": answers,
    }
