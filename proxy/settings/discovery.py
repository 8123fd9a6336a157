"""Settings of discovery: the origin of instances that come and go while the proxy serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from policies.types import Connector, Role
from proxy.settings.section import Seconds, Section

_SPECIFICATIONS = "static, file:PATH, dns:NAME:PORT, srv:NAME, kubernetes:SELECTOR or ray:FLEET"


class EngineTemplate(Section):
    """Keys of every engine for which the source gives no more than an address."""

    scheme: Literal["http", "https"] = Field(default="http", description="scheme of the engines' URLs")
    port: int | None = Field(
        default=None, ge=1, le=65535, description="port of the engines, where the source gives none"
    )
    role: Role = Field(default=Role.NONE, description="role of every engine, where the source gives none")
    connector: Connector = Field(default=Connector.MOONCAKE, description="KV connector of every engine")
    bootstrap_port: int | None = Field(
        default=None, ge=1, le=65535, description="port of the bootstrap servers; none: there are none"
    )
    events_port: int | None = Field(
        default=None, ge=1, le=65535, description="port of the engines' KV events; none: they are not followed"
    )
    events_replay_port: int | None = Field(
        default=None, ge=1, le=65535, description="port for replaying missed KV events; none: no replay"
    )
    data_parallel_size: int = Field(
        default=1, ge=1, le=1024, description="data-parallel ranks of every engine, where the source gives none"
    )
    priority_scheduling: bool = Field(
        default=False,
        description="every engine runs with --scheduling-policy priority, where the source does not say otherwise",
    )
    api_key_env: str | None = Field(
        default=None, description="environment variable with the engines' key; default: engine_key_env"
    )


class FileSource(Section):
    """A file with the fleet."""

    path: Path | None = Field(
        default=None,
        description="YAML or JSON file with entries as in instances, alone or below a key instances; replace it by "
        "renaming another file to it",
    )


class DnsSource(Section):
    """A name with one address, or one SRV record, for each engine."""

    name: str | None = Field(
        default=None, description="name to look up: that of a headless service, or with srv _PORT._tcp.NAME"
    )
    srv: bool = Field(default=False, description="look up SRV records (host and port) instead of A and AAAA records")
    servers: tuple[str, ...] = Field(
        default=(), description="name servers as ADDRESS or ADDRESS:PORT; none: those of this machine"
    )
    absent_s: float = Field(
        default=10.0,
        ge=0,
        description="time an engine must be missing from the answers before it is removed: answers of some servers "
        "have a part of the records only",
    )


class KubernetesSource(Section):
    """Pods selected by label, watched over the API server."""

    selector: str | None = Field(default=None, description="label selector of the engines' pods, such as app=engine")
    namespace: str | None = Field(default=None, description="namespace of the pods; none: the proxy's own")
    api_url: str | None = Field(
        default=None, description="URL of the API server; none: the cluster that the proxy runs in"
    )
    token_file: Path | None = Field(
        default=None,
        description="file with the bearer token, read for every request; none: the service account's, and with api_url "
        "no token",
    )
    ca_file: Path | None = Field(
        default=None,
        description="authority of the API server's certificate; none: the service account's, and with api_url those of "
        "this machine",
    )
    watch_s: Seconds = Field(
        default=60.0, description="length of one watch; a connection that died silently is noticed after it"
    )


class RaySource(Section):
    """The engines of a fleet that `warmroute up --on ray` started."""

    fleet: str | None = Field(default=None, description="name of the fleet; its actors are in the namespace warmroute")
    address: str = Field(default="auto", description="address of the Ray cluster")
    python: str | None = Field(
        default=None, description="interpreter that has Ray, which runs the reader; none: the proxy's own"
    )


class DiscoverySettings(Section):
    """Origin of the instances, besides those that ``instances`` lists."""

    source: Literal["static", "file", "dns", "kubernetes", "ray"] = Field(
        default="static", description="static (instances only), file, dns, kubernetes or ray"
    )
    interval_s: Seconds = Field(default=2.0, description="interval between two readings of a file, a name or Ray")
    timeout_s: Seconds = Field(default=5.0, description="bound on one reading")
    backoff_max_s: Seconds = Field(
        default=30.0, description="longest pause after failed readings; the first is 0.5 s, each next twice as long"
    )
    start_s: float = Field(
        default=10.0, ge=0, description="time the start waits for the first reading; then the proxy serves without it"
    )
    accept_empty: bool = Field(
        default=False, description="remove the last instances where the source has none; else they are kept"
    )
    grace_s: Seconds | None = Field(
        default=None, description="time the requests of a removed instance have to finish; none: grace_s of the proxy"
    )
    engine: EngineTemplate = Field(default_factory=EngineTemplate)
    file: FileSource = Field(default_factory=FileSource)
    dns: DnsSource = Field(default_factory=DnsSource)
    kubernetes: KubernetesSource = Field(default_factory=KubernetesSource)
    ray: RaySource = Field(default_factory=RaySource)

    @model_validator(mode="after")
    def _complete(self) -> DiscoverySettings:
        needed = {
            "file": ("file.path", self.file.path),
            "dns": ("dns.name", self.dns.name),
            "kubernetes": ("kubernetes.selector", self.kubernetes.selector),
            "ray": ("ray.fleet", self.ray.fleet),
        }
        key, value = needed.get(self.source, ("", "static"))
        if not value:
            raise ValueError(f"source {self.source} needs discovery.{key}")
        if self.source == "dns" and not self.dns.srv and self.engine.port is None:
            raise ValueError("addresses have no port: give discovery.engine.port, or look up SRV records with dns.srv")
        engine = self.engine
        sends = engine.role in {Role.KV_BOTH, Role.KV_PRODUCER} and engine.connector is Connector.MOONCAKE
        if sends and engine.bootstrap_port is None:
            raise ValueError(f"engine.role {engine.role} needs discovery.engine.bootstrap_port")
        if self.engine.events_replay_port is not None and self.engine.events_port is None:
            raise ValueError("engine.events_replay_port needs discovery.engine.events_port")
        return self


def discovery_of(specification: str) -> dict[str, Any]:
    """The section ``discovery`` for a flag such as ``file:fleet.yaml`` or ``dns:engines.internal:8000``.

    Raises:
        ValueError: it is of no known form.
    """
    source, _, rest = specification.partition(":")
    match source:
        case "static" if not rest:
            return {"source": "static"}
        case "file" if rest:
            return {"source": "file", "file": {"path": rest}}
        case "srv" if rest:
            return {"source": "dns", "dns": {"name": rest, "srv": True}}
        case "kubernetes" if rest:
            return {"source": "kubernetes", "kubernetes": {"selector": rest}}
        case "ray" if rest:
            return {"source": "ray", "ray": {"fleet": rest}}
        case "dns":
            name, _, port = rest.rpartition(":")
            if name and port.isdigit():
                return {"source": "dns", "dns": {"name": name}, "engine": {"port": int(port)}}
    raise ValueError(f"{specification!r}: give {_SPECIFICATIONS}")
