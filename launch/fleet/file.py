"""The fleet file: engines, peers and proxy, checked completely before anything starts."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from launch.fleet.checks import check_fleet, is_loopback
from launch.fleet.members import Member, expand
from launch.fleet.overrides import apply_environment, apply_overrides
from launch.fleet.sections import (
    GroupSettings,
    PeerSettings,
    Port,
    Seconds,
    Section,
    SimSettings,
    VllmSettings,
)
from launch.shipped import ShippedFileError, find_shipped
from policies.types import Role, Transport
from proxy.settings import OffloadSettings, Settings, SettingsError, load_settings

FLEETS = Path(__file__).resolve().parents[2] / "configs" / "fleets"
"""Folder of the shipped fleet files."""
_ANY_HOST = "0.0.0.0"


class FleetError(ValueError):
    """An unusable fleet file; the message names each key and its allowed values."""


class FleetFile(Section):
    """Engines of one kind on one host, peers elsewhere, and the proxy in front of them."""

    kind: Literal["sim", "vllm"] = Field(description="engine kind: sim (simulated engine) or vllm")
    count: int | None = Field(default=None, ge=1, le=64, description="number of instances (or `devices`, or `groups`)")
    devices: tuple[int | str, ...] | None = Field(
        default=None,
        description="GPUs of the instances, by index or UUID; default: 0, 1, ...; kind vllm on cuda only",
    )
    groups: tuple[GroupSettings, ...] = Field(
        default=(), description="several groups of instances instead of `count`, for example producers and consumers"
    )
    peers: tuple[PeerSettings, ...] = Field(
        default=(), description="instances that are already running, usually on other hosts; only the proxy uses them"
    )
    host: str = Field(default="127.0.0.1", description="address the engines and the proxy listen on")
    advertise_host: str | None = Field(
        default=None, description="address under which proxy and peers reach the engines; default: host"
    )
    base_port: Port = Field(default=8101, description="port of the first instance; instance i gets base_port + i")
    base_bootstrap_port: Port = Field(default=9101, description="bootstrap port of the first instance")
    base_events_port: Port = Field(default=5701, description="KV events port of the first instance (vllm)")
    base_events_replay_port: Port = Field(
        default=5801, description="KV events replay port of the first instance (vllm)"
    )
    base_master_port: Port = Field(default=29500, description="MASTER_PORT of the first instance (vllm)")
    role: Role = Field(default=Role.KV_BOTH, description="kv_both, kv_producer, kv_consumer or none")
    model: str = Field(
        default="warm-sim",
        min_length=1,
        description="sim: the name the engines serve; vllm: a model id or a folder, relative to the current folder or "
        "the project; --model, then WARMROUTE_ENGINE_MODEL override it",
    )
    served_model_name: str | None = Field(default=None, description="name clients use; default: model (vllm)")
    name_prefix: str = Field(default="inst-", description="instance i is called name_prefix + i")
    sim: SimSettings = Field(default_factory=SimSettings)
    vllm: VllmSettings = Field(default_factory=VllmSettings)
    env: dict[str, str] = Field(default_factory=dict, description="environment added to every engine's")
    proxy: dict[str, Any] = Field(
        default_factory=dict, description="settings of the proxy (see `warmroute serve`) without `instances`"
    )
    restart: Literal["never", "on_failure"] = Field(default="never", description="restart a process that exits")
    max_restarts: int = Field(default=3, ge=0, description="restarts of one process before the launcher gives up")
    max_recycles: int = Field(default=10, ge=0, description="most recycles of one engine requested by the proxy")
    restart_backoff_s: Seconds = Field(default=1.0, description="wait before the first restart; doubles each time")
    stagger_s: float = Field(default=0.0, ge=0, description="pause between two engine starts")
    ready_timeout_s: Seconds = Field(default=60.0, description="time limit for the fleet to become ready")
    stop_grace_s: Seconds = Field(default=5.0, description="time between SIGTERM and SIGKILL")

    @field_validator("proxy")
    @classmethod
    def _no_instances(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "instances" in value:
            raise ValueError("the launcher fills in `instances`; remove the key")
        return value

    @model_validator(mode="after")
    def _makes_sense(self) -> FleetFile:
        check_fleet(self)
        return self

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The instances the launcher starts."""
        return expand(self)

    def all_groups(self) -> tuple[GroupSettings, ...]:
        """The groups, or the one group that the keys at the top describe."""
        return self.groups or (GroupSettings(count=self.count, devices=self.devices),)

    @property
    def instances(self) -> int:
        """Number of instances the launcher starts."""
        return len(self.members)

    @property
    def has_bootstrap(self) -> bool:
        """True if any engine answers on a bootstrap port."""
        return any(member.bootstrap_port is not None for member in self.members)

    @property
    def reached_as(self) -> str:
        """Host part of the engines' URLs."""
        return self.advertise_host or self.host

    @property
    def request_model(self) -> str:
        """Model name to put into requests."""
        return self.served_model_name or self.model

    @property
    def proxy_port(self) -> int:
        """Port of the proxy."""
        port = self.proxy.get("port", Settings.model_fields["port"].default)
        return port if isinstance(port, int) else 0

    def name(self, index: int) -> str:
        """Name of instance ``index``."""
        return self.members[index].name

    def url(self, index: int) -> str:
        """Base URL of instance ``index``."""
        return f"http://{self.reached_as}:{self.members[index].port}"

    def bootstrap_url(self, index: int) -> str | None:
        """Bootstrap URL of instance ``index``; None without a bootstrap server."""
        port = self.members[index].bootstrap_port
        return None if port is None else f"http://{self.reached_as}:{port}"

    def events_url(self, index: int) -> str | None:
        """Address of the KV events of instance ``index``; None when it publishes none."""
        port = self.members[index].events_port
        return None if port is None else f"tcp://{self.reached_as}:{port}"

    def events_replay_url(self, index: int) -> str | None:
        """Replay address of the KV events of instance ``index``; None when it has none."""
        port = self.members[index].replay_port
        return None if port is None else f"tcp://{self.reached_as}:{port}"

    def proxy_url(self) -> str:
        """Base URL of the proxy."""
        host = self.proxy.get("host", self.host)
        return f"http://{'127.0.0.1' if host == _ANY_HOST else host}:{self.proxy_port}"

    @property
    def admin_port(self) -> int | None:
        """Port of the proxy's admin listener; None where the admin endpoints are on its main one.

        If the proxy listens beyond loopback and its settings do not mention the admin side, the admin listener is on
        loopback, one port up: beyond loopback the admin endpoints need keys, and the launcher uses them without.
        """
        admin = self.proxy.get("admin")
        if isinstance(admin, dict) and isinstance(admin.get("port"), int):
            return int(admin["port"])
        exposed = not is_loopback(str(self.proxy.get("host", self.host)))
        return self.proxy_port + 1 if exposed and not self.proxy.get("keys") else None

    def admin_url(self) -> str:
        """Base URL of the proxy's admin endpoints."""
        if self.admin_port is None:
            return self.proxy_url()
        admin = self.proxy.get("admin") or {}
        return f"http://{admin.get('host', '127.0.0.1')}:{self.admin_port}"

    @property
    def hold_s(self) -> float | None:
        """Seconds of the proxy's clock for which a P of this fleet holds KV nobody pulls; None without a P.

        The longest of all, where groups differ: room counted as taken for too long is safe.
        """
        senders = [member for member in self.members if member.role in {Role.KV_BOTH, Role.KV_PRODUCER}]
        if not senders:
            return None
        if self.kind == "vllm":
            return float(max(member.vllm.transfer.abort_timeout_s for member in senders))
        return (self.sim.abort_timeout_s or OffloadSettings().hold_s) / self.sim.time_scale

    def ports(self) -> list[tuple[int, str]]:
        """Every port the fleet listens on, with its owner: all instances' ports of one kind, then the next kind."""
        by_kind = zip(*(member.ports() for member in self.members), strict=True)
        wanted = [(port, owner) for kind in by_kind for port, owner in kind if port is not None]
        admin = [] if self.admin_port is None else [(self.admin_port, "the proxy's admin listener")]
        return [*wanted, (self.proxy_port, "the proxy"), *admin]

    def proxy_config(self, transports: Mapping[str, Transport] | None = None) -> dict[str, Any]:
        """The proxy's settings file: the inline settings plus this fleet's instances and its peers.

        Args:
            transports: KV transport of each instance (by name), as proven by its log; omitted where unknown.
        """
        instances: list[dict[str, Any]] = []
        for member in self.members:
            transport = (transports or {}).get(member.name)
            instances.append(
                {
                    "name": member.name,
                    "url": self.url(member.index),
                    "role": member.role.value,
                    "bootstrap_url": self.bootstrap_url(member.index),
                    "host": self.reached_as,
                    "transport": transport.value if transport else None,
                    "connector": "mooncake" if member.role is not Role.NONE else None,
                    "events_url": self.events_url(member.index),
                    "events_replay_url": self.events_replay_url(member.index),
                }
            )
        instances += [peer.model_dump(mode="json", exclude_defaults=True) for peer in self.peers]
        given = [{key: value for key, value in entry.items() if value is not None} for entry in instances]
        settings = {"host": self.host, **self.proxy, "port": self.proxy_port, "instances": given}
        if self.admin_port is not None:
            settings["admin"] = {**(self.proxy.get("admin") or {}), "port": self.admin_port}
        offload = self.proxy.get("offload") or {}
        if self.hold_s is not None and isinstance(offload, dict):
            settings["offload"] = {**offload, "hold_s": self.hold_s}
        return settings


def parse_fleet(values: Any, source: str = "fleet") -> FleetFile:
    """A checked fleet from plain values, the proxy's settings included.

    Raises:
        FleetError: unknown key, wrong value, or keys that contradict each other.
    """
    if not isinstance(values, dict):
        raise FleetError(f"{source}: expected keys such as `kind` and `count`, found {type(values).__name__}")
    try:
        fleet = FleetFile(**values)
    except ValidationError as error:
        raise FleetError(explain(error, source)) from error
    try:
        load_settings(**fleet.proxy_config())
    except SettingsError as error:
        raise FleetError(f"{source}: proxy {error}") from error
    return fleet


def load_fleet(path: Path, overrides: Sequence[str] = ()) -> FleetFile:
    """Read a fleet file; a bare name such as ``sim-4x`` means the shipped one.

    Args:
        path: the file.
        overrides: ``dotted.key=value`` with a YAML value, applied in order after the file and the environment.

    Raises:
        FleetError: no such file, not YAML, an override that cannot be applied, or `parse_fleet` refuses it.
    """
    path = find_fleet(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise FleetError(f"{path}: not YAML ({error})") from error
    if isinstance(values, dict):
        try:
            values = apply_overrides(apply_environment(values), overrides)
        except ValueError as error:
            raise FleetError(f"{path}: {error}") from error
    return parse_fleet(values, str(path))


def find_fleet(path: Path) -> Path:
    """The file meant by a path or by the name of a shipped fleet.

    Raises:
        FleetError: neither exists.
    """
    try:
        return find_shipped(path, FLEETS)
    except ShippedFileError as error:
        raise FleetError(f"no fleet file at {path}; shipped fleets: {error}") from error


def ports_in_use(fleet: FleetFile, *, with_proxy: bool = True) -> list[str]:
    """Sentences on the fleet's ports that are already in use; empty when all are free."""
    problems = []
    # vLLM's bootstrap and event sockets listen on all addresses, whatever the host.
    everywhere = {port for member in fleet.members for port in (member.events_port, member.replay_port)}
    if fleet.kind == "vllm":
        everywhere |= {member.bootstrap_port for member in fleet.members}
    for port, owner in fleet.ports():
        if not with_proxy and owner == "the proxy":
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_ANY_HOST if port in everywhere else fleet.host, port))
            except OSError as error:
                problems.append(f"port {port} for {owner} is not free ({error.strerror})")
    return problems


def explain(error: ValidationError, source: str) -> str:
    """A pydantic error as one line per problem, with the key and the remedy."""
    lines = [f"{source}: {error.error_count()} problem(s)"]
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        what = "unknown key; check the spelling" if problem["type"] == "extra_forbidden" else problem["msg"]
        lines.append(f"  {where}: {what.removeprefix('Value error, ')}")
    return "\n".join(lines)
