"""Instances from pods, as Kubernetes' API describes them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from policies.types import Role
from proxy.discovery.source import Wanted, distinct
from proxy.discovery.template import instance_at
from proxy.settings import EngineTemplate, InstanceSettings

ANNOTATION = "warmroute.io/"
_ROLE = f"{ANNOTATION}role"
_RANKS = f"{ANNOTATION}data-parallel-size"
_ORDERED = f"{ANNOTATION}priority-scheduling"
_PORTS = ("port", "bootstrap-port", "events-port", "events-replay-port")
_ENDED = frozenset({"Succeeded", "Failed"})
_PORT_NAMES = ("http", "api")


class Metadata(msgspec.Struct, rename="camel"):
    """The part of a pod's metadata that discovery reads."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] | None = None


class ContainerPort(msgspec.Struct, rename="camel"):
    """A port that a container declares."""

    container_port: int
    name: str = ""


class Container(msgspec.Struct):
    """A container."""

    ports: list[ContainerPort] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    """Node and containers."""

    node_name: str = ""
    containers: list[Container] = []


class PodStatus(msgspec.Struct):
    """Phase and address."""

    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(msgspec.Struct):
    """A pod; further fields of the API's answer are skipped."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)


def wanted_of(pods: Iterable[Pod], template: EngineTemplate) -> Wanted:
    """The set of instances that these pods are.

    A pod counts from the moment it has an address until its deletion begins, ready or not: the proxy's own probes
    decide on requests, so that a pod that fails one readiness probe keeps its place in the index. A pod in deletion
    drains.
    """
    instances, problems = [], []
    for pod in sorted(pods, key=lambda each: each.metadata.name):
        if not _serves(pod):
            continue
        try:
            instances.append(_instance(pod, template))
        except ValueError as error:
            problems.append(f"pod {pod.metadata.name}: {error}")
    return distinct(instances, problems)


def _serves(pod: Pod) -> bool:
    return bool(pod.status.pod_ip) and pod.metadata.deletion_timestamp is None and pod.status.phase not in _ENDED


def _instance(pod: Pod, template: EngineTemplate) -> InstanceSettings:
    """Raises ValueError: an annotation is invalid, or no port is known."""
    notes = pod.metadata.annotations or {}
    port, bootstrap_port, events_port, replay_port = (_port(notes, key) for key in _PORTS)
    role = notes.get(_ROLE, template.role)
    if role not in set(Role):
        raise ValueError(f"annotation {_ROLE}: {role!r} is none of {', '.join(Role)}")
    return instance_at(
        template,
        pod.status.pod_ip,
        port or template.port or _declared_port(pod),
        pod.metadata.name,
        role=Role(role),
        host=pod.spec.node_name,
        bootstrap_port=bootstrap_port,
        events_port=events_port,
        events_replay_port=replay_port,
        data_parallel_size=_size(notes, template),
        priority_scheduling=_ordered(notes, template),
    )


def _port(notes: dict[str, str], key: str) -> int | None:
    text = notes.get(ANNOTATION + key)
    if text is None:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"annotation {ANNOTATION}{key}: {text!r} is no port")
    return int(text)


def _size(notes: dict[str, str], template: EngineTemplate) -> int:
    text = notes.get(_RANKS, str(template.data_parallel_size))
    if not text.isdigit():
        raise ValueError(f"annotation {_RANKS}: {text!r} is no number of ranks")
    return int(text)


def _ordered(notes: dict[str, str], template: EngineTemplate) -> bool:
    text = notes.get(_ORDERED, str(template.priority_scheduling).lower())
    if text not in {"true", "false"}:
        raise ValueError(f"annotation {_ORDERED}: {text!r} is neither true nor false")
    return text == "true"


def _declared_port(pod: Pod) -> int | None:
    """The container port called http or api, else the only one, else None."""
    ports = [port for container in pod.spec.containers for port in container.ports or ()]
    named = [port.container_port for port in ports if port.name in _PORT_NAMES]
    return named[0] if named else ports[0].container_port if len(ports) == 1 else None
