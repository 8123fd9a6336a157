"""OpenAPI description of the endpoints of the engines, which are served outside of FastAPI.

Only the fields that routing reads are described; engines accept many more.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from proxy.paths import PASSED_ON

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
_LIST = {"type": "array", "minItems": 1, "items": {"type": "object"}}
_INPUT = {"anyOf": [_TEXT, _LIST]}
_RESPONSE_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 256}}
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
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_REFUSALS = {
    "400": "invalid body",
    "401": "no valid key",
    "404": "no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is compressed",
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
        "/v1/messages": {"post": _message("Answer a conversation (Anthropic's Messages API)")},
        "/v1/messages/count_tokens": {"post": _message("Count a conversation's tokens")},
        "/v1/responses": {"post": _operation("Create a response (OpenAI's Responses API)", "input", _INPUT)},
        "/v1/responses/{response_id}": {"get": _of_stored("Read a stored response")},
        "/v1/responses/{response_id}/cancel": {"post": _of_stored("Cancel a stored response that is in progress")},
        **{path: {"post": _passed_on()} for path in sorted(PASSED_ON)},
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
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": _answers(),
    }


def _message(summary: str) -> dict[str, Any]:
    return _operation(summary, "messages", _LIST) | {"responses": _answers(_ANTHROPIC_ERROR)}


def _of_stored(summary: str) -> dict[str, Any]:
    return {"summary": summary, "parameters": [_RESPONSE_ID], "responses": _answers()}


def _passed_on() -> dict[str, Any]:
    body = {"type": "object", "properties": {"model": _FIELDS["model"]}}
    kinds = {kind: {"schema": body} for kind in ("application/json", "multipart/form-data")}
    summary = "Passed on to the least loaded instance that serves the model"
    return {"summary": summary, "requestBody": {"required": True, "content": kinds}, "responses": _answers()}


def _answers(error: dict[str, Any] = _ERROR) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "200": {
            "description": "the engine's answer, whole or as server-sent events",
            "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
        }
    }
    for status, description in _REFUSALS.items():
        answers[status] = {"description": description, "content": {"application/json": {"schema": error}}}
    return answers
