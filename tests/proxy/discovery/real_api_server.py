"""Kubernetes' own API server over its own etcd, built by `make api-server`; both on loopback, without any node."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.integration.fleet import free_port
from tests.proxy.discovery.cluster import Cluster, pod_of

FOLDER = Path(__file__).parents[3] / ".api-server"
_PODS = "/api/v1/namespaces/default/pods"


def skip_unless_built() -> None:
    """Skip the test where the API server was not built."""
    if not (FOLDER / "kube-apiserver").exists() or not (FOLDER / "etcd").exists():
        pytest.skip("Kubernetes' API server is not built: make api-server")


class RealApiServer(Cluster):
    """The API server, with a token of an administrator in ``token_file``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.token_file, self.ca_file = folder / "token", folder / "ca.crt"
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.client: httpx.AsyncClient

    def start(self) -> None:
        folder = self._folder
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        certificate = authority.issue_cert("127.0.0.1", "kubernetes")
        certificate.cert_chain_pems[0].write_to_path(str(folder / "server.crt"))
        certificate.private_key_pem.write_to_path(str(folder / "server.key"))
        trustme.CA().private_key_pem.write_to_path(str(folder / "accounts.key"))
        self.token_file.write_text("admin-token")
        (folder / "tokens.csv").write_text('admin-token,admin,1,"system:masters"\n')
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._etcd_port, self._peer_port))
        self._start(
            "etcd",
            *(f"--data-dir={folder / 'etcd'}", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
            ),
        )
        self._start_api_server(client)

    def _start_api_server(self, client: str) -> None:
        folder = self._folder
        self._start(
            "kube-apiserver",
            *(f"--etcd-servers={client}", f"--secure-port={self._port}", "--bind-address=127.0.0.1"),
            *("--advertise-address=127.0.0.1", f"--cert-dir={folder / 'certificates'}"),
            *(f"--tls-cert-file={folder / 'server.crt'}", f"--tls-private-key-file={folder / 'server.key'}"),
            *(f"--token-auth-file={folder / 'tokens.csv'}", "--authorization-mode=RBAC"),
            *(f"--service-account-key-file={folder / 'accounts.key'}", "--service-cluster-ip-range=10.0.0.0/24"),
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            *("--service-account-issuer=https://kubernetes.default.svc", "--disable-admission-plugins=ServiceAccount"),
        )

    def _start(self, program: str, *flags: str) -> None:
        with (self._folder / f"{program}.log").open("wb") as log:
            self._processes.append(subprocess.Popen([FOLDER / program, *flags], stdout=log, stderr=log))

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(timeout=20)

    async def ready(self) -> None:
        for _ in range(600):
            for process in self._processes:
                assert process.poll() is None, (self._folder / "kube-apiserver.log").read_text()[-2000:]
            try:
                if (await self.client.get("/readyz")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)
        raise AssertionError((self._folder / "kube-apiserver.log").read_text()[-2000:])

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: str) -> dict[str, Any]:
        """A request of the administrator that must succeed."""
        answer = await self.client.request(method, path, json=body, params=query)
        assert answer.is_success, f"{method} {path}: {answer.text}"
        return answer.json()

    async def put(self, name: str, ip: str, **other: Any) -> None:
        pod = pod_of(name, ip, **other)
        status = pod.pop("status")
        if (await self.client.get(f"{_PODS}/{name}")).status_code == 404:
            await self.call("POST", _PODS, pod)
        patch = json.dumps({"status": status}).encode()
        headers = {"content-type": "application/merge-patch+json"}
        answer = await self.client.patch(f"{_PODS}/{name}/status", content=patch, headers=headers)
        assert answer.is_success, answer.text

    async def relabel(self, name: str, labels: dict[str, str]) -> None:
        patch = json.dumps([{"op": "replace", "path": "/metadata/labels", "value": labels}]).encode()
        headers = {"content-type": "application/json-patch+json"}
        answer = await self.client.patch(f"{_PODS}/{name}", content=patch, headers=headers)
        assert answer.is_success, answer.text

    async def begin_deletion(self, name: str) -> None:
        await self.call("DELETE", f"{_PODS}/{name}", gracePeriodSeconds="30")

    async def delete(self, name: str) -> None:
        await self.call("DELETE", f"{_PODS}/{name}", gracePeriodSeconds="0")

    async def restart(self) -> None:
        process = self._processes.pop()
        process.kill()
        process.wait(timeout=20)
        self._start_api_server(f"http://127.0.0.1:{self._etcd_port}")
        await self.ready()

    async def compact(self) -> None:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._etcd_port}", trust_env=False) as etcd:
            found = (await etcd.post("/v3/kv/range", json={"key": "Lw=="})).json()
            body = {"revision": found["header"]["revision"], "physical": True}
            answer = await etcd.post("/v3/kv/compaction", json=body)
            assert answer.is_success, answer.text


@asynccontextmanager
async def real_api_server(folder: Path) -> AsyncIterator[RealApiServer]:
    """A server that answers while the context is open; some 10 s on one core."""
    skip_unless_built()
    import ssl

    server = RealApiServer(folder)
    try:
        server.start()
        trust = ssl.create_default_context(cafile=str(server.ca_file))
        headers = {"authorization": "Bearer admin-token"}
        async with httpx.AsyncClient(
            base_url=server.url, verify=trust, headers=headers, timeout=30, trust_env=False
        ) as server.client:
            await server.ready()
            yield server
    finally:
        server.stop()
