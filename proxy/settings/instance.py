"""The settings of one engine."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from policies.types import Connector, Role, Transport
from proxy.settings.section import Section


class InstanceSettings(Section):
    """One engine behind one URL."""

    url: str = Field(description="base URL of the engine's OpenAI server, such as http://127.0.0.1:8000")
    name: str = Field(default="", description="name in headers, metrics and records; default: host:port of the URL")
    bootstrap_url: str | None = Field(default=None, description="Mooncake bootstrap server of this engine (its /query)")
    role: Role = Field(
        default=Role.NONE, description="kv_both, kv_producer, kv_consumer, or none without a KV connector"
    )
    connector: Connector = Field(default=Connector.MOONCAKE, description="KV connector: mooncake or nixl")
    host: str = Field(default="", description="machine the engine runs on; default: the host of the URL")
    transport: Transport | None = Field(
        default=None, description="what its connector moves KV over, if proven: tcp, rdma, efa or nvlink"
    )
    events_url: str | None = Field(
        default=None, description="ZMQ endpoint of its KV events, such as tcp://127.0.0.1:5557; none: shadow index only"
    )
    events_replay_url: str | None = Field(
        default=None, description="ZMQ endpoint where it replays events that were missed, if it does"
    )

    @field_validator("url", "bootstrap_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")) or not value.split("://", 1)[1]:
            raise ValueError(f"{value!r} is not an http:// or https:// URL")
        return value.rstrip("/")

    @field_validator("events_url", "events_replay_url")
    @classmethod
    def _zmq_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, _, rest = value.partition("://")
        if scheme not in {"tcp", "ipc"} or not rest or (scheme == "tcp" and not rest.rpartition(":")[2].isdigit()):
            raise ValueError(f"{value!r} is not a ZMQ endpoint: give tcp://HOST:PORT or ipc://PATH")
        if "*" in rest:
            raise ValueError(f"{value!r} is what an engine binds: give the host to connect to in place of '*'")
        return value

    @model_validator(mode="after")
    def _has_name(self) -> InstanceSettings:
        if not self.name:
            object.__setattr__(self, "name", self.url.split("://", 1)[1])
        if not self.host:
            object.__setattr__(self, "host", urlsplit(self.url).hostname or self.url)
        sends = self.role in {Role.KV_BOTH, Role.KV_PRODUCER}
        if sends and self.connector is Connector.MOONCAKE and self.bootstrap_url is None:
            raise ValueError(f"instance {self.name!r} has role {self.role}: give its bootstrap_url, or role: none")
        if self.events_replay_url is not None and self.events_url is None:
            raise ValueError(f"instance {self.name!r} has an events_replay_url: give its events_url too")
        return self
