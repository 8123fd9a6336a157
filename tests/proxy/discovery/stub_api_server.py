"""A stub of Kubernetes' API server for pods: list with pages, watch with bookmarks, 410 Gone, bearer tokens.

It follows the API concepts page of Kubernetes' documentation. ``real_api_server.py`` has the real one.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

from tests.proxy.discovery.cluster import Cluster, pod_of

TOKEN = "stub-token"
_PATH = "/api/v1/namespaces/{namespace}/pods"


class StubApiServer(Cluster):
    """Pods in memory. Each change has the next resource version; ``compact`` forgets the changes before now."""

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.token_file, self.ca_file = folder / "token", folder / "ca.crt"
        self.token_file.write_text(TOKEN)
        self._authority.cert_pem.write_to_path(str(self.ca_file))
        self._version = 100
        self._oldest = 100
        self._pods: dict[str, dict[str, Any]] = {}
        self._changes: list[tuple[int, dict[str, Any] | None, dict[str, Any] | None]] = []
        """Version, and the pod before and after it; None: there is none."""
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None
        self.page = 500
        self.bookmarks = True
        self.lists = 0
        self.watches: list[str] = []
        """Resource version of each watch that began."""
        self.allowed = self.watch_allowed = True
        self.expired = False
        """No watch can continue."""
        self.expires_watches_with_event = False
        """A watch that cannot continue gets 200 and an ERROR event, as from a server that notices late."""

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get(_PATH, self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        trust = self._authority.issue_cert("127.0.0.1")
        import ssl

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trust.configure_cert(context)
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=context)
        await site.start()
        assert site._server is not None
        self.port: int = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        self.url = f"https://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def put(self, name: str, ip: str, **other: Any) -> None:
        await self._change(name, pod_of(name, ip, **other))

    async def relabel(self, name: str, labels: dict[str, str]) -> None:
        pod = copy.deepcopy(self._pods[name])
        pod["metadata"]["labels"] = labels
        await self._change(name, pod)

    async def begin_deletion(self, name: str) -> None:
        pod = copy.deepcopy(self._pods[name])
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        await self._change(name, pod)

    async def delete(self, name: str) -> None:
        await self._change(name, None)

    async def restart(self) -> None:
        await self.stop()
        await self.start(self.port)

    async def compact(self) -> None:
        self._oldest = self._version  # watches in progress still get the changes before

    async def _change(self, name: str, pod: dict[str, Any] | None) -> None:
        async with self._changed:
            self._version += 1
            before = self._pods.pop(name, None)
            if pod is not None:
                pod["metadata"]["resourceVersion"] = str(self._version)
                self._pods[name] = pod
            self._changes.append((self._version, before, pod))
            self._changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return _status(401, "Unauthorized")
        if not self.allowed:
            return _status(403, 'pods is forbidden: cannot list resource "pods"')
        query = request.query
        if query.get("watch") == "1" and not self.watch_allowed:
            return _status(403, 'pods is forbidden: cannot watch resource "pods"')
        labels = dict(each.split("=", 1) for each in query["labelSelector"].split(","))
        if query.get("watch") == "1":
            return await self._watch(request, labels)
        self.lists += 1
        chosen = [pod for _, pod in sorted(self._pods.items()) if _selected(pod, labels)]
        offset = 0
        if "continue" in query:
            version, _, text = query["continue"].partition(":")
            if int(version) < self._oldest:
                return _status(410, "The provided continue parameter is too old")
            offset = int(text)
        size = min(int(query["limit"]), self.page)
        more = {"continue": f"{self._version}:{offset + size}"} if offset + size < len(chosen) else {}
        return web.json_response(
            {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self._version), **more},
                "items": chosen[offset : offset + size],
            }
        )

    async def _watch(self, request: web.Request, labels: dict[str, str]) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        self.watches.append(request.query["resourceVersion"])
        expired = self.expired or since < self._oldest
        if expired and not self.expires_watches_with_event:
            return _status(410, f"too old resource version: {since} ({self._oldest})")
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        if expired:
            await _send(answer, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"})
            return answer
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + int(request.query["timeoutSeconds"])
        while loop.time() < ends_s:
            following = [each for each in self._changes if each[0] > since]
            since = self._version
            for version, before, after in following:
                if (event := _event(version, before, after, labels)) is not None:
                    await _send(answer, *event)
            try:
                async with self._changed, asyncio.timeout(min(0.1, max(0.0, ends_s - loop.time()))):
                    await self._changed.wait()
            except TimeoutError:
                if self.bookmarks:
                    bookmark = {"kind": "Pod", "apiVersion": "v1", "metadata": {"resourceVersion": str(since)}}
                    await _send(answer, "BOOKMARK", bookmark)
        return answer


def _event(
    version: int, before: dict[str, Any] | None, after: dict[str, Any] | None, labels: dict[str, str]
) -> tuple[str, dict[str, Any]] | None:
    """The event of a watch with these labels: a pod that loses or gains them is deleted or added for it."""
    was, now = (pod is not None and _selected(pod, labels) for pod in (before, after))
    if now:
        assert after is not None
        return "MODIFIED" if was else "ADDED", after
    if was:
        assert before is not None
        return "DELETED", {**before, "metadata": {**before["metadata"], "resourceVersion": str(version)}}
    return None


async def _send(answer: web.StreamResponse, kind: str, thing: dict[str, Any]) -> None:
    await answer.write(json.dumps({"type": kind, "object": thing}).encode() + b"\n")


def _selected(pod: dict[str, Any], labels: dict[str, str]) -> bool:
    return labels.items() <= pod["metadata"]["labels"].items()


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "apiVersion": "v1", "code": code, "message": message}, status=code)


@asynccontextmanager
async def stub_api_server(folder: Path) -> AsyncIterator[StubApiServer]:
    """A server that answers while the context is open."""
    server = StubApiServer(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
