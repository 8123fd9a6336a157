"""Read the conditions of a running proxy."""

from __future__ import annotations

import asyncio

import httpx
import msgspec

from launch.doctor.facts import ProxyCondition, ProxyConditions
from launch.fleet.file import FleetFile
from launch.run.proxy_access import ProxyAccess
from proxy.connecting import unreached_remedy
from warmroute_tls import NO_FILES, TlsFiles, tls_context

_TIMEOUT_S = 2.0


class _Answer(msgspec.Struct):
    conditions: list[ProxyCondition]


def ask_proxy(fleet: FleetFile | None, url: str | None, files: TlsFiles = NO_FILES) -> ProxyConditions | None:
    """Conditions of the proxy at ``url``, else of the fleet's proxy; None without either.

    Args:
        fleet: the fleet, or None.
        url: of a proxy, or None.
        files: certificates for TLS with the proxy at ``url``.
    """
    if url is None and fleet is None:
        return None
    return asyncio.run(_ask(fleet, url, files))


async def _ask(fleet: FleetFile | None, url: str | None, files: TlsFiles) -> ProxyConditions:
    if url is not None or fleet is None:
        client = httpx.AsyncClient(timeout=_TIMEOUT_S, trust_env=False, verify=tls_context(files))
        base = url or ""
    else:
        access = ProxyAccess(fleet)
        access.read_certificate()
        client, base = access.client(_TIMEOUT_S), fleet.proxy_url()
    async with client:
        try:
            answer = await client.get(f"{base.rstrip('/')}/ready?verbose")
            found = msgspec.json.decode(answer.content, type=_Answer)
        except httpx.HTTPError as error:
            return _unread(base, error, files, named=url is not None)
        except msgspec.MsgspecError:
            remedy = "is a warmroute proxy there? --proxy names it" if url is not None else None
            return ProxyConditions(url=base, error=f"answered {answer.status_code} without conditions", remedy=remedy)
    return ProxyConditions(url=base, conditions=found.conditions)


def _unread(base: str, error: httpx.HTTPError, files: TlsFiles, *, named: bool) -> ProxyConditions:
    """A proxy that cannot be asked, with a remedy where it was named or the error has the cause.

    That of a fleet which does not run yet is expected not to answer.
    """
    problem = f"does not answer ({type(error).__name__})"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        reason = str(error).partition("certificate verify failed: ")[2].partition(" (_ssl.c")[0]
        problem = f"has a certificate that is not trusted ({reason or error})"
    remedy = unreached_remedy(error, base, "--proxy", files)
    if remedy is None and named:
        remedy = "is the proxy running? --proxy names it"
    return ProxyConditions(url=base, error=problem, remedy=remedy)
