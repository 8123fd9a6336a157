"""Routes of the client side that the proxy answers itself: models, version, load, ping."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from proxy.admin.anthropic_models import HEADER, anthropic_card, anthropic_page
from proxy.clip import clip
from proxy.core import Core
from proxy.errors import RequestError, dialect_of, method_error, no_instance_error
from proxy.fleet.reachability import list_refusal, outage
from proxy.paths import MODEL, OTHER_METHODS, methods_of, mistaken_path, no_response_action, not_served


def client_routes(core: Core) -> APIRouter:
    """Routes over one core."""
    routes = APIRouter()

    @routes.get("/v1/models/", include_in_schema=False)
    @routes.get("/v1/models", summary="Models, adapters and aliases that the fleet serves")
    async def models(request: Request) -> Response:
        cards = _cards(core)
        if not cards and (reason := outage(core.instances) or list_refusal(core.instances)):
            return _refusal(no_instance_error(core.settings.health.interval_s, reason), request)
        data = list(cards.values())
        if HEADER not in request.headers:
            return _json({"object": "list", "data": data})
        try:
            return _json(anthropic_page(data, request.query_params))
        except RequestError as error:
            return _refusal(error, request)

    @routes.get(MODEL, summary="One of the models, by its name or alias; the name may have slashes")
    async def model(model_id: str, request: Request) -> Response:
        cards = _cards(core)
        card = cards.get(model_id)
        if card is None and (aliased := cards.get(core.router.aliases.get(model_id) or "")) is not None:
            card = _alias_card(model_id, aliased)
        if card is not None:
            return _json(anthropic_card(card) if HEADER in request.headers else card)
        return _refusal(_no_model(core, model_id, any_known=bool(cards)), request)

    @routes.get("/version", summary="Version of warmroute, and those of the engines")
    async def versions() -> dict[str, Any]:
        return {"version": _version(), "server": "warmroute", "engines": await core.versions.read()}

    @routes.get("/load", summary="Requests that are being served")
    async def load() -> dict[str, int]:
        return {"server_load": core.breakdown.started - core.breakdown.finished}

    @routes.get("/ping", summary="Empty answer: 200 if an instance can be sent requests, else 503")
    async def ping() -> Response:
        return _ping(core)

    @routes.post("/ping", summary="Same as GET")
    async def posted_ping() -> Response:
        return _ping(core)

    return routes


def client_methods(core: Core, scope: Mapping[str, Any]) -> tuple[str, ...]:
    """Methods that the path of an ASGI scope has on the client side; empty for an unknown path."""
    return methods_of(scope["path"]) or (OTHER_METHODS if core.other_paths.entry(scope["raw_path"]) else ())


def unsupported(method: str, path: str, methods: tuple[str, ...]) -> RequestError:
    """Error for a path of the client side that is not served, or that has only other ``methods``."""
    if method in methods:
        message = f"{method} {clip(path, 200)}: write the path as it is, without percent-encoding"
        return RequestError(404, message, kind="not_found_error", code="unknown_path")
    if (lacking := no_response_action(path, method)) is not None:
        if method == "DELETE":
            return method_error(method, path, methods, lacking)
        message = f"{method} {clip(path, 200)}: {lacking}"
        return RequestError(404, message, kind="not_found_error", code="unknown_path")
    if methods:
        return method_error(method, path, methods)
    if (mistake := mistaken_path(clip(path, 200))) is not None:
        message = f"{method} {clip(path, 200)}: {mistake}"
        return RequestError(404, message, kind="not_found_error", code="unknown_path")
    return RequestError(
        404,
        f"{method} {clip(path, 200)}: {not_served()}",
        kind="not_found_error",
        code="unknown_path",
    )


def _json(content: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _refusal(error: RequestError, request: Request) -> Response:
    """The error in the shape of the client's API; the paths of models are the same in both."""
    path = "/v1/messages" if HEADER in request.headers else MODEL
    return Response(dialect_of(path).body(error), error.status, error.headers, "application/json")


def _ping(core: Core) -> Response:
    return Response(status_code=200 if core.instances.healthy() and not core.draining else 503)


def _version() -> str:
    try:
        return version("warmroute")
    except PackageNotFoundError:
        return "unknown"


def _no_model(core: Core, name: str, *, any_known: bool) -> RequestError:
    """Error for a name that is no model's; without ``any_known`` the fleet's, if it is the reason."""
    if not any_known and (reason := outage(core.instances) or list_refusal(core.instances)):
        return no_instance_error(core.settings.health.interval_s, reason)
    message = f"The model `{clip(name, 200)}` does not exist: GET /v1/models lists those that are served"
    return RequestError(404, message, kind="not_found_error", code="model_not_found", param="model")


def _cards(core: Core) -> dict[str, dict[str, Any]]:
    """One card for each name: the first instance's, with the shortest context length of all, then exact aliases'."""
    cards: dict[str, dict[str, Any]] = {}
    for instance in core.instances:
        for card in instance.cards:
            cards.setdefault(str(card["id"]), dict(card))
    for name, card in cards.items():
        if (length := core.context_tokens(name)) is not None:
            card["max_model_len"] = length
    for alias, model in core.router.aliases.exact.items():
        if model in cards:
            cards[alias] = _alias_card(alias, cards[model])
    return cards


def _alias_card(alias: str, card: dict[str, Any]) -> dict[str, Any]:
    """The card of a model under another name."""
    return {**card, "id": alias, "root": card.get("root") or card["id"]}
