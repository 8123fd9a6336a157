"""URLs of an endpoint and the model it serves, before anything is sent."""

from __future__ import annotations

import asyncio
import ssl

import aiohttp
import msgspec

from warmroute_tls import RENEW, TlsFiles, out_of_date

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
    http: aiohttp.ClientSession,
    endpoint: str,
    api_key: str | None,
    *,
    option: str = "--endpoint",
    tls: TlsFiles | None = None,
) -> str:
    """The first model the endpoint serves; ``option`` of the command named the endpoint.

    Args:
        http: sends the question.
        endpoint: its URL.
        api_key: sent as bearer token.
        option: of the command, which errors name.
        tls: certificates that the command was given; None: it takes none.

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
            if response.status in {401, 403}:
                advice = "give a key that it accepts (see --help)"
            if response.status != 200:
                raise EndpointError(f"{url} answered {response.status}; {advice}")
        models = msgspec.json.decode(answer, type=_Models).data
    except (TimeoutError, aiohttp.ClientError, OSError, msgspec.MsgspecError, ValueError) as error:
        if not url.lower().startswith("https://"):
            remedy = "if it serves HTTPS, begin its URL with https://" if _dropped(error) else advice
        else:
            remedy = advice if tls is None else _tls_remedy(error, tls) or advice
        raise EndpointError(f"{url}: {error or type(error).__name__}; {remedy}") from error
    if not models:
        raise EndpointError(f"{url} names no model; {advice}")
    return models[0].id


def _dropped(error: BaseException) -> bool:
    """True if the server accepted the connection and closed it without an answer."""
    lost = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    return lost and not isinstance(error, aiohttp.ClientConnectorError)


def _tls_remedy(error: BaseException, tls: TlsFiles) -> str | None:
    """Remedy for a connection over TLS that failed; None: it failed before TLS began."""
    if out_of_date(error):
        return RENEW
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "give the authority of its certificate with --ca-file, and a name that the certificate has"
    if isinstance(error, aiohttp.ClientConnectorSSLError) and "WRONG_VERSION_NUMBER" in str(error):
        return "if it serves plain HTTP, begin its URL with http://"
    # Without a client certificate that the server asks for, a handshake of TLS 1.3 has ended before the server refuses.
    # One of TLS 1.2 is cut off, which uvloop reports as a connection that could not be made and was reset.
    if isinstance(error, aiohttp.ClientConnectorError) and not isinstance(error, aiohttp.ClientConnectorSSLError):
        refused = isinstance(error.os_error, ConnectionResetError | ssl.SSLEOFError)
    else:
        refused = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    if refused:
        if tls.certificate is None:
            return "if it requires client certificates, give one with --cert-file and --cert-key-file"
        return "if it requires client certificates, --cert-file must be of an authority that it trusts, and valid"
    return None
