"""Read the conditions of a running proxy."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import msgspec

from launch.doctor.facts import ProxyCondition, ProxyConditions
from launch.fleet.file import FleetFile
from launch.run.proxy_access import ProxyAccess

_TIMEOUT_S = 2.0


class _Answer(msgspec.Struct):
    conditions: list[ProxyCondition]


def ask_proxy(
    fleet: FleetFile | None, url: str | None, context: ssl.SSLContext | None = None
) -> ProxyConditions | None:
    """Conditions of the proxy at ``url``, else of the fleet's proxy; None without either.

    Args:
        fleet: the fleet, or None.
        url: of a proxy, or None.
        context: authorities that the proxy at ``url`` is trusted by; None: the system's.
    """
    if url is None and fleet is None:
        return None
    return asyncio.run(_ask(fleet, url, context))


def trusting(ca_file: Path | None) -> ssl.SSLContext | None:
    """Trust in the authorities of a PEM file alone; None without a file. Raises ValueError: it cannot be used."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise ValueError(f"--ca-file {ca_file}: {error.strerror or error}") from error


def checked_url(url: str) -> str:
    """The URL of a proxy. Raises ValueError: it is none."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"--proxy {url}: {error}") from error
    if parsed.scheme not in {"http", "https"} or not parsed.host:
        raise ValueError(f"--proxy {url}: give its URL, such as http://127.0.0.1:9090")
    return url


async def _ask(fleet: FleetFile | None, url: str | None, context: ssl.SSLContext | None) -> ProxyConditions:
    if url is not None or fleet is None:
        client, base = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=context or True), url or ""
    else:
        access = ProxyAccess(fleet)
        access.read_certificate()
        client, base = access.client(_TIMEOUT_S), fleet.proxy_url()
    async with client:
        try:
            answer = await client.get(f"{base.rstrip('/')}/ready?verbose")
            found = msgspec.json.decode(answer.content, type=_Answer)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _unread(base, error)
        except msgspec.MsgspecError:
            return ProxyConditions(url=base, error=f"answered {answer.status_code} without conditions")
    return ProxyConditions(url=base, conditions=found.conditions)


def _unread(base: str, error: Exception) -> ProxyConditions:
    """A proxy that cannot be asked, with the remedy where the error names the cause."""
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        reason = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl.c")[0]
        return ProxyConditions(
            url=base,
            error=f"has a certificate that is not trusted ({reason or error})",
            remedy="give its authority with --ca-file, and in --proxy a name that the certificate has",
        )
    remedy = None
    if "WRONG_VERSION_NUMBER" in str(error):
        remedy = "if it serves plain HTTP, begin its URL with http://"
    elif isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        if base.startswith("http://"):
            remedy = "if it serves HTTPS, begin its URL with https://"
        else:
            remedy = "if it requires client certificates (tls.client_ca), read GET /ready?verbose with one"
    return ProxyConditions(url=base, error=f"does not answer ({type(error).__name__})", remedy=remedy)
