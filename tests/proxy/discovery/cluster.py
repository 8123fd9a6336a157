"""Shared by the tests of the Kubernetes source: a cluster's pods, behind a stub or a real API server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from proxy.settings import DiscoverySettings

LABELS = {"app": "engine", "release": "a"}
SELECTOR = "app=engine,release=a"


class Cluster(ABC):
    """Pods of the namespace ``default``."""

    url: str
    token_file: Path
    ca_file: Path

    @abstractmethod
    async def put(self, name: str, ip: str, **other: Any) -> None:
        """Create a running pod, or change it; ``other``: see ``pod_of``."""

    @abstractmethod
    async def relabel(self, name: str, labels: dict[str, str]) -> None:
        """Replace the labels of a pod."""

    @abstractmethod
    async def begin_deletion(self, name: str) -> None:
        """Delete with a grace period, in which the pod still runs."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Delete at once."""

    @abstractmethod
    async def restart(self) -> None:
        """End the API server without a word to its clients, and start it again with the same pods."""

    @abstractmethod
    async def compact(self) -> None:
        """Forget the changes before now: watches cannot begin before them."""

    def settings(self, engine: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
        """The section ``discovery`` for these pods; ``other`` belongs to ``kubernetes``."""
        return {
            "source": "kubernetes",
            "interval_s": 0.1,
            "backoff_max_s": 0.2,
            "engine": engine or {},
            "kubernetes": {
                "selector": SELECTOR,
                "api_url": self.url,
                "token_file": str(self.token_file),
                "ca_file": str(self.ca_file),
                **other,
            },
        }

    def model(self, engine: dict[str, Any] | None = None, **other: Any) -> DiscoverySettings:
        """The same, validated."""
        return DiscoverySettings.model_validate(self.settings(engine, **other))


def pod_of(
    name: str,
    ip: str,
    *,
    port: int | None = 8000,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    phase: str = "Running",
    node: str = "node-1",
) -> dict[str, Any]:
    """A pod with one container, as the API has it."""
    ports = [] if port is None else [{"name": "http", "containerPort": port}]
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {"name": name, "labels": labels or LABELS, "annotations": annotations or {}},
        "spec": {"nodeName": node, "containers": [{"name": "engine", "image": "engine", "ports": ports}]},
        "status": {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}]},
    }
