"""Route of an admin endpoint: what FastAPI would ignore in a request is refused, and a body needs no content type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel

from proxy.clip import clip
from proxy.errors import RequestError, encoding_error
from warmroute_yaml import problem_text


class AdminRoute(APIRoute):
    """Route that refuses query parameters it does not have, and reads every body as JSON.

    An ignored ``?dryrun=true`` is a real reload. ``curl -d`` sends JSON as a form, which FastAPI would leave unread;
    pages of other sites, which can send forms without asking, are refused by their Origin header.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Handler of a request, for FastAPI; raises RequestError (400, 415) for what it cannot read."""
        handle = super().get_route_handler()
        parameters = [parameter.alias for parameter in self.dependant.query_params]

        async def checked(request: Request) -> Response:
            _refuse_unknown(request, parameters)
            encoded = encoding_error(", ".join(request.headers.getlist("content-encoding")))
            if encoded is not None:
                raise encoded
            if self.body_field is None:
                return await handle(request)
            try:
                return await handle(_as_json(request))
            except RequestValidationError as error:
                known = _fields(self.body_field.field_info.annotation)
                raise RequestError(400, "; ".join(_sentence(each, known) for each in error.errors())) from error

        return checked


def _fields(body: Any) -> str:
    """Names of a body's fields; empty: it is not of a fixed form."""
    return ", ".join(body.model_fields) if isinstance(body, type) and issubclass(body, BaseModel) else ""


def _sentence(problem: Mapping[str, Any], fields: str) -> str:
    """A problem of validation in the words that settings have; of the body as a whole, in those of a client."""
    place = ".".join(map(str, problem["loc"]))
    having = f" with fields of {fields}" if fields else ""
    if problem["type"] == "json_invalid":
        return f"the body is not valid JSON: {problem['ctx']['error']}"
    if place == "body" and problem["type"] == "missing":
        return f"the body is missing: send a JSON object{having}"
    if place == "body" and problem["type"] in {"model_attributes_type", "dict_type"}:
        return f"the body must be a JSON object{having}"
    if problem["type"] == "extra_forbidden" and fields and len(problem["loc"]) == 2:
        return f"{clip(place, 200)}: unknown key; known: {fields}"
    return f"{clip(place, 200)}: {problem_text(problem)}"


def refuse_empty(wanted: BaseModel) -> None:
    """Refuse a body that changes nothing, which would be answered as if it had. Raises RequestError (400)."""
    fields = type(wanted).model_fields
    if all(getattr(wanted, name) in (None, {}) for name in fields):
        message = f"the body changes nothing: give at least one of {', '.join(fields)}"
        raise RequestError(400, message, code="nothing_to_change")


def _as_json(request: Request) -> Request:
    """The request with the content type of JSON, whatever it has."""
    headers = [each for each in request.scope["headers"] if each[0] != b"content-type"]
    return Request({**request.scope, "headers": [*headers, (b"content-type", b"application/json")]}, request.receive)


def _refuse_unknown(request: Request, known: Collection[str]) -> None:
    unknown = next((name for name in request.query_params if name not in known), None)
    if unknown is not None:
        has = f"known: {', '.join(known)}" if known else "it has none"
        raise RequestError(
            400,
            f"{request.method} {clip(request.url.path, 200)}: unknown query parameter {clip(unknown, 100)!r}; {has}",
            code="unknown_parameter",
            param=unknown,
        )
