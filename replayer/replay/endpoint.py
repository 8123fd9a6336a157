"""URLs of an endpoint and the model it serves, before anything is sent."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec

CONTROL_TIMEOUT_S = 10.0


class EndpointError(Exception):
    """The endpoint cannot be used; the message names the URL and the remedy."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


def base_url(endpoint: str) -> str:
    """The endpoint up to and including ``/v1``."""
    trimmed = endpoint.rstrip("/")
    return trimmed if trimmed.endswith("/v1") else trimmed + "/v1"


def check_endpoint(endpoint: str, *, option: str = "--endpoint") -> None:
    """Refuse a URL that no request can be sent to; ``option`` of the command named it.

    Raises:
        EndpointError: it has no scheme, or another than HTTP's.
    """
    scheme, separator, _ = endpoint.partition("://")
    if not separator:
        raise EndpointError(f"{option} {endpoint}: http:// is missing; give http://{endpoint}")
    if scheme.lower() not in {"http", "https"}:
        raise EndpointError(f"{option} {endpoint}: give a URL that begins with http:// or https://")


async def first_model(
    http: aiohttp.ClientSession, endpoint: str, api_key: str | None, *, option: str = "--endpoint"
) -> str:
    """The first model the endpoint serves; ``option`` of the command named the endpoint.

    Raises:
        EndpointError: the endpoint is no URL, cannot be reached, or names none.
    """
    check_endpoint(endpoint, option=option)
    url = base_url(endpoint) + "/models"
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    advice = f"start it, correct {option}, or give --model"
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S), http.get(url, headers=headers) as response:
            answer = await response.read()
            if response.status != 200:
                raise EndpointError(f"{url} answered {response.status}; {advice}")
        models = msgspec.json.decode(answer, type=_Models).data
    except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError) as error:
        raise EndpointError(f"{url}: {error or type(error).__name__}; {advice}") from error
    if not models:
        raise EndpointError(f"{url} names no model; {advice}")
    return models[0].id
