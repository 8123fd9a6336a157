"""Reasons why a probe cannot use an engine, in words, with the remedy."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx

from proxy.clip import clip
from proxy.fleet.instances import Instance, Instances
from proxy.settings.urls import host_and_port, is_loopback

_DEEPEST = 20
"""Bound on the errors looked at; httpx over anyio nests four."""
_OUT_OF_DATE = {9, 10}
"""OpenSSL's codes for a certificate that is not valid yet, and for one that has expired."""
_AFTER_HEALTH = ("/metrics", "/v1/models")
"""Paths of a probe for which its engine has answered another one before."""
_SHOWN_INSTANCES = 3
_LONGEST = 300
"""Characters of one instance's reason in an answer to a client."""


def diagnosis(error: BaseException, url: str, timeout_s: float, path: str = "/health") -> str:
    """Cause of a failed probe of an engine, and what to do about it.

    Args:
        error: as raised by the probe.
        url: the engine's base URL.
        timeout_s: bound on the probe, in seconds.
        path: path that was asked for last.
    """
    if isinstance(error, httpx.HTTPStatusError):
        return status_diagnosis(error.request.url.path, error.response.status_code, url)
    for cause in _causes(error):
        if isinstance(cause, socket.gaierror):
            host = urlsplit(url).hostname
            return f"unknown host {host!r} ({cause.strerror or cause}): check its spelling, or this machine's DNS"
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = cause.verify_message or cause
            if cause.verify_code in _OUT_OF_DATE:
                return f"its certificate is not accepted ({reason}): renew it, or correct this machine's clock"
            return (
                f"its certificate is not accepted ({reason}): use a name that is in it, and add its authority to the "
                "system's, or set SSL_CERT_FILE"
            )
        if isinstance(cause, ssl.SSLError):
            return f"no TLS on this port ({cause.reason or cause}): use http:// if the engine serves plain HTTP"
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        if path in _AFTER_HEALTH:
            return (
                f"GET /health was answered, but not GET {path} within {timeout_s:g} s (health.timeout_s): its API "
                "server is overloaded or stuck, see the engine's log"
            )
        return (
            f"no answer within {timeout_s:g} s (health.timeout_s): check host and port, firewalls, and that the engine "
            "is not stuck"
        )
    if any(isinstance(cause, ConnectionRefusedError) for cause in _causes(error)):
        remote = (
            "" if is_loopback(urlsplit(url).hostname or "") else ", and for other machines with --host 0.0.0.0 only"
        )
        return f"connection refused: is vLLM listening on {_place(url)}? It does once its model is loaded{remote}"
    if isinstance(error, httpx.RemoteProtocolError):
        secure = "; use https:// if the engine serves TLS" if url.startswith("http://") else ""
        return f"no HTTP answer ({error}): is another service on {_place(url)}?{secure}"
    if isinstance(error, httpx.ConnectError):
        return f"no connection ({error}): check host and port, and the route from this machine"
    return str(error) if type(error).__module__.startswith("proxy.") else repr(error)


def status_diagnosis(path: str, status: int, url: str) -> str:
    """Cause of an answer other than 2xx to the GET of ``path``, and what to do about it."""
    answered = f"GET {path} answered {status}"
    if status in {401, 403}:
        return (
            f"{answered}: the engine requires a key: set engine_key_env, or api_key_env of this instance, to the "
            "variable that has vLLM's --api-key"
        )
    if status == 404:
        base = urlsplit(url)
        prefix, _, last = base.path.rpartition("/")
        if last == "v1":
            return f"{answered}: write {base.scheme}://{base.netloc}{prefix}, without /v1: the proxy adds it"
        return f"{answered}: is this a vLLM server? Give its base URL, such as http://HOST:8000"
    if status == 400 and url.startswith("http://"):
        return f"{answered}: use https:// if the engine serves TLS"
    if 300 <= status < 400:
        return f"{answered}: redirects are not followed; give the address it redirects to"
    if status == 503:
        return f"{answered}: the engine starts, stops, or has failed: see its log"
    return f"{answered}: see the engine's log"


def outage(instances: Instances) -> str | None:
    """Reasons for which no instance can be sent requests, in one sentence; None if one can."""
    if instances.healthy():
        return None
    reasons = [f"{each.name}: {clip(_reason(each), _LONGEST)}" for each in instances]
    if not reasons:
        return "the fleet has no instance: add one to the settings, or with POST /instances"
    more = f"; and {len(reasons) - _SHOWN_INSTANCES} more" if len(reasons) > _SHOWN_INSTANCES else ""
    return f"no engine can be sent requests: {'; '.join(reasons[:_SHOWN_INSTANCES])}{more} (GET /instances)"


def list_refusal(instances: Instances) -> str | None:
    """Reason for which an instance does not list its models, with its name; None if none refuses to."""
    return next((f"{each.name}: {each.list_refused}" for each in instances if each.list_refused is not None), None)


def _reason(instance: Instance) -> str:
    if instance.draining:
        return "it is draining"
    if instance.diagnosis is not None:
        return instance.diagnosis
    if instance.up:
        return "its circuit breaker is open after failed requests"
    return "it has not answered enough probes yet"


def _place(url: str) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return host_and_port(host, port)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, those it was raised from, and the members of groups among them."""
    left = [error]
    for _ in range(_DEEPEST):
        if not left:
            return
        cause = left.pop(0)
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            left += cause.exceptions[:_DEEPEST]
        left += [each for each in (cause.__cause__ or cause.__context__,) if each is not None]
