"""Settings of one engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from policies.types import Connector, Role, Transport
from proxy.settings.environment import checked_secret, secret_from
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
    data_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="data-parallel ranks behind the URL (vLLM's --data-parallel-size); with more than one, each is an "
        "instance called NAME/RANK, and rank i publishes its events i ports above those given here",
    )
    data_parallel_rank: int | None = Field(
        default=None, ge=0, description="the only rank to use, with its own name and ports; none: all ranks"
    )
    priority_scheduling: bool = Field(
        default=False,
        description="the engine runs with --scheduling-policy priority: requests carry a priority, by which it orders "
        "waiting prompts",
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
        if {".", ".."}.intersection(value.split("/")):
            raise ValueError(f"{value!r}: clients leave out . and .. of a path such as /instances/NAME")
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
        rank = self.data_parallel_rank
        if rank is not None and (rank >= self.data_parallel_size or self.data_parallel_size == 1):
            raise ValueError(f"data_parallel_rank {rank} is none of the ranks of data_parallel_size: give both")
        name = self.name or self.url.split("://", 1)[1]
        if rank is not None and not name.endswith(f"/{rank}"):
            name = f"{name}/{rank}"
        object.__setattr__(self, "name", name)
        if not self.host:
            object.__setattr__(self, "host", urlsplit(self.url).hostname or self.url)
        sends = self.role in {Role.KV_BOTH, Role.KV_PRODUCER}
        if sends and self.connector is Connector.MOONCAKE and self.bootstrap_url is None:
            raise ValueError(f"instance {self.name!r} has role {self.role}: give its bootstrap_url, or role: none")
        if self.events_replay_url is not None and self.events_url is None:
            raise ValueError(f"instance {self.name!r} has an events_replay_url: give its events_url too")
        if self.api_key is not None and self.api_key_env is not None:
            raise ValueError(f"instance {self.name!r} has api_key and api_key_env: give one of them")
        if self.data_parallel_size > 1 and rank is None:
            ranks = self.ranks()
            if {each.events_url for each in ranks} & {each.events_replay_url for each in ranks} - {None}:
                raise ValueError(f"instance {self.name!r}: its ranks' ports for events and for replays overlap")
        self.own_key()
        return self

    @property
    def engine_name(self) -> str:
        """Name of the engine: that of the instance, or of all its ranks together."""
        rank = self.data_parallel_rank
        return self.name if rank is None else self.name.removesuffix(f"/{rank}")

    def ranks(self) -> tuple[InstanceSettings, ...]:
        """One instance for each data-parallel rank; itself if it has one rank, or is one.

        The ports of events are those that vLLM's publishers count up from rank 0's.
        """
        if self.data_parallel_size == 1 or self.data_parallel_rank is not None:
            return (self,)
        return tuple(
            self.model_copy(
                update={
                    "name": f"{self.name}/{rank}",
                    "data_parallel_rank": rank,
                    "events_url": _endpoint_of(self.events_url, rank, "events_url"),
                    "events_replay_url": _endpoint_of(self.events_replay_url, rank, "events_replay_url"),
                }
            )
            for rank in range(self.data_parallel_size)
        )

    def own_key(self) -> SecretStr | None:
        """The engine's own key, or None.

        Raises:
            ValueError: the environment variable named by ``api_key_env`` is not set.
        """
        return self.api_key if self.api_key_env is None else secret_from(self.api_key_env, "api_key_env")


def roles_permit_hand_offs(instances: Sequence[InstanceSettings]) -> bool:
    """True if one of these may hand KV over to another with the same connector; of one alone: to another like it."""
    for connector in Connector:
        roles = [each.role for each in instances if each.connector is connector and each.role is not Role.NONE]
        sends, receives = {*roles} - {Role.KV_CONSUMER}, {*roles} - {Role.KV_PRODUCER}
        if sends and receives and (len(roles) > 1 or len(instances) == 1):
            return True
    return False


def instance_of(specification: str) -> dict[str, str]:
    """One entry of ``instances`` for a flag such as ``http://h:8000`` or ``http://h:8000,data_parallel_size=2``.

    Raises:
        ValueError: what follows the URL are no pairs of a key and a value, or a key is unknown or given twice.
    """
    url, *pairs = (part.strip() for part in specification.split(","))
    entry = {"url": url}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if key == "api_key":
            raise ValueError("api_key: other users of this machine can read flags; give api_key_env")
        if not found or key not in InstanceSettings.model_fields:
            known = ", ".join(each for each in InstanceSettings.model_fields if each not in {"url", "api_key"})
            raise ValueError(
                f"{pair!r}: give KEY=VALUE after the URL's comma, KEY one of {known}; each engine has an --instance"
            )
        if key in entry:
            raise ValueError(f"{pair!r}: {key} is given twice")
        entry[key] = value
    return entry


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


class TakenAddresses:
    """Names and URLs of a fleet's instances. Ranks of one engine share its URL, and no other instance has its name."""

    def __init__(self, instances: Iterable[InstanceSettings] = ()) -> None:
        self._by_name: dict[str, InstanceSettings] = {}
        self._by_url: dict[str, list[InstanceSettings]] = {}
        for each in instances:
            self.add(each)

    def add(self, instance: InstanceSettings) -> None:
        """Add one instance, which should be free."""
        for name in (instance.name, instance.engine_name):
            self._by_name.setdefault(name, instance)
        self._by_url.setdefault(instance.url, []).append(instance)

    def holder(self, instance: InstanceSettings) -> tuple[Literal["name", "url"], InstanceSettings] | None:
        """The key that is taken, and the instance that has it; None if name and URL are free for this one."""
        rank = instance.data_parallel_rank
        if (holder := self._by_name.get(instance.name)) is not None:
            return "name", holder
        for other in self._by_url.get(instance.url, ()):
            if rank is None or other.data_parallel_rank in {None, rank}:
                return "url", other
        holder = self._by_name.get(instance.engine_name)
        siblings = holder is not None and holder.data_parallel_rank is not None and holder.url == instance.url
        return None if holder is None or siblings else ("name", holder)


def distinct_ranks(instances: Iterable[InstanceSettings]) -> tuple[InstanceSettings, ...]:
    """All ranks of all instances. Raises ValueError: two of them share a name or a URL."""
    taken = TakenAddresses()
    twice: dict[str, list[str]] = {"name": [], "url": []}
    ranks = [rank for each in instances for rank in each.ranks()]
    for each in ranks:
        if (found := taken.holder(each)) is not None:
            twice[found[0]].append(getattr(each, found[0]))
        else:
            taken.add(each)
    for what, values in twice.items():
        if values:
            raise ValueError(f"instances share the same {what}: {', '.join(sorted(set(values)))}")
    return tuple(ranks)


def _endpoint_of(url: str | None, rank: int, key: str) -> str | None:
    """The endpoint of a rank, given that of rank 0. Raises ValueError: it has no ports, or not as many."""
    if url is None:
        return None
    start, _, port = url.rpartition(":")
    if url.startswith("ipc://") or int(port) + rank > 65535:
        raise ValueError(f"{key} {url}: give the tcp endpoint of rank 0, whose port leaves room for the other ranks")
    return f"{start}:{int(port) + rank}"
