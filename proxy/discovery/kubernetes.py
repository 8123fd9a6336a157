"""Instances from Kubernetes: pods selected by label, listed once and then watched over the API server's HTTP.

The protocol is that of the API concepts page of Kubernetes' documentation ("Efficient detection of changes"): a list
gives a resource version, a watch continues from it, bookmarks advance it, and 410 Gone means that the server no longer
has the changes since then, so that the list is read again.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from proxy.discovery.pods import Pod, wanted_of
from proxy.discovery.source import DiscoveryError, Wanted, next_pause
from proxy.discovery.template import authority
from proxy.settings import DiscoverySettings, SettingsError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of a pod's token, its namespace and the API server's authority."""
PAGE = 500
"""Pods in one answer to a list."""
MAX_LINE_BYTES = 4 * 1024 * 1024
"""The API server refuses objects above 3 MiB."""
_PACE_S = 0.2
"""Shortest pause between two lists, and between two watches."""
_SHORT_S = 0.5
"""A watch that ends within this time, without any event, is followed by longer pauses: the server may end them all."""
_GONE = 410
_REMEDIES = {
    401: "the token is not accepted: discovery.kubernetes.token_file",
    403: "the service account needs get, list and watch on pods in this namespace",
    404: "check discovery.kubernetes.namespace and api_url",
}


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _PodList(msgspec.Struct):
    metadata: _ListMeta
    items: list[Pod] | None = None


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""
    reason: str = ""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


_LISTS = msgspec.json.Decoder(_PodList)
_EVENTS = msgspec.json.Decoder(_Event)
_PODS = msgspec.json.Decoder(Pod)
_STATUSES = msgspec.json.Decoder(_Status)


class _GoneError(Exception):
    """The server no longer has the changes since our resource version."""


class _Access(NamedTuple):
    """Address of the API server, and the credentials for it."""

    url: str
    token_file: Path | None
    ca_file: Path | None
    namespace: str


class PodInstances:
    """The instances that the selected pods of one namespace are."""

    def __init__(self, settings: DiscoverySettings) -> None:
        self._settings = settings
        self._access = _access(settings)
        self._pods: dict[str, Pod] = {}
        self._version = ""

    @property
    def origin(self) -> str:
        """Namespace and selector."""
        return f"Kubernetes, pods of {self._access.namespace} with {self._settings.kubernetes.selector}"

    async def sets(self) -> AsyncGenerator[Wanted, None]:
        """List, then watch for as long as the server has the changes, and so on.

        Raises:
            DiscoveryError: the API server cannot be reached, refuses, or does not follow the protocol.
        """
        now_s, pause_s = asyncio.get_running_loop().time, 0.0
        async with self._client() as client:
            listed = False
            while True:
                began_s, version = now_s(), self._version
                try:
                    if not listed:
                        await self._list(client)
                        listed, began_s, version = True, now_s(), self._version
                        yield wanted_of(self._pods.values(), self._settings.engine)
                    async with aclosing(self._watch(client)) as changes:
                        async for _ in changes:
                            yield wanted_of(self._pods.values(), self._settings.engine)
                except _GoneError:
                    listed = False
                except httpx.HTTPError as error:
                    raise DiscoveryError(f"{self._access.url}: {error or type(error).__name__}") from error
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise DiscoveryError(f"{self._access.url} did not answer as an API server: {error}") from error
                steady = self._version != version or now_s() - began_s > _SHORT_S
                pause_s = next_pause(pause_s, _PACE_S, self._settings.backoff_max_s, steady=steady)
                await asyncio.sleep(pause_s)

    async def _list(self, client: httpx.AsyncClient) -> None:
        """Read all pages. Raises _GoneError: the pages' common state has expired."""
        pods: dict[str, Pod] = {}
        following = ""
        while True:
            page = {"limit": str(PAGE), **({"continue": following} if following else {})}
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    answer = await client.get(self._path(), params=self._query(page), headers=self._headers())
            except TimeoutError as error:
                raise DiscoveryError(f"no list within {self._settings.timeout_s:g} s (discovery.timeout_s)") from error
            _check(answer.status_code, answer.content)
            found = _LISTS.decode(answer.content)
            pods |= {pod.metadata.name: pod for pod in found.items or ()}
            following = found.metadata.continue_
            if not following:
                self._pods, self._version = pods, found.metadata.resource_version
                return

    async def _watch(self, client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
        """Apply the events of one watch; yields after each piece of the answer that changed a pod.

        Raises:
            _GoneError: the watch cannot continue from our resource version.
        """
        length_s = max(1, round(self._settings.kubernetes.watch_s))
        patience_s = length_s + self._settings.timeout_s
        query = self._query(
            {
                "watch": "1",
                "allowWatchBookmarks": "true",
                "resourceVersion": self._version,
                "timeoutSeconds": str(length_s),
            }
        )
        ends_s = asyncio.get_running_loop().time() + patience_s
        timeout = httpx.Timeout(self._settings.timeout_s, read=patience_s)
        async with client.stream("GET", self._path(), params=query, headers=self._headers(), timeout=timeout) as answer:
            if answer.status_code != httpx.codes.OK:
                _check(answer.status_code, await answer.aread())
            rest = b""
            async for piece in answer.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    raise DiscoveryError(f"an event of more than {MAX_LINE_BYTES} bytes")
                # Not any(): every line must be applied.
                if True in [self._apply(line) for line in lines if line.strip()]:
                    yield
                if asyncio.get_running_loop().time() > ends_s:
                    return  # a server that does not keep to timeoutSeconds

    def _apply(self, line: bytes) -> bool:
        """Apply one event; returns true if a pod has changed."""
        event = _EVENTS.decode(line)
        if event.type == "ERROR":
            status = _STATUSES.decode(event.object)
            if status.code == _GONE:
                raise _GoneError
            raise DiscoveryError(f"the watch failed: {status.message or status.reason or status.code}")
        pod = _PODS.decode(event.object)
        self._version = pod.metadata.resource_version
        if event.type in {"ADDED", "MODIFIED"}:
            self._pods[pod.metadata.name] = pod
            return True
        if event.type == "DELETED":
            return self._pods.pop(pod.metadata.name, None) is not None
        return False  # a bookmark, or a type of a later version

    def _path(self) -> str:
        return f"/api/v1/namespaces/{self._access.namespace}/pods"

    def _query(self, query: dict[str, str]) -> dict[str, str]:
        assert self._settings.kubernetes.selector is not None
        return {"labelSelector": self._settings.kubernetes.selector, **query}

    def _headers(self) -> dict[str, str]:
        """Raises DiscoveryError: the token cannot be read. It is read each time, since tokens expire within an hour."""
        if self._access.token_file is None:
            return {}
        try:
            return {"authorization": f"Bearer {self._access.token_file.read_text().strip()}"}
        except OSError as error:
            raise DiscoveryError(f"the token cannot be read: {error}") from error

    def _client(self) -> httpx.AsyncClient:
        """Raises DiscoveryError: the authority cannot be read."""
        ca_file = self._access.ca_file
        try:
            trust = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        except OSError as error:
            raise DiscoveryError(f"discovery.kubernetes.ca_file {ca_file}: {error}") from error
        return httpx.AsyncClient(
            base_url=self._access.url, verify=trust, timeout=self._settings.timeout_s, trust_env=False
        )


def _access(settings: DiscoverySettings) -> _Access:
    """Raises SettingsError: this is no pod, and no API server is given."""
    wanted = settings.kubernetes
    if wanted.api_url is not None:
        return _Access(wanted.api_url.rstrip("/"), wanted.token_file, wanted.ca_file, wanted.namespace or "default")
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError("discovery.source kubernetes outside of a pod: give discovery.kubernetes.api_url")
    namespace = wanted.namespace
    if namespace is None:
        try:
            namespace = (ACCOUNT / "namespace").read_text().strip()
        except OSError as error:
            raise SettingsError(f"discovery.kubernetes.namespace is not given, and unknown: {error}") from error
    token_file, ca_file = wanted.token_file or ACCOUNT / "token", wanted.ca_file or ACCOUNT / "ca.crt"
    return _Access(f"https://{authority(host)}:{port}", token_file, ca_file, namespace)


def _check(status: int, content: bytes) -> None:
    """Raises _GoneError for 410, DiscoveryError for any other status but 200."""
    if status == httpx.codes.OK:
        return
    if status == _GONE:
        raise _GoneError
    try:
        message = _STATUSES.decode(content).message
    except msgspec.DecodeError:
        message = ""
    texts = (f"the API server answered {status}", message, _REMEDIES.get(status, ""))
    raise DiscoveryError("; ".join(text for text in texts if text))
