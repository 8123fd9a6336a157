"""Settings of one engine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from policies.types import Connector, Role, Transport
from proxy.settings.secrets import checked_secret, secret_from
from proxy.settings.section import Section
from proxy.settings.urls import checked_endpoint, checked_url

_NAME = re.compile(r"[\x21-\x7e]{1,128}")


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
        default=None, description="KV transport of its connector, if proven: tcp, rdma, efa or nvlink"
    )
    events_url: str | None = Field(
        default=None, description="ZMQ endpoint of its KV events, such as tcp://127.0.0.1:5557; none: shadow index only"
    )
    events_replay_url: str | None = Field(
        default=None, description="ZMQ endpoint for replaying missed events; none: no replay"
    )

    api_key_env: str | None = Field(
        default=None, description="environment variable with this engine's key; default: engine_key_env"
    )
    api_key: SecretStr | None = Field(default=None, description="the key itself; api_key_env keeps it out of files")

    @model_validator(mode="before")
    @classmethod
    def _url_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"url": value}
        if not isinstance(value, Mapping | InstanceSettings):
            raise ValueError("give the engine's URL, such as http://127.0.0.1:8000, or {url: http://127.0.0.1:8000}")
        return value

    @field_validator("name")
    @classmethod
    def _fits_into_headers(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError(f"{value!r}: a name is up to 128 printable ASCII characters without spaces")
        return value

    @field_validator("url", "bootstrap_url")
    @classmethod
    def _plain_url(cls, value: str | None) -> str | None:
        return None if value is None else checked_url(value)

    @field_validator("events_url", "events_replay_url")
    @classmethod
    def _zmq_endpoint(cls, value: str | None) -> str | None:
        return None if value is None else checked_endpoint(value)

    @field_validator("api_key")
    @classmethod
    def _plain_secret(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else checked_secret(value, "api_key")

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
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError(f"instance {self.name!r} has api_key and api_key_env: give one of them")
        self.own_key()
        return self

    def own_key(self) -> SecretStr | None:
        """The engine's own key, or None.

        Raises:
            ValueError: the environment variable named by ``api_key_env`` is not set.
        """
        return self.api_key if self.api_key_env is None else secret_from(self.api_key_env, "api_key_env")


def instances_of(value: Any) -> Any:
    """The list of instances in a setting: itself, JSON, or URLs separated by commas as in an environment variable.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, Mapping):
        raise ValueError("give a list of engines: each a URL, or url: with further keys")
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith(("[", "{")):
        return [url.strip() for url in value.split(",")]
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}; URLs separated by commas are accepted too") from error
    return found if isinstance(found, list) else [found]
